//! A request that is repeated after a broken connection joins the work of the first one. Two
//! deliberate identical requests stay two.

mod conversations;
mod mcp;
mod proxy;
mod restarts;
pub mod sdks;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use toolcrib_bench::model::{ScriptedModel, text_reply, tool_call_reply};

use crate::support::Server;
use crate::support::api::{Api, offer, offer_with};

/// The tool that must not run twice; the test executes its calls as the client `bank`.
const TOOL: &str = "bank.pay";

fn payment() -> Value {
    json!({ "run_id": "run_1", "args": { "amount": 5 } })
}

async fn start_bank() -> (Server, Api) {
    let server = Server::start().await;
    let api = server.api();
    api.register("bank", json!([offer(TOOL)])).await;
    (server, api)
}

/// Sends a request over a connection of its own, and leaves the response unread.
async fn send_request(address: &str, path: &str, body: &Value) -> TcpStream {
    send_request_with(address, path, "", body).await
}

/// Sends a request with these headers, each with its line break.
async fn send_request_with(address: &str, path: &str, headers: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         {headers}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

async fn count_calls(api: &Api) -> usize {
    let listed = api.get("/v1/tool_calls?limit=200").await.is(200);
    listed["tool_calls"].as_array().unwrap().len()
}

fn text<'a>(body: &'a Value, field: &str) -> &'a str {
    body[field].as_str().unwrap()
}

const WAITING: &str = "/v1/tools/bank.pay/invoke?wait_ms=30000";

#[tokio::test]
async fn a_request_repeated_after_a_broken_connection_joins_its_call() {
    let (_server, api) = start_bank().await;
    let connection = send_request(&api.address, WAITING, &payment()).await;
    let request = api.poll("bank").await;
    let id = text(&request, "tool_call_id").to_owned();
    drop(connection);
    let again = tokio::spawn({
        let api = api.clone();
        async move { api.post(WAITING, payment()).await }
    });
    api.succeed(&id, json!({ "paid": 5 })).await;
    let reply = again.await.unwrap();
    assert_eq!(reply.header("toolcrib-joined"), Some(id.as_str()), "{}", reply.text);
    let call = reply.is(202);
    assert_eq!((&call["joined"], &call["result"]), (&json!(true), &json!({ "paid": 5 })));
    assert_eq!(call["tool_call_id"], id.as_str());
    assert_eq!(count_calls(&api).await, 1);
    let metrics = api.get("/metrics").await.text;
    assert!(metrics.contains("toolcrib_rejoined_total{kind=\"call\"} "), "{metrics}");
}

#[tokio::test]
async fn an_answer_that_the_peer_never_read_is_not_delivered() {
    let (_server, api) = start_bank().await;
    let connection = send_request(&api.address, "/v1/tools/bank.pay/invoke", &payment()).await;
    let request = api.poll("bank").await;
    // The ticket is in the socket's buffer; closing it unread resets the connection.
    connection.readable().await.unwrap();
    drop(connection);
    let ticket = api.post("/v1/tools/bank.pay/invoke", payment()).await.is(202);
    assert_eq!(ticket["joined"], true, "{ticket}");
    assert_eq!(ticket["tool_call_id"], request["tool_call_id"]);
    assert_eq!(count_calls(&api).await, 1);
}

#[tokio::test]
async fn two_deliberate_identical_requests_stay_two() {
    let (_server, api) = start_bank().await;
    for body in [payment(), payment()] {
        let ticket = api.post("/v1/tools/bank.pay/invoke", body).await.is(202);
        assert_eq!(ticket.get("joined"), None, "{ticket}");
    }
    // Both requesters wait at the same time.
    let waiting = [payment(), payment()].map(|body| {
        let api = api.clone();
        tokio::spawn(async move { api.post(WAITING, body).await.is(202) })
    });
    for _ in 0..4 {
        let request = api.poll("bank").await;
        api.succeed(text(&request, "tool_call_id"), json!({})).await;
    }
    for reply in waiting {
        assert_eq!(reply.await.unwrap().get("joined"), None);
    }
    assert_eq!(count_calls(&api).await, 4);
}

