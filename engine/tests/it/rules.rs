//! Access rules as the engine applies them: attributes of callers, own calls, and the index.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use toolcrib::calls::{CallQuery, EventQuery, Until};
use toolcrib::domain::access_rules::{AccessRule, RuleAction, RuleVerdict};
use toolcrib::domain::caller::{AuthMethod, CallerAttributes};
use toolcrib::domain::fault::Code;
use toolcrib::registry::rules::{parse_rule, parse_rule_set};
use toolcrib::runs::RunRequest;
use toolcrib::{
    CallId, CallRequest, Caller, Effect, Engine, Error, Fault, FnTool, Risk, Role, Tool,
};

use crate::script::{Script, SingleModel};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Payment {
    /// Cents.
    amount: i64,
    #[serde(default = "default_to")]
    to: String,
}

fn default_to() -> String {
    "nobody@x.org".to_owned()
}

fn payment(name: &str) -> FnTool {
    FnTool::new(name, "Pays", |payment: Payment| async move {
        Ok::<_, Fault>(format!("{} to {}", payment.amount, payment.to))
    })
    .effect(Effect::Irreversible)
    .risk(Risk::High)
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Nothing {}

fn reading(name: &str) -> FnTool {
    let tool = FnTool::new(name, "Reads", |_: Nothing| async { Ok::<i64, Fault>(1) });
    tool.effect(Effect::Read).risk(Risk::Low)
}

async fn engine() -> Engine {
    let builder = Engine::builder().tool(payment("pay.send")).tool(payment("pay.refund"));
    builder.tool(reading("book.find")).with_result_read_tool().start().await.unwrap()
}

async fn put(engine: &Engine, id: &str, rule: Value) {
    let rule = parse_rule("p", Some(id), &rule, "").unwrap();
    engine.admin().set_rule(&Caller::local("p"), rule).await.unwrap();
}

fn agent(name: &str) -> Caller {
    Caller::new("p", name, Role::Agent, AuthMethod::Key)
}

fn with(caller: Caller, change: impl FnOnce(&mut CallerAttributes)) -> Caller {
    let mut attributes = caller.attributes.as_ref().clone();
    change(&mut attributes);
    Caller { attributes: Arc::new(attributes), ..caller }
}

async fn call_in(
    engine: &Engine,
    caller: &Caller,
    run_id: &str,
    tool: &str,
    args: Value,
) -> Result<CallId, Error> {
    let mut request = CallRequest::new(tool, &args.to_string()).unwrap();
    request.run_id = run_id.to_owned();
    let ticket = engine.calls().invoke(caller, request).await?;
    if ticket.call.pending_approval().is_none() {
        engine.calls().wait(caller, &ticket.call.id, Until::Ended).await?;
    }
    Ok(ticket.call.id.clone())
}

async fn call(engine: &Engine, caller: &Caller, tool: &str, args: Value) -> Result<CallId, Error> {
    call_in(engine, caller, "run_default", tool, args).await
}

/// The id of the rule that denies or asks, or `none`, or `ok`.
async fn decision(engine: &Engine, caller: &Caller, tool: &str, args: Value) -> String {
    match call(engine, caller, tool, args).await {
        Ok(id) => {
            let call = engine.calls().call(caller, &id).await.unwrap();
            let Some(approval_id) = call.pending_approval() else { return "ok".to_owned() };
            let operator = Caller::operator("p");
            engine.approvals().approval(&operator, approval_id).await.unwrap().request.rule_id
        }
        Err(Error::Refused { fault, .. }) => {
            assert_eq!(fault.code, Code::PermissionDenied, "{fault}");
            let detail = fault.detail.unwrap();
            assert!(!detail["reason"].as_str().unwrap().is_empty(), "{detail}");
            detail["rule_id"].as_str().unwrap_or("none").to_owned()
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn deny_comes_before_ask_and_ask_before_allow() {
    let engine = engine().await;
    let (ada, pay) = (agent("ada"), json!({"amount": 5}));
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "none");
    put(&engine, "a", json!({"verdict": "allow", "tools": ["pay.*"]})).await;
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "ok");
    put(&engine, "b", json!({"verdict": "ask", "tools": ["pay.send"]})).await;
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "b");
    put(&engine, "c", json!({"verdict": "deny", "agents": ["a*"]})).await;
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "c");
    assert_eq!(decision(&engine, &agent("bob"), "pay.refund", pay).await, "ok");
}

