//! Definitions of agents: versions, bad input, derived agents, and boxes.

use super::*;
use toolcrib::domain::caller::{AuthMethod, Role};

async fn idle_engine() -> Engine {
    let store = Arc::default();
    engine_with(&store, vec![], |_| ready(says("done"))).await
}

#[tokio::test]
async fn a_changed_definition_is_a_new_version() {
    let engine = idle_engine().await;
    let roster = engine.roster();
    let version = |entry: toolcrib::domain::agent::AgentEntry| entry.definition.unwrap().version;
    assert_eq!(version(roster.define_agent(&caller(), agent("a"), None).await.unwrap()), 1);
    assert_eq!(version(roster.define_agent(&caller(), agent("a"), None).await.unwrap()), 1);
    let mut changed = agent("a");
    changed.profile.instructions = "other".into();
    assert_eq!(version(roster.define_agent(&caller(), changed, None).await.unwrap()), 2);
    roster.remove_agent_entry(&caller(), "a").await.unwrap();
    assert_eq!(
        engine.registry().tool(&caller(), "agent.a").err().unwrap().code(),
        Code::ToolNotFound
    );
    assert_eq!(version(roster.define_agent(&caller(), agent("a"), None).await.unwrap()), 3);
    let versions = roster.agent_versions(&caller(), "a", 10).await.unwrap();
    let numbers: Vec<u64> = versions.iter().map(|version| version.definition.version).collect();
    assert_eq!(numbers, [3, 2, 1]);
    assert_eq!(versions[1].definition.profile.instructions, "other");
}

#[tokio::test]
async fn invalid_definitions_are_refused() {
    let engine = idle_engine().await;
    let refusal = async |document: Value| {
        let parsed = toolcrib::registry::parse_agent_definition(Some("x"), &document);
        let error = match parsed {
            Ok(definition) => {
                engine.roster().define_agent(&caller(), definition, None).await.err().unwrap()
            }
            Err(error) => error,
        };
        assert_eq!(error.code(), Code::ValidationError, "{error}");
        error.to_string()
    };
    for (document, expected) in [
        (json!({ "profile": { "instruction": "typo" } }), "unknown field `instruction`"),
        (json!({ "agent_id": "y" }), "agent_id is \"y\""),
        (json!({ "driver": "worker" }), "worker_target or wakeup_url is missing"),
        (json!({ "driver": "robot" }), "unknown variant `robot`"),
        (json!({ "profile": { "limits": { "depth": 21 } } }), "must be from 0 to 20"),
        (json!({ "profile": { "tools": ["a b"] } }), "is not a tool pattern"),
        (json!({ "profile": { "result_fields": ["a", "a"] } }), "repeats the name"),
        (json!({ "profile": { "result_fields": [{ "name": "a", "type": "x" }] } }), "has a type"),
    ] {
        let message = refusal(document).await;
        assert!(message.contains(expected), "{message}");
    }
}

#[tokio::test]
async fn a_derived_agent_never_has_more_than_its_creator() {
    let engine = idle_engine().await;
    let roster = engine.roster();
    let creator = AgentDefinition {
        profile: AgentProfile {
            tools: Some(vec!["calc.*".into(), "agent.*".into()]),
            limits: AgentLimits { tokens: Some(1_000), depth: Some(2), ..AgentLimits::default() },
            ..AgentProfile::default()
        },
        ..agent("boss")
    };
    roster.define_agent(&caller(), creator.clone(), None).await.unwrap();
    // The agent itself, with a key of its own.
    let boss = Caller::new("default", "boss", Role::Agent, AuthMethod::Key);
    let derived = roster.define_agent(&boss, agent("helper"), None).await.unwrap();
    let derived = derived.definition.unwrap();
    assert_eq!(derived.profile.tools, creator.profile.tools);
    assert_eq!(
        (derived.profile.limits.tokens, derived.profile.limits.depth),
        (Some(1_000), Some(1))
    );
    assert_eq!(derived.derived_from.as_deref(), Some("boss"));
    let mut greedy = agent("greedy");
    greedy.profile.tools = Some(vec!["web.search".into()]);
    let error = roster.define_agent(&boss, greedy, None).await.err().unwrap();
    assert!(error.to_string().contains("may not use the tool \"web.search\""), "{error}");
    let rich = with_limits("rich", AgentLimits { tokens: Some(2_000), ..AgentLimits::default() });
    let error = roster.define_agent(&boss, rich, None).await.err().unwrap();
    assert!(error.to_string().contains("limits/tokens is 2000"), "{error}");
    // It replaces neither itself nor the agents of others.
    let error = roster.define_agent(&boss, agent("boss"), None).await.err().unwrap();
    assert_eq!(error.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn a_box_gives_cards_to_an_agent_and_to_those_that_it_calls() {
    let store = Arc::default();
    let engine = engine_with(&store, vec![agent("a"), agent("b")], |prompt| {
        let results = tool_results(prompt);
        let has_card = prompt.messages[1]["content"].as_str().unwrap().contains("the secret is 7");
        ready(match (role(prompt).as_str(), results.is_empty()) {
            ("a", true) => calls(&["agent__b"]),
            ("a", false) => says(results.join(" | ")),
            _ => says(format!("card seen: {has_card}")),
        })
    })
    .await;
    let card = json!({
        "card_id": "c1", "type": "agent.thought", "author_id": "me", "metadata": {},
        "content": { "__type__": "TextContent", "text": "the secret is 7" },
    });
    engine.utp().cards().put_card(&caller(), &card).await.unwrap();
    let base = engine.utp().boxes().create_box(&caller(), vec!["c1".into()], vec![]).await.unwrap();
    let made = engine.utp().boxes().create_box(&caller(), vec![], vec![base.box_id]).await.unwrap();
    let (_, card_ids) = engine.utp().boxes().card_box(&caller(), &made.box_id).await.unwrap();
    assert_eq!(card_ids, ["c1"]);
    let args = json!({ "instruction": "x", "context_box_id": made.box_id });
    let call = call_agent(&engine, "a", args).await;
    let data = call.outcome.as_ref().unwrap().data.as_ref().unwrap().text().to_owned();
    assert!(data.contains("card seen: true"), "{data}");
    let args = json!({ "instruction": "x", "context_box_id": "none" });
    let call = call_agent(&engine, "a", args).await;
    let fault = call.outcome.as_ref().unwrap().error.clone().unwrap();
    assert!(fault.message.contains("there is no box \"none\""), "{}", fault.message);
}

#[tokio::test]
async fn an_agent_that_can_only_be_woken_has_no_unknown_fields() {
    for (document, expected) in [
        (json!({ "allowed_tool": ["a.*"] }), "did you mean `allowed_tools`?"),
        (json!({ "wakeup_url": "https://example.com" }), "unknown field `wakeup_url`"),
        (json!({ "x": null }), "unknown field `x`"),
    ] {
        let mut document = document;
        document["worker_target"] = "w".into();
        let error = toolcrib::registry::parse_agent("p", Some("x"), &document).unwrap_err();
        assert_eq!(error.code(), Code::ValidationError, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let mut response = json!({ "agent_id": "x", "worker_target": "w", "driver": null });
    for name in ["version", "tool", "created_by", "derived_from", "updated_at_ms"] {
        response[name] = json!(1);
    }
    assert!(toolcrib::registry::parse_agent("p", None, &response).is_ok(), "it can be sent back");
}
