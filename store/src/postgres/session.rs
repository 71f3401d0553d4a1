//! Sessions with PostgreSQL: opens connections and caches the prepared statements of each.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::watch::Sender;
use tokio::task::AbortHandle;
use tokio_postgres::config::SslMode;
use tokio_postgres::types::ToSql;
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Row, RowStream, Statement};
use toolcrib::ports::store::StoreError;

use super::OpenError;

/// Maximum time to establish a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The parameters of a statement.
pub(super) type SqlParams<'a> = &'a [&'a (dyn ToSql + Sync)];

/// Opens connections to one database. Never printed, because its configuration holds a password.
#[derive(Clone)]
pub(super) struct Connector(Config, Handle);

impl Connector {
    pub(super) fn parse(url: &str) -> Result<Self, OpenError> {
        // The parser's own message could repeat a part of the URL, and with it the password.
        let mut config: Config = url.parse().map_err(|_| OpenError::Url(BAD_URL))?;
        if !matches!(config.get_ssl_mode(), SslMode::Disable | SslMode::Prefer) {
            return Err(OpenError::Url(NO_TLS));
        }
        if config.get_hosts().is_empty() {
            return Err(OpenError::Url("it names no host"));
        }
        if config.get_application_name().is_none() {
            config.application_name("toolcrib");
        }
        config.connect_timeout(CONNECT_TIMEOUT);
        // Both sides detect a network that has gone silent.
        config.keepalives_idle(Duration::from_secs(15));
        config.keepalives_interval(Duration::from_secs(5)).keepalives_retries(3);
        config.tcp_user_timeout(Duration::from_secs(30));
        let home = Handle::try_current().map_err(|_| OpenError::Url("there is no runtime"))?;
        Ok(Self(config, home))
    }

    /// Opens a connection that forwards its notifications to `signal`. The connection lives in the
    /// store's runtime, because the task that requests it may end before the connection does.
    pub(super) async fn connect(
        &self,
        signal: Option<Sender<u64>>,
    ) -> Result<Session, SessionError> {
        let connecting = connect(self.0.clone(), signal);
        let to_error =
            |_| SessionError::Store(StoreError::Unavailable("the store is closed".to_owned()));
        self.1.spawn(connecting).await.map_err(to_error)?
    }
}

async fn connect(config: Config, signal: Option<Sender<u64>>) -> Result<Session, SessionError> {
    let (client, mut connection) = config.connect(NoTls).await?;
    let driver = tokio::spawn(async move {
        let messages = futures::stream::poll_fn(move |context| connection.poll_message(context));
        let mut messages = std::pin::pin!(messages);
        while let Some(Ok(message)) = messages.next().await {
            if let (AsyncMessage::Notification(_), Some(signal)) = (message, &signal) {
                signal.send_modify(|count| *count += 1);
            }
        }
    });
    client.batch_execute(SESSION_SETUP_SQL).await?;
    Ok(Session { client, driver: driver.abort_handle(), statements: Mutex::default() })
}

const BAD_URL: &str = "not a PostgreSQL URL: write postgres://user:password@host:5432/name";
const NO_TLS: &str = "sslmode=require is not supported: connect through a tunnel, or leave it out \
     on a network you trust";

/// Sets up a session: Toolcrib's tables are found without their schema name, and an acknowledged
/// commit is durable regardless of the settings of the PostgreSQL server.
const SESSION_SETUP_SQL: &str = "SET search_path TO toolcrib, pg_catalog; \
     SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; \
     SELECT set_config('synchronous_commit', 'on', false) \
     WHERE current_setting('synchronous_commit') IN ('off', 'local')";

/// A connection, with its driver task and its prepared statements.
pub(super) struct Session {
    client: Client,
    /// The task that reads and writes the socket.
    driver: AbortHandle,
    statements: Mutex<HashMap<String, Statement>>,
}

impl Session {
    /// Ends the connection, even if statements are in flight on it.
    pub(super) fn abort(&self) {
        self.driver.abort();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub(super) async fn batch_execute(&self, sql: &str) -> Result<(), SessionError> {
        self.client.batch_execute(sql).await.map_err(SessionError::from)
    }

    pub(super) async fn prepare_cached(&self, sql: &str) -> Result<Statement, SessionError> {
        let prepared = self.statements.lock().get(sql).cloned();
        if let Some(prepared) = prepared {
            return Ok(prepared);
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.lock().insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    pub(super) async fn query(
        &self,
        sql: &str,
        params: SqlParams<'_>,
    ) -> Result<Vec<Row>, SessionError> {
        let statement = self.prepare_cached(sql).await?;
        Ok(self.client.query(&statement, params).await?)
    }

    /// Returns the first row, if there is one.
    pub(super) async fn query_first(
        &self,
        sql: &str,
        params: SqlParams<'_>,
    ) -> Result<Option<Row>, SessionError> {
        Ok(self.query(sql, params).await?.into_iter().next())
    }

    /// Runs a statement and returns the number of rows it changed.
    pub(super) async fn execute(
        &self,
        sql: &str,
        params: SqlParams<'_>,
    ) -> Result<u64, SessionError> {
        let statement = self.prepare_cached(sql).await?;
        Ok(self.client.execute(&statement, params).await?)
    }

    /// Returns the rows one by one; rows that are not read are not held in memory.
    pub(super) async fn query_stream(
        &self,
        sql: &str,
        params: SqlParams<'_>,
    ) -> Result<RowStream, SessionError> {
        let statement = self.prepare_cached(sql).await?;
        Ok(self.client.query_raw(&statement, params.iter().copied()).await?)
    }

    /// Runs a query and converts its rows.
    pub(super) async fn query_map<T>(
        &self,
        sql: &str,
        params: SqlParams<'_>,
        read: impl Fn(&Row) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, SessionError> {
        let rows = self.query(sql, params).await?;
        Ok(rows.iter().map(read).collect::<Result<_, _>>()?)
    }
}

/// The reason why an operation on a session failed.
#[derive(Debug)]
pub(super) enum SessionError {
    /// PostgreSQL rejected the operation or cannot be reached.
    Postgres(tokio_postgres::Error),
    /// The operation succeeded, but its result cannot be decoded.
    Store(StoreError),
}

impl From<tokio_postgres::Error> for SessionError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Postgres(error)
    }
}

impl From<StoreError> for SessionError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl SessionError {
    /// Returns true if the connection is lost or about to end: PostgreSQL reports it, or the socket
    /// failed.
    pub(super) fn is_connection_lost(&self) -> bool {
        let Self::Postgres(error) = self else { return false };
        let Some(code) = error.code() else { return error.is_closed() || is_io_error(error) };
        // Shut down by an administrator, crashed, cannot connect now.
        code.code().starts_with("57P") || code.code().starts_with("08")
    }

    /// Returns the message for the log and for the caller, without any data.
    pub(super) fn message(&self) -> String {
        match self {
            Self::Store(error) => error.to_string(),
            Self::Postgres(error) => error_message(error),
        }
    }

    pub(super) fn into_store_error(self) -> StoreError {
        match self {
            Self::Store(error) => error,
            Self::Postgres(error) => StoreError::Unavailable(error_message(&error)),
        }
    }
}

fn is_io_error(error: &tokio_postgres::Error) -> bool {
    let source = std::error::Error::source(error);
    source.is_some_and(|source| source.is::<std::io::Error>())
}

/// Returns the message of PostgreSQL or of the network. Omits the details of a database error,
/// which can contain data.
pub(super) fn error_message(error: &tokio_postgres::Error) -> String {
    if let Some(refusal) = error.as_db_error() {
        return format!("PostgreSQL: {} ({})", refusal.message(), refusal.code().code());
    }
    match std::error::Error::source(error) {
        Some(source) => format!("PostgreSQL: {error}: {source}"),
        None => format!("PostgreSQL: {error}"),
    }
}