#[tokio::test]
async fn a_denial_by_the_name_that_models_use_names_its_rule() {
    let engine = engine().await;
    let ada = agent("ada");
    put(&engine, "all", json!({"verdict": "allow"})).await;
    assert_eq!(decision(&engine, &ada, "pay__send", json!({"amount": 1})).await, "ok");
    put(&engine, "no-pay", json!({"verdict": "deny", "tools": ["pay.*"]})).await;
    for tool in ["pay__send", "pay__no_such_tool"] {
        assert_eq!(decision(&engine, &ada, tool, json!({"amount": 1})).await, "no-pay", "{tool}");
    }
    let audit = engine.admin().audit_log(&Caller::operator("p"), None, 10).await.unwrap();
    assert!(audit.iter().any(|row| row.entry.subject == "pay.send"), "{audit:?}");
    let unknown = call(&engine, &ada, "other__tool", json!({})).await.unwrap_err();
    assert_eq!(unknown.code(), Code::ToolNotFound);
}

#[tokio::test]
async fn rules_match_every_attribute_of_the_caller() {
    let engine = engine().await;
    put(&engine, "all", json!({"verdict": "allow"})).await;
    for (id, field, value) in [
        ("by-group", "groups", "contract*"),
        ("by-user", "users", "mallory"),
        ("by-session", "sessions", "s-1"),
        ("by-environment", "environments", "prod*"),
    ] {
        put(&engine, id, json!({"verdict": "deny", field: [value]})).await;
    }
    let (ada, none) = (agent("ada"), json!({}));
    let ask = |caller: Caller| {
        let (engine, none) = (&engine, none.clone());
        async move { decision(engine, &caller, "book.find", none).await }
    };
    assert_eq!(ask(ada.clone()).await, "ok");
    let grouped = with(ada.clone(), |a| a.groups = vec!["ops".into(), "contractors".into()]);
    assert_eq!(ask(grouped).await, "by-group");
    assert_eq!(ask(with(ada.clone(), |a| a.user = Some("mallory".into()))).await, "by-user");
    assert_eq!(ask(with(ada.clone(), |a| a.user = Some("mia".into()))).await, "ok");
    assert_eq!(ask(with(ada.clone(), |a| a.session = Some("s-1".into()))).await, "by-session");
    let production = with(ada.clone(), |a| a.environment = Some("production".into()));
    assert_eq!(ask(production).await, "by-environment");
    let narrowed = with(ada, |a| a.tools = Some(vec!["pay.*".into()]));
    assert_eq!(ask(narrowed).await, "none", "the key is limited to other tools");
}

#[tokio::test]
async fn an_unasserted_session_is_the_run_for_deny_and_ask_but_never_for_allow() {
    let engine = engine().await;
    put(&engine, "in-session", json!({"verdict": "allow", "sessions": ["s-*"]})).await;
    let ada = agent("ada");
    let denied = call_in(&engine, &ada, "s-1", "book.find", json!({})).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied, "a run is chosen by the caller");
    let asserted = with(ada.clone(), |a| a.session = Some("s-1".into()));
    assert!(call_in(&engine, &asserted, "other", "book.find", json!({})).await.is_ok());
    let condition = "caller.session == 's-1'";
    put(&engine, "when", json!({"verdict": "allow", "when": condition})).await;
    assert!(call_in(&engine, &ada, "s-1", "book.find", json!({})).await.is_err());
    put(&engine, "all", json!({"verdict": "allow"})).await;
    put(&engine, "not-here", json!({"verdict": "deny", "sessions": ["r-*"]})).await;
    assert!(call_in(&engine, &ada, "s-1", "book.find", json!({})).await.is_ok());
    let denied = call_in(&engine, &ada, "r-1", "book.find", json!({})).await.unwrap_err();
    assert!(denied.to_string().contains("not-here"), "{denied}");
}

