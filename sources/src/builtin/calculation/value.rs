//! The values of an expression, and the operators on them. Pure; never panics.
//!
//! Operations on integers stay integer operations as long as they are exact. An overflow is an
//! error, because a rounded result for integers is wrong.

use std::cmp::Ordering;
use std::fmt;

/// Largest magnitude up to which a float represents every integer exactly.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// The value of an expression.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(integer) => write!(f, "{integer}"),
            Self::Float(number) => write!(f, "{number:?}"),
            Self::Bool(boolean) => write!(f, "{boolean}"),
        }
    }
}

/// A binary operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BinaryOperator {
    Or,
    And,
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Modulo,
    Power,
}

impl BinaryOperator {
    /// Returns the operator as written.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Or => "||",
            Self::And => "&&",
            Self::Equal => "==",
            Self::NotEqual => "!=",
            Self::Less => "<",
            Self::LessEqual => "<=",
            Self::Greater => ">",
            Self::GreaterEqual => ">=",
            Self::Add => "+",
            Self::Subtract => "-",
            Self::Multiply => "*",
            Self::Divide => "/",
            Self::FloorDivide => "//",
            Self::Modulo => "%",
            Self::Power => "^",
        }
    }

    /// Returns the binding power on the left and on the right. If the right one is weaker, a chain
    /// groups from the right.
    pub fn binding_power(self) -> (u8, u8) {
        match self {
            Self::Or => (1, 2),
            Self::And => (3, 4),
            Self::Equal | Self::NotEqual => (7, 8),
            Self::Less | Self::LessEqual | Self::Greater | Self::GreaterEqual => (7, 8),
            Self::Add | Self::Subtract => (9, 10),
            Self::Multiply | Self::Divide | Self::FloorDivide | Self::Modulo => (11, 12),
            Self::Power => (16, 15),
        }
    }
}

