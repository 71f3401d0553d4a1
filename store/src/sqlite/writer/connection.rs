//! The connection of the writer: its transaction, the numbers of events and the positions of open
//! calls. The position of a call is its row id in `tool_calls`.
//!
//! New calls are buffered, because one statement that inserts several calls is cheaper than several
//! statements. Every other use of the connection inserts the buffered calls first, so that each
//! change finds the calls that were created before it.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, params};
use toolcrib::domain::call::Call;
use toolcrib::domain::id::CallId;

use super::call_inserts::{
    MAX_ROWS_PER_INSERT, NewCallRow, insert_event, insert_some, insert_task_and_delivery,
};
use crate::row::EventRow;
use crate::sqlite::event_numbers::load_last_event_number;
use crate::sqlite::open_calls::OpenCalls;

/// Number of ended calls after which a commit advances the low watermark: the stored position
/// before which no call is open.
const WATERMARK_INTERVAL: usize = 1_000;

/// The writer's connection, with the state that its changes share.
pub(crate) struct WriterConnection {
    connection: Connection,
    /// Number of the last event, including the events of the open transaction.
    last_event_number: i64,
    /// Number of the last event that is committed.
    committed_event_number: i64,
    open_calls: OpenCalls,
    /// Calls that the open transaction opened. The commit adds them to `open_calls`.
    opened: Vec<(i64, CallId)>,
    /// Calls that the open transaction ended. The commit removes them from `open_calls`.
    ended: Vec<(i64, CallId)>,
    /// Project and position of each open call that this writer inserted.
    open_call_positions: HashMap<CallId, (Box<str>, i64)>,
    /// New calls of the open transaction that are not inserted yet.
    buffered_inserts: Vec<NewCallRow>,
    ended_since_watermark: usize,
    /// True for the writer of a server. Only that writer knows all open calls; the writer of an
    /// administrative command does not.
    maintains_low_watermark: bool,
}

impl WriterConnection {
    pub(super) fn new(
        connection: Connection,
        open_calls: OpenCalls,
        maintains_low_watermark: bool,
    ) -> rusqlite::Result<Self> {
        let last_event_number = load_last_event_number(&connection)?;
        Ok(Self {
            connection,
            last_event_number,
            committed_event_number: last_event_number,
            open_calls,
            opened: Vec::new(),
            ended: Vec::new(),
            open_call_positions: HashMap::new(),
            buffered_inserts: Vec::with_capacity(MAX_ROWS_PER_INSERT),
            ended_since_watermark: 0,
            maintains_low_watermark,
        })
    }

    /// Inserts the buffered calls and returns the connection.
    pub(crate) fn connection(&mut self) -> rusqlite::Result<&Connection> {
        self.flush_inserts()?;
        Ok(&self.connection)
    }

    /// Starts a transaction.
    pub(super) fn begin(&self) -> rusqlite::Result<()> {
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([]).map(|_| ())
    }

    /// Commits the transaction and publishes the calls that it opened and ended.
    pub(super) fn commit(&mut self) -> rusqlite::Result<()> {
        self.flush_inserts()?;
        self.advance_low_watermark()?;
        self.connection.prepare_cached("COMMIT")?.execute([])?;
        self.committed_event_number = self.last_event_number;
        self.opened.drain(..).for_each(|(position, _)| self.open_calls.insert(position));
        for (position, id) in self.ended.drain(..) {
            self.open_calls.remove(position);
            self.open_call_positions.remove(&id);
        }
        Ok(())
    }

    /// Rolls the transaction back and forgets its changes.
    pub(super) fn roll_back(&mut self) {
        self.buffered_inserts.clear();
        self.last_event_number = self.committed_event_number;
        for (_, id) in self.opened.drain(..) {
            self.open_call_positions.remove(&id);
        }
        self.ended.clear();
        if !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
    }

    /// Buffers a call, which is inserted in one statement with the calls that follow it.
    pub(crate) fn insert_call(&mut self, new: NewCallRow) -> rusqlite::Result<()> {
        self.buffered_inserts.push(new);
        if self.buffered_inserts.len() < MAX_ROWS_PER_INSERT {
            return Ok(());
        }
        self.flush_inserts()
    }

