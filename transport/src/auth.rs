//! Generates secrets and authenticates requests.

pub mod oauth;
mod origin;
pub mod settings;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::{Extensions, HeaderMap, HeaderValue, header};
use axum::response::Response;
use futures::StreamExt;
pub use origin::OriginPolicy;
use toolcrib::domain::caller::{AuthMethod, AuthenticatedCaller, DEFAULT_PROJECT};
use toolcrib::domain::directory::audit::RequestOrigin;
use toolcrib::domain::directory::credential::AssertableAttribute;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::registry::{Credentials, audit};
use toolcrib::{Caller, Engine};

/// Interval at which open streams and waits check that their credentials are valid.
const REVALIDATION_INTERVAL: Duration = Duration::from_millis(500);

/// The prefix of every key's secret, so that secret scanners and people recognize it.
const SECRET_PREFIX: &str = "tck_";

/// The prefix of every session token's secret.
const SESSION_TOKEN_PREFIX: &str = "tcs_";

/// The prefix of the operator token.
const OPERATOR_TOKEN_PREFIX: &str = "tc_operator_";

/// Returns a new secret with at least 256 random bits, in letters and digits.
pub fn generate_secret() -> String {
    generate_with_prefix(SECRET_PREFIX)
}

/// Returns a new secret for a session token, with as many random bits as a key's.
pub fn generate_session_token() -> String {
    generate_with_prefix(SESSION_TOKEN_PREFIX)
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

/// Authenticates a request. The operator token makes the caller the operator. Otherwise, if the
/// server has any key, the request needs a key or a token, which determines the caller. Without
/// keys the caller is anonymous, and the request must not come from a web page of another origin.
pub(crate) fn authenticate_request(
    engine: &Engine,
    origins: &OriginPolicy,
    headers: &HeaderMap,
    extensions: &Extensions,
) -> Result<RequestCredentials, Error> {
    let presented = PresentedCredentials::from_request(headers, extensions)?;
    let sign_in =
        |credentials: &Credentials<'_>| engine.registry().credentials().authenticate(credentials);
    let AuthenticatedCaller { caller, expires_ms } = presented.identify_caller(engine, sign_in)?;
    if caller.auth_method == AuthMethod::Anonymous {
        origins.check(headers)?;
    }
    let credentials = RequestCredentials { caller, expires_ms, presented: presented.into() };
    if let Some(watch) = extensions.get::<CredentialWatch>() {
        watch.begin(engine, &credentials);
    }
    Ok(credentials)
}

/// The credentials that a request presents, which may have become invalid since.
#[derive(Debug)]
struct PresentedCredentials {
    secret: Option<String>,
    /// The project that the request names; a key has its own.
    project: Option<String>,
    user: Option<String>,
    session: Option<String>,
    peer: Option<IpAddr>,
}

impl PresentedCredentials {
    fn from_request(headers: &HeaderMap, extensions: &Extensions) -> Result<Self, Error> {
        Ok(Self {
            secret: bearer_token(headers).map(str::to_owned),
            project: headers.get("x-toolcrib-project").map(header_text),
            user: asserted_name(headers, AssertableAttribute::User)?,
            session: asserted_name(headers, AssertableAttribute::Session)?,
            peer: extensions.get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0.ip()),
        })
    }

    /// Returns the caller that these credentials identify now.
    fn identify_caller(
        &self,
        engine: &Engine,
        authenticate: impl Fn(&Credentials<'_>) -> Result<AuthenticatedCaller, Error>,
    ) -> Result<AuthenticatedCaller, Error> {
        let credentials = |secret| Credentials {
            secret,
            user: self.user.as_deref(),
            session: self.session.as_deref(),
            peer: self.peer,
        };
        let secret = self.secret.as_deref();
        if let Some(token) = secret.filter(|secret| secret.starts_with(OPERATOR_TOKEN_PREFIX)) {
            let mut authenticated = authenticate(&credentials(token)).map_err(|error| {
                if error.code() != Code::Unauthenticated {
                    return error;
                }
                let message = "this operator token is not valid; the server's data directory has \
                               the current one";
                Error::refused(Code::Unauthenticated, message)
            })?;
            authenticated.caller.project = self.requested_project()?;
            return Ok(authenticated);
        }
        if engine.registry().credentials().has_keys() {
            let secret = secret.ok_or_else(|| {
                let message = "this server needs a key: send Authorization: Bearer KEY";
                Error::refused(Code::Unauthenticated, message)
            })?;
            return authenticate(&credentials(secret));
        }
        let asserted = [(AssertableAttribute::User, &self.user)];
        let asserted = asserted.into_iter().chain([(AssertableAttribute::Session, &self.session)]);
        if let Some((attribute, _)) = asserted.into_iter().find(|(_, name)| name.is_some()) {
            let header = attribute.header();
            let message = format!(
                "{header} is only accepted with the operator token or a key that may assert it; \
                 this request has no credentials"
            );
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let caller = Caller::anonymous(self.requested_project()?);
        Ok(AuthenticatedCaller { caller, expires_ms: None })
    }

    /// Returns the project that a caller without a key names.
    fn requested_project(&self) -> Result<String, Error> {
        let project = self.project.as_deref().unwrap_or(DEFAULT_PROJECT);
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if project.is_empty() || project.len() > 64 || !project.chars().all(plain) {
            let message = "X-Toolcrib-Project must be 1 to 64 letters, digits, '_', '-' or '.'";
            return Err(Error::refused(Code::BadRequest, message));
        }
        Ok(project.to_owned())
    }
}

/// Returns the user or session that a request asserts. A repeated header is refused, because a
/// proxy and this server could use different values.
fn asserted_name(
    headers: &HeaderMap,
    attribute: AssertableAttribute,
) -> Result<Option<String>, Error> {
    let name = match attribute {
        AssertableAttribute::User => "x-toolcrib-user",
        AssertableAttribute::Session => "x-toolcrib-session",
    };
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        let message = format!("{} must be sent once", attribute.header());
        return Err(Error::refused(Code::BadRequest, message));
    }
    Ok(Some(header_text(value)))
}

/// Returns a header as text. Bytes that are not UTF-8 become characters that no name may have.
fn header_text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

/// The caller of a request and its credentials, for streams and waits that outlive the
/// authentication: a key or token may be revoked, expire or be narrowed meanwhile.
#[derive(Clone)]
pub(crate) struct RequestCredentials {
    caller: Caller,
    expires_ms: Option<u64>,
    presented: Arc<PresentedCredentials>,
}

impl RequestCredentials {
    /// Returns the caller that the credentials authenticated.
    pub(crate) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Refuses if the credentials no longer authenticate the same caller.
    pub(crate) fn revalidate(&self, engine: &Engine) -> Result<(), Error> {
        let again = |credentials: &Credentials<'_>| {
            engine.registry().credentials().authenticate_again(credentials)
        };
        if self.presented.identify_caller(engine, again)?.caller == self.caller {
            return Ok(());
        }
        Err(Error::refused(Code::Unauthenticated, "these credentials are another caller's now"))
    }

    /// Waits until the credentials no longer authenticate the same caller; returns the reason.
    pub(crate) async fn wait_until_invalid(&self, engine: &Engine) -> Error {
        let registry = engine.registry();
        // The directory may have changed between the authentication and this wait.
        let mut checked_version = None;
        loop {
            let version = registry.directory_version();
            let has_ended = self.expires_ms.is_some_and(|ms| registry.credentials().now_ms() >= ms);
            if checked_version != Some(version) || has_ended {
                if let Err(error) = self.revalidate(engine) {
                    return error;
                }
                checked_version = Some(version);
            }
            tokio::time::sleep(REVALIDATION_INTERVAL).await;
        }
    }
}

