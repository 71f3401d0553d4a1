//! An issuer of tokens, and an MCP server that lets in who has one: both on one loopback port.

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

/// The secret of the client that registers, and of the one that is known beforehand.
pub const SECRET: &str = "the-secret-of-the-client";

/// What all of it shares.
#[derive(Default)]
pub struct Books {
    pub registered: AtomicU64,
    pub authorized: AtomicU64,
    pub refreshed: AtomicU64,
    pub exchanged: AtomicU64,
    /// How long a token lives, in seconds.
    pub lives: AtomicU64,
    /// Whether refresh tokens are not taken any more.
    pub refuses: AtomicBool,
    /// What the codes were asked with: the challenge, the client, the scope.
    codes: Mutex<HashMap<String, (String, String, String)>>,
    tokens: Mutex<HashMap<String, String>>,
    refreshes: Mutex<HashSet<String>>,
    /// Everything secret that was ever given.
    pub secrets: Mutex<Vec<String>>,
    /// The tokens that were shown to the MCP server.
    pub shown: Mutex<Vec<String>>,
    /// A tool that needs a scope of its own.
    pub guarded: Mutex<Option<(String, String)>>,
    base: Mutex<String>,
    issuer: Mutex<String>,
    next: AtomicU64,
}

pub struct Issuer {
    pub books: Arc<Books>,
    pub fixture: Fixture,
    pub address: String,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Books {
    fn fresh(&self, kind: &str) -> String {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let made = format!("{kind}-{number}-very-secret-{}", ulid::Ulid::generate());
        self.secrets.lock().push(made.clone());
        made
    }

    fn granted(&self, scope: &str, refresh: bool) -> Value {
        let token = self.fresh("token");
        self.tokens.lock().insert(token.clone(), scope.to_owned());
        let mut answer = json!({ "access_token": token, "token_type": "Bearer", "scope": scope,
            "expires_in": self.lives.load(Ordering::SeqCst) });
        if refresh {
            let refresh = self.fresh("refresh");
            self.refreshes.lock().insert(refresh.clone());
            answer["refresh_token"] = refresh.into();
        }
        answer
    }

    /// No access token is good any more.
    pub fn revoke(&self) {
        self.tokens.lock().clear();
    }
}

impl Issuer {
    pub async fn start() -> Self {
        Self::named("127.0.0.1").await
    }

