//! Reads a PostgreSQL database.
//!
//! Each query has its own connection and runs in a read-only transaction that is always rolled
//! back, through the extended protocol, in which the server accepts only one statement. A read-only
//! transaction does not restrict a role with access to the server's files or programs, so such a
//! role is refused. Rows are fetched in small batches and the bytes read from the socket are
//! counted, so that a large result never is in memory as a whole. The connection is not encrypted:
//! use it on a trusted network, or through a tunnel.

mod socket;
#[cfg(test)]
mod tests;
mod values;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use socket::{ByteLimitedSocket, PostgresAddress};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::ToSql;
use tokio_postgres::{CancelToken, Client, Config, Error, NoTls, Statement, Transaction};
use toolcrib::ProjectLimiter;
use toolcrib::{Code, Fault};
use values::{Cell, Param};

use super::{
    BuiltinSetupError, DatabaseQueryArgs, DatabaseQueryResult, QueryLimits, RowCollector,
    invalid_statement_fault, query_limiter, query_timeout_fault,
};

/// Number of rows fetched at a time.
const FETCH_SIZE: usize = 50;
/// Bytes that a connection may receive besides the rows: startup, catalog lookups, rows in flight.
const OVERHEAD_BYTES: usize = 1 << 20;
/// Factor by which a row can be larger on the wire than as JSON: a small number takes 12 bytes
/// there.
const WIRE_FACTOR: usize = 8;
/// Connection timeout.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Selects the roles, among those the session can assume, that a read-only transaction does not
/// restrict: they can reach files or programs, or cause effects that a rollback does not undo.
const PRIVILEGED_ROLES_SQL: &str = "SELECT rolname::text FROM pg_catalog.pg_roles WHERE (rolsuper OR \
rolreplication OR rolname IN ('pg_read_server_files', 'pg_write_server_files', \
'pg_execute_server_program')) AND pg_catalog.pg_has_role(session_user, oid, 'MEMBER') ORDER BY 1";

/// A PostgreSQL database.
pub struct PostgresDatabase {
    config: Config,
    addresses: Vec<PostgresAddress>,
    limits: QueryLimits,
    allow_superuser: bool,
    limiter: ProjectLimiter,
}

/// A connection, with a guard that stops whatever runs on it.
struct PostgresSession {
    client: Client,
    /// Set when the server sends more bytes than the limit.
    byte_limit_hit: Arc<AtomicBool>,
    guard: CancelQueryOnDrop,
}

/// Closes the connection when dropped. While a statement may be running, also cancels it at the
/// server.
struct CancelQueryOnDrop {
    token: CancelToken,
    address: PostgresAddress,
    connection: AbortHandle,
    running: bool,
}

impl Drop for CancelQueryOnDrop {
    fn drop(&mut self) {
        self.connection.abort();
        if !self.running {
            return;
        }
        let (token, address) = (self.token.clone(), self.address.clone());
        // The server does not notice by itself that the client of a long query is gone.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(timeout(CONNECT_TIMEOUT, async move {
            let Ok(socket) = address.connect().await else { return };
            if let Err(error) = token.cancel_query_raw(socket, NoTls).await {
                tracing::warn!(%error, "cannot stop a PostgreSQL query");
            }
        }));
    }
}

impl PostgresDatabase {
    /// Creates the database for a URL. The first query connects to it.
    pub fn new(
        url: &str,
        limits: QueryLimits,
        allow_superuser: bool,
    ) -> Result<Self, BuiltinSetupError> {
        let unusable = |reason: &str| BuiltinSetupError(format!("builtin.database.url: {reason}"));
        // The parser's own message could repeat a part of the URL, and with it the password.
        let mut config: Config = url.parse().map_err(|_| {
            unusable("not a PostgreSQL URL: write postgres://user:password@host:5432/name")
        })?;
        if !matches!(config.get_ssl_mode(), SslMode::Disable | SslMode::Prefer) {
            return Err(unusable(
                "sslmode=require is not supported: connect through a tunnel, or leave it out on a \
                 network you trust",
            ));
        }
        let addresses = socket::addresses(&config);
        if addresses.is_empty() {
            return Err(unusable("it names no host"));
        }
        if config.get_application_name().is_none() {
            config.application_name("toolcrib");
        }
        Ok(Self { config, addresses, limits, allow_superuser, limiter: query_limiter() })
    }

