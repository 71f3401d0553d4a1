//! Tests of the tools that a model receives: few tokens for many tools, the tool search, the modes,
//! and the run's context behind them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use toolcrib::domain::agent::{AgentDefinition, AgentProfile};
use toolcrib::domain::run::RunStatus;
use toolcrib::domain::run::options::RunOptions;
use toolcrib::domain::run::progress::Conversation;
use toolcrib::domain::tool::tool_mode::{AgentToolMode, ToolMode, ToolModeSettings};
use toolcrib::engine::EngineBuilder;
use toolcrib::ports::model::ModelRequest;
use toolcrib::results::tokens;
use toolcrib::runs::agent_loop::{AgentLoop, StepOutcome, ignore_events};
use toolcrib::runs::{ReportedResult, RunRequest, RunToolSelection};
use toolcrib::{Caller, Code, Effect, Engine, Fault, FnTool, Json};

use crate::script::{Script, SingleModel};

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
struct RecordArgs {
    /// Id of the record, as the list of records returns it.
    record_id: String,
    /// Fields to return; all of them by default.
    fields: Option<Vec<String>>,
    /// Maximum number of entries to return.
    limit: Option<u32>,
}

/// 504 tools of 12 systems, and one that builds reports in the background.
fn many_tools(builder: EngineBuilder) -> EngineBuilder {
    let verbs = ["list", "read", "create", "update", "delete", "archive"];
    let nouns = ["invoice", "ticket", "contact", "project", "message", "event", "file"];
    let mut builder = builder;
    for system in 0..12 {
        for noun in nouns {
            for verb in verbs {
                let name = format!("system{system:02}.{verb}_{noun}");
                let about = format!("{verb} one {noun} in system {system} and return it");
                let tool = FnTool::new(&name, &about, move |args: RecordArgs| async move {
                    Ok::<String, String>(format!("record {}", args.record_id))
                });
                builder = builder.tool(tool.effect(Effect::Read));
            }
        }
    }
    builder
}

fn caller() -> Caller {
    Caller::local("default")
}

fn tool_names(request: &ModelRequest) -> Vec<String> {
    let name = |tool: &Json| tool.to_value()["function"]["name"].as_str().unwrap().to_owned();
    request.tools.iter().map(name).collect()
}

/// Returns the tokens of the tools and of the system text.
fn overhead(request: &ModelRequest) -> usize {
    let messages = request.chat_messages();
    let system = messages.iter().filter(|message| message["role"] == "system");
    let system: String = system.map(|message| message["content"].to_string()).collect();
    tokens::count(&serde_json::to_string(&request.tools).unwrap()) + tokens::count(&system)
}

async fn run(engine: &Engine, script: &Script, options: &RunOptions) -> Conversation {
    let mut conversation = Conversation::from_user_text("Do it");
    let outcome =
        engine.runs().run_agent_loop(&caller(), script, options, &mut conversation).await.unwrap();
    assert!(matches!(outcome, StepOutcome::Answered(_)), "{outcome:?}");
    conversation
}

fn options() -> RunOptions {
    RunOptions::new("scripted", "run_1")
}

