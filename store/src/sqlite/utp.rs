//! The UTP part of the store in SQLite. Its writes go through the single writer like all others and
//! share its commits.

mod outbox;
mod turns;
use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use toolcrib::domain::tool::ToolDefinition;
use toolcrib::domain::utp::card::TOOL_RESULT;
use toolcrib::domain::utp::{Card, DeadLetter, InboxItem, OutboxMessage, StepCall, Turn};
use toolcrib::ports::store::utp::{InboxPutResult, PutCardResult, TurnChange, UtpStore};
use toolcrib::ports::store::{SaveResult, StoreError};

use super::SqliteStore;
use super::reader::to_store_error;
use crate::row::decode_definition;

/// Encodes a value as the text of a `body` column.
fn encode_body<T: Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// Decodes the value of a `body` column.
fn decode_body<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    let kind = rusqlite::types::Type::Text;
    serde_json::from_str(text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, kind, Box::new(error)))
}

/// Returns the bodies that a query finds, in its order.
fn query_bodies<T: DeserializeOwned>(
    connection: &Connection,
    sql: &str,
    bound: &[&dyn rusqlite::ToSql],
) -> rusqlite::Result<Vec<T>> {
    let mut select = connection.prepare_cached(sql)?;
    let mut rows = select.query(bound)?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push(decode_body(&row.get::<_, String>(0)?)?);
    }
    Ok(all)
}

/// Returns bodies with their numbers. The parameters are the number to start after, the limit, and
/// any others that the statement needs.
fn query_numbered_bodies<T: DeserializeOwned>(
    connection: &Connection,
    sql: &str,
    bound: &[i64],
) -> rusqlite::Result<Vec<(u64, T)>> {
    let mut select = connection.prepare_cached(sql)?;
    let mut rows = select.query(rusqlite::params_from_iter(bound))?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push((row.get::<_, i64>(0)? as u64, decode_body(&row.get::<_, String>(1)?)?));
    }
    Ok(all)
}

fn put_card(connection: &Connection, card: &Card) -> rusqlite::Result<PutCardResult> {
    let result = card.kind == TOOL_RESULT;
    let existing: Option<String> = connection
        .prepare_cached(
            "SELECT body FROM cards WHERE project = ?1 AND card_id = ?2 UNION ALL \
             SELECT body FROM cards WHERE project = ?1 AND turn_id = ?3 AND tool_call_id = ?4 \
             AND type = 'tool.result' AND ?5 LIMIT 1",
        )?
        .query_row(
            params![card.project, card.card_id, card.turn_id(), card.tool_call_id, result],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(existing) = existing {
        let existing: Card = decode_body(&existing)?;
        return Ok(match existing.equals_ignoring_time(card) {
            true => PutCardResult::Identical,
            false => PutCardResult::Conflict(Box::new(existing)),
        });
    }
    connection
        .prepare_cached(
            "INSERT INTO cards (project, card_id, type, turn_id, tool_call_id, created_ms, body) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            card.project,
            card.card_id,
            card.kind,
            card.turn_id(),
            card.tool_call_id,
            card.created_ms as i64,
            encode_body(card)?
        ])?;
    Ok(PutCardResult::New)
}

impl SqliteStore {
    async fn read_sql<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.read(move |connection| read(connection).map_err(|error| to_store_error(&error))).await
    }
}

#[async_trait]
impl UtpStore for SqliteStore {
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<ToolDefinition>, StoreError> {
        let (project, tool, version) = (project.to_owned(), tool.to_owned(), version.to_owned());
        self.read(move |connection| {
            let text: Option<String> = connection
                .prepare_cached(
                    "SELECT definition FROM tool_versions \
                     WHERE project = ?1 AND name = ?2 AND version = ?3",
                )
                .and_then(|mut select| {
                    select.query_row([&project, &tool, &version], |row| row.get(0)).optional()
                })
                .map_err(|error| to_store_error(&error))?;
            text.map(|text| decode_definition(project, tool, &text)).transpose()
        })
        .await
    }

