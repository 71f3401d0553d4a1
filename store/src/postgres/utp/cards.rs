//! Cards in `public.cards`, which tool services read and write directly.
//!
//! That table identifies a card by its id alone, and a result by the id of its call alone; in
//! Toolcrib both belong to a project and a turn. When the short id is taken, Toolcrib stores its
//! card under a longer one, and the exact card in `toolcrib_body`.

use serde_json::{Map, Value};
use tokio_postgres::Row;
use toolcrib::domain::utp::Card;
use toolcrib::domain::utp::card::TOOL_RESULT;
use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::utp::PutCardResult;

use super::super::change::WriterConnection;
use super::super::strip_nul_chars;
use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{RowReader, decode, encode};

/// The columns that [`read_card`] reads, in this order.
const COLUMNS: &str = "card_id, tenant_id, content::text, tool_calls::text, tool_call_id, \
     ttl_seconds::bigint, metadata::text, (extract(epoch FROM created_at) * 1000)::bigint, \
     toolcrib_body";

/// Names that the table reserves in a card's metadata.
const RESERVED_METADATA_KEYS: [&str; 4] = ["project_id", "type", "author_id", "created_at"];

pub(super) async fn find_card(
    session: &Session,
    project: &str,
    card_id: &str,
) -> Result<Option<Card>, SessionError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM public.cards WHERE card_id IN ($2, $3) AND tenant_id = $1 \
         AND deleted_at IS NULL"
    );
    let longer = format!("{project}:{card_id}");
    let found = session.query_first(&sql, &[&project, &card_id, &longer]).await?;
    Ok(found.map(|row| read_card(&row)).transpose()?)
}

/// Returns the result card of a call of a turn.
pub(super) async fn find_result_card(
    session: &Session,
    project: &str,
    turn_id: Option<&str>,
    tool_call_id: Option<&str>,
) -> Result<Option<Card>, SessionError> {
    let sql = format!(
        "SELECT {COLUMNS} FROM public.cards WHERE tenant_id = $1 \
         AND metadata->>'type' = 'tool.result' AND metadata->>'agent_turn_id' = $2 \
         AND coalesce(tool_call_id, metadata->>'tool_call_id') = $3 AND deleted_at IS NULL \
         ORDER BY toolcrib_seq LIMIT 1"
    );
    let found = session.query_first(&sql, &[&project, &turn_id, &tool_call_id]).await?;
    Ok(found.map(|row| read_card(&row)).transpose()?)
}

/// Decodes a JSON object, or returns an empty one. JSONB accepts values from other programs that
/// cannot be decoded here: numbers out of range, and unlimited nesting. A card with such a value
/// reads as empty, and code that needs its content refuses it; an error here would leave a report
/// pending forever.
fn decode_object_or_empty(text: Option<String>) -> Map<String, Value> {
    match text.map(|text| decode::<Value>(&text)) {
        Some(Ok(Value::Object(map))) => map,
        _ => Map::new(),
    }
}

fn read_card(row: &Row) -> Result<Card, StoreError> {
    if let Some(body) = row.optional_text(8)? {
        return decode(&body);
    }
    let mut metadata = decode_object_or_empty(row.optional_text(6)?);
    let read_pointer = |metadata: &Map<String, Value>, pointer: &str| {
        let value = Value::Object(metadata.clone());
        value.pointer(pointer).and_then(Value::as_str).map(str::to_owned)
    };
    let kind =
        read_pointer(&metadata, "/type").or_else(|| read_pointer(&metadata, "/semantic_type"));
    let author =
        read_pointer(&metadata, "/author_id").or_else(|| read_pointer(&metadata, "/producer/id"));
    for name in RESERVED_METADATA_KEYS {
        metadata.remove(name);
    }
    let unknown = || "unknown".to_owned();
    let call = row.optional_text(4)?.or_else(|| read_pointer(&metadata, "/tool_call_id"));
    let calls = row.optional_text(3)?.and_then(|text| decode::<Value>(&text).ok());
    Ok(Card {
        card_id: row.text(0)?,
        project: row.text(1)?,
        kind: kind.unwrap_or_else(unknown),
        content: decode_object_or_empty(row.optional_text(2)?),
        created_ms: row.unsigned(7)?,
        author_id: author.unwrap_or_else(unknown),
        metadata,
        tool_calls: calls.filter(|calls| !calls.is_null()),
        tool_call_id: call,
        ttl_seconds: row.optional_unsigned(5)?,
    })
}