    /// Its issuer is said to be at this name of the machine.
    pub async fn named(host: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let books = Arc::new(Books::default());
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
            .layer(from_fn_with_state(books.clone(), let_in));
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

async fn let_in(State(books): State<Arc<Books>>, request: Request, next: Next) -> Response {
    let sent = request.headers().get(header::AUTHORIZATION);
    let sent = sent.and_then(|value| value.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    let sent = sent.map(str::to_owned);
    books.shown.lock().extend(sent.clone());
    let scope = sent.and_then(|token| books.tokens.lock().get(&token).cloned());
    let base = books.base.lock().clone();
    let metadata = format!("resource_metadata=\"{base}/.well-known/oauth-protected-resource/mcp\"");
    let refuse = |status: StatusCode, header: String| {
        (status, [(header::WWW_AUTHENTICATE, header)], "no").into_response()
    };
    let Some(scope) = scope else {
        let header = format!("Bearer {metadata}, scope=\"files\"");
        return refuse(StatusCode::UNAUTHORIZED, header);
    };
    let tool = request.headers().get("mcp-name").and_then(|name| name.to_str().ok());
    let guarded = books.guarded.lock().clone();
    if let Some((name, needs)) = guarded.filter(|(name, _)| Some(name.as_str()) == tool)
        && !scope.split(' ').any(|has| has == needs)
    {
        let _ = name;
        let header = format!("Bearer error=\"insufficient_scope\", scope=\"{needs}\", {metadata}");
        return refuse(StatusCode::FORBIDDEN, header);
    }
    next.run(request).await
}

async fn resource(State(books): State<Arc<Books>>) -> Json<Value> {
    let (base, issuer) = (books.base.lock().clone(), books.issuer.lock().clone());
    Json(json!({ "resource": format!("{base}/mcp"), "authorization_servers": [issuer] }))
}

async fn metadata(State(books): State<Arc<Books>>) -> Json<Value> {
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

async fn register(State(books): State<Arc<Books>>, Json(asked): Json<Value>) -> Response {
    books.registered.fetch_add(1, Ordering::SeqCst);
    let made = json!({ "client_id": "registered", "client_secret": SECRET,
        "redirect_uris": asked["redirect_uris"], "client_name": asked["client_name"] });
    (StatusCode::CREATED, Json(made)).into_response()
}

async fn authorize(
    State(books): State<Arc<Books>>,
    Query(asked): Query<HashMap<String, String>>,
) -> Response {
    books.authorized.fetch_add(1, Ordering::SeqCst);
    let (issuer, code) = (books.issuer.lock().clone(), books.fresh("code"));
    let of = |name: &str| asked.get(name).cloned().unwrap_or_default();
    assert_eq!(of("code_challenge_method"), "S256");
    assert_eq!(of("resource"), format!("{}/mcp", books.base.lock()));
    let asked_with = (of("code_challenge"), of("client_id"), of("scope"));
    books.codes.lock().insert(code.clone(), asked_with);
    let mut back = reqwest::Url::parse(&of("redirect_uri")).unwrap();
    let pairs = [("code", &code), ("state", &of("state")), ("iss", &issuer)];
    back.query_pairs_mut().extend_pairs(pairs);
    Redirect::to(back.as_str()).into_response()
}

/// Who asks, by either way to say it.
fn client(headers: &HeaderMap, form: &HashMap<String, String>) -> Option<(String, String)> {
    let basic = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if let Some(basic) = basic.and_then(|value| value.strip_prefix("Basic ")) {
        let text = String::from_utf8(BASE64_STANDARD.decode(basic).ok()?).ok()?;
        let (id, secret) = text.split_once(':')?;
        return Some((id.to_owned(), secret.to_owned()));
    }
    Some((form.get("client_id")?.clone(), form.get("client_secret")?.clone()))
}

async fn token(
    State(books): State<Arc<Books>>,
    headers: HeaderMap,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    let refuse =
        |error: &str| (StatusCode::BAD_REQUEST, Json(json!({ "error": error }))).into_response();
    let Some((id, secret)) = client(&headers, &form) else { return refuse("invalid_client") };
    if secret != SECRET {
        return refuse("invalid_client");
    }
    let of = |name: &str| form.get(name).cloned().unwrap_or_default();
    assert_eq!(of("resource"), format!("{}/mcp", books.base.lock()));
    match of("grant_type").as_str() {
        "authorization_code" => {
            let known = books.codes.lock().remove(&of("code"));
            let Some((challenge, whose, scope)) = known else { return refuse("invalid_grant") };
            let hashed = Sha256::digest(of("code_verifier").as_bytes());
            if BASE64_URL_SAFE_NO_PAD.encode(hashed) != challenge || whose != id {
                return refuse("invalid_grant");
            }
            Json(books.granted(&scope, scope.contains("offline_access"))).into_response()
        }
        "refresh_token" => {
            let known = books.refreshes.lock().remove(&of("refresh_token"));
            if !known || books.refuses.load(Ordering::SeqCst) {
                return refuse("invalid_grant");
            }
            books.refreshed.fetch_add(1, Ordering::SeqCst);
            Json(books.granted(&of("scope"), true)).into_response()
        }
        "client_credentials" => {
            books.exchanged.fetch_add(1, Ordering::SeqCst);
            Json(books.granted(&of("scope"), false)).into_response()
        }
        _ => refuse("unsupported_grant_type"),
    }
}