    async fn put_card(&self, card: Card) -> Result<PutCardResult, StoreError> {
        self.write(move |writer| put_card(writer.connection()?, &card)).await
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let (project, card_id) = (project.to_owned(), card_id.to_owned());
        let sql = "SELECT body FROM cards WHERE project = ?1 AND card_id = ?2";
        self.read_sql(move |c| Ok(query_bodies(c, sql, params![project, card_id])?.pop())).await
    }

    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.to_owned());
        let tool_call_id = tool_call_id.to_owned();
        let sql = "SELECT body FROM cards WHERE project = ?1 AND turn_id = ?2 \
                   AND tool_call_id = ?3 AND type = 'tool.result'";
        self.read_sql(move |c| {
            Ok(query_bodies(c, sql, params![project, turn_id, tool_call_id])?.pop())
        })
        .await
    }

    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.to_owned());
        let sql = "SELECT body FROM turns WHERE project = ?1 AND turn_id = ?2";
        self.read_sql(move |c| Ok(query_bodies(c, sql, params![project, turn_id])?.pop())).await
    }

    async fn tree_turns(
        &self,
        project: &str,
        root_id: &str,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<Turn>, StoreError> {
        let (project, root_id) = (project.to_owned(), root_id.to_owned());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let sql = "SELECT t.body FROM run_tree r JOIN turns t \
                   ON t.project = r.project AND t.turn_id = r.run_id \
                   WHERE r.project = ?1 AND r.root_run_id = ?2 AND r.run_id > ?3 \
                   ORDER BY r.run_id LIMIT ?4";
        let after = after.unwrap_or_default();
        self.read_sql(move |c| query_bodies(c, sql, params![project, root_id, after, limit])).await
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<SaveResult, StoreError> {
        self.write(move |writer| turns::save_turn(writer.connection()?, &turn, &change)).await
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE status = 'running' AND lease_until_ms <= ?1 \
                   ORDER BY lease_until_ms LIMIT ?2";
        self.read_sql(move |c| query_bodies(c, sql, params![now_ms as i64, limit as i64])).await
    }

    async fn step_calls(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<StepCall>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.to_owned());
        let step_id = step_id.to_owned();
        let sql = "SELECT body FROM turn_calls WHERE project = ?1 AND turn_id = ?2 \
                   AND step_id = ?3 ORDER BY number";
        self.read_sql(move |c| query_bodies(c, sql, params![project, turn_id, step_id])).await
    }

    async fn step_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<StepCall>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.map(str::to_owned));
        let tool_call_id = tool_call_id.to_owned();
        let sql = "SELECT body FROM turn_calls WHERE project = ?1 AND tool_call_id = ?2 \
                   AND (?3 IS NULL OR turn_id = ?3) ORDER BY number";
        self.read_sql(move |c| {
            Ok(query_bodies(c, sql, params![project, tool_call_id, turn_id])?.pop())
        })
        .await
    }

    async fn add_step_call(&self, step_call: StepCall) -> Result<(), StoreError> {
        self.write(move |writer| turns::insert_step_call(writer.connection()?, &step_call)).await
    }

    async fn undelivered_step_calls(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, StepCall)>, StoreError> {
        let sql = "SELECT number, body FROM turn_calls WHERE inbox_id IS NULL AND number > ?1 \
                   AND call_id IS NOT NULL ORDER BY number LIMIT ?2";
        self.read_sql(move |c| query_numbered_bodies(c, sql, &[after as i64, limit as i64])).await
    }

    async fn deliver_to_inbox(
        &self,
        item: InboxItem,
        result_card_id: &str,
        message: Option<OutboxMessage>,
    ) -> Result<InboxPutResult, StoreError> {
        let card_id = result_card_id.to_owned();
        self.write(move |writer| {
            let connection = writer.connection()?;
            outbox::deliver_to_inbox(connection, &item, &card_id, message.as_ref())
        })
        .await
    }

    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError> {
        let (project, agent_id) = (project.to_owned(), agent_id.to_owned());
        let sql = "SELECT body FROM inbox WHERE project = ?1 AND agent_id = ?2 \
                   AND taken_ms IS NULL ORDER BY number LIMIT ?3";
        self.read_sql(move |c| query_bodies(c, sql, params![project, agent_id, limit as i64])).await
    }

    async fn acknowledge_inbox_items(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError> {
        let (project, agent_id) = (project.to_owned(), agent_id.to_owned());
        let ids = inbox_ids.to_vec();
        self.write(move |writer| {
            outbox::consume_inbox_items(writer.connection()?, &project, &agent_id, &ids, now_ms)
        })
        .await
    }

    async fn agents_with_unread_items(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError> {
        let sql = "SELECT number, body FROM inbox WHERE number IN (SELECT min(number) FROM inbox \
                   WHERE taken_ms IS NULL GROUP BY project, agent_id) AND number > ?1 \
                   AND created_ms < ?3 ORDER BY number LIMIT ?2";
        let bound = [after as i64, limit as i64, before_ms as i64];
        self.read_sql(move |c| query_numbered_bodies(c, sql, &bound)).await
    }

    async fn append_to_outbox(&self, posted: Vec<OutboxMessage>) -> Result<(), StoreError> {
        self.write(move |writer| {
            let c = writer.connection()?;
            posted.iter().try_for_each(|message| outbox::insert_outbox_message(c, message))
        })
        .await
    }

    async fn outbox(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, OutboxMessage)>, StoreError> {
        let sql = "SELECT number, body FROM outbox WHERE number > ?1 ORDER BY number LIMIT ?2";
        self.read_sql(move |c| query_numbered_bodies(c, sql, &[after as i64, limit as i64])).await
    }

    async fn remove_from_outbox(&self, ids: &[String]) -> Result<(), StoreError> {
        let ids = ids.to_vec();
        self.write(move |writer| {
            let connection = writer.connection()?;
            let mut delete = connection.prepare_cached("DELETE FROM outbox WHERE id = ?1")?;
            ids.iter().try_for_each(|id| delete.execute([id]).map(drop))
        })
        .await
    }

    async fn save_dead_letter(&self, dead_letter: DeadLetter) -> Result<(), StoreError> {
        self.write(move |writer| {
            let connection = writer.connection()?;
            connection
                .prepare_cached("INSERT OR REPLACE INTO dead_letters VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![
                    dead_letter.id,
                    dead_letter.project,
                    dead_letter.created_ms as i64,
                    encode_body(&dead_letter)?
                ])
                .map(drop)
        })
        .await
    }

    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let (project, before) = (project.to_owned(), before.map(str::to_owned));
        let sql = "SELECT body FROM dead_letters WHERE project = ?1 \
                   AND (?2 IS NULL OR id < ?2) ORDER BY id DESC LIMIT ?3";
        self.read_sql(move |c| query_bodies(c, sql, params![project, before, limit as i64])).await
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let (project, id) = (project.to_owned(), id.to_owned());
        let sql = "SELECT body FROM dead_letters WHERE project = ?1 AND id = ?2";
        self.read_sql(move |c| Ok(query_bodies(c, sql, params![project, id])?.pop())).await
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        self.write(move |writer| outbox::purge_utp(writer.connection()?, before_ms, limit)).await
    }
}
