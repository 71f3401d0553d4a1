//! Tools: listing, showing, calling.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use toolcrib::Invocation;
use toolcrib::fault::{Code, Error};
use utoipa::{IntoParams, ToSchema};

use super::super::Door;
use super::super::answer::{Problem, Refused};
use super::super::question::{Asked, Body, NamePath, Who};
use super::super::wire::{CallBody, ToolBody, timeout_ms};

/// The tools the caller may call.
#[derive(Serialize, ToSchema)]
pub(super) struct ToolList {
    tools: Vec<ToolBody>,
}

/// Lists the tools the caller may call, by name.
#[utoipa::path(get, path = "/v1/tools", tag = "agents",
    responses((status = 200, body = ToolList), (status = 401, body = Problem)))]
pub(super) async fn list(State(door): State<Door>, Who(caller): Who) -> Json<ToolList> {
    let tools = door.engine.tools(&caller);
    Json(ToolList { tools: tools.iter().map(|entry| ToolBody::from(entry.as_ref())).collect() })
}

/// Shows one tool.
#[utoipa::path(get, path = "/v1/tools/{name}", tag = "agents",
    params(("name" = String, Path, description = "The tool's name")),
    responses((status = 200, body = ToolBody), (status = 404, body = Problem)))]
pub(super) async fn show(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
) -> Result<Json<ToolBody>, Refused> {
    let entry = door.engine.tool(&caller, &name)?;
    Ok(Json(ToolBody::from(entry.as_ref())))
}

/// What to call the tool with.
#[derive(Deserialize, ToSchema)]
pub(super) struct InvokeBody {
    /// The run this call belongs to.
    run_id: String,
    /// The arguments, as the tool's schema says.
    #[serde(default = "toolcrib::Json::empty_object")]
    #[schema(value_type = Object)]
    args: toolcrib::Json,
    /// The caller's own id for this call; shown with it, never compared.
    call_id: Option<String>,
    /// How long until there must be an outcome: 1 to 86400000.
    #[serde(default, deserialize_with = "timeout_ms")]
    timeout_ms: Option<u64>,
    /// How many attempts may follow the first.
    retry: Option<u32>,
    /// The same key with the same request gives the same ticket. Also as the header
    /// `Idempotency-Key`.
    idempotency_key: Option<String>,
    /// Only this client may execute it.
    client_id: Option<String>,
    /// A label for people; it decides nothing.
    user_id: Option<String>,
    /// Wait this long for the outcome. Also as a query parameter.
    wait_ms: Option<u64>,
}

/// A ticket.
#[derive(Serialize, ToSchema)]
pub(super) struct TicketBody {
    tool_call_id: String,
    /// `pending`.
    status: &'static str,
    message: &'static str,
}

/// How long to wait.
#[derive(Deserialize, IntoParams)]
pub(super) struct Wait {
    /// Wait this long for the outcome, then answer with the call as it is.
    pub(super) wait_ms: Option<u64>,
}

/// Calls a tool. The answer is a ticket; with `wait_ms`, it is the call as it is when it has ended
/// or the time is over.
#[utoipa::path(post, path = "/v1/tools/{name}/invoke", tag = "agents",
    params(
        ("name" = String, Path, description = "The tool's name"),
        Wait,
        ("Idempotency-Key" = Option<String>, Header, description = "Same key, same ticket")
    ),
    request_body = InvokeBody,
    responses(
        (status = 202, description = "The ticket; with wait_ms the call itself", body = TicketBody),
        (status = 400, body = Problem), (status = 403, body = Problem),
        (status = 404, body = Problem), (status = 413, body = Problem),
        (status = 422, body = Problem), (status = 429, body = Problem),
        (status = 503, body = Problem)
    ))]
pub(super) async fn invoke(
    State(door): State<Door>,
    Who(caller): Who,
    NamePath(name): NamePath,
    Asked(wait): Asked<Wait>,
    headers: HeaderMap,
    Body(body): Body<InvokeBody>,
) -> Result<Response, Refused> {
    let wait_ms = wait.wait_ms.or(body.wait_ms);
    let invocation = Invocation {
        tool: name,
        args: body.args,
        run_id: body.run_id,
        call_id: body.call_id,
        timeout_ms: body.timeout_ms,
        retry: body.retry,
        idempotency_key: idempotency_key(&headers, body.idempotency_key)?,
        client_id: body.client_id,
        user_id: body.user_id,
        traceparent: None,
        turn: None,
    };
    // Boxed, because this handler's future is moved several times on its way into the router.
    let ticket = Box::pin(door.engine.invoke(&caller, invocation)).await?;
    let id = ticket.call.id.clone();
    let mut answer = match wait_ms {
        None | Some(0) => {
            let body = TicketBody {
                tool_call_id: id.to_string(),
                status: "pending",
                message: "tool call created, use tool_call_id to poll result",
            };
            (StatusCode::ACCEPTED, Json(body)).into_response()
        }
        Some(wait_ms) => {
            let call = Box::pin(door.engine.outcome(&caller, &ticket, wait_ms)).await?;
            (StatusCode::ACCEPTED, Json(CallBody::from(call.as_ref()))).into_response()
        }
    };
    let headers = answer.headers_mut();
    if let Ok(place) = HeaderValue::from_str(&format!("/v1/tool_calls/{id}")) {
        headers.insert(header::LOCATION, place);
    }
    if ticket.replayed {
        headers.insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    Ok(answer)
}

/// The key from the header or the body; where both are given they must be the same.
fn idempotency_key(headers: &HeaderMap, body: Option<String>) -> Result<Option<String>, Refused> {
    let Some(header) = headers.get("idempotency-key") else { return Ok(body) };
    let invalid = |message: &str| Error::refused(Code::BadRequest, message);
    let key = header.to_str().map_err(|_| invalid("Idempotency-Key must be visible ASCII"))?;
    if key.is_empty() || key.len() > 255 {
        return Err(invalid("Idempotency-Key must be 1 to 255 characters").into());
    }
    if body.as_ref().is_some_and(|body| body != key) {
        let message = "Idempotency-Key and idempotency_key are different";
        return Err(invalid(message).into());
    }
    Ok(Some(key.to_owned()))
}
