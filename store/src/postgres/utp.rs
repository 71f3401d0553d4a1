//! The UTP part of the store in PostgreSQL. Cards, inboxes and edges are in the tables that tool
//! services know; turns, the outbox and dead letters are in Toolcrib's own tables.

mod cards;
mod inbox;
mod reports;
mod turns;
use async_trait::async_trait;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::domain::utp::{Card, DeadLetter, InboxItem, OutboxMessage, Route, StepCall, Turn};
use toolcrib::ports::store::utp::{
    InboxPutResult, PutCardResult, ReportDisposition, SharedTableReport, SharedTables, TurnChange,
    UtpStore,
};
use toolcrib::ports::store::{SaveResult, StoreError};

use super::change::WriterConnection;
use super::{PostgresStore, limit_param};
use crate::postgres::session::{SessionError, SqlParams};
use crate::row::{RowReader, decode, decode_definition, encode};

impl PostgresStore {
    /// Returns the bodies that a query finds, in its order.
    async fn query_bodies<T: DeserializeOwned>(
        &self,
        sql: &str,
        params: SqlParams<'_>,
    ) -> Result<Vec<T>, StoreError> {
        let session = self.pool.acquire().await?;
        let found = session.query_map(sql, params, |row| decode(&row.text(0)?)).await;
        found.map_err(SessionError::into_store_error)
    }
}

async fn insert_outbox_messages(
    writer: &mut WriterConnection,
    messages: &Vec<OutboxMessage>,
) -> Result<(), SessionError> {
    for message in messages {
        let sql = "INSERT INTO outbox (id, body) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        writer.session.execute(sql, &[&message.id, &encode(message)?]).await?;
    }
    Ok(())
}

async fn delete_outbox_messages(
    writer: &mut WriterConnection,
    ids: &Vec<String>,
) -> Result<(), SessionError> {
    writer.session.execute("DELETE FROM outbox WHERE id = ANY($1)", &[ids]).await?;
    Ok(())
}

async fn insert_dead_letter(
    writer: &mut WriterConnection,
    dead_letter: &DeadLetter,
) -> Result<(), SessionError> {
    let sql = "INSERT INTO dead_letters VALUES ($1, $2, $3, $4) \
               ON CONFLICT (id) DO UPDATE SET body = excluded.body";
    let (created_ms, body) = (dead_letter.created_ms as i64, encode(dead_letter)?);
    writer
        .session
        .execute(sql, &[&dead_letter.id, &dead_letter.project, &created_ms, &body])
        .await?;
    Ok(())
}

#[async_trait]
impl UtpStore for PostgresStore {
    fn shared_tables(&self) -> Option<&dyn SharedTables> {
        self.report_listener.as_ref().map(|_| self as &dyn SharedTables)
    }

    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<ToolDefinition>, StoreError> {
        let sql = "SELECT definition FROM tool_versions \
                   WHERE project = $1 AND name = $2 AND version = $3";
        let session = self.pool.acquire().await?;
        let found = session.query_first(sql, &[&project, &tool, &version]).await;
        let Some(row) = found.map_err(SessionError::into_store_error)? else { return Ok(None) };
        decode_definition(project.to_owned(), tool.to_owned(), &row.text(0)?).map(Some)
    }

