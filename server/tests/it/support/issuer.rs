//! An OAuth issuer and an MCP server that requires its tokens, both on one loopback port.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::extract::{Form, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;

use super::upstream::Fixture;

/// The secret of the registered client and of the preconfigured one.
pub const SECRET: &str = "the-secret-of-the-client";

/// State shared by the handlers.
#[derive(Default)]
pub struct IssuerState {
    pub registered: AtomicU64,
    pub authorized: AtomicU64,
    pub refreshed: AtomicU64,
    pub exchanged: AtomicU64,
    /// Lifetime of an access token, in seconds.
    pub lives: AtomicU64,
    /// Rejects refresh tokens if set.
    pub refuses: AtomicBool,
    /// Parameters of each authorization code: challenge, client and scope.
    codes: Mutex<HashMap<String, (String, String, String)>>,
    tokens: Mutex<HashMap<String, String>>,
    refreshes: Mutex<HashSet<String>>,
    /// Every secret that the issuer has created.
    pub secrets: Mutex<Vec<String>>,
    /// The tokens that the MCP server has received.
    pub presented_tokens: Mutex<Vec<String>>,
    /// A tool that requires an additional scope.
    pub guarded: Mutex<Option<(String, String)>>,
    base: Mutex<String>,
    issuer: Mutex<String>,
    next: AtomicU64,
}

pub struct Issuer {
    pub books: Arc<IssuerState>,
    pub fixture: Fixture,
    pub address: String,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl IssuerState {
    fn make_secret(&self, kind: &str) -> String {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let secret = format!("{kind}-{number}-very-secret-{}", ulid::Ulid::generate());
        self.secrets.lock().push(secret.clone());
        secret
    }

    fn issue_token(&self, scope: &str, refresh: bool) -> Value {
        let token = self.make_secret("token");
        self.tokens.lock().insert(token.clone(), scope.to_owned());
        let mut answer = json!({ "access_token": token, "token_type": "Bearer", "scope": scope,
            "expires_in": self.lives.load(Ordering::SeqCst) });
        if refresh {
            let refresh = self.make_secret("refresh");
            self.refreshes.lock().insert(refresh.clone());
            answer["refresh_token"] = refresh.into();
        }
        answer
    }

    /// Revokes all access tokens.
    pub fn revoke(&self) {
        self.tokens.lock().clear();
    }
}

impl Issuer {
    pub async fn start() -> Self {
        Self::start_on("127.0.0.1").await
    }

