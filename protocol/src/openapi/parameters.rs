//! The parameters of an operation. Each becomes an argument, with a schema and a place in the
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
    at: &DocumentOperation<'a>,
) -> Result<Vec<&'a Value>, String> {
    let mut all: Vec<&Value> = Vec::new();
    for list in [&at.item["parameters"], &at.operation["parameters"]] {
        for given in list.as_array().into_iter().flatten() {
            let parameter = document.resolve(given)?;
            let same = |known: &&Value| {
                known["name"] == parameter["name"] && known["in"] == parameter["in"]
            };
            all.retain(|known| !same(known));
            all.push(parameter);
        }
    }
    Ok(all)
}

pub(super) fn parse_parameter(
    given: &Value,
    schemas: &mut SchemaTranslator<'_>,
    arguments: &mut ArgumentSchema,
) -> Result<Option<Parameter>, String> {
    let name = given["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or("a parameter has no name")?;
    let place = given["in"].as_str().unwrap_or_default();
    let place: ParameterLocation = serde_json::from_value(json!(place))
        .map_err(|_| format!("the parameter {name} is in \"{place}\", which is no place"))?;
    // OpenAPI reserves these headers, even if a document lists them as parameters.
    let ignored = ["accept", "content-type", "authorization"];
    if place == ParameterLocation::Header && ignored.contains(&name.to_ascii_lowercase().as_str()) {
        return Ok(None);
    }
    let style = parse_style(given, &format!("the parameter {name}"))?;
    let content = given["content"].as_object().and_then(|content| content.iter().next());
    let (json, schema) = match content {
        Some((kind, media)) => (kind.contains("json"), &media["schema"]),
        None => (false, &given["schema"]),
    };
    let anything = json!({});
    let schema = if schema.is_null() { &anything } else { schema };
    let mut schema = schemas.translate(schema)?;
    describe(&mut schema, given);
    let arg = unique_argument_name(name, place, arguments);
    let required = place == ParameterLocation::Path || given["required"] == json!(true);
    arguments.add(&arg, schema, required);
    Ok(Some(Parameter {
        name: name.to_owned(),
        location: place,
        arg: (arg != name).then_some(arg),
        style,
        explode: given["explode"].as_bool(),
        json,
    }))
}

/// Returns the serialization of lists and objects, if the document specifies one.
pub(super) fn parse_style(given: &Value, whose: &str) -> Result<Option<ParameterStyle>, String> {
    let Some(style) = given["style"].as_str() else { return Ok(None) };
    let read = serde_json::from_value(json!(style));
    read.map(Some).map_err(|_| format!("{whose} has the style \"{style}\", which is not written"))
}

/// Returns a unique argument name: two parameters may have one name in different locations.
fn unique_argument_name(
    name: &str,
    place: ParameterLocation,
    arguments: &ArgumentSchema,
) -> String {
    if !arguments.properties.contains_key(name) {
        return name.to_owned();
    }
    let place = match place {
        ParameterLocation::Path => "path",
        ParameterLocation::Query => "query",
        ParameterLocation::Header => "header",
        ParameterLocation::Cookie => "cookie",
    };
    let mut free = format!("{place}_{name}");
    // The document may have a parameter of that name, too.
    while arguments.properties.contains_key(&free) {
        free.push('_');
    }
    free
}

/// Adds a parameter's description if its schema has none.
fn describe(schema: &mut Value, given: &Value) {
    let Some(text) = given["description"].as_str().filter(|text| !text.is_empty()) else { return };
    if let Value::Object(fields) = schema
        && !fields.contains_key("description")
    {
        fields.insert("description".into(), text.into());
    }
}
