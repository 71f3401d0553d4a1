//! A webhook receiver that records the messages, gives prepared answers, and checks signatures with
//! its own HMAC.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::soon;

/// The signing key of the tests.
pub const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// An answer of the receiver.
#[derive(Debug, Clone)]
pub enum Answer {
    Code(u16),
    /// A status with this header.
    With(u16, &'static str, String),
    /// No answer.
    Hang,
}

/// One received request.
#[derive(Debug, Clone)]
pub struct Received {
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
}

impl Received {
    pub fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// Returns true if one of the signatures was made with this key.
    pub fn is_signed_with(&self, key: &str) -> bool {
        let (id, time) = (self.header("webhook-id"), self.header("webhook-timestamp"));
        let expected = format!("v1,{}", hmac(key, &format!("{id}.{time}.{}", self.body)));
        self.header("webhook-signature").split(' ').any(|signature| signature == expected)
    }
}

/// HMAC-SHA256 as RFC 2104 defines it, in base64.
fn hmac(key: &str, message: &str) -> String {
    let key = STANDARD.decode(key.strip_prefix("whsec_").unwrap()).unwrap();
    assert!(key.len() <= 64);
    let pad = |byte: u8| {
        let mut block = [byte; 64];
        block.iter_mut().zip(&key).for_each(|(byte, key)| *byte ^= key);
        block
    };
    let inner_hash = Sha256::new().chain_update(pad(0x36)).chain_update(message).finalize();
    STANDARD.encode(Sha256::new().chain_update(pad(0x5c)).chain_update(inner_hash).finalize())
}

struct ReceiverState {
    answers: Mutex<VecDeque<Answer>>,
    messages: watch::Sender<Vec<Received>>,
}

/// A receiver on a free port of loopback.
#[derive(Clone)]
pub struct Receiver {
    pub url: String,
    state: Arc<ReceiverState>,
}

impl Receiver {
    /// Starts a receiver that gives these answers in order, and 200 afterwards.
    pub async fn answering(answers: impl IntoIterator<Item = Answer>) -> Self {
        let answers = Mutex::new(answers.into_iter().collect());
        let state = Arc::new(ReceiverState { answers, messages: watch::Sender::new(Vec::new()) });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(receive).with_state(state.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, state }
    }

    /// Returns the messages received so far.
    pub fn messages(&self) -> Vec<Received> {
        self.state.messages.borrow().clone()
    }

    /// Waits until this many messages have been received.
    pub async fn received(&self, count: usize) -> Vec<Received> {
        let mut messages = self.state.messages.subscribe();
        let enough = messages.wait_for(|messages| messages.len() >= count);
        soon(&format!("{count} webhooks"), enough).await.unwrap().clone()
    }
}

async fn receive(
    State(state): State<Arc<ReceiverState>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body = String::from_utf8(body.to_vec()).unwrap();
    // Confirms that it wants messages, except at one path.
    let message = serde_json::from_str::<Value>(&body).unwrap_or_default();
    let confirms = message["type"] == "verification" && uri.path() != "/mute";
    let received = Received { path: uri.to_string(), headers, body };
    state.messages.send_modify(|messages| messages.push(received));
    if confirms {
        return axum::Json(serde_json::json!({ "challenge": message["challenge"] }))
            .into_response();
    }
    let answer = state.answers.lock().unwrap().pop_front().unwrap_or(Answer::Code(200));
    match answer {
        Answer::Code(code) => StatusCode::from_u16(code).unwrap().into_response(),
        Answer::With(code, name, value) => {
            (StatusCode::from_u16(code).unwrap(), [(name, value)]).into_response()
        }
        Answer::Hang => std::future::pending().await,
    }
}

/// The test vector of the Standard Webhooks libraries.
#[test]
fn hmac_matches_the_test_vector_of_the_specification() {
    let signed = hmac(KEY, "msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{\"test\": 2432232314}");
    assert_eq!(signed, "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
}
