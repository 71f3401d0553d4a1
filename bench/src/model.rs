//! A language model that follows a script, over the real wire protocols: OpenAI's chat completions
//! and responses, and Anthropic's messages, streaming or not. Used by tests and to measure the
//! agent loop.
//!
//! It can also misbehave like real endpoints: refuse with `Retry-After`, cut the connection in the
//! middle of a call's arguments, stall, or stream without end.

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

/// The scripted reaction to one request.
#[derive(Debug, Clone)]
pub enum ScriptedBehavior {
    /// Answers.
    Reply(ScriptedAnswer),
    /// Refuses with this status, `Retry-After` and body.
    Refuse(u16, Option<&'static str>, Value),
    /// Breaks the connection after this many events of the stream.
    Disconnect(ScriptedAnswer, usize),
    /// Ends the stream after this many events, as if it were complete.
    EndEarly(ScriptedAnswer, usize),
    /// Sends this many events, and then nothing, forever.
    Stall(ScriptedAnswer, usize),
    /// Streams events without end.
    Endless,
    /// Sends exactly these bytes, with this content type.
    Raw(&'static str, Vec<u8>),
}

/// A valid answer.
#[derive(Debug, Clone, Default)]
pub struct ScriptedAnswer {
    pub text: String,
    /// Id, name and arguments of each tool call.
    pub calls: Vec<(String, String, String)>,
    /// Replaces the finish reason that follows from the calls: `length`, `content_filter`, ….
    pub finish: Option<&'static str>,
    /// Prompt and completion tokens.
    pub usage: (u64, u64),
    /// Delay before the first event.
    pub delay: Duration,
    /// Number of characters of text or arguments per event.
    pub chunk_chars: usize,
}

impl ScriptedAnswer {
    /// Creates an answer with this text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), usage: (10, 5), chunk_chars: 7, ..Self::default() }
    }

    /// Adds a tool call.
    #[must_use]
    pub fn with_call(mut self, id: &str, name: &str, arguments: impl Into<String>) -> Self {
        self.calls.push((id.to_owned(), name.to_owned(), arguments.into()));
        self
    }

    /// Delays the answer.
    #[must_use]
    pub fn with_delay(self, thinks: Duration) -> Self {
        Self { delay: thinks, ..self }
    }
}

/// Creates an answer with text only.
#[must_use]
pub fn text_reply(text: impl Into<String>) -> ScriptedBehavior {
    ScriptedBehavior::Reply(ScriptedAnswer::text(text))
}

/// Creates an answer with one tool call.
#[must_use]
pub fn tool_call_reply(id: &str, name: &str, arguments: &Value) -> ScriptedBehavior {
    ScriptedBehavior::Reply(ScriptedAnswer::text("").with_call(id, name, arguments.to_string()))
}

/// A request that the model received.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    pub path: String,
    pub headers: HeaderMap,
    pub body: Value,
    /// The time when the first event of the answer was passed to the connection.
    pub first_event_at: Arc<Mutex<Option<Instant>>>,
    /// True if the requester disconnected while the model stalled.
    pub has_caller_left: Arc<AtomicBool>,
}

impl RecordedRequest {
    /// Returns the messages of the conversation.
    #[must_use]
    pub fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Returns the content of the last message as text.
    #[must_use]
    pub fn last_content(&self) -> String {
        let content = self.messages().last().map_or(&Value::Null, |message| &message["content"]);
        content.as_str().map_or_else(|| content.to_string(), str::to_owned)
    }

    /// Returns the names of the tools in the request.
    #[must_use]
    pub fn tool_names(&self) -> Vec<String> {
        let tools = self.body["tools"].as_array().map_or(&[][..], Vec::as_slice);
        let name = |tool: &Value| {
            let name = tool["function"]["name"].as_str().or(tool["name"].as_str());
            name.unwrap_or_default().to_owned()
        };
        tools.iter().map(name).collect()
    }

