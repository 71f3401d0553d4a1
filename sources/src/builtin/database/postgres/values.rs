//! Conversion of PostgreSQL's values to JSON, and of JSON values to parameters.
//!
//! Only types with an obvious JSON form are decoded here. The server converts all others to text or
//! JSON, because it knows every type. Parameters are sent as text for the same reason.

use std::error::Error;

use serde_json::Value;
use tokio_postgres::types::{Format, FromSql, IsNull, Kind, ToSql, Type};
use tokio_util::bytes::BytesMut;

/// An error for a value that cannot be decoded.
#[derive(Debug, thiserror::Error)]
#[error("a value of type {0} cannot be read: cast it to text")]
pub struct UnreadableValueError(String);

/// One value of a row.
#[derive(Debug, PartialEq)]
pub struct Cell(pub Value);

/// Returns `true` if a column of this type is decoded here.
pub fn has_decoder(ty: &Type) -> bool {
    matches!(ty.kind(), Kind::Enum(_)) || is_text(ty) || is_number(ty) || is_other_decoded(ty)
}

fn is_text(ty: &Type) -> bool {
    [Type::TEXT, Type::VARCHAR, Type::BPCHAR, Type::NAME, Type::UNKNOWN].contains(ty)
}

fn is_number(ty: &Type) -> bool {
    [Type::INT2, Type::INT4, Type::INT8, Type::OID, Type::FLOAT4, Type::FLOAT8].contains(ty)
}

fn is_other_decoded(ty: &Type) -> bool {
    [Type::BOOL, Type::UUID, Type::JSON, Type::JSONB, Type::BYTEA].contains(ty)
}

/// Returns the expression that selects a column of this type.
pub fn select_expression(ty: &Type, column: &str) -> String {
    if has_decoder(ty) {
        format!("q.{column}")
    } else if *ty == Type::NUMERIC {
        // As text: most readers parse a JSON number as a float, which loses digits.
        format!("q.{column}::pg_catalog.text")
    } else {
        format!("pg_catalog.to_jsonb(q.{column})")
    }
}

impl<'a> FromSql<'a> for Cell {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        let unread = || UnreadableValueError(ty.to_string());
        if is_number(ty) {
            return Ok(Self(number(ty, raw).ok_or_else(unread)?));
        }
        let value = match *ty {
            Type::BOOL => Value::Bool(raw.first() == Some(&1)),
            Type::UUID => Value::String(uuid(raw).ok_or_else(unread)?),
            Type::BYTEA => super::super::hex_text(raw),
            Type::JSON => json(raw),
            // The first byte is the format's version.
            Type::JSONB => json(raw.get(1..).ok_or_else(unread)?),
            _ if has_decoder(ty) => text(raw),
            _ => return Err(Box::new(unread())),
        };
        Ok(Self(value))
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(Value::Null))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

fn number(ty: &Type, raw: &[u8]) -> Option<Value> {
    Some(match *ty {
        Type::INT2 => i16::from_be_bytes(raw.try_into().ok()?).into(),
        Type::INT4 => i32::from_be_bytes(raw.try_into().ok()?).into(),
        Type::INT8 => i64::from_be_bytes(raw.try_into().ok()?).into(),
        Type::OID => u32::from_be_bytes(raw.try_into().ok()?).into(),
        // Through its text, so that 1.1 stays 1.1 and does not become 1.10000002384.
        Type::FLOAT4 => {
            let short = f32::from_be_bytes(raw.try_into().ok()?);
            super::super::float_to_json(short.to_string().parse().ok()?)
        }
        _ => super::super::float_to_json(f64::from_be_bytes(raw.try_into().ok()?)),
    })
}

fn text(raw: &[u8]) -> Value {
    Value::String(String::from_utf8_lossy(raw).into_owned())
}

/// Parses JSON. A value that is nested too deep to be parsed stays text.
fn json(raw: &[u8]) -> Value {
    serde_json::from_slice(raw).unwrap_or_else(|_| text(raw))
}

fn uuid(raw: &[u8]) -> Option<String> {
    let hex = toolcrib::domain::id::hex(raw);
    let part = |from: usize, to: usize| hex.get(from..to);
    let parts = [part(0, 8)?, part(8, 12)?, part(12, 16)?, part(16, 20)?, part(20, 32)?];
    Some(parts.join("-"))
}

/// One parameter, as the text that the server parses.
#[derive(Debug, PartialEq)]
pub struct Param(Option<String>);

impl Param {
    /// Converts the values of all parameters of a statement.
    pub fn all(types: &[Type], values: &[Value]) -> Result<Vec<Self>, String> {
        if types.len() != values.len() {
            return Err(format!(
                "the statement has {} parameters and params has {} values: give one value for \
                 each of $1, $2 …",
                types.len(),
                values.len()
            ));
        }
        Ok(types.iter().zip(values).map(|(ty, value)| Self(parameter_text(ty, value))).collect())
    }
}

fn parameter_text(ty: &Type, value: &Value) -> Option<String> {
    match (ty.kind(), value) {
        (_, Value::Null) => None,
        (Kind::Array(_), Value::Array(items)) => Some(array_literal(items)),
        _ if [Type::JSON, Type::JSONB].contains(ty) => Some(value.to_string()),
        (_, Value::String(text)) => Some(text.clone()),
        (_, other) => Some(other.to_string()),
    }
}

fn array_literal(items: &[Value]) -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
    let item = |item: &Value| match item {
        Value::Null => "NULL".into(),
        Value::Array(items) => array_literal(items),
        Value::String(text) => quoted(text),
        other => quoted(&other.to_string()),
    };
    let items: Vec<String> = items.iter().map(item).collect();
    format!("{{{}}}", items.join(","))
}

impl ToSql for Param {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        Ok(match &self.0 {
            None => IsNull::Yes,
            Some(text) => {
                out.extend_from_slice(text.as_bytes());
                IsNull::No
            }
        })
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    fn to_sql_checked(
        &self,
        ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        self.to_sql(ty, out)
    }

    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }
}
