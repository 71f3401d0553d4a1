//! `database.query`: runs one read-only SQL statement against the configured database.
//!
//! The database itself enforces that a statement only reads: a read-only connection (SQLite), or a
//! read-only transaction of a restricted role that is always rolled back (PostgreSQL). No decision
//! is based on the text of a statement. Time, rows and bytes are limited, and a truncated result
//! says so. If no database is configured, the tool reads a generated sample database.

mod postgres;
mod sample;
mod sqlite;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use toolcrib::ProjectLimiter;
use toolcrib::{Code, Effect, Fault, FnTool, Risk, ToolContext};

use super::{BuiltinSetupError, DatabaseSettings};

/// Maximum length of a statement in bytes.
const MAX_SQL: usize = 100_000;
/// Maximum number of concurrent queries; further ones wait. Limits memory, threads and connections.
const MAX_PARALLEL: usize = 8;
/// Maximum number of concurrent queries of one project, so that its slow queries leave capacity for
/// other projects.
const MAX_PARALLEL_PER_PROJECT: usize = 3;

/// A statement to run.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Args")]
pub struct DatabaseQueryArgs {
    /// One SQL statement that reads: SELECT, WITH … SELECT or VALUES. Nothing can be written, and a
    /// second statement after a semicolon is refused.
    #[schemars(length(min = 1, max = 100_000))]
    pub sql: String,
    /// Values for the statement's parameters, in order: ?1, ?2 … in SQLite, $1, $2 … in PostgreSQL.
    /// Use them instead of writing values into the text.
    #[serde(default)]
    pub params: Vec<Value>,
}

