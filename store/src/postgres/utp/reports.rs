//! Exchange with tool services through shared tables: Toolcrib publishes the cards of commands,
//! tool services write reports.

use toolcrib::domain::utp::{Card, Route};
use toolcrib::ports::store::utp::{ReportDisposition, SharedTableReport};

use super::super::change::WriterConnection;
use super::super::limit_param;
use super::cards;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::RowReader;

/// Publishes the card of a command, and the edge that records that it was sent: a tool service
/// reports only on a call that has an edge.
pub(super) async fn publish_command_card(
    writer: &mut WriterConnection,
    (card, route, traceparent): &(Card, Route, String),
) -> Result<(), SessionError> {
    cards::put_card(writer, card).await?;
    let sql = "INSERT INTO state.execution_edges (edge_id, project_id, channel_id, primitive, \
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
    ];
    writer.session.execute(sql, params).await?;
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
               coalesce(payload::text, 'null') \
               FROM state.agent_inbox WHERE NOT toolcrib_accepted AND status = 'pending' \
               AND message_type IN ('tool_result', 'timeout') AND toolcrib_seq > $1 \
               ORDER BY toolcrib_seq LIMIT $2";
    let read = |row: &tokio_postgres::Row| {
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
        })
    };
    session.query_map(sql, &[&(after as i64), &limit_param(limit)], read).await
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
