//! Batched requests of a tool service to the server: cards and reports, many per message. If a
//! batch cannot be answered as such, the result is `None` and each request is sent alone.

use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Request, RequestError, RequestErrorKind};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use toolcrib_protocol::utp::{NatsConnection, wire};

use crate::utp::host::coalescer::BatchRpc;
use crate::utp::host::server_reachability::ServerReachability;

/// Time for which batches of reports are not tried after the server has rejected one as unknown.
const BATCH_RETRY_AFTER: Duration = Duration::from_secs(60);

/// Interval between checks for a server.
const SERVER_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The RPC connection of a tool host, with its sender name.
#[derive(Clone)]
pub(super) struct HostRpcClient {
    pub(super) connection: NatsConnection,
    pub(super) sender: String,
    pub(super) reachability: ServerReachability,
}

impl HostRpcClient {
    pub(super) fn headers(&self, traceparent: &str) -> HeaderMap {
        let mut headers = wire::base_headers(self.connection.version(), "dict", traceparent);
        wire::set_header(&mut headers, wire::names::SENDER, &self.sender);
        headers
    }

    /// Sends one request without retries.
    async fn request_once<T: serde::de::DeserializeOwned>(
        &self,
        subject: String,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Option<T> {
        let request = Request::new().payload(body.into()).headers(headers);
        match self.connection.client().send_request(subject.clone(), request).await {
            Ok(reply) => {
                self.reachability.record_reply(&subject);
                serde_json::from_slice(&reply.payload).ok()
            }
            Err(error) => {
                if is_unanswered(&error) {
                    self.reachability.record_no_reply(&subject);
                }
                tracing::debug!(%error, "no reply; sending each request alone");
                None
            }
        }
    }
}

/// Returns true if no server answered a request that was sent.
pub(super) fn is_unanswered(error: &RequestError) -> bool {
    matches!(error.kind(), RequestErrorKind::NoResponders | RequestErrorKind::TimedOut)
}

impl HostRpcClient {
    /// Sends a request without card ids until a server answers. The reply is an error, but it shows
    /// that a server answers requests for cards.
    pub(super) async fn wait_for_server(&self, project: &str) {
        let subject =
            format!("cg.{}.{project}.public.rpc.sys.cards.get", self.connection.version());
        let body = b"{\"card_ids\": []}".to_vec();
        loop {
            self.connection.wait_until_connected().await;
            let headers = self.headers("");
            let reply: Option<Value> =
                self.request_once(subject.clone(), headers, body.clone()).await;
            if reply.is_some() {
                return;
            }
            tokio::time::sleep(SERVER_CHECK_INTERVAL).await;
        }
    }
}

/// A request for one card.
pub(super) struct CardRequest {
    pub(super) card_id: String,
    pub(super) traceparent: String,
}

/// A card, and whether its call has already ended.
pub(super) struct FetchedCard {
    pub(super) card: Value,
    pub(super) is_call_ended: bool,
}

/// Fetches cards.
pub(super) struct CardsRpc(pub(super) HostRpcClient);

#[derive(Serialize)]
struct CardsRequestBody<'a> {
    card_ids: Vec<&'a str>,
}

#[derive(Deserialize)]
struct CardsResponseBody {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    cards: Vec<Value>,
    #[serde(default)]
    ended: Vec<String>,
}

impl BatchRpc for CardsRpc {
    type RpcRequest = CardRequest;
    type RpcResponse = FetchedCard;

    // A constant, because the response is what is large. A response over NATS's payload limit
    // fails, and each card is then requested alone.
    fn request_bytes(_: &CardRequest) -> usize {
        4_096
    }

    async fn send_batch(
        &self,
        subject_prefix: &str,
        questions: &[CardRequest],
    ) -> Option<Vec<FetchedCard>> {
        let first = questions.first()?;
        let card_ids = questions.iter().map(|request| request.card_id.as_str()).collect();
        let body = serde_json::to_vec(&CardsRequestBody { card_ids }).ok()?;
        let headers = self.0.headers(&first.traceparent);
        let answer: CardsResponseBody = self
            .0
            .request_once(format!("{subject_prefix}.rpc.sys.cards.get"), headers, body)
            .await?;
        if !answer.ok || answer.cards.len() != questions.len() {
            return None;
        }
        let got = answer.cards.into_iter().zip(questions).map(|(card, request)| {
            let ended = answer.ended.contains(&request.card_id);
            FetchedCard { card, is_call_ended: ended }
        });
        Some(got.collect())
    }
}

