//! T29: JSON that parsers disagree about, in arguments and results, over HTTP, WebSocket and MCP,
//! with SQLite and PostgreSQL. A request is accepted or refused with a client error, never with a
//! server error; what is accepted is delivered, stored and read back as it was written, digit by
//! digit.

use std::collections::HashMap;

use futures::StreamExt;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::Frame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{CloseCode, Data, OpCode};
use toolcrib::domain::json::Json;

use crate::support::database::Database;
use crate::support::process::Server;
use crate::support::ws::Ws;
use crate::support::{Api, soon};

/// Valid values.
const VALID: &[&str] = &[
    "[]",
    "{}",
    "[[]]",
    "[{}]",
    "[null]",
    "[1,null]",
    "[true,false]",
    "\"\"",
    "[\"\"]",
    "0",
    "-0",
    "[0e1]",
    "[0e+1]",
    "[1e-2]",
    "[1E22]",
    "[1E-2]",
    "[1E+2]",
    "[123e45]",
    "[123e65]",
    "[-0.0]",
    "[-1]",
    "[123.456789]",
    "[20e1]",
    "[1.5e9]",
    "[123456789012345678901]",
    "[-123123123123123123123123123123]",
    "[0.1e-7]",
    "[1.0000000000000000000000000001]",
    "[0.000000000000000000000000000000000000000000000000000000000000000000000000000001]",
    "[\"\\u0061\\u30af\\u30EA\\u30b9\"]",
    "[\"\\uD801\\udc37\"]",
    "[\"\\ud83d\\ude39\\ud83d\\udc8d\"]",
    "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"]",
    "[\"\\\\u0000\"]",
    "[\"\\u0012\"]",
    "[\"\\uFFFF\"]",
    "[\"\\uDBFF\\uDFFF\"]",
    "[\"\\u0022\"]",
    "[\"\\u2028\"]",
    "[\"\u{2028}\u{2029}\"]",
    "[\"\u{7f}\"]",
    "[\"\u{fffe}\u{1fffe}\u{10ffff}\"]",
    "[\"é\"]",
    "[\"e\u{301}\"]",
    "[\"new\\u00A0line\"]",
    "{\"\":0}",
    "{\"a\\u0062\":1}",
    "{\"x\":{\"x\":{\"x\":[]}}}",
    "{\"__proto__\":1}",
    "{\"a\":\"b\",\"asd\":\"sdf\"}",
    "{\"min\":-1.0e+28,\"max\":1.0e+28}",
    " [ 1 ] ",
    "[\n]",
    "[\t1\r]",
    "[\"\\u0000\"]",
    "{\"a\\u0000b\":1}",
];

/// Values on which parsers differ: accepted or refused, but never an error of the server.
const DISPUTED: &[&str] = &[
    "[0.4e00669999999]",
    "[1e400]",
    "[-1e400]",
    "[1e-400]",
    "[0.4e006699999999999999999999999999999999999999999]",
    "[\"\\uD800\"]",
    "[\"\\uDFAA\"]",
    "[\"\\uD800\\uD800\\n\"]",
    "[\"\\uDd1ea\"]",
    "[\"\\uD888\\u1234\"]",
    "{\"a\":1,\"a\":2}",
    "{\"a\":1,\"\\u0061\":2}",
    "{\"x\":{\"b\":1,\"b\":1}}",
];

/// Invalid values.
const INVALID: &[&str] = &[
    "",
    " ",
    "[",
    "]",
    "{",
    "}",
    "[1",
    "[1,",
    "[,1]",
    "[1,,2]",
    "[1,]",
    "[\"\",]",
    "[\"x\"",
    "[\"x",
    "[x]",
    "[1:2]",
    "[1 2]",
    "[\"a\" \"b\"]",
    "[t]",
    "[nul]",
    "[f]",
    "[True]",
    "[NaN]",
    "[nan]",
    "[Infinity]",
    "[-Infinity]",
    "[+1]",
    "[++1]",
    "[-]",
    "[--2]",
    "[-1x]",
    "[- 1]",
    "[-01]",
    "[012]",
    "[01.5]",
    "[1.]",
    "[.1]",
    "[-.1]",
    "[1.e1]",
    "[1e]",
    "[1e+]",
    "[1ea]",
    "[1.2.3]",
    "[0x1]",
    "[0e]",
    "[0E+]",
    "[1_000]",
    "[1 000.0]",
    "[1a]",
    "[1+2]",
    "['a']",
    "[\"\\x00\"]",
    "[\"\\a\"]",
    "[\"\\u12\"]",
    "[\"\\u00A\"]",
    "[\"\\uD834\\u\"]",
    "[\"\\",
    "[\"\\u",
    "[\"a\u{0}b\"]",
    "[\"a\nb\"]",
    "[\"\t\"]",
    "[\u{c}]",
    "[\u{feff}1]",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\":1,}",
    "{\"a\" 1}",
    "{a:1}",
    "{'a':1}",
    "{1:1}",
    "{:1}",
    "{\"a\":1 \"b\":2}",
    "{\"a\":1,,\"b\":2}",
    "{\"a\":1}}",
    "{\"a\":1]",
    "{[: \"x\"}",
    "[1]x",
    "[1]]",
    "[1]//",
    "/* */[1]",
    "[1/**/]",
    "[1]#",
    "[⍂]",
    "[\u{2060}]",
    "<null>",
    "\\u000A\"\"",
    "[\"\": 1]",
    "{\"x\", null}",
    "{\"id\":0,,,,,}",
    "[*]",
    "[&]",
    "[1]\u{0}",
];

