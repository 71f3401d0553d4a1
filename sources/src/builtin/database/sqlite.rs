//! Reads a SQLite file.
//!
//! Three independent safeguards keep a statement from writing, none of which depends on its text:
//! the file is opened read-only, the connection is set to `query_only`, and SQLite asks
//! [`authorize_action`] about every action while it prepares a statement. A connection lives for
//! one query, so an idle server holds none and no setting of one query reaches the next.

#[cfg(test)]
mod tests;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::fallible_iterator::FallibleIterator;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::{Null, ValueRef};
use rusqlite::{Batch, Connection, Error, ErrorCode, InterruptHandle, OpenFlags, Row, Statement};
use serde_json::Value;
use tokio::time::timeout_at;
use toolcrib::Fault;
use toolcrib::ProjectLimiter;

use super::{
    DatabaseQueryArgs, DatabaseQueryResult, MAX_SQL, QueryLimits, RowCollector,
    invalid_statement_fault, query_limiter, query_timeout_fault,
};

/// Functions that could reach outside the file. None of them is enabled in this build of SQLite;
/// they are refused in case another build enables them.
const OUTSIDE: [&str; 5] = ["load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"];
/// Pragmas that only describe the schema, in either spelling (`pragma_table_info('t')`). Full-text
/// search itself reads `data_version`.
const DESCRIBING: [&str; 9] = [
    "table_info",
    "table_xinfo",
    "table_list",
    "index_list",
    "index_info",
    "index_xinfo",
    "foreign_key_list",
    "function_list",
    "data_version",
];
/// Functions whose running time grows with the product of two values' lengths, within one step of
/// SQLite, which cannot be interrupted: see [`MAX_SLOW`].
const SLOW: [&str; 6] = ["instr", "replace", "trim", "ltrim", "rtrim", "unhex"];
/// Maximum number of calls of [`SLOW`] functions in one statement. Together with the limit on
/// values it bounds the cost that a canceled query still causes.
const MAX_SLOW: usize = 16;
/// Maximum size of a value in bytes.
const MAX_VALUE: i32 = 512 * 1024;
/// Number of SQLite steps between two checks of the clock.
const STEPS: i32 = 1_000;

/// A SQLite file.
pub struct SqliteDatabase {
    path: PathBuf,
    limits: QueryLimits,
    limiter: ProjectLimiter,
}

/// Tells a query's thread to stop.
#[derive(Default)]
struct QueryInterrupt {
    requested: AtomicBool,
    /// Set as soon as the connection is open.
    interrupt: OnceLock<InterruptHandle>,
}

/// Stops a query's thread when the future that waits for it is dropped.
struct InterruptOnDrop(Arc<QueryInterrupt>);

impl Drop for InterruptOnDrop {
    fn drop(&mut self) {
        self.0.requested.store(true, Ordering::Relaxed);
        if let Some(interrupt) = self.0.interrupt.get() {
            interrupt.interrupt();
        }
    }
}

impl SqliteDatabase {
    /// Creates the database for a path. The first query opens the file.
    pub fn new(path: PathBuf, limits: QueryLimits) -> Self {
        Self { path, limits, limiter: query_limiter() }
    }

    /// Runs one statement. Dropping the future stops it.
    pub async fn query(
        &self,
        project: &str,
        args: DatabaseQueryArgs,
    ) -> Result<DatabaseQueryResult, Fault> {
        let deadline = Instant::now() + self.limits.timeout;
        let timed_out = |_| query_timeout_fault(&self.limits);
        let permit = timeout_at(deadline.into(), self.limiter.acquire(project));
        let permit = permit.await.map_err(timed_out)?;
        let stop = Arc::new(QueryInterrupt::default());
        let _guard = InterruptOnDrop(Arc::clone(&stop));
        let (path, limits) = (self.path.clone(), self.limits);
        let work = tokio::task::spawn_blocking(move || {
            // The permit is released when the thread ends, not when the caller stops waiting.
            let _permit = permit;
            let denied = Arc::new(OnceLock::new());
            let connection =
                open(&path, &stop, deadline, &denied).map_err(|error| open_fault(&path, &error))?;
            run_statement(&connection, &args, limits)
                .map_err(|problem| query_fault(problem, &limits, denied.get().map(String::as_str)))
        });
        let answer = timeout_at(deadline.into(), work).await.map_err(timed_out)?;
        answer.map_err(|error| Fault::runtime(format!("the query's thread failed: {error}")))?
    }
}

