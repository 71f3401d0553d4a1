//! Malformed requests and unknown paths get an error that names the location. The server keeps
//! working.

use reqwest::{Method, header};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::api::{Reply, message, offer};
use crate::support::{Api, Server, soon};

const EVAL: &str = "/v1/tools/calculation.eval/invoke";

/// Asserts that no call was stored and that the server still executes calls.
async fn assert_server_works(api: &Api) {
    assert_eq!(api.get("/v1/tool_calls").await.is(200)["tool_calls"], json!([]));
    let id = api.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
}

#[tokio::test]
async fn a_body_over_the_limit_is_rejected_with_413() {
    let server = Server::with(|config| config.limits.max_body_bytes = 10_000).await;
    let api = server.api();
    let fits = json!({ "run_id": "run_1", "args": { "expression": "1" } }).to_string();
    let fits = fits + &" ".repeat(9_900);
    assert!(fits.len() < 10_000);
    let large = json!({ "run_id": "run_1", "args": { "expression": "y".repeat(10_000) } });
    let large = large.to_string();
    let error = api.post_raw(EVAL, large.clone()).await.refused(413, "PAYLOAD_TOO_LARGE");
    assert!(message(&error).contains("10000 bytes"), "{error}");
    // Chunked, without a Content-Length.
    let chunks: Vec<Result<Vec<u8>, std::io::Error>> =
        large.as_bytes().chunks(1_000).map(|chunk| Ok(chunk.to_vec())).collect();
    let chunked = reqwest::Body::wrap_stream(futures::stream::iter(chunks));
    api.post_raw(EVAL, chunked).await.refused(413, "PAYLOAD_TOO_LARGE");
    let register = json!({ "client_id": "c1", "tools": [], "x": "y".repeat(10_000) });
    let answer = api.post("/internal/tools/register", register).await;
    answer.refused(413, "PAYLOAD_TOO_LARGE");
    assert_server_works(&api).await;
    api.post_raw(EVAL, fits).await.is(202);
}

