//! The connection of the writer: its transaction, the numbers of events and the positions of open
//! calls.
//!
//! New calls are buffered, because a statement that inserts several of them is cheaper than several
//! statements. Every other use of the connection writes the buffered calls first, so a change never
//! runs ahead of a call that was created before it.

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

/// Number of ended calls after which a commit advances the low watermark.
const WATERMARK_INTERVAL: usize = 1_000;

/// The writer's connection, with the state that its changes share.
pub(crate) struct WriterConnection {
    connection: Connection,
    /// Number of the last event, including those of the open transaction.
    last_event_number: i64,
    /// Number of the last event that is committed.
    committed_event_number: i64,
    open_calls: OpenCalls,
    /// Calls that the open transaction opened and ended; applied to `open_calls` after the commit.
    opened: Vec<(i64, CallId)>,
    ended: Vec<(i64, CallId)>,
    /// Project and position of each open call that this writer inserted.
    open_call_positions: HashMap<CallId, (Box<str>, i64)>,
    /// New calls of the open transaction that are not written yet.
    buffered_inserts: Vec<NewCallRow>,
    ended_since_watermark: usize,
    /// Only the writer of a server knows all open calls.
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

    /// Returns the connection. Buffered calls are written first.
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

    /// Rolls the transaction back: none of its changes happened.
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

    /// Inserts a call in one statement with those that follow it.
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
        // In the order of their ids, each row follows the previous one in the index.
        buffered.sort_unstable_by(|one, other| one.row.call.id.cmp(&other.row.call.id));
        let mut rest = &buffered[..];
        while !rest.is_empty() {
            let (first, count) = insert_some(&self.connection, rest, self.last_event_number)?;
            let (inserted, later) = rest.split_at(count);
            for (position, new) in (first..).zip(inserted) {
                self.finish_insert(position, new)?;
            }
            rest = later;
        }
        buffered.clear();
        self.buffered_inserts = buffered;
        Ok(())
    }

    /// Completes the insert of a call at this position: its events, task and delivery.
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

    /// Assigns numbers to the events, and inserts those that their call's row does not imply.
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

    /// Returns the last number that was assigned.
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

    /// Finds the position of a call. The positions of open calls that this writer inserted are in
    /// memory.
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

    /// Advances the low watermark to the first open call, at intervals. It may lag behind; it is
    /// never ahead.
    fn advance_low_watermark(&mut self) -> rusqlite::Result<()> {
        self.ended_since_watermark += self.ended.len();
        if !self.maintains_low_watermark || self.ended_since_watermark < WATERMARK_INTERVAL {
            return Ok(());
        }
        self.ended_since_watermark = 0;
        // The set is as of the last commit: calls that this transaction ends only make the
        // watermark lag.
        let opened = self.opened.iter().map(|(position, _)| *position).min();
        let Some(first) = self.open_calls.first().into_iter().chain(opened).min() else {
            return Ok(());
        };
        self.connection
            .prepare_cached("INSERT OR REPLACE INTO counters VALUES ('first_open', ?1)")?
            .execute([first])
            .map(|_| ())
    }
}
