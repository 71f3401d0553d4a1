//! Generates secrets and authenticates requests.

pub mod oauth;
pub mod settings;
use axum::http::{HeaderMap, header};
use toolcrib::domain::fault::{Code, Error};
use toolcrib::{Caller, Engine};
use toolcrib_protocol::outbound::is_loopback_host;

/// The prefix of every key's secret, so that secret scanners and people recognize it.
const SECRET_PREFIX: &str = "tck_";

/// Returns a new secret with at least 256 random bits, in letters and digits.
pub fn generate_secret() -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut bits = Vec::with_capacity(52);
    // Each ULID has 80 random bits, of which 65 are used.
    for _ in 0..4 {
        let random = ulid::Ulid::generate().random();
        bits.extend((0..13).map(|n| ((random >> (5 * n)) & 31) as usize));
    }
    let body: String = bits.into_iter().map(|n| ALPHABET[n] as char).collect();
    format!("{SECRET_PREFIX}{body}")
}

/// Returns the caller of a request. If the server has any key, the request needs one, and the key
/// determines the caller. Without keys, every request to the loopback address counts as the
/// operator's.
pub(crate) fn authenticate_request(engine: &Engine, headers: &HeaderMap) -> Result<Caller, Error> {
    if engine.registry().has_keys() {
        let secret = bearer_token(headers).ok_or_else(|| {
            let message = "this server needs a key: send Authorization: Bearer KEY";
            Error::refused(Code::Unauthenticated, message)
        })?;
        return engine.registry().authenticate(secret).ok_or_else(|| {
            Error::refused(Code::Unauthenticated, "this key is unknown or was revoked")
        });
    }
    reject_foreign_origins(headers)?;
    let project = headers.get("x-toolcrib-project").map(|value| value.to_str().unwrap_or(""));
    let project = project.unwrap_or("default");
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if project.is_empty() || project.len() > 64 || !project.chars().all(plain) {
        let message = "X-Toolcrib-Project must be 1 to 64 letters, digits, '_', '-' or '.'";
        return Err(Error::refused(Code::BadRequest, message));
    }
    Ok(Caller::local(project))
}

/// The caller of a request and its credentials, for streams and waits that outlive the
/// authentication: the key may be revoked meanwhile.
#[derive(Clone)]
pub(crate) struct RequestCredentials {
    caller: Caller,
    headers: HeaderMap,
}

impl RequestCredentials {
    /// Returns the credentials of a caller that these headers authenticated.
    pub(crate) fn new(caller: &Caller, headers: &HeaderMap) -> Self {
        Self { caller: caller.clone(), headers: headers.clone() }
    }

    /// Refuses if the credentials no longer authenticate the same caller.
    pub(crate) fn revalidate(&self, engine: &Engine) -> Result<(), Error> {
        if authenticate_request(engine, &self.headers)? == self.caller {
            return Ok(());
        }
        Err(Error::refused(Code::Unauthenticated, "this key is another's now"))
    }
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, secret) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

/// Refuses requests with a foreign host or origin. Without keys only the loopback address protects
/// the server, and a web page in the operator's browser can reach it.
fn reject_foreign_origins(headers: &HeaderMap) -> Result<(), Error> {
    let foreign = |value: &axum::http::HeaderValue| {
        let text = value.to_str().unwrap_or("");
        let host = text.split_once("://").map_or(text, |(_, rest)| rest);
        !is_loopback_host(host)
    };
    let host = headers.get(header::HOST).is_some_and(foreign);
    let origin = headers.get(header::ORIGIN).is_some_and(foreign);
    if host || origin {
        let message = "this server has no keys and answers loopback only: use localhost as the \
                       host, or make a key with toolcrib keys create";
        return Err(Error::refused(Code::PermissionDenied, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_secrets_are_unique_and_long() {
        let secrets: std::collections::HashSet<String> =
            (0..100).map(|_| generate_secret()).collect();
        assert_eq!(secrets.len(), 100);
        assert!(secrets.iter().all(|secret| secret.len() == 56 && secret.starts_with("tck_")));
    }
}