/// Returns the integer that a float represents exactly, if there is one.
pub fn exact_integer(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// Converts the value to a float, for operations on floats.
pub fn to_float(value: Value) -> Result<f64, String> {
    match value {
        Value::Int(integer) => Ok(integer as f64),
        Value::Float(number) => Ok(number),
        Value::Bool(boolean) => Err(format!("{boolean} is not a number")),
    }
}

/// Converts the value to an integer, for operations on integers.
pub fn to_integer(value: Value, subject: &str) -> Result<i64, String> {
    match value {
        Value::Int(number) => Ok(number),
        Value::Float(number) => exact_integer(number)
            .ok_or_else(|| format!("{subject} needs whole numbers, not {number:?}")),
        Value::Bool(boolean) => Err(format!("{subject} needs whole numbers, not {boolean}")),
    }
}

/// Converts the value to a boolean.
pub fn to_bool(value: Value, subject: &str) -> Result<bool, String> {
    match value {
        Value::Bool(boolean) => Ok(boolean),
        number => Err(format!(
            "{subject} needs true or false, not {number}: compare it with something, as in x != 0"
        )),
    }
}

/// Returns a float as a value, or an error if it is NaN or infinite.
pub fn checked_float(number: f64, subject: impl fmt::Display) -> Result<Value, String> {
    if number.is_nan() {
        return Err(format!("{subject} is not a real number"));
    }
    if number.is_infinite() {
        return Err(format!("{subject} is too large for a number"));
    }
    Ok(Value::Float(number))
}

/// Returns an integer as a value, or an error if it overflowed.
pub fn checked_integer(number: Option<i64>, subject: impl fmt::Display) -> Result<Value, String> {
    number.map(Value::Int).ok_or_else(|| {
        format!(
            "{subject} is over the largest whole number, 9223372036854775807: write a number with a \
             decimal point (2.0 for 2) to calculate approximately"
        )
    })
}

/// Returns the value with its sign changed.
pub fn negate(value: Value) -> Result<Value, String> {
    match value {
        Value::Int(integer) => checked_integer(integer.checked_neg(), format_args!("-({integer})")),
        Value::Float(number) => Ok(Value::Float(-number)),
        Value::Bool(boolean) => Err(format!("- needs a number, not {boolean}")),
    }
}

/// Applies an operator to two values.
pub fn apply(op: BinaryOperator, left: Value, right: Value) -> Result<Value, String> {
    let expression = format_args!("{left} {} {right}", op.symbol()).to_string();
    match op {
        BinaryOperator::Or => Ok(Value::Bool(to_bool(left, "||")? || to_bool(right, "||")?)),
        BinaryOperator::And => Ok(Value::Bool(to_bool(left, "&&")? && to_bool(right, "&&")?)),
        BinaryOperator::Equal | BinaryOperator::NotEqual => {
            let is_same = match (left, right) {
                (Value::Bool(a), Value::Bool(b)) => a == b,
                _ => compare(left, right, &expression)? == Ordering::Equal,
            };
            Ok(Value::Bool(is_same == (op == BinaryOperator::Equal)))
        }
        BinaryOperator::Less => Ok(Value::Bool(compare(left, right, &expression)?.is_lt())),
        BinaryOperator::LessEqual => Ok(Value::Bool(compare(left, right, &expression)?.is_le())),
        BinaryOperator::Greater => Ok(Value::Bool(compare(left, right, &expression)?.is_gt())),
        BinaryOperator::GreaterEqual => Ok(Value::Bool(compare(left, right, &expression)?.is_ge())),
        _ => arithmetic(op, left, right, &expression),
    }
}

fn compare(left: Value, right: Value, expression: &str) -> Result<Ordering, String> {
    let mixed = || format!("{expression} compares a number with true or false");
    match (left, right) {
        (Value::Int(a), Value::Int(b)) => Ok(a.cmp(&b)),
        (Value::Bool(_), _) | (_, Value::Bool(_)) => {
            Err(format!("{}: write a chain like 1 < x < 3 as 1 < x && x < 3", mixed()))
        }
        _ => to_float(left)?.partial_cmp(&to_float(right)?).ok_or_else(mixed),
    }
}

fn arithmetic(
    op: BinaryOperator,
    left: Value,
    right: Value,
    expression: &str,
) -> Result<Value, String> {
    let divides =
        matches!(op, BinaryOperator::Divide | BinaryOperator::FloorDivide | BinaryOperator::Modulo);
    if divides && to_float(right)? == 0.0 {
        return Err(format!("{expression} is a division by zero"));
    }
    if let (Value::Int(a), Value::Int(b)) = (left, right) {
        return match op {
            BinaryOperator::Add => checked_integer(a.checked_add(b), expression),
            BinaryOperator::Subtract => checked_integer(a.checked_sub(b), expression),
            BinaryOperator::Multiply => checked_integer(a.checked_mul(b), expression),
            BinaryOperator::FloorDivide => checked_integer(floor_divide(a, b), expression),
            BinaryOperator::Modulo => checked_integer(modulo(a, b), expression),
            BinaryOperator::Power => power(a, b, expression),
            // The remainder overflows only if the division does.
            _ if a.checked_rem(b).unwrap_or(0) == 0 => {
                checked_integer(a.checked_div(b), expression)
            }
            _ => checked_float(a as f64 / b as f64, expression),
        };
    }
    let (a, b) = (to_float(left)?, to_float(right)?);
    match op {
        BinaryOperator::Add => checked_float(a + b, expression),
        BinaryOperator::Subtract => checked_float(a - b, expression),
        BinaryOperator::Multiply => checked_float(a * b, expression),
        BinaryOperator::Divide => checked_float(a / b, expression),
        BinaryOperator::FloorDivide => checked_float((a / b).floor(), expression),
        BinaryOperator::Modulo => checked_float(a - b * (a / b).floor(), expression),
        _ if a == 0.0 && b < 0.0 => Err(format!("{expression} is a division by zero")),
        _ => checked_float(a.powf(b), expression),
    }
}

fn floor_divide(a: i64, b: i64) -> Option<i64> {
    let quotient = a.checked_div(b)?;
    let below = a.checked_rem(b)? != 0 && (a < 0) != (b < 0);
    if below { quotient.checked_sub(1) } else { Some(quotient) }
}

/// Returns the remainder with the divisor's sign, so that a == (a // b) * b + a % b.
fn modulo(a: i64, b: i64) -> Option<i64> {
    // The only division that overflows has no remainder.
    let remainder = a.checked_rem(b).unwrap_or(0);
    let below = remainder != 0 && (remainder < 0) != (b < 0);
    if below { remainder.checked_add(b) } else { Some(remainder) }
}

fn power(base: i64, exponent: i64, expression: &str) -> Result<Value, String> {
    if exponent < 0 {
        if base == 0 {
            return Err(format!("{expression} is a division by zero"));
        }
        return checked_float((base as f64).powf(exponent as f64), expression);
    }
    // 0, 1 and -1 can be raised to any power.
    let integer = match (base, u32::try_from(exponent)) {
        (0 | 1, _) => Some(if exponent == 0 { 1 } else { base }),
        (-1, _) => Some(if exponent % 2 == 0 { 1 } else { -1 }),
        (_, Ok(exponent)) => base.checked_pow(exponent),
        (_, Err(_)) => None,
    };
    checked_integer(integer, expression)
}
