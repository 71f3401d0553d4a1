//! Reads the configuration layers, file and environment. Each layer is checked separately against
//! the schema of [`Config`], so that an error can name the origin of its value; then the layers are
//! merged.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;

use ::config::{FileFormat, Source, Value as ConfigValue, ValueKind};
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};
use toolcrib_protocol::settings::InvalidSetting;

use super::Config;

const PREFIX: &str = "TOOLCRIB_";

/// Variables with the `TOOLCRIB_` prefix that are not settings: they configure the command line and
/// logging.
const RESERVED_VARIABLES: [&str; 5] =
    ["TOOLCRIB_SERVER", "TOOLCRIB_KEY", "TOOLCRIB_CONFIG", "TOOLCRIB_LOG", "TOOLCRIB_QUIET"];

/// Prefixes of variables that are not settings. `TOOLCRIB_WEBHOOK_` variables hold signing keys;
/// Kubernetes sets the last two for a service named `toolcrib`.
const RESERVED_PREFIXES: [&str; 4] =
    ["TOOLCRIB_TEST_", "TOOLCRIB_WEBHOOK_", "TOOLCRIB_SERVICE_", "TOOLCRIB_PORT"];

/// The reason why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the configuration file {file}: {source}")]
    Unreadable { file: String, source: std::io::Error },
    #[error("{file} is not valid TOML: {cause}")]
    NotToml { file: String, cause: String },
    #[error("{origin}: there is no setting {key}{}", did_you_mean(.nearest.as_deref()))]
    UnknownKey { key: String, origin: String, nearest: Option<String> },
    #[error("{origin}: {key} must be {expected}, and is {given}")]
    WrongType { key: String, origin: String, expected: String, given: String },
    #[error("the environment variable {variable} is not valid UTF-8")]
    NotText { variable: String },
    #[error("{key}: {problem}")]
    Invalid { key: String, problem: String },
}

impl From<InvalidSetting> for ConfigError {
    fn from(InvalidSetting { key, problem }: InvalidSetting) -> Self {
        Self::Invalid { key, problem }
    }
}

impl ConfigError {
    pub(super) fn invalid(key: &str, problem: impl Into<String>) -> Self {
        Self::Invalid { key: key.to_owned(), problem: problem.into() }
    }

    /// Returns advice on fixing the problem.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "check the path given with --config or TOOLCRIB_CONFIG",
            Self::NotToml { .. } => "correct the line named above",
            Self::UnknownKey { .. } => "correct or remove it; toolcrib doctor checks again",
            Self::WrongType { .. } | Self::Invalid { .. } | Self::NotText { .. } => {
                "correct the value; toolcrib doctor checks again"
            }
        }
    }
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map(|key| format!("; did you mean {key}?")).unwrap_or_default()
}

/// Builds the configuration from the file (if any), the environment and the defaults.
pub(super) fn read_layers(
    file: Option<&Path>,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<Config, ConfigError> {
    let mut all = match file {
        Some(path) => read_file(path)?,
        None => Map::new(),
    };
    let mut variables: Vec<_> = environment.filter_map(as_setting_variable).collect();
    // Sorted, so that the same environment always produces the same first error.
    variables.sort();
    for (name, value) in variables {
        let Some(text) = value.to_str() else {
            return Err(ConfigError::NotText { variable: name });
        };
        // Many compose files unset a variable with `TOOLCRIB_LISTEN=`.
        if !text.is_empty() {
            merge(&mut all, read_variable(&name, text)?);
        }
    }
    let config: Config = serde_json::from_value(Value::Object(all))
        .map_err(|error| ConfigError::invalid("configuration", error.to_string()))?;
    Ok(Config { file: file.map(Path::to_owned), ..config })
}

/// Returns the variable if it is a Toolcrib setting.
fn as_setting_variable((name, value): (OsString, OsString)) -> Option<(String, OsString)> {
    let name = name.into_string().ok()?;
    let is_setting = name.starts_with(PREFIX)
        && !RESERVED_VARIABLES.contains(&name.as_str())
        && !RESERVED_PREFIXES.iter().any(|begin| name.starts_with(begin));
    is_setting.then_some((name, value))
}

fn read_file(path: &Path) -> Result<Map<String, Value>, ConfigError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { file: file.clone(), source })?;
    let parsed = ::config::File::from_str(&text, FileFormat::Toml).collect();
    let parsed = parsed.map_err(|error| {
        let cause = match error {
            ::config::ConfigError::FileParse { cause, .. } => cause.to_string(),
            other => other.to_string(),
        };
        ConfigError::NotToml { file: file.clone(), cause: cause.trim().to_owned() }
    })?;
    let tree: Map<String, Value> =
        parsed.into_iter().map(|(key, value)| (key, to_json(value))).collect();
    let tree = Value::Object(tree);
    SettingLocation { origin: &file, path: Vec::new(), from_environment: false }
        .check_value(schema(), &tree)?;
    match tree {
        Value::Object(tree) => Ok(tree),
        _ => Ok(Map::new()),
    }
}

