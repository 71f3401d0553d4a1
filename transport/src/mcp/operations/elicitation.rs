//! Elicitation: sends a tool's questions to the MCP client and takes its answers.
//!
//! The caller that made a call, or another that may cancel it, answers it over any transport. An
//! MCP client of 2026-07-28 receives the questions and repeats its request with the answers and a
//! `requestState`, which holds the call id and is useless to other callers. A legacy MCP client
//! receives the questions while it waits. An MCP client receives only questions of the kinds that
//! it declared.

use rmcp::model::{
    CallToolRequestParams, ClientCapabilities, ElicitRequestParams, ElicitationCapability,
    InputRequest, InputRequests, InputResponses, ServerRequest,
};
use rmcp::service::{Peer, PeerRequestOptions};
use rmcp::{ErrorData, RoleServer};
use serde_json::{Map, Value, json};
use toolcrib::domain::call::Call;
use toolcrib::{CallId, Code, Ticket};

use crate::elicitation_answers;
use crate::mcp::request::CallerView;
use crate::mcp::state::McpTransportState;
use crate::mcp::tool_result;

/// Returns the unanswered questions that this MCP client can answer.
pub(crate) fn answerable_requests(call: &Call, client: &ClientCapabilities) -> InputRequests {
    if !call.waits_for_input() {
        return InputRequests::new();
    }
    let open = call.elicitation.iter().flat_map(|elicitation| &elicitation.unanswered);
    let params = open.filter_map(|(key, question)| {
        let request = serde_json::from_value::<InputRequest>(question.clone()).ok()?;
        can_answer(client, &request).then(|| (key.clone(), request))
    });
    params.collect()
}

/// Key of the request that shows an approval.
const APPROVAL_KEY: &str = "approval";

/// Returns the request that shows the person at the MCP client which approval the call waits for:
/// its link, if the client opens links and the server knows its own URL, or a form without fields.
/// Another person decides, so an answer decides nothing.
pub(crate) fn approval_requests(
    shared: &McpTransportState,
    call: &Call,
    client: &ClientCapabilities,
) -> InputRequests {
    let (Some(id), Some(can)) = (call.pending_approval(), &client.elicitation) else {
        return InputRequests::new();
    };
    let link = shared.engine.approvals().link(id);
    let message = tool_result::approval_message(call, &link);
    let opens_links = can.url.is_some() && link.contains("://");
    let takes_forms = can.form.is_some() || can.url.is_none();
    let params = match (opens_links, takes_forms) {
        (true, _) => {
            json!({ "mode": "url", "message": message, "url": link, "elicitationId": id })
        }
        (false, true) => {
            let schema = json!({ "type": "object", "properties": {} });
            json!({ "mode": "form", "message": message, "requestedSchema": schema })
        }
        (false, false) => return InputRequests::new(),
    };
    let request = json!({ "method": "elicitation/create", "params": params });
    let request = serde_json::from_value::<InputRequest>(request).ok();
    request.map(|request| (APPROVAL_KEY.to_owned(), request)).into_iter().collect()
}

fn can_answer(client: &ClientCapabilities, request: &InputRequest) -> bool {
    match request {
        InputRequest::Elicitation(params) => client
            .elicitation
            .as_ref()
            .is_some_and(|can| supports_elicitation_mode(can, &params.params)),
        InputRequest::CreateMessage(_) => client.sampling.is_some(),
        InputRequest::ListRoots(_) => client.roots.is_some(),
        _ => false,
    }
}

/// Returns whether the MCP client supports this mode. Form and URL mode are declared separately; a
/// client that declares neither supports forms.
fn supports_elicitation_mode(can: &ElicitationCapability, params: &ElicitRequestParams) -> bool {
    match params {
        ElicitRequestParams::FormElicitationParams { .. } => {
            can.form.is_some() || can.url.is_none()
        }
        ElicitRequestParams::UrlElicitationParams { .. } => can.url.is_some(),
        _ => false,
    }
}

/// Returns the state that the MCP client sends back: the call id and the attempt that needs input.
/// It needs no protection, because it is looked up among the caller's own calls.
pub(crate) fn request_state(call: &Call) -> String {
    format!("{}.{}", call.id, call.attempt)
}

/// Checks that each answer is an object.
pub(crate) fn parse_answers(responses: InputResponses) -> Result<Map<String, Value>, ErrorData> {
    if let Some((key, _)) = responses.iter().find(|(_, answer)| !answer.is_object()) {
        let excerpt: String = key.chars().take(80).collect();
        let message = format!("the answer to \"{excerpt}\" must be an object");
        return Err(ErrorData::invalid_params(message, None));
    }
    Ok(responses.into_iter().collect())
}

