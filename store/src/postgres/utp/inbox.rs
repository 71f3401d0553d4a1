//! Inboxes in `state.agent_inbox`. Items that Toolcrib puts in are accepted. A row that another
//! program wrote is a report of a tool service, and becomes an inbox item once Toolcrib has
//! accepted it.

use serde_json::{Map, Value};
use tokio_postgres::Row;
use toolcrib::domain::utp::{InboxItem, OutboxMessage, StepCall};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::utp::InboxPutResult;

use super::super::change::WriterConnection;
use super::super::{limit_param, strip_nul_chars};
use super::insert_outbox_messages;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{RowReader, decode, encode};

/// The columns that [`read_inbox_item`] reads, in this order.
const COLUMNS: &str = "inbox_id, project_id, agent_id, message_type, toolcrib_turn_id, \
     toolcrib_tool_call_id, payload::text, traceparent, tracestate, parent_step_id, \
     source_agent_id, recursion_depth::bigint, (extract(epoch FROM created_at) * 1000)::bigint, \
     toolcrib_body";

fn read_inbox_item(row: &Row) -> Result<InboxItem, StoreError> {
    if let Some(body) = row.optional_text(13)? {
        return decode(&body);
    }
    let payload: Map<String, Value> = decode(&row.text(6)?)?;
    Ok(InboxItem {
        inbox_id: row.text(0)?,
        project: row.text(1)?,
        agent_id: row.text(2)?,
        message_type: row.text(3)?,
        turn_id: row.text(4)?,
        tool_call_id: row.text(5)?,
        payload,
        traceparent: row.text(7)?,
        tracestate: row.optional_text(8)?,
        parent_step_id: row.optional_text(9)?,
        source_agent_id: row.optional_text(10)?,
        depth: row.count(11)?,
        created_ms: row.unsigned(12)?,
    })
}

pub(super) async fn list_pending_items(
    session: &Session,
    project: &str,
    agent_id: &str,
    limit: usize,
) -> Result<Vec<InboxItem>, SessionError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM state.agent_inbox WHERE project_id = $1 AND agent_id = $2 \
         AND toolcrib_accepted AND status = 'pending' ORDER BY toolcrib_seq LIMIT $3"
    );
    session.query_map(&sql, &[&project, &agent_id, &limit_param(limit)], read_inbox_item).await
}

/// Returns the oldest pending item of each agent.
pub(super) async fn list_oldest_per_agent(
    session: &Session,
    before_ms: u64,
    after: u64,
    limit: usize,
) -> Result<Vec<(u64, InboxItem)>, SessionError> {
    let sql = format!(
        "SELECT {COLUMNS}, toolcrib_seq FROM state.agent_inbox WHERE toolcrib_seq IN \
         (SELECT min(toolcrib_seq) FROM state.agent_inbox WHERE toolcrib_accepted \
         AND status = 'pending' GROUP BY project_id, agent_id) \
         AND toolcrib_seq > $1 AND created_at < to_timestamp($2::bigint / 1000.0) \
         ORDER BY toolcrib_seq LIMIT $3"
    );
    let numbered = |row: &Row| Ok((row.unsigned(14)?, read_inbox_item(row)?));
    let params: SqlParams<'_> = &[&(after as i64), &(before_ms as i64), &limit_param(limit)];
    session.query_map(&sql, params, numbered).await
}

/// Puts an item into an inbox, unless it already holds the outcome of that call.
pub(super) async fn put_inbox_item(
    session: &Session,
    item: &InboxItem,
) -> Result<InboxPutResult, SessionError> {
    let sql = "SELECT inbox_id FROM state.agent_inbox WHERE project_id = $1 \
               AND toolcrib_turn_id = $2 AND toolcrib_tool_call_id = $3 AND toolcrib_accepted";
    let params: SqlParams<'_> = &[&item.project, &item.turn_id, &item.tool_call_id];
    if let Some(row) = session.query_first(sql, params).await? {
        return Ok(InboxPutResult::Duplicate(row.text(0)?));
    }
    // A stop and a turn concern a turn, every other item a call. When another turn has used the
    // same call id, a longer correlation id distinguishes this item.
    let correlation = match item.message_type.as_str() {
        "stop" | "turn" => item.turn_id.clone(),
        _ => item.tool_call_id.clone(),
    };
    let longer = format!("{}:{}", item.turn_id, item.tool_call_id);
    for correlation in [correlation, longer] {
        if upsert_inbox_item(session, item, &correlation).await? {
            return Ok(InboxPutResult::New);
        }
    }
    Err(StoreError::Unavailable("the position in the inbox is taken".to_owned()).into())
}