/// Returns true if the columns can represent the card exactly.
fn fits_columns(card: &Card, body: &str) -> bool {
    let uses_reserved_key =
        RESERVED_METADATA_KEYS.iter().any(|name| card.metadata.contains_key(*name));
    let lacks_call_column =
        card.tool_call_id.is_none() && card.metadata.contains_key("tool_call_id");
    // JSONB can store neither the NUL character nor a negative zero.
    !uses_reserved_key && !lacks_call_column && !body.contains("\\u0000") && !body.contains("-0.0")
}

pub(in super::super) async fn put_card(
    writer: &mut WriterConnection,
    card: &Card,
) -> Result<PutCardResult, SessionError> {
    let session = &writer.session;
    if let Some(existing) = find_existing_card(session, card).await? {
        return Ok(existing);
    }
    let body = encode(card)?;
    let exact = (!fits_columns(card, &body)).then_some(&body);
    if insert_card(session, card, exact, &card.card_id, card.tool_call_id.as_deref()).await? {
        return Ok(PutCardResult::New);
    }
    // Another program wrote the card a moment ago, or another card has one of the ids.
    if let Some(existing) = find_existing_card(session, card).await? {
        return Ok(existing);
    }
    let longer = format!("{}:{}", card.project, card.card_id);
    for (card_id, call) in
        [(&card.card_id, None), (&longer, card.tool_call_id.as_deref()), (&longer, None)]
    {
        if insert_card(session, card, Some(&body), card_id, call).await? {
            return Ok(PutCardResult::New);
        }
    }
    Err(StoreError::Unavailable("the card's id is taken".to_owned()).into())
}

async fn find_existing_card(
    session: &Session,
    card: &Card,
) -> Result<Option<PutCardResult>, SessionError> {
    let mut existing = find_card(session, &card.project, &card.card_id).await?;
    if existing.is_none() && card.kind == TOOL_RESULT {
        let (turn, call) = (card.turn_id(), card.tool_call_id.as_deref());
        existing = find_result_card(session, &card.project, turn, call).await?;
    }
    Ok(existing.map(|existing| match existing.equals_ignoring_time(card) {
        true => PutCardResult::Identical,
        false => PutCardResult::Conflict(Box::new(existing)),
    }))
}

async fn insert_card(
    session: &Session,
    card: &Card,
    exact: Option<&String>,
    card_id: &str,
    tool_call_id: Option<&str>,
) -> Result<bool, SessionError> {
    let mut metadata = card.metadata.clone();
    metadata.insert("project_id".to_owned(), card.project.as_str().into());
    metadata.insert("type".to_owned(), card.kind.as_str().into());
    metadata.insert("author_id".to_owned(), card.author_id.as_str().into());
    if tool_call_id.is_none()
        && let Some(id) = &card.tool_call_id
    {
        metadata.insert("tool_call_id".to_owned(), id.as_str().into());
    }
    let sql = "INSERT INTO public.cards (card_id, tenant_id, content, tool_calls, tool_call_id, \
               ttl_seconds, expires_at, metadata, created_at, toolcrib_body) \
               SELECT $1, $2, $3, $4, $5, $6::bigint::int, \
               at + make_interval(secs => $6::bigint), $7::jsonb || jsonb_build_object( \
               'created_at', to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"')), \
               at, $9 FROM (SELECT to_timestamp($8::bigint / 1000.0) AS at) AS t \
               ON CONFLICT DO NOTHING";
    let ttl = card.ttl_seconds.map(|ttl| ttl.min(i32::MAX as u64) as i64);
    let params: SqlParams<'_> = &[
        &card_id,
        &card.project,
        &strip_nul_chars(Value::Object(card.content.clone())),
        &card.tool_calls.clone().map(strip_nul_chars),
        &tool_call_id,
        &ttl,
        &strip_nul_chars(Value::Object(metadata)),
        &(card.created_ms as i64),
        &exact,
    ];
    Ok(session.execute(sql, params).await? == 1)
}
