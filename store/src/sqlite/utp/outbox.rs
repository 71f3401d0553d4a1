//! Inboxes, the outbox, and the purge of old UTP data.

use rusqlite::{Connection, OptionalExtension, params};
use toolcrib::domain::utp::{InboxItem, OutboxMessage, StepCall};
use toolcrib::ports::store::utp::{InboxPutResult, REPLACED_DEFINITION_GRACE_MS};

use super::{decode_body, encode_body};

/// Puts an item into an inbox, unless it already holds the outcome of that call.
pub(super) fn put_inbox_item(
    connection: &Connection,
    item: &InboxItem,
) -> rusqlite::Result<InboxPutResult> {
    let existing: Option<String> = connection
        .prepare_cached(
            "SELECT inbox_id FROM inbox \
             WHERE project = ?1 AND turn_id = ?2 AND tool_call_id = ?3",
        )?
        .query_row([&item.project, &item.turn_id, &item.tool_call_id], |row| row.get(0))
        .optional()?;
    if let Some(existing) = existing {
        return Ok(InboxPutResult::Duplicate(existing));
    }
    connection
        .prepare_cached(
            "INSERT INTO inbox \
             (inbox_id, project, agent_id, turn_id, tool_call_id, created_ms, body) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            item.inbox_id,
            item.project,
            item.agent_id,
            item.turn_id,
            item.tool_call_id,
            item.created_ms as i64,
            encode_body(item)?
        ])?;
    Ok(InboxPutResult::New)
}

pub(super) fn deliver_to_inbox(
    connection: &Connection,
    item: &InboxItem,
    result_card_id: &str,
    message: Option<&OutboxMessage>,
) -> rusqlite::Result<InboxPutResult> {
    let delivered = put_inbox_item(connection, item)?;
    let call: Option<(i64, String)> = connection
        .prepare_cached(
            "SELECT number, body FROM turn_calls \
             WHERE project = ?1 AND turn_id = ?2 AND tool_call_id = ?3 AND inbox_id IS NULL",
        )?
        .query_row([&item.project, &item.turn_id, &item.tool_call_id], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    if let Some((number, text)) = call {
        let mut waiting: StepCall = decode_body(&text)?;
        waiting.result_card_id = Some(result_card_id.to_owned());
        waiting.inbox_id = Some(item.inbox_id.clone());
        // Links the item to its step call, also if the item was stored before the step.
        connection
            .prepare_cached("UPDATE turn_calls SET inbox_id = ?1, body = ?2 WHERE number = ?3")?
            .execute(params![item.inbox_id, encode_body(&waiting)?, number])?;
    }
    if delivered == InboxPutResult::New {
        message.map_or(Ok(()), |message| insert_outbox_message(connection, message))?;
    }
    Ok(delivered)
}

pub(super) fn insert_outbox_message(
    connection: &Connection,
    message: &OutboxMessage,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached("INSERT OR IGNORE INTO outbox (id, body) VALUES (?1, ?2)")?
        .execute(params![message.id, encode_body(message)?])
        .map(drop)
}

pub(super) fn consume_inbox_items(
    connection: &Connection,
    project: &str,
    agent_id: &str,
    ids: &[String],
    now_ms: u64,
) -> rusqlite::Result<usize> {
    let mut update = connection.prepare_cached(
        "UPDATE inbox SET taken_ms = ?1 WHERE project = ?2 AND agent_id = ?3 AND inbox_id = ?4 \
         AND taken_ms IS NULL",
    )?;
    let mut count = 0;
    for id in ids {
        count += update.execute(params![now_ms as i64, project, agent_id, id])?;
    }
    Ok(count)
}

/// Deletes up to `limit` old rows of each UTP table.
pub(super) fn purge_utp(
    connection: &Connection,
    before_ms: u64,
    limit: usize,
) -> rusqlite::Result<usize> {
    let bound = params![i64::try_from(before_ms).unwrap_or(i64::MAX), limit as i64];
    let mut count = 0;
    for sql in [
        "DELETE FROM cards WHERE number IN (SELECT number FROM cards ORDER BY number LIMIT ?2) \
         AND created_ms < ?1",
        // Includes items that were never consumed: their call and its cards are gone by now.
        "DELETE FROM inbox WHERE number IN (SELECT number FROM inbox ORDER BY number LIMIT ?2) \
         AND created_ms < ?1",
        "DELETE FROM dead_letters WHERE id IN (SELECT id FROM dead_letters ORDER BY id LIMIT ?2) \
         AND created_ms < ?1",
        "DELETE FROM turn_calls WHERE number IN (SELECT number FROM turn_calls \
         WHERE inbox_id IS NOT NULL ORDER BY number LIMIT ?2) \
         AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.project = turn_calls.project \
         AND t.turn_id = turn_calls.turn_id AND t.updated_ms >= ?1)",
    ] {
        count += connection.prepare_cached(sql)?.execute(bound)?;
    }
    count += purge_turns(connection, before_ms, limit)?;
    Ok(count + purge_tool_versions(connection, before_ms, limit)?)
}

/// Deletes old turns whose step calls are deleted, with their places in trees of agents.
fn purge_turns(connection: &Connection, before_ms: u64, limit: usize) -> rusqlite::Result<usize> {
    let sql = "DELETE FROM turns WHERE (project, turn_id) IN (SELECT project, turn_id FROM turns \
               WHERE updated_ms < ?1 LIMIT ?2) AND NOT EXISTS (SELECT 1 FROM turn_calls c \
               WHERE c.project = turns.project AND c.turn_id = turns.turn_id) \
               RETURNING project, turn_id";
    let bound = params![i64::try_from(before_ms).unwrap_or(i64::MAX), limit as i64];
    let mut delete = connection.prepare_cached(sql)?;
    let deleted = delete.query_map(bound, |row| Ok((row.get(0)?, row.get(1)?)))?;
    let deleted: Vec<(String, String)> = deleted.collect::<Result<_, _>>()?;
    let sql = "DELETE FROM run_tree WHERE project = ?1 AND run_id = ?2";
    for (project, turn_id) in &deleted {
        connection.prepare_cached(sql)?.execute([project, turn_id])?;
    }
    Ok(deleted.len())
}

/// Deletes tool definitions that were replaced before the oldest stored call was created.
fn purge_tool_versions(
    connection: &Connection,
    before_ms: u64,
    limit: usize,
) -> rusqlite::Result<usize> {
    connection
        .prepare_cached(
            "DELETE FROM tool_versions WHERE (project, name, version) IN \
             (SELECT project, name, version FROM tool_versions WHERE replaced_ms + ?3 < \
             min(?1, coalesce((SELECT created_ms FROM tool_calls ORDER BY place LIMIT 1), ?1)) LIMIT ?2)",
        )?
        .execute(params![
            i64::try_from(before_ms).unwrap_or(i64::MAX),
            limit as i64,
            REPLACED_DEFINITION_GRACE_MS as i64
        ])
}
