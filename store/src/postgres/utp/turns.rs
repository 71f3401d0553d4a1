//! Turns and the calls of their steps, and the purge of old UTP data.

use toolcrib::domain::utp::{ExecutionEdge, StepCall, Turn};
use toolcrib::ports::store::SaveResult;
use toolcrib::ports::store::utp::{REPLACED_DEFINITION_GRACE_MS, TurnChange};

use super::super::change::WriterConnection;
use super::super::limit_param;
use super::{inbox, insert_outbox_messages};
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::encode;

/// Saves a turn with its step calls, inbox items and outbox messages, and adds a new turn to its
/// tree of agents. Returns a conflict if the
/// stored version is not the preceding one.
pub(super) async fn save_turn(
    writer: &mut WriterConnection,
    (turn, change): &(Turn, TurnChange),
) -> Result<SaveResult, SessionError> {
    let session = &writer.session;
    let sql = match turn.version {
        1 => "INSERT INTO turns VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING",
        _ => {
            "UPDATE turns SET agent_id = $3, status = $4, lease_until_ms = $5, updated_ms = $6, \
             version = $7, body = $8 WHERE project = $1 AND turn_id = $2 AND version = $7::bigint - 1"
        }
    };
    let params: SqlParams<'_> = &[
        &turn.project,
        &turn.turn_id,
        &turn.agent_id,
        &turn.status.as_str(),
        &(turn.lease_until_ms as i64),
        &(turn.updated_ms as i64),
        &(turn.version as i64),
        &encode(turn)?,
    ];
    if session.execute(sql, params).await? == 0 {
        return Ok(SaveResult::Conflict);
    }
    if let Some(root_id) = turn.tree_root_id().filter(|_| turn.version == 1) {
        let sql = "INSERT INTO run_tree VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        session.execute(sql, &[&turn.project, &root_id, &turn.turn_id]).await?;
    }
    for step_call in &change.step_calls {
        insert_step_call(session, step_call).await?;
    }
    for edge in &change.edges {
        insert_edge(session, turn, edge).await?;
    }
    if !change.acknowledged_inbox_ids.is_empty() {
        let (project, agent) = (turn.project.clone(), turn.agent_id.clone());
        inbox::consume_inbox_items(
            writer,
            &(project, agent, change.acknowledged_inbox_ids.clone(), turn.updated_ms),
        )
        .await?;
    }
    for item in &change.inbox {
        inbox::put_inbox_item(&writer.session, item).await?;
    }
    insert_outbox_messages(writer, &change.outbox).await?;
    Ok(SaveResult::Saved)
}

/// Inserts a call of a step, unless it is stored already.
pub(super) async fn insert_step_call(
    session: &Session,
    step_call: &StepCall,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO turn_calls (project, turn_id, tool_call_id, step_id, call_id, \
               inbox_id, body) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING";
    let params: SqlParams<'_> = &[
        &step_call.project,
        &step_call.turn_id,
        &step_call.tool_call_id,
        &step_call.step_id,
        &step_call.call_id,
        &step_call.inbox_id,
        &encode(step_call)?,
    ];
    session.execute(sql, params).await?;
    Ok(())
}

/// Writes the edge of a message that concerns this turn.
async fn insert_edge(
    session: &Session,
    turn: &Turn,
    edge: &ExecutionEdge,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO state.execution_edges (edge_id, project_id, channel_id, primitive, \
               edge_phase, source_agent_id, source_agent_turn_id, source_step_id, \
               target_agent_id, target_agent_turn_id, correlation_id, recursion_depth, trace_id, \
               parent_step_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, \
               $12::bigint::int, $13, $14) ON CONFLICT DO NOTHING";
    let params: SqlParams<'_> = &[
        &edge.edge_id,
        &turn.project,
        &turn.channel,
        &edge.primitive,
        &edge.phase,
        &edge.source.0,
        &edge.source.1,
        &edge.source.2,
        &edge.target.0,
        &edge.target.1,
        &edge.correlation_id,
        &i64::from(turn.depth),
        &turn.traceparent.as_deref().and_then(|span| span.split('-').nth(1)),
        &turn.parent_step_id,
    ];
    session.execute(sql, params).await?;
    Ok(())
}

/// Upper bound for a cutoff time, near the end of the year 9999: PostgreSQL can represent it.
const LATEST_MS: u64 = 253_402_300_000_000;

/// Deletes up to `limit` old rows of each UTP table.
pub(super) async fn purge_utp(
    writer: &mut WriterConnection,
    (before, limit): &(u64, usize),
) -> Result<usize, SessionError> {
    let (before, limit) = ((*before).min(LATEST_MS) as i64, limit_param(*limit));
    let mut count = 0;
    for sql in [
        "DELETE FROM public.cards WHERE toolcrib_seq IN (SELECT toolcrib_seq FROM public.cards \
         ORDER BY toolcrib_seq LIMIT $2) AND created_at < to_timestamp($1::bigint / 1000.0)",
        // Includes items that were never consumed: their call and its cards are gone by now.
        "DELETE FROM state.agent_inbox WHERE toolcrib_seq IN (SELECT toolcrib_seq \
         FROM state.agent_inbox ORDER BY toolcrib_seq LIMIT $2) \
         AND created_at < to_timestamp($1::bigint / 1000.0)",
        "DELETE FROM state.execution_edges WHERE edge_id IN (SELECT edge_id \
         FROM state.execution_edges ORDER BY created_at LIMIT $2) \
         AND created_at < to_timestamp($1::bigint / 1000.0)",
        "DELETE FROM dead_letters WHERE id IN (SELECT id FROM dead_letters ORDER BY id LIMIT $2) \
         AND created_ms < $1::bigint",
        "DELETE FROM turn_calls WHERE number IN (SELECT number FROM turn_calls \
         WHERE inbox_id IS NOT NULL ORDER BY number LIMIT $2) \
         AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.project = turn_calls.project \
         AND t.turn_id = turn_calls.turn_id AND t.updated_ms >= $1::bigint)",
        "WITH old AS (SELECT project, turn_id FROM turns WHERE (project, turn_id) IN \
         (SELECT project, turn_id FROM turns \
         WHERE updated_ms < $1::bigint ORDER BY updated_ms LIMIT $2) \
         AND NOT EXISTS (SELECT 1 FROM turn_calls c \
         WHERE c.project = turns.project AND c.turn_id = turns.turn_id)), \
         tree AS (DELETE FROM run_tree r USING old \
         WHERE r.project = old.project AND r.run_id = old.turn_id) \
         DELETE FROM turns USING old \
         WHERE turns.project = old.project AND turns.turn_id = old.turn_id",
    ] {
        count += writer.session.execute(sql, &[&before, &limit]).await?;
    }
    // Deletes tool definitions that were replaced before the oldest stored call was created.
    let sql = "DELETE FROM tool_versions WHERE (project, name, version) IN \
               (SELECT project, name, version FROM tool_versions WHERE replaced_ms + $3 < \
               least($1::bigint, (SELECT created_ms FROM tool_calls ORDER BY place LIMIT 1)) LIMIT $2)";
    count += writer
        .session
        .execute(sql, &[&before, &limit, &(REPLACED_DEFINITION_GRACE_MS as i64)])
        .await?;
    Ok(count as usize)
}
