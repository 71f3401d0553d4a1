//! Connections to PostgreSQL: how they are made, and the statements that each keeps prepared.

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
use toolcrib::store::StoreError;

use super::OpenError;

/// How long to try to connect.
const CONNECT: Duration = Duration::from_secs(5);

/// What a statement is given.
pub(super) type Bound<'a> = &'a [&'a (dyn ToSql + Sync)];

/// Where the database is; never shown, because it holds a password.
#[derive(Clone)]
pub(super) struct Address(Config, Handle);

impl Address {
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
        config.connect_timeout(CONNECT);
        // A network that says nothing any more is noticed, from both sides.
        config.keepalives_idle(Duration::from_secs(15));
        config.keepalives_interval(Duration::from_secs(5)).keepalives_retries(3);
        config.tcp_user_timeout(Duration::from_secs(30));
        let home = Handle::try_current().map_err(|_| OpenError::Url("there is no runtime"))?;
        Ok(Self(config, home))
    }

    /// A new connection, whose notifications go here. It lives in the store's own runtime: who asks
    /// for it may be gone before it is.
    pub(super) async fn connect(&self, told: Option<Sender<u64>>) -> Result<Session, Broke> {
        let connecting = connect(self.0.clone(), told);
        let gone = |_| Broke::Store(StoreError::Unavailable("the store is closed".to_owned()));
        self.1.spawn(connecting).await.map_err(gone)?
    }
}

async fn connect(config: Config, told: Option<Sender<u64>>) -> Result<Session, Broke> {
    let (client, mut connection) = config.connect(NoTls).await?;
    let driver = tokio::spawn(async move {
        let messages = futures::stream::poll_fn(move |context| connection.poll_message(context));
        let mut messages = std::pin::pin!(messages);
        while let Some(Ok(message)) = messages.next().await {
            if let (AsyncMessage::Notification(_), Some(told)) = (message, &told) {
                told.send_modify(|count| *count += 1);
            }
        }
    });
    client.batch_execute(SET_UP).await?;
    Ok(Session { client, driver: driver.abort_handle(), statements: Mutex::default() })
}

const BAD_URL: &str = "not a PostgreSQL URL: write postgres://user:password@host:5432/name";
const NO_TLS: &str = "sslmode=require is not supported: connect through a tunnel, or leave it out \
     on a network you trust";

/// Our tables are found without their schema's name, and a commit that is answered is on the disk
/// whatever the server's own settings say.
const SET_UP: &str = "SET search_path TO toolcrib, pg_catalog; \
     SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; \
     SELECT set_config('synchronous_commit', 'on', false) \
     WHERE current_setting('synchronous_commit') IN ('off', 'local')";

/// One connection.
pub(super) struct Session {
    client: Client,
    /// Reads and writes the socket.
    driver: AbortHandle,
    statements: Mutex<HashMap<String, Statement>>,
}

impl Session {
    /// Ends the connection, whatever is under way on it.
    pub(super) fn hang_up(&self) {
        self.driver.abort();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    pub(super) async fn run(&self, sql: &str) -> Result<(), Broke> {
        self.client.batch_execute(sql).await.map_err(Broke::from)
    }

    pub(super) async fn prepared(&self, sql: &str) -> Result<Statement, Broke> {
        let known = self.statements.lock().get(sql).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.lock().insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    pub(super) async fn rows(&self, sql: &str, bound: Bound<'_>) -> Result<Vec<Row>, Broke> {
        let statement = self.prepared(sql).await?;
        Ok(self.client.query(&statement, bound).await?)
    }

    /// The first row, if there is any.
    pub(super) async fn row(&self, sql: &str, bound: Bound<'_>) -> Result<Option<Row>, Broke> {
        Ok(self.rows(sql, bound).await?.into_iter().next())
    }

    /// How many rows a statement changed.
    pub(super) async fn execute(&self, sql: &str, bound: Bound<'_>) -> Result<u64, Broke> {
        let statement = self.prepared(sql).await?;
        Ok(self.client.execute(&statement, bound).await?)
    }

    /// The rows one by one; those that are not asked for any more are not kept.
    pub(super) async fn stream(&self, sql: &str, bound: Bound<'_>) -> Result<RowStream, Broke> {
        let statement = self.prepared(sql).await?;
        Ok(self.client.query_raw(&statement, bound.iter().copied()).await?)
    }

    /// What these rows say.
    pub(super) async fn collect<T>(
        &self,
        sql: &str,
        bound: Bound<'_>,
        read: impl Fn(&Row) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, Broke> {
        let rows = self.rows(sql, bound).await?;
        Ok(rows.iter().map(read).collect::<Result<_, _>>()?)
    }
}

/// Why something was not done on a connection.
#[derive(Debug)]
pub(super) enum Broke {
    /// The server refused it, or cannot be reached.
    Postgres(tokio_postgres::Error),
    /// It was done, and cannot be understood.
    Store(StoreError),
}

impl From<tokio_postgres::Error> for Broke {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Postgres(error)
    }
}

impl From<StoreError> for Broke {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Broke {
    /// Whether the connection is gone, or going: the server says so, or says nothing.
    pub(super) fn is_loss(&self) -> bool {
        let Self::Postgres(error) = self else { return false };
        let Some(code) = error.code() else { return error.is_closed() || is_io(error) };
        // Shut down by an administrator, crashed, cannot connect now.
        code.code().starts_with("57P") || code.code().starts_with("08")
    }

    /// For the log and for whoever asked: never the data.
    pub(super) fn said(&self) -> String {
        match self {
            Self::Store(error) => error.to_string(),
            Self::Postgres(error) => said(error),
        }
    }

    pub(super) fn into_error(self) -> StoreError {
        match self {
            Self::Store(error) => error,
            Self::Postgres(error) => StoreError::Unavailable(said(&error)),
        }
    }
}

fn is_io(error: &tokio_postgres::Error) -> bool {
    let source = std::error::Error::source(error);
    source.is_some_and(|source| source.is::<std::io::Error>())
}

/// What the server or the network says. The details of a refusal can hold data and are left out.
pub(super) fn said(error: &tokio_postgres::Error) -> String {
    if let Some(refusal) = error.as_db_error() {
        return format!("PostgreSQL: {} ({})", refusal.message(), refusal.code().code());
    }
    match std::error::Error::source(error) {
        Some(source) => format!("PostgreSQL: {error}: {source}"),
        None => format!("PostgreSQL: {error}"),
    }
}