    async fn put_card(&self, card: Card) -> Result<PutCardResult, StoreError> {
        self.write(card, |writer, card| Box::pin(cards::put_card(writer, card))).await
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let session = self.pool.acquire().await?;
        cards::find_card(&session, project, card_id).await.map_err(SessionError::into_store_error)
    }

    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError> {
        let session = self.pool.acquire().await?;
        let found =
            cards::find_result_card(&session, project, Some(turn_id), Some(tool_call_id)).await;
        found.map_err(SessionError::into_store_error)
    }

    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE project = $1 AND turn_id = $2";
        Ok(self.query_bodies(sql, &[&project, &turn_id]).await?.pop())
    }

    async fn tree_turns(
        &self,
        project: &str,
        root_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Turn>, StoreError> {
        let sql = "SELECT t.body FROM run_tree r JOIN turns t \
                   ON t.project = r.project AND t.turn_id = r.run_id \
                   WHERE r.project = $1 AND r.root_run_id = $2 AND r.run_id > $3 \
                   ORDER BY r.run_id LIMIT $4";
        let after = after.unwrap_or_default();
        self.query_bodies(sql, &[&project, &root_id, &after, &limit_param(limit)]).await
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<SaveResult, StoreError> {
        self.write((turn, change), |writer, input| Box::pin(turns::save_turn(writer, input))).await
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE status = 'running' AND lease_until_ms <= $1 \
                   ORDER BY lease_until_ms LIMIT $2";
        self.query_bodies(sql, &[&(now_ms as i64), &limit_param(limit)]).await
    }

    async fn step_calls(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<StepCall>, StoreError> {
        let sql = "SELECT body FROM turn_calls WHERE project = $1 AND turn_id = $2 \
                   AND step_id = $3 ORDER BY number";
        self.query_bodies(sql, &[&project, &turn_id, &step_id]).await
    }

    async fn step_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<StepCall>, StoreError> {
        let sql = "SELECT body FROM turn_calls WHERE project = $1 AND tool_call_id = $2 \
                   AND ($3::text IS NULL OR turn_id = $3) ORDER BY number DESC LIMIT 1";
        Ok(self.query_bodies(sql, &[&project, &tool_call_id, &turn_id]).await?.pop())
    }

    async fn add_step_call(&self, step_call: StepCall) -> Result<(), StoreError> {
        self.write(step_call, |writer, step_call| {
            Box::pin(turns::insert_step_call(&writer.session, step_call))
        })
        .await
    }

    async fn undelivered_step_calls(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, StepCall)>, StoreError> {
        let sql = "SELECT number, body FROM turn_calls WHERE inbox_id IS NULL AND number > $1 \
                   AND call_id IS NOT NULL ORDER BY number LIMIT $2";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.unsigned(0)?, decode(&row.text(1)?)?));
        let found = session.query_map(sql, &[&(after as i64), &limit_param(limit)], read).await;
        found.map_err(SessionError::into_store_error)
    }

    async fn deliver_to_inbox(
        &self,
        item: InboxItem,
        result_card_id: &str,
        message: Option<OutboxMessage>,
    ) -> Result<InboxPutResult, StoreError> {
        let input = (item, result_card_id.to_owned(), message.into_iter().collect());
        self.write(input, |writer, input| Box::pin(inbox::deliver_to_inbox(writer, input))).await
    }

    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError> {
        let session = self.pool.acquire().await?;
        inbox::list_pending_items(&session, project, agent_id, limit)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn acknowledge_inbox_items(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError> {
        let input = (project.to_owned(), agent_id.to_owned(), inbox_ids.to_vec(), now_ms);
        self.write(input, |writer, input| Box::pin(inbox::consume_inbox_items(writer, input))).await
    }

    async fn agents_with_unread_items(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError> {
        let session = self.pool.acquire().await?;
        inbox::list_oldest_per_agent(&session, before_ms, after, limit)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn append_to_outbox(&self, messages: Vec<OutboxMessage>) -> Result<(), StoreError> {
        self.write(messages, |writer, messages| Box::pin(insert_outbox_messages(writer, messages)))
            .await
    }

    async fn outbox(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, OutboxMessage)>, StoreError> {
        let sql = "SELECT number, body FROM outbox WHERE number > $1 ORDER BY number LIMIT $2";
        let session = self.pool.acquire().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.unsigned(0)?, decode(&row.text(1)?)?));
        let found = session.query_map(sql, &[&(after as i64), &limit_param(limit)], read).await;
        found.map_err(SessionError::into_store_error)
    }

    async fn remove_from_outbox(&self, ids: &[String]) -> Result<(), StoreError> {
        self.write(ids.to_vec(), |writer, ids| Box::pin(delete_outbox_messages(writer, ids))).await
    }

    async fn save_dead_letter(&self, dead_letter: DeadLetter) -> Result<(), StoreError> {
        self.write(dead_letter, |writer, dead_letter| {
            Box::pin(insert_dead_letter(writer, dead_letter))
        })
        .await
    }

    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let sql = "SELECT body FROM dead_letters WHERE project = $1 \
                   AND ($2::text IS NULL OR id < $2) ORDER BY id DESC LIMIT $3";
        self.query_bodies(sql, &[&project, &before, &limit_param(limit)]).await
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let sql = "SELECT body FROM dead_letters WHERE project = $1 AND id = $2";
        Ok(self.query_bodies(sql, &[&project, &id]).await?.pop())
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        self.write((before_ms, limit), |writer, input| Box::pin(turns::purge_utp(writer, input)))
            .await
    }
}

#[async_trait]
impl SharedTables for PostgresStore {
    fn watch_reports(&self) -> watch::Receiver<u64> {
        self.report_signal.clone()
    }

    async fn write_command(
        &self,
        card: Card,
        route: &Route,
        traceparent: &str,
    ) -> Result<(), StoreError> {
        let command = reports::PublishedCommand {
            card,
            route: route.clone(),
            traceparent: traceparent.to_owned(),
            needs_anchor: self.writes_command_anchors,
        };
        self.write(command, |writer, command| {
            Box::pin(reports::publish_command_card(writer, command))
        })
        .await
    }

    async fn pending_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<SharedTableReport>, StoreError> {
        let session = self.pool.acquire().await?;
        reports::list_pending_reports(&session, after, limit)
            .await
            .map_err(SessionError::into_store_error)
    }

    async fn record_disposition(
        &self,
        number: u64,
        disposition: ReportDisposition,
    ) -> Result<(), StoreError> {
        self.write((number, disposition), |writer, input| {
            Box::pin(reports::record_report_verdict(writer, input))
        })
        .await
    }
}
