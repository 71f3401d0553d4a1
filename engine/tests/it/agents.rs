//! Tests of agents as tools: runs of their own, results, budgets, trees and restarts.

mod boxes;
mod budgets;
mod definitions;
mod ends;
mod loops;
mod wakeups;
mod worker_rights;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use toolcrib::calls::{CallQuery, Until};
use toolcrib::domain::agent::{AgentDefinition, AgentLimits, AgentProfile, OnParentEnd};
use toolcrib::domain::model_reply::{FinishReason, ModelReply, TokenUsage};
use toolcrib::domain::run::{Run, RunStatus};
use toolcrib::ports::model::{DeltaListener, Model, ModelError, ModelRequest};
use toolcrib::ports::store::MemoryStore;
use toolcrib::runs::{RunRequest, RunTreeNode};
use toolcrib::{Call, CallRequest, Caller, Code, Engine, Json, Status};

use crate::script::{SingleModel, tool_call_request};

/// A reply that depends on the request: many runs use one model at the same time.
type Reply = Box<dyn Fn(&ModelRequest) -> BoxFuture<'static, ModelReply> + Send + Sync>;

struct AgentModel(Reply);

#[async_trait]
impl Model for AgentModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        _: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        Ok((self.0)(prompt).await)
    }
}

fn caller() -> Caller {
    Caller::local("default")
}

/// The system prompt of a request, which tells the agents apart.
fn role(prompt: &ModelRequest) -> String {
    let first = &prompt.messages[0];
    let text = if first["role"] == "system" { first["content"].as_str() } else { None };
    text.unwrap_or("root").lines().next().unwrap_or_default().to_owned()
}

fn tool_results(prompt: &ModelRequest) -> Vec<String> {
    let messages = prompt.messages.iter().filter(|message| message["role"] == "tool");
    messages.map(|message| message["content"].as_str().unwrap_or_default().to_owned()).collect()
}

fn says(text: impl Into<String>) -> ModelReply {
    let usage = TokenUsage { prompt_tokens: 10, completion_tokens: 5 };
    ModelReply { text: text.into(), usage, ..ModelReply::default() }
}

fn calls(names: &[&str]) -> ModelReply {
    let numbered = names.iter().enumerate().map(|(n, name)| {
        let arguments = json!({ "instruction": format!("part {n}") }).to_string();
        tool_call_request(&(&format!("c{n}"), name, &arguments))
    });
    ModelReply { calls: numbered.collect(), finish_reason: FinishReason::ToolCalls, ..says("") }
}

fn agent(id: &str) -> AgentDefinition {
    let profile = AgentProfile { instructions: id.to_owned(), ..AgentProfile::default() };
    AgentDefinition { agent_id: id.to_owned(), profile, ..AgentDefinition::default() }
}

fn with_limits(id: &str, limits: AgentLimits) -> AgentDefinition {
    let mut definition = agent(id);
    definition.profile.limits = limits;
    definition
}

async fn engine_with(
    store: &Arc<MemoryStore>,
    agents: Vec<AgentDefinition>,
    reply: impl Fn(&ModelRequest) -> BoxFuture<'static, ModelReply> + Send + Sync + 'static,
) -> Engine {
    let model = SingleModel(Arc::new(AgentModel(Box::new(reply))));
    let builder = Engine::builder().store(store.clone()).models(Arc::new(model));
    let builder = builder.with_run_finish_tool();
    let engine = builder.start().await.unwrap();
    for agent in agents {
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
    }
    engine
}

fn ready(reply: ModelReply) -> BoxFuture<'static, ModelReply> {
    Box::pin(std::future::ready(reply))
}

async fn call_agent(engine: &Engine, agent: &str, args: Value) -> Arc<Call> {
    let request = CallRequest::of(format!("agent.{agent}"), Json::from_value(&args));
    let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
    engine.calls().wait(&caller(), &ticket, Until::EndedWithin(20_000)).await.unwrap()
}

