//! The built-in tools: calculation, read-only database queries, current weather.
//!
//! They are ordinary tools: typed functions with schemas, which the engine runs like any other.
//! They change nothing, never invent a result, and open no connection before they are called.

mod calculation;
mod database;
#[cfg(test)]
mod testing;
mod weather;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::Tool;

/// Settings of the built-in tools.
#[derive(Debug, Clone, Default)]
pub struct BuiltinToolSettings {
    /// Directory of the sample database, which is created if no database is configured.
    pub data_dir: PathBuf,
    pub database: DatabaseSettings,
    pub weather: WeatherSettings,
}

/// The database that `database.query` reads, and its limits.
#[derive(Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DatabaseSettings {
    /// SQLite file (`shop.db`, `sqlite:shop.db`) or `postgres://user:password@host/name`. Default:
    /// a sample database.
    pub url: Option<String>,
    /// Maximum number of rows in a result.
    pub max_rows: usize,
    /// Maximum size of a result's rows in bytes, as JSON.
    pub max_bytes: usize,
    /// Maximum duration of a query in milliseconds.
    pub timeout_ms: u64,
    /// Accept a PostgreSQL role that can reach the database server's files and programs. A
    /// read-only transaction does not restrict such a role.
    pub allow_superuser: bool,
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self {
            url: None,
            max_rows: 1_000,
            max_bytes: 1 << 20,
            timeout_ms: 10_000,
            allow_superuser: false,
        }
    }
}

/// Hides the URL, which may contain a password.
impl fmt::Debug for DatabaseSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseSettings")
            .field("url", &self.url.as_ref().map(|_| "…"))
            .field("max_rows", &self.max_rows)
            .field("max_bytes", &self.max_bytes)
            .field("timeout_ms", &self.timeout_ms)
            .field("allow_superuser", &self.allow_superuser)
            .finish()
    }
}

/// The services that `weather.query` uses.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WeatherSettings {
    /// Geocoding service: a URL that serves `/v1/search` like Open-Meteo.
    pub geocoding_url: String,
    /// Forecast service: a URL that serves `/v1/forecast` like Open-Meteo.
    pub forecast_url: String,
    /// Timeout of a call in milliseconds.
    pub timeout_ms: u64,
}

impl Default for WeatherSettings {
    fn default() -> Self {
        Self {
            geocoding_url: "https://geocoding-api.open-meteo.com".into(),
            forecast_url: "https://api.open-meteo.com".into(),
            timeout_ms: 5_000,
        }
    }
}

/// An error in the settings of a built-in tool. The message names the setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BuiltinSetupError(pub String);

/// Creates the built-in tools.
pub fn tools(settings: BuiltinToolSettings) -> Result<Vec<Arc<dyn Tool>>, BuiltinSetupError> {
    Ok(vec![
        Arc::new(calculation::tool()),
        Arc::new(database::tool(&settings.data_dir, settings.database)?),
        Arc::new(weather::tool(settings.weather)?),
    ])
}

#[cfg(test)]
mod tests {
    use toolcrib::Effect;

    use super::*;

    #[test]
    fn the_builtin_tools_are_three_read_only_tools() {
        let folder = tempfile::tempdir().unwrap();
        let settings = BuiltinToolSettings {
            data_dir: folder.path().join("new"),
            ..BuiltinToolSettings::default()
        };
        let tools = tools(settings).unwrap();
        let definitions: Vec<_> = tools.iter().map(|tool| tool.definition()).collect();
        let names: Vec<_> = definitions.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["calculation.eval", "database.query", "weather.query"]);
        for definition in &definitions {
            assert_eq!(definition.effect, Effect::Read);
            assert!(definition.output_schema.is_some(), "{}", definition.name);
            let input = definition.input_schema.to_value();
            assert_eq!(input["additionalProperties"], serde_json::json!(false));
        }
    }
}
