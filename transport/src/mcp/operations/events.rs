//! `events/list`, `events/poll`, `events/subscribe` and `events/unsubscribe` (SEP-3415).

use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::{CustomRequest, CustomResult, ErrorCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use toolcrib::domain::caller::{AuthMethod, Caller};

use crate::mcp::events::error_code;
use crate::mcp::events::subscriptions::{
    EventSubscriptionRecord, EventSubscriptions, MAX_SUBSCRIPTIONS,
};
use crate::mcp::events::types::{EventFilter, EventType};
use crate::mcp::events::webhook::{EventReceiver, parse_secret};
use crate::mcp::request::CallerView;
use crate::mcp::state::McpTransportState;
use crate::mcp::tool_result;

/// Interval that a poll recommends.
const POLL_INTERVAL_MS: u64 = 5_000;

/// Default and maximum number of events in one response.
const DEFAULT_MAX_EVENTS: usize = 50;
const MAX_EVENTS: usize = 200;

/// Maximum time to read the events of one poll.
const POLL_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time that a poll waits for an event.
const MAX_POLL_WAIT_MS: u64 = 30_000;

/// Default and maximum lifetime of a subscription.
const DEFAULT_TTL_MS: u64 = 24 * 3_600_000;
const MAX_TTL_MS: u64 = 30 * 24 * 3_600_000;

#[derive(Deserialize)]
struct PollParams {
    name: String,
    #[serde(default = "empty_object")]
    arguments: Value,
    #[serde(default)]
    cursor: Option<String>,
    #[serde(rename = "maxEvents", default)]
    max_events: Option<usize>,
    #[serde(rename = "maxAgeMs", default)]
    max_age_ms: Option<u64>,
    /// The time to wait for an event if there is none.
    #[serde(rename = "timeoutMs", default)]
    timeout_ms: u64,
}

#[derive(Deserialize)]
struct SubscribeParams {
    name: String,
    #[serde(default = "empty_object")]
    arguments: Value,
    delivery: DeliveryParams,
    #[serde(default)]
    cursor: Option<String>,
    #[serde(rename = "maxAgeMs", default)]
    max_age_ms: Option<u64>,
    /// Absent for the default; null for a subscription without an end.
    #[serde(rename = "ttlMs", default, deserialize_with = "present")]
    ttl_ms: Option<Option<u64>>,
}

#[derive(Deserialize)]
struct DeliveryParams {
    #[serde(default)]
    mode: Option<String>,
    url: String,
    #[serde(default)]
    secret: Option<String>,
}

pub(super) fn empty_object() -> Value {
    json!({})
}

fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::<u64>::deserialize(value).map(Some)
}

/// Returns an error of the extension.
pub(super) fn event_error(code: i32, message: impl Into<String>, data: Value) -> ErrorData {
    ErrorData::new(ErrorCode(code), message.into(), Some(data))
}

/// Handles a request of the extension. Returns `None` for any other method.
pub(crate) async fn handle(
    shared: &McpTransportState,
    view: &CallerView,
    request: &CustomRequest,
) -> Option<Result<CustomResult, ErrorData>> {
    let result = match request.method.as_str() {
        "events/list" => Ok(list_events()),
        "events/poll" => poll(shared, view, request).await,
        "events/subscribe" => subscribe(shared, view, request).await,
        "events/unsubscribe" => unsubscribe(shared, view, request).await,
        _ => return None,
    };
    Some(result.map(|mut result| {
        result["resultType"] = "complete".into();
        CustomResult::new(result)
    }))
}

pub(super) fn parse<T: DeserializeOwned>(request: &CustomRequest) -> Result<T, ErrorData> {
    let params = request.params.clone().unwrap_or_default();
    serde_json::from_value(params).map_err(|problem| {
        let message = format!("the params of {} cannot be read: {problem}", request.method);
        ErrorData::invalid_params(message, None)
    })
}

pub(super) fn parse_event(
    name: &str,
    arguments: &Value,
) -> Result<(EventType, EventFilter), ErrorData> {
    let kind = EventType::parse(name).ok_or_else(|| {
        let excerpt: String = name.chars().take(80).collect();
        let message = format!("there is no event \"{excerpt}\"");
        event_error(error_code::NOT_FOUND, message, json!({ "kind": "event" }))
    })?;
    let filter = serde_json::from_value(arguments.clone()).map_err(|problem| {
        ErrorData::invalid_params(format!("arguments of {name}: {problem}"), None)
    })?;
    Ok((kind, filter))
}