async fn start_run(engine: &Engine, request: RunRequest) -> String {
    let request = RunRequest {
        model: "scripted".into(),
        messages: vec![json!({ "role": "user", "content": "go" })],
        ..request
    };
    engine.runs().start_run(&caller(), request).await.unwrap().run.id
}

async fn wait_for_end(engine: &Engine, run_id: &str) -> Run {
    let run = engine.runs().wait_for_run(&caller(), run_id, 30_000).await.unwrap();
    assert!(run.status.is_terminal(), "{run:?}");
    run
}

fn answer_of(run: &Run) -> &str {
    run.answer.as_ref().map_or("", |answer| answer.text.as_str())
}

/// Waits until a condition holds.
async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let give_up = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = probe().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < give_up, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn nodes(node: &RunTreeNode) -> Vec<&RunTreeNode> {
    std::iter::once(node).chain(node.children.iter().flat_map(nodes)).collect()
}

#[tokio::test]
async fn an_agent_is_a_tool_whose_result_is_its_answer() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("writer")], |prompt| {
        let task = prompt.messages[1]["content"].as_str().unwrap().to_owned();
        ready(says(format!("{}: {task}", role(prompt))))
    })
    .await;
    let tool = engine.registry().tool(&caller(), "agent.writer").unwrap();
    assert_eq!(tool.definition.executor.as_str(), "agent");
    let args = json!({ "instruction": "greet", "context": { "name": "Ada" } });
    let call = call_agent(&engine, "writer", args).await;
    assert_eq!(call.status, Status::Succeeded, "{call:?}");
    let data = call.outcome.as_ref().unwrap().data.as_ref().unwrap().to_value();
    assert_eq!(data["answer"], "writer: greet\n\nContext:\n{\"name\":\"Ada\"}");
    let run = wait_for_end(&engine, data["run_id"].as_str().unwrap()).await;
    let lineage = run.lineage.as_deref().unwrap();
    assert_eq!((lineage.call_id.clone(), lineage.depth), (call.id.clone(), 1));
    assert_eq!(lineage.root_run_id, run.id);
}

#[tokio::test]
async fn the_agents_of_one_reply_work_side_by_side_and_form_a_tree() {
    let store = Arc::default();
    let barrier = Arc::new(tokio::sync::Barrier::new(3));
    let agents = vec![agent("a"), agent("b"), agent("c")];
    let engine = engine_with(&store, agents, move |prompt| {
        let (role, results) = (role(prompt), tool_results(prompt));
        let barrier = barrier.clone();
        Box::pin(async move {
            if role != "root" {
                barrier.wait().await;
                return says(format!("{role} is done"));
            }
            match results.is_empty() {
                true => calls(&["agent__a", "agent__b", "agent__c"]),
                false => says(results.join(" | ")),
            }
        })
    })
    .await;
    let id = start_run(&engine, RunRequest::default()).await;
    let run = wait_for_end(&engine, &id).await;
    for name in ["a is done", "b is done", "c is done"] {
        assert!(answer_of(&run).contains(name), "{run:?}");
    }
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    assert_eq!((tree.run_count, tree.open_count), (4, 0));
    assert_eq!(tree.node.children.len(), 3);
    assert_eq!(tree.node.total.tokens, 30 + 3 * 15);
    let child = tree.node.children[0].run().unwrap();
    let part = engine.runs().trees().find_tree(&caller(), &child.id).await.unwrap();
    assert_eq!((part.root_run_id.as_str(), part.run_count), (id.as_str(), 1));
}

#[tokio::test]
async fn a_child_continues_the_trace_of_its_caller() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("a")], |prompt| {
        let is_root = role(prompt) == "root" && tool_results(prompt).is_empty();
        ready(if is_root { calls(&["agent__a"]) } else { says("done") })
    })
    .await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let traceparent = Some(format!("00-{trace}-00f067aa0ba902b7-01"));
    let id = start_run(&engine, RunRequest { traceparent, ..RunRequest::default() }).await;
    wait_for_end(&engine, &id).await;
    let tree = engine.runs().trees().find_tree(&caller(), &id).await.unwrap();
    let child = tree.node.children[0].run().unwrap().options.traceparent.clone().unwrap();
    assert_eq!(child.split('-').nth(1), Some(trace));
}

