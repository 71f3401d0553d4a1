//! Rules as documents: one rule, whole sets, versions, explain, lint and rehearse.

use serde_json::{Value, json};

use crate::support::api::{message, offer_with};
use crate::support::{Api, Server};

async fn rules(api: &Api) -> Vec<Value> {
    api.get("/v1/rules").await.is(200)["rules"].as_array().unwrap().clone()
}

async fn version(api: &Api) -> u64 {
    api.get("/v1/rules").await.is(200)["version"].as_u64().unwrap()
}

#[tokio::test]
async fn a_rule_is_set_shown_and_removed_by_its_id() {
    let server = Server::start().await;
    let operator = server.operator();
    let body = json!({
        "verdict": "ask", "agents": ["ada*"], "groups": ["ops"], "users": ["u*"],
        "sessions": ["s-1"], "environments": ["production"], "tools": ["pay.*"],
        "sources": ["client"], "effects": ["irreversible"], "risk_min": "high",
        "actions": ["invoke"], "when": "args.amount > 100", "approvers": ["boss"],
        "expires_in_ms": 60_000, "note": "large payments",
    });
    let set = operator.put("/v1/rules/large-payments", body.clone()).await.is(200);
    assert_eq!(set["id"], "large-payments");
    let shown = operator.get("/v1/rules/large-payments").await.is(200);
    for (field, value) in body.as_object().unwrap() {
        assert_eq!(shown[field], *value, "{field}");
    }
    assert_eq!(rules(&operator).await, std::slice::from_ref(&shown));
    // What was read can be written.
    operator.put("/v1/rules/large-payments", shown.clone()).await.is(200);
    let all = operator.get("/v1/rules").await.is(200);
    operator.put("/v1/rules", all).await.is(200);
    assert_eq!(rules(&operator).await, [shown]);
    operator.delete("/v1/rules/large-payments").await.is(204);
    operator.get("/v1/rules/large-payments").await.refused(404, "NOT_FOUND");
    operator.delete("/v1/rules/large-payments").await.refused(404, "NOT_FOUND");
    server.api().get("/v1/rules").await.refused(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_mistake_is_refused_with_its_position_and_a_suggestion() {
    let server = Server::start().await;
    let operator = server.operator();
    let short = json!({"agent": "ada", "pattern": "x.*", "verdict": "allow", "run_id": "r1"});
    let error = operator.put("/v1/rules", short).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("unknown field \"run_id\""), "{error}");
    let body = json!({"verdict": "allow", "environment": "production"});
    let error = operator.put("/v1/rules/x", body).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("did you mean \"environments\"?"), "{error}");
    assert_eq!(error["detail"]["pointer"], "/environment");
    let body = json!({"verdict": "deny", "when": "args.amount > 1 &&\n  argz.x"});
    let error = operator.put("/v1/rules/x", body).await.refused(422, "VALIDATION_ERROR");
    assert_eq!((&error["detail"]["line"], &error["detail"]["column"]), (&json!(2), &json!(3)));
    let body =
        json!({"verdict": "deny", "tools": ["calculation.eval"], "when": "args.express == ''"});
    let error = operator.put("/v1/rules/x", body).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("has no argument \"express\""), "{error}");
    assert_eq!(rules(&operator).await, Vec::<Value>::new());
}

#[tokio::test]
async fn an_invalid_set_never_replaces_a_valid_one_and_versions_can_be_restored() {
    let server = Server::start().await;
    let operator = server.operator();
    let first = json!({"rules": [{"id": "a", "verdict": "allow"},
        {"id": "b", "verdict": "deny", "tools": ["x.*"]}]});
    assert_eq!(operator.put("/v1/rules", first).await.is(200)["version"], 1);
    let broken = json!({"rules": [{"id": "c", "verdict": "allow"}, {"id": "d", "verdict": "deny",
        "when": "nope"}]});
    let error = operator.put("/v1/rules", broken).await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("rules/1/when"), "{error}");
    assert_eq!((rules(&operator).await.len(), version(&operator).await), (2, 1));
    operator.put("/v1/rules", json!({"rules": []})).await.is(200);
    assert_eq!((rules(&operator).await.len(), version(&operator).await), (0, 2));
    let back = operator.post("/v1/rules/rollback", json!({"version": 1})).await.is(200);
    assert_eq!((back["version"].as_u64(), back["rules"].as_array().unwrap().len()), (Some(3), 2));
    operator.post("/v1/rules/rollback", json!({"version": 9})).await.refused(404, "NOT_FOUND");
    let versions = operator.get("/v1/rules/versions").await.is(200);
    let numbers: Vec<u64> = versions["versions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|version| version["version"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [3, 2, 1]);
    assert!(versions["versions"][0]["summary"].as_str().unwrap().contains("version 1"));
    let server = server.restart().await;
    assert_eq!((rules(&server.operator()).await.len(), version(&server.operator()).await), (2, 3));
    let audit = server.operator().get("/v1/audit").await.is(200);
    let actions: Vec<&str> = audit["audit"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["action"].as_str().unwrap())
        .collect();
    assert!(
        actions.contains(&"rules.rolled_back") && actions.contains(&"rules.replaced"),
        "{audit}"
    );
}

