//! The numbers of events: how a call's row lists them, and which is the newest. Events and journal
//! entries take their numbers from one sequence.

use rusqlite::{Connection, OptionalExtension};

use crate::row::{EventRow, ImpliedEvent};

/// One entry of a call's event list. A code after the number marks an event that the call's row
/// itself implies and that has no row in `events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct EventRef {
    pub(crate) number: u64,
    implied_code: Option<char>,
}

impl EventRef {
    pub(crate) fn implied_event(self) -> Option<ImpliedEvent> {
        ImpliedEvent::ALL.into_iter().find(|implied| Some(implied.code()) == self.implied_code)
    }
}

/// Parses a call's event list, such as `12r,13s,40,`.
pub(crate) fn parse_event_refs(list: &str) -> impl Iterator<Item = EventRef> {
    list.split(',').filter(|entry| !entry.is_empty()).filter_map(|entry| {
        let digits = entry.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let implied_code = entry[digits.len()..].chars().next();
        Some(EventRef { number: digits.parse().ok()?, implied_code })
    })
}

/// Formats the numbers that these events get after `last`, as the call's event list stores them.
pub(crate) fn format_event_refs(last: i64, records: &[EventRow]) -> String {
    use std::fmt::Write;
    let mut list = String::with_capacity(records.len() * 12);
    for (number, record) in (last + 1..).zip(records) {
        let _ = write!(list, "{number}");
        list.extend(record.implied.map(ImpliedEvent::code));
        list.push(',');
    }
    list
}

/// Returns the highest number in use: in `events`, in the newest call or in a journal.
pub(crate) fn newest_event_number(connection: &Connection) -> rusqlite::Result<i64> {
    let sql = "SELECT max(coalesce((SELECT max(number) FROM events), 0), \
               coalesce((SELECT max(number) FROM loop_entries), 0))";
    let stored: i64 = connection.query_row(sql, [], |row| row.get(0))?;
    let newest = "SELECT events FROM tool_calls ORDER BY place DESC LIMIT 1";
    let list: Option<String> = connection.query_row(newest, [], |row| row.get(0)).optional()?;
    let listed = list.and_then(|list| parse_event_refs(&list).map(|event| event.number).max());
    Ok(stored.max(listed.unwrap_or(0) as i64))
}

/// Returns the last number that was assigned. Numbering continues after it even if the newest
/// events were purged.
pub(crate) fn load_last_event_number(connection: &Connection) -> rusqlite::Result<i64> {
    let newest = newest_event_number(connection)?;
    let counted: Option<i64> = connection
        .query_row("SELECT value FROM counters WHERE name = 'last_event'", [], |row| row.get(0))
        .optional()?;
    Ok(newest.max(counted.unwrap_or(0)))
}