#[tokio::test]
async fn rules_match_effect_risk_and_source_of_the_tool() {
    let engine = engine().await;
    put(&engine, "reads", json!({"verdict": "allow", "effects": ["read"]})).await;
    let (ada, pay) = (agent("ada"), json!({"amount": 5}));
    assert_eq!(decision(&engine, &ada, "book.find", json!({})).await, "ok");
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "none");
    put(&engine, "builtin", json!({"verdict": "allow", "sources": ["builtin"]})).await;
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "ok");
    put(&engine, "risky", json!({"verdict": "deny", "risk_min": "high"})).await;
    assert_eq!(decision(&engine, &ada, "pay.send", pay.clone()).await, "risky");
    assert_eq!(decision(&engine, &ada, "book.find", json!({})).await, "ok");
    // A tool that does not exist is refused like one that the rule denies.
    put(&engine, "all", json!({"verdict": "allow"})).await;
    assert_eq!(decision(&engine, &ada, "no.such", json!({})).await, "risky");
}

#[tokio::test]
async fn a_condition_sees_validated_arguments_with_their_defaults() {
    let engine = engine().await;
    put(
        &engine,
        "small",
        json!({"verdict": "allow", "tools": ["pay.*"],
        "when": "args.amount <= 100"}),
    )
    .await;
    put(
        &engine,
        "strangers",
        json!({"verdict": "deny", "tools": ["pay.send"],
        "when": "args.to == 'nobody@x.org'"}),
    )
    .await;
    let ada = agent("ada");
    let pay = |amount: i64| json!({"amount": amount, "to": "b@x.org"});
    assert_eq!(decision(&engine, &ada, "pay.send", pay(100)).await, "ok");
    assert_eq!(decision(&engine, &ada, "pay.send", pay(101)).await, "none");
    assert_eq!(decision(&engine, &ada, "pay.send", json!({"amount": 1})).await, "strangers");
    // Wrong arguments are refused as such, because the rules may allow others.
    let wrong = call(&engine, &ada, "pay.send", json!({"amount": "x"})).await.unwrap_err();
    assert_eq!(wrong.code(), Code::ValidationError);
    // The tool is listed: some arguments are allowed.
    let listed = engine.registry().tools(&ada);
    assert_eq!(listed.len(), 2, "pay.send and pay.refund");
}

#[tokio::test]
async fn a_condition_that_fails_denies_or_asks_and_never_allows() {
    let engine = engine().await;
    put(&engine, "all", json!({"verdict": "allow"})).await;
    let (ada, book) = (agent("ada"), json!({}));
    put(&engine, "x", json!({"verdict": "deny", "tools": ["book.*"], "when": "args.none > 1"}))
        .await;
    let denied = call(&engine, &ada, "book.find", book.clone()).await.unwrap_err();
    assert!(denied.to_string().contains("its condition failed"), "{denied}");
    put(&engine, "x", json!({"verdict": "ask", "tools": ["book.*"], "when": "args.none > 1"}))
        .await;
    assert_eq!(decision(&engine, &ada, "book.find", book.clone()).await, "x");
    put(&engine, "x", json!({"verdict": "allow", "tools": ["book.*"], "when": "args.none > 1"}))
        .await;
    put(&engine, "all", json!({"verdict": "allow", "tools": ["pay.*"]})).await;
    assert_eq!(decision(&engine, &ada, "book.find", book).await, "none");
}

