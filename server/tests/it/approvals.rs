//! Approvals: calls that wait for a person, decisions about them, and everything that shows them.

mod bindings;
mod crash;
mod deciding;
mod joining;
mod many;
mod runs;
mod showing;
mod standing;
mod transports;

use serde_json::{Value, json};
use toolcrib::Caller;
use toolcrib::domain::access_rules::{AccessRule, RuleVerdict};

use crate::support::api::{Api, offer};
use crate::support::{Server, until};

/// A server without keys, whose rule asks about `mail.*`, and a client that offers `mail.send`.
struct Fixture {
    server: Server,
    api: Api,
    operator: Api,
}

impl Fixture {
    async fn start() -> Self {
        Self::on(Server::start().await).await
    }

    async fn on(server: Server) -> Self {
        let (api, operator) = (server.api(), server.operator());
        api.register("mailer", json!([offer("mail.send"), offer("mail.plain")])).await;
        let fixture = Self { server, api, operator };
        fixture.ask("mail", &["mail.send"], |_| {}).await;
        fixture
    }

    /// Sets a rule that asks about these tools.
    async fn ask(&self, id: &str, tools: &[&str], change: impl FnOnce(&mut AccessRule)) {
        set_rule(&self.server, id, RuleVerdict::Ask, tools, change).await;
    }

    /// Calls `mail.send` and asserts that the call waits. Returns the ids of the call and of its
    /// approval.
    async fn held(&self, api: &Api, args: Value) -> (String, String) {
        let body = json!({ "run_id": "run_1", "args": args });
        let ticket = api.post("/v1/tools/mail.send/invoke", body).await.is(202);
        assert_eq!(ticket["hold"], "approval", "{ticket}");
        let id = |name: &str| ticket[name].as_str().unwrap().to_owned();
        (id("tool_call_id"), id("approval_id"))
    }

    async fn decide(&self, decision: Value) -> Value {
        let body = json!({ "decisions": [decision] });
        let answer = self.operator.post("/v1/approvals/decide", body).await.is(200);
        answer["results"][0].clone()
    }

    async fn approve(&self, approval_id: &str) -> Value {
        self.decide(json!({ "approval_id": approval_id, "verdict": "approve" })).await
    }

    /// Executes the next call that the client gets.
    async fn execute(&self, result: Value) -> Value {
        let request = self.api.poll("mailer").await;
        let id = request["tool_call_id"].as_str().unwrap().to_owned();
        self.api.succeed(&id, result).await;
        request
    }

    async fn approval(&self, id: &str) -> Value {
        self.operator.get(&format!("/v1/approvals/{id}")).await.is(200)
    }

    async fn until_hold(&self, id: &str, hold: &str) -> Value {
        until(&format!("{id} to wait for {hold}"), || async {
            let call = self.api.call(id).await;
            (call["hold"] == hold).then_some(call)
        })
        .await
    }
}

async fn set_rule(
    server: &Server,
    id: &str,
    verdict: RuleVerdict,
    tools: &[&str],
    change: impl FnOnce(&mut AccessRule),
) {
    let mut rule = AccessRule::new("default", id, verdict);
    rule.tools = tools.iter().map(|tool| (*tool).to_owned()).collect();
    change(&mut rule);
    let operator = Caller::operator("default");
    server.engine.admin().set_rule(&operator, rule).await.unwrap();
}