#[tokio::test]
async fn a_too_large_content_length_is_rejected_before_the_body_arrives() {
    let server = Server::start().await;
    let mut stream = tokio::net::TcpStream::connect(&server.address).await.unwrap();
    let head = format!(
        "POST {EVAL} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000000\r\n\r\n{{"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    soon("the answer", stream.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn a_caller_that_sends_3_mib_receives_the_413_response() {
    let server = Server::start().await;
    for _ in 0..5 {
        let api = server.api();
        let answer = api.post_raw(EVAL, "x".repeat(3 << 20)).await;
        answer.refused(413, "PAYLOAD_TOO_LARGE");
    }
}

#[tokio::test]
async fn arguments_over_the_limit_are_rejected_with_413() {
    let server = Server::with(|config| config.limits.max_args_bytes = 100).await;
    let api = server.api();
    let args = json!({ "expression": "1+".repeat(60) + "1" });
    let answer = api.post(EVAL, json!({ "run_id": "run_1", "args": args })).await;
    let error = answer.refused(413, "PAYLOAD_TOO_LARGE");
    assert!(message(&error).contains("args") && message(&error).contains("100"), "{error}");
    assert_server_works(&api).await;
}

#[tokio::test]
async fn a_malformed_body_is_rejected_with_line_and_column() {
    let server = Server::start().await;
    let api = server.api();
    let deep = format!("\n{{\"args\":{}{}}}", "[".repeat(64), "]".repeat(64));
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"not json".to_vec(), "line 1 column 2"),
        (b"{\"run_id\": \"run_1\",\n \"args\": }".to_vec(), "line 2 column 10"),
        (b"{\"run_id\": \"run_1\"".to_vec(), "line 1 column 18"),
        (b"{\"run_id\": \"run_1\"} trailing".to_vec(), "line 1 column 21"),
        (b"{\"run_id\": 7}".to_vec(), "line 1 column 12"),
        (b"{\"run_id\": \"r\", \"timeout_ms\": \"soon\"}".to_vec(), "line 1 column"),
        (b"{\"run_id\": \"r\", \"timeout_ms\": 1.5}".to_vec(), "a whole number of milliseconds"),
        (b"{\"run_id\": \"r\", \"retry\": 1.5}".to_vec(), "line 1 column"),
        (b"[]".to_vec(), "line 1 column"),
        (b"null".to_vec(), "line 1 column"),
        (b"\"text\"".to_vec(), "line 1 column"),
        (b"{\"args\": {}}".to_vec(), "missing field `run_id`"),
        (b"".to_vec(), "missing field `run_id`"),
        (b"{\"run_id\": \"a\xff\xfeb\"}".to_vec(), "line 1 column 14"),
        (b"\xff\xfe{\x00}\x00".to_vec(), "line 1 column"),
        (deep.into_bytes(), "nested deeper than 64 levels at line 2 column 72"),
    ];
    for (body, expected) in cases {
        let body_text = String::from_utf8_lossy(&body).into_owned();
        let error = api.post_raw(EVAL, body).await.refused(400, "BAD_REQUEST");
        assert!(message(&error).contains(expected), "{body_text}: {error}");
        assert_eq!(error["retryable"], false);
    }
    let broken = [
        ("/internal/tools/register", "{\"client_id\": 7}"),
        ("/internal/tools/register", "{\"client_id\": \"c1\", \"tools\": {}}"),
        ("/internal/tool_calls/tc_01ARZ3NDEKTSV4RRFFQ69G5FAV/submit", "{"),
        ("/v1/tool_calls/tc_01ARZ3NDEKTSV4RRFFQ69G5FAV/cancel", "[1"),
        ("/v1/keys", "{\"agent\": []}"),
    ];
    for (path, body) in broken {
        let error = server.operator().post_raw(path, body).await.refused(400, "BAD_REQUEST");
        assert!(message(&error).contains("line 1 column"), "{path}: {error}");
    }
    assert_server_works(&api).await;
}

#[tokio::test]
async fn json_nested_64_levels_deep_is_accepted() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([{ "name": "a.tool", "schema": {} }])).await;
    let body = format!("{{\"run_id\":\"r\",\"args\":{}{}}}", "[".repeat(63), "]".repeat(63));
    api.post_raw("/v1/tools/a.tool/invoke", body).await.is(202);
    let bomb = format!("{{\"run_id\":\"r\",\"args\":{}", "[".repeat(1_000_000));
    let answer = api.post_raw("/v1/tools/a.tool/invoke", bomb).await;
    answer.refused(400, "BAD_REQUEST");
}

#[tokio::test]
async fn an_invalid_request_field_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    let long = "x".repeat(256);
    for (field, value) in [
        ("timeout_ms", json!(0)),
        ("timeout_ms", json!(86_400_001)),
        ("timeout_ms", json!(-1)),
        ("timeout_ms", json!(u64::MAX)),
        ("timeout_ms", json!(1e30)),
        ("timeout_ms", json!(-2.0)),
        ("retry", json!(101)),
        ("run_id", json!("")),
        ("run_id", json!(long)),
        ("run_id", json!("a\nb")),
        ("call_id", json!(long)),
        ("user_id", json!("")),
        ("client_id", json!("nobody")),
        ("idempotency_key", json!(long)),
    ] {
        let mut body = json!({ "run_id": "run_1", "args": { "expression": "1" } });
        body[field] = value.clone();
        let error = api.post(EVAL, body).await.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains(field) || field == "client_id", "{value}: {error}");
    }
    assert_server_works(&api).await;
    for timeout_ms in [1, 86_400_000] {
        let args = json!({ "expression": "1" });
        let body = json!({ "run_id": "run_1", "args": args, "timeout_ms": timeout_ms });
        let id = api.invoke_with("calculation.eval", body).await;
        let call = api.finished(&id).await;
        let accepted =
            call["deadline_at_ms"].as_u64().unwrap() - call["created_at_ms"].as_u64().unwrap();
        assert_eq!(accepted, timeout_ms);
    }
}

#[tokio::test]
async fn a_call_shows_the_call_id_and_user_id_of_its_request() {
    let server = Server::start().await;
    let api = server.api();
    let body = json!({
        "run_id": "run_1", "args": { "expression": "1" }, "call_id": "call_abc",
        "user_id": "Ünïcode ok"
    });
    let id = api.invoke_with("calculation.eval", body).await;
    let call = api.finished(&id).await;
    assert_eq!(call["call_id"], "call_abc");
    assert_eq!(call["user_id"], "Ünïcode ok");
    assert_eq!(call["agent"], "default", "the agent comes from the key, never from the body");
}

