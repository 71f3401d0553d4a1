//! API keys and session tokens in PostgreSQL.

use toolcrib::domain::directory::{ApiKey, DirectoryChange, SessionToken};

use crate::postgres::session::{Session, SessionError, SqlParams};
use crate::row::{KEY_COLUMNS, SESSION_TOKEN_COLUMNS, encode, read_key, read_session_token};

pub(super) async fn list_keys(session: &Session) -> Result<Vec<ApiKey>, SessionError> {
    let sql = format!("SELECT {KEY_COLUMNS} FROM keys ORDER BY id");
    session.query_map(&sql, &[], read_key).await
}

pub(super) async fn list_session_tokens(
    session: &Session,
) -> Result<Vec<SessionToken>, SessionError> {
    let sql = format!("SELECT {SESSION_TOKEN_COLUMNS} FROM session_tokens ORDER BY id");
    session.query_map(&sql, &[], read_session_token).await
}

/// Applies a change of keys or session tokens.
pub(super) async fn apply_credential_change(
    session: &Session,
    change: &DirectoryChange,
) -> Result<(), SessionError> {
    let ms = |at_ms: u64| at_ms as i64;
    match change {
        DirectoryChange::AddKey(key) => insert_key(session, key).await?,
        DirectoryChange::RevokeKey { id, at_ms } => {
            let sql = "UPDATE keys SET revoked_ms = greatest(created_ms, $2) \
                       WHERE id = $1 AND revoked_ms IS NULL";
            session.execute(sql, &[id, &ms(*at_ms)]).await?;
        }
        DirectoryChange::RotateKey { id, ends_ms, successor } => {
            let sql = "UPDATE keys SET expires_ms = least(coalesce(expires_ms, $2), $2) \
                       WHERE id = $1";
            session.execute(sql, &[id, &ms(*ends_ms)]).await?;
            insert_key(session, successor).await?;
        }
        DirectoryChange::AddSessionToken(token) => insert_session_token(session, token).await?,
        DirectoryChange::RevokeSessionToken { id, at_ms } => {
            let sql = "UPDATE session_tokens SET revoked_ms = greatest(created_ms, $2) \
                       WHERE id = $1 AND revoked_ms IS NULL";
            session.execute(sql, &[id, &ms(*at_ms)]).await?;
        }
        DirectoryChange::ExpireSessionTokens { at_ms, delete_before_ms } => {
            let sql = "UPDATE session_tokens SET revoked_ms = greatest(created_ms, $1) \
                       WHERE expires_ms <= $1 AND revoked_ms IS NULL";
            session.execute(sql, &[&ms(*at_ms)]).await?;
            let sql = "DELETE FROM session_tokens WHERE revoked_ms < $1";
            session.execute(sql, &[&ms(*delete_before_ms)]).await?;
        }
        _ => {}
    }
    Ok(())
}

async fn insert_key(session: &Session, key: &ApiKey) -> Result<(), SessionError> {
    let ms = |at_ms: u64| at_ms as i64;
    let (roles, attributes) = (key.roles.to_string(), encode(&key.attributes)?);
    let params: SqlParams<'_> = &[
        &key.id,
        &key.digest,
        &key.project,
        &key.agent,
        &roles,
        &attributes,
        &ms(key.created_ms),
        &key.expires_ms.map(ms),
        &key.revoked_ms.map(ms),
        &i64::from(key.rejoin),
    ];
    let sql = format!(
        "INSERT INTO keys ({KEY_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
    );
    session.execute(&sql, params).await?;
    Ok(())
}

async fn insert_session_token(session: &Session, token: &SessionToken) -> Result<(), SessionError> {
    let ms = |at_ms: u64| at_ms as i64;
    let attributes = encode(&token.attributes)?;
    let params: SqlParams<'_> = &[
        &token.id,
        &token.digest,
        &token.key_id,
        &token.project,
        &attributes,
        &ms(token.created_ms),
        &ms(token.expires_ms),
        &token.revoked_ms.map(ms),
    ];
    let sql = format!(
        "INSERT INTO session_tokens ({SESSION_TOKEN_COLUMNS}) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
    );
    session.execute(&sql, params).await?;
    Ok(())
}