/// Inserts an item. A pending or consumed report of the same call, written by a tool service, is
/// replaced by the item: the item is the accepted form of that report.
async fn upsert_inbox_item(
    session: &Session,
    item: &InboxItem,
    correlation: &str,
) -> Result<bool, SessionError> {
    let sql = "INSERT INTO state.agent_inbox AS i (inbox_id, project_id, agent_id, message_type, \
               correlation_id, recursion_depth, traceparent, tracestate, trace_id, \
               parent_step_id, source_agent_id, payload, created_at, toolcrib_accepted, \
               toolcrib_turn_id, toolcrib_tool_call_id, toolcrib_body) \
               VALUES ($1, $2, $3, $4, $5, $6::bigint::int, $7, $8, $9, $10, $11, $12, \
               to_timestamp($13::bigint / 1000.0), true, $14, $15, $16) \
               ON CONFLICT (project_id, message_type, md5(correlation_id)) DO UPDATE SET \
               inbox_id = excluded.inbox_id, agent_id = excluded.agent_id, \
               recursion_depth = excluded.recursion_depth, traceparent = excluded.traceparent, \
               tracestate = excluded.tracestate, trace_id = excluded.trace_id, \
               parent_step_id = excluded.parent_step_id, \
               source_agent_id = excluded.source_agent_id, payload = excluded.payload, \
               created_at = excluded.created_at, toolcrib_accepted = true, \
               toolcrib_turn_id = excluded.toolcrib_turn_id, \
               toolcrib_tool_call_id = excluded.toolcrib_tool_call_id, \
               toolcrib_body = excluded.toolcrib_body, status = 'pending', processed_at = NULL \
               WHERE NOT i.toolcrib_accepted AND i.status IN ('pending', 'consumed') \
               AND i.payload->>'agent_turn_id' = excluded.toolcrib_turn_id";
    let body = encode(item)?;
    // JSONB can store neither the NUL character nor a negative zero.
    let exact = (body.contains("\\u0000") || body.contains("-0.0")).then_some(body);
    let params: SqlParams<'_> = &[
        &item.inbox_id,
        &item.project,
        &item.agent_id,
        &item.message_type,
        &correlation,
        &i64::from(item.depth),
        &item.traceparent,
        &item.tracestate,
        &item.traceparent.split('-').nth(1),
        &item.parent_step_id,
        &item.source_agent_id,
        &strip_nul_chars(Value::Object(item.payload.clone())),
        &(item.created_ms as i64),
        &item.turn_id,
        &item.tool_call_id,
        &exact,
    ];
    Ok(session.execute(sql, params).await? == 1)
}

pub(super) async fn deliver_to_inbox(
    writer: &mut WriterConnection,
    (item, card_id, message): &(InboxItem, String, Vec<OutboxMessage>),
) -> Result<InboxPutResult, SessionError> {
    let session = &writer.session;
    let delivered = put_inbox_item(session, item).await?;
    let sql = "SELECT number, body FROM turn_calls WHERE project = $1 AND turn_id = $2 \
               AND tool_call_id = $3 AND inbox_id IS NULL";
    let params: SqlParams<'_> = &[&item.project, &item.turn_id, &item.tool_call_id];
    if let Some(row) = session.query_first(sql, params).await? {
        let mut waiting: StepCall = decode(&row.text(1)?)?;
        waiting.result_card_id = Some(card_id.clone());
        waiting.inbox_id = Some(item.inbox_id.clone());
        // Links the item to its step call, also if the item was stored before the step.
        let sql = "UPDATE turn_calls SET inbox_id = $1, body = $2 WHERE number = $3";
        let params: SqlParams<'_> = &[&item.inbox_id, &encode(&waiting)?, &row.integer(0)?];
        session.execute(sql, params).await?;
    }
    if delivered == InboxPutResult::New {
        insert_outbox_messages(writer, message).await?;
    }
    Ok(delivered)
}

pub(super) async fn consume_inbox_items(
    writer: &mut WriterConnection,
    (project, agent_id, ids, now_ms): &(String, String, Vec<String>, u64),
) -> Result<usize, SessionError> {
    let sql = "UPDATE state.agent_inbox SET status = 'consumed', \
               processed_at = to_timestamp($1::bigint / 1000.0) WHERE project_id = $2 \
               AND agent_id = $3 AND inbox_id = ANY($4) AND toolcrib_accepted \
               AND status = 'pending'";
    let params: SqlParams<'_> = &[&(*now_ms as i64), project, agent_id, ids];
    Ok(writer.session.execute(sql, params).await? as usize)
}