#[tokio::test]
async fn an_unknown_tool_error_suggests_the_nearest_names() {
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "run_id": "run_1", "args": {} });
    let error = api.post("/v1/tools/weather.qery/invoke", body.clone()).await;
    let error = error.refused(404, "TOOL_NOT_FOUND");
    assert_eq!(error["detail"]["nearest"][0], "weather.query");
    assert!(message(&error).contains("\"weather.qery\""), "{error}");
    assert!(message(&error).contains("did you mean \"weather.query\"?"), "{error}");
    let error = api.get("/v1/tools/zzz").await.refused(404, "TOOL_NOT_FOUND");
    assert_eq!(error["detail"]["nearest"], json!([]));
    assert!(message(&error).contains("GET /v1/tools"), "{error}");
    let strange = format!("/v1/tools/{}/invoke", "%F0%9F%94%A7".repeat(50));
    api.post(&strange, body.clone()).await.refused(404, "TOOL_NOT_FOUND");
    api.post("/v1/tools/%ff%fe/invoke", body).await.refused(400, "BAD_REQUEST");
}

#[tokio::test]
async fn an_unknown_call_id_is_rejected_with_404() {
    let server = Server::start().await;
    let api = server.api();
    for id in ["tc_01ARZ3NDEKTSV4RRFFQ69G5FAV", "tc_", "nonsense", "%ff", "tc_%00", "..%2f.."] {
        for path in ["", "/events", "?wait_ms=1000"] {
            let answer = api.get(&format!("/v1/tool_calls/{id}{path}")).await;
            answer.refused(404, "NOT_FOUND");
        }
        let path = format!("/internal/tool_calls/{id}/submit");
        api.post(&path, json!({ "status": "FAILED" })).await.refused(404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn unknown_paths_get_404_and_unsupported_methods_405() {
    let server = Server::start().await;
    let api = server.api();
    for path in ["/", "/v1", "/v1/nothing", "/v2/tools", "/internal", "/v1/tools/"] {
        let answer = api.get(path).await;
        assert_eq!(answer.body["hint"], "check the path of the URL", "not advice on ids");
        let error = answer.refused(404, "NOT_FOUND");
        assert!(message(&error).contains("/docs"), "{error}");
    }
    for (method, path) in [
        (Method::DELETE, "/v1/tools"),
        (Method::GET, EVAL),
        (Method::PATCH, "/v1/tool_calls/tc_1"),
        (Method::GET, "/internal/tools/register"),
        (Method::POST, "/healthz"),
        (Method::POST, "/internal/ingress/ws"),
    ] {
        let answer = api.send(api.request(method.clone(), path)).await;
        let allow = answer.header("allow").map(str::to_owned);
        assert!(allow.is_some_and(|allow| !allow.is_empty()), "{method} {path}");
        let error = answer.refused(405, "BAD_REQUEST");
        assert!(message(&error).contains(method.as_str()), "{error}");
    }
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = Server::start().await;
    let api = server.api();
    let id = |reply: &Reply| reply.header("x-request-id").unwrap().to_owned();
    let one = api.get("/v1/tools").await;
    assert_eq!(one.header("toolcrib-version"), Some(env!("CARGO_PKG_VERSION")));
    assert_ne!(id(&one), id(&api.get("/v1/nothing").await));
    let request = api.request(Method::GET, "/v1/tool_calls/tc_1").header("x-request-id", "mine-7");
    assert_eq!(id(&api.send(request).await), "mine-7", "the caller's own, if it sent one");
}

#[tokio::test]
async fn non_http_bytes_do_not_affect_other_connections() {
    let server = Server::start().await;
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"GET\r\n\r\n", &[0; 64]] {
        let mut stream = tokio::net::TcpStream::connect(&server.address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        let mut answer = Vec::new();
        let _ = soon("the end", stream.read_to_end(&mut answer)).await;
    }
    assert_server_works(&server.api()).await;
}

#[tokio::test]
async fn a_missing_or_wrong_content_type_is_accepted() {
    let server = Server::start().await;
    let api = server.api();
    let body = json!({ "run_id": "run_1", "args": { "expression": "1" } }).to_string();
    // `curl -d` sends this content type by default.
    let content_type = "application/x-www-form-urlencoded";
    let request = api.request(Method::POST, EVAL).header(header::CONTENT_TYPE, content_type);
    api.send(request.body(body.clone())).await.is(202);
    api.send(api.request(Method::POST, EVAL).body(body)).await.is(202);
}

#[tokio::test]
async fn an_invalid_submit_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    for status in ["RUNNING", "", "done"] {
        let error = api.submit(&id, json!({ "status": status })).await;
        let error = error.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains("SUCCEEDED or FAILED"), "{error}");
    }
    api.submit(&id, json!({ "result": 1 })).await.refused(400, "BAD_REQUEST");
    api.submit(&id, json!({ "status": "FAILED", "attempt": "x" }))
        .await
        .refused(400, "BAD_REQUEST");
    let wrong = json!({ "status": "SUCCEEDED", "attempt": 2 });
    let error = api.submit(&id, wrong).await.refused(409, "CONFLICT");
    assert_eq!(error["detail"]["attempt"], 1);
    assert_eq!(api.call(&id).await["status"], "PENDING");
    let builtin = api.invoke("calculation.eval", json!({ "expression": "1" })).await;
    let answer = api.submit(&builtin, json!({ "status": "SUCCEEDED", "result": 5 })).await;
    answer.refused(403, "PERMISSION_DENIED");
    assert_ne!(api.finished(&builtin).await["result"], Value::from(5));
}

#[tokio::test]
async fn an_invalid_query_parameter_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    let id = api.post(EVAL, json!({ "run_id": "r", "args": { "expression": "1" } })).await;
    let id = id.body["tool_call_id"].as_str().unwrap().to_owned();
    let limited = ["deliveries", "tasks", "tool_calls", "runs", "audit", "tools?query=x"];
    for path in limited {
        let separator = if path.contains('?') { '&' } else { '?' };
        for value in ["-1", "many", "1.5", "99999999999999999999999"] {
            let answer = api.get(&format!("/v1/{path}{separator}limit={value}")).await;
            let error = answer.refused(422, "VALIDATION_ERROR");
            assert_eq!(error["detail"]["field"], "limit", "{path}: {error}");
            assert!(message(&error).contains(value), "{path}: {error}");
        }
    }
    let answer = api.get("/v1/tool_calls?run_id=%ff").await.refused(400, "BAD_REQUEST");
    assert!(message(&answer).contains("UTF-8"), "{answer}");
    for limit in [0, 1_001] {
        let answer = server.operator().get(&format!("/v1/audit?limit={limit}")).await;
        assert_eq!(answer.refused(422, "VALIDATION_ERROR")["detail"]["field"], "limit");
    }
    let batch = json!({ "run_id": "r", "tool_calls": [{ "name": "calculation.eval" }] });
    let answer = api.post("/v1/tool_calls?wait_ms=-1", batch).await;
    assert_eq!(answer.refused(422, "VALIDATION_ERROR")["detail"]["field"], "wait_ms");
    for path in [format!("/v1/tasks/{id}"), format!("/v1/tool_calls/{id}")] {
        let answer = api.get(&format!("{path}?wait_ms=-1")).await;
        assert_eq!(answer.refused(422, "VALIDATION_ERROR")["detail"]["field"], "wait_ms");
    }
}

