//! Reads a SQLite file.
//!
//! Three locks, each enough by itself, none of which looks at the statement's text: the file is
//! opened read-only, the connection is set to query only, and SQLite asks [`verdict`] about every
//! single thing a statement would do while preparing it. A connection lives for one query, so an
//! idle server keeps none, and nothing set in one query can reach the next.

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
use tokio::sync::Semaphore;
use tokio::time::timeout_at;
use toolcrib::Fault;

use super::{Answer, Args, Collected, Limits, MAX_PARALLEL, MAX_SQL, refused, stopped};

/// Functions that could reach outside the file. SQLite here has none of them switched on; the
/// refusal stands even if a build of it had.
const OUTSIDE: [&str; 5] = ["load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"];
/// Pragmas that only describe the schema, in either spelling (`pragma_table_info('t')`).
/// Full-text search reads `data_version` by itself.
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
/// Functions whose time grows with the product of two values' lengths, within one step of SQLite,
/// which nothing can interrupt: see [`MAX_SLOW`].
const SLOW: [&str; 6] = ["instr", "replace", "trim", "ltrim", "rtrim", "unhex"];
/// How many of them one statement may have. With the cap on values it bounds what a canceled query
/// still costs.
const MAX_SLOW: usize = 16;
/// The longest value, in bytes.
const MAX_VALUE: i32 = 512 * 1024;
/// How many of SQLite's steps pass between two looks at the clock.
const STEPS: i32 = 1_000;

/// A SQLite file.
pub struct Sqlite {
    path: PathBuf,
    limits: Limits,
    places: Arc<Semaphore>,
}

/// Tells a query's thread to stop.
#[derive(Default)]
struct Stop {
    asked: AtomicBool,
    /// There as soon as the connection is.
    interrupt: OnceLock<InterruptHandle>,
}

/// Stops a query's thread when whoever waits for it is gone.
struct StopOnDrop(Arc<Stop>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.asked.store(true, Ordering::Relaxed);
        if let Some(interrupt) = self.0.interrupt.get() {
            interrupt.interrupt();
        }
    }
}

impl Sqlite {
    /// The file at this path; it is first opened by the first query.
    pub fn new(path: PathBuf, limits: Limits) -> Self {
        Self { path, limits, places: Arc::new(Semaphore::new(MAX_PARALLEL)) }
    }

    /// Runs one statement. Dropping the future stops it.
    pub async fn query(&self, args: Args) -> Result<Answer, Fault> {
        let deadline = Instant::now() + self.limits.timeout;
        let late = |_| stopped(&self.limits);
        let place = timeout_at(deadline.into(), Arc::clone(&self.places).acquire_owned());
        // The semaphore is never closed, so that all that can fail is the wait.
        let place = place.await.map_err(late)?.ok();
        let stop = Arc::new(Stop::default());
        let _guard = StopOnDrop(Arc::clone(&stop));
        let (path, limits) = (self.path.clone(), self.limits);
        let work = tokio::task::spawn_blocking(move || {
            // The place is free when the thread is, not when the caller has gone.
            let _place = place;
            let denied = Arc::new(OnceLock::new());
            let connection =
                open(&path, &stop, deadline, &denied).map_err(|error| unopened(&path, &error))?;
            read(&connection, &args, limits)
                .map_err(|problem| fault(problem, &limits, denied.get().map(String::as_str)))
        });
        let answer = timeout_at(deadline.into(), work).await.map_err(late)?;
        answer.map_err(|error| Fault::runtime(format!("the query's thread failed: {error}")))?
    }
}

/// A connection that can only read, and only until the deadline.
fn open(
    path: &Path,
    stop: &Arc<Stop>,
    deadline: Instant,
    denied: &Arc<OnceLock<String>>,
) -> rusqlite::Result<Connection> {
    // Without the URI flag; SQLite is built to read `file:` anyway, which only an operator can say.
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags)?;
    let _ = stop.interrupt.set(connection.get_interrupt_handle());
    let stop = Arc::clone(stop);
    let over = move || stop.asked.load(Ordering::Relaxed) || Instant::now() >= deadline;
    connection.progress_handler(STEPS, Some(over))?;
    connection.busy_timeout(Duration::from_millis(1_000))?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    // A view or column default made by somebody else may not call what a query may not call.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    // A misspelled column in double quotes is an error, not a text.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DQS_DML, false)?;
    connection.execute_batch("PRAGMA query_only = 1; PRAGMA mmap_size = 0;")?;
    // Read the schema while nothing is refused yet: it fails here if this is not a database.
    connection.query_row("SELECT count(*) FROM sqlite_master", [], |_| Ok(()))?;
    connection.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    connection.set_limit(Limit::SQLITE_LIMIT_WORKER_THREADS, 0)?;
    connection.set_limit(Limit::SQLITE_LIMIT_SQL_LENGTH, MAX_SQL as i32 + 1)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000)?;
    let (mut slow, denied) = (0, Arc::clone(denied));
    let authorizer = move |context: AuthContext<'_>| match verdict(&context, &mut slow) {
        Ok(()) => Authorization::Allow,
        Err(why) => {
            let _ = denied.set(why);
            Authorization::Deny
        }
    };
    connection.authorizer(Some(authorizer))?;
    Ok(connection)
}