#[tokio::test]
async fn explain_names_the_rule_and_all_that_were_considered() {
    let server = Server::start().await;
    server.keyed("default", "boss", "admin", &[]).await;
    let operator = server.operator();
    operator.put("/v1/rules/all", json!({"verdict": "allow"})).await.is(200);
    let large = json!({"verdict": "deny", "users": ["mallory"], "tools": ["calculation.*"],
        "when": "size(args.expression) > 5"});
    operator.put("/v1/rules/long", large).await.is(200);
    let explain = |body: Value| {
        let operator = operator.clone();
        async move { operator.post("/v1/rules/explain", body).await.is(200) }
    };
    let body = json!({"agent": "ada", "user": "mallory", "tool": "calculation.eval",
        "args": {"expression": "1+1+1+1"}});
    let denied = explain(body.clone()).await;
    assert_eq!((&denied["decision"], &denied["rule_id"]), (&json!("deny"), &json!("long")));
    assert!(denied["reason"].as_str().unwrap().contains("\"long\""), "{denied}");
    assert_eq!(denied["considered"].as_array().unwrap().len(), 2, "{denied}");
    let mut short = body.clone();
    short["args"] = json!({"expression": "1+1"});
    let allowed = explain(short).await;
    assert_eq!((&allowed["decision"], &allowed["rule_id"]), (&json!("allow"), &json!("all")));
    let considered = &allowed["considered"][0];
    assert_eq!((&considered["rule_id"], &considered["matches"]), (&json!("long"), &json!(false)));
    assert!(considered["reason"].as_str().unwrap().contains("when"), "{considered}");
    let mut other = body;
    other["user"] = json!("mia");
    assert_eq!(explain(other).await["decision"], "allow");
    let typo = json!({"agnet": "ada", "tool": "x"});
    operator.post("/v1/rules/explain", typo).await.refused(422, "VALIDATION_ERROR");
}

