//! Exchange with tool services through shared tables: Toolcrib publishes the cards of commands,
//! tool services write reports.

use serde_json::{Map, Value, json};
use toolcrib::domain::utp::{Card, Route};
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::utp::{ReportDisposition, SharedTableReport};

use super::super::change::WriterConnection;
use super::super::{limit_param, strip_nul_chars};
use super::cards;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{RowReader, decode};

/// Target of wakeups for an agent that is in the table only because tool services need it there. No
/// worker listens for it, so a wakeup that a tool service publishes has no effect.
const NO_WORKER_TARGET: &str = "toolcrib_no_worker";

/// A command, as the shared tables show it to tool services.
pub(super) struct PublishedCommand {
    pub(super) card: Card,
    pub(super) route: Route,
    pub(super) traceparent: String,
    pub(super) needs_anchor: bool,
}

/// Publishes the card of a command, and the edge that records that it was sent: a tool service
/// reports only on a call that has an edge, and only for an agent in `resource.project_agents`.
pub(super) async fn publish_command_card(
    writer: &mut WriterConnection,
    command: &PublishedCommand,
) -> Result<(), SessionError> {
    let PublishedCommand { card, route, traceparent, needs_anchor } = command;
    cards::put_card(writer, card).await?;
    let sql = "WITH agent AS (INSERT INTO resource.project_agents \
               (project_id, agent_id, worker_target, last_seen_at, toolcrib_automatic) \
               VALUES ($2, $4, $12, now(), true) ON CONFLICT DO NOTHING) \
               INSERT INTO state.execution_edges (edge_id, project_id, channel_id, primitive, \
               edge_phase, source_agent_id, source_agent_turn_id, source_step_id, \
               target_agent_id, target_agent_turn_id, correlation_id, recursion_depth, trace_id, \
               parent_step_id, metadata) \
               VALUES ($1, $2, $3, 'tool_call', 'request', $4, $5, $6, $4, $5, $7, \
               $8::bigint::int, $9, $10, jsonb_build_object('tool_call_card_id', $11::text)) \
               ON CONFLICT DO NOTHING";
    let params: SqlParams<'_> = &[
        &format!("edge_{}", card.card_id),
        &card.project,
        &route.channel,
        &route.agent_id,
        &route.turn_id,
        &route.step_id,
        &route.tool_call_id,
        &i64::from(route.depth),
        &traceparent.split('-').nth(1),
        &route.parent_step_id,
        &card.card_id,
        &NO_WORKER_TARGET,
    ];
    writer.session.execute(sql, params).await?;
    if *needs_anchor {
        insert_command_anchor(&writer.session, command).await?;
    }
    Ok(())
}

/// Writes the anchor of a command: a consumed inbox row from which a tool service takes the
/// identity and the headers of its report.
async fn insert_command_anchor(
    session: &Session,
    command: &PublishedCommand,
) -> Result<(), SessionError> {
    let PublishedCommand { card, route, traceparent, .. } = command;
    let headers = json!({
        "CG-Project-Id": card.project,
        "CG-Channel-Id": route.channel,
        "CG-Agent-Id": route.agent_id,
        "CG-Turn-Id": route.turn_id,
        "CG-Turn-Epoch": route.epoch.to_string(),
        "CG-Step-Id": route.step_id,
        "CG-Tool-Call-Id": route.tool_call_id,
        "CG-Recursion-Depth": route.depth.to_string(),
        "CG-Parent-Step-Id": route.parent_step_id,
        "traceparent": traceparent,
        "tracestate": route.tracestate,
    });
    let headers: Map<String, Value> = match headers {
        Value::Object(headers) => headers.into_iter().filter(|(_, v)| !v.is_null()).collect(),
        _ => Map::new(),
    };
    let sql = "INSERT INTO state.agent_inbox (inbox_id, project_id, channel_id, agent_id, \
               agent_turn_id, turn_epoch, message_type, correlation_id, recursion_depth, \
               traceparent, tracestate, trace_id, parent_step_id, source_agent_id, \
               source_step_id, context_headers, payload, status, processed_at, \
               toolcrib_accepted) \
               VALUES ($1, $2, $3, $4, $5, $6, 'command_anchor', $7, $8::bigint::int, $9, $10, \
               $11, $12, $4, $13, $14, jsonb_build_object('tool_call_card_id', $15::text), \
               'consumed', now(), true) ON CONFLICT DO NOTHING";
    let params: SqlParams<'_> = &[
        &format!("anchor_{}", card.card_id),
        &card.project,
        &route.channel,
        &route.agent_id,
        &route.turn_id,
        &(route.epoch as i64),
        &route.tool_call_id,
        &i64::from(route.depth),
        traceparent,
        &route.tracestate,
        &traceparent.split('-').nth(1),
        &route.parent_step_id,
        &route.step_id,
        &strip_nul_chars(Value::Object(headers)),
        &card.card_id,
    ];
    session.execute(sql, params).await?;
    Ok(())
}

