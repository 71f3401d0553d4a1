//! The UTP part of the store in PostgreSQL. Cards, inboxes and edges are in the tables that tool
//! services know; turns, the outbox and dead letters are in Toolcrib's own tables.

mod cards;
mod inbox;
mod reports;
mod turns;

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use toolcrib::store::utp::{
    CardPut, Delivered, Judged, SharedTables, TurnChange, UtpStore, WrittenReport,
};
use toolcrib::store::{Saved, StoreError};
use toolcrib::tool::Definition;
use toolcrib::utp::{Card, DeadLetter, InboxItem, Letter, Route, Turn, Waiting};

use super::link::{Bound, Broke};
use super::writer::Desk;
use super::{PostgresStore, limited};
use crate::row::{Fields, decode, encode, read_definition};

impl PostgresStore {
    /// Returns the bodies that a query finds, in its order.
    async fn bodies<T: DeserializeOwned>(
        &self,
        sql: &str,
        bound: Bound<'_>,
    ) -> Result<Vec<T>, StoreError> {
        let lent = self.pool.lend().await?;
        let found = lent.collect(sql, bound, |row| decode(&row.text(0)?)).await;
        found.map_err(Broke::into_error)
    }
}

async fn post(desk: &mut Desk, letters: &Vec<Letter>) -> Result<(), Broke> {
    for letter in letters {
        let sql = "INSERT INTO outbox (id, body) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        desk.session.execute(sql, &[&letter.id, &encode(letter)?]).await?;
    }
    Ok(())
}

async fn posted(desk: &mut Desk, ids: &Vec<String>) -> Result<(), Broke> {
    desk.session.execute("DELETE FROM outbox WHERE id = ANY($1)", &[ids]).await?;
    Ok(())
}

async fn bury(desk: &mut Desk, letter: &DeadLetter) -> Result<(), Broke> {
    let sql = "INSERT INTO dead_letters VALUES ($1, $2, $3, $4) \
               ON CONFLICT (id) DO UPDATE SET body = excluded.body";
    let (created_ms, body) = (letter.created_ms as i64, encode(letter)?);
    desk.session.execute(sql, &[&letter.id, &letter.project, &created_ms, &body]).await?;
    Ok(())
}

#[async_trait]
impl UtpStore for PostgresStore {
    fn shared(&self) -> Option<&dyn SharedTables> {
        self.ears.as_ref().map(|_| self as &dyn SharedTables)
    }

    async fn tool_version(
        &self,
        project: &str,
        tool: &str,
        version: &str,
    ) -> Result<Option<Definition>, StoreError> {
        let sql = "SELECT definition FROM tool_versions \
                   WHERE project = $1 AND name = $2 AND version = $3";
        let lent = self.pool.lend().await?;
        let found = lent.row(sql, &[&project, &tool, &version]).await;
        let Some(row) = found.map_err(Broke::into_error)? else { return Ok(None) };
        read_definition(project.to_owned(), tool.to_owned(), &row.text(0)?).map(Some)
    }

    async fn put_card(&self, card: Card) -> Result<CardPut, StoreError> {
        self.write(card, |desk, card| Box::pin(cards::put(desk, card))).await
    }

    async fn card(&self, project: &str, card_id: &str) -> Result<Option<Card>, StoreError> {
        let lent = self.pool.lend().await?;
        cards::by_id(&lent, project, card_id).await.map_err(Broke::into_error)
    }

    async fn result_card(
        &self,
        project: &str,
        turn_id: &str,
        tool_call_id: &str,
    ) -> Result<Option<Card>, StoreError> {
        let lent = self.pool.lend().await?;
        let found = cards::result(&lent, project, Some(turn_id), Some(tool_call_id)).await;
        found.map_err(Broke::into_error)
    }

