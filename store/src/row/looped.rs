//! The rows of runs and of their journals.

use toolcrib::run::{Entry, Noted, Run};
use toolcrib::store::{IdempotencyKey, StoreError};

use super::{Fields, decode, encode};

/// A run in the form that the writer binds.
pub(crate) struct LoopRow {
    pub(crate) run: Run,
    pub(crate) body: String,
    /// Set only when the run is created.
    pub(crate) key: Option<IdempotencyKey>,
    pub(crate) entries: Vec<EntryRow>,
}

pub(crate) struct EntryRow {
    pub(crate) kind: &'static str,
    pub(crate) at_ms: i64,
    pub(crate) data: String,
    pub(crate) messages: String,
}

impl LoopRow {
    pub(crate) fn new(
        run: Run,
        key: Option<IdempotencyKey>,
        entries: Vec<Entry>,
    ) -> Result<Box<Self>, StoreError> {
        let entries = entries.into_iter().map(|entry| {
            let (data, messages) = (encode(&entry.data)?, encode(&entry.messages)?);
            let (kind, at_ms) = (entry.kind.as_str(), entry.at_ms as i64);
            Ok(EntryRow { kind, at_ms, data, messages })
        });
        let entries = entries.collect::<Result<_, StoreError>>()?;
        Ok(Box::new(Self { body: encode(&run)?, run, key, entries }))
    }
}

pub(crate) fn run_of(body: &str) -> Result<Run, StoreError> {
    serde_json::from_str(body).map_err(|error| StoreError::Corrupt(format!("a run: {error}")))
}

/// Reads `body`.
pub(crate) fn read_run(row: &impl Fields) -> Result<Run, StoreError> {
    run_of(&row.text(0)?)
}

/// Reads `number, run_id, kind, at_ms, data, messages`.
pub(crate) fn read_entry(row: &impl Fields) -> Result<Noted, StoreError> {
    let kind = row.text(2)?;
    Ok(Noted {
        number: row.whole(0)?,
        run_id: row.text(1)?,
        entry: Entry {
            kind: kind.parse().map_err(|()| StoreError::Corrupt(format!("entry {kind}")))?,
            at_ms: row.whole(3)?,
            data: decode(&row.text(4)?)?,
            messages: decode(&row.text(5)?)?,
        },
    })
}
