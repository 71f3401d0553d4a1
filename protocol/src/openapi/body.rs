//! The body of an operation: its fields become arguments, or the entire body becomes one argument.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::document::{DocumentOperation, OpenApiDocument};
use super::parameters::{ArgumentSchema, parse_style};
use super::schema::SchemaTranslator;
use crate::http_operation::{BodyEncoding, FormFieldStyle, RequestBodySpec};

/// The supported media types, in order of preference.
const MEDIA_TYPES: [(&str, BodyEncoding); 3] = [
    ("application/json", BodyEncoding::Json),
    ("application/x-www-form-urlencoded", BodyEncoding::Form),
    ("text/plain", BodyEncoding::Text),
];

pub(super) fn parse_body(
    document: &OpenApiDocument<'_>,
    endpoint: &DocumentOperation<'_>,
    schemas: &mut SchemaTranslator<'_>,
    arguments: &mut ArgumentSchema,
) -> Result<Option<RequestBodySpec>, String> {
    let Some(request_body) = endpoint.operation.get("requestBody") else { return Ok(None) };
    let request_body = document.resolve(request_body)?;
    let required = request_body["required"] == json!(true);
    let Some((kind, encoding, media)) = select_media_type(request_body) else {
        if !required {
            return Ok(None);
        }
        return Err("its body is neither JSON, nor a form, nor text".to_owned());
    };
    let content_type = (kind != MEDIA_TYPES[encoding as usize].0).then(|| kind.to_owned());
    let anything = json!({});
    let schema = media.get("schema").unwrap_or(&anything);
    let styles =
        if encoding == BodyEncoding::Form { parse_field_styles(media)? } else { BTreeMap::new() };
    if !document.has_ref_siblings(schema)
        && let Some(args) = flatten_fields(document, schema, schemas, arguments, required)?
    {
        let fields = styles;
        return Ok(Some(RequestBodySpec { arg: None, args, encoding, fields, content_type }));
    }
    let name = ["body", "request_body", "http_request_body"]
        .into_iter()
        .find(|name| !arguments.properties.contains_key(*name))
        .ok_or("its parameters leave no name for the body")?;
    let mut schema = schemas.translate(schema)?;
    if let (Value::Object(fields), Some(text)) = (&mut schema, request_body["description"].as_str())
        && !fields.contains_key("$ref")
    {
        fields.entry("description").or_insert_with(|| text.into());
    }
    arguments.add(name, schema, required);
    let arg = Some(name.to_owned());
    Ok(Some(RequestBodySpec { arg, args: Vec::new(), encoding, fields: styles, content_type }))
}

/// Returns the serialization of form fields, as far as the document specifies it.
fn parse_field_styles(media: &Value) -> Result<BTreeMap<String, FormFieldStyle>, String> {
    let mut styles = BTreeMap::new();
    for (name, definition) in media["encoding"].as_object().into_iter().flatten() {
        let style = parse_style(definition, &format!("the field {name}"))?;
        let explode = definition["explode"].as_bool();
        // If a style or explode is set, OpenAPI ignores the content type.
        let is_plain = style.is_none() && explode.is_none();
        let json = is_plain
            && definition["contentType"].as_str().is_some_and(|kind| kind.contains("json"));
        styles.insert(name.clone(), FormFieldStyle { style, explode, json });
    }
    Ok(styles)
}

fn select_media_type(body: &Value) -> Option<(&str, BodyEncoding, &Value)> {
    let content = body["content"].as_object()?;
    let is_plain = |kind: &str| {
        let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if kind.ends_with("+json") || kind == "*/*" { "application/json".to_owned() } else { kind }
    };
    MEDIA_TYPES.iter().find_map(|(media_type, encoding)| {
        let (kind, media) = content.iter().find(|(kind, _)| is_plain(kind) == *media_type)?;
        let kind = if kind == "*/*" { *media_type } else { kind.as_str() };
        Some((kind, *encoding, media))
    })
}

/// Adds the fields of a plain object as separate arguments. Returns `None` if that is not possible.
fn flatten_fields(
    document: &OpenApiDocument<'_>,
    schema: &Value,
    schemas: &mut SchemaTranslator<'_>,
    arguments: &mut ArgumentSchema,
    required: bool,
) -> Result<Option<Vec<String>>, String> {
    let schema = document.resolve(schema)?;
    let Some(properties) = schema["properties"].as_object() else { return Ok(None) };
    let composed = ["allOf", "anyOf", "oneOf", "not", "patternProperties", "if", "$ref"];
    let open = schema.get("additionalProperties").is_some_and(|more| *more != json!(false));
    let clash = properties.keys().any(|name| arguments.properties.contains_key(name));
    let needs: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    // An optional body with required fields must stay one argument.
    let all_or_nothing = !required && !needs.is_empty();
    let is_plain = !composed.iter().any(|word| schema.get(*word).is_some());
    if properties.is_empty() || !is_plain || open || clash || all_or_nothing {
        return Ok(None);
    }
    let mut names = Vec::new();
    for (name, property) in properties {
        // A read-only property occurs in responses only.
        if document.is_read_only(property) {
            continue;
        }
        let translated = schemas.translate(property)?;
        arguments.add(name, translated, needs.contains(&name.as_str()));
        names.push(name.clone());
    }
    Ok(Some(names))
}