pub(super) fn parse_cursor(cursor: Option<&str>) -> Result<Option<u64>, ErrorData> {
    let parsed = cursor.map(str::parse).transpose();
    parsed.map_err(|_| ErrorData::invalid_params("this cursor is not valid", None))
}

fn list_events() -> Value {
    let events: Vec<Value> = EventType::ALL.into_iter().map(EventType::describe).collect();
    json!({ "events": events })
}

/// Returns the events after a cursor; without one, a cursor for the events from now on. Waits for
/// an event if there is none and the MCP client allows it.
async fn poll(
    shared: &McpTransportState,
    view: &CallerView,
    request: &CustomRequest,
) -> Result<Value, ErrorData> {
    let params: PollParams = parse(request)?;
    let (kind, filter) = parse_event(&params.name, &params.arguments)?;
    let filter = filter.with_max_age(params.max_age_ms);
    let (engine, caller) = (&shared.engine, &view.caller);
    let limit = params.max_events.unwrap_or(DEFAULT_MAX_EVENTS).clamp(1, MAX_EVENTS);
    let cursor = parse_cursor(params.cursor.as_deref())?;
    let mut position = match cursor {
        Some(position) => position,
        None => kind.newest(engine, caller).await.map_err(tool_result::protocol_error)?,
    };
    let (mut events, mut has_more, mut truncated) = (Vec::new(), false, false);
    let now = tokio::time::Instant::now();
    let wait = cursor.map_or(0, |_| params.timeout_ms.min(MAX_POLL_WAIT_MS));
    let wait_end = now + Duration::from_millis(wait);
    let mut is_waiting = cursor.is_none();
    loop {
        let page = match is_waiting {
            false => kind.read_page(engine, caller, &filter, position).await,
            true if wait == 0 => break,
            true => {
                let waiting = kind.wait_for_page(engine, caller, &filter, position);
                let Ok(page) = tokio::time::timeout_at(wait_end, waiting).await else { break };
                match page.transpose() {
                    Some(page) => page,
                    None => break,
                }
            }
        };
        let page = page.map_err(tool_result::protocol_error)?;
        truncated |= page.skipped;
        for (number, occurrence) in page.occurrences {
            if events.len() == limit {
                has_more = true;
                break;
            }
            position = number;
            events.push(occurrence);
        }
        if has_more {
            break;
        }
        position = page.position;
        is_waiting |= page.is_last;
        if is_waiting && !events.is_empty() {
            break;
        }
        // The remaining events may concern this caller, and another poll reads them.
        if !is_waiting && (events.len() == limit || now.elapsed() > POLL_TIMEOUT) {
            has_more = true;
            break;
        }
    }
    Ok(json!({
        "events": events, "cursor": position.to_string(), "truncated": truncated,
        "hasMore": has_more, "nextPollMs": POLL_INTERVAL_MS,
    }))
}