#[tokio::test]
async fn a_condition_on_an_argument_that_a_named_tool_lacks_is_refused() {
    let engine = engine().await;
    let rule = json!({"verdict": "allow", "tools": ["pay.send"], "when": "args.amuont > 1"});
    let rule = parse_rule("p", Some("typo"), &rule, "").unwrap();
    let operator = Caller::local("p");
    let error = engine.admin().set_rule(&operator, rule.clone()).await.unwrap_err();
    assert_eq!(error.code(), Code::ValidationError);
    assert!(error.to_string().contains("\"pay.send\" has no argument \"amuont\""), "{error}");
    let set = vec![AccessRule::short("p", "ada", "*", RuleVerdict::Allow), rule];
    let error = engine.admin().replace_rules(&operator, "p", set, "x").await.unwrap_err();
    assert!(error.to_string().contains("rules/1/when"), "{error}");
    assert_eq!(engine.admin().rules(&operator).unwrap().rules.len(), 0, "nothing was replaced");
}

#[tokio::test]
async fn anonymous_callers_and_admin_keys_are_subject_to_deny_and_ask() {
    let engine = engine().await;
    let anonymous = Caller::anonymous("p");
    let admin = Caller::new("p", "boss", Role::Admin, AuthMethod::Key);
    for caller in [&anonymous, &admin] {
        assert_eq!(decision(&engine, caller, "book.find", json!({})).await, "ok");
    }
    put(&engine, "no", json!({"verdict": "deny", "tools": ["book.*"]})).await;
    put(&engine, "hm", json!({"verdict": "ask", "tools": ["pay.*"]})).await;
    for caller in [&anonymous, &admin] {
        assert_eq!(decision(&engine, caller, "book.find", json!({})).await, "no");
        assert_eq!(decision(&engine, caller, "pay.send", json!({"amount": 1})).await, "hm");
    }
    let operator = Caller::operator("p");
    assert_eq!(decision(&engine, &operator, "book.find", json!({})).await, "ok");
}

#[tokio::test]
async fn a_tool_that_needs_an_approval_stays_listed_and_a_hidden_one_can_be_called() {
    let engine = engine().await;
    put(&engine, "all", json!({"verdict": "allow"})).await;
    put(&engine, "ask", json!({"verdict": "ask", "tools": ["pay.send"]})).await;
    put(&engine, "hide", json!({"verdict": "deny", "tools": ["book.*"], "actions": ["list"]}))
        .await;
    let ada = agent("ada");
    let tools = engine.registry().tools(&ada);
    let names: Vec<&str> = tools.iter().map(|entry| entry.definition.name.as_str()).collect();
    assert_eq!(names, ["pay.refund", "pay.send", "result.read"]);
    let found = engine.registry().search(&ada, "book find reads", 10).await.unwrap();
    assert!(found.iter().all(|found| found.entry.definition.name != "book.find"));
    assert!(engine.registry().listed_tool(&ada, "book.find").is_err());
    assert_eq!(decision(&engine, &ada, "book.find", json!({})).await, "ok");
}

