//! API keys and session tokens in SQLite.

use rusqlite::{Connection, params};
use toolcrib::domain::directory::{ApiKey, DirectoryChange, SessionToken};
use toolcrib::ports::store::StoreError;

use super::query_rows;
use crate::row::{KEY_COLUMNS, SESSION_TOKEN_COLUMNS, encode, read_key, read_session_token};

pub(super) fn list_keys(connection: &Connection) -> Result<Vec<ApiKey>, StoreError> {
    let sql = format!("SELECT {KEY_COLUMNS} FROM keys ORDER BY id");
    query_rows(connection, &sql, |row| read_key(row))
}

pub(super) fn list_session_tokens(
    connection: &Connection,
) -> Result<Vec<SessionToken>, StoreError> {
    let sql = format!("SELECT {SESSION_TOKEN_COLUMNS} FROM session_tokens ORDER BY id");
    query_rows(connection, &sql, |row| read_session_token(row))
}

/// Applies a change of keys or session tokens.
pub(super) fn apply_credential_change(
    connection: &Connection,
    change: &DirectoryChange,
) -> rusqlite::Result<()> {
    match change {
        DirectoryChange::AddKey(key) => insert_key(connection, key)?,
        DirectoryChange::RevokeKey { id, at_ms } => {
            connection.execute(
                "UPDATE keys SET revoked_ms = max(created_ms, ?2) \
                 WHERE id = ?1 AND revoked_ms IS NULL",
                params![id, *at_ms as i64],
            )?;
        }
        DirectoryChange::RotateKey { id, ends_ms, successor } => {
            connection.execute(
                "UPDATE keys SET expires_ms = min(coalesce(expires_ms, ?2), ?2) WHERE id = ?1",
                params![id, *ends_ms as i64],
            )?;
            insert_key(connection, successor)?;
        }
        DirectoryChange::AddSessionToken(token) => insert_session_token(connection, token)?,
        DirectoryChange::RevokeSessionToken { id, at_ms } => {
            connection.execute(
                "UPDATE session_tokens SET revoked_ms = max(created_ms, ?2) \
                 WHERE id = ?1 AND revoked_ms IS NULL",
                params![id, *at_ms as i64],
            )?;
        }
        DirectoryChange::ExpireSessionTokens { at_ms, delete_before_ms } => {
            connection.execute(
                "UPDATE session_tokens SET revoked_ms = max(created_ms, ?1) \
                 WHERE expires_ms <= ?1 AND revoked_ms IS NULL",
                [*at_ms as i64],
            )?;
            let sql = "DELETE FROM session_tokens WHERE revoked_ms < ?1";
            connection.execute(sql, [*delete_before_ms as i64])?;
        }
        _ => {}
    }
    Ok(())
}

fn insert_key(connection: &Connection, key: &ApiKey) -> rusqlite::Result<()> {
    let sql = format!(
        "INSERT INTO keys ({KEY_COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
    );
    connection.execute(
        &sql,
        params![
            key.id,
            key.digest,
            key.project,
            key.agent,
            key.roles.to_string(),
            encode(&key.attributes).map_err(|_| rusqlite::Error::InvalidQuery)?,
            key.created_ms as i64,
            key.expires_ms.map(|ms| ms as i64),
            key.revoked_ms.map(|ms| ms as i64),
            key.rejoin,
        ],
    )?;
    Ok(())
}

fn insert_session_token(connection: &Connection, token: &SessionToken) -> rusqlite::Result<()> {
    let sql = format!(
        "INSERT INTO session_tokens ({SESSION_TOKEN_COLUMNS}) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)"
    );
    connection.execute(
        &sql,
        params![
            token.id,
            token.digest,
            token.key_id,
            token.project,
            encode(&token.attributes).map_err(|_| rusqlite::Error::InvalidQuery)?,
            token.created_ms as i64,
            token.expires_ms as i64,
            token.revoked_ms.map(|ms| ms as i64),
        ],
    )?;
    Ok(())
}
