//! The values of an expression and what the operators do to them. Pure; never panics.
//!
//! Whole numbers are calculated as whole numbers as long as that is exact; an overflow is an error,
//! because a rounded answer to a whole-number question is a wrong one.

use std::cmp::Ordering;
use std::fmt;

/// Up to here every whole number has a float of its own.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// One value.
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

/// An operator between two values.
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
    /// As written.
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

    /// How strongly it binds on its left and on its right: where the right is the weaker, a chain
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

/// A float that is a whole number exactly.
pub fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// The value as a float, for what only floats can do.
pub fn float(value: Value) -> Result<f64, String> {
    match value {
        Value::Int(whole) => Ok(whole as f64),
        Value::Float(number) => Ok(number),
        Value::Truth(truth) => Err(format!("{truth} is not a number")),
    }
}

/// The value as a whole number, for what only those can do.
pub fn int(value: Value, what: &str) -> Result<i64, String> {
    match value {
        Value::Int(number) => Ok(number),
        Value::Float(number) => {
            whole(number).ok_or_else(|| format!("{what} needs whole numbers, not {number:?}"))
        }
        Value::Truth(truth) => Err(format!("{what} needs whole numbers, not {truth}")),
    }
}

/// The value as a truth value.
pub fn truth(value: Value, what: &str) -> Result<bool, String> {
    match value {
        Value::Truth(truth) => Ok(truth),
        number => Err(format!(
            "{what} needs true or false, not {number}: compare it with something, as in x != 0"
        )),
    }
}

/// A float as a value, where it is a number at all.
pub fn finite(number: f64, what: impl fmt::Display) -> Result<Value, String> {
    if number.is_nan() {
        return Err(format!("{what} is not a real number"));
    }
    if number.is_infinite() {
        return Err(format!("{what} is too large for a number"));
    }
    Ok(Value::Float(number))
}

/// A whole number as a value, where it fitted.
pub fn fitted(number: Option<i64>, what: impl fmt::Display) -> Result<Value, String> {
    number.map(Value::Int).ok_or_else(|| {
        format!(
            "{what} is over the largest whole number, 9223372036854775807: write a number with a \
             decimal point (2.0 for 2) to calculate approximately"
        )
    })
}

/// The value with its sign changed.
pub fn negate(value: Value) -> Result<Value, String> {
    match value {
        Value::Int(whole) => fitted(whole.checked_neg(), format_args!("-({whole})")),
        Value::Float(number) => Ok(Value::Float(-number)),
        Value::Truth(truth) => Err(format!("- needs a number, not {truth}")),
    }
}

/// What an operator makes of two values.
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
            // The one remainder that overflows is of a division that does.
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

/// The remainder with the divisor's sign, so that a == (a // b) * b + a % b.
fn modulo(a: i64, b: i64) -> Option<i64> {
    // The one division that overflows has no remainder.
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
    // 0, 1 and -1 have powers of any size.
    let whole = match (base, u32::try_from(exponent)) {
        (0 | 1, _) => Some(if exponent == 0 { 1 } else { base }),
        (-1, _) => Some(if exponent % 2 == 0 { 1 } else { -1 }),
        (_, Ok(exponent)) => base.checked_pow(exponent),
        (_, Err(_)) => None,
    };
    fitted(whole, shown)
}