/// A report with its headers.
pub(super) struct ReportRequest {
    pub(super) report: Box<RawValue>,
    pub(super) traceparent: String,
    pub(super) tracestate: Option<String>,
    pub(super) depth: Option<String>,
}

impl ReportRequest {
    pub(super) fn headers(&self, rpc_client: &HostRpcClient) -> HeaderMap {
        let mut headers = rpc_client.headers(&self.traceparent);
        if let Some(depth) = &self.depth {
            wire::set_header(&mut headers, wire::names::DEPTH, depth);
        }
        if let Some(state) = &self.tracestate {
            wire::set_header(&mut headers, wire::names::TRACESTATE, state);
        }
        headers
    }
}

/// Submits reports.
pub(super) struct ReportsRpc {
    rpc: HostRpcClient,
    /// The time at which the server rejected a batch of reports as unknown.
    batch_unsupported_since: Mutex<Option<Instant>>,
}

impl ReportsRpc {
    pub(super) fn new(rpc: HostRpcClient) -> Self {
        Self { rpc, batch_unsupported_since: Mutex::default() }
    }
}

#[derive(Serialize)]
struct BatchedReportBody<'a> {
    headers: BatchedReportHeaders<'a>,
    report: &'a RawValue,
}

#[derive(Serialize)]
struct BatchedReportHeaders<'a> {
    traceparent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tracestate: Option<&'a str>,
    #[serde(rename = "CG-Recursion-Depth", skip_serializing_if = "Option::is_none")]
    depth: Option<&'a str>,
}

#[derive(Serialize)]
struct ReportsRequestBody<'a> {
    reports: Vec<BatchedReportBody<'a>>,
}

/// The server's reply to a report.
#[derive(Debug, Deserialize)]
pub(super) struct ReportReply {
    #[serde(default)]
    pub(super) ok: bool,
    #[serde(default)]
    pub(super) error: Option<ReportReplyError>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ReportReplyError {
    #[serde(default)]
    pub(super) code: String,
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) retryable: bool,
}

#[derive(Deserialize)]
struct ReportsResponseBody {
    #[serde(default)]
    ok: bool,
    #[serde(default)]
    answers: Vec<ReportReply>,
    #[serde(default)]
    error: Option<ReportReplyError>,
}

impl BatchRpc for ReportsRpc {
    type RpcRequest = ReportRequest;
    type RpcResponse = ReportReply;

    fn request_bytes(reported: &ReportRequest) -> usize {
        reported.report.get().len() + 256
    }

    async fn send_batch(
        &self,
        subject_prefix: &str,
        requests: &[ReportRequest],
    ) -> Option<Vec<ReportReply>> {
        let first = requests.first()?;
        if requests.len() == 1 {
            let (headers, body) = (first.headers(&self.rpc), first.report.get().as_bytes());
            let subject = format!("{subject_prefix}.rpc.sys.l0.report");
            return self
                .rpc
                .request_once(subject, headers, body.to_vec())
                .await
                .map(|reply| vec![reply]);
        }
        if self
            .batch_unsupported_since
            .lock()
            .is_some_and(|since| since.elapsed() < BATCH_RETRY_AFTER)
        {
            return None;
        }
        let reports = requests.iter().map(|report| BatchedReportBody {
            headers: BatchedReportHeaders {
                traceparent: &report.traceparent,
                tracestate: report.tracestate.as_deref(),
                depth: report.depth.as_deref(),
            },
            report: &report.report,
        });
        let body = serde_json::to_vec(&ReportsRequestBody { reports: reports.collect() }).ok()?;
        let subject = format!("{subject_prefix}.rpc.sys.l0.reports");
        let headers = self.rpc.headers(&first.traceparent);
        let answer: ReportsResponseBody = self.rpc.request_once(subject, headers, body).await?;
        if answer.error.is_some_and(|error| error.code == "not_found") {
            *self.batch_unsupported_since.lock() = Some(Instant::now());
        }
        (answer.ok && answer.answers.len() == requests.len()).then_some(answer.answers)
    }
}