/// Returns the invalid values as bytes, with some that are not text and some that are deep.
fn invalid() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = INVALID.iter().map(|text| text.as_bytes().to_vec()).collect();
    for bytes in [
        &b"[\"\xff\"]"[..],
        b"[\xff]",
        b"[\"\xc0\xaf\"]",
        b"[\"\xe0\xff\"]",
        b"[\"\xed\xa0\x80\"]",
        b"[\"\xf4\xbf\xbf\xbf\"]",
        b"[\"\xf8\x88\x80\x80\x80\"]",
        b"{\"\xb9\":\"0\",}",
        b"\xef\xbb\xbf[1]",
        b"[\"\\u\xe5\"]",
        b"[1e1\xe5]",
        b"\xff\xfe[\x00]\x00",
    ] {
        all.push(bytes.to_vec());
    }
    // Deep nesting, closed and open.
    for depth in [65, 127, 128, 129, 1_000, 100_000] {
        all.push("[".repeat(depth).into_bytes());
        all.push([vec![b'['; depth], vec![b']'; depth]].concat());
        all.push("{\"a\":".repeat(depth).into_bytes());
    }
    all
}

fn around(before: &str, value: &[u8], after: &str) -> Vec<u8> {
    [before.as_bytes(), value, after.as_bytes()].concat()
}

/// Returns the text of a field, as it was written.
fn raw_field(text: &str, path: &[&str]) -> String {
    let mut text = text;
    for name in path {
        let fields: Result<HashMap<String, &RawValue>, _> = serde_json::from_str(text);
        let fields = fields.unwrap_or_else(|error| panic!("{error}: {text}"));
        text = fields.get(*name).unwrap_or_else(|| panic!("no {name} in {text}")).get();
    }
    text.to_owned()
}

/// Returns the decoded text of a string field.
fn text_field(text: &str, path: &[&str]) -> String {
    let raw = raw_field(text, path);
    serde_json::from_str(&raw).unwrap_or_else(|error| panic!("{error}: {raw}"))
}

/// Returns the form in which an accepted value is stored: without the white space around it, and
/// in results with U+FFFD for each half of a surrogate pair.
fn stored_form(value: &str) -> String {
    let mut stored = value.trim_matches([' ', '\t', '\n', '\r']).to_owned();
    let halves = ["\\uD800\\uD800\\n", "\\uD888\\u1234", "\\uD800\"", "\\uDFAA\"", "\\uDd1ea\""];
    let replaced = ["\\ufffd\\ufffd\\n", "\\ufffd\\u1234", "\\ufffd\"", "\\ufffd\"", "\\ufffda\""];
    for (half, replacement) in halves.iter().zip(replaced) {
        stored = stored.replace(half, replacement);
    }
    stored
}

fn name(value: &[u8]) -> String {
    String::from_utf8_lossy(&value[..value.len().min(60)]).into_owned()
}

/// Sends a value as arguments over HTTP. Returns the id of the call, or `None` if it was refused.
async fn invoke(api: &Api, tool: &str, value: &[u8]) -> Option<String> {
    let body = around("{\"run_id\":\"r\",\"args\":{\"v\":", value, "}}");
    let answer = api.post_raw(&format!("/v1/tools/{tool}/invoke"), body).await;
    let status = answer.status.as_u16();
    assert!(matches!(status, 202 | 400 | 422), "{}: {}", name(value), answer.text);
    (status == 202).then(|| answer.body["tool_call_id"].as_str().unwrap().to_owned())
}

