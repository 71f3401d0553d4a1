//! Batched requests of a tool service to the server: cards and reports, many per message. If a
//! batch cannot be answered as such, the result is `None` and each request is sent alone.

use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Request};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::bundle::Errand;
use crate::utp::Link;
use crate::utp::wire;

/// Time for which batches of reports are not tried after the server has rejected one as unknown.
const NOT_AGAIN: Duration = Duration::from_secs(60);

/// The RPC connection of a tool host, with its sender name.
#[derive(Clone)]
pub(super) struct Asker {
    pub(super) link: Link,
    pub(super) name: String,
}

impl Asker {
    pub(super) fn headers(&self, traceparent: &str) -> HeaderMap {
        let mut headers = wire::headers(self.link.version(), "dict", traceparent);
        wire::set(&mut headers, wire::names::SENDER, &self.name);
        headers
    }

    /// Sends one request without retries.
    async fn once<T: serde::de::DeserializeOwned>(
        &self,
        subject: String,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Option<T> {
        let request = Request::new().payload(body.into()).headers(headers);
        match self.link.client().send_request(subject, request).await {
            Ok(reply) => serde_json::from_slice(&reply.payload).ok(),
            Err(error) => {
                tracing::debug!(%error, "no reply; sending each request alone");
                None
            }
        }
    }
}

/// A request for one card.
pub(super) struct Wanted {
    pub(super) card_id: String,
    pub(super) traceparent: String,
}

/// A card, and whether its call has already ended.
pub(super) struct Got {
    pub(super) card: Value,
    pub(super) ended: bool,
}

/// Fetches cards.
pub(super) struct Cards(pub(super) Asker);

#[derive(Serialize)]
struct CardsQuestion<'a> {
    card_ids: Vec<&'a str>,
}

#[derive(Deserialize)]
struct CardsAnswer {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    cards: Vec<Value>,
    #[serde(default)]
    ended: Vec<String>,
}

impl Errand for Cards {
    type Question = Wanted;
    type Answer = Got;

    // A constant, because the response is what is large. A response over NATS's payload limit
    // fails, and each card is then requested alone.
    fn size(_: &Wanted) -> usize {
        4_096
    }

    async fn ask(&self, place: &str, questions: &[Wanted]) -> Option<Vec<Got>> {
        let first = questions.first()?;
        let card_ids = questions.iter().map(|wanted| wanted.card_id.as_str()).collect();
        let body = serde_json::to_vec(&CardsQuestion { card_ids }).ok()?;
        let headers = self.0.headers(&first.traceparent);
        let answer: CardsAnswer =
            self.0.once(format!("{place}.rpc.sys.cards.get"), headers, body).await?;
        if !answer.ok || answer.cards.len() != questions.len() {
            return None;
        }
        let got = answer.cards.into_iter().zip(questions).map(|(card, wanted)| {
            let ended = answer.ended.contains(&wanted.card_id);
            Got { card, ended }
        });
        Some(got.collect())
    }
}

/// A report with its headers.
pub(super) struct Reported {
    pub(super) report: Box<RawValue>,
    pub(super) traceparent: String,
    pub(super) tracestate: Option<String>,
    pub(super) depth: Option<String>,
}

impl Reported {
    pub(super) fn headers(&self, asker: &Asker) -> HeaderMap {
        let mut headers = asker.headers(&self.traceparent);
        if let Some(depth) = &self.depth {
            wire::set(&mut headers, wire::names::DEPTH, depth);
        }
        if let Some(state) = &self.tracestate {
            wire::set(&mut headers, wire::names::TRACESTATE, state);
        }
        headers
    }
}

/// Submits reports.
pub(super) struct Reports {
    asker: Asker,
    /// The time at which the server rejected a batch of reports as unknown.
    one_by_one: Mutex<Option<Instant>>,
}

impl Reports {
    pub(super) fn new(asker: Asker) -> Self {
        Self { asker, one_by_one: Mutex::default() }
    }
}

#[derive(Serialize)]
struct OneOfMany<'a> {
    headers: OwnHeaders<'a>,
    report: &'a RawValue,
}

#[derive(Serialize)]
struct OwnHeaders<'a> {
    traceparent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tracestate: Option<&'a str>,
    #[serde(rename = "CG-Recursion-Depth", skip_serializing_if = "Option::is_none")]
    depth: Option<&'a str>,
}

#[derive(Serialize)]
struct ReportsQuestion<'a> {
    reports: Vec<OneOfMany<'a>>,
}

/// The server's reply to a report.
#[derive(Debug, Deserialize)]
pub(super) struct Said {
    #[serde(default)]
    pub(super) ok: bool,
    #[serde(default)]
    pub(super) error: Option<SaidError>,
}

#[derive(Debug, Deserialize)]
pub(super) struct SaidError {
    #[serde(default)]
    pub(super) code: String,
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) retryable: bool,
}

#[derive(Deserialize)]
struct ReportsAnswer {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    answers: Vec<Said>,
    #[serde(default)]
    error: Option<SaidError>,
}

impl Errand for Reports {
    type Question = Reported;
    type Answer = Said;

    fn size(reported: &Reported) -> usize {
        reported.report.get().len() + 256
    }

    async fn ask(&self, place: &str, questions: &[Reported]) -> Option<Vec<Said>> {
        let first = questions.first()?;
        if questions.len() == 1 {
            let (headers, body) = (first.headers(&self.asker), first.report.get().as_bytes());
            let subject = format!("{place}.rpc.sys.l0.report");
            return self.asker.once(subject, headers, body.to_vec()).await.map(|said| vec![said]);
        }
        if self.one_by_one.lock().is_some_and(|since| since.elapsed() < NOT_AGAIN) {
            return None;
        }
        let reports = questions.iter().map(|one| OneOfMany {
            headers: OwnHeaders {
                traceparent: &one.traceparent,
                tracestate: one.tracestate.as_deref(),
                depth: one.depth.as_deref(),
            },
            report: &one.report,
        });
        let body = serde_json::to_vec(&ReportsQuestion { reports: reports.collect() }).ok()?;
        let subject = format!("{place}.rpc.sys.l0.reports");
        let headers = self.asker.headers(&first.traceparent);
        let answer: ReportsAnswer = self.asker.once(subject, headers, body).await?;
        if answer.error.is_some_and(|error| error.code == "not_found") {
            *self.one_by_one.lock() = Some(Instant::now());
        }
        (answer.ok && answer.answers.len() == questions.len()).then_some(answer.answers)
    }
}
