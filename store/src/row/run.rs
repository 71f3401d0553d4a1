//! The rows of runs and of their journals.

use toolcrib::domain::run::{JournalEntry, JournalRecord, Run};
use toolcrib::ports::store::undelivered::UndeliveredRequest;
use toolcrib::ports::store::{IdempotencyKey, StoreError};

use super::{RowReader, decode, encode};

/// A run in the form that the writer binds.
pub(crate) struct RunRow {
    pub(crate) run: Run,
    pub(crate) body: String,
    /// Set only when the run is created.
    pub(crate) key: Option<IdempotencyKey>,
    pub(crate) entries: Vec<JournalEntryRow>,
    /// Set only when the run is created.
    pub(crate) undelivered: Option<UndeliveredRequest>,
}

pub(crate) struct JournalEntryRow {
    pub(crate) kind: &'static str,
    pub(crate) at_ms: i64,
    pub(crate) data: String,
    pub(crate) messages: String,
}

impl RunRow {
    pub(crate) fn new(
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<JournalRecord>,
    ) -> Result<Box<Self>, StoreError> {
        let entries = entries.into_iter().map(|entry| {
            let (data, messages) = (encode(&entry.data)?, encode(&entry.messages)?);
            let (kind, at_ms) = (entry.kind.as_str(), entry.at_ms as i64);
            Ok(JournalEntryRow { kind, at_ms, data, messages })
        });
        let entries = entries.collect::<Result<_, StoreError>>()?;
        Ok(Box::new(Self { body: encode(&run)?, run, key, entries, undelivered: None }))
    }
}

pub(crate) fn decode_run(body: &str) -> Result<Run, StoreError> {
    serde_json::from_str(body).map_err(|error| StoreError::Corrupt(format!("a run: {error}")))
}

/// Reads `body`.
pub(crate) fn read_run(row: &impl RowReader) -> Result<Run, StoreError> {
    decode_run(&row.text(0)?)
}

/// Reads `number, run_id, kind, at_ms, data, messages`.
pub(crate) fn read_journal_entry(row: &impl RowReader) -> Result<JournalEntry, StoreError> {
    let kind = row.text(2)?;
    Ok(JournalEntry {
        number: row.unsigned(0)?,
        run_id: row.text(1)?,
        record: JournalRecord {
            kind: kind.parse().map_err(|()| StoreError::Corrupt(format!("entry {kind}")))?,
            at_ms: row.unsigned(3)?,
            data: decode(&row.text(4)?)?,
            messages: decode(&row.text(5)?)?,
        },
    })
}