/// The result of the statement.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Answer")]
pub struct DatabaseQueryResult {
    /// The names of the columns, in order.
    pub columns: Vec<String>,
    /// The rows; each has one value per column, in the columns' order. Binary values are text like
    /// \x00ff; exact decimals, dates and times are text.
    pub rows: Vec<Vec<Value>>,
    /// The number of rows in this result.
    pub row_count: usize,
    /// `true` if there were more rows than this result has.
    pub truncated: bool,
    /// Description of what was omitted, and how to get it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Limits of one query.
#[derive(Debug, Clone, Copy)]
struct QueryLimits {
    max_rows: usize,
    max_bytes: usize,
    timeout: Duration,
}

enum QueryDatabase {
    Sqlite(sqlite::SqliteDatabase),
    Postgres(Box<postgres::PostgresDatabase>),
}

/// The database that a URL refers to.
#[derive(Debug, PartialEq)]
enum DatabaseLocation {
    Sqlite(PathBuf),
    Postgres(String),
}

/// Creates the tool. Also creates the sample database if the tool will read it and it is missing.
pub fn tool(data_dir: &Path, settings: DatabaseSettings) -> Result<FnTool, BuiltinSetupError> {
    let timeout_ms = settings.timeout_ms.max(1);
    let limits = QueryLimits {
        max_rows: settings.max_rows.max(1),
        max_bytes: settings.max_bytes.max(1),
        // Slightly less than the call's timeout, so that the fault says what was stopped and why.
        timeout: Duration::from_millis((timeout_ms - timeout_ms / 20).max(1)),
    };
    let (database, description) = match settings
        .url
        .as_deref()
        .map(parse_database_url)
        .transpose()?
    {
        None => {
            let path = sample::ensure_sample_database(data_dir).map_err(BuiltinSetupError)?;
            (QueryDatabase::Sqlite(sqlite::SqliteDatabase::new(path, limits)), sample_description())
        }
        Some(DatabaseLocation::Sqlite(path)) => {
            (QueryDatabase::Sqlite(sqlite::SqliteDatabase::new(path, limits)), sqlite_description())
        }
        Some(DatabaseLocation::Postgres(url)) => {
            let postgres = postgres::PostgresDatabase::new(&url, limits, settings.allow_superuser)?;
            (QueryDatabase::Postgres(Box::new(postgres)), postgres_description())
        }
    };
    let database = Arc::new(database);
    let description = format!(
        "{description} Answers at most {} rows and {} bytes; use LIMIT, WHERE and aggregates.",
        limits.max_rows, limits.max_bytes
    );
    let function = move |args: DatabaseQueryArgs, context: ToolContext| {
        let database = Arc::clone(&database);
        async move { query(&database, args, context).await }
    };
    Ok(FnTool::with_context("database.query", &description, function)
        .effect(Effect::Read)
        .risk(Risk::Medium)
        .timeout_ms(timeout_ms)
        // One attempt may take the whole time of the call; the tool itself stops a longer query.
        .attempt_timeout_ms(timeout_ms))
}

async fn query(
    database: &QueryDatabase,
    args: DatabaseQueryArgs,
    context: ToolContext,
) -> Result<DatabaseQueryResult, Fault> {
    if args.sql.len() > MAX_SQL {
        let length = args.sql.len();
        return Err(invalid_statement_fault(format!(
            "sql is {length} bytes long and at most {MAX_SQL} are run"
        )));
    }
    // Databases end a text at a zero byte, so the rest would never be checked.
    if args.sql.contains('\0') {
        return Err(invalid_statement_fault("sql has a zero byte in it: remove it"));
    }
    // Dropping the query's future stops the query, regardless of the reason.
    tokio::select! {
        answer = async {
            match database {
                QueryDatabase::Sqlite(sqlite) => sqlite.query(&context.project, args).await,
                QueryDatabase::Postgres(postgres) => {
                    postgres.query(&context.project, args).await
                }
            }
        } => answer,
        () = context.canceled.cancelled() => {
            Err(Fault::new(Code::Canceled, "the query was canceled").without_side_effect())
        }
    }
}

/// Parses a configured URL. Messages never contain the whole URL, which may have a password in it.
fn parse_database_url(url: &str) -> Result<DatabaseLocation, BuiltinSetupError> {
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(DatabaseLocation::Postgres(url.to_owned()));
    }
    let path = url.strip_prefix("sqlite:").map(|rest| rest.strip_prefix("//").unwrap_or(rest));
    match (path, url.split_once("://")) {
        (Some(path), _) if !path.is_empty() => Ok(DatabaseLocation::Sqlite(path.into())),
        (None, None) if !url.trim().is_empty() => Ok(DatabaseLocation::Sqlite(url.into())),
        (None, Some((scheme, _))) => Err(BuiltinSetupError(format!(
            "builtin.database.url: \"{scheme}://\" is not supported: use a SQLite file's path or \
             postgres://user:password@host/name"
        ))),
        _ => Err(BuiltinSetupError(
            "builtin.database.url is empty: name a SQLite file or postgres://…, or leave it out"
                .into(),
        )),
    }
}

fn sample_description() -> String {
    format!(
        "Runs one read-only SQL statement (SQLite dialect) against the SAMPLE database of this \
         server, a made-up shop: {}. An operator configures a real one with \
         TOOLCRIB_BUILTIN__DATABASE__URL (a SQLite file or postgres://…).",
        sample::TABLES
    )
}

fn sqlite_description() -> String {
    "Runs one read-only SQL statement (SQLite dialect). To see the tables: SELECT name, sql FROM \
     sqlite_master WHERE type = 'table'."
        .into()
}

fn postgres_description() -> String {
    "Runs one read-only SQL statement (PostgreSQL dialect). To see the tables: SELECT \
     table_schema, table_name, column_name, data_type FROM information_schema.columns WHERE \
     table_schema NOT IN ('pg_catalog', 'information_schema')."
        .into()
}

/// Returns a fault caused by the statement. The message is for the author of the statement.
fn invalid_statement_fault(message: impl Into<String>) -> Fault {
    Fault::new(Code::ValidationError, message).without_side_effect()
}

