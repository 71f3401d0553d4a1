//! Turns and the calls of their steps.

use rusqlite::{Connection, OptionalExtension, params};
use toolcrib::domain::utp::{StepCall, Turn};
use toolcrib::ports::store::SaveResult;
use toolcrib::ports::store::utp::TurnChange;

use super::encode_body;
use crate::sqlite::utp::outbox;

/// Saves a turn with its step calls, inbox items and outbox messages, adds a new turn to its tree
/// of agents, and marks the acknowledged inbox items as read. If the stored version is not the
/// preceding one, changes nothing and returns a conflict.
pub(super) fn save_turn(
    connection: &Connection,
    turn: &Turn,
    change: &TurnChange,
) -> rusqlite::Result<SaveResult> {
    let stored: Option<i64> = connection
        .prepare_cached("SELECT version FROM turns WHERE project = ?1 AND turn_id = ?2")?
        .query_row([&turn.project, &turn.turn_id], |row| row.get(0))
        .optional()?;
    if stored.unwrap_or(0) + 1 != turn.version as i64 {
        return Ok(SaveResult::Conflict);
    }
    connection
        .prepare_cached("INSERT OR REPLACE INTO turns VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?
        .execute(params![
            turn.project,
            turn.turn_id,
            turn.agent_id,
            turn.status.as_str(),
            turn.lease_until_ms as i64,
            turn.updated_ms as i64,
            turn.version as i64,
            encode_body(turn)?
        ])?;
    if let Some(root_id) = turn.tree_root_id().filter(|_| turn.version == 1) {
        connection
            .prepare_cached("INSERT OR IGNORE INTO run_tree VALUES (?1, ?2, ?3)")?
            .execute([turn.project.as_str(), root_id, turn.turn_id.as_str()])?;
    }
    for step_call in &change.step_calls {
        insert_step_call(connection, step_call)?;
    }
    outbox::consume_inbox_items(
        connection,
        &turn.project,
        &turn.agent_id,
        &change.acknowledged_inbox_ids,
        turn.updated_ms,
    )?;
    for item in &change.inbox {
        outbox::put_inbox_item(connection, item)?;
    }
    change
        .outbox
        .iter()
        .try_for_each(|message| outbox::insert_outbox_message(connection, message))?;
    Ok(SaveResult::Saved)
}

/// Inserts a call of a step, unless it is stored already.
pub(super) fn insert_step_call(
    connection: &Connection,
    step_call: &StepCall,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT OR IGNORE INTO turn_calls \
             (project, turn_id, tool_call_id, step_id, call_id, inbox_id, body) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            step_call.project,
            step_call.turn_id,
            step_call.tool_call_id,
            step_call.step_id,
            step_call.call_id,
            step_call.inbox_id,
            encode_body(step_call)?
        ])
        .map(drop)
}
