//! The PostgreSQL store: opens the database and implements the `Store` port with one writer and a
//! few concurrent readers.

mod calls;
mod deliveries;
mod directory;
mod ears;
mod grants;
mod history;
mod lease;
mod link;
mod loops;
mod migrate;
mod pool;
mod utp;
mod writer;

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::oneshot;
use toolcrib::call::Call;
use toolcrib::delivery::{Delivery, Try};
use toolcrib::directory::{AuditEntry, Change, Directory};
use toolcrib::event::{Event, Kind, Record};
use toolcrib::id::CallId;
use toolcrib::store::{
    CallFilter, Created, DeliveryFilter, EventScope, IdempotencyKey, NewCall, Open, Purged, Run,
    Saved, Store, StoreError,
};

use crate::row::{CallRow, Fields, decode, record_rows};
use calls::{Appending, Columns, Creating, Saving};
use ears::Ears;
use lease::Lease;
use link::{Address, Broke};
use pool::Pool;
use writer::{Desk, Job, Numbers, Work, Writer};

/// The reason why a PostgreSQL database was not opened. No message contains the URL, which holds a
/// password.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    /// The URL cannot be used.
    #[error("{0}")]
    Url(&'static str),
    /// The database was written by a newer version of Toolcrib.
    #[error(
        "the database has schema version {found}, and this program knows up to {known}: it was \
         used by a newer toolcrib; start that one, or restore an older copy"
    )]
    Newer { found: i64, known: i64 },
    /// The database has tables with the same names that another program created.
    #[error(
        "the database has tables that another program made (public.cards, resource.tools, …): \
         give the crib a database of its own"
    )]
    NotOurs,
    /// Another server holds the writer lease of the database.
    #[error("another toolcrib serves this database: stop it, or choose another with --store")]
    Taken,
    /// PostgreSQL returned an error or cannot be reached.
    #[error("{0}")]
    Postgres(String),
}

use PostgresError as OpenError;

impl From<Broke> for OpenError {
    fn from(broke: Broke) -> Self {
        Self::Postgres(broke.said())
    }
}

/// A store in one PostgreSQL database.
pub struct PostgresStore {
    writer: Writer,
    pool: Pool,
    /// Set only for a server, which accepts the reports that tool services write into the tables.
    ears: Option<Ears>,
    /// Changes when a tool service has written a report.
    news: tokio::sync::watch::Receiver<u64>,
}

impl PostgresStore {
    /// Opens a database for a server, creates the tables if they do not exist, and migrates them to
    /// the current schema version. The server has the exclusive right to write calls until its
    /// connection ends.
    pub async fn open(url: &str) -> Result<Self, OpenError> {
        Self::open_as(url, true).await
    }

    /// Opens a database for an administrative command that reads or changes the directory while a
    /// server runs.
    pub async fn open_briefly(url: &str) -> Result<Self, OpenError> {
        Self::open_as(url, false).await
    }

    async fn open_as(url: &str, serves: bool) -> Result<Self, OpenError> {
        let address = Address::parse(url)?;
        let session = address.connect(None).await?;
        if serves {
            lease::lock(&session).await?;
        }
        migrate::migrate(&session).await?;
        let (lease, numbers) = match serves {
            true => Lease::take(&session).await.map(|(lease, numbers)| (Some(lease), numbers))?,
            false => (None, Numbers::default()),
        };
        let writer = Writer::start(Desk::new(session, lease, numbers), address.clone());
        let (told, news) = tokio::sync::watch::channel(0);
        let ears = serves.then(|| Ears::open(address.clone(), told));
        Ok(Self { writer, pool: Pool::new(address), ears, news })
    }

    /// Returns true if this is the URL of a PostgreSQL database.
    pub fn is_url(url: &str) -> bool {
        url.starts_with("postgres://") || url.starts_with("postgresql://")
    }

    /// Makes a change in the writer's next transaction.
    async fn write<A: Send + Sync + 'static, T: Send + 'static>(
        &self,
        given: A,
        doing: Work<A, T>,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(Job::new(given, doing, reply)))?;
        answered(answer).await
    }
}

/// Waits for the writer's reply.
async fn answered<T>(answer: oneshot::Receiver<Result<T, StoreError>>) -> Result<T, StoreError> {
    let gone = |_| StoreError::Unavailable("the writer has stopped".to_owned());
    answer.await.map_err(gone)?
}

/// Converts a limit to a parameter.
fn limited(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// Removes NUL characters from a value, because JSONB cannot store them.
fn storable(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace('\0', "")),
        Value::Array(all) => all.into_iter().map(storable).collect(),
        Value::Object(map) => {
            map.into_iter().map(|(name, value)| (name.replace('\0', ""), storable(value))).collect()
        }
        other => other,
    }
}

async fn put_run(desk: &mut Desk, run: &Run) -> Result<(), Broke> {
    let sql = "INSERT INTO runs VALUES ($1, $2, $3, $4) ON CONFLICT (project, run_id) DO UPDATE \
               SET tool_definitions = excluded.tool_definitions, updated_ms = excluded.updated_ms";
    let text = run.tool_definitions.text();
    let updated_ms = run.updated_ms as i64;
    desk.session.execute(sql, &[&run.project, &run.run_id, &text, &updated_ms]).await?;
    Ok(())
}

