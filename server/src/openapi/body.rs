//! The body of an operation: its fields become arguments, or the entire body becomes one argument.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::At;
use super::document::Document;
use super::operations::{Arguments, style};
use super::schema::Schemas;
use crate::operation::{BodyPlan, Encoding, Field};

/// In order of preference.
const KINDS: [(&str, Encoding); 3] = [
    ("application/json", Encoding::Json),
    ("application/x-www-form-urlencoded", Encoding::Form),
    ("text/plain", Encoding::Text),
];

pub(super) fn read(
    document: &Document<'_>,
    at: &At<'_>,
    schemas: &mut Schemas<'_>,
    arguments: &mut Arguments,
) -> Result<Option<BodyPlan>, String> {
    let Some(given) = at.operation.get("requestBody") else { return Ok(None) };
    let given = document.resolved(given)?;
    let required = given["required"] == json!(true);
    let Some((kind, encoding, media)) = chosen(given) else {
        if !required {
            return Ok(None);
        }
        return Err("its body is neither JSON, nor a form, nor text".to_owned());
    };
    let content_type = (kind != KINDS[encoding as usize].0).then(|| kind.to_owned());
    let anything = json!({});
    let schema = media.get("schema").unwrap_or(&anything);
    let styles = if encoding == Encoding::Form { styles(media)? } else { BTreeMap::new() };
    if !document.says_more(schema)
        && let Some(args) = fields(document, schema, schemas, arguments, required)?
    {
        let fields = styles;
        return Ok(Some(BodyPlan { arg: None, args, encoding, fields, content_type }));
    }
    let name = ["body", "request_body", "http_request_body"]
        .into_iter()
        .find(|name| !arguments.properties.contains_key(*name))
        .ok_or("its parameters leave no name for the body")?;
    let mut schema = schemas.translated(schema)?;
    if let (Value::Object(fields), Some(text)) = (&mut schema, given["description"].as_str())
        && !fields.contains_key("$ref")
    {
        fields.entry("description").or_insert_with(|| text.into());
    }
    arguments.add(name, schema, required);
    let arg = Some(name.to_owned());
    Ok(Some(BodyPlan { arg, args: Vec::new(), encoding, fields: styles, content_type }))
}

/// Returns the serialization of form fields, as far as the document specifies it.
fn styles(media: &Value) -> Result<BTreeMap<String, Field>, String> {
    let mut styles = BTreeMap::new();
    for (name, given) in media["encoding"].as_object().into_iter().flatten() {
        let style = style(given, &format!("the field {name}"))?;
        let explode = given["explode"].as_bool();
        // If a style or explode is set, OpenAPI ignores the content type.
        let plain = style.is_none() && explode.is_none();
        let json = plain && given["contentType"].as_str().is_some_and(|kind| kind.contains("json"));
        styles.insert(name.clone(), Field { style, explode, json });
    }
    Ok(styles)
}

fn chosen(body: &Value) -> Option<(&str, Encoding, &Value)> {
    let content = body["content"].as_object()?;
    let plain = |kind: &str| {
        let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if kind.ends_with("+json") || kind == "*/*" { "application/json".to_owned() } else { kind }
    };
    KINDS.iter().find_map(|(wanted, encoding)| {
        let (kind, media) = content.iter().find(|(kind, _)| plain(kind) == *wanted)?;
        let kind = if kind == "*/*" { *wanted } else { kind.as_str() };
        Some((kind, *encoding, media))
    })
}

/// Adds the fields of a plain object as separate arguments. Returns `None` if that is not possible.
fn fields(
    document: &Document<'_>,
    schema: &Value,
    schemas: &mut Schemas<'_>,
    arguments: &mut Arguments,
    required: bool,
) -> Result<Option<Vec<String>>, String> {
    let schema = document.resolved(schema)?;
    let Some(properties) = schema["properties"].as_object() else { return Ok(None) };
    let composed = ["allOf", "anyOf", "oneOf", "not", "patternProperties", "if", "$ref"];
    let open = schema.get("additionalProperties").is_some_and(|more| *more != json!(false));
    let clash = properties.keys().any(|name| arguments.properties.contains_key(name));
    let needs: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    // An optional body with required fields must stay one argument.
    let all_or_nothing = !required && !needs.is_empty();
    let plain = !composed.iter().any(|word| schema.get(*word).is_some());
    if properties.is_empty() || !plain || open || clash || all_or_nothing {
        return Ok(None);
    }
    let mut names = Vec::new();
    for (name, property) in properties {
        // A read-only property occurs in responses only.
        if document.only_answered(property) {
            continue;
        }
        let translated = schemas.translated(property)?;
        arguments.add(name, translated, needs.contains(&name.as_str()));
        names.push(name.clone());
    }
    Ok(Some(names))
}