/// Converts `TOOLCRIB_A__B=v` to the tree `{a: {b: v}}`, with `v` parsed as the type of the
/// setting.
fn read_variable(name: &str, text: &str) -> Result<Map<String, Value>, ConfigError> {
    let path: Vec<String> = name
        .strip_prefix(PREFIX)
        .unwrap_or(name)
        .split("__")
        .map(str::to_ascii_lowercase)
        .collect();
    let mut key =
        SettingLocation { origin: "environment", path: Vec::new(), from_environment: true };
    let mut node = schema();
    for part in &path {
        key.path.push(part.clone());
        node = member_schema(node, part).ok_or_else(|| key.unknown_key_error(schema()))?;
    }
    let value = parse_text(node, text);
    key.check_value(node, &value)?;
    let nested = path.into_iter().rev().fold(value, |inner, part| {
        let mut outer = Map::new();
        outer.insert(part, inner);
        Value::Object(outer)
    });
    match nested {
        Value::Object(tree) => Ok(tree),
        _ => Ok(Map::new()),
    }
}

/// Parses text from the environment as the expected type. Text that cannot be parsed remains a
/// string, and the check reports it.
fn parse_text(schema: &Value, text: &str) -> Value {
    let as_text = || Value::String(text.to_owned());
    match expected_type(schema) {
        "boolean" => match text.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Value::Bool(true),
            "false" | "0" | "no" | "off" => Value::Bool(false),
            _ => as_text(),
        },
        "integer" | "number" | "object" => {
            serde_json::from_str(text.trim()).unwrap_or_else(|_| as_text())
        }
        "array" if text.trim_start().starts_with('[') => {
            serde_json::from_str(text).unwrap_or_else(|_| as_text())
        }
        "array" => text.split(',').map(|item| Value::from(item.trim())).collect(),
        _ => as_text(),
    }
}

/// Merges one tree into another: tables are joined, everything else is replaced.
fn merge(base: &mut Map<String, Value>, overlay: Map<String, Value>) {
    for (key, value) in overlay {
        match (base.get_mut(&key), value) {
            (Some(Value::Object(below)), Value::Object(above)) => merge(below, above),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

fn to_json(parsed: ConfigValue) -> Value {
    match parsed.kind {
        ValueKind::Nil => Value::Null,
        ValueKind::Boolean(value) => value.into(),
        ValueKind::I64(value) => value.into(),
        ValueKind::U64(value) => value.into(),
        ValueKind::I128(value) => value.to_string().into(),
        ValueKind::U128(value) => value.to_string().into(),
        ValueKind::Float(value) => value.into(),
        ValueKind::String(value) => value.into(),
        ValueKind::Array(items) => items.into_iter().map(to_json).collect(),
        ValueKind::Table(table) => {
            Value::Object(table.into_iter().map(|(key, value)| (key, to_json(value))).collect())
        }
    }
}

/// Returns the schema of [`Config`] without references, generated once.
pub(super) fn schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.inline_subschemas = true;
        });
        settings.into_generator().into_root_schema_for::<Config>().to_value()
    })
}

/// Returns the schema of an optional setting's value, without the `null` alternative.
fn unwrap_optional(schema: &Value) -> &Value {
    let parts = schema.get("anyOf").and_then(Value::as_array);
    let not_null = |part: &&Value| part.get("type").is_none_or(|kind| kind != "null");
    parts.and_then(|parts| parts.iter().find(not_null)).unwrap_or(schema)
}

/// Returns the expected type, or "" if any type is allowed.
fn expected_type(schema: &Value) -> &str {
    match unwrap_optional(schema).get("type") {
        Some(Value::String(kind)) => kind,
        Some(Value::Array(kinds)) => {
            kinds.iter().filter_map(Value::as_str).find(|kind| *kind != "null").unwrap_or("")
        }
        _ => "",
    }
}

/// Returns the schema of a table's member, or `None` if there is no such setting.
fn member_schema<'s>(schema: &'s Value, name: &str) -> Option<&'s Value> {
    let schema = unwrap_optional(schema);
    if let Some(member) = schema.get("properties").and_then(|properties| properties.get(name)) {
        return Some(member);
    }
    schema.get("additionalProperties").filter(|schema_of_others| schema_of_others.is_object())
}

/// The location of a value: its layer and its path.
struct SettingLocation<'o> {
    origin: &'o str,
    path: Vec<String>,
    from_environment: bool,
}