#[tokio::test]
async fn a_caller_reads_and_cancels_its_own_calls_and_those_of_others_only_by_a_rule() {
    let engine = engine().await;
    put(&engine, "all", json!({"verdict": "allow"})).await;
    let (ada, bob) = (agent("ada"), agent("bob"));
    let id = call(&engine, &ada, "book.find", json!({})).await.unwrap();
    let calls = engine.calls();
    let not_found = |error: Error| assert_eq!(error.code(), Code::NotFound, "{error}");
    not_found(calls.call(&bob, &id).await.unwrap_err());
    not_found(calls.cancel(&bob, &id, None).await.unwrap_err());
    not_found(calls.ticket(&bob, &id).await.err().unwrap());
    not_found(calls.wait(&bob, &id, Until::EndedWithin(1)).await.unwrap_err());
    not_found(calls.newest_progress(&bob, &id).await.unwrap_err());
    let events = EventQuery::Call(id.clone());
    not_found(calls.events(&bob, &events, 0, 10).await.unwrap_err());
    let query = Default::default();
    not_found(engine.runs().results().read_result(&bob, &id, query).await.unwrap_err());
    not_found(engine.utp().cards().call_cards(&bob, &id).await.unwrap_err());
    let unknown: CallId = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap();
    let (a, b) = (calls.call(&bob, &id).await.unwrap_err(), calls.call(&bob, &unknown).await);
    let same = a.to_string().replace(id.as_str(), unknown.as_str());
    assert_eq!(same, b.unwrap_err().to_string(), "forbidden looks like unknown");
    let list = |caller: Caller| {
        let calls = calls.clone();
        async move {
            let query = CallQuery { limit: 10, ..CallQuery::default() };
            calls.calls(&caller, query).await.unwrap().calls.len()
        }
    };
    assert_eq!((list(ada.clone()).await, list(bob.clone()).await), (1, 0));
    let own = call(&engine, &bob, "book.find", json!({})).await.unwrap();
    let seen = calls.events(&bob, &EventQuery::Project, 0, 100).await.unwrap();
    assert!(!seen.is_empty() && seen.iter().all(|event| event.call_id == own));
    let context = engine.runs().contexts().context(&bob, "run_default", 50).await.unwrap();
    assert_eq!(context.tool_results().len(), 1, "of bob's own call");

    put(
        &engine,
        "see",
        json!({"verdict": "allow", "agents": ["bob"], "tools": ["book.*"],
        "actions": ["read"]}),
    )
    .await;
    assert_eq!(calls.call(&bob, &id).await.unwrap().id, id);
    assert_eq!(list(bob.clone()).await, 2);
    let refused = calls.cancel(&bob, &id, None).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "he may read it, not cancel it");
    put(&engine, "stop", json!({"verdict": "allow", "agents": ["bob"], "actions": ["cancel"]}))
        .await;
    assert_eq!(calls.cancel(&bob, &id, None).await.unwrap_err().code(), Code::Conflict);
    for role in [Role::Auditor, Role::Admin] {
        let reader = Caller::new("p", "eve", role, AuthMethod::Key);
        assert_eq!(calls.call(&reader, &id).await.unwrap().id, id);
    }
}

/// Rules about single calls decide nothing in favor of a whole run: what cannot be decided about it
/// is denied.
#[tokio::test]
async fn a_rule_on_arguments_or_tools_permits_no_access_to_whole_runs() {
    let model = SingleModel(Arc::new(Script::default().says("Hello.")));
    let builder = Engine::builder().models(Arc::new(model)).tool(payment("pay.send"));
    let engine = builder.start().await.unwrap();
    let (ada, bob) = (agent("ada"), agent("bob"));
    let messages = vec![json!({ "role": "user", "content": "Hello?" })];
    let request = RunRequest { model: "scripted".into(), messages, ..RunRequest::default() };
    let run = engine.runs().start_run(&ada, request).await.unwrap().run.id;
    let may_read = async || engine.runs().find_run(&bob, &run).await.is_ok();
    let reading = |extra: Value| {
        let mut rule = json!({ "verdict": "allow", "agents": ["bob"], "actions": ["read"] });
        rule.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        rule
    };
    assert!(!may_read().await);
    for condition in [
        json!({ "when": "args.amount < 10" }),
        json!({ "tools": ["pay.*"] }),
        json!({ "effects": ["read"] }),
        json!({ "when": "tool.risk == 'low'" }),
    ] {
        put(&engine, "read", reading(condition.clone())).await;
        assert!(!may_read().await, "{condition}");
    }
    put(&engine, "read", reading(json!({}))).await;
    assert!(may_read().await);
    for restriction in [
        json!({ "verdict": "deny", "when": "args.amount > 10" }),
        json!({ "verdict": "deny", "tools": ["pay.*"] }),
        json!({ "verdict": "deny", "effects": ["irreversible"] }),
        json!({ "verdict": "deny", "when": "tool.risk == 'high'" }),
        json!({ "verdict": "ask", "when": "args.amount > 10" }),
    ] {
        put(&engine, "not", reading(restriction.clone())).await;
        assert!(!may_read().await, "{restriction}");
    }
    put(&engine, "not", reading(json!({ "verdict": "deny", "agents": ["eve"] }))).await;
    assert!(may_read().await, "a rule about another agent");
}

