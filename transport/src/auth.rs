//! Generates secrets and authenticates requests.

pub mod oauth;
mod origin;
pub mod settings;
use axum::http::{HeaderMap, header};
pub use origin::OriginPolicy;
use toolcrib::domain::caller::AuthMethod;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::{Caller, Engine};

/// The prefix of every key's secret, so that secret scanners and people recognize it.
const SECRET_PREFIX: &str = "tck_";

/// The prefix of the operator token.
const OPERATOR_TOKEN_PREFIX: &str = "tc_operator_";

/// Returns a new secret with at least 256 random bits, in letters and digits.
pub fn generate_secret() -> String {
    generate_with_prefix(SECRET_PREFIX)
}

fn generate_with_prefix(prefix: &str) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let mut bits = Vec::with_capacity(52);
    // Each ULID has 80 random bits, of which 65 are used.
    for _ in 0..4 {
        let random = ulid::Ulid::generate().random();
        bits.extend((0..13).map(|n| ((random >> (5 * n)) & 31) as usize));
    }
    let body: String = bits.into_iter().map(|n| ALPHABET[n] as char).collect();
    format!("{prefix}{body}")
}

/// Returns a new operator token, with as many random bits as a key's secret.
pub fn generate_operator_token() -> String {
    generate_with_prefix(OPERATOR_TOKEN_PREFIX)
}

/// Returns true if this text has the form of an operator token.
pub fn is_operator_token(text: &str) -> bool {
    let body = text.strip_prefix(OPERATOR_TOKEN_PREFIX);
    body.is_some_and(|body| body.len() == 52 && body.bytes().all(|b| b.is_ascii_alphanumeric()))
}

/// Returns the caller of a request. The operator token makes it the operator. Otherwise, if the
/// server has any key, the request needs one, and the key determines the caller. Without keys the
/// caller is anonymous, and the request must not come from a web page of another origin.
pub(crate) fn authenticate_request(
    engine: &Engine,
    origins: &OriginPolicy,
    headers: &HeaderMap,
) -> Result<Caller, Error> {
    let caller = identify_caller(engine, headers)?;
    if caller.auth_method == AuthMethod::Anonymous {
        origins.check(headers)?;
    }
    Ok(caller)
}

/// Audits a refused request that had credentials.
pub(crate) fn audit_refusal(engine: &Engine, headers: &HeaderMap, error: &Error) {
    if error.code() == Code::Unauthenticated && bearer_token(headers).is_some() {
        engine.registry().record_failed_sign_in(&error.to_string());
    }
}

/// Returns the caller that the credentials of a request identify.
fn identify_caller(engine: &Engine, headers: &HeaderMap) -> Result<Caller, Error> {
    let secret = bearer_token(headers);
    if let Some(token) = secret.filter(|secret| secret.starts_with(OPERATOR_TOKEN_PREFIX)) {
        let caller = engine.registry().authenticate(token).ok_or_else(|| {
            let message = "this operator token is not valid; the server's data directory has the \
                           current one";
            Error::refused(Code::Unauthenticated, message)
        })?;
        return Ok(Caller { project: requested_project(headers)?, ..caller });
    }
    if engine.registry().has_keys() {
        let secret = secret.ok_or_else(|| {
            let message = "this server needs a key: send Authorization: Bearer KEY";
            Error::refused(Code::Unauthenticated, message)
        })?;
        return engine.registry().authenticate(secret).ok_or_else(|| {
            Error::refused(Code::Unauthenticated, "this key is unknown or was revoked")
        });
    }
    Ok(Caller::anonymous(requested_project(headers)?))
}

/// Returns the project that a caller without a key names.
fn requested_project(headers: &HeaderMap) -> Result<String, Error> {
    let project = headers.get("x-toolcrib-project").map(|value| value.to_str().unwrap_or(""));
    let project = project.unwrap_or("default");
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if project.is_empty() || project.len() > 64 || !project.chars().all(plain) {
        let message = "X-Toolcrib-Project must be 1 to 64 letters, digits, '_', '-' or '.'";
        return Err(Error::refused(Code::BadRequest, message));
    }
    Ok(project.to_owned())
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
        if identify_caller(engine, &self.headers)? == self.caller {
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

    #[test]
    fn operator_tokens_are_recognized_by_their_form() {
        let token = generate_operator_token();
        assert!(is_operator_token(&token), "{token}");
        assert_ne!(token, generate_operator_token());
        for other in ["", "tc_operator_", &token[1..], &token[..60], &generate_secret()] {
            assert!(!is_operator_token(other), "{other}");
        }
    }
}
