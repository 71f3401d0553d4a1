//! The tools the server brings along: calculation, a read-only database, the weather.
//!
//! They are ordinary tools: each is a typed function with a schema, run by the engine like any
//! other. None of them changes anything, none invents an answer when it cannot get one, and none
//! opens a connection before it is called.

pub mod calculation;
pub mod database;
#[cfg(test)]
pub mod testing;
pub mod weather;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::Tool;

/// What the built-in tools are set up with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Where the sample database is made when no database is configured.
    pub data_dir: PathBuf,
    pub database: DatabaseSettings,
    pub weather: WeatherSettings,
}

/// What `database.query` reads, and how much.
#[derive(Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DatabaseSettings {
    /// A SQLite file (`shop.db`, `sqlite:shop.db`) or `postgres://user:password@host/name`; none
    /// = the sample database.
    pub url: Option<String>,
    /// The most rows of one answer.
    pub max_rows: usize,
    /// The most bytes of one answer's rows, as JSON.
    pub max_bytes: usize,
    /// How long a query may run.
    pub timeout_ms: u64,
    /// Whether a PostgreSQL role that can reach the server's files and programs is accepted: such
    /// a role is not held by a read-only transaction.
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

/// Without the URL, which may have a password in it.
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

/// Whom `weather.query` asks.
#[derive(Debug, Clone, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WeatherSettings {
    /// Finds places: an address that answers `/v1/search` as Open-Meteo does.
    pub geocoding_url: String,
    /// Knows the weather: an address that answers `/v1/forecast` as Open-Meteo does.
    pub forecast_url: String,
    /// How long a call has.
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

/// Why the built-in tools cannot be set up: names the setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unusable(pub String);

/// The built-in tools.
pub fn tools(settings: Settings) -> Result<Vec<Arc<dyn Tool>>, Unusable> {
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
    fn three_tools_that_only_read() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { data_dir: folder.path().join("new"), ..Settings::default() };
        let tools = tools(settings).unwrap();
        let definitions: Vec<_> = tools.iter().map(|tool| tool.definition()).collect();
        let names: Vec<_> = definitions.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["calculation.eval", "database.query", "weather.query"]);
        for definition in &definitions {
            assert_eq!(definition.effect, Effect::Read);
            assert!(definition.output_schema.is_some(), "{}", definition.name);
            let input = definition.input_schema.value();
            assert_eq!(input["additionalProperties"], serde_json::json!(false));
        }
    }
}