#[tokio::test]
async fn rejoin_is_turned_off_by_the_request_the_tool_and_the_policy() {
    let (_server, api) = start_bank().await;
    let off = offer_with("bank.anew", json!({ "rejoin": false }));
    let by_policy = offer_with("bank.again", json!({ "policy": { "rejoin_window_ms": 0 } }));
    api.register("others", json!([off, by_policy])).await;
    let plain = payment();
    let refusing = json!({ "run_id": "run_1", "args": { "amount": 5 }, "rejoin": false });
    let cases = [
        (TOOL, "bank", &refusing),
        ("bank.anew", "others", &plain),
        ("bank.again", "others", &plain),
    ];
    for (tool, client, body) in cases {
        let path = format!("/v1/tools/{tool}/invoke?wait_ms=30000");
        let connection = send_request(&api.address, &path, body).await;
        let first = api.poll(client).await;
        drop(connection);
        let connection = send_request(&api.address, &path, body).await;
        let second = api.poll(client).await;
        assert_ne!(first["tool_call_id"], second["tool_call_id"], "{tool}");
        drop(connection);
    }
}

#[tokio::test]
async fn a_repeated_batch_joins_its_calls() {
    let (_server, api) = start_bank().await;
    let entry = |amount: u32| json!({ "name": TOOL, "args": { "amount": amount } });
    let batch = json!({ "run_id": "run_1", "mode": "parallel", "order": "free",
        "tool_calls": [entry(1), entry(1), entry(2)] });
    let connection = send_request(&api.address, "/v1/tool_calls", &batch).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(text(&api.poll("bank").await, "tool_call_id").to_owned());
    }
    drop(connection);
    let again = tokio::spawn({
        let api = api.clone();
        async move { api.post("/v1/tool_calls", batch).await }
    });
    for id in &ids {
        api.succeed(id, json!({ "by": id })).await;
    }
    let reply = again.await.unwrap();
    assert_eq!(reply.headers.get_all("toolcrib-joined").iter().count(), 3);
    let answer = reply.is(200);
    for result in answer["results"].as_array().unwrap() {
        assert_eq!((&result["ok"], &result["joined"]), (&json!(true), &json!(true)), "{result}");
    }
    assert_eq!(count_calls(&api).await, 3);
}

#[tokio::test]
async fn a_repeated_request_for_a_run_joins_the_run() {
    let replies =
        [tool_call_reply("call_1", "bank__pay", &json!({ "amount": 5 })), text_reply("paid")];
    let model = ScriptedModel::start_with_replies(replies).await.unwrap();
    let server = Server::with(|config| {
        config.llm.base_url = Some(model.url.clone());
        config.llm.model = Some("large".into());
    })
    .await;
    let api = server.api();
    api.register("bank", json!([offer(TOOL)])).await;
    let body = json!({ "messages": [{ "role": "user", "content": "pay" }], "wait_ms": 30_000 });
    let connection = send_request(&api.address, "/v1/runs", &body).await;
    let request = api.poll("bank").await;
    drop(connection);
    let again = tokio::spawn({
        let api = api.clone();
        async move { api.post("/v1/runs", body).await }
    });
    api.succeed(text(&request, "tool_call_id"), json!({ "paid": 5 })).await;
    let reply = again.await.unwrap();
    let joined = reply.header("toolcrib-joined").map(str::to_owned);
    let run = reply.is(200);
    assert_eq!((&run["joined"], &run["answer"]), (&json!(true), &json!("paid")), "{run}");
    let listed = api.get("/v1/runs").await.is(200);
    assert_eq!(listed["runs"].as_array().unwrap().len(), 1);
    assert_eq!(joined.as_deref(), listed["runs"][0]["run_id"].as_str(), "{listed}");
    assert_eq!(model.requests().len(), 2);
}

#[tokio::test]
async fn a_key_can_turn_rejoin_off() {
    let (server, _api) = start_bank().await;
    let operator = server.keyed("default", "ops", "admin", &[]).await;
    let provider = server.keyed("default", "default", "provider", &[]).await;
    let body = json!({ "agent": "cron", "allow": ["bank.*"], "rejoin": false });
    let created = operator.post("/v1/keys", body).await.is(201);
    assert_eq!(created["rejoin"], false, "{created}");
    let cron = server.with_key(text(&created, "key"));
    let mut seen = Vec::new();
    for _ in 0..2 {
        let sending = tokio::spawn({
            let cron = cron.clone();
            async move { cron.post(WAITING, payment()).await }
        });
        seen.push(text(&provider.poll("bank").await, "tool_call_id").to_owned());
        sending.abort();
        let _ = sending.await;
    }
    assert_ne!(seen[0], seen[1]);
}