    async fn turn(&self, project: &str, turn_id: &str) -> Result<Option<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE project = $1 AND turn_id = $2";
        Ok(self.bodies(sql, &[&project, &turn_id]).await?.pop())
    }

    async fn save_turn(&self, turn: Turn, change: TurnChange) -> Result<Saved, StoreError> {
        self.write((turn, change), |desk, given| Box::pin(turns::save(desk, given))).await
    }

    async fn expired_turns(&self, now_ms: u64, limit: usize) -> Result<Vec<Turn>, StoreError> {
        let sql = "SELECT body FROM turns WHERE status = 'running' AND lease_until_ms <= $1 \
                   ORDER BY lease_until_ms LIMIT $2";
        self.bodies(sql, &[&(now_ms as i64), &limited(limit)]).await
    }

    async fn waiting(
        &self,
        project: &str,
        turn_id: &str,
        step_id: &str,
    ) -> Result<Vec<Waiting>, StoreError> {
        let sql = "SELECT body FROM turn_calls WHERE project = $1 AND turn_id = $2 \
                   AND step_id = $3 ORDER BY number";
        self.bodies(sql, &[&project, &turn_id, &step_id]).await
    }

    async fn waiting_call(
        &self,
        project: &str,
        turn_id: Option<&str>,
        tool_call_id: &str,
    ) -> Result<Option<Waiting>, StoreError> {
        let sql = "SELECT body FROM turn_calls WHERE project = $1 AND tool_call_id = $2 \
                   AND ($3::text IS NULL OR turn_id = $3) ORDER BY number DESC LIMIT 1";
        Ok(self.bodies(sql, &[&project, &tool_call_id, &turn_id]).await?.pop())
    }

    async fn undelivered(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Waiting)>, StoreError> {
        let sql = "SELECT number, body FROM turn_calls WHERE inbox_id IS NULL AND number > $1 \
                   AND call_id IS NOT NULL ORDER BY number LIMIT $2";
        let lent = self.pool.lend().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.whole(0)?, decode(&row.text(1)?)?));
        let found = lent.collect(sql, &[&(after as i64), &limited(limit)], read).await;
        found.map_err(Broke::into_error)
    }

    async fn deliver(
        &self,
        item: InboxItem,
        result_card_id: &str,
        letter: Option<Letter>,
    ) -> Result<Delivered, StoreError> {
        let given = (item, result_card_id.to_owned(), letter.into_iter().collect());
        self.write(given, |desk, given| Box::pin(inbox::deliver(desk, given))).await
    }

    async fn inbox(
        &self,
        project: &str,
        agent_id: &str,
        limit: usize,
    ) -> Result<Vec<InboxItem>, StoreError> {
        let lent = self.pool.lend().await?;
        inbox::waiting(&lent, project, agent_id, limit).await.map_err(Broke::into_error)
    }

    async fn take_from_inbox(
        &self,
        project: &str,
        agent_id: &str,
        inbox_ids: &[String],
        now_ms: u64,
    ) -> Result<usize, StoreError> {
        let given = (project.to_owned(), agent_id.to_owned(), inbox_ids.to_vec(), now_ms);
        self.write(given, |desk, given| Box::pin(inbox::take(desk, given))).await
    }

    async fn waiting_agents(
        &self,
        before_ms: u64,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, InboxItem)>, StoreError> {
        let lent = self.pool.lend().await?;
        inbox::oldest(&lent, before_ms, after, limit).await.map_err(Broke::into_error)
    }

    async fn post(&self, letters: Vec<Letter>) -> Result<(), StoreError> {
        self.write(letters, |desk, letters| Box::pin(post(desk, letters))).await
    }

    async fn outbox(&self, after: u64, limit: usize) -> Result<Vec<(u64, Letter)>, StoreError> {
        let sql = "SELECT number, body FROM outbox WHERE number > $1 ORDER BY number LIMIT $2";
        let lent = self.pool.lend().await?;
        let read = |row: &tokio_postgres::Row| Ok((row.whole(0)?, decode(&row.text(1)?)?));
        let found = lent.collect(sql, &[&(after as i64), &limited(limit)], read).await;
        found.map_err(Broke::into_error)
    }

    async fn posted(&self, ids: &[String]) -> Result<(), StoreError> {
        self.write(ids.to_vec(), |desk, ids| Box::pin(posted(desk, ids))).await
    }

    async fn bury(&self, letter: DeadLetter) -> Result<(), StoreError> {
        self.write(letter, |desk, letter| Box::pin(bury(desk, letter))).await
    }

    async fn dead_letters(
        &self,
        project: &str,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>, StoreError> {
        let sql = "SELECT body FROM dead_letters WHERE project = $1 \
                   AND ($2::text IS NULL OR id < $2) ORDER BY id DESC LIMIT $3";
        self.bodies(sql, &[&project, &before, &limited(limit)]).await
    }

    async fn dead_letter(&self, project: &str, id: &str) -> Result<Option<DeadLetter>, StoreError> {
        let sql = "SELECT body FROM dead_letters WHERE project = $1 AND id = $2";
        Ok(self.bodies(sql, &[&project, &id]).await?.pop())
    }

    async fn purge_utp(&self, before_ms: u64, limit: usize) -> Result<usize, StoreError> {
        self.write((before_ms, limit), |desk, given| Box::pin(turns::purge(desk, given))).await
    }
}

#[async_trait]
impl SharedTables for PostgresStore {
    fn news(&self) -> watch::Receiver<u64> {
        self.news.clone()
    }

    async fn show_command(
        &self,
        card: Card,
        route: &Route,
        traceparent: &str,
    ) -> Result<(), StoreError> {
        let given = (card, route.clone(), traceparent.to_owned());
        self.write(given, |desk, given| Box::pin(reports::show(desk, given))).await
    }

    async fn written_reports(
        &self,
        after: u64,
        limit: usize,
    ) -> Result<Vec<WrittenReport>, StoreError> {
        let lent = self.pool.lend().await?;
        reports::written(&lent, after, limit).await.map_err(Broke::into_error)
    }

    async fn judged(&self, number: u64, judged: Judged) -> Result<(), StoreError> {
        self.write((number, judged), |desk, given| Box::pin(reports::judged(desk, given))).await
    }
}
