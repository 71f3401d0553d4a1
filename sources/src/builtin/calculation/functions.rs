//! The functions and constants that an expression may name. Pure; never panics.

use super::value::{
    self, BinaryOperator, Value, apply, checked_float, checked_integer, to_float, to_integer,
};

/// All callable names. The evaluator handles `if`, because only one branch may be calculated.
#[rustfmt::skip]
const NAMES: &[&str] = &[
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "avg", "cbrt", "ceil",
    "comb", "cos", "cosh", "degrees", "exp", "fact", "factorial", "floor", "gcd", "hypot", "if",
    "lcm", "ln", "log", "log10", "log2", "max", "mean", "min", "mod", "pow", "radians", "round",
    "sign", "sin", "sinh", "sqrt", "sum", "tan", "tanh", "trunc",
];

/// Returns `true` if a function with this name exists.
pub fn is_function(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Returns the value of a constant.
pub fn constant(name: &str) -> Option<Value> {
    match name {
        "pi" | "π" => Some(Value::Float(std::f64::consts::PI)),
        "tau" => Some(Value::Float(std::f64::consts::TAU)),
        "e" => Some(Value::Float(std::f64::consts::E)),
        "true" => Some(Value::Bool(true)),
        "false" => Some(Value::Bool(false)),
        _ => None,
    }
}

/// Returns the message for a name that is neither a constant nor a function.
pub fn unknown_name_message(name: &str) -> String {
    let excerpt: String = name.chars().take(40).collect();
    format!(
        "there is no \"{excerpt}\" here: the constants are pi, e, tau, true and false, the functions \
         are {}",
        NAMES.join(", ")
    )
}

/// Calls a function.
pub fn call(name: &str, args: &[Value]) -> Result<Value, String> {
    match args {
        [] => Err(format!("{name} needs at least one value, as in {name}(2)")),
        [only] => call_unary(name, *only),
        [first, second] => call_binary(name, *first, *second),
        many => call_variadic(name, many),
    }
}

fn arity_message(name: &str, expected: &str) -> String {
    format!("{name} takes {expected}")
}

fn call_unary(name: &str, value: Value) -> Result<Value, String> {
    if let "min" | "max" | "sum" | "avg" | "mean" | "hypot" | "gcd" | "lcm" = name {
        return call_variadic(name, &[value]);
    }
    if let "abs" | "sign" | "floor" | "ceil" | "round" | "trunc" | "fact" | "factorial" = name {
        return call_rounding(name, value);
    }
    let x = to_float(value)?;
    let expression = format!("{name}({value})");
    let number = match name {
        "sqrt" => x.sqrt(),
        "cbrt" => x.cbrt(),
        "exp" => x.exp(),
        "ln" | "log" | "log10" | "log2" if x <= 0.0 => {
            return Err(format!("{expression} is not a number: logarithms need values over 0"));
        }
        "ln" | "log" => x.ln(),
        "log10" => x.log10(),
        "log2" => x.log2(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "tan" => x.tan(),
        "asin" => x.asin(),
        "acos" => x.acos(),
        "atan" => x.atan(),
        "sinh" => x.sinh(),
        "cosh" => x.cosh(),
        "tanh" => x.tanh(),
        "asinh" => x.asinh(),
        "acosh" => x.acosh(),
        "atanh" => x.atanh(),
        "degrees" => x.to_degrees(),
        "radians" => x.to_radians(),
        "atan2" | "pow" | "mod" | "comb" => return Err(arity_message(name, "two values")),
        _ => return Err(unknown_name_message(name)),
    };
    checked_float(number, expression)
}

/// Calls a function that keeps an integer an integer, or returns one.
fn call_rounding(name: &str, value: Value) -> Result<Value, String> {
    let expression = format!("{name}({value})");
    if let "fact" | "factorial" = name {
        return factorial(to_integer(value, "a factorial")?);
    }
    if let Value::Int(whole) = value {
        return match name {
            "abs" => checked_integer(whole.checked_abs(), expression),
            "sign" => Ok(Value::Int(whole.signum())),
            _ => Ok(value),
        };
    }
    let x = to_float(value)?;
    let number = match name {
        "abs" => return Ok(Value::Float(x.abs())),
        "sign" if x == 0.0 => 0.0,
        "sign" => x.signum(),
        "floor" => x.floor(),
        "ceil" => x.ceil(),
        "trunc" => x.trunc(),
        _ => x.round(),
    };
    Ok(value::exact_integer(number).map_or(Value::Float(number), Value::Int))
}

/// Returns n!.
pub fn factorial(n: i64) -> Result<Value, String> {
    if n < 0 {
        return Err(format!("{n}! is not defined: a factorial needs a whole number from 0 to 20"));
    }
    if n > 20 {
        return Err(format!("{n}! does not fit a whole number: a factorial goes up to 20!"));
    }
    Ok(Value::Int((1..=n).product()))
}

fn call_binary(name: &str, first: Value, second: Value) -> Result<Value, String> {
    let expression = format!("{name}({first}, {second})");
    match name {
        "pow" => apply(BinaryOperator::Power, first, second),
        "mod" => apply(BinaryOperator::Modulo, first, second),
        "atan2" => checked_float(to_float(first)?.atan2(to_float(second)?), expression),
        "log" => {
            let (x, base) = (to_float(first)?, to_float(second)?);
            if x <= 0.0 || base <= 0.0 || base == 1.0 {
                return Err(format!(
                    "{expression} is not a number: logarithms need a value over 0 and a base over 0 \
                     that is not 1"
                ));
            }
            checked_float(logarithm(x, base), expression)
        }
        "round" => round(first, to_integer(second, "round's second value")?),
        "comb" => combinations(to_integer(first, "comb")?, to_integer(second, "comb")?),
        _ => call_variadic(name, &[first, second]),
    }
}

/// Returns a logarithm, with the exact function of the standard library where there is one.
fn logarithm(x: f64, base: f64) -> f64 {
    if base == 2.0 {
        x.log2()
    } else if base == 10.0 {
        x.log10()
    } else {
        x.ln() / base.ln()
    }
}

fn round(value: Value, digits: i64) -> Result<Value, String> {
    if !(0..=15).contains(&digits) {
        return Err(format!("round keeps 0 to 15 digits, not {digits}"));
    }
    let Value::Float(x) = value else { return call_rounding("round", value) };
    // Through its decimal text, because multiplication by a power of ten would itself round.
    let text = format!("{x:.*}", usize::try_from(digits).unwrap_or(0));
    checked_float(text.parse().unwrap_or(x), "round")
}

fn combinations(n: i64, k: i64) -> Result<Value, String> {
    let expression = format!("comb({n}, {k})");
    if n < 0 || k < 0 {
        return Err(format!("{expression} is not defined: both values must be 0 or more"));
    }
    if k > n {
        return Ok(Value::Int(0));
    }
    let mut total: i128 = 1;
    for step in 1..=i128::from(k.min(n - k)) {
        total = total * (i128::from(n) - step + 1) / step;
        // Checked at each step, so that neither the product nor the loop grows without limit.
        if total > i128::from(i64::MAX) {
            return checked_integer(None, expression);
        }
    }
    checked_integer(i64::try_from(total).ok(), expression)
}

fn call_variadic(name: &str, values: &[Value]) -> Result<Value, String> {
    let fold = |op: fn(Value, Value) -> Result<Value, String>| {
        let (first, rest) = values.split_first().ok_or_else(|| arity_message(name, "values"))?;
        to_float(*first)?;
        rest.iter().try_fold(*first, |so_far, value| op(so_far, *value))
    };
    let plus = |a, b| apply(BinaryOperator::Add, a, b);
    match name {
        "min" => fold(|a, b| {
            Ok(if apply(BinaryOperator::Less, b, a)? == Value::Bool(true) { b } else { a })
        }),
        "max" => fold(|a, b| {
            Ok(if apply(BinaryOperator::Greater, b, a)? == Value::Bool(true) { b } else { a })
        }),
        "sum" => fold(plus),
        "avg" | "mean" => {
            let total = fold(plus)?;
            apply(
                BinaryOperator::Divide,
                total,
                Value::Int(i64::try_from(values.len()).unwrap_or(1)),
            )
        }
        "hypot" => {
            let fold =
                values.iter().try_fold(0.0_f64, |far, x| Ok::<_, String>(far.hypot(to_float(*x)?)));
            checked_float(fold?, "hypot")
        }
        "gcd" => fold_integers(name, values, |a, b| Some(gcd(a, b))),
        "lcm" => fold_integers(name, values, |a, b| {
            if a == 0 || b == 0 { Some(0) } else { (a / gcd(a, b)).checked_mul(b) }
        }),
        "round" | "log" => Err(arity_message(name, "one or two values")),
        "pow" | "mod" | "atan2" | "comb" => Err(arity_message(name, "two values")),
        _ if is_function(name) => Err(arity_message(name, "one value")),
        _ => Err(unknown_name_message(name)),
    }
}

fn fold_integers(
    name: &str,
    values: &[Value],
    op: fn(u64, u64) -> Option<u64>,
) -> Result<Value, String> {
    let mut so_far = None;
    for value in values {
        let next = to_integer(*value, name)?.unsigned_abs();
        so_far = match so_far {
            None => Some(next),
            Some(before) => match op(before, next) {
                Some(both) => Some(both),
                None => return checked_integer(None, name),
            },
        };
    }
    checked_integer(so_far.and_then(|number| i64::try_from(number).ok()), name)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
