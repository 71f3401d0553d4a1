//! A language model that says what a script tells it to, over the real wire: OpenAI's chat
//! completions and Anthropic's messages, streaming or not. For tests and for measuring the loop.
//!
//! It can also misbehave as real endpoints do: refuse with `Retry-After`, cut the connection in the
//! middle of a call's arguments, fall silent, or never stop talking.

mod wire;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Response, Uri, header};
use axum::response::IntoResponse;
use axum::routing::post;
use futures::{StreamExt, stream};
use serde_json::{Value, json};

/// What the model does when it is asked.
#[derive(Debug, Clone)]
pub enum Turn {
    /// It answers.
    Say(Answer),
    /// It refuses with this status, `Retry-After` and body.
    Refuse(u16, Option<&'static str>, Value),
    /// The connection breaks after so many events of the stream.
    Cut(Answer, usize),
    /// The stream ends after so many events, as if that were all.
    End(Answer, usize),
    /// It says so many events, and then nothing, for ever.
    Stall(Answer, usize),
    /// It never stops talking.
    Endless,
    /// It says exactly this, with this content type.
    Raw(&'static str, Vec<u8>),
}

/// An answer that makes sense.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub text: String,
    /// Id, name and arguments of each call.
    pub calls: Vec<(String, String, String)>,
    /// Instead of what follows from the calls: `length`, `content_filter`, ….
    pub finish: Option<&'static str>,
    /// Prompt and completion tokens.
    pub usage: (u64, u64),
    /// How long it thinks before the first event.
    pub thinks: Duration,
    /// How many characters of text or arguments an event has.
    pub piece: usize,
}

impl Answer {
    /// Some text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), usage: (10, 5), piece: 7, ..Self::default() }
    }

    /// A call more.
    #[must_use]
    pub fn call(mut self, id: &str, name: &str, arguments: impl Into<String>) -> Self {
        self.calls.push((id.to_owned(), name.to_owned(), arguments.into()));
        self
    }

    /// The same after a while.
    #[must_use]
    pub fn after(self, thinks: Duration) -> Self {
        Self { thinks, ..self }
    }
}

/// An answer with text alone.
#[must_use]
pub fn say(text: impl Into<String>) -> Turn {
    Turn::Say(Answer::text(text))
}

/// An answer with one call.
#[must_use]
pub fn call(id: &str, name: &str, arguments: &Value) -> Turn {
    Turn::Say(Answer::text("").call(id, name, arguments.to_string()))
}

/// What came in.
#[derive(Debug, Clone)]
pub struct Asked {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
    /// When the first event of the answer was handed to the connection.
    pub first: Arc<Mutex<Option<Instant>>>,
    /// Whether who asked hung up while the model stalled.
    pub left: Arc<AtomicBool>,
}