/// Opens a connection that can only read, and only until the deadline.
fn open(
    path: &Path,
    stop: &Arc<QueryInterrupt>,
    deadline: Instant,
    denied: &Arc<OnceLock<String>>,
) -> rusqlite::Result<Connection> {
    // Opens the file without the URI flag. This build of SQLite accepts `file:` paths even so, but
    // only an operator can set the path.
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    let _ = stop.interrupt.set(connection.get_interrupt_handle());
    let stop = Arc::clone(stop);
    let should_stop = move || stop.requested.load(Ordering::Relaxed) || Instant::now() >= deadline;
    connection.progress_handler(STEPS, Some(should_stop))?;
    connection.busy_timeout(Duration::from_millis(1_000))?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    // A view or column default in the file may not call what a query may not call.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    // A misspelled column in double quotes is an error, not a text.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DQS_DML, false)?;
    connection.execute_batch("PRAGMA query_only = 1; PRAGMA mmap_size = 0;")?;
    // Reads the schema before the authorizer is set: fails here if the file is not a database.
    connection.query_row("SELECT count(*) FROM sqlite_master", [], |_| Ok(()))?;
    connection.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    connection.set_limit(Limit::SQLITE_LIMIT_WORKER_THREADS, 0)?;
    connection.set_limit(Limit::SQLITE_LIMIT_SQL_LENGTH, MAX_SQL as i32 + 1)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000)?;
    let (mut slow, denied) = (0, Arc::clone(denied));
    let authorizer = move |context: AuthContext<'_>| match authorize_action(&context, &mut slow) {
        Ok(()) => Authorization::Allow,
        Err(reason) => {
            let _ = denied.set(reason);
            Authorization::Deny
        }
    };
    connection.authorizer(Some(authorizer))?;
    Ok(connection)
}

/// Decides what a statement may do: read, call functions, recurse and inspect the schema.
fn authorize_action(context: &AuthContext<'_>, slow: &mut usize) -> Result<(), String> {
    let among = |names: &[&str], name: &str| names.iter().any(|n| n.eq_ignore_ascii_case(name));
    let allowed = match context.action {
        AuthAction::Select | AuthAction::Read { .. } | AuthAction::Recursive => true,
        AuthAction::Function { function_name } => {
            *slow += usize::from(among(&SLOW, function_name));
            if *slow > MAX_SLOW {
                let names = SLOW.join(", ");
                return Err(format!("a statement may have at most {MAX_SLOW} uses of {names}"));
            }
            !among(&OUTSIDE, function_name)
        }
        AuthAction::Pragma { pragma_name, .. } => among(&DESCRIBING, pragma_name),
        _ => false,
    };
    if allowed { Ok(()) } else { Err("this tool only reads: write a SELECT".into()) }
}

enum SqliteQueryError {
    Sqlite(Error),
    Refused(String),
}

impl From<Error> for SqliteQueryError {
    fn from(error: Error) -> Self {
        Self::Sqlite(error)
    }
}