/// Sends a value as arguments over MCP. Returns the body of the answer.
async fn call_over_mcp(api: &Api, tool: &str, value: &[u8]) -> String {
    let params = format!("{{\"name\":\"{tool}\",\"arguments\":{{\"v\":");
    let meta = json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {} });
    let before =
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{params}");
    let request = api.request(reqwest::Method::POST, "/mcp");
    let request = request
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", "2026-07-28")
        .header("mcp-method", "tools/call")
        .header("mcp-name", tool)
        .body(around(&before, value, &format!("}},\"_meta\":{meta}}}}}")));
    let answer = soon("the answer of MCP", request.send()).await.unwrap();
    let status = answer.status().as_u16();
    let text = soon("the body of MCP", answer.text()).await.unwrap();
    assert!(status == 200 || status == 400 || status == 422, "{}: {status} {text}", name(value));
    assert!(!text.contains("internal error"), "{}: {text}", name(value));
    let data = text.lines().filter_map(|line| line.strip_prefix("data:")).next_back();
    data.map_or(text.clone(), |data| data.trim().to_owned())
}

async fn submit(api: &Api, id: &str, value: &[u8]) -> u16 {
    let body = around("{\"status\":\"SUCCEEDED\",\"result\":", value, "}");
    let answer = api.post_raw(&format!("/internal/tool_calls/{id}/submit"), body).await;
    answer.status.as_u16()
}

/// Returns a message of the WebSocket that reports this value as the result of a call.
fn result_message(id: &str, value: &[u8]) -> Vec<u8> {
    let before = format!(
        "{{\"type\":\"tool_result\",\"tool_call_id\":\"{id}\",\"attempt\":1,\
         \"status\":\"SUCCEEDED\",\"result\":"
    );
    around(&before, value, "}")
}

/// A server, a client without a connection that provides `json.echo`, and one with a WebSocket that
/// provides `json.socket`.
struct Exchange {
    api: Api,
    socket: Ws,
    /// Ids of accepted calls, and the result of each as it must be stored.
    stored: Vec<(String, String)>,
}

impl Exchange {
    async fn new(api: &Api) -> Self {
        let tool = |name: &str| json!([{ "name": name, "schema": {}, "timeout_ms": 600_000 }]);
        api.register("c1", tool("json.echo")).await;
        let socket = Ws::offering(api, "c2", tool("json.socket")).await;
        Self { api: api.clone(), socket, stored: Vec::new() }
    }

    /// Waits for a request on the WebSocket. Returns the id of its call, and its argument `v` as it
    /// was written.
    async fn take_request(&mut self) -> (String, String) {
        let request = self.socket.next_text().await.expect("the connection ended");
        assert_eq!(text_field(&request, &["type"]), "tool_request", "{request}");
        (text_field(&request, &["tool_call_id"]), raw_field(&request, &["args", "v"]))
    }

    /// Waits for a request on the WebSocket and asserts that it has these arguments. Returns the
    /// id of its call.
    async fn take(&mut self, value: &str) -> String {
        let (id, args) = self.take_request().await;
        assert_eq!(args, stored_form(value), "the arguments");
        id
    }

    /// Reports a result on the WebSocket. Returns false if it was refused.
    async fn report(&mut self, id: &str, value: &str) -> bool {
        let message = String::from_utf8(result_message(id, value.as_bytes())).unwrap();
        self.socket.send_raw(Message::text(message)).await;
        let answer = self.socket.next_text().await.expect("the connection ended");
        match text_field(&answer, &["type"]).as_str() {
            "result_ack" => assert_eq!(text_field(&answer, &["status"]), "SUCCEEDED", "{answer}"),
            "error" => {
                assert_eq!(text_field(&answer, &["error", "code"]), "BAD_REQUEST", "{answer}");
                return false;
            }
            _ => panic!("{value}: {answer}"),
        }
        self.stored.push((id.to_owned(), stored_form(value)));
        true
    }

    /// Sends a value that a JSON parser must accept through every transport.
    async fn send_valid(&mut self, value: &str) {
        let id = invoke(&self.api, "json.echo", value.as_bytes()).await;
        let id = id.unwrap_or_else(|| panic!("the arguments {value} were refused"));
        assert_eq!(submit(&self.api, &id, value.as_bytes()).await, 200, "{value}");
        self.stored.push((id, stored_form(value)));

        assert!(invoke(&self.api, "json.socket", value.as_bytes()).await.is_some(), "{value}");
        let id = self.take(value).await;
        assert!(self.report(&id, value).await, "the result {value} was refused");

        // MCP keeps every digit; a number may be spelled in another way.
        let api = self.api.clone();
        let called = call_over_mcp(&api, "json.socket", value.as_bytes());
        let answered = async {
            let (id, args) = self.take_request().await;
            let expected = Json::parse(value).unwrap();
            assert_eq!(Json::parse(&args).unwrap(), expected, "the arguments of MCP");
            // An object, so that the model's text is JSON whatever the value is.
            let result = format!("{{\"v\":{value}}}");
            assert!(self.report(&id, &result).await, "the result {value} was refused");
        };
        let (answer, ()) = tokio::join!(called, answered);
        let content = raw_field(&answer, &["result", "content"]);
        let content: Vec<&RawValue> = serde_json::from_str(&content).unwrap();
        let text = text_field(content[0].get(), &["text"]);
        assert_eq!(raw_field(&text, &["v"]), stored_form(value), "the text of MCP");
        // The structure holds numbers as 64-bit integers or doubles.
        let structured: Value =
            serde_json::from_str(&raw_field(&answer, &["result", "structuredContent", "v"]))
                .unwrap();
        let expected: Value = serde_json::from_str(value).unwrap();
        assert_eq!(structured, expected, "the structure of MCP");
    }