    /// Starts an issuer whose URL has this host name.
    pub async fn start_on(host: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let books = Arc::new(IssuerState::default());
        books.lives.store(3_600, Ordering::SeqCst);
        *books.base.lock() = format!("http://{address}");
        *books.issuer.lock() = format!("http://{host}:{}", address.port());
        let fixture = Fixture::new();
        let making = fixture.clone();
        let service = StreamableHttpService::new(
            move || Ok(making.clone()),
            Arc::new(LocalSessionManager::default()),
            StreamableHttpServerConfig::default(),
        );
        let guarded = Router::new()
            .nest_service("/mcp", service)
            .layer(from_fn_with_state(books.clone(), require_token));
        let router = Router::new()
            .route("/.well-known/oauth-protected-resource/mcp", get(resource))
            .route("/.well-known/oauth-authorization-server", get(metadata))
            .route("/register", post(register))
            .route("/authorize", get(authorize))
            .route("/token", post(token))
            .with_state(books.clone())
            .merge(guarded);
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { books, fixture, address: address.to_string(), serving }
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }
}

async fn require_token(
    State(books): State<Arc<IssuerState>>,
    request: Request,
    next: Next,
) -> Response {
    let bearer = request.headers().get(header::AUTHORIZATION);
    let bearer =
        bearer.and_then(|value| value.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    let bearer = bearer.map(str::to_owned);
    books.presented_tokens.lock().extend(bearer.clone());
    let scope = bearer.and_then(|token| books.tokens.lock().get(&token).cloned());
    let base = books.base.lock().clone();
    let metadata = format!("resource_metadata=\"{base}/.well-known/oauth-protected-resource/mcp\"");
    let reject = |status: StatusCode, header: String| {
        (status, [(header::WWW_AUTHENTICATE, header)], "no").into_response()
    };
    let Some(scope) = scope else {
        let header = format!("Bearer {metadata}, scope=\"files\"");
        return reject(StatusCode::UNAUTHORIZED, header);
    };
    let tool = request.headers().get("mcp-name").and_then(|name| name.to_str().ok());
    let guarded = books.guarded.lock().clone();
    if let Some((name, needs)) = guarded.filter(|(name, _)| Some(name.as_str()) == tool)
        && !scope.split(' ').any(|has| has == needs)
    {
        let _ = name;
        let header = format!("Bearer error=\"insufficient_scope\", scope=\"{needs}\", {metadata}");
        return reject(StatusCode::FORBIDDEN, header);
    }
    next.run(request).await
}

async fn resource(State(books): State<Arc<IssuerState>>) -> Json<Value> {
    let (base, issuer) = (books.base.lock().clone(), books.issuer.lock().clone());
    Json(json!({ "resource": format!("{base}/mcp"), "authorization_servers": [issuer] }))
}

async fn metadata(State(books): State<Arc<IssuerState>>) -> Json<Value> {
    let issuer = books.issuer.lock().clone();
    Json(json!({
        "issuer": issuer,
        "authorization_endpoint": format!("{issuer}/authorize"),
        "token_endpoint": format!("{issuer}/token"),
        "registration_endpoint": format!("{issuer}/register"),
        "response_types_supported": ["code"],
        "code_challenge_methods_supported": ["S256"],
        "authorization_response_iss_parameter_supported": true,
        "scopes_supported": ["files", "offline_access"],
        "token_endpoint_auth_methods_supported": ["client_secret_basic", "client_secret_post"],
    }))
}

async fn register(
    State(books): State<Arc<IssuerState>>,
    Json(registration): Json<Value>,
) -> Response {
    books.registered.fetch_add(1, Ordering::SeqCst);
    let client_record = json!({ "client_id": "registered", "client_secret": SECRET,
        "redirect_uris": registration["redirect_uris"],
        "client_name": registration["client_name"] });
    (StatusCode::CREATED, Json(client_record)).into_response()
}

async fn authorize(
    State(books): State<Arc<IssuerState>>,
    Query(params): Query<HashMap<String, String>>,
) -> Response {
    books.authorized.fetch_add(1, Ordering::SeqCst);
    let (issuer, code) = (books.issuer.lock().clone(), books.make_secret("code"));
    let param = |name: &str| params.get(name).cloned().unwrap_or_default();
    assert_eq!(param("code_challenge_method"), "S256");
    assert_eq!(param("resource"), format!("{}/mcp", books.base.lock()));
    let parameters = (param("code_challenge"), param("client_id"), param("scope"));
    books.codes.lock().insert(code.clone(), parameters);
    let mut redirect = reqwest::Url::parse(&param("redirect_uri")).unwrap();
    let pairs = [("code", &code), ("state", &param("state")), ("iss", &issuer)];
    redirect.query_pairs_mut().extend_pairs(pairs);
    Redirect::to(redirect.as_str()).into_response()
}

/// Returns the id and secret of the client, from the header or the form.
fn read_client_credentials(
    headers: &HeaderMap,
    params: &HashMap<String, String>,
) -> Option<(String, String)> {
    let basic = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if let Some(basic) = basic.and_then(|value| value.strip_prefix("Basic ")) {
        let text = String::from_utf8(BASE64_STANDARD.decode(basic).ok()?).ok()?;
        let (id, secret) = text.split_once(':')?;
        return Some((id.to_owned(), secret.to_owned()));
    }
    Some((params.get("client_id")?.clone(), params.get("client_secret")?.clone()))
}

async fn token(
    State(books): State<Arc<IssuerState>>,
    headers: HeaderMap,
    Form(params): Form<HashMap<String, String>>,
) -> Response {
    let reject =
        |error: &str| (StatusCode::BAD_REQUEST, Json(json!({ "error": error }))).into_response();
    let Some((id, secret)) = read_client_credentials(&headers, &params) else {
        return reject("invalid_client");
    };
    if secret != SECRET {
        return reject("invalid_client");
    }
    let param = |name: &str| params.get(name).cloned().unwrap_or_default();
    assert_eq!(param("resource"), format!("{}/mcp", books.base.lock()));
    match param("grant_type").as_str() {
        "authorization_code" => {
            let found = books.codes.lock().remove(&param("code"));
            let Some((challenge, owner, scope)) = found else { return reject("invalid_grant") };
            let hashed = Sha256::digest(param("code_verifier").as_bytes());
            if BASE64_URL_SAFE_NO_PAD.encode(hashed) != challenge || owner != id {
                return reject("invalid_grant");
            }
            Json(books.issue_token(&scope, scope.contains("offline_access"))).into_response()
        }
        "refresh_token" => {
            let found = books.refreshes.lock().remove(&param("refresh_token"));
            if !found || books.refuses.load(Ordering::SeqCst) {
                return reject("invalid_grant");
            }
            books.refreshed.fetch_add(1, Ordering::SeqCst);
            Json(books.issue_token(&param("scope"), true)).into_response()
        }
        "client_credentials" => {
            books.exchanged.fetch_add(1, Ordering::SeqCst);
            Json(books.issue_token(&param("scope"), false)).into_response()
        }
        _ => reject("unsupported_grant_type"),
    }
}