    /// Returns the time when the first event of the answer was sent, if it was.
    #[must_use]
    pub fn first_event_time(&self) -> Option<Instant> {
        *self.first_event_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Script = dyn Fn(&RecordedRequest) -> ScriptedBehavior + Send + Sync;

/// A running model; it lives as long as the runtime.
#[derive(Clone)]
pub struct ScriptedModel {
    /// The value for the setting `base_url`.
    pub url: String,
    recorded: Arc<Mutex<Vec<RecordedRequest>>>,
    script: Arc<Script>,
}

impl ScriptedModel {
    /// Starts a model that chooses its reaction from the request.
    ///
    /// # Errors
    ///
    /// When no loopback port can be bound.
    pub async fn start_with_script(
        script: impl Fn(&RecordedRequest) -> ScriptedBehavior + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0");
        let listener = listener.await.context("cannot bind a loopback port")?;
        let url = format!("http://{}/v1", listener.local_addr()?);
        let (seen, script) = (Arc::default(), Arc::new(script));
        let model = Self { url, recorded: seen, script };
        let router = Router::new()
            .route("/v1/chat/completions", post(handle_request))
            .route("/v1/messages", post(handle_request))
            .route("/v1/responses", post(handle_request))
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

    /// Starts a model that shows these behaviors one after the other, and then refuses.
    ///
    /// # Errors
    ///
    /// When no loopback port can be bound.
    pub async fn start_with_replies(
        turns: impl IntoIterator<Item = ScriptedBehavior>,
    ) -> anyhow::Result<Self> {
        let turns: Mutex<VecDeque<ScriptedBehavior>> = Mutex::new(turns.into_iter().collect());
        Self::start_with_script(move |_| {
            let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.pop_front().unwrap_or_else(|| {
                ScriptedBehavior::Refuse(
                    500,
                    None,
                    json!({ "error": { "message": "the script has no more answers" } }),
                )
            })
        })
        .await
    }

    /// Returns the requests that it received, in order.
    #[must_use]
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn handle_request(
    State(model): State<ScriptedModel>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (path, first, has_caller_left) = (uri.path().to_owned(), Arc::default(), Arc::default());
    let recorded = RecordedRequest { path, headers, body, first_event_at: first, has_caller_left };
    model.recorded.lock().unwrap_or_else(PoisonError::into_inner).push(recorded.clone());
    let turn = (model.script)(&recorded);
    let streams = recorded.body["stream"] == true;
    let events = |answer: &ScriptedAnswer| wire::events(&recorded, answer);
    match turn {
        ScriptedBehavior::Reply(answer) if !streams => {
            tokio::time::sleep(answer.delay).await;
            axum::Json(wire::complete_document(&recorded, &answer)).into_response()
        }
        ScriptedBehavior::Reply(answer) => {
            stream_response(&recorded, answer.delay, events(&answer), StreamEnding::End)
        }
        ScriptedBehavior::EndEarly(answer, after) => stream_response(
            &recorded,
            answer.delay,
            take_events(events(&answer), after),
            StreamEnding::End,
        ),
        ScriptedBehavior::Disconnect(answer, after) => stream_response(
            &recorded,
            answer.delay,
            take_events(events(&answer), after),
            StreamEnding::Break,
        ),
        ScriptedBehavior::Stall(answer, after) => stream_response(
            &recorded,
            answer.delay,
            take_events(events(&answer), after),
            StreamEnding::Hang,
        ),
        ScriptedBehavior::Endless => {
            let chatter =
                ScriptedAnswer { chunk_chars: 4_096, ..ScriptedAnswer::text("x".repeat(65_536)) };
            stream_response(
                &recorded,
                Duration::ZERO,
                take_events(events(&chatter), 10),
                StreamEnding::Repeat,
            )
        }
        ScriptedBehavior::Refuse(status, retry_after, body) => {
            let mut response = axum::Json(body).into_response();
            *response.status_mut() = status.try_into().unwrap_or_default();
            if let Some(after) = retry_after {
                let after = header::HeaderValue::from_static(after);
                response.headers_mut().insert(header::RETRY_AFTER, after);
            }
            response
        }
        ScriptedBehavior::Raw(kind, bytes) => {
            ([(header::CONTENT_TYPE, kind)], bytes).into_response()
        }
    }
}

fn take_events(events: Vec<String>, count: usize) -> Vec<String> {
    events.into_iter().take(count).collect()
}

/// Records that the reader of a stream has disconnected.
struct DisconnectNotice(Arc<AtomicBool>);

impl Drop for DisconnectNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The way in which a stream continues after its events.
#[derive(Clone, Copy)]
enum StreamEnding {
    End,
    Break,
    Hang,
    Repeat,
}

fn stream_response(
    request: &RecordedRequest,
    thinks: Duration,
    events: Vec<String>,
    then: StreamEnding,
) -> Response<Body> {
    let first = request.first_event_at.clone();
    let again = events.last().cloned().unwrap_or_default();
    let events_sent = stream::iter(events).enumerate().then(move |(n, event)| {
        let first = first.clone();
        async move {
            if n == 0 {
                tokio::time::sleep(thinks).await;
                *first.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            } else {
                // Each event is a separate write, as it is when a model generates one after the
                // other.
                tokio::task::yield_now().await;
            }
            Ok::<Bytes, std::io::Error>(Bytes::from(event))
        }
    });
    let body = match then {
        StreamEnding::End => Body::from_stream(events_sent),
        StreamEnding::Break => {
            let broken = stream::once(async {
                // While no further event is ready, the previous ones are written to the socket.
                tokio::task::yield_now().await;
                Err(std::io::Error::other("cut"))
            });
            Body::from_stream(events_sent.chain(broken))
        }
        StreamEnding::Hang => {
            let leaving = DisconnectNotice(request.has_caller_left.clone());
            let silent = stream::once(async move {
                let _leaving = leaving;
                std::future::pending().await
            });
            Body::from_stream(events_sent.chain(silent))
        }
        StreamEnding::Repeat => {
            let more = stream::repeat(again).map(|event| Ok(Bytes::from(event)));
            Body::from_stream(events_sent.chain(more))
        }
    };
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (kind, body).into_response()
}