#[tokio::test]
async fn a_context_post_requires_its_list() {
    let server = Server::start().await;
    let api = server.api();
    for (path, field) in [("tool_calls", "/tool_calls"), ("tool_results", "/tool_results")] {
        let path = format!("/v1/runs/r/context/{path}");
        for body in [json!({}), json!({ &field[1..]: 7 }), json!({ &field[1..]: {} })] {
            let error = api.post(&path, body).await.refused(422, "VALIDATION_ERROR");
            assert_eq!(error["detail"]["pointer"], field, "{error}");
        }
    }
}

#[tokio::test]
async fn a_body_that_is_not_a_json_object_is_rejected() {
    let server = Server::start().await;
    let api = server.api();
    let call = json!({ "name": "calculation.eval", "args": { "expression": "1" } });
    let positional = json!(["r", [call], null, null, null, null, null, null, null, null]);
    let lists = [
        ("/v1/tool_calls", positional),
        (EVAL, json!(["r", { "expression": "1" }, null, null, null, null, null, null])),
        ("/internal/tools/register", json!(["c1", [{ "name": "a.tool" }], null])),
        (EVAL, json!("text")),
        (EVAL, json!(null)),
    ];
    for (path, list) in lists {
        let error = api.post(path, list).await.refused(400, "BAD_REQUEST");
        assert!(message(&error).contains("must be a JSON object"), "{path}: {error}");
    }
}