    /// Runs one statement. Dropping the future stops it.
    pub async fn query(
        &self,
        project: &str,
        args: DatabaseQueryArgs,
    ) -> Result<DatabaseQueryResult, Fault> {
        let all = async {
            let _permit = self.limiter.acquire(project).await;
            let mut session = self.connect().await?;
            let result = self.run(&mut session, &args).await;
            // The statement is over and need not be canceled, unless the server is still sending.
            session.guard.running = session.byte_limit_hit.load(Ordering::Relaxed);
            result
        };
        timeout(self.limits.timeout, all)
            .await
            .unwrap_or_else(|_| Err(query_timeout_fault(&self.limits)))
    }

    async fn connect(&self) -> Result<PostgresSession, Fault> {
        let unreachable = |reason: &dyn std::fmt::Display| {
            Fault::unreachable(format!("the PostgreSQL database cannot be reached: {reason}"))
        };
        let connecting = async {
            let (socket, address) =
                socket::connect_first(&self.addresses).await.map_err(|e| unreachable(&e))?;
            let byte_limit_hit = Arc::new(AtomicBool::new(false));
            let byte_limit =
                self.limits.max_bytes.saturating_mul(WIRE_FACTOR).saturating_add(OVERHEAD_BYTES);
            let socket = ByteLimitedSocket::new(socket, byte_limit, Arc::clone(&byte_limit_hit));
            let (client, connection) =
                self.config.connect_raw(socket, NoTls).await.map_err(|error| {
                    let fault = unreachable(&server_message(&error));
                    // Wrong credentials or names stay wrong.
                    fault.retryable(
                        !sqlstate_class(&error).is_some_and(|c| matches!(c, "28" | "3D")),
                    )
                })?;
            let task = tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "a PostgreSQL connection ended");
                }
            });
            let token = client.cancel_token();
            let guard = CancelQueryOnDrop {
                token,
                address,
                connection: task.abort_handle(),
                running: true,
            };
            Ok(PostgresSession { client, byte_limit_hit, guard })
        };
        let timeout_ms = CONNECT_TIMEOUT.as_millis();
        let timed_out = || Err(unreachable(&format!("no answer within {timeout_ms} ms")));
        timeout(CONNECT_TIMEOUT, connecting).await.unwrap_or_else(|_| timed_out())
    }

    async fn run(
        &self,
        session: &mut PostgresSession,
        args: &DatabaseQueryArgs,
    ) -> Result<DatabaseQueryResult, Fault> {
        let start = session.client.build_transaction().read_only(true).start();
        let transaction = start.await.map_err(|error| self.fault(&error))?;
        let byte_limit_hit = Arc::clone(&session.byte_limit_hit);
        let result = self.run_statement(&transaction, args, &byte_limit_hit).await;
        // The transaction is read-only; if a statement wrote anyway, the rollback undoes it.
        let _ = transaction.rollback().await;
        result
    }

    async fn run_statement(
        &self,
        transaction: &Transaction<'_>,
        args: &DatabaseQueryArgs,
        byte_limit_hit: &AtomicBool,
    ) -> Result<DatabaseQueryResult, Fault> {
        let failed = |error: Error| self.fault(&error);
        let ms = self.limits.timeout.as_millis();
        let settings = format!(
            "SET LOCAL statement_timeout = {ms}; SET LOCAL lock_timeout = {ms}; \
             SET LOCAL idle_in_transaction_session_timeout = {}; \
             SET LOCAL max_parallel_workers_per_gather = 0",
            ms + 1_000
        );
        transaction.batch_execute(&settings).await.map_err(failed)?;
        if !self.allow_superuser {
            self.check_role(transaction).await?;
        }
        let statement = transaction.prepare(&args.sql).await.map_err(failed)?;
        let columns = statement.columns();
        if columns.is_empty() {
            return Err(invalid_statement_fault("the statement returns no rows: write a SELECT"));
        }
        let params =
            Param::all(statement.params(), &args.params).map_err(invalid_statement_fault)?;
        let params: Vec<&(dyn ToSql + Sync)> =
            params.iter().map(|param| param as &(dyn ToSql + Sync)).collect();
        let names = columns.iter().map(|column| column.name().to_owned()).collect();
        let mut collected = RowCollector::new(names, self.limits);
        let json_statement = self.with_json_columns(transaction, &args.sql, statement).await?;
        let portal = transaction.bind(&json_statement, &params).await.map_err(failed)?;
        loop {
            let fetch_size = FETCH_SIZE.min(self.limits.max_rows + 1 - collected.rows.len());
            let fetch_count = i32::try_from(fetch_size).unwrap_or(1);
            let rows = match transaction.query_portal(&portal, fetch_count).await {
                Ok(rows) => rows,
                Err(_) if byte_limit_hit.load(Ordering::Relaxed) => {
                    collected.note_byte_limit();
                    return Ok(collected.into_result());
                }
                Err(error) => return Err(failed(error)),
            };
            let last = rows.len() < fetch_size;
            for row in rows {
                let cell = |position| row.try_get::<_, Cell>(position).map(|cell| cell.0);
                let values = (0..row.len()).map(cell).collect::<Result<Vec<_>, _>>();
                if !collected.push(values.map_err(failed)?) {
                    return Ok(collected.into_result());
                }
            }
            if last {
                return Ok(collected.into_result());
            }
        }
    }

    /// Refuses a role that the read-only transaction would not restrict.
    async fn check_role(&self, transaction: &Transaction<'_>) -> Result<(), Fault> {
        let rows = transaction
            .query(PRIVILEGED_ROLES_SQL, &[])
            .await
            .map_err(|error| self.fault(&error))?;
        let names: Vec<String> = rows.iter().filter_map(|row| row.try_get(0).ok()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let message = format!(
            "the configured PostgreSQL role is not restricted (it is or can become: {}), so it \
             could reach the database server's files and programs: an operator must configure a \
             role that can only SELECT in builtin.database.url, or set \
             builtin.database.allow_superuser",
            names.join(", ")
        );
        Err(Fault::new(Code::PermissionDenied, message).without_side_effect())
    }

    /// Returns the statement to run: the given one, or, if it has columns of types without an
    /// obvious JSON form, a statement around it in which the server converts those columns to JSON.
    async fn with_json_columns(
        &self,
        transaction: &Transaction<'_>,
        sql: &str,
        statement: Statement,
    ) -> Result<Statement, Fault> {
        let columns = statement.columns();
        if columns.iter().all(|column| values::has_decoder(column.type_())) {
            return Ok(statement);
        }
        let inner = sql.trim_end_matches(|c: char| c.is_whitespace() || c == ';');
        let aliases: Vec<_> = (0..columns.len()).map(|n| format!("c{n}")).collect();
        let outer: Vec<_> = columns
            .iter()
            .zip(&aliases)
            .map(|(column, alias)| values::select_expression(column.type_(), alias))
            .collect();
        let wrapped =
            format!("SELECT {} FROM (\n{inner}\n) AS q ({})", outer.join(", "), aliases.join(", "));
        let types = statement.params();
        transaction.prepare_typed(&wrapped, types).await.map_err(|error| {
            let needs_conversion = |n: &usize| !values::has_decoder(columns[*n].type_());
            let name = |n: usize| format!("{} ({})", columns[n].name(), columns[n].type_());
            let names: Vec<_> = (0..columns.len()).filter(needs_conversion).map(name).collect();
            let fault = self.fault(&error);
            let advice = format!(
                "{}; the columns {} can only be shown from a SELECT without text after it: write \
                 one, or cast them to text",
                fault.message,
                names.join(", ")
            );
            Fault { message: advice, ..fault }
        })
    }

    /// Converts the error of a statement to a fault.
    fn fault(&self, error: &Error) -> Fault {
        let message = server_message(error);
        match sqlstate_class(error) {
            _ if error.code().is_some_and(|code| code.code() == "57014") => {
                query_timeout_fault(&self.limits)
            }
            // Connection lost, out of resources, shutdown, internal error: not the statement's
            // fault.
            None | Some("08" | "53" | "57" | "58" | "F0" | "XX") if !is_value_error(error) => {
                Fault::unreachable(format!("the PostgreSQL database failed: {message}"))
            }
            _ => invalid_statement_fault(format!("PostgreSQL refused the statement: {message}")),
        }
    }
}

/// Returns `true` if a value could not be encoded or decoded, which concerns the statement although
/// the server did not report it.
fn is_value_error(error: &Error) -> bool {
    use std::error::Error as _;
    error.as_db_error().is_none()
        && error.source().is_some_and(|cause| cause.is::<values::UnreadableValueError>())
}

/// Returns the class of the server's error, which is the first two characters of its SQLSTATE.
fn sqlstate_class(error: &Error) -> Option<&str> {
    error.code().and_then(|code| code.code().get(..2))
}

/// Returns the server's message in one line.
fn server_message(error: &Error) -> String {
    use std::fmt::Write;
    let Some(db) = error.as_db_error() else { return error_chain(error) };
    let mut text = format!("{} ({})", db.message(), db.code().code());
    if let Some(detail) = db.detail() {
        let _ = write!(text, "; {detail}");
    }
    if let Some(hint) = db.hint() {
        let _ = write!(text, "; hint: {hint}");
    }
    if let Some(tokio_postgres::error::ErrorPosition::Original(position)) = db.position() {
        let _ = write!(text, "; at character {position}");
    }
    text
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
