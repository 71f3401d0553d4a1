//! Parses one operation: its URL, parameters, body and credentials.

use serde_json::{Map, Value, json};

use super::body;
use super::document::OpenApiDocument;
use super::schema::SchemaTranslator;
use super::security;
use super::{DocumentOperation, ParsedOperation};
use crate::http_operation::{
    HttpOperation, Parameter, ParameterLocation, ParameterStyle, ResponseMapping,
};

/// The schema of arguments while it is being built.
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
}

pub(super) fn parse_operation(
    document: &OpenApiDocument<'_>,
    at: &DocumentOperation<'_>,
    server: Option<&str>,
    scope: &str,
) -> Result<ParsedOperation, String> {
    let mut schemas = SchemaTranslator::new(document);
    let mut arguments = ArgumentSchema { properties: Map::new(), required: Vec::new() };
    let mut parameters = Vec::new();
    for given in merge_parameters(document, at)? {
        if let Some(parameter) = parse_parameter(given, &mut schemas, &mut arguments)? {
            parameters.push(parameter);
        }
    }
    for name in path_placeholders(at.path) {
        let known = parameters
            .iter()
            .any(|p: &Parameter| p.location == ParameterLocation::Path && p.name == name);
        if !known {
            return Err(format!("the path has {{{name}}} and no parameter of that name"));
        }
    }
    let body = body::parse_body(document, at, &mut schemas, &mut arguments)?;
    let (auth, auth_optional) = security::parse_security(document, at, scope)?;
    let http = HttpOperation {
        method: at.method.to_owned(),
        url: format!("{}{}", server_url(document, at, server)?, at.path),
        parameters,
        body,
        headers: [("accept".to_owned(), "application/json, */*;q=0.5".to_owned())].into(),
        auth,
        auth_optional,
        timeout_s: parse_timeout(at)?,
        response: ResponseMapping {
            pointer: at.operation["x-toolcrib-result"].as_str().map(Into::into),
        },
    };
    let mut schema = json!({
        "type": "object",
        "properties": arguments.properties,
        "additionalProperties": false,
    });
    if !arguments.required.is_empty() {
        schema["required"] = json!(arguments.required);
    }
    let defs = schemas.defs();
    if !defs.is_empty() {
        schema["$defs"] = Value::Object(defs);
    }
    Ok(ParsedOperation { http, parameters: schema })
}

fn parse_timeout(at: &DocumentOperation<'_>) -> Result<Option<f64>, String> {
    match at.operation.get("x-toolcrib-timeout-s") {
        None => Ok(None),
        Some(said) => match said.as_f64().filter(|seconds| *seconds > 0.0) {
            Some(seconds) => Ok(Some(seconds)),
            None => Err("x-toolcrib-timeout-s must be a number of seconds".to_owned()),
        },
    }
}

fn path_placeholders(path: &str) -> Vec<&str> {
    path.split('{').skip(1).filter_map(|part| part.split_once('}')).map(|(name, _)| name).collect()
}

/// Returns the parameters of the path and of the operation. Of two with the same name and location,
/// the operation's wins.
fn merge_parameters<'a>(
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

fn parse_parameter(
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

/// Returns the base URL of the API: the requested one, or the first server of the operation, the
/// path or the document, with the defaults of its variables.
fn server_url(
    document: &OpenApiDocument<'_>,
    at: &DocumentOperation<'_>,
    asked: Option<&str>,
) -> Result<String, String> {
    let servers = [&at.operation["servers"], &at.item["servers"], &document.root["servers"]];
    let server = servers.into_iter().find_map(|servers| servers.get(0));
    let said = server.and_then(|server| server["url"].as_str());
    let mut url = asked.or(said).unwrap_or_default().to_owned();
    if asked.is_none() {
        let variables = server.and_then(|server| server["variables"].as_object());
        for (name, variable) in variables.into_iter().flatten() {
            let value = variable["default"].as_str().unwrap_or_default();
            url = url.replace(&format!("{{{name}}}"), value);
        }
    }
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(format!(
            "the server \"{url}\" is not a whole URL; name one when importing (server=https://…)"
        ));
    }
    Ok(url.trim_end_matches('/').to_owned())
}