#[tokio::test]
async fn a_rejection_lists_every_invalid_field() {
    let server = Server::start().await;
    let api = server.api();
    let path = "/v1/tools/calculation.eval/invoke";
    let body = json!({ "run_id": "r", "args": { "expression": 5, "x": 1 } });
    let rejection = api.post(path, body).await.body;
    assert_eq!((&rejection["status"], &rejection["instance"]), (&json!(422), &json!(path)));
    let pointers = rejection["errors"].as_array().unwrap().iter().map(|error| &error["pointer"]);
    assert_eq!(pointers.collect::<Vec<_>>(), ["#/args/expression", "#/args/x"], "{rejection}");
    let detail = rejection["errors"][0]["detail"].as_str().unwrap();
    assert!(detail.contains("must be a string"), "{detail}");
    let body = json!({ "run_id": "r", "args": { "expression": "1" }, "callback_url": "ftp://x" });
    let rejection = api.post(path, body).await.body;
    assert_eq!(rejection["errors"][0]["pointer"], "#/callback_url", "{rejection}");
    let queries = [
        ("/v1/tool_calls?limit=many", "limit"),
        ("/v1/tool_calls?limit=0", "limit"),
        ("/v1/tool_calls?status=foo", "status"),
        ("/v1/tool_calls?cursor=zz", "cursor"),
        ("/v1/tool_calls?since=x", "since"),
        ("/v1/tasks?status=foo", "status"),
        ("/v1/tasks?cursor=zz", "cursor"),
        ("/v1/runs?status=foo", "status"),
        ("/v1/runs?cursor=zz", "cursor"),
        ("/v1/runs?limit=201", "limit"),
        ("/v1/runs?since=x", "since"),
        ("/v1/deliveries?status=foo", "status"),
        ("/v1/dead_letters?limit=0", "limit"),
        ("/v1/tools?format=x", "format"),
        ("/v1/tools?format=openai&query=x", "format"),
        ("/v1/tools?query=x&limit=0", "limit"),
        ("/internal/ingress/poll?client_id=c&ack=maybe", "ack"),
        ("/internal/ingress/poll?client_id=c&max=0", "max"),
    ];
    for (query, name) in queries {
        let answer = api.get(query).await;
        let parameter = &answer.body["errors"][0]["parameter"];
        assert_eq!(parameter, name, "{query}: {}", answer.body);
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["field"], name, "{query}: {error}");
    }
    let rejection = api.get("/v1/nothing?key=secret").await.body;
    assert_eq!(
        (&rejection["instance"], &rejection["errors"]),
        (&json!("/v1/nothing"), &json!(null))
    );
}

/// A path or a query that is not UTF-8 is refused in the format that the route documents.
#[tokio::test]
async fn bytes_that_are_not_utf8_are_refused_in_the_documented_format() {
    let server = Server::start().await;
    let api = server.api();
    let reply = api.get("/v1/models/%ff").await;
    assert_eq!(reply.status, 400, "{}", reply.text);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    assert_eq!(reply.body["error"]["message"], "the path is not UTF-8", "{}", reply.text);
    api.get("/readyz?verbose=%ff").await.refused(400, "BAD_REQUEST");
    let document = api.get("/openapi.json").await.is(200);
    for (path, kind) in
        [("/v1/models/{model}", "application/json"), ("/readyz", "application/problem+json")]
    {
        let documented = &document["paths"][path]["get"]["responses"]["400"]["content"];
        assert!(documented[kind].is_object(), "{path}: {documented}");
    }
}
