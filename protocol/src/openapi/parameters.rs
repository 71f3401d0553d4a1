//! The parameters of an operation. Each becomes an argument, with a schema and a location in the
//! request.

use serde_json::{Map, Value, json};

use super::document::{DocumentOperation, OpenApiDocument};
use super::schema::SchemaTranslator;
use crate::http_operation::{Parameter, ParameterLocation, ParameterStyle};

/// The schema of arguments while it is being built.
#[derive(Default)]
pub(super) struct ArgumentSchema {
    pub(super) properties: Map<String, Value>,
    pub(super) required: Vec<String>,
}

impl ArgumentSchema {
    pub(super) fn add(&mut self, name: &str, schema: Value, required: bool) {
        self.properties.insert(name.to_owned(), schema);
        if required {
            self.required.push(name.to_owned());
        }
    }

    /// Returns the complete schema, with the definitions that it refers to.
    pub(super) fn into_schema(self, defs: Map<String, Value>) -> Value {
        let mut schema = json!({
            "type": "object",
            "properties": self.properties,
            "additionalProperties": false,
        });
        if !self.required.is_empty() {
            schema["required"] = json!(self.required);
        }
        if !defs.is_empty() {
            schema["$defs"] = Value::Object(defs);
        }
        schema
    }
}

/// Returns the parameters of the path and of the operation. Of two with the same name and location,
/// the operation's wins.
pub(super) fn merge_parameters<'a>(
    document: &OpenApiDocument<'a>,
    endpoint: &DocumentOperation<'a>,
) -> Result<Vec<&'a Value>, String> {
    let mut all: Vec<&Value> = Vec::new();
    for list in [&endpoint.item["parameters"], &endpoint.operation["parameters"]] {
        for entry in list.as_array().into_iter().flatten() {
            let parameter = document.resolve(entry)?;
            let is_same = |existing: &&Value| {
                existing["name"] == parameter["name"] && existing["in"] == parameter["in"]
            };
            all.retain(|existing| !is_same(existing));
            all.push(parameter);
        }
    }
    Ok(all)
}

pub(super) fn parse_parameter(
    definition: &Value,
    schemas: &mut SchemaTranslator<'_>,
    arguments: &mut ArgumentSchema,
) -> Result<Option<Parameter>, String> {
    let name = definition["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or("a parameter has no name")?;
    let location = definition["in"].as_str().unwrap_or_default();
    let location: ParameterLocation = serde_json::from_value(json!(location)).map_err(|_| {
        format!("the parameter {name} is in \"{location}\", which is not a location of parameters")
    })?;
    // OpenAPI reserves these headers, even if a document lists them as parameters.
    let ignored = ["accept", "content-type", "authorization"];
    if location == ParameterLocation::Header
        && ignored.contains(&name.to_ascii_lowercase().as_str())
    {
        return Ok(None);
    }
    let style = parse_style(definition, &format!("the parameter {name}"))?;
    let content = definition["content"].as_object().and_then(|content| content.iter().next());
    let (json, schema) = match content {
        Some((kind, media)) => (kind.contains("json"), &media["schema"]),
        None => (false, &definition["schema"]),
    };
    let anything = json!({});
    let schema = if schema.is_null() { &anything } else { schema };
    let mut schema = schemas.translate(schema)?;
    describe(&mut schema, definition);
    let arg = unique_argument_name(name, location, arguments);
    let required = location == ParameterLocation::Path || definition["required"] == json!(true);
    arguments.add(&arg, schema, required);
    Ok(Some(Parameter {
        name: name.to_owned(),
        location,
        arg: (arg != name).then_some(arg),
        style,
        explode: definition["explode"].as_bool(),
        json,
    }))
}

/// Returns the serialization of lists and objects, if the document specifies one.
pub(super) fn parse_style(
    definition: &Value,
    subject: &str,
) -> Result<Option<ParameterStyle>, String> {
    let Some(style) = definition["style"].as_str() else { return Ok(None) };
    let read = serde_json::from_value(json!(style));
    read.map(Some)
        .map_err(|_| format!("{subject} has the style \"{style}\", which is not supported"))
}

/// Returns a unique argument name: two parameters may have one name in different locations.
fn unique_argument_name(
    name: &str,
    location: ParameterLocation,
    arguments: &ArgumentSchema,
) -> String {
    if !arguments.properties.contains_key(name) {
        return name.to_owned();
    }
    let location = match location {
        ParameterLocation::Path => "path",
        ParameterLocation::Query => "query",
        ParameterLocation::Header => "header",
        ParameterLocation::Cookie => "cookie",
    };
    let mut free = format!("{location}_{name}");
    // The document may have a parameter of that name, too.
    while arguments.properties.contains_key(&free) {
        free.push('_');
    }
    free
}

/// Adds a parameter's description if its schema has none.
fn describe(schema: &mut Value, definition: &Value) {
    let Some(text) = definition["description"].as_str().filter(|text| !text.is_empty()) else {
        return;
    };
    if let Value::Object(fields) = schema
        && !fields.contains_key("description")
    {
        fields.insert("description".into(), text.into());
    }
}
