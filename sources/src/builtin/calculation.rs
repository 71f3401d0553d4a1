//! `calculation.eval`: exact arithmetic and logic for models, which are bad at both.
//!
//! It never runs code: an expression has numbers, operators and a fixed table of functions, and can
//! name nothing outside that table. It is read once, from left to right, after a check of its
//! length and with limited nesting, so that no text takes longer than microseconds or exhausts the
//! stack. Integers stay exact (64 bits) until a division or a function produces a fraction; a value
//! that does not fit is an error, never a rounded result.

mod evaluator;
mod functions;
#[cfg(test)]
mod tests;
mod value;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Number;
use toolcrib::{Code, Effect, Fault, FnTool, Risk};
use value::Value;

/// Maximum length of an expression in bytes.
pub const MAX_LENGTH: usize = 4096;

const DESCRIPTION: &str = "Calculates an expression exactly: + - * / // (floor) % (modulo, sign of \
the divisor) ^ or ** (power), ( ), comparisons == != < <= > >=, logic && || ! (or: and or not), \
5! (factorial), true false pi e tau. Functions: sqrt cbrt abs sign floor ceil round(x) \
round(x, digits) trunc exp ln log(x)=ln log(x, base) log10 log2 sin cos tan asin acos atan \
atan2(y, x) sinh cosh tanh asinh acosh atanh degrees radians pow(x, y) mod(x, y) min max sum avg \
hypot gcd lcm fact comb(n, k) if(condition, a, b). Angles are in radians. Powers group from the \
right (2^3^2 = 512) and bind before a minus sign (-2^2 = -4). Whole numbers are exact up to \
9223372036854775807; beyond that write a decimal point to calculate approximately. Write 2*pi, \
not 2pi, and 1000, not 1,000.";

/// The expression to calculate.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Args")]
pub struct CalculationArgs {
    /// The expression, for example `2*21`, `sqrt(3^2 + 4^2)`, `round(199 * 1.19, 2)` or `17 % 5 ==
    /// 2 && 3 < 4`. At most 4096 bytes.
    #[schemars(length(min = 1, max = 4096))]
    pub expression: String,
}

/// The value of the expression.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Answer")]
pub struct CalculationResult {
    /// A number (without a fraction if the value is whole), or true or false.
    pub result: NumberOrBool,
    /// The same as text.
    pub text: String,
}

/// A number or a boolean.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Outcome")]
pub enum NumberOrBool {
    /// A number.
    Number(Number),
    /// A boolean.
    Bool(bool),
}

/// Creates the tool.
pub fn tool() -> FnTool {
    FnTool::new("calculation.eval", DESCRIPTION, |args: CalculationArgs| async move {
        evaluate(&args.expression)
    })
    .effect(Effect::Read)
    .risk(Risk::Low)
    .timeout_ms(3_000)
}

/// Evaluates an expression.
pub fn evaluate(expression: &str) -> Result<CalculationResult, Fault> {
    let value =
        crate::builtin::calculation::evaluator::evaluate_text(expression).map_err(|problem| {
            let excerpt: String = expression.chars().take(60).collect();
            let more = if excerpt.len() < expression.len() { "…" } else { "" };
            Fault::new(
                Code::ValidationError,
                format!("cannot calculate \"{excerpt}{more}\": {problem}"),
            )
            .without_side_effect()
        })?;
    Ok(to_result(value))
}

fn to_result(value: Value) -> CalculationResult {
    let result = match value {
        Value::Bool(truth) => NumberOrBool::Bool(truth),
        Value::Int(whole) => NumberOrBool::Number(whole.into()),
        Value::Float(number) => match value::exact_integer(number) {
            Some(whole) => NumberOrBool::Number(whole.into()),
            // Only finite numbers get here, so zero is never used.
            None => NumberOrBool::Number(Number::from_f64(number).unwrap_or_else(|| 0.into())),
        },
    };
    let text = match &result {
        NumberOrBool::Number(number) => number.to_string(),
        NumberOrBool::Bool(truth) => truth.to_string(),
    };
    CalculationResult { result, text }
}