/// Creates or refreshes a subscription, once its receiver has confirmed that it accepts messages.
async fn subscribe(
    shared: &McpTransportState,
    view: &CallerView,
    request: &CustomRequest,
) -> Result<Value, ErrorData> {
    let params: SubscribeParams = parse(request)?;
    let (kind, _) = parse_event(&params.name, &params.arguments)?;
    let max_age_ms = params.max_age_ms;
    if let Some(mode) = params.delivery.mode.as_deref().filter(|mode| *mode != "webhook") {
        let data = json!({ "feature": "deliveryMode", "value": mode });
        return Err(event_error(error_code::UNSUPPORTED, "only webhooks are subscribed to", data));
    }
    let caller = &view.caller;
    require_principal(view)?;
    let secret = params.delivery.secret.as_deref().unwrap_or_default();
    if parse_secret(secret).is_none() {
        let message = "delivery.secret must be whsec_ and 24 to 64 bytes in base64";
        return Err(ErrorData::invalid_params(message, None));
    }
    let events = &shared.events;
    let url = events
        .sender
        .check_url(&params.delivery.url)
        .map_err(|reason| ErrorData::invalid_params(format!("delivery.url {reason}"), None))?;
    let mut record = EventSubscriptionRecord::new(
        caller,
        &params.name,
        params.arguments,
        url,
        secret.to_owned(),
    );
    let id = record.id(caller);
    let earlier = events.find(&id);
    if earlier.is_none() && events.count(&caller.project) >= MAX_SUBSCRIPTIONS {
        let data = json!({ "limit": "subscriptions", "max": MAX_SUBSCRIPTIONS });
        let message = "the project has too many subscriptions to events";
        return Err(event_error(error_code::RESOURCE_EXHAUSTED, message, data));
    }
    verify_receiver(events, caller, &record, &id).await?;
    record.position = match (&earlier, parse_cursor(params.cursor.as_deref())?) {
        // Delivery continues from its present position.
        (Some((earlier, _)), _) => earlier.position,
        (None, Some(position)) => position,
        (None, None) => {
            let newest = kind.newest(&shared.engine, caller).await;
            newest.map_err(tool_result::protocol_error)?
        }
    };
    let now_ms = u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default();
    if let Some((earlier, _)) = &earlier {
        record.keep_secret_of(earlier, now_ms);
    }
    record.expires_ms = match params.ttl_ms {
        Some(None) => None,
        Some(Some(ttl_ms)) => Some(now_ms + ttl_ms.clamp(60_000, MAX_TTL_MS)),
        None => Some(now_ms + DEFAULT_TTL_MS),
    };
    record.not_before_ms = max_age_ms.map(|age_ms| (now_ms as i64).saturating_sub_unsigned(age_ms));
    let (position, expires_ms) = (record.position, record.expires_ms);
    events.put(&caller.project, &id, record).await.map_err(tool_result::protocol_error)?;
    let time = |ms: i64| jiff::Timestamp::from_millisecond(ms).unwrap_or_default().to_string();
    let mut result = json!({
        "id": id, "refreshBefore": expires_ms.map(|ms| time(ms as i64)),
        "cursor": position.to_string(), "truncated": false,
    });
    if let Some((_, status)) = earlier {
        result["deliveryStatus"] = json!({
            "active": true,
            "lastDeliveryAt": status.last_delivery_ms.map(time),
            "lastError": status.last_error.map(|problem| problem.as_str()),
        });
    }
    Ok(result)
}

/// Asks the receiver of a subscription to confirm that it accepts messages, unless it did before.
async fn verify_receiver(
    events: &EventSubscriptions,
    caller: &Caller,
    record: &EventSubscriptionRecord,
    id: &str,
) -> Result<(), ErrorData> {
    if events.is_verified(caller, &record.url) {
        return Ok(());
    }
    let receiver = EventReceiver {
        url: &record.url,
        secret: &record.secret,
        previous_secret: None,
        subscription_id: id,
    };
    events.sender.verify(&receiver).await.map_err(|problem| {
        let message = "the URL did not confirm that it wants messages";
        let data = json!({ "reason": problem.as_str() });
        event_error(error_code::CALLBACK_ENDPOINT, message, data)
    })
}

/// Refuses a caller without credentials: its subscriptions would be those of every caller.
fn require_principal(view: &CallerView) -> Result<(), ErrorData> {
    if view.caller.auth_method != AuthMethod::Anonymous && view.caller.may_invoke() {
        return Ok(());
    }
    let message = "a subscription needs a key or token that may call tools";
    Err(event_error(error_code::FORBIDDEN, message, Value::Null))
}

async fn unsubscribe(
    shared: &McpTransportState,
    view: &CallerView,
    request: &CustomRequest,
) -> Result<Value, ErrorData> {
    let params: SubscribeParams = parse(request)?;
    require_principal(view)?;
    let (caller, url) = (&view.caller, params.delivery.url.clone());
    let url = shared.events.sender.check_url(&url).unwrap_or(url);
    let secret = String::new();
    let record = EventSubscriptionRecord::new(caller, &params.name, params.arguments, url, secret);
    let id = record.id(caller);
    let removed = shared.events.remove(&caller.project, &id).await;
    match removed.map_err(tool_result::protocol_error)? {
        true => Ok(json!({})),
        false => {
            let message = "there is no such subscription";
            Err(event_error(error_code::NOT_FOUND, message, json!({ "kind": "subscription" })))
        }
    }
}