/// Returns the fault for a statement that was stopped because it took too long.
fn query_timeout_fault(limits: &QueryLimits) -> Fault {
    let ms = limits.timeout.as_millis();
    let message = format!(
        "the query was stopped after {ms} ms: narrow it with WHERE and LIMIT, or an operator can \
         raise builtin.database.timeout_ms"
    );
    Fault::new(Code::Timeout, message).without_side_effect()
}

fn hex_text(bytes: &[u8]) -> Value {
    Value::String(format!("\\x{}", toolcrib::domain::id::hex(bytes)))
}

/// Converts a float to JSON. A value that JSON cannot represent as a number becomes text.
fn float_to_json(number: f64) -> Value {
    serde_json::Number::from_f64(number)
        .map_or_else(|| Value::String(number.to_string()), Value::Number)
}

fn query_limiter() -> ProjectLimiter {
    ProjectLimiter::new(MAX_PARALLEL, MAX_PARALLEL_PER_PROJECT)
}

/// Collects rows within the limits.
struct RowCollector {
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
    bytes: usize,
    limits: QueryLimits,
    note: Option<String>,
}

impl RowCollector {
    fn new(columns: Vec<String>, limits: QueryLimits) -> Self {
        Self { columns, rows: Vec::new(), bytes: 0, limits, note: None }
    }

    /// Adds a row. Returns `false` if the limits leave no room for it.
    fn push(&mut self, row: Vec<Value>) -> bool {
        if self.rows.len() >= self.limits.max_rows {
            self.note = Some(format!(
                "there are more rows than the first {} here: add LIMIT and OFFSET, a narrower \
                 WHERE, or aggregate",
                self.rows.len()
            ));
            return false;
        }
        self.bytes += serde_json::to_string(&row).map_or(0, |text| text.len() + 1);
        if self.bytes > self.limits.max_bytes {
            self.note_byte_limit();
            return false;
        }
        self.rows.push(row);
        true
    }

    fn note_byte_limit(&mut self) {
        self.note = Some(format!(
            "row {} and all later rows are omitted, because the answer would exceed {} bytes: \
             select fewer or shorter columns, for example substr(column, 1, 200)",
            self.rows.len() + 1,
            self.limits.max_bytes
        ));
    }

    fn into_result(self) -> DatabaseQueryResult {
        DatabaseQueryResult {
            row_count: self.rows.len(),
            truncated: self.note.is_some(),
            columns: self.columns,
            rows: self.rows,
            note: self.note,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn database_urls_are_parsed() {
        let sqlite = |path: &str| Ok(DatabaseLocation::Sqlite(path.into()));
        assert_eq!(parse_database_url("shop.db"), sqlite("shop.db"));
        assert_eq!(parse_database_url("/var/lib/shop.db"), sqlite("/var/lib/shop.db"));
        assert_eq!(parse_database_url("sqlite:shop.db"), sqlite("shop.db"));
        assert_eq!(parse_database_url("sqlite:///var/shop.db"), sqlite("/var/shop.db"));
        assert!(matches!(
            parse_database_url("postgres://u:p@h/d"),
            Ok(DatabaseLocation::Postgres(_))
        ));
        assert!(matches!(
            parse_database_url("postgresql://u:p@h/d"),
            Ok(DatabaseLocation::Postgres(_))
        ));
        for bad in ["mysql://u:secret@h/d", "", "  ", "sqlite:"] {
            let problem = parse_database_url(bad).unwrap_err().to_string();
            assert!(problem.contains("builtin.database.url"), "{problem}");
            assert!(!problem.contains("secret"), "{problem}");
        }
    }

    #[test]
    fn passwords_are_not_in_debug_output() {
        let settings = DatabaseSettings {
            url: Some("postgres://u:secret@h/d".into()),
            ..DatabaseSettings::default()
        };
        assert!(!format!("{settings:?}").contains("secret"));
    }
}
