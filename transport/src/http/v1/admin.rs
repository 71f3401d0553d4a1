//! Clients and the audit log. Requires an admin key, or the operator on the local machine.

pub(super) mod audit;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use toolcrib::Caller;
use utoipa::ToSchema;

use super::super::HttpState;
use crate::http::extract::AuthenticatedCaller;
use crate::http::problem::{ApiError, ProblemDetails};

/// A client that provides tools.
#[derive(Serialize, ToSchema)]
pub(super) struct ClientBody {
    client_id: String,
    connections: usize,
    /// Number of requests that the client has received and not answered.
    in_hand: usize,
    tools: Vec<String>,
    /// Null if the client was not seen since the server started.
    last_seen_ms: Option<u64>,
}

/// The clients of a project.
#[derive(Serialize, ToSchema)]
pub(super) struct ClientList {
    clients: Vec<ClientBody>,
}

/// Lists the registered clients, connected or not.
#[utoipa::path(get, path = "/v1/clients", tag = "operators",
    responses((status = 200, body = ClientList), (status = 403, body = ProblemDetails)))]
pub(super) async fn clients(
    State(state): State<HttpState>,
    AuthenticatedCaller(caller): AuthenticatedCaller,
) -> Result<Json<ClientList>, ApiError> {
    let caller: Caller = caller;
    let clients = state.engine.clients().clients(&caller)?.into_iter().map(|view| ClientBody {
        client_id: view.client_id,
        connections: view.connections,
        in_hand: view.leased,
        tools: view.tools,
        last_seen_ms: view.last_seen_ms,
    });
    Ok(Json(ClientList { clients: clients.collect() }))
}