/// Writes a value that has no reader: a probe that writes nothing would not detect a full disk.
async fn write_check(desk: &mut Desk, _: &()) -> Result<(), Broke> {
    let sql = "UPDATE counters SET value = value + 1 WHERE name = 'checks'";
    desk.session.execute(sql, &[]).await?;
    Ok(())
}

#[async_trait]
impl Store for PostgresStore {
    async fn create(&self, new: NewCall) -> Result<Created, StoreError> {
        let records = Columns::new(record_rows(new.records)?);
        let row = Box::new(CallRow::first(new.call)?);
        let (reply, answer) = oneshot::channel();
        let (key, known) = (new.key, None);
        let creating = Creating { row, records, key, reply, place: 0, key_used: false, known };
        self.writer.send(Box::new(creating))?;
        drop(new.coming);
        answered(answer).await
    }

    async fn used(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<Created>, StoreError> {
        let lent = self.pool.lend().await?;
        calls::used(&lent, project, key).await.map_err(Broke::into_error)
    }

    async fn save(&self, call: Arc<Call>, records: Vec<Record>) -> Result<Saved, StoreError> {
        let row = Box::new(CallRow::next(call)?);
        let records = Columns::new(record_rows(records)?);
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(Saving { row, records, reply, saved: false }))?;
        answered(answer).await
    }

    async fn append(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<Record>,
    ) -> Result<(), StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        let records = Columns::new(record_rows(records)?);
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(Appending { project, id, records, reply }))?;
        answered(answer).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        let lent = self.pool.lend().await?;
        calls::call(&lent, project, id).await.map_err(Broke::into_error)
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let lent = self.pool.lend().await?;
        calls::calls(&lent, &filter).await.map_err(Broke::into_error)
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<Open>, StoreError> {
        let lent = self.pool.lend().await?;
        calls::open_calls(&lent, after, limit).await.map_err(Broke::into_error)
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<Event>, StoreError> {
        let lent = self.pool.lend().await?;
        history::events(&lent, &scope, after, limit).await.map_err(Broke::into_error)
    }

    async fn newest_event(&self, scope: EventScope) -> Result<u64, StoreError> {
        let lent = self.pool.lend().await?;
        history::newest_event(&lent, &scope).await.map_err(Broke::into_error)
    }

    async fn run(&self, project: &str, run_id: &str) -> Result<Option<Run>, StoreError> {
        let sql =
            "SELECT tool_definitions, updated_ms FROM runs WHERE project = $1 AND run_id = $2";
        let lent = self.pool.lend().await?;
        let found = lent.row(sql, &[&project, &run_id]).await.map_err(Broke::into_error)?;
        let Some(row) = found else { return Ok(None) };
        Ok(Some(Run {
            project: project.to_owned(),
            run_id: run_id.to_owned(),
            tool_definitions: decode(&row.text(0)?)?,
            updated_ms: row.whole(1)?,
        }))
    }

    async fn put_run(&self, run: Run) -> Result<(), StoreError> {
        self.write(run, |desk, run| Box::pin(put_run(desk, run))).await
    }

    async fn newest_record(
        &self,
        project: &str,
        id: &CallId,
        kind: Kind,
    ) -> Result<Option<Record>, StoreError> {
        let lent = self.pool.lend().await?;
        history::newest_record(&lent, project, id, kind).await.map_err(Broke::into_error)
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        let lent = self.pool.lend().await?;
        deliveries::pending(&lent, after.as_ref(), limit).await.map_err(Broke::into_error)
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        let lent = self.pool.lend().await?;
        deliveries::list(&lent, &filter).await.map_err(Broke::into_error)
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<Try>)>, StoreError> {
        let lent = self.pool.lend().await?;
        deliveries::one(&lent, project, id).await.map_err(Broke::into_error)
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<Try>,
    ) -> Result<Saved, StoreError> {
        self.write((delivery, tried), |desk, given| Box::pin(deliveries::save(desk, given))).await
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<Purged, StoreError> {
        self.write((ended_before_ms, limit), |desk, given| Box::pin(calls::purge(desk, given)))
            .await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        let lent = self.pool.lend().await?;
        directory::version(&lent).await.map_err(Broke::into_error)
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        let lent = self.pool.lend().await?;
        directory::load(lent).await.map_err(Broke::into_error)
    }

    async fn change(
        &self,
        change: Change,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<Saved, StoreError> {
        let given = (change, decided_on, audit);
        self.write(given, |desk, given| Box::pin(directory::change(desk, given))).await
    }

    async fn audit(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.write(entry, |desk, entry| Box::pin(directory::audit(desk, entry))).await
    }

    async fn audit_log(
        &self,
        project: Option<String>,
        limit: usize,
    ) -> Result<Vec<AuditEntry>, StoreError> {
        let lent = self.pool.lend().await?;
        directory::audit_log(&lent, project.as_deref(), limit).await.map_err(Broke::into_error)
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.directory_version().await?;
        self.write((), |desk, given| Box::pin(write_check(desk, given))).await
    }

    fn utp(&self) -> &dyn toolcrib::store::utp::UtpStore {
        self
    }

    fn grants(&self) -> &dyn toolcrib::store::grants::GrantStore {
        self
    }

    fn loops(&self) -> &dyn toolcrib::store::loops::LoopStore {
        self
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        let lent = self.pool.lend().await?;
        let sql = "SELECT pg_database_size(current_database())";
        let row = lent.row(sql, &[]).await.map_err(Broke::into_error)?;
        row.map_or(Ok(0), |row| row.whole(0))
    }
}
