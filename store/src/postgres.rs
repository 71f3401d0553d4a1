//! The PostgreSQL store: opens the database and implements the `Store` port with one writer and a
//! few concurrent readers.

mod calls;
mod change;
mod credentials;
mod deliveries;
mod directory;
mod events;
mod listener;
mod migrate;
mod pool;
mod runs;
mod session;
mod undelivered;
mod utp;
mod writer;
mod writer_lease;
use std::sync::Arc;

use async_trait::async_trait;
use calls::{CallInsert, CallUpdate, EventColumns, EventInsert};
use change::{ChangeFn, FunctionChange, WriterConnection};
use listener::ReportListener;
use pool::SessionPool;
use serde_json::Value;
use session::{Connector, SessionError};
use tokio::sync::oneshot;
use toolcrib::domain::call::Call;
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::domain::directory::{AuditEntry, Directory, DirectoryChange};
use toolcrib::domain::event::{CallEvent, EventKind, EventRecord};
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::{
    CallFilter, CreateCallResult, DeliveryFilter, EventScope, IdempotencyKey, NewCall, OpenCallRow,
    PurgeResult, RunToolDefinitions, SaveResult, Store, StoreError,
};
use writer::PostgresWriter;
use writer_lease::{SequenceCounters, WriterLease};

use crate::row::{ApprovalRow, CallRow, RowReader, decode, encode_events};

/// The reason why a PostgreSQL database was not opened. No message contains the URL, which holds a
/// password.
#[derive(Debug, thiserror::Error)]
pub enum PostgresOpenError {
    /// The URL cannot be used.
    #[error("{0}")]
    Url(&'static str),
    /// The database was written by a newer version of Toolcrib.
    #[error(
        "the database has schema version {found}, and this program knows up to {known}: it was \
         used by a newer toolcrib; start that one, or restore an older copy"
    )]
    NewerSchema { found: i64, known: i64 },
    /// The database has tables with the same names that another program created.
    #[error(
        "the database has tables that another program made (public.cards, resource.tools, …): \
         give Toolcrib a database of its own"
    )]
    ForeignTables,
    /// Another server holds the writer lease of the database.
    #[error("another toolcrib serves this database: stop it, or choose another with --store")]
    AlreadyServed,
    /// PostgreSQL returned an error or cannot be reached.
    #[error("{0}")]
    Postgres(String),
}

use PostgresOpenError as OpenError;

impl From<SessionError> for OpenError {
    fn from(error: SessionError) -> Self {
        Self::Postgres(error.message())
    }
}

/// A store in one PostgreSQL database.
pub struct PostgresStore {
    writer: PostgresWriter,
    pool: SessionPool,
    /// Set only for a server, which accepts the reports that tool services write into the tables.
    report_listener: Option<ReportListener>,
    /// Changes when a tool service has written a report.
    report_signal: tokio::sync::watch::Receiver<u64>,
    /// True if tool services expect an anchor in the inbox for each command.
    writes_command_anchors: bool,
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
    pub async fn open_for_admin(url: &str) -> Result<Self, OpenError> {
        Self::open_as(url, false).await
    }

    async fn open_as(url: &str, serves: bool) -> Result<Self, OpenError> {
        let address = Connector::parse(url)?;
        let session = address.connect(None).await?;
        if serves {
            writer_lease::acquire_lock(&session).await?;
        }
        migrate::migrate(&session).await?;
        let (lease, numbers) = match serves {
            true => WriterLease::acquire(&session)
                .await
                .map(|(lease, numbers)| (Some(lease), numbers))?,
            false => (None, SequenceCounters::default()),
        };
        let writer =
            PostgresWriter::start(WriterConnection::new(session, lease, numbers), address.clone());
        let (report_sender, report_signal) = tokio::sync::watch::channel(0);
        let report_listener = serves.then(|| ReportListener::spawn(address.clone(), report_sender));
        Ok(Self {
            writer,
            pool: SessionPool::new(address),
            report_listener,
            report_signal,
            writes_command_anchors: false,
        })
    }

    /// Sets the version of UTP that the tool services on the shared tables speak. In `v1r4` they
    /// expect an anchor in the inbox for each command.
    pub fn with_utp_version(mut self, version: &str) -> Self {
        self.writes_command_anchors = version == "v1r4";
        self
    }

    /// Returns true if this is the URL of a PostgreSQL database.
    pub fn is_url(url: &str) -> bool {
        url.starts_with("postgres://") || url.starts_with("postgresql://")
    }

    /// Makes a change in the writer's next transaction.
    async fn write<A: Send + Sync + 'static, T: Send + 'static>(
        &self,
        input: A,
        function: ChangeFn<A, T>,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(FunctionChange::new(input, function, reply)))?;
        await_reply(answer).await
    }
}