/// Lists the reports that have no disposition yet. Rows of other kinds do not belong to Toolcrib.
pub(super) async fn list_pending_reports(
    session: &Session,
    after: u64,
    limit: usize,
) -> Result<Vec<SharedTableReport>, SessionError> {
    let sql = "SELECT toolcrib_seq, project_id, inbox_id, agent_id, correlation_id, \
               recursion_depth::bigint, traceparent, source_agent_id, \
               coalesce(payload::text, 'null'), context_headers::text, agent_turn_id, turn_epoch \
               FROM state.agent_inbox WHERE NOT toolcrib_accepted AND status = 'pending' \
               AND message_type IN ('tool_result', 'timeout') AND toolcrib_seq > $1 \
               ORDER BY toolcrib_seq LIMIT $2";
    let read = |row: &tokio_postgres::Row| {
        let headers = read_report_headers(row)?;
        Ok(SharedTableReport {
            number: row.unsigned(0)?,
            project: row.text(1)?,
            inbox_id: row.text(2)?,
            agent_id: row.text(3)?,
            correlation_id: row.optional_text(4)?,
            depth: u32::try_from(row.integer(5)?).unwrap_or(u32::MAX),
            traceparent: row.text(6)?,
            source_agent_id: row.optional_text(7)?,
            payload: row.text(8)?,
            headers,
        })
    };
    session.query_map(sql, &[&(after as i64), &limit_param(limit)], read).await
}

/// Returns the headers of a report. A report of v1r4 has its identity there and in columns; the
/// headers take precedence.
fn read_report_headers(row: &tokio_postgres::Row) -> Result<Vec<(String, String)>, StoreError> {
    let Ok(Value::Object(stored)) = decode::<Value>(&row.text(9)?) else { return Ok(Vec::new()) };
    let text = |(name, value): (String, Value)| match value {
        Value::String(text) => Some((name, text)),
        Value::Number(number) => Some((name, number.to_string())),
        _ => None,
    };
    let mut headers: Vec<(String, String)> = stored.into_iter().filter_map(text).collect();
    let Some(turn_id) = row.optional_text(10)? else { return Ok(headers) };
    let columns = [
        ("CG-Agent-Id", Some(row.text(3)?)),
        ("CG-Turn-Id", Some(turn_id)),
        ("CG-Turn-Epoch", row.optional_integer(11)?.map(|epoch| epoch.to_string())),
        ("CG-Tool-Call-Id", row.optional_text(4)?),
    ];
    for (name, value) in columns {
        let is_known = headers.iter().any(|(header, _)| header.eq_ignore_ascii_case(name));
        if let Some(value) = value.filter(|_| !is_known) {
            headers.push((name.to_owned(), value));
        }
    }
    Ok(headers)
}

/// Records the disposition of a report. An accepted report is in the inbox by now, or its agent has
/// no inbox. A refused report gives up its correlation id, so that another report about the same
/// call can be written.
pub(super) async fn record_report_verdict(
    writer: &mut WriterConnection,
    (number, disposition): &(u64, ReportDisposition),
) -> Result<(), SessionError> {
    let (status, frees) = match disposition {
        ReportDisposition::Applied => ("consumed", false),
        ReportDisposition::Late => ("skipped", false),
        ReportDisposition::Rejected => ("error", true),
    };
    let sql = "UPDATE state.agent_inbox SET status = $2, processed_at = now(), correlation_id = \
               CASE WHEN $3 THEN correlation_id || ':refused:' || inbox_id \
               ELSE correlation_id END \
               WHERE toolcrib_seq = $1 AND NOT toolcrib_accepted AND status = 'pending'";
    writer.session.execute(sql, &[&(*number as i64), &status, &frees]).await?;
    Ok(())
}
