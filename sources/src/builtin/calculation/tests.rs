//! Tests of results and refusals, and that no expression takes long or exhausts the stack.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use toolcrib::domain::fault::SideEffect;
use toolcrib::{Code, Effect, Risk, Tool};

use super::{evaluate, tool};

fn result(expression: &str) -> Value {
    let answer = evaluate(expression).unwrap_or_else(|fault| panic!("{expression}: {fault}"));
    serde_json::to_value(answer.result).unwrap()
}

#[test]
fn arithmetic_is_exact() {
    let table = [
        ("2*21", json!(42)),
        ("2^53+2", json!(9_007_199_254_740_994_i64)),
        ("9223372036854775807", json!(i64::MAX)),
        ("-9223372036854775807 - 1", json!(i64::MIN)),
        ("3037000499*3037000499", json!(9_223_372_030_926_249_001_i64)),
        ("1+2*3", json!(7)),
        ("(1+2)*3", json!(9)),
        ("7*3/2", json!(10.5)),
        ("2*8/4", json!(4)),
        ("8/2*4", json!(16)),
        ("1/2", json!(0.5)),
        ("6/3", json!(2)),
        ("7//2", json!(3)),
        ("-7//2", json!(-4)),
        ("7.5//2", json!(3)),
        ("10%3", json!(1)),
        ("-7 % 3", json!(2)),
        ("7 % -3", json!(-2)),
        ("7.5 % 2", json!(1.5)),
        ("10-4-3", json!(3)),
        ("2^10", json!(1024)),
        ("2**10", json!(1024)),
        ("2^3^2", json!(512)),
        ("2**3**2", json!(512)),
        ("-2^2", json!(-4)),
        ("(-2)^2", json!(4)),
        ("2^-1", json!(0.5)),
        ("2*-3", json!(-6)),
        ("--3", json!(3)),
        ("+5", json!(5)),
        ("(-1)^1000000000001", json!(-1)),
        ("1^99999999999", json!(1)),
        ("0^0", json!(1)),
        (".5+.5", json!(1)),
        ("1e3", json!(1000)),
        ("1.5e-3", json!(0.0015)),
        ("0.1+0.2", json!(0.300_000_000_000_000_04)),
        ("-0.0", json!(0)),
        ("5!", json!(120)),
        ("3!^2", json!(36)),
        ("20!", json!(2_432_902_008_176_640_000_i64)),
        ("2 × 3 ÷ 4 − 1", json!(0.5)),
        ("2.0^64", json!(18_446_744_073_709_551_616.0)),
        ("(12.5 + 7.5) * 3 - 10 / 4", json!(57.5)),
    ];
    for (expression, expected) in table {
        assert_eq!(result(expression), expected, "{expression}");
    }
}

#[test]
fn functions_and_constants_are_evaluated() {
    let table = [
        ("sqrt(16)", json!(4)),
        ("sqrt(2)", json!(std::f64::consts::SQRT_2)),
        ("cbrt(27)", json!(3)),
        ("abs(-3)", json!(3)),
        ("abs(-2.5)", json!(2.5)),
        ("sign(-2.5)", json!(-1)),
        ("floor(-2.5)", json!(-3)),
        ("ceil(2.1)", json!(3)),
        ("round(2.5)", json!(3)),
        ("round(-2.5)", json!(-3)),
        ("round(199 * 1.19, 2)", json!(236.81)),
        ("trunc(-2.9)", json!(-2)),
        ("min(3, 1, 2)", json!(1)),
        ("max(3, 7)", json!(7)),
        ("max(3, 1.5, -2)", json!(3)),
        ("min(2^3, max(4, 5))", json!(5)),
        ("sum(1, 2, 3)", json!(6)),
        ("avg(1, 2)", json!(1.5)),
        ("ln(e)", json!(1)),
        ("log(1)", json!(0)),
        ("log(8, 2)", json!(3)),
        ("log10(1000)", json!(3)),
        ("log2(1024)", json!(10)),
        ("exp(0)", json!(1)),
        ("sin(0)", json!(0)),
        ("cos(PI)", json!(-1)),
        ("atan2(0, 1)", json!(0)),
        ("hypot(3, 4)", json!(5)),
        ("degrees(pi)", json!(180)),
        ("SQRT(9)", json!(3)),
        ("pow(2, 8)", json!(256)),
        ("mod(17, 5)", json!(2)),
        ("gcd(12, 18)", json!(6)),
        ("lcm(4, 6)", json!(12)),
        ("fact(5)", json!(120)),
        ("comb(49, 6)", json!(13_983_816)),
        ("π > 3", json!(true)),
        ("if(2 > 1, 10, 1/0)", json!(10)),
    ];
    for (expression, expected) in table {
        assert_eq!(result(expression), expected, "{expression}");
    }
}