/// Waits for the writer's reply.
async fn await_reply<T>(answer: oneshot::Receiver<Result<T, StoreError>>) -> Result<T, StoreError> {
    let to_unavailable = |_| StoreError::Unavailable("the writer has stopped".to_owned());
    answer.await.map_err(to_unavailable)?
}

/// Converts a limit to a parameter.
fn limit_param(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

/// Removes NUL characters from a value, because JSONB cannot store them.
fn strip_nul_chars(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace('\0', "")),
        Value::Array(all) => all.into_iter().map(strip_nul_chars).collect(),
        Value::Object(map) => map
            .into_iter()
            .map(|(name, value)| (name.replace('\0', ""), strip_nul_chars(value)))
            .collect(),
        other => other,
    }
}

async fn put_run_tools(
    writer: &mut WriterConnection,
    run: &RunToolDefinitions,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO runs VALUES ($1, $2, $3, $4) ON CONFLICT (project, run_id) DO UPDATE \
               SET tool_definitions = excluded.tool_definitions, updated_ms = excluded.updated_ms";
    let text = run.tool_definitions.text();
    let updated_ms = run.updated_ms as i64;
    writer.session.execute(sql, &[&run.project, &run.run_id, &text, &updated_ms]).await?;
    Ok(())
}

/// Writes a value that has no reader: a probe that writes nothing would not detect a full disk.
async fn write_probe(writer: &mut WriterConnection, _: &()) -> Result<(), SessionError> {
    let sql = "UPDATE counters SET value = value + 1 WHERE name = 'checks'";
    writer.session.execute(sql, &[]).await?;
    Ok(())
}

#[async_trait]
impl Store for PostgresStore {
    async fn create_call(&self, new: NewCall) -> Result<CreateCallResult, StoreError> {
        let records = EventColumns::new(encode_events(new.records)?);
        let row = Box::new(CallRow::for_insert(new.call)?);
        let (reply, answer) = oneshot::channel();
        let creating = CallInsert {
            row,
            records,
            key: new.key,
            undelivered: new.undelivered,
            approval: new.approval.map(|new| ApprovalRow::with_audit(*new)).transpose()?,
            reply,
            position: 0,
            is_key_taken: false,
            existing: None,
        };
        self.writer.send(Box::new(creating))?;
        drop(new.group_member);
        await_reply(answer).await
    }

    async fn find_by_idempotency_key(
        &self,
        project: &str,
        key: &IdempotencyKey,
    ) -> Result<Option<CreateCallResult>, StoreError> {
        let session = self.pool.acquire().await?;
        calls::find_by_idempotency_key(&session, project, key)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn save_call(
        &self,
        call: Arc<Call>,
        records: Vec<EventRecord>,
    ) -> Result<SaveResult, StoreError> {
        let row = Box::new(CallRow::for_update(call)?);
        let records = EventColumns::new(encode_events(records)?);
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(CallUpdate { row, records, reply, saved: false }))?;
        await_reply(answer).await
    }

    async fn append_records(
        &self,
        project: &str,
        id: &CallId,
        records: Vec<EventRecord>,
    ) -> Result<(), StoreError> {
        let (project, id) = (project.to_owned(), id.clone());
        let records = EventColumns::new(encode_events(records)?);
        let (reply, answer) = oneshot::channel();
        self.writer.send(Box::new(EventInsert { project, id, records, reply }))?;
        await_reply(answer).await
    }

    async fn call(&self, project: &str, id: &CallId) -> Result<Option<Call>, StoreError> {
        let session = self.pool.acquire().await?;
        calls::find_call(&session, project, id).await.map_err(SessionError::into_store_error)
    }

    async fn calls(&self, filter: CallFilter) -> Result<Vec<Call>, StoreError> {
        let session = self.pool.acquire().await?;
        calls::list_calls(&session, &filter).await.map_err(SessionError::into_store_error)
    }

    async fn open_calls(&self, after: u64, limit: usize) -> Result<Vec<OpenCallRow>, StoreError> {
        let session = self.pool.acquire().await?;
        calls::list_open_calls(&session, after, limit).await.map_err(SessionError::into_store_error)
    }