/// What a statement may do: read, call functions, recurse, look at the schema. Nothing else.
fn verdict(context: &AuthContext<'_>, slow: &mut usize) -> Result<(), String> {
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

enum Problem {
    Sqlite(Error),
    Refused(String),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Sqlite(error)
    }
}

fn read(connection: &Connection, args: &Args, limits: Limits) -> Result<Answer, Problem> {
    let one = "only one statement is run: remove what follows the first";
    let mut batch = Batch::new(connection, &args.sql);
    let Some(mut statement) = batch.next()? else {
        return Err(Problem::Refused("sql has no statement in it: write a SELECT".into()));
    };
    // Only prepared, never run; what cannot even be prepared is a second statement all the same.
    match batch.next() {
        Ok(None) => {}
        _ => return Err(Problem::Refused(one.into())),
    }
    if statement.column_count() == 0 || !statement.readonly() {
        return Err(Problem::Refused("the statement returns no rows: write a SELECT".into()));
    }
    bind(&mut statement, &args.params)?;
    let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
    let width = columns.len();
    let mut collected = Collected::new(columns, limits);
    let mut rows = statement.raw_query();
    while let Some(row) = rows.next()? {
        if !collected.push(values(row, width)?) {
            break;
        }
    }
    Ok(collected.answer())
}

fn bind(statement: &mut Statement<'_>, params: &[Value]) -> Result<(), Problem> {
    let wanted = statement.parameter_count();
    if wanted != params.len() {
        let given = params.len();
        return Err(Problem::Refused(format!(
            "the statement has {wanted} parameters and params has {given} values: give one value \
             for each ?"
        )));
    }
    for (n, value) in params.iter().enumerate() {
        let at = n + 1;
        match value {
            Value::Null => statement.raw_bind_parameter(at, Null)?,
            Value::Bool(truth) => statement.raw_bind_parameter(at, truth)?,
            Value::String(text) => statement.raw_bind_parameter(at, text)?,
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => statement.raw_bind_parameter(at, whole)?,
                (None, number) => statement.raw_bind_parameter(at, number)?,
            },
            // For json_each(?1).
            Value::Array(_) | Value::Object(_) => {
                statement.raw_bind_parameter(at, value.to_string())?;
            }
        }
    }
    Ok(())
}

fn values(row: &Row<'_>, width: usize) -> rusqlite::Result<Vec<Value>> {
    let value = |at| {
        Ok(match row.get_ref(at)? {
            ValueRef::Null => Value::Null,
            ValueRef::Integer(whole) => Value::from(whole),
            ValueRef::Real(number) => super::number(number),
            ValueRef::Text(text) => Value::String(String::from_utf8_lossy(text).into_owned()),
            ValueRef::Blob(bytes) => super::text_of_bytes(bytes),
        })
    };
    (0..width).map(value).collect()
}

/// The file cannot be read at all: not the statement's fault.
fn unopened(path: &Path, error: &Error) -> Fault {
    Fault::unreachable(format!("the database {path:?} cannot be opened: {error}"))
}

fn fault(problem: Problem, limits: &Limits, denied: Option<&str>) -> Fault {
    let error = match problem {
        Problem::Refused(message) => return refused(message),
        Problem::Sqlite(error) => error,
    };
    match error.sqlite_error_code() {
        Some(ErrorCode::OperationInterrupted) => return stopped(limits),
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
    let said = match error {
        // Without the statement, which whoever gets this has written.
        Error::SqlInputError { msg, offset, .. } if offset >= 0 => {
            format!("{msg} (at byte {})", offset + 1)
        }
        Error::SqlInputError { msg, .. } => msg,
        other => other.to_string(),
    };
    let why = denied.map_or_else(String::new, |why| format!(": {why}"));
    refused(format!("SQLite refused the statement: {said}{why}"))
}