/// Resumes a call that asked for input, if the caller, the tool and the call id are those of the
/// original request.
pub(crate) async fn resume_call(
    shared: &McpTransportState,
    view: &CallerView,
    params: CallToolRequestParams,
    state: &str,
) -> Result<Ticket, ErrorData> {
    let unknown = || ErrorData::invalid_params("this requestState is not valid", None);
    let (id, round) = state.split_once('.').ok_or_else(unknown)?;
    let id: CallId = id.parse().map_err(|_| unknown())?;
    let round: u32 = round.parse().map_err(|_| unknown())?;
    let engine = &shared.engine;
    let ticket = match engine.calls().ticket(&view.caller, &id).await {
        Ok(ticket) => ticket,
        Err(error) if error.code() == Code::NotFound => return Err(unknown()),
        Err(error) => return Err(tool_result::protocol_error(error)),
    };
    let call = &ticket.call;
    // The MCP client may use the model-facing name of the tool.
    let is_same = |name: &str| {
        let tool = engine.registry().tool(&view.caller, name);
        name == call.tool_name || tool.is_ok_and(|tool| tool.definition.name == call.tool_name)
    };
    if !is_same(&params.name) || call.origin.agent != view.caller.agent {
        return Err(unknown());
    }
    let answers = parse_answers(params.input_responses.unwrap_or_default())?;
    // Answers to an earlier attempt were submitted before: the MCP client gets the present state.
    let asks = call.waits_for_input() && call.attempt == round;
    if asks && !answers.is_empty() {
        submit_answers(shared, view, &id, answers).await?;
    }
    engine.calls().ticket(&view.caller, &id).await.map_err(tool_result::protocol_error)
}

/// Submits answers to a call. A call that no longer waits for them stays unchanged.
pub(crate) async fn submit_answers(
    shared: &McpTransportState,
    view: &CallerView,
    id: &CallId,
    answers: Map<String, Value>,
) -> Result<(), ErrorData> {
    let engine = &shared.engine;
    let call = engine.calls().call(&view.caller, id).await.map_err(tool_result::protocol_error)?;
    let checked = elicitation_answers::check_answers(&call, &answers).await;
    checked.map_err(tool_result::protocol_error)?;
    match engine.calls().answer_elicitation(&view.caller, id, answers).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Code::Conflict => Ok(()),
        Err(error) => Err(tool_result::protocol_error(error)),
    }
}

/// The outcome of questions that were sent to an MCP client.
pub(crate) enum ElicitationOutcome<W> {
    Answers(Map<String, Value>),
    /// The MCP client did not answer one of the questions.
    Unanswered,
    /// The questions are no longer needed, with the reason.
    Superseded(W),
}

/// Sends the questions to a legacy MCP client, one after the other, until they are superseded.
pub(crate) async fn elicit<W>(
    peer: &Peer<RoleServer>,
    questions: InputRequests,
    pointless: impl Future<Output = W>,
) -> ElicitationOutcome<W> {
    let mut pointless = std::pin::pin!(pointless);
    let mut answers = Map::new();
    for (key, question) in questions {
        let request = match question {
            InputRequest::Elicitation(request) => ServerRequest::ElicitRequest(request),
            InputRequest::CreateMessage(request) => ServerRequest::CreateMessageRequest(request),
            InputRequest::ListRoots(request) => ServerRequest::ListRootsRequest(request),
            _ => return ElicitationOutcome::Unanswered,
        };
        let options = PeerRequestOptions::no_options();
        let Ok(mut params) = peer.send_request_with_option(request, options).await else {
            return ElicitationOutcome::Unanswered;
        };
        let answer = tokio::select! {
            answer = &mut params.rx => answer,
            reason = &mut pointless => {
                // If the MCP client has disconnected, the withdrawal cannot be delivered and the
                // error is ignored.
                let _ = params.cancel(Some("this is no longer needed".to_owned())).await;
                return ElicitationOutcome::Superseded(reason);
            }
        };
        let Ok(Ok(answer)) = answer else { return ElicitationOutcome::Unanswered };
        let Ok(answer) = serde_json::to_value(answer) else {
            return ElicitationOutcome::Unanswered;
        };
        answers.insert(key, answer);
    }
    ElicitationOutcome::Answers(answers)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_mcp_client_gets_only_the_elicitation_modes_it_declared() {
        let input_request = |params: Value| {
            let question = json!({ "method": "elicitation/create", "params": params });
            serde_json::from_value::<InputRequest>(question).unwrap()
        };
        let schema = json!({ "type": "object", "properties": {} });
        let form_question =
            input_request(json!({ "mode": "form", "message": "Who?", "requestedSchema": schema }));
        let address =
            input_request(json!({ "mode": "url", "message": "Sign in", "elicitationId": "e",
            "url": "https://login.example.com" }));
        for (declared, answers_forms, answers_urls) in [
            (json!({}), false, false),
            (json!({ "elicitation": {} }), true, false),
            (json!({ "elicitation": { "form": {} } }), true, false),
            (json!({ "elicitation": { "url": {} } }), false, true),
            (json!({ "elicitation": { "form": {}, "url": {} } }), true, true),
        ] {
            let client: ClientCapabilities = serde_json::from_value(declared.clone()).unwrap();
            assert_eq!(can_answer(&client, &form_question), answers_forms, "{declared}");
            assert_eq!(can_answer(&client, &address), answers_urls, "{declared}");
        }
    }
}