    /// Inserts a call at once and returns its position.
    pub(crate) fn insert_call_now(&mut self, new: NewCallRow) -> rusqlite::Result<i64> {
        self.flush_inserts()?;
        let (position, _) =
            insert_some(&self.connection, std::slice::from_ref(&new), self.last_event_number)?;
        self.finish_insert(position, &new)?;
        Ok(position)
    }

    fn flush_inserts(&mut self) -> rusqlite::Result<()> {
        if self.buffered_inserts.is_empty() {
            return Ok(());
        }
        let mut buffered = std::mem::take(&mut self.buffered_inserts);
        // Sorted by id, each row follows the previous one in the index of ids, which makes the
        // insertion cheaper.
        buffered.sort_unstable_by(|a, b| a.row.call.id.cmp(&b.row.call.id));
        let mut remaining = &buffered[..];
        while !remaining.is_empty() {
            let (first, count) = insert_some(&self.connection, remaining, self.last_event_number)?;
            let (inserted, later) = remaining.split_at(count);
            for (position, new) in (first..).zip(inserted) {
                self.finish_insert(position, new)?;
            }
            remaining = later;
        }
        // Put back to reuse its memory.
        buffered.clear();
        self.buffered_inserts = buffered;
        Ok(())
    }

    /// Completes the insertion of a call at this position: inserts its events, task and delivery.
    fn finish_insert(&mut self, position: i64, new: &NewCallRow) -> rusqlite::Result<()> {
        let call: &Call = &new.row.call;
        if call.completed_ms.is_none() {
            self.opened.push((position, call.id.clone()));
            self.open_call_positions
                .insert(call.id.clone(), (call.project.as_str().into(), position));
        }
        self.insert_events(position, &new.records)?;
        insert_task_and_delivery(&self.connection, call, position)
    }

    /// Assigns numbers to the events, and inserts those that cannot be derived from the row of
    /// their call.
    pub(crate) fn insert_events(
        &mut self,
        position: i64,
        records: &[EventRow],
    ) -> rusqlite::Result<()> {
        for record in records {
            let number = self.next_event_number()?;
            if record.implied.is_none() {
                insert_event(&self.connection, number, position, record)?;
            }
        }
        Ok(())
    }

    /// Returns the number that was assigned last.
    pub(crate) fn last_event_number(&mut self) -> rusqlite::Result<i64> {
        self.flush_inserts()?;
        Ok(self.last_event_number)
    }

    /// Assigns the number of an event or of a journal entry.
    pub(crate) fn next_event_number(&mut self) -> rusqlite::Result<i64> {
        self.flush_inserts()?;
        self.last_event_number += 1;
        Ok(self.last_event_number)
    }

    /// Records that the open transaction ends a call.
    pub(crate) fn note_ended(&mut self, position: i64, id: &CallId) {
        self.ended.push((position, id.clone()));
    }

    /// Finds the position of a call: in memory for an open call that this writer inserted,
    /// otherwise in the database.
    pub(crate) fn find_position(
        &mut self,
        project: &str,
        id: &CallId,
    ) -> rusqlite::Result<Option<i64>> {
        self.flush_inserts()?;
        if let Some((owner, position)) = self.open_call_positions.get(id)
            && **owner == *project
        {
            return Ok(Some(*position));
        }
        self.connection
            .prepare_cached(
                "SELECT place FROM tool_calls WHERE project = ?1 AND tool_call_id = ?2",
            )?
            .query_row(params![project, id.as_str()], |row| row.get(0))
            .optional()
    }

    /// Advances the low watermark to the first open call, once per [`WATERMARK_INTERVAL`] ended
    /// calls. The watermark may be too low, which only makes the next start scan more calls; it is
    /// never too high.
    fn advance_low_watermark(&mut self) -> rusqlite::Result<()> {
        self.ended_since_watermark += self.ended.len();
        if !self.maintains_low_watermark || self.ended_since_watermark < WATERMARK_INTERVAL {
            return Ok(());
        }
        self.ended_since_watermark = 0;
        // `open_calls` still contains the calls that this transaction ends, so the watermark is at
        // most too low.
        let first_opened = self.opened.iter().map(|(position, _)| *position).min();
        let Some(first) = self.open_calls.first().into_iter().chain(first_opened).min() else {
            return Ok(());
        };
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('first_open', ?1)")?
            .execute([first])
            .map(|_| ())
    }
}