#[tokio::test]
async fn a_caller_that_acts_for_a_user_sees_the_calls_of_that_user() {
    let engine = engine().await;
    put(&engine, "all", json!({"verdict": "allow"})).await;
    let service = agent("service");
    let for_user = |user: &str| with(service.clone(), |a| a.user = Some(user.to_owned()));
    let id = call(&engine, &for_user("u1"), "book.find", json!({})).await.unwrap();
    assert!(engine.calls().call(&for_user("u1"), &id).await.is_ok());
    assert!(engine.calls().call(&for_user("u2"), &id).await.is_err());
    assert!(engine.calls().call(&service, &id).await.is_ok(), "the service itself sees all");
    // The result tool has the rights of the user, too.
    let args = json!({"tool_call_id": id});
    let read = |caller: Caller| {
        let (engine, args) = (&engine, args.clone());
        async move {
            let id = call(engine, &caller, "result.read", args).await.unwrap();
            engine.calls().call(&caller, &id).await.unwrap().outcome.clone().unwrap().ok
        }
    };
    assert!(read(for_user("u1")).await);
    assert!(!read(for_user("u2")).await);
}

#[tokio::test]
async fn rules_restrict_registration_and_administration() {
    let engine = engine().await;
    let no_registration = json!({"verdict": "deny", "tools": ["bank.*"], "actions": ["register"]});
    put(&engine, "no-bank", no_registration).await;
    let provider = Caller::new("p", "prov", Role::Provider, AuthMethod::Key);
    let register = |tool: &str| {
        let mut definition = Tool::definition(&reading(tool));
        definition.project = Some("p".to_owned());
        definition.executor = toolcrib::Executor::CLIENT;
        toolcrib::registry::ClientRegistration {
            client_id: "c1".to_owned(),
            tools: vec![definition],
            unlisted_tools: toolcrib::domain::directory::UnlistedTools::Keep,
        }
    };
    let error = engine.registry().register(&provider, register("bank.pay")).await.unwrap_err();
    assert!(error.to_string().contains("no-bank"), "{error}");
    engine.registry().register(&provider, register("shop.buy")).await.unwrap();
    let admin = Caller::new("p", "boss", Role::Admin, AuthMethod::Key);
    let change = || AccessRule::short("p", "ada", "shop.*", RuleVerdict::Allow);
    engine.admin().set_rule(&admin, change()).await.unwrap();
    let frozen = json!({"verdict": "deny", "agents": ["boss"], "actions": ["administer"]});
    put(&engine, "frozen", frozen).await;
    let error = engine.admin().set_rule(&admin, change()).await.unwrap_err();
    assert!(error.to_string().contains("frozen"), "{error}");
    engine.admin().remove_rule_by_id(&Caller::operator("p"), "p", "frozen").await.unwrap();
    engine.admin().set_rule(&admin, change()).await.unwrap();
}

