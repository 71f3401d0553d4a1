//! Webhook deliveries: their status and attempts, and redelivery.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use toolcrib::domain::delivery::{Delivery, DeliveryAttempt, DeliveryStatus};
use toolcrib::webhooks::DeliveryQuery;
use utoipa::{IntoParams, ToSchema};

use super::super::HttpState;
use super::calls::parse_page;
use crate::http::extract::{AuthenticatedCaller, CallPath, QueryParams, invalid_parameter};
use crate::http::pagination;
use crate::http::problem::{ApiError, ProblemDetails};

/// The delivery of one call's outcome to its `callback_url`.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DeliveryBody {
    /// The `webhook-id` header of every attempt.
    webhook_id: String,
    tool_call_id: String,
    /// The same as `tool_call_id`.
    task_id: String,
    url: String,
    /// `waiting` (for the call to end), `pending`, `delivered`, `gone` or `exhausted`.
    status: &'static str,
    /// Number of attempts so far.
    tries: u32,
    /// Time of the next attempt, while `pending`.
    next_try_at_ms: Option<u64>,
    /// Error of the last try.
    last_error: Option<String>,
    /// The last attempts, up to 100. Omitted in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<Vec<TryBody>>,
}

/// One try.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TryBody {
    /// Number of the try, from 1.
    number: u32,
    at_ms: u64,
    duration_ms: u64,
    /// HTTP status of the receiver's response, if there was one.
    status_code: Option<u16>,
    /// Reason the try failed.
    error: Option<String>,
}

impl DeliveryBody {
    fn new(delivery: &Delivery, log: Option<Vec<DeliveryAttempt>>) -> Self {
        let to_body = |tried: DeliveryAttempt| TryBody {
            number: tried.number,
            at_ms: tried.at_ms,
            duration_ms: tried.duration_ms,
            status_code: tried.status_code,
            error: tried.error,
        };
        Self {
            webhook_id: delivery.message_id(),
            tool_call_id: delivery.call_id.to_string(),
            task_id: delivery.call_id.to_string(),
            url: delivery.url.clone(),
            status: delivery.status.as_str(),
            tries: delivery.attempts,
            next_try_at_ms: delivery.due_ms,
            last_error: delivery.last_error.clone(),
            log: log.map(|tries| tries.into_iter().map(to_body).collect()),
        }
    }
}

/// A page of deliveries, those of the newest calls first.
#[derive(Serialize, ToSchema)]
pub(super) struct DeliveryList {
    deliveries: Vec<DeliveryBody>,
    /// Cursor of the next page; null on the last page.
    next_cursor: Option<String>,
}

/// Filters of the delivery list.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DeliveryListQuery {
    /// Only deliveries in this status: `waiting`, `pending`, `delivered`, `gone` or `exhausted`.
    status: Option<String>,
    /// Maximum number of deliveries, 1 to 200 (default: 50).
    limit: Option<u64>,
    /// `next_cursor` of the previous page.
    cursor: Option<String>,
}

/// Lists the deliveries of the project's calls that the caller may read, those of the newest calls
/// first.
#[utoipa::path(get, path = "/v1/deliveries", tag = "agents", params(DeliveryListQuery),
    responses((status = 200, body = DeliveryList), (status = 403, body = ProblemDetails),
        (status = 422, body = ProblemDetails)))]
pub(super) async fn list(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    QueryParams(listing): QueryParams<DeliveryListQuery>,
) -> Result<Response, ApiError> {
    let status = match listing.status.as_deref() {
        None | Some("") => None,
        Some(word) => Some(word.to_lowercase().parse().map_err(|()| {
            let statuses = DeliveryStatus::ALL.map(DeliveryStatus::as_str).join(", ");
            invalid_parameter("status", format!("status must be one of {statuses}"))
        })?),
    };
    let (before, limit) = parse_page(listing.cursor.as_deref(), listing.limit)?;
    let query = DeliveryQuery { status, before, limit };
    let page = state.engine.webhooks().deliveries(&caller, query).await?;
    let deliveries =
        page.deliveries.iter().map(|delivery| DeliveryBody::new(delivery, None)).collect();
    let next_cursor = page.next_before.map(|id| id.to_string());
    let list = DeliveryList { deliveries, next_cursor: next_cursor.clone() };
    Ok(pagination::page_response(list, next_cursor))
}

/// Returns the delivery of a call's outcome, with its attempts; empty without a `callback_url`.
#[utoipa::path(get, path = "/v1/tool_calls/{tool_call_id}/deliveries", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    responses((status = 200, body = DeliveryList), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails)))]
pub(super) async fn call_deliveries(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
) -> Result<Json<DeliveryList>, ApiError> {
    let found = state.engine.webhooks().delivery(&caller, &id).await?;
    let deliveries = found.map(|(delivery, tries)| DeliveryBody::new(&delivery, Some(tries)));
    Ok(Json(DeliveryList { deliveries: deliveries.into_iter().collect(), next_cursor: None }))
}

/// Redelivers at once, regardless of the present status, and restarts the retry schedule.
#[utoipa::path(post, path = "/v1/tool_calls/{tool_call_id}/deliveries/repeat", tag = "agents",
    params(("tool_call_id" = String, Path, description = "The ticket")),
    responses((status = 202, body = DeliveryBody), (status = 403, body = ProblemDetails),
        (status = 404, body = ProblemDetails),
        (status = 409, description = "The call has not ended", body = ProblemDetails)))]
pub(super) async fn repeat(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
    CallPath(id): CallPath,
) -> Result<(StatusCode, Json<DeliveryBody>), ApiError> {
    let delivery = state.engine.webhooks().redeliver(&caller, &id).await?;
    Ok((StatusCode::ACCEPTED, Json(DeliveryBody::new(&delivery, None))))
}