impl SettingLocation<'_> {
    fn check_value(&mut self, schema: &Value, value: &Value) -> Result<(), ConfigError> {
        let expected = expected_type(schema);
        let fits = match expected {
            "string" => value.is_string() && self.is_allowed_value(schema, value),
            "boolean" => value.is_boolean(),
            "integer" => fits_integer(schema, value),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => self.is_allowed_value(schema, value),
        };
        if !fits {
            return Err(ConfigError::WrongType {
                key: self.format_key(&self.path),
                origin: self.origin.to_owned(),
                expected: describe_expected(schema),
                given: describe_value(value),
            });
        }
        match value {
            Value::Object(table) if expected == "object" => self.check_table(schema, table),
            Value::Array(items) => {
                let Some(each) = unwrap_optional(schema).get("items") else { return Ok(()) };
                for (n, item) in items.iter().enumerate() {
                    self.path.push(n.to_string());
                    self.check_value(each, item)?;
                    self.path.pop();
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn check_table(
        &mut self,
        schema: &Value,
        table: &Map<String, Value>,
    ) -> Result<(), ConfigError> {
        for (name, value) in table {
            self.path.push(name.clone());
            let member = member_schema(schema, name)
                .ok_or_else(|| self.unknown_key_error(self::schema()))?;
            self.check_value(member, value)?;
            self.path.pop();
        }
        Ok(())
    }

    /// Returns true if the schema allows any value or lists this one.
    fn is_allowed_value(&self, schema: &Value, value: &Value) -> bool {
        match unwrap_optional(schema).get("enum").and_then(Value::as_array) {
            Some(words) => words.contains(value),
            None => true,
        }
    }

    /// Formats the key as its layer writes it: `policy.max_parallel` or
    /// `TOOLCRIB_POLICY__MAX_PARALLEL`.
    fn format_key(&self, path: &[String]) -> String {
        if self.from_environment {
            return format!("{PREFIX}{}", path.join("__").to_ascii_uppercase());
        }
        let bare = |part: &str| {
            !part.is_empty()
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
        };
        let quoted = |part: &String| if bare(part) { part.clone() } else { format!("{part:?}") };
        path.iter().map(quoted).collect::<Vec<_>>().join(".")
    }

    fn unknown_key_error(&self, root: &Value) -> ConfigError {
        ConfigError::UnknownKey {
            key: self.format_key(&self.path),
            origin: self.origin.to_owned(),
            nearest: suggest_key(root, &self.path).map(|path| self.format_key(&path)),
        }
    }
}

fn fits_integer(schema: &Value, value: &Value) -> bool {
    let Some(number) = value.as_u64() else { return false };
    match unwrap_optional(schema).get("format").and_then(Value::as_str) {
        Some("uint32") => u32::try_from(number).is_ok(),
        _ => true,
    }
}

fn describe_expected(schema: &Value) -> String {
    if let Some(words) = unwrap_optional(schema).get("enum").and_then(Value::as_array) {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        return format!("one of {}", words.join(", "));
    }
    match expected_type(schema) {
        "string" => "text".to_owned(),
        "boolean" => "true or false".to_owned(),
        "integer"
            if unwrap_optional(schema).get("format").is_some_and(|format| format == "uint32") =>
        {
            format!("a whole number from 0 to {}", u32::MAX)
        }
        "integer" => "a whole number, 0 or more".to_owned(),
        "number" => "a number".to_owned(),
        "array" => "a list".to_owned(),
        _ => "a table".to_owned(),
    }
}

fn describe_value(value: &Value) -> String {
    match value {
        Value::String(text) if text.chars().count() > 60 => "a long text".to_owned(),
        Value::String(_) => format!("the text {value}"),
        Value::Number(_) => format!("the number {value}"),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a table".to_owned(),
        _ => value.to_string(),
    }
}

/// Returns the known key that was probably meant: a similar one in the same table, or else one in
/// another table with the same last part.
fn suggest_key(root: &Value, path: &[String]) -> Option<Vec<String>> {
    let (last, parents) = path.split_last()?;
    let mut parent = root;
    for part in parents {
        parent = member_schema(parent, part).or_else(|| unwrap_optional(parent).get("items"))?;
    }
    let names = unwrap_optional(parent).get("properties").and_then(Value::as_object)?.keys();
    let most_similar = names
        // Counts a swap of two neighbors as one change.
        .map(|name| (strsim::osa_distance(last, name), name))
        .min()
        .filter(|(distance, name)| *distance <= 2.max(name.len() / 3));
    if let Some((_, name)) = most_similar {
        return Some(parents.iter().chain([name]).cloned().collect());
    }
    let mut all = Vec::new();
    collect_keys(root, &mut Vec::new(), &mut all);
    all.into_iter().find(|candidate| candidate.last() == Some(last))
}

fn collect_keys(schema: &Value, path: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    let Some(properties) = unwrap_optional(schema).get("properties").and_then(Value::as_object)
    else {
        return;
    };
    for (name, member) in properties {
        path.push(name.clone());
        all.push(path.clone());
        collect_keys(member, path, all);
        path.pop();
    }
}