#[tokio::test]
async fn hundreds_of_tools_cost_few_tokens_and_are_found_by_search() {
    let engine = many_tools(Engine::builder()).with_result_read_tool().start().await.unwrap();
    let search = r#"{"query":"archive an invoice in system 7","limit":3}"#;
    let script = Script::default()
        .calls(&[("c1", "tools__search", search)])
        .calls(&[("c2", "system07__archive_invoice", r#"{"record_id":"r1"}"#)])
        .says("Archived.");
    let conversation = run(&engine, &script, &options()).await;
    let requests: Vec<ModelRequest> = (0..3).map(|n| script.request(n)).collect();
    assert_eq!(tool_names(&requests[0]), ["tools__search"]);
    assert!(overhead(&requests[0]) <= 1_500, "{}", overhead(&requests[0]));
    let found = tool_names(&requests[1]);
    assert_eq!(found.len(), 4, "{found:?}");
    assert_eq!(found[1], "system07__archive_invoice");
    let searched_by: Vec<&str> =
        requests[1].found_tools.iter().map(|found| found.call_id.as_str()).collect();
    assert_eq!(searched_by, ["c1"; 3]);
    // Later requests only append.
    for (earlier, later) in requests.iter().zip(&requests[1..]) {
        assert_eq!(later.tools[..earlier.tools.len()], earlier.tools[..]);
        assert_eq!(later.messages[..earlier.messages.len()], earlier.messages[..]);
    }
    assert_eq!(tool_names(&requests[2]), found);
    let result = &conversation.messages[4];
    assert_eq!(result["content"], "record r1", "{result}");
    assert_eq!(conversation.progress.calls, 1, "a search is not a call");
}

#[tokio::test]
async fn a_tool_that_was_used_stays_offered_and_an_unloaded_one_can_be_called() {
    let engine = many_tools(Engine::builder()).start().await.unwrap();
    let script = Script::default()
        .calls(&[("c1", "system03__read_file", r#"{"record_id":"r1"}"#)])
        .says("Read.");
    let conversation = run(&engine, &script, &options()).await;
    assert_eq!(conversation.messages[2]["content"], "record r1");
    assert_eq!(tool_names(&script.request(1)), ["tools__search", "system03__read_file"]);
    let again = Script::default().says("Again.");
    let mut conversation = conversation;
    conversation.add_user_messages(vec![json!({ "role": "user", "content": "Again" })]);
    let runs = engine.runs();
    runs.run_agent_loop(&caller(), &again, &options(), &mut conversation).await.unwrap();
    assert_eq!(tool_names(&again.request(0)), ["tools__search", "system03__read_file"]);
}

#[tokio::test]
async fn a_search_stays_within_the_tools_of_the_run_and_explains_misuse() {
    let engine = many_tools(Engine::builder()).start().await.unwrap();
    let tools = Some(vec!["system01.*".to_owned()]);
    let mode = Some(ToolMode::Search);
    let options = RunOptions { tools, tool_mode: mode, ..options() };
    let script = Script::default()
        .calls(&[
            ("c1", "tools__search", r#"{"query":"delete a contact"}"#),
            ("c2", "tools__search", r#"{"query":"zebra quantum"}"#),
            ("c3", "tools__search", "{}"),
            ("c4", "system02__read_file", r#"{"record_id":"r1"}"#),
        ])
        .says("Found.");
    run(&engine, &script, &options).await;
    let request = script.request(1);
    let content = |n: usize| request.messages[n]["content"].as_str().unwrap().to_owned();
    let found: Value = serde_json::from_str(&content(2)).unwrap();
    assert_eq!(found["tools"].as_array().unwrap().len(), 5);
    assert!(!content(2).contains("system02") && content(2).contains("system01__delete_contact"));
    assert!(content(3).contains("No tool matches"), "{}", content(3));
    assert!(content(4).contains("missing field `query`"), "{}", content(4));
    assert!(content(5).contains("TOOL_NOT_FOUND"), "{}", content(5));
    assert_eq!(request.tools.len(), 6);
}

#[tokio::test]
async fn modes_are_set_by_request_agent_and_default() {
    let agent = AgentToolMode { mode: Some(ToolMode::Pinned), pinned_tools: None };
    let settings = ToolModeSettings {
        pinned_tools: vec!["system00.read_file".to_owned()],
        agents: [(caller().agent, agent)].into(),
        ..ToolModeSettings::default()
    };
    let engine = many_tools(Engine::builder()).tool_modes(settings).start().await.unwrap();
    let cases = [
        (None, None, vec!["system00__read_file"]),
        (Some(ToolMode::Search), None, vec!["tools__search", "system00__read_file"]),
        (Some(ToolMode::Auto), Some("system0*"), vec!["tools__search"]),
    ];
    for (tool_mode, pin, first) in cases {
        let pinned_tools = pin.map(|pin| vec![pin.to_owned()]);
        let script = Script::default().says("Hello.");
        run(&engine, &script, &RunOptions { tool_mode, pinned_tools, ..options() }).await;
        let names = tool_names(&script.request(0));
        assert_eq!(names[..first.len()], first, "{tool_mode:?}");
        assert_eq!(names.len() > 2, pin.is_some(), "{names:?}");
    }
    let script = Script::default().says("Hello.");
    run(&engine, &script, &RunOptions { tool_mode: Some(ToolMode::All), ..options() }).await;
    assert_eq!(script.request(0).tools.len(), 504);
    // A pinned run has no other tools.
    let script = Script::default()
        .calls(&[("c1", "system01__read_file", r#"{"record_id":"r1"}"#)])
        .says("No.");
    run(&engine, &script, &options()).await;
    let refusal = script.request(1).messages[2]["content"].to_string();
    assert!(refusal.contains("TOOL_NOT_FOUND"), "{refusal}");
}

#[tokio::test]
async fn a_threshold_of_tokens_decides_without_a_mode() {
    for (threshold_tokens, first) in [(1, "tools__search"), (100_000, "calc__add")] {
        let settings = ToolModeSettings { threshold_tokens, ..ToolModeSettings::default() };
        let add = FnTool::new("calc.add", "Adds", |_: RecordArgs| async { Ok::<i64, Fault>(1) });
        let engine = Engine::builder().tool_modes(settings).tool(add).start().await.unwrap();
        let script = Script::default().says("Hello.");
        run(&engine, &script, &options()).await;
        assert_eq!(tool_names(&script.request(0)), [first]);
    }
}

/// An engine with a stored model, a tool `calc.add`, one that fails, and a background job that
/// never ends by itself.
async fn engine_with(script: Arc<Script>, listeners: Vec<Listener>) -> Engine {
    let add = FnTool::new("calc.add", "Adds", |_: Value| async { Ok::<i64, Fault>(42) });
    let broken = FnTool::new("calc.broken", "Fails", |_: Value| async {
        Err::<i64, Fault>(Fault::runtime("out of paper").retryable(false))
    });
    let job = FnTool::new("job.run", "Runs a job.", |_: Value| async {
        std::future::pending::<()>().await;
        Ok::<i64, Fault>(1)
    });
    let mut builder = Engine::builder()
        .models(Arc::new(SingleModel(script)))
        .tool(add.effect(Effect::Read))
        .tool(broken.effect(Effect::Read))
        .tool(job.effect(Effect::Read).background().timeout_ms(3_600_000));
    for listener in listeners {
        builder = builder.on_tool_call(listener);
    }
    builder.start().await.unwrap()
}

type Listener = Box<
    dyn Fn(
            &toolcrib::runs::context::ToolCall,
            &toolcrib::runs::context::ToolResult,
        ) -> toolcrib::runs::context::ListenerResult
        + Send
        + Sync,
>;

fn run_request(text: &str) -> RunRequest {
    RunRequest {
        model: "scripted".into(),
        messages: vec![json!({ "role": "user", "content": text })],
        ..RunRequest::default()
    }
}

async fn wait_for_run(engine: &Engine, id: &str) -> toolcrib::domain::run::Run {
    tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            let run = engine.runs().wait_for_run(&caller(), id, 30_000).await.unwrap();
            if run.status.is_terminal() {
                return run;
            }
        }
    })
    .await
    .unwrap()
}

async fn context_names(engine: &Engine, id: &str) -> Vec<String> {
    let context = engine.runs().contexts().context(&caller(), id, 10).await.unwrap();
    context.tool_definitions().iter().map(|tool| tool.name.clone()).collect()
}

#[tokio::test]
async fn the_tools_of_a_run_are_those_of_its_context() {
    let script = Arc::new(
        Script::default()
            .says("Hello.")
            .says("Again.")
            .calls(&[("c1", "my__tool", "{}")])
            .says("So."),
    );
    let engine = engine_with(script.clone(), Vec::new()).await;
    let request = RunRequest { tools: Some(vec!["calc.add".into()]), ..run_request("Hi") };
    let id = engine.runs().start_run(&caller(), request).await.unwrap().run.id;
    wait_for_run(&engine, &id).await;
    assert_eq!(context_names(&engine, &id).await, ["calc.add"], "a narrowed run");
    assert_eq!(tool_names(&script.request(0)), ["calc__add"]);
    // Tools that are set later reach the model.
    let mine = context_tool("my.tool");
    let selection = RunToolSelection {
        caller_tools: vec![mine],
        toolcrib_tools: Some(vec!["calc.broken".into()]),
    };
    engine.runs().contexts().set_run_tools(&caller(), &id, selection).await.unwrap();
    assert_eq!(context_names(&engine, &id).await, ["calc.broken", "my.tool"]);
    let message = || vec![json!({ "role": "user", "content": "And?" })];
    engine.runs().add_run_messages(&caller(), &id, message()).await.unwrap();
    wait_for_run(&engine, &id).await;
    assert_eq!(tool_names(&script.request(1)), ["my__tool", "calc__broken"]);
    // A call of a caller tool is recorded, and the run waits for its result.
    engine.runs().add_run_messages(&caller(), &id, message()).await.unwrap();
    let context = tokio::time::timeout(Duration::from_secs(30), async {
        loop {
            let context = engine.runs().contexts().context(&caller(), &id, 10).await.unwrap();
            if context.pending_calls().count() == 1 {
                return context;
            }
            tokio::task::yield_now().await;
        }
    });
    let context = context.await.unwrap();
    let pending = context.pending_calls().next().unwrap();
    assert_eq!((pending.name.as_str(), pending.call_id.as_str()), ("my.tool", "c1"));
    let result = ReportedResult {
        tool_call_id: pending.tool_call_id.clone(),
        call_id: None,
        result: Ok(Json::from_serialize("done by hand").unwrap()),
    };
    engine.runs().contexts().record_results(&caller(), &id, vec![result]).await.unwrap();
    let run = wait_for_run(&engine, &id).await;
    assert_eq!((run.status, run.answer.unwrap().text.as_str()), (RunStatus::Succeeded, "So."));
    let answered = script.request(3).messages.last().unwrap()["content"].to_string();
    assert!(answered.contains("done by hand"), "{answered}");
}

fn context_tool(name: &str) -> toolcrib::domain::tool::ToolDefinition {
    use toolcrib::domain::tool::{Executor, ToolDefinition};
    ToolDefinition {
        project: None,
        name: name.to_owned(),
        description: "Executed by hand".to_owned(),
        executor: Executor::CALLER,
        input_schema: Json::empty_object(),
        output_schema: None,
        timeout_ms: 60_000,
        background: false,
        effect: Effect::Read,
        risk: Default::default(),
        policy: Default::default(),
        fallback: Vec::new(),
        metadata: None,
        binding: None,
    }
}

#[tokio::test]
async fn listeners_receive_every_result_and_one_that_fails_stops_no_other() {
    let received = Arc::new(Mutex::new(Vec::new()));
    let record = |label: &'static str| -> Listener {
        let received = received.clone();
        Box::new(move |call, result| {
            received.lock().push((label, call.name.clone(), result.ok()));
            Ok(())
        })
    };
    let failing: Listener = Box::new(|_, _| Err("no room".into()));
    let script = Arc::new(
        Script::default()
            .calls(&[("c1", "calc__add", "{}"), ("c2", "calc__broken", "{}")])
            .says("Done."),
    );
    let engine = engine_with(script, vec![record("a"), failing, record("b")]).await;
    let id = engine.runs().start_run(&caller(), run_request("Hi")).await.unwrap().run.id;
    wait_for_run(&engine, &id).await;
    let mut all = received.lock().clone();
    all.sort();
    let entry = |label, name: &str, ok| (label, name.to_owned(), ok);
    assert_eq!(
        all,
        [
            entry("a", "calc.add", true),
            entry("a", "calc.broken", false),
            entry("b", "calc.add", true),
            entry("b", "calc.broken", false),
        ]
    );
}

#[tokio::test]
async fn pending_async_calls_are_in_the_prompt_within_a_budget() {
    let many: Vec<(String, String)> =
        (0..50).map(|n| (format!("call_{n}"), format!("{{\"month\":{n}}}"))).collect();
    let calls: Vec<(&str, &str, &str)> =
        many.iter().map(|(id, args)| (id.as_str(), "job__run", args.as_str())).collect();
    let script = Script::default().calls(&calls).says("They run.");
    let engine = engine_with(Arc::new(Script::default()), Vec::new()).await;
    let (caller, options) = (caller(), options());
    let mut agent_loop =
        AgentLoop::new(engine.runs(), &caller, &script, &options, &ignore_events).unwrap();
    let mut conversation = Conversation::from_user_text("Build 50 reports");
    assert_eq!(agent_loop.run_step(&mut conversation).await.unwrap(), StepOutcome::Continue);
    let next = agent_loop.run_step(&mut conversation).await.unwrap();
    assert_eq!(next, StepOutcome::AwaitingResults);
    assert_eq!(agent_loop.context().pending_calls().count(), 50);
    let (first, second) = (script.request(0), script.request(1));
    let description = |request: &ModelRequest, name: &str| {
        let mut tools = request.tools.iter().map(Json::to_value);
        let tool = tools.find(|tool| tool["function"]["name"] == name).unwrap();
        tool["function"]["description"].as_str().unwrap().to_owned()
    };
    assert!(description(&first, "job__run").contains("(async"), "the tool is marked");
    assert!(!description(&first, "calc__add").contains("async"));
    assert!(first.guidance.as_ref().unwrap().contains("run in the background"));
    assert_eq!((first.guidance, first.pending_state), (second.guidance.clone(), None));
    let state = second.pending_state.clone().unwrap();
    assert!(tokens::count(&state) <= 400, "{} tokens: {state}", tokens::count(&state));
    assert!(state.contains("job__run (async) × 50, running"), "{state}");
    for (id, _) in &many {
        let listed = state.split([' ', ',', '\n']).any(|word| word == id);
        assert!(listed, "{id}: {state}");
    }
    let last = second.chat_messages().pop().unwrap();
    assert_eq!((&last["role"], &last["content"]), (&json!("system"), &json!(state)));
}

#[tokio::test]
async fn a_run_whose_calls_all_failed_is_failed_and_says_so() {
    let script = Arc::new(
        Script::default()
            .calls(&[("c1", "calc__broken", "{}")])
            .calls(&[("c2", "calc__broken", r#"{"again":true}"#)])
            .says("It could not be printed.")
            .calls(&[("c3", "calc__add", "{}")])
            .says("Now it is 42."),
    );
    let engine = engine_with(script.clone(), Vec::new()).await;
    let id = engine.runs().start_run(&caller(), run_request("Print")).await.unwrap().run.id;
    let run = wait_for_run(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    let error = run.error.unwrap();
    assert_eq!(error.code, Code::RuntimeError.as_str());
    assert!(error.message.starts_with("All 2 tool calls failed"), "{}", error.message);
    assert!(error.message.contains("out of paper"), "{}", error.message);
    let answer = run.answer.unwrap().text;
    assert!(answer.starts_with("It could not be printed.\n\n[All 2 tool calls failed"), "{answer}");
    // A resumed run gets another try.
    engine.runs().resume_run(&caller(), &id).await.unwrap();
    let run = wait_for_run(&engine, &id).await;
    assert_eq!((run.status, run.error), (RunStatus::Succeeded, None));
    assert_eq!(run.answer.unwrap().text, "Now it is 42.");
    let last = script.request(3).messages.last().unwrap().clone();
    assert_eq!(last["role"], "user", "{last}");
}

fn specialist(id: &str) -> AgentDefinition {
    let instructions = format!("You are {id}. {}", "You know every rule of the house. ".repeat(20));
    let profile = AgentProfile { instructions, ..AgentProfile::default() };
    AgentDefinition { agent_id: id.to_owned(), profile, ..AgentDefinition::default() }
}

#[tokio::test]
async fn handoffs_to_many_agents_cost_few_tokens_and_are_found_by_search() {
    let engine = many_tools(Engine::builder()).start().await.unwrap();
    for n in 0..100 {
        let agent = specialist(&format!("specialist_{n}"));
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
    }
    let search = r#"{"query":"transfer_to_specialist_42"}"#;
    let script = Script::default().calls(&[("c1", "tools__search", search)]).says("Found.");
    run(&engine, &script, &options()).await;
    let first = script.request(0);
    assert_eq!(tool_names(&first), ["tools__search"]);
    assert!(overhead(&first) <= 1_500, "{}", overhead(&first));
    let found = tool_names(&script.request(1));
    assert!(found.contains(&"transfer_to_specialist_42".to_owned()), "{found:?}");
    let described =
        script.request(1).tools.iter().map(|tool| tool.text().to_owned()).max_by_key(String::len);
    assert!(tokens::count(&described.unwrap()) < 250, "a handoff is described in a sentence");
    // Other searches find no handoffs.
    let listed = engine.registry().search(&caller(), "specialist_42", 50).await.unwrap();
    assert!(listed.iter().all(|found| !found.entry.definition.name.starts_with("handoff.")));
    // Only pinned handoffs are offered beside pinned tools.
    let tool_mode = Some(ToolMode::Pinned);
    for (pin, name) in [
        ("system00.read_file", "system00__read_file"),
        ("handoff.to_specialist_7", "transfer_to_specialist_7"),
        ("transfer_to_specialist_7", "transfer_to_specialist_7"),
    ] {
        let script = Script::default().says("Hello.");
        let pinned_tools = Some(vec![pin.to_owned()]);
        run(&engine, &script, &RunOptions { tool_mode, pinned_tools, ..options() }).await;
        assert_eq!(tool_names(&script.request(0)), [name]);
    }
}

#[tokio::test]
async fn a_digest_brings_its_reader_to_a_pinned_run() {
    let dump = FnTool::new("dump.rows", "Dumps", |_: Value| async {
        let rows: Vec<Value> = (0..5_000).map(|n| json!({ "id": n, "name": "a name" })).collect();
        Ok::<Value, Fault>(json!(rows))
    });
    let builder = Engine::builder().tool(dump.effect(Effect::Read)).with_result_read_tool();
    let engine = builder.start().await.unwrap();
    let script = Script::default().calls(&[("c1", "dump__rows", "{}")]).says("Read.");
    let (tool_mode, pinned_tools) = (Some(ToolMode::Pinned), Some(vec!["dump.rows".to_owned()]));
    run(&engine, &script, &RunOptions { tool_mode, pinned_tools, ..options() }).await;
    assert_eq!(tool_names(&script.request(0)), ["dump__rows"]);
    assert_eq!(tool_names(&script.request(1)), ["dump__rows", "result__read"]);
}

#[tokio::test]
async fn the_tool_search_keeps_its_text_while_agents_come() {
    let engine = many_tools(Engine::builder()).start().await.unwrap();
    let mut conversation = Conversation::from_user_text("Do it");
    let mut texts = Vec::new();
    for n in 0..2 {
        let script = Script::default().says("Done.");
        let runs = engine.runs();
        runs.run_agent_loop(&caller(), &script, &options(), &mut conversation).await.unwrap();
        texts.push(script.request(0).tools[0].text().to_owned());
        // The conversation as a restart reads it.
        let stored = serde_json::to_string(&conversation).unwrap();
        conversation = serde_json::from_str(&stored).unwrap();
        let agent = specialist(&format!("late_{n}"));
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
        conversation.add_user_messages(vec![json!({ "role": "user", "content": "And?" })]);
    }
    assert!(texts[0].contains("504"), "{}", texts[0]);
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn a_defined_agent_has_its_own_mode() {
    let by_name = AgentToolMode {
        mode: Some(ToolMode::Pinned),
        pinned_tools: Some(vec!["calc.add".to_owned()]),
    };
    let settings = ToolModeSettings {
        agents: [("named".to_owned(), by_name)].into(),
        ..ToolModeSettings::default()
    };
    let script = Arc::new(Script::default().says("1").says("2").says("3"));
    let noop = |name: &str| FnTool::new(name, "Adds", |_: Value| async { Ok::<i64, Fault>(42) });
    let builder = Engine::builder().models(Arc::new(SingleModel(script.clone())));
    let builder = builder.tool_modes(settings).tool(noop("calc.add")).tool(noop("calc.sub"));
    let engine = builder.start().await.unwrap();
    let mut own = specialist("own");
    own.profile.tool_mode = Some(ToolMode::Pinned);
    own.profile.pinned_tools = Some(vec!["calc.sub".to_owned()]);
    for agent in [specialist("named"), own, specialist("plain")] {
        engine.roster().define_agent(&caller(), agent, None).await.unwrap();
    }
    for (n, id) in ["named", "own", "plain"].into_iter().enumerate() {
        let args = r#"{"instruction":"x"}"#;
        let request = toolcrib::CallRequest::new(format!("agent.{id}"), args).unwrap();
        let ticket = engine.calls().invoke(&caller(), request).await.unwrap();
        let until = toolcrib::calls::Until::EndedWithin(20_000);
        engine.calls().wait(&caller(), &ticket.call.id, until).await.unwrap();
        let names = tool_names(&script.request(n));
        match id {
            "named" => assert_eq!(names, ["calc__add"]),
            "own" => assert_eq!(names, ["calc__sub"]),
            _ => assert!(names.len() > 2, "{names:?}"),
        }
    }
}

#[tokio::test]
async fn a_run_whose_only_call_names_no_tool_is_failed_and_says_so() {
    let script = Arc::new(Script::default().calls(&[("c1", "nope__none", "{}")]).says("All good!"));
    let engine = engine_with(script, Vec::new()).await;
    let id = engine.runs().start_run(&caller(), run_request("Hi")).await.unwrap().run.id;
    let run = wait_for_run(&engine, &id).await;
    assert_eq!(run.status, RunStatus::Failed);
    let text = run.answer.unwrap().text;
    assert!(text.contains("The only tool call failed: nope__none: TOOL_NOT_FOUND"), "{text}");
}