    async fn events(
        &self,
        scope: EventScope,
        after: u64,
        limit: usize,
    ) -> Result<Vec<CallEvent>, StoreError> {
        let session = self.pool.acquire().await?;
        events::list_events(&session, &scope, after, limit)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn last_event_number(&self, scope: EventScope) -> Result<u64, StoreError> {
        let session = self.pool.acquire().await?;
        events::last_event_number(&session, &scope).await.map_err(SessionError::into_store_error)
    }

    async fn run_tool_definitions(
        &self,
        project: &str,
        run_id: &str,
    ) -> Result<Option<RunToolDefinitions>, StoreError> {
        let sql =
            "SELECT tool_definitions, updated_ms FROM runs WHERE project = $1 AND run_id = $2";
        let session = self.pool.acquire().await?;
        let found = session
            .query_first(sql, &[&project, &run_id])
            .await
            .map_err(SessionError::into_store_error)?;
        let Some(row) = found else { return Ok(None) };
        Ok(Some(RunToolDefinitions {
            project: project.to_owned(),
            run_id: run_id.to_owned(),
            tool_definitions: decode(&row.text(0)?)?,
            updated_ms: row.unsigned(1)?,
        }))
    }

    async fn put_run_tool_definitions(&self, run: RunToolDefinitions) -> Result<(), StoreError> {
        self.write(run, |writer, run| Box::pin(put_run_tools(writer, run))).await
    }

    async fn last_record(
        &self,
        project: &str,
        id: &CallId,
        kind: EventKind,
    ) -> Result<Option<EventRecord>, StoreError> {
        let session = self.pool.acquire().await?;
        events::newest_record(&session, project, id, kind)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn pending_deliveries(
        &self,
        after: Option<(u64, CallId)>,
        limit: usize,
    ) -> Result<Vec<Delivery>, StoreError> {
        let session = self.pool.acquire().await?;
        deliveries::list_pending(&session, after.as_ref(), limit)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<Delivery>, StoreError> {
        let session = self.pool.acquire().await?;
        deliveries::list(&session, &filter).await.map_err(SessionError::into_store_error)
    }

    async fn delivery(
        &self,
        project: &str,
        id: &CallId,
    ) -> Result<Option<(Delivery, Vec<DeliveryAttempt>)>, StoreError> {
        let session = self.pool.acquire().await?;
        deliveries::find_delivery(&session, project, id)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn save_delivery(
        &self,
        delivery: Delivery,
        tried: Option<DeliveryAttempt>,
    ) -> Result<SaveResult, StoreError> {
        self.write((delivery, tried), |writer, input| {
            Box::pin(deliveries::save_delivery(writer, input))
        })
        .await
    }

    async fn purge(&self, ended_before_ms: u64, limit: usize) -> Result<PurgeResult, StoreError> {
        self.write((ended_before_ms, limit), |writer, input| Box::pin(calls::purge(writer, input)))
            .await
    }

    async fn directory_version(&self) -> Result<u64, StoreError> {
        let session = self.pool.acquire().await?;
        directory::read_version(&session).await.map_err(SessionError::into_store_error)
    }

    async fn directory(&self) -> Result<Directory, StoreError> {
        let session = self.pool.acquire().await?;
        directory::load(session).await.map_err(SessionError::into_store_error)
    }

    async fn change_directory(
        &self,
        change: DirectoryChange,
        decided_on: u64,
        audit: Option<AuditEntry>,
    ) -> Result<SaveResult, StoreError> {
        let input = (change, decided_on, audit);
        self.write(input, |writer, input| Box::pin(directory::apply_change(writer, input))).await
    }

    async fn record_time(&self, at_ms: u64) -> Result<(), StoreError> {
        self.write(at_ms, |writer, at_ms| Box::pin(directory::record_time(writer, at_ms))).await
    }

    async fn append_audit_entry(&self, entry: AuditEntry) -> Result<(), StoreError> {
        self.append_audit(entry).await
    }

    fn audit(&self) -> &dyn toolcrib::ports::store::audit::AuditStore {
        self
    }

    async fn check_health(&self) -> Result<(), StoreError> {
        self.directory_version().await?;
        self.write((), |writer, input| Box::pin(write_probe(writer, input))).await
    }

    async fn wait_for_failure(&self) -> String {
        self.writer.wait_for_lost_lease().await.to_owned()
    }

    fn utp(&self) -> &dyn toolcrib::ports::store::utp::UtpStore {
        self
    }

    fn rule_history(&self) -> &dyn toolcrib::ports::store::rule_history::RuleHistoryStore {
        self
    }

    fn credentials(&self) -> &dyn toolcrib::ports::store::credentials::UpstreamCredentialStore {
        self
    }

    fn usage(&self) -> &dyn toolcrib::ports::store::usage::UsageStore {
        self
    }

    fn undelivered(&self) -> &dyn toolcrib::ports::store::undelivered::UndeliveredRequestStore {
        self
    }

    fn agents(&self) -> &dyn toolcrib::ports::store::agents::AgentStore {
        self
    }

    fn approvals(&self) -> &dyn toolcrib::ports::store::approvals::ApprovalStore {
        self
    }

    fn runs(&self) -> &dyn toolcrib::ports::store::runs::RunStore {
        self
    }

    async fn size_bytes(&self) -> Result<u64, StoreError> {
        let session = self.pool.acquire().await?;
        let sql = "SELECT pg_database_size(current_database())";
        let row = session.query_first(sql, &[]).await.map_err(SessionError::into_store_error)?;
        row.map_or(Ok(0), |row| row.unsigned(0))
    }
}