/// Returns the error of an agent whose only tool call failed.
fn failure_of(call: &Call) -> String {
    call.outcome.as_ref().unwrap().error.as_ref().unwrap().to_string()
}

#[tokio::test]
async fn an_agent_that_would_wait_for_itself_is_refused() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], |prompt| {
        let results = tool_results(prompt);
        ready(match (role(prompt).as_str(), results.is_empty()) {
            ("a", true) => calls(&["agent__b"]),
            ("b", true) => calls(&["agent__a"]),
            _ => says(results.join(" | ")),
        })
    })
    .await;
    let call = call_agent(&engine, "a", json!({ "instruction": "x" })).await;
    let data = failure_of(&call);
    assert!(data.contains("would wait for itself (a → b → a)"), "{data}");
}

#[tokio::test]
async fn depth_is_capped_with_a_message_for_the_model() {
    let store = Arc::default();
    // Each agent calls the next one.
    let agents: Vec<AgentDefinition> = (0..22).map(|n| agent(&format!("n{n}"))).collect();
    let engine = engine_with(&store, agents, |prompt| {
        let results = tool_results(prompt);
        let next = role(prompt)[1..].parse::<u32>().unwrap_or_default() + 1;
        ready(match results.is_empty() {
            true => calls(&[&format!("agent__n{next}")]),
            false => {
                // Only the message of the deepest agent, not the results around it.
                let at = results[0].find("at depth").unwrap_or_default();
                says(results[0][at..].chars().take(60).collect::<String>())
            }
        })
    })
    .await;
    let call = call_agent(&engine, "n0", json!({ "instruction": "x" })).await;
    let data = failure_of(&call);
    assert!(data.contains("at depth 20, and the maximum here is 19"), "{data}");
    let mut limited = agent("n0");
    limited.profile.limits.depth = Some(1);
    engine.roster().define_agent(&caller(), limited, None).await.unwrap();
    let call = call_agent(&engine, "n0", json!({ "instruction": "x" })).await;
    let data = failure_of(&call);
    assert!(data.contains("at depth 3, and the maximum here is 2"), "{data}");
}

#[tokio::test]
async fn result_fields_make_the_result_typed() {
    let store = Arc::default();
    let mut definition = agent("judge");
    definition.profile.result_fields =
        serde_json::from_value(json!(["verdict", { "name": "score", "type": "number" }])).unwrap();
    let engine = engine_with(&store, vec![definition], |prompt| {
        let task = prompt.messages[1]["content"].as_str().unwrap().to_owned();
        ready(says(match task.as_str() {
            "good" => "Here it is:\n```json\n{\"verdict\": \"yes\", \"score\": 7}\n```",
            "wrong type" => r#"{"verdict": "yes", "score": "high"}"#,
            "missing" => r#"{"score": 1}"#,
            _ => "I think so.",
        }))
    })
    .await;
    let tool = engine.registry().tool(&caller(), "agent.judge").unwrap();
    let schema = tool.definition.output_schema.as_ref().unwrap().to_value();
    assert_eq!(schema["required"], json!(["verdict", "score"]));
    let call = call_agent(&engine, "judge", json!({ "instruction": "good" })).await;
    let data = call.outcome.as_ref().unwrap().data.as_ref().unwrap().to_value();
    assert_eq!(data, json!({ "verdict": "yes", "score": 7 }));
    for (task, expected) in [
        ("wrong type", "score is not of type number"),
        ("missing", "verdict is missing"),
        ("text", "no JSON object with the fields verdict, score; it begins: I think so."),
    ] {
        let call = call_agent(&engine, "judge", json!({ "instruction": task })).await;
        assert_eq!(call.status, Status::Failed, "{task}");
        let fault = call.outcome.as_ref().unwrap().error.clone().unwrap();
        assert_eq!(fault.code, Code::ValidationError);
        assert!(fault.message.contains(expected), "{}", fault.message);
    }
}