#[test]
fn comparisons_and_logic_are_evaluated() {
    let table = [
        ("1 < 2", true),
        ("2 <= 1", false),
        ("1 == 1.0", true),
        ("1 != 1", false),
        ("3 > 2 && 2 > 1", true),
        ("3 > 2 && 2 > 3", false),
        ("1 > 2 || 3 > 2", true),
        ("true || false && false", true),
        ("!(1 > 2)", true),
        ("!true || true", true),
        ("not 1 > 2 and 2 > 1", true),
        ("True == true", true),
        ("false && 1/0 > 1", false),
        ("true || 1/0 > 1", true),
        ("1 + 1 == 2 && 17 % 5 == 2", true),
        ("9007199254740993 == 9007199254740992", false),
        ("5 != 3", true),
        ("2 ≤ 2", true),
    ];
    for (expression, expected) in table {
        assert_eq!(result(expression), json!(expected), "{expression}");
    }
}

#[test]
fn invalid_expressions_are_refused_with_a_reason() {
    let deep = format!("{}1{}", "(".repeat(101), ")".repeat(101));
    let signs = "-".repeat(2000) + "1";
    let powers = vec!["1"; 500].join("^");
    let table = [
        ("1/0", "division by zero"),
        ("1.0/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("0.0^-1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("5 // 0", "division by zero"),
        ("9**9**9", "9223372036854775807"),
        ("9.0**9**9", "too large"),
        ("9223372036854775807 + 1", "decimal point"),
        ("99999999999999999999", "decimal point"),
        ("-9223372036854775807 - 2", "decimal point"),
        ("(-9223372036854775807 - 1) // -1", "9223372036854775807"),
        ("(-9223372036854775807 - 1) / -1", "9223372036854775807"),
        ("abs(-9223372036854775807 - 1)", "9223372036854775807"),
        ("1e999", "too large"),
        ("exp(1000)", "too large"),
        ("sqrt(-1)", "not a real number"),
        ("(-8)^(1/3)", "not a real number"),
        ("ln(0)", "over 0"),
        ("log(8, 1)", "base"),
        ("asin(2)", "not a real number"),
        ("fact(1000000000)", "up to 20!"),
        ("21!", "up to 20!"),
        ("(0-1)!", "not defined"),
        ("2.5!", "whole"),
        ("comb(9223372036854775807, 4611686018427387903)", "largest whole"),
        ("lcm(9223372036854775807, 9223372036854775806)", "largest whole"),
        ("x + 1", "\"x\""),
        ("foo(2)", "\"foo\""),
        ("sqrt", "parentheses"),
        ("sqrt()", "at least one"),
        ("sqrt(1, 2)", "one value"),
        ("pow(2)", "two values"),
        ("round(1, 99)", "15"),
        ("if(1, 2, 3)", "true or false"),
        ("if(true, 2)", "three values"),
        ("__import__('os').system('ls')", "cannot be read"),
        ("().__class__.__bases__", "not part of a number"),
        ("()", "a number is missing"),
        ("math.sqrt(2)", "sqrt(2)"),
        ("a.b", "not part of a number"),
        ("١+٢", "digits 0 to 9"),
        ("１+１", "digits 0 to 9"),
        ("2pi", "2*pi"),
        ("2(3)", "operator is missing"),
        ("1,000", "1000"),
        ("1 = 1", "=="),
        ("1 & 2", "&&"),
        ("[1]", "( and )"),
        ("1 < 2 < 3", "&&"),
        ("true + 1", "not a number"),
        ("1 && 2", "true or false"),
        ("!1", "true or false"),
        ("-true", "number"),
        ("1 +", "missing"),
        ("* 2", "missing"),
        ("(1", "\")\" is missing"),
        ("1)", "without its"),
        ("", "empty"),
        ("   ", "empty"),
        ("1\0", "cannot be read"),
        ("open(\"/etc/passwd\")", "cannot be read"),
        (deep.as_str(), "deeper than 100"),
        (signs.as_str(), "deeper than 100"),
        (powers.as_str(), "deeper than 100"),
    ];
    for (expression, part) in table {
        let Err(fault) = evaluate(expression) else { panic!("{expression} was calculated") };
        assert!(fault.message.contains(part), "{expression}: {fault}");
        assert_eq!((fault.code, fault.side_effect), (Code::ValidationError, SideEffect::None));
        assert!(!fault.retryable, "{expression}");
        assert!(fault.message.len() < 700, "{expression}: {}", fault.message.len());
    }
}

#[test]
fn evaluation_time_is_bounded() {
    let megabyte = "1+".repeat(500_000) + "1";
    let parens = "(".repeat(1_000_000);
    let sums = vec!["1"; 2000].join("+");
    let nested = "sqrt(".repeat(90) + "1" + &")".repeat(90);
    let digits = "9".repeat(4096);
    let started = Instant::now();
    assert!(evaluate(&megabyte).is_err());
    assert!(evaluate(&parens).is_err());
    assert!(evaluate(&parens[..4096]).is_err());
    assert!(evaluate(&digits).is_err());
    assert!(evaluate(&"min(".repeat(1000)).is_err());
    assert!(evaluate(&"!".repeat(4096)).is_err());
    assert!(evaluate(&"é".repeat(2048)).is_err());
    assert_eq!(result(&sums), json!(2000));
    assert_eq!(result(&nested), json!(1));
    assert!(started.elapsed() < Duration::from_millis(500), "{:?}", started.elapsed());
}

/// Evaluates every short text over the tokens: none may panic, and every result is finite.
#[test]
fn no_combination_of_tokens_panics() {
    #[rustfmt::skip]
    let tokens = [
        "9223372036854775807", "0", "1.5", "2", "true", "pi", "min", "if", "fact", "(", ")", ",",
        "+", "-", "*", "/", "//", "%", "^", "<", "==", "&&", "||", "!", "not ", "e", "1e308", ".",
    ];
    let mut state: u64 = 42;
    for _ in 0..200_000 {
        let mut text = String::new();
        for _ in 0..8 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            text.push_str(tokens[(state >> 33) as usize % tokens.len()]);
        }
        if let Ok(answer) = evaluate(&text) {
            assert!(!answer.text.contains("inf") && !answer.text.contains("NaN"), "{text}");
        }
    }
}

#[test]
fn the_result_and_the_definition_have_their_form() {
    let answer = serde_json::to_value(evaluate("2*21").unwrap()).unwrap();
    assert_eq!(answer, json!({"result": 42, "text": "42"}));
    let definition = tool().definition();
    assert_eq!(definition.name, "calculation.eval");
    assert_eq!((definition.effect, definition.risk), (Effect::Read, Risk::Low));
    assert_eq!(definition.timeout_ms, 3_000);
    let input = definition.input_schema.to_value();
    assert_eq!(input["additionalProperties"], json!(false));
    assert_eq!(input["required"], json!(["expression"]));
}