impl Asked {
    /// The messages of the conversation.
    #[must_use]
    pub fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().map_or(&[], Vec::as_slice)
    }

    /// The content of the last message, as text.
    #[must_use]
    pub fn last(&self) -> String {
        let content = self.messages().last().map_or(&Value::Null, |message| &message["content"]);
        content.as_str().map_or_else(|| content.to_string(), str::to_owned)
    }

    /// The names of the tools it was offered.
    #[must_use]
    pub fn tools(&self) -> Vec<String> {
        let tools = self.body["tools"].as_array().map_or(&[][..], Vec::as_slice);
        let name = |tool: &Value| {
            let name = tool["function"]["name"].as_str().or(tool["name"].as_str());
            name.unwrap_or_default().to_owned()
        };
        tools.iter().map(name).collect()
    }

    /// When the first event of its answer left, if it did.
    #[must_use]
    pub fn first_said(&self) -> Option<Instant> {
        *self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Script = dyn Fn(&Asked) -> Turn + Send + Sync;

/// A running model; it lasts as long as the runtime.
#[derive(Clone)]
pub struct Scripted {
    /// What `base_url` must be.
    pub url: String,
    seen: Arc<Mutex<Vec<Asked>>>,
    script: Arc<Script>,
}

impl Scripted {
    /// Starts one that decides by what it is asked.
    ///
    /// # Errors
    ///
    /// When no loopback port can be bound.
    pub async fn deciding(
        script: impl Fn(&Asked) -> Turn + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0");
        let listener = listener.await.context("cannot bind a loopback port")?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let (seen, script) = (Arc::default(), Arc::new(script));
        let model = Self { url, seen, script };
        let router = Router::new()
            .route("/v1/chat/completions", post(answer))
            .route("/v1/messages", post(answer))
            .layer(DefaultBodyLimit::disable())
            .with_state(model.clone());
        tokio::spawn(async move {
            use axum::serve::ListenerExt as _;
            let listener = listener.tap_io(|stream| {
                let _ = stream.set_nodelay(true);
            });
            axum::serve(listener, router).await
        });
        Ok(model)
    }

    /// Starts one that answers with these, one after the other, and then that it has no more.
    ///
    /// # Errors
    ///
    /// When no loopback port can be bound.
    pub async fn saying(turns: impl IntoIterator<Item = Turn>) -> anyhow::Result<Self> {
        let turns: Mutex<VecDeque<Turn>> = Mutex::new(turns.into_iter().collect());
        Self::deciding(move |_| {
            let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.pop_front().unwrap_or_else(|| {
                Turn::Refuse(500, None, json!({ "error": { "message": "the script is over" } }))
            })
        })
        .await
    }

    /// What it was asked, in order.
    #[must_use]
    pub fn asked(&self) -> Vec<Asked> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn answer(
    State(model): State<Scripted>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (path, first, left) = (uri.path().to_owned(), Arc::default(), Arc::default());
    let asked = Asked { path, headers, body, first, left };
    model.seen.lock().unwrap_or_else(PoisonError::into_inner).push(asked.clone());
    let turn = (model.script)(&asked);
    let streams = asked.body["stream"] == true;
    let events = |answer: &Answer| wire::events(&asked, answer);
    match turn {
        Turn::Say(answer) if !streams => {
            tokio::time::sleep(answer.thinks).await;
            axum::Json(wire::whole(&asked, &answer)).into_response()
        }
        Turn::Say(answer) => stream_of(&asked, answer.thinks, events(&answer), Then::End),
        Turn::End(answer, after) => {
            stream_of(&asked, answer.thinks, first_of(events(&answer), after), Then::End)
        }
        Turn::Cut(answer, after) => {
            stream_of(&asked, answer.thinks, first_of(events(&answer), after), Then::Break)
        }
        Turn::Stall(answer, after) => {
            stream_of(&asked, answer.thinks, first_of(events(&answer), after), Then::Hang)
        }
        Turn::Endless => {
            let chatter = Answer { piece: 4_096, ..Answer::text("x".repeat(65_536)) };
            stream_of(&asked, Duration::ZERO, first_of(events(&chatter), 10), Then::Repeat)
        }
        Turn::Refuse(status, retry_after, body) => {
            let mut response = axum::Json(body).into_response();
            *response.status_mut() = status.try_into().unwrap_or_default();
            if let Some(after) = retry_after {
                let after = header::HeaderValue::from_static(after);
                response.headers_mut().insert(header::RETRY_AFTER, after);
            }
            response
        }
        Turn::Raw(kind, bytes) => ([(header::CONTENT_TYPE, kind)], bytes).into_response(),
    }
}

fn first_of(events: Vec<String>, count: usize) -> Vec<String> {
    events.into_iter().take(count).collect()
}

/// Notes that nobody reads any more.
struct Leaving(Arc<AtomicBool>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What follows the events of a stream.
#[derive(Clone, Copy)]
enum Then {
    End,
    Break,
    Hang,
    Repeat,
}

fn stream_of(asked: &Asked, thinks: Duration, events: Vec<String>, then: Then) -> Response<Body> {
    let first = asked.first.clone();
    let again = events.last().cloned().unwrap_or_default();
    let said = stream::iter(events).enumerate().then(move |(n, event)| {
        let first = first.clone();
        async move {
            if n == 0 {
                tokio::time::sleep(thinks).await;
                *first.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            } else {
                // Each event is a write of its own, as it is when a model thinks of one after
                // the other.
                tokio::task::yield_now().await;
            }
            Ok::<Bytes, std::io::Error>(Bytes::from(event))
        }
    });
    let body = match then {
        Then::End => Body::from_stream(said),
        Then::Break => {
            let broken = stream::once(async {
                // While nothing more is ready, what was said is written out.
                tokio::task::yield_now().await;
                Err(std::io::Error::other("cut"))
            });
            Body::from_stream(said.chain(broken))
        }
        Then::Hang => {
            let leaving = Leaving(asked.left.clone());
            let silent = stream::once(async move {
                let _leaving = leaving;
                std::future::pending().await
            });
            Body::from_stream(said.chain(silent))
        }
        Then::Repeat => {
            let more = stream::repeat(again).map(|event| Ok(Bytes::from(event)));
            Body::from_stream(said.chain(more))
        }
    };
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (kind, body).into_response()
}
