//! The UTP part of the store in SQLite. Its writes go through the single writer like all others and
//! share its commits.

mod letters;
mod turns;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use toolcrib::store::utp::{CardPut, Delivered, TurnChange, UtpStore};
use toolcrib::store::{Saved, StoreError};
use toolcrib::tool::Definition;
use toolcrib::utp::card::TOOL_RESULT;
use toolcrib::utp::{Card, DeadLetter, InboxItem, Letter, Turn, Waiting};

use super::SqliteStore;
use super::reader::failed;
use crate::row::read_definition;

/// Encodes a value as the text of a `body` column.
fn body<T: Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// Decodes the value of a `body` column.
fn of_body<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    let kind = rusqlite::types::Type::Text;
    serde_json::from_str(text)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, kind, Box::new(error)))
}

/// Returns the bodies that a query finds, in its order.
fn bodies<T: DeserializeOwned>(
    connection: &Connection,
    sql: &str,
    bound: &[&dyn rusqlite::ToSql],
) -> rusqlite::Result<Vec<T>> {
    let mut select = connection.prepare_cached(sql)?;
    let mut rows = select.query(bound)?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push(of_body(&row.get::<_, String>(0)?)?);
    }
    Ok(all)
}

/// Returns bodies with their numbers. The parameters are the number to start after, the limit, and
/// any others that the statement needs.
fn numbered<T: DeserializeOwned>(
    connection: &Connection,
    sql: &str,
    bound: &[i64],
) -> rusqlite::Result<Vec<(u64, T)>> {
    let mut select = connection.prepare_cached(sql)?;
    let mut rows = select.query(rusqlite::params_from_iter(bound))?;
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        all.push((row.get::<_, i64>(0)? as u64, of_body(&row.get::<_, String>(1)?)?));
    }
    Ok(all)
}

fn put_card(connection: &Connection, card: &Card) -> rusqlite::Result<CardPut> {
    let result = card.kind == TOOL_RESULT;
    let known: Option<String> = connection
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
    if let Some(known) = known {
        let known: Card = of_body(&known)?;
        return Ok(match known.says_the_same(card) {
            true => CardPut::Same,
            false => CardPut::Other(Box::new(known)),
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
            body(card)?
        ])?;
    Ok(CardPut::New)
}

impl SqliteStore {
    async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.read(move |connection| look(connection).map_err(|error| failed(&error))).await
    }
}

#[async_trait]
impl UtpStore for SqliteStore {
    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<Definition>, StoreError> {
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
                .map_err(|error| failed(&error))?;
            text.map(|text| read_definition(project, tool, &text)).transpose()
        })
        .await
    }

    async fn put_card(&self, card: Card) -> Result<CardPut, StoreError> {
        self.work(move |connection| put_card(connection, &card)).await
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let (project, card_id) = (project.to_owned(), card_id.to_owned());
        let sql = "SELECT body FROM cards WHERE project = ?1 AND card_id = ?2";
        self.look(move |c| Ok(bodies(c, sql, params![project, card_id])?.pop())).await
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
        self.look(move |c| Ok(bodies(c, sql, params![project, turn_id, tool_call_id])?.pop())).await
    }

    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.to_owned());
        let sql = "SELECT body FROM turns WHERE project = ?1 AND turn_id = ?2";
        self.look(move |c| Ok(bodies(c, sql, params![project, turn_id])?.pop())).await
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<Saved, StoreError> {
        self.work(move |connection| turns::save(connection, &turn, &change)).await
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE status = 'running' AND lease_until_ms <= ?1 \
                   ORDER BY lease_until_ms LIMIT ?2";
        self.look(move |c| bodies(c, sql, params![now_ms as i64, limit as i64])).await
    }

    async fn waiting(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<Waiting>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.to_owned());
        let step_id = step_id.to_owned();
        let sql = "SELECT body FROM turn_calls WHERE project = ?1 AND turn_id = ?2 \
                   AND step_id = ?3 ORDER BY number";
        self.look(move |c| bodies(c, sql, params![project, turn_id, step_id])).await
    }

    async fn waiting_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<Waiting>, StoreError> {
        let (project, turn_id) = (project.to_owned(), turn_id.map(str::to_owned));
        let tool_call_id = tool_call_id.to_owned();
        let sql = "SELECT body FROM turn_calls WHERE project = ?1 AND tool_call_id = ?2 \
                   AND (?3 IS NULL OR turn_id = ?3) ORDER BY number";
        self.look(move |c| Ok(bodies(c, sql, params![project, tool_call_id, turn_id])?.pop())).await
    }

    async fn undelivered(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Waiting)>, StoreError> {
        let sql = "SELECT number, body FROM turn_calls WHERE inbox_id IS NULL AND number > ?1 \
                   AND call_id IS NOT NULL ORDER BY number LIMIT ?2";
        self.look(move |c| numbered(c, sql, &[after as i64, limit as i64])).await
    }

    async fn deliver(
        &self,
        item: InboxItem,
        result_card_id: &str,
        letter: Option<Letter>,
    ) -> Result<Delivered, StoreError> {
        let card_id = result_card_id.to_owned();
        self.work(move |connection| letters::deliver(connection, &item, &card_id, letter.as_ref()))
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
        self.look(move |c| bodies(c, sql, params![project, agent_id, limit as i64])).await
    }

    async fn take_from_inbox(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError> {
        let (project, agent_id) = (project.to_owned(), agent_id.to_owned());
        let ids = inbox_ids.to_vec();
        self.work(move |c| letters::take(c, &project, &agent_id, &ids, now_ms)).await
    }

    async fn waiting_agents(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError> {
        let sql = "SELECT number, body FROM inbox WHERE number IN (SELECT min(number) FROM inbox \
                   WHERE taken_ms IS NULL GROUP BY project, agent_id) AND number > ?1 \
                   AND created_ms < ?3 ORDER BY number LIMIT ?2";
        let bound = [after as i64, limit as i64, before_ms as i64];
        self.look(move |c| numbered(c, sql, &bound)).await
    }

    async fn post(&self, posted: Vec<Letter>) -> Result<(), StoreError> {
        self.work(move |c| posted.iter().try_for_each(|letter| letters::post(c, letter))).await
    }

    async fn outbox(&self, after: u64, limit: usize) -> Result<Vec<(u64, Letter)>, StoreError> {
        let sql = "SELECT number, body FROM outbox WHERE number > ?1 ORDER BY number LIMIT ?2";
        self.look(move |c| numbered(c, sql, &[after as i64, limit as i64])).await
    }

    async fn posted(&self, ids: &[String]) -> Result<(), StoreError> {
        let ids = ids.to_vec();
        self.work(move |connection| {
            let mut delete = connection.prepare_cached("DELETE FROM outbox WHERE id = ?1")?;
            ids.iter().try_for_each(|id| delete.execute([id]).map(drop))
        })
        .await
    }

    async fn bury(&self, letter: DeadLetter) -> Result<(), StoreError> {
        self.work(move |connection| {
            connection
                .prepare_cached("INSERT OR REPLACE INTO dead_letters VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![
                    letter.id,
                    letter.project,
                    letter.created_ms as i64,
                    body(&letter)?
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
        self.look(move |c| bodies(c, sql, params![project, before, limit as i64])).await
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let (project, id) = (project.to_owned(), id.to_owned());
        let sql = "SELECT body FROM dead_letters WHERE project = ?1 AND id = ?2";
        self.look(move |c| Ok(bodies(c, sql, params![project, id])?.pop())).await
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        self.work(move |connection| letters::purge(connection, before_ms, limit)).await
    }
}
