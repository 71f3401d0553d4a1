//! What a tool wants to know before it goes on, put to the client, and its answers.
//!
//! A call that waits for answers can be answered by whoever may call tools, over any door. A client
//! of 2026-07-28 is given the questions and asks again with the answers; the ticket is what it has
//! to bring along, and is worth nothing to anybody else. A client of an older revision is asked
//! while it waits. Nobody is asked for what they did not say that they can answer.

use rmcp::model::{
    CallToolRequestParams, ClientCapabilities, InputRequest, InputRequests, InputResponses,
    ServerRequest,
};
use rmcp::service::Peer;
use rmcp::{ErrorData, RoleServer};
use serde_json::{Map, Value};
use toolcrib::call::{Call, Hold};
use toolcrib::{CallId, Code, Ticket};

use super::answer;
use super::server::{Server, View};

/// The open questions that this client can answer.
pub(super) fn questions(call: &Call, client: &ClientCapabilities) -> InputRequests {
    if call.hold != Some(Hold::Input) {
        return InputRequests::new();
    }
    let open = call.dialogue.iter().flat_map(|dialogue| &dialogue.open);
    let asked = open.filter_map(|(key, question)| {
        let request = serde_json::from_value::<InputRequest>(question.clone()).ok()?;
        can_answer(client, &request).then(|| (key.clone(), request))
    });
    asked.collect()
}

fn can_answer(client: &ClientCapabilities, request: &InputRequest) -> bool {
    match request {
        InputRequest::Elicitation(_) => client.elicitation.is_some(),
        InputRequest::CreateMessage(_) => client.sampling.is_some(),
        InputRequest::ListRoots(_) => client.roots.is_some(),
        _ => false,
    }
}

/// What the client must bring along: the ticket, and which round of questions it is about. There is
/// nothing in it to protect; what it names is looked up among the caller's own calls.
pub(super) fn state(call: &Call) -> String {
    format!("{}.{}", call.id, call.attempt)
}

/// Answers as they were given, each an object.
pub(super) fn answers(given: InputResponses) -> Result<Map<String, Value>, ErrorData> {
    if let Some((key, _)) = given.iter().find(|(_, answer)| !answer.is_object()) {
        let shown: String = key.chars().take(80).collect();
        let message = format!("the answer to \"{shown}\" must be an object");
        return Err(ErrorData::invalid_params(message, None));
    }
    Ok(given.into_iter().collect())
}

/// Goes on with a call that had asked: the same caller, the same tool, the ticket as it was given.
pub(super) async fn go_on(
    server: &Server,
    view: &View,
    asked: CallToolRequestParams,
    state: &str,
) -> Result<Ticket, ErrorData> {
    let unknown = || ErrorData::invalid_params("this requestState is not one that was given", None);
    let (id, round) = state.split_once('.').ok_or_else(unknown)?;
    let id: CallId = id.parse().map_err(|_| unknown())?;
    let round: u32 = round.parse().map_err(|_| unknown())?;
    let engine = server.engine();
    let ticket = match engine.ticket(&view.caller, &id).await {
        Ok(ticket) => ticket,
        Err(error) if error.code() == Code::NotFound => return Err(unknown()),
        Err(error) => return Err(answer::protocol_error(error)),
    };
    let call = &ticket.call;
    if call.tool_name != asked.name || call.asked.agent != view.caller.agent {
        return Err(unknown());
    }
    let answers = answers(asked.input_responses.unwrap_or_default())?;
    // Answers to a round that is over have been given before: the client sees what came of them.
    let asks = call.hold == Some(Hold::Input) && call.attempt == round;
    if asks && !answers.is_empty() {
        give(server, view, &id, answers).await?;
    }
    engine.ticket(&view.caller, &id).await.map_err(answer::protocol_error)
}

/// Gives answers to a call. One that does not wait for them any more is left alone.
pub(super) async fn give(
    server: &Server,
    view: &View,
    id: &CallId,
    answers: Map<String, Value>,
) -> Result<(), ErrorData> {
    match server.engine().answer(&view.caller, id, answers).await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Code::Conflict => Ok(()),
        Err(error) => Err(answer::protocol_error(error)),
    }
}

/// Puts the questions to a client of an older revision, one after the other. None when it did not
/// answer one of them.
pub(super) async fn ask(
    peer: &Peer<RoleServer>,
    questions: InputRequests,
) -> Option<Map<String, Value>> {
    let mut answers = Map::new();
    for (key, question) in questions {
        let request = match question {
            InputRequest::Elicitation(request) => ServerRequest::ElicitRequest(request),
            InputRequest::CreateMessage(request) => ServerRequest::CreateMessageRequest(request),
            InputRequest::ListRoots(request) => ServerRequest::ListRootsRequest(request),
            _ => return None,
        };
        let answer = peer.send_request(request).await.ok()?;
        answers.insert(key, serde_json::to_value(answer).ok()?);
    }
    Some(answers)
}
