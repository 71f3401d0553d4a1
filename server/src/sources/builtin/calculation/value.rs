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
    Truth(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(whole) => write!(f, "{whole}"),
            Self::Float(number) => write!(f, "{number:?}"),
            Self::Truth(truth) => write!(f, "{truth}"),
        }
    }
}

/// A binary operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
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

impl Op {
    /// Returns the operator as written.
    pub fn sign(self) -> &'static str {
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
    pub fn binds(self) -> (u8, u8) {
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
pub fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// Converts the value to a float, for operations on floats.
pub fn float(value: Value) -> Result<f64, String> {
    match value {
        Value::Int(whole) => Ok(whole as f64),
        Value::Float(number) => Ok(number),
        Value::Truth(truth) => Err(format!("{truth} is not a number")),
    }
}

/// Converts the value to an integer, for operations on integers.
pub fn int(value: Value, what: &str) -> Result<i64, String> {
    match value {
        Value::Int(number) => Ok(number),
        Value::Float(number) => {
            whole(number).ok_or_else(|| format!("{what} needs whole numbers, not {number:?}"))
        }
        Value::Truth(truth) => Err(format!("{what} needs whole numbers, not {truth}")),
    }
}

/// Converts the value to a boolean.
pub fn truth(value: Value, what: &str) -> Result<bool, String> {
    match value {
        Value::Truth(truth) => Ok(truth),
        number => Err(format!(
            "{what} needs true or false, not {number}: compare it with something, as in x != 0"
        )),
    }
}

/// Returns a float as a value, or an error if it is NaN or infinite.
pub fn finite(number: f64, what: impl fmt::Display) -> Result<Value, String> {
    if number.is_nan() {
        return Err(format!("{what} is not a real number"));
    }
    if number.is_infinite() {
        return Err(format!("{what} is too large for a number"));
    }
    Ok(Value::Float(number))
}

/// Returns an integer as a value, or an error if it overflowed.
pub fn fitted(number: Option<i64>, what: impl fmt::Display) -> Result<Value, String> {
    number.map(Value::Int).ok_or_else(|| {
        format!(
            "{what} is over the largest whole number, 9223372036854775807: write a number with a \
             decimal point (2.0 for 2) to calculate approximately"
        )
    })
}

/// Returns the value with its sign changed.
pub fn negate(value: Value) -> Result<Value, String> {
    match value {
        Value::Int(whole) => fitted(whole.checked_neg(), format_args!("-({whole})")),
        Value::Float(number) => Ok(Value::Float(-number)),
        Value::Truth(truth) => Err(format!("- needs a number, not {truth}")),
    }
}

/// Applies an operator to two values.
pub fn apply(op: Op, left: Value, right: Value) -> Result<Value, String> {
    let shown = format_args!("{left} {} {right}", op.sign()).to_string();
    match op {
        Op::Or => Ok(Value::Truth(truth(left, "||")? || truth(right, "||")?)),
        Op::And => Ok(Value::Truth(truth(left, "&&")? && truth(right, "&&")?)),
        Op::Equal | Op::NotEqual => {
            let same = match (left, right) {
                (Value::Truth(a), Value::Truth(b)) => a == b,
                _ => order(left, right, &shown)? == Ordering::Equal,
            };
            Ok(Value::Truth(same == (op == Op::Equal)))
        }
        Op::Less => Ok(Value::Truth(order(left, right, &shown)?.is_lt())),
        Op::LessEqual => Ok(Value::Truth(order(left, right, &shown)?.is_le())),
        Op::Greater => Ok(Value::Truth(order(left, right, &shown)?.is_gt())),
        Op::GreaterEqual => Ok(Value::Truth(order(left, right, &shown)?.is_ge())),
        _ => arithmetic(op, left, right, &shown),
    }
}

fn order(left: Value, right: Value, shown: &str) -> Result<Ordering, String> {
    let mixed = || format!("{shown} compares a number with true or false");
    match (left, right) {
        (Value::Int(a), Value::Int(b)) => Ok(a.cmp(&b)),
        (Value::Truth(_), _) | (_, Value::Truth(_)) => {
            Err(format!("{}: write a chain like 1 < x < 3 as 1 < x && x < 3", mixed()))
        }
        _ => float(left)?.partial_cmp(&float(right)?).ok_or_else(mixed),
    }
}

fn arithmetic(op: Op, left: Value, right: Value, shown: &str) -> Result<Value, String> {
    let divides = matches!(op, Op::Divide | Op::FloorDivide | Op::Modulo);
    if divides && float(right)? == 0.0 {
        return Err(format!("{shown} is a division by zero"));
    }
    if let (Value::Int(a), Value::Int(b)) = (left, right) {
        return match op {
            Op::Add => fitted(a.checked_add(b), shown),
            Op::Subtract => fitted(a.checked_sub(b), shown),
            Op::Multiply => fitted(a.checked_mul(b), shown),
            Op::FloorDivide => fitted(floor_divide(a, b), shown),
            Op::Modulo => fitted(modulo(a, b), shown),
            Op::Power => power(a, b, shown),
            // The remainder overflows only if the division does.
            _ if a.checked_rem(b).unwrap_or(0) == 0 => fitted(a.checked_div(b), shown),
            _ => finite(a as f64 / b as f64, shown),
        };
    }
    let (a, b) = (float(left)?, float(right)?);
    match op {
        Op::Add => finite(a + b, shown),
        Op::Subtract => finite(a - b, shown),
        Op::Multiply => finite(a * b, shown),
        Op::Divide => finite(a / b, shown),
        Op::FloorDivide => finite((a / b).floor(), shown),
        Op::Modulo => finite(a - b * (a / b).floor(), shown),
        _ if a == 0.0 && b < 0.0 => Err(format!("{shown} is a division by zero")),
        _ => finite(a.powf(b), shown),
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

fn power(base: i64, exponent: i64, shown: &str) -> Result<Value, String> {
    if exponent < 0 {
        if base == 0 {
            return Err(format!("{shown} is a division by zero"));
        }
        return finite((base as f64).powf(exponent as f64), shown);
    }
    // 0, 1 and -1 can be raised to any power.
    let whole = match (base, u32::try_from(exponent)) {
        (0 | 1, _) => Some(if exponent == 0 { 1 } else { base }),
        (-1, _) => Some(if exponent % 2 == 0 { 1 } else { -1 }),
        (_, Ok(exponent)) => base.checked_pow(exponent),
        (_, Err(_)) => None,
    };
    fitted(whole, shown)
}