/// The credentials of a program on this machine that is connected by pipes.
pub struct ProcessCredentials(RequestCredentials);

impl ProcessCredentials {
    /// Authenticates the program by its key or token.
    pub async fn authenticate(engine: &Engine, secret: &str) -> Result<Self, Error> {
        let presented = PresentedCredentials {
            secret: Some(secret.to_owned()),
            project: None,
            user: None,
            session: None,
            // A program that reads the data directory runs on this machine.
            peer: Some(Ipv4Addr::LOCALHOST.into()),
        };
        let origin = RequestOrigin { transport: Some("stdio".into()), ..RequestOrigin::default() };
        let sign_in = |credentials: &Credentials<'_>| {
            engine.registry().credentials().authenticate(credentials)
        };
        let signing_in = async { presented.identify_caller(engine, sign_in) };
        let AuthenticatedCaller { caller, expires_ms } =
            audit::with_origin(origin, signing_in).await?;
        let presented = presented.into();
        Ok(Self(RequestCredentials { caller, expires_ms, presented }))
    }

    /// Returns the program as a caller.
    pub fn caller(&self) -> &Caller {
        self.0.caller()
    }

    /// Waits until the credentials no longer authenticate the same caller; returns the reason.
    pub async fn wait_until_invalid(&self, engine: &Engine) -> Error {
        self.0.wait_until_invalid(engine).await
    }
}

/// Watches the credentials of one request, from its authentication to the end of its response. As
/// an extension of the request, it tells the connection which credentials the response depends on.
#[derive(Clone, Default)]
pub(crate) struct CredentialWatch(Arc<OnceLock<(Engine, RequestCredentials)>>);

impl CredentialWatch {
    fn begin(&self, engine: &Engine, credentials: &RequestCredentials) {
        if credentials.caller.auth_method == AuthMethod::Key {
            let _ = self.0.set((engine.clone(), credentials.clone()));
        }
    }

    /// Waits until the credentials are no longer valid; returns the reason. Waits forever if they
    /// cannot become invalid.
    pub(crate) async fn wait_until_invalid(self) -> Error {
        loop {
            // A request that is answered at once needs no check, and a longer one is authenticated
            // by now.
            tokio::time::sleep(REVALIDATION_INTERVAL).await;
            if let Some((engine, credentials)) = self.0.get() {
                return credentials.wait_until_invalid(engine).await;
            }
        }
    }

    /// Ends a response that is sent in parts when the credentials become invalid.
    pub(crate) fn limit_response(self, response: Response) -> Response {
        let is_complete = response.body().size_hint().exact().is_some();
        if is_complete || self.0.get().is_none() {
            return response;
        }
        response.map(|body| {
            let ended = Box::pin(self.wait_until_invalid());
            Body::from_stream(body.into_data_stream().take_until(ended))
        })
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