#[tokio::test]
async fn lint_finds_shadowed_rules_and_rules_that_never_match() {
    let server = Server::start().await;
    server.keyed("default", "ada", "agent", &[]).await;
    let operator = server.operator();
    let set = json!({"rules": [
        {"id": "all", "verdict": "allow"},
        {"id": "same", "verdict": "allow", "tools": ["weather.*"]},
        {"id": "dead", "verdict": "allow", "tools": ["database.query"]},
        {"id": "no-database", "verdict": "deny", "tools": ["database.*"]},
        {"id": "typo", "verdict": "deny", "tools": ["weathers.*"]},
        {"id": "stranger", "verdict": "deny", "agents": ["eve"]},
        {"id": "fine", "verdict": "deny", "tools": ["calculation.eval"],
            "when": "args.expression == 'x'"},
    ]});
    operator.put("/v1/rules", set).await.is(200);
    let findings = operator.post("/v1/rules/lint", json!({})).await.is(200);
    let found: Vec<(&str, &str)> = findings["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| (finding["rule_id"].as_str().unwrap(), finding["kind"].as_str().unwrap()))
        .collect();
    for expected in [
        ("same", "shadowed"),
        ("dead", "shadowed"),
        ("typo", "never_matches"),
        ("stranger", "never_matches"),
    ] {
        assert!(found.contains(&expected), "{expected:?} in {findings}");
    }
    assert!(!found.iter().any(|(id, _)| ["all", "no-database", "fine"].contains(id)), "{findings}");
}

#[tokio::test]
async fn rehearse_lists_what_a_proposed_set_would_change_and_changes_nothing() {
    let server = Server::start().await;
    let operator = server.operator();
    let ada = server.keyed("default", "ada", "agent", &["*"]).await;
    let bob = server.keyed("default", "bob", "agent", &["*"]).await;
    let sum = |expression: &str| json!({"run_id": "r", "args": {"expression": expression}});
    let path = "/v1/tools/calculation.eval/invoke?wait_ms=20000";
    for expression in ["1+1", "1+1+1+1+1", "2+2+2+2+2"] {
        ada.post(path, sum(expression)).await.is(202);
    }
    bob.post(path, sum("1+1")).await.is(202);
    let before = operator.get("/v1/rules").await.is(200);
    let proposed = json!({"days": 1, "rules": [{"id": "all", "verdict": "allow"},
        {"id": "long", "verdict": "deny", "when": "size(args.expression) > 5"},
        {"id": "bob", "verdict": "ask", "agents": ["bob"]}]});
    let result = operator.post("/v1/rules/rehearse", proposed).await.is(200);
    assert_eq!((&result["calls"], &result["changed"]), (&json!(4), &json!(3)), "{result}");
    let change = &result["changes"][0];
    assert_eq!((&change["agent"], &change["calls"]), (&json!("ada"), &json!(2)), "{result}");
    assert_eq!((&change["before"], &change["after"]), (&json!("allow"), &json!("deny")));
    assert_eq!(change["rule_id"], "long");
    assert_eq!(result["changes"][1]["after"], "ask");
    assert_eq!(operator.get("/v1/rules").await.is(200), before);
}

#[tokio::test]
async fn the_operators_risk_overrides_that_of_the_source() {
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let text = "[[rules]]\nid = 'all'\nverdict = 'allow'\n[[rules]]\nid = 'risky'\nverdict = 'deny'\n\
                risk_min = 'critical'\n";
    std::fs::write(file.path(), text).unwrap();
    let server = Server::with(|config| {
        let settings = toolcrib_server::config::ToolSettings {
            risk: Some(toolcrib::Risk::Critical),
            ..Default::default()
        };
        config.tools.insert("calm.tool".to_owned(), settings);
        config.rules_file = Some(file.path().to_owned());
    })
    .await;
    let api = server.api();
    let tools = [
        offer_with("calm.tool", json!({"risk_level": "low"})),
        offer_with("wild.tool", json!({"risk_level": "critical"})),
        offer_with("mild.tool", json!({"risk": "high"})),
    ];
    api.register("c1", json!(tools)).await;
    let body = json!({"run_id": "r", "args": {}});
    for tool in ["calm.tool", "wild.tool"] {
        let error = api.post(&format!("/v1/tools/{tool}/invoke"), body.clone()).await;
        let error = error.refused(403, "PERMISSION_DENIED");
        assert_eq!(error["detail"]["rule_id"], "risky", "{error}");
    }
    api.post("/v1/tools/mild.tool/invoke", body).await.is(202);
    let shown = server.operator().get("/v1/tools/calm.tool").await.is(200);
    assert_eq!(shown["risk"], "critical");
    let names: Vec<Value> = api.get("/v1/tools").await.is(200)["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["name"].clone())
        .collect();
    assert!(names.contains(&json!("mild.tool")) && !names.contains(&json!("wild.tool")));
}

#[tokio::test]
async fn decisions_are_counted() {
    let server = Server::start().await;
    let operator = server.operator();
    operator.put("/v1/rules/no", json!({"verdict": "deny", "tools": ["weather.*"]})).await.is(200);
    let body = json!({"run_id": "r", "args": {"city": "Oslo"}});
    let error = server.api().post("/v1/tools/weather.query/invoke", body).await;
    let error = error.refused(403, "PERMISSION_DENIED");
    assert_eq!(error["detail"]["rule_id"], "no");
    assert!(error["detail"]["reason"].as_str().unwrap().contains("\"no\""), "{error}");
    let request = operator.request(reqwest::Method::GET, "/metrics");
    let metrics = request.send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("toolcrib_policy_decisions_total{decision=\"deny\"}"), "{metrics}");
    let audit = operator.get("/v1/audit").await.is(200);
    assert_eq!(audit["audit"][0]["action"], "call.denied", "{audit}");
}