    /// Sends a value that a parser may refuse.
    async fn send_disputed(&mut self, value: &str) {
        if let Some(id) = invoke(&self.api, "json.echo", value.as_bytes()).await {
            let status = submit(&self.api, &id, value.as_bytes()).await;
            assert!(matches!(status, 200 | 400 | 422), "{value}: {status}");
            if status == 200 {
                self.stored.push((id, stored_form(value)));
            }
        }
        let answer = call_over_mcp(&self.api, "json.unknown", value.as_bytes()).await;
        assert!(answer.contains("error"), "{value}: {answer}");
        invoke(&self.api, "json.socket", b"0").await.unwrap();
        let id = self.take("0").await;
        if !self.report(&id, value).await {
            assert!(self.report(&id, "0").await, "after the refused {value}");
        }
    }

    /// Sends a value that is not JSON: each transport refuses it, and the call goes on.
    async fn send_invalid(&mut self, spare: &str, taken: &str, value: &[u8]) {
        let shown = name(value);
        let accepted = invoke(&self.api, "json.echo", value).await;
        assert_eq!(accepted, None, "the arguments {shown} were accepted");
        let status = submit(&self.api, spare, value).await;
        assert!(status == 400 || status == 422, "the result {shown}: {status}");
        let answer = call_over_mcp(&self.api, "json.echo", value).await;
        assert!(answer.contains("error"), "MCP accepted {shown}: {answer}");

        let message = result_message(taken, value);
        if let Ok(text) = String::from_utf8(message.clone()) {
            self.socket.send_raw(Message::text(text)).await;
            let answer = self.socket.next_text().await.expect("the connection ended");
            assert_eq!(text_field(&answer, &["type"]), "error", "{shown}: {answer}");
            assert_eq!(text_field(&answer, &["error", "code"]), "BAD_REQUEST", "{answer}");
            return;
        }
        // A text that is not UTF-8 ends the connection.
        let frame = Frame::message(message, OpCode::Data(Data::Text), true);
        self.socket.send_raw(Message::Frame(frame)).await;
        let ended = soon("the end of the connection", async {
            loop {
                match self.socket.socket.next().await {
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                    other => return other,
                }
            }
        });
        match ended.await {
            Some(Ok(Message::Close(Some(close)))) => assert_eq!(close.code, CloseCode::Invalid),
            other => panic!("{shown}: {other:?}"),
        }
        self.socket = Ws::hello(&self.api, "c2", json!({})).await;
    }
}

async fn check_server(mut server: Server) {
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    let mut exchange = Exchange::new(&api).await;
    let other_tool = json!([{ "name": "json.other", "schema": {} }]);
    let mut bystander = Ws::offering(&api, "c3", other_tool).await;
    for value in VALID {
        exchange.send_valid(value).await;
    }
    for value in DISPUTED {
        exchange.send_disputed(value).await;
    }
    let spare = api.invoke("json.echo", json!({})).await;
    invoke(&api, "json.socket", b"0").await.unwrap();
    let taken = exchange.take("0").await;
    exchange.socket.send(json!({ "type": "tool_ack", "tool_call_id": taken, "attempt": 1 })).await;
    let invalid = invalid();
    for value in &invalid {
        exchange.send_invalid(&spare, &taken, value).await;
    }
    bystander.expect_no_message().await;
    api.succeed(&spare, json!("after all")).await;
    assert!(exchange.report(&taken, "\"after all\"").await);
    // What was accepted is the same after a restart.
    server.kill();
    server.start().await;
    for (id, expected) in &exchange.stored {
        let call = api.get(&format!("/v1/tool_calls/{id}")).await;
        assert_eq!(call.body["status"], "SUCCEEDED", "{}", call.text);
        assert_eq!(raw_field(&call.text, &["result"]), *expected);
    }
    eprintln!(
        "{} valid, {} disputed, {} invalid values; {} stored results",
        VALID.len(),
        DISPUTED.len(),
        invalid.len(),
        exchange.stored.len()
    );
    assert!(server.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_json_is_refused_or_stored_unchanged() {
    check_server(Server::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_json_is_refused_or_stored_unchanged_with_postgresql() {
    let Some(database) = Database::new().await else { return };
    check_server(Server::new().with("STORE__URL", &database.url)).await;
    database.drop().await;
}
