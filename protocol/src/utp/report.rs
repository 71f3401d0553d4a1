//! Parses reports of any transport, and stores a rejected report as a dead letter.

use serde_json::Value;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::json;
use toolcrib::domain::utp::subject;
use toolcrib::utp::{ReportReceipt, ReportRejection, ToolServiceReport, UnprocessableMessage};
use toolcrib::{Caller, Engine};

use super::wire::UtpHeaders;

/// A report as received.
pub struct IncomingReport<'a> {
    /// The NATS subject, or the HTTP path.
    pub subject: &'a str,
    pub headers: UtpHeaders<'a>,
    pub body: &'a [u8],
}

/// Ingests a report. A report that can never be accepted becomes a dead letter.
pub async fn ingest_report(
    engine: &Engine,
    caller: &Caller,
    incoming: IncomingReport<'_>,
) -> Result<ReportReceipt, Error> {
    let rejected = match parse_report(engine, &caller.project, &incoming) {
        Ok(report) => match engine.utp().ingest_report(caller, report).await {
            Ok(ingested) => return Ok(ingested),
            Err(rejected) => rejected,
        },
        Err(rejected) => rejected,
    };
    let ReportRejection { dead_letter_reason: reason, error } = rejected;
    if let Some(reason) = reason {
        let message = UnprocessableMessage {
            kind: "report",
            reason: reason.to_owned(),
            message: error_message(&error),
            subject: incoming.subject.to_owned(),
            headers: incoming.headers.to_lowercase_map(),
            payload: String::from_utf8_lossy(incoming.body).into_owned(),
            is_truncated: false,
        };
        engine.utp().dead_letters().save(&caller.project, message).await?;
    }
    Err(error)
}

/// Ingests a rejected report again.
pub async fn reingest_report(
    engine: &Engine,
    caller: &Caller,
    incoming: &IncomingReport<'_>,
) -> Result<ReportReceipt, Error> {
    let report =
        parse_report(engine, &caller.project, incoming).map_err(|rejected| rejected.error)?;
    engine.utp().ingest_report(caller, report).await.map_err(|rejected| rejected.error)
}

fn error_message(error: &Error) -> String {
    match error {
        Error::Refused { fault, .. } => fault.message.clone(),
        Error::Internal(_) => "internal error".to_owned(),
    }
}

fn malformed_report(message: impl Into<String>) -> ReportRejection {
    let fault = Fault::new(Code::BadRequest, message).without_side_effect();
    ReportRejection { dead_letter_reason: Some("malformed"), error: fault.into() }
}

/// Parses the fields of a report. A field that the payload lacks is read from the headers.
fn parse_report(
    engine: &Engine,
    project: &str,
    incoming: &IncomingReport<'_>,
) -> Result<ToolServiceReport, ReportRejection> {
    let limit = engine.limits().max_result_bytes + 16_384;
    if incoming.body.len() > limit {
        let message = format!("the report is over the limit of {limit} bytes");
        let fault = Fault::new(Code::PayloadTooLarge, message).without_side_effect();
        return Err(ReportRejection { dead_letter_reason: Some("too_large"), error: fault.into() });
    }
    let unreadable = |reason: String| malformed_report(format!("the report is not JSON: {reason}"));
    json::check(incoming.body).map_err(|error| unreadable(error.to_string()))?;
    let mut body: Value =
        serde_json::from_slice(incoming.body).map_err(|error| unreadable(error.to_string()))?;
    let Value::Object(fields) = &mut body else {
        return Err(malformed_report("a report is an object"));
    };
    // Moved, not copied: the card is most of the report.
    let card = fields.get_mut("card").filter(|card| card.is_object()).map(Value::take);
    let fields = &*fields;
    let header = |name: &str| incoming.headers.get(name);
    if header("cg-project-id").is_some_and(|value| value != project) {
        return Err(malformed_report("CG-Project-Id is not the project that is reported to"));
    }
    // A report over HTTP has no channel.
    let channel = subject::parse(incoming.subject).map(|parts| parts.channel);
    if header("cg-channel-id").is_some_and(|value| channel.is_some_and(|is| is != value)) {
        return Err(malformed_report("CG-Channel-Id is not the channel that is reported under"));
    }
    let field = |name: &str, in_header: &str| {
        let value = fields.get(name).filter(|value| !value.is_null());
        let value = value.map(|value| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let value = value.or_else(|| header(in_header).map(str::to_owned));
        value.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let needed = |name: &str, in_header: &str| {
        field(name, in_header).ok_or_else(|| malformed_report(format!("{name} is missing")))
    };
    let epoch = needed("turn_epoch", "cg-turn-epoch")?;
    let depth = header("cg-recursion-depth").map(|text| {
        let invalid_depth = || malformed_report("CG-Recursion-Depth must be a whole number from 0");
        text.trim().parse::<u32>().map_err(|_| invalid_depth())
    });
    Ok(ToolServiceReport {
        tool_call_id: needed("tool_call_id", "cg-tool-call-id")?,
        turn_id: needed("agent_turn_id", "cg-turn-id")?,
        agent_id: needed("agent_id", "cg-agent-id")?,
        epoch: epoch.parse().map_err(|_| malformed_report("turn_epoch must be a whole number"))?,
        after_execution: field("after_execution", ""),
        status: field("status", ""),
        card_id: field("tool_result_card_id", ""),
        card,
        has_inline_result: fields.contains_key("result"),
        depth: depth.transpose()?,
        traceparent: header("traceparent").map(str::to_owned),
        reported_by: field("source_agent_id", "cg-sender"),
    })
}
