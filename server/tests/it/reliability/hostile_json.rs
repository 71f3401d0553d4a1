//! T29: JSON that parsers disagree about, in arguments and results, over HTTP, WebSocket and MCP,
//! with SQLite and PostgreSQL. A request is accepted or refused with a client error, never with a
//! server error; what is accepted is stored and read back unchanged.

use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

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

/// Sends a value as arguments and as a result, over each transport. Returns the call that HTTP
/// accepted.
async fn send_everywhere(api: &Api, value: &[u8]) -> Option<String> {
    let name = String::from_utf8_lossy(&value[..value.len().min(60)]).into_owned();
    let body = around("{\"run_id\":\"r\",\"args\":{\"v\":", value, "}}");
    let answer = api.post_raw("/v1/tools/json.echo/invoke", body).await;
    let status = answer.status.as_u16();
    assert!(status == 202 || status == 400 || status == 422, "{name}: {}", answer.text);
    let id = (status == 202).then(|| answer.body["tool_call_id"].as_str().unwrap().to_owned());

    let params = "{\"name\":\"json.echo\",\"arguments\":{\"v\":";
    let meta = json!({ "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {}, "toolcrib/timeout_ms": 1 });
    let before =
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"tools/call\",\"params\":{params}");
    let request = api.request(reqwest::Method::POST, "/mcp");
    let request = request
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .header("mcp-protocol-version", "2026-07-28")
        .header("mcp-method", "tools/call")
        .header("mcp-name", "json.echo")
        .body(around(&before, value, &format!("}},\"_meta\":{meta}}}}}")));
    let answer = soon("the answer of MCP", request.send()).await.unwrap();
    assert!(answer.status().as_u16() < 500, "{name}: {}", answer.status());
    let text = soon("the body of MCP", answer.text()).await.unwrap();
    assert!(!text.contains("internal error"), "{name}: {text}");
    id
}

async fn send_result(api: &Api, id: &str, value: &[u8]) -> u16 {
    let body = around("{\"status\":\"SUCCEEDED\",\"result\":", value, "}");
    let answer = api.post_raw(&format!("/internal/tool_calls/{id}/submit"), body).await;
    answer.status.as_u16()
}

/// Parses a value whose numbers JSON's own types hold.
fn parsed(value: &[u8]) -> Option<Value> {
    serde_json::from_slice(value).ok()
}

async fn check_server(mut server: Server) {
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    let tool = json!({ "name": "json.echo", "schema": {}, "timeout_ms": 600_000 });
    api.register("c1", json!([tool])).await;
    let mut stored = Vec::new();
    for value in VALID {
        let id = send_everywhere(&api, value.as_bytes()).await;
        let id = id.unwrap_or_else(|| panic!("the arguments {value} were refused"));
        assert_eq!(send_result(&api, &id, value.as_bytes()).await, 200, "{value}");
        stored.push((id, value.as_bytes()));
    }
    for value in DISPUTED {
        if let Some(id) = send_everywhere(&api, value.as_bytes()).await {
            let status = send_result(&api, &id, value.as_bytes()).await;
            assert!(matches!(status, 200 | 400 | 422), "{value}: {status}");
        }
    }
    let spare = api.invoke("json.echo", json!({})).await;
    let invalid = invalid();
    for value in &invalid {
        let name = String::from_utf8_lossy(&value[..value.len().min(60)]).into_owned();
        assert_eq!(send_everywhere(&api, value).await, None, "the arguments {name} were accepted");
        let status = send_result(&api, &spare, value).await;
        assert!(status == 400 || status == 422, "the result {name}: {status}");
    }
    // A WebSocket answers each with an error, or closes the connection, and others go on.
    for value in &invalid {
        let frame = around("{\"type\":\"tool_progress\",\"data\":", value, "}");
        let Ok(text) = String::from_utf8(frame) else { continue };
        let mut client = Ws::hello(&api, "c1", json!({})).await;
        client.send_raw(Message::text(text)).await;
    }
    api.succeed(&spare, json!("after all")).await;
    // What was accepted is the same after a restart.
    server.kill();
    server.start().await;
    for (id, value) in &stored {
        let call = api.call(id).await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        if let Some(expected) = parsed(value) {
            assert_eq!(call["result"], expected, "{}", String::from_utf8_lossy(value));
        }
    }
    eprintln!(
        "{} valid, {} disputed, {} invalid values",
        VALID.len(),
        DISPUTED.len(),
        invalid.len()
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
