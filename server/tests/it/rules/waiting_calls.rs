//! Calls that wait while the rules change: the decision is taken again with the caller's attributes
//! and the arguments of the call.

use std::time::Instant;

use serde_json::json;

use crate::support::api::{message, offer, offer_with};
use crate::support::{Api, Server, process, until};

#[tokio::test]
async fn a_new_rule_ends_waiting_calls_that_it_matches_within_a_second() {
    let server = Server::start().await;
    let (operator, api) = (server.operator(), server.api());
    let schema = json!({"schema": {"type": "object", "properties": {"n": {"type": "integer"}}}});
    api.register("c1", json!([offer_with("x.one", schema)])).await;
    // Anonymous callers, because the server has no keys.
    let (small, large) =
        (api.invoke("x.one", json!({"n": 1})).await, api.invoke("x.one", json!({"n": 9})).await);
    let start = Instant::now();
    let rule =
        json!({"verdict": "deny", "tools": ["x.one"], "when": "args.n > 5", "note": "too many"});
    operator.put("/v1/rules/large", rule).await.is(200);
    let ended = until("the denial", || async {
        let call = api.call(&large).await;
        (call["status"] == "FAILED").then_some(call)
    })
    .await;
    assert!(start.elapsed().as_millis() < 1_500, "{:?}", start.elapsed());
    assert_eq!(ended["error"]["code"], "PERMISSION_DENIED");
    assert_eq!(ended["error"]["detail"]["rule_id"], "large", "{ended}");
    assert!(message(&ended["error"]).contains("too many"), "{ended}");
    assert_eq!(api.call(&small).await["status"], "PENDING");
    assert_eq!(api.poll("c1").await["tool_call_id"], small.as_str());
}

#[tokio::test]
async fn rules_and_waiting_calls_survive_a_kill() {
    let mut server = process::Server::ready().await;
    let address = format!("127.0.0.1:{}", server.port);
    let api = Api::new(&address);
    let operator = Api::new(&address).key(&process::operator_token(&server.data_dir()));
    api.register("c1", json!([offer("x.one"), offer("y.two")])).await;
    let (x, y) = (api.invoke("x.one", json!({})).await, api.invoke("y.two", json!({})).await);
    operator.put("/v1/rules/keep", json!({"verdict": "deny", "tools": ["z.*"]})).await.is(200);
    server.kill();
    // Without a server, the command line changes the rules in the data directory.
    let words = ["rules", "set", "stop-x", "--verdict", "deny", "--tool", "x.*"];
    let output = server.command(&words).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    server.start().await;
    let ended = api.finished(&x).await;
    assert_eq!(ended["error"]["detail"]["rule_id"], "stop-x", "{ended}");
    assert_eq!(api.call(&y).await["status"], "PENDING");
    let rules = operator.get("/v1/rules").await.is(200);
    assert_eq!((rules["rules"].as_array().unwrap().len(), &rules["version"]), (2, &json!(2)));
}