#[tokio::test]
async fn ten_thousand_rules_stay_bounded() {
    let engine = engine().await;
    let operator = Caller::local("p");
    let rule = |n: usize| {
        json!({"id": format!("r{n}"), "verdict": (["allow", "deny", "ask"][n % 3]),
            "agents": [format!("agent-{}", n % 500)], "tools": [format!("tool-{n}.*"), "shared.x"]})
    };
    let set = |count: usize| {
        let rules: Vec<Value> = (0..count).map(rule).collect();
        parse_rule_set("p", &json!({ "rules": rules })).unwrap()
    };
    let start = Instant::now();
    engine.admin().replace_rules(&operator, "p", set(10_000), "many").await.unwrap();
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    let error =
        engine.admin().replace_rules(&operator, "p", set(10_001), "more").await.unwrap_err();
    assert!(error.to_string().contains("at most 10000 rules"), "{error}");
    let one = AccessRule::short("p", "ada", "book.*", RuleVerdict::Allow);
    let error = engine.admin().set_rule(&operator, one.clone()).await.unwrap_err();
    assert_eq!(error.code(), Code::PayloadTooLarge);
    engine.admin().remove_rule_by_id(&operator, "p", "r7").await.unwrap();
    engine.admin().set_rule(&operator, one).await.unwrap();
    assert_eq!(decision(&engine, &agent("ada"), "book.find", json!({})).await, "ok");
    let start = Instant::now();
    for _ in 0..1_000 {
        assert!(!engine.registry().may_use_passthrough(&agent("agent-1"), "shared.x"));
    }
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(10), "{elapsed:?} for 1,000 decisions");
}

#[test]
fn a_rule_that_means_less_than_its_author_thinks_is_refused() {
    for (rule, words) in [
        (json!({"verdict": "allow", "run_id": "r"}), "unknown field \"run_id\""),
        (json!({"verdict": "allow", "environment": "x"}), "did you mean \"environments\"?"),
        (json!({"verdict": "allow", "toolz": ["x"]}), "did you mean \"tools\"?"),
        (json!({"verdict": "allow", "tools": []}), "an empty list matches nothing"),
        (json!({"verdict": "maybe"}), "verdict must be allow, deny or ask"),
        (json!({"agents": ["x"]}), "verdict must be allow, deny or ask"),
        (json!({"verdict": "deny", "effects": ["write"]}), "read, idempotent or irreversible"),
        (json!({"verdict": "deny", "risk_min": "huge"}), "low, medium, high or critical"),
        (json!({"verdict": "deny", "actions": ["fly"]}), "list, invoke, read, cancel"),
        (json!({"verdict": "deny", "tools": ["a b"]}), "is not a tool pattern"),
        (json!({"verdict": "deny", "when": "args.x >"}), "when: "),
        (json!({"verdict": "allow", "approvers": ["x"]}), "only a rule with the verdict ask"),
        (json!({"verdict": "ask", "expires_in_ms": 1}), "number of milliseconds"),
        (json!({"verdict": "deny", "agents": "ada"}), "a list of texts"),
        (json!({"verdict": "deny", "id": "other"}), "the id is \"mine\""),
        (json!("deny"), "a rule is an object"),
    ] {
        let error = parse_rule("p", Some("mine"), &rule, "").unwrap_err();
        assert_eq!(error.code(), Code::ValidationError, "{rule}");
        assert!(error.to_string().contains(words), "{rule}: {error}");
    }
    let twice = json!({"rules": [{"id": "a", "verdict": "deny"}, {"id": "a", "verdict": "allow"}]});
    let error = parse_rule_set("p", &twice).unwrap_err();
    assert!(error.to_string().contains("rules/1/id"), "{error}");
    let unnamed = json!({"rules": [{"id": "a", "verdict": "deny"}, {"verdict": "allow"}]});
    let ids: Vec<_> = parse_rule_set("p", &unnamed).unwrap().into_iter().map(|r| r.id).collect();
    assert_eq!(ids, ["a", "rule-2"]);
    let read = json!({"verdict": "deny", "actions": ["read"]});
    assert_eq!(parse_rule("p", Some("x"), &read, "").unwrap().actions, [RuleAction::Read]);
}
