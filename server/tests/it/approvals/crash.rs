//! The real binary, killed at each step of an approval, on both stores.

use serde_json::{Value, json};

use crate::support::database::Database;
use crate::support::process::{PATIENCE, Server, eventually, operator_token, text};

/// A server that is killed and started again.
struct KilledServer {
    server: Server,
}

impl KilledServer {
    async fn start(server: Server) -> Self {
        let mut server = server;
        server.start().await;
        server.register("mailer", "mail.send", "irreversible").await;
        let killed = Self { server };
        killed.set_rule("ask").await;
        killed
    }

    async fn set_rule(&self, verdict: &str) {
        let body = json!({ "agent": "*", "pattern": "mail.send", "verdict": verdict });
        let request = self.server.http.put(self.server.url("/v1/rules")).json(&body);
        let answer = self.as_operator(request).await;
        assert_eq!(answer.0, 200, "{}", answer.1);
    }

    async fn as_operator(&self, request: reqwest::RequestBuilder) -> (u16, Value) {
        let token = operator_token(&self.server.data_dir());
        let answer = request.bearer_auth(token).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }

    fn decision(&self, approval_id: &str, verdict: &str) -> reqwest::RequestBuilder {
        let decision = json!({ "approval_id": approval_id, "verdict": verdict, "reason": "r" });
        let body = json!({ "decisions": [decision] });
        let request = self.server.http.post(self.server.url("/v1/approvals/decide"));
        request.bearer_auth(operator_token(&self.server.data_dir())).json(&body)
    }

    async fn decide(&self, approval_id: &str, verdict: &str) -> Value {
        let answer = self.decision(approval_id, verdict).send().await.unwrap();
        let (status, body) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, 200, "{body}");
        body["results"][0].clone()
    }

    async fn held(&self, n: u64) -> (String, String) {
        let body = json!({ "run_id": "r", "args": { "n": n } });
        let ticket = self.server.invoke("mail.send", body).await;
        (text(&ticket, "tool_call_id"), text(&ticket, "approval_id"))
    }

    async fn approval(&self, id: &str) -> Value {
        let request = self.server.http.get(self.server.url(&format!("/v1/approvals/{id}")));
        self.as_operator(request).await.1
    }

    async fn restart(&mut self) {
        self.server.kill();
        self.server.start().await;
    }

    /// Executes the next request, and asserts that no other one follows.
    async fn execute_only(&self, call_id: &str) {
        let requests = self.server.poll_requests("mailer", 1).await;
        assert_eq!(requests[0]["tool_call_id"], json!(call_id), "{requests:?}");
        self.server.submit(call_id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
        assert_eq!(self.server.call(call_id, 10_000).await["status"], "SUCCEEDED");
        assert_eq!(self.server.poll("mailer", 10, 0).await, [] as [Value; 0]);
    }
}

async fn kill_at_each_step(server: Server) {
    let mut killed = KilledServer::start(server).await;

    // Requested: the call waits, runs nothing, and the decision releases it once.
    let (call_id, approval_id) = killed.held(1).await;
    killed.restart().await;
    let call = killed.server.call(&call_id, 0).await;
    assert_eq!(call["hold"], "approval", "{call}");
    assert_eq!(killed.server.poll("mailer", 10, 0).await, [] as [Value; 0]);
    assert_eq!(killed.decide(&approval_id, "approve").await["ok"], true);
    killed.execute_only(&call_id).await;

    // Decided: the release is part of the decision.
    let (call_id, approval_id) = killed.held(2).await;
    killed.decide(&approval_id, "approve").await;
    killed.restart().await;
    assert_eq!(killed.approval(&approval_id).await["status"], "approved");
    killed.execute_only(&call_id).await;

    // Rejected.
    let (call_id, approval_id) = killed.held(3).await;
    killed.decide(&approval_id, "reject").await;
    killed.restart().await;
    assert_eq!(killed.server.call(&call_id, 0).await["status"], "FAILED");
    assert_eq!(killed.approval(&approval_id).await["status"], "rejected");

    // While the decision is on its way: both happened, or neither.
    for n in 10..16 {
        let (call_id, approval_id) = killed.held(n).await;
        let sending = tokio::spawn(killed.decision(&approval_id, "approve").send());
        tokio::time::sleep(std::time::Duration::from_millis((n - 10) * 3)).await;
        killed.restart().await;
        let _ = sending.await;
        let status = killed.approval(&approval_id).await["status"].clone();
        let call = killed.server.call(&call_id, 0).await;
        match status.as_str() {
            Some("pending") => {
                assert_eq!(call["hold"], "approval", "{call}");
                killed.decide(&approval_id, "approve").await;
            }
            _ => assert_ne!(call["hold"], "approval", "{call}"),
        }
        killed.execute_only(&call_id).await;
    }

    // Released and taken by the client: it is not asked again, and not given twice.
    let (call_id, approval_id) = killed.held(4).await;
    killed.decide(&approval_id, "approve").await;
    let taken = killed.server.poll_requests("mailer", 1).await;
    assert_eq!(taken[0]["tool_call_id"], json!(call_id));
    killed.restart().await;
    let call = killed.server.call(&call_id, 0).await;
    assert_ne!(call["hold"], "approval", "{call}");
    killed.server.submit(&call_id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    assert_eq!(killed.server.call(&call_id, 10_000).await["status"], "SUCCEEDED");

    // Replaced: the new call runs, and the first one takes over its outcome.
    let (call_id, approval_id) = killed.held(5).await;
    let decision = json!({ "approval_id": approval_id, "verdict": "approve", "args": { "n": 50 } });
    let request = killed.server.http.post(killed.server.url("/v1/approvals/decide"));
    let (_, answer) = killed.as_operator(request.json(&json!({ "decisions": [decision] }))).await;
    let new_id = text(&answer["results"][0], "replaced_by");
    killed.restart().await;
    killed.execute_only(&new_id).await;
    let first = killed.server.call(&call_id, 10_000).await;
    assert_eq!((&first["status"], &first["result"]), (&json!("SUCCEEDED"), &json!(1)));
    killed.server.stop().await;
}

/// An approval that expires while no server runs.
async fn expire_while_stopped(server: Server) {
    let mut killed = KilledServer::start(server.with("APPROVALS__EXPIRES_IN_MS", 1_500)).await;
    let (call_id, approval_id) = killed.held(1).await;
    killed.server.kill();
    tokio::time::sleep(std::time::Duration::from_millis(1_600)).await;
    killed.server.start().await;
    let call = eventually("the approval to expire", PATIENCE, || async {
        let call = killed.server.call(&call_id, 1_000).await;
        (call["status"] == "FAILED").then_some(call)
    })
    .await;
    assert!(text(&call["error"], "message").starts_with("approval expired"), "{call}");
    assert_eq!(killed.approval(&approval_id).await["status"], "expired");
    killed.server.stop().await;
}

#[tokio::test]
async fn no_step_of_an_approval_is_lost_on_sqlite() {
    kill_at_each_step(Server::new()).await;
    expire_while_stopped(Server::new()).await;
}

#[tokio::test]
async fn no_step_of_an_approval_is_lost_on_postgresql() {
    for scenario in [0, 1] {
        let Some(database) = Database::new().await else { return };
        let server = Server::new().with("STORE__URL", &database.url);
        match scenario {
            0 => kill_at_each_step(server).await,
            _ => expire_while_stopped(server).await,
        }
        database.drop().await;
    }
}