fn run_statement(
    connection: &Connection,
    args: &DatabaseQueryArgs,
    limits: QueryLimits,
) -> Result<DatabaseQueryResult, SqliteQueryError> {
    let message = "only one statement is run: remove what follows the first";
    let mut batch = Batch::new(connection, &args.sql);
    let Some(mut statement) = batch.next()? else {
        return Err(SqliteQueryError::Refused("sql has no statement in it: write a SELECT".into()));
    };
    // The rest is only prepared, never run. Text that cannot be prepared is also a second
    // statement.
    match batch.next() {
        Ok(None) => {}
        _ => return Err(SqliteQueryError::Refused(message.into())),
    }
    if statement.column_count() == 0 || !statement.readonly() {
        return Err(SqliteQueryError::Refused(
            "the statement returns no rows: write a SELECT".into(),
        ));
    }
    bind(&mut statement, &args.params)?;
    let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
    let width = columns.len();
    let mut collected = RowCollector::new(columns, limits);
    let mut rows = statement.raw_query();
    while let Some(row) = rows.next()? {
        if !collected.push(row_to_json(row, width)?) {
            break;
        }
    }
    Ok(collected.into_result())
}

fn bind(statement: &mut Statement<'_>, params: &[Value]) -> Result<(), SqliteQueryError> {
    let expected = statement.parameter_count();
    if expected != params.len() {
        let provided = params.len();
        return Err(SqliteQueryError::Refused(format!(
            "the statement has {expected} parameters and params has {provided} values: give one value \
             for each ?"
        )));
    }
    for (n, value) in params.iter().enumerate() {
        let index = n + 1;
        match value {
            Value::Null => statement.raw_bind_parameter(index, Null)?,
            Value::Bool(truth) => statement.raw_bind_parameter(index, truth)?,
            Value::String(text) => statement.raw_bind_parameter(index, text)?,
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => statement.raw_bind_parameter(index, whole)?,
                (None, number) => statement.raw_bind_parameter(index, number)?,
            },
            // For `json_each(?1)`.
            Value::Array(_) | Value::Object(_) => {
                statement.raw_bind_parameter(index, value.to_string())?;
            }
        }
    }
    Ok(())
}

fn row_to_json(row: &Row<'_>, width: usize) -> rusqlite::Result<Vec<Value>> {
    let value = |index| {
        Ok(match row.get_ref(index)? {
            ValueRef::Null => Value::Null,
            ValueRef::Integer(whole) => Value::from(whole),
            ValueRef::Real(number) => super::float_to_json(number),
            ValueRef::Text(text) => Value::String(String::from_utf8_lossy(text).into_owned()),
            ValueRef::Blob(bytes) => super::hex_text(bytes),
        })
    };
    (0..width).map(value).collect()
}

/// Returns the fault for a file that cannot be opened, which is not the statement's fault.
fn open_fault(path: &Path, error: &Error) -> Fault {
    Fault::unreachable(format!("the database {path:?} cannot be opened: {error}"))
}

fn query_fault(problem: SqliteQueryError, limits: &QueryLimits, denied: Option<&str>) -> Fault {
    let error = match problem {
        SqliteQueryError::Refused(message) => return invalid_statement_fault(message),
        SqliteQueryError::Sqlite(error) => error,
    };
    match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => return query_timeout_fault(limits),
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            return Fault::unreachable(format!("the database is busy: {error}"));
        }
        Some(
            ErrorCode::CannotOpen
            | ErrorCode::NotADatabase
            | ErrorCode::DatabaseCorrupt
            | ErrorCode::SystemIoFailure
            | ErrorCode::DiskFull
            | ErrorCode::OutOfMemory
            | ErrorCode::FileLockingProtocolFailed,
        ) => return Fault::unreachable(format!("the database cannot be read: {error}")),
        _ => {}
    }
    let description = match error {
        // Omits the statement, which the author of the call already knows.
        Error::SqlInputError { msg, offset, .. } if offset >= 0 => {
            format!("{msg} (at byte {})", offset + 1)
        }
        Error::SqlInputError { msg, .. } => msg,
        other => other.to_string(),
    };
    let reason = denied.map_or_else(String::new, |reason| format!(": {reason}"));
    invalid_statement_fault(format!("SQLite refused the statement: {description}{reason}"))
}
