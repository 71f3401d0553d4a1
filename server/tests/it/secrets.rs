//! Secrets by reference: allowed per tool, read at execution, and redacted from everything that is
//! stored, logged, traced or returned. An HTTP API and an MCP server that repeat what they receive
//! are on the other side; both stores are searched.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE, URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use crate::openapi::upstream::{Upstream, call, define};
use crate::support::Api;
use crate::support::database::Database;
use crate::support::otlp::Endpoint;
use crate::support::process::{Server, operator_token};

const ENV_SECRET: &str = "env-s3cret/with+odd=chars?";
const FILE_SECRET: &str = "file-s3cret-0123456789~ü";
const ROTATED: &str = "rotated-s3cret-9876543210";
const MCP_SECRET: &str = "mcp-s3cret>with<odd>chars";

/// An MCP server on standard input and output that repeats its environment in many forms.
const ECHO_SERVER: &str = r#"
import base64, json, os, sys, time, urllib.parse
def send(message):
    sys.stdout.write(json.dumps(message) + "\n"); sys.stdout.flush()
secret = os.environ["ECHO_TOKEN"]
for line in sys.stdin:
    message = json.loads(line)
    method, id = message.get("method"), message.get("id")
    if method == "initialize":
        send({"jsonrpc": "2.0", "id": id, "result": {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}}, "serverInfo": {"name": "echo", "version": "1"}}})
    elif method == "tools/list":
        schema = {"type": "object"}
        send({"jsonrpc": "2.0", "id": id, "result": {"tools": [
            {"name": "say", "description": "says it", "inputSchema": schema},
            {"name": "fail", "description": "fails", "inputSchema": schema},
            {"name": "wait", "description": "waits", "inputSchema": schema}]}})
    elif method == "tools/call":
        token = message["params"].get("_meta", {}).get("progressToken")
        half = len(secret) // 2
        if token is not None:
            for n, part in enumerate(["it is " + secret[:half], secret[half:] + " indeed", secret]):
                send({"jsonrpc": "2.0", "method": "notifications/progress", "params": {
                    "progressToken": token, "progress": n, "message": part}})
        release = os.path.join(os.path.dirname(sys.argv[0]), "release")
        while message["params"]["name"] == "wait" and not os.path.exists(release):
            time.sleep(0.01)
        wrapped = ("user:" + secret + ":more").encode()
        forms = {"raw": secret, "b64": base64.b64encode(secret.encode()).decode(),
            "url64": base64.urlsafe_b64encode(secret.encode()).decode().rstrip("="),
            "inside": base64.b64encode(wrapped).decode(),
            "url": urllib.parse.quote(secret, safe=""), "length": len(secret), "other": "stays"}
        print("stderr has " + secret, file=sys.stderr, flush=True)
        if message["params"]["name"] == "fail":
            send({"jsonrpc": "2.0", "id": id, "error": {
                "code": -32000, "message": "no: " + json.dumps(forms)}})
        else:
            send({"jsonrpc": "2.0", "id": id, "result": {"structuredContent": forms,
                "content": [{"type": "text", "text": json.dumps(forms)}]}})
    elif id is not None:
        send({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "unknown"}})
"#;

/// Every spelling of a secret that must not appear.
fn spellings(secret: &str) -> Vec<String> {
    let percent: String = secret
        .bytes()
        .map(|byte| match byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect();
    let mut all = vec![secret.to_owned(), percent.to_lowercase(), percent];
    all.extend([STANDARD.encode(secret), URL_SAFE.encode(secret), URL_SAFE_NO_PAD.encode(secret)]);
    // Inside of longer texts, at every offset, without the characters that depend on neighbors.
    for before in ["user:", "a", "ab"] {
        let whole = STANDARD.encode(format!("{before}{secret}"));
        let (first, last) = ((before.len() * 8).div_ceil(6), whole.trim_end_matches('=').len() - 1);
        all.push(whole[first..last].to_owned());
    }
    all
}

fn assert_no_secret(origin: &str, text: &str) {
    for secret in [ENV_SECRET, FILE_SECRET, ROTATED, MCP_SECRET] {
        for spelling in spellings(secret) {
            assert!(!text.contains(&spelling), "{origin} has {spelling}: {text:.3000}");
        }
    }
}

/// The real binary with its secrets, beside an API and a collector of traces.
struct Setup {
    server: Server,
    api: Api,
    upstream: Upstream,
    traces: Endpoint,
    database: Option<Database>,
}

impl Setup {
    async fn start(database: Option<Database>) -> Self {
        let (upstream, traces) = (Upstream::start().await, Endpoint::start().await);
        let mut server = Server::new()
            .variable("CRM_KEY", ENV_SECRET)
            .variable("ECHO_TOKEN_SOURCE", MCP_SECRET)
            .with("LOG__LEVEL", "debug")
            .with("TELEMETRY__OTLP_ENDPOINT", &traces.url)
            .with("TELEMETRY__EXPORT_INTERVAL_MS", 20);
        if let Some(database) = &database {
            server = server.with("STORE__URL", &database.url);
        }
        let directory = server.directory.path();
        let (key, script) = (directory.join("secret.key"), directory.join("echo.py"));
        std::fs::write(&key, format!("{FILE_SECRET}\n")).unwrap();
        std::fs::write(&script, ECHO_SERVER).unwrap();
        let settings = format!(
            "[policy]\nmax_retries = 0\n[http]\nhosts = [\"http://{0}\"]\nallow_private = true\n\
             [[secrets]]\ntools = [\"crm.*\"]\nallow = [\"env:CRM_*\", \"file:{1}\"]\n\
             [[mcp]]\nname = \"echo\"\ncommand = \"python3\"\nargs = [\"{2}\"]\n\
             env = {{ ECHO_TOKEN = \"env:ECHO_TOKEN_SOURCE\" }}\n",
            upstream.address,
            key.display(),
            script.display()
        );
        std::fs::write(directory.join("toolcrib.toml"), settings).unwrap();
        server.start().await;
        let api = Api::new(&format!("127.0.0.1:{}", server.port));
        Self { server, api, upstream, traces, database }
    }

    fn key_file(&self) -> std::path::PathBuf {
        self.server.directory.path().join("secret.key")
    }

    /// Defines an operation that sends both secrets in every place that takes one.
    async fn define(&self, tool: &str, path: &str) {
        let file = format!("file:{}", self.key_file().display());
        let http = json!({
            "method": "POST",
            "url": self.upstream.url(path),
            "headers": { "X-File": file, "X-Plain": "env:is not a reference" },
            "parameters": [{ "name": "X-Said", "in": "header", "arg": "said" }],
            "body": { "args": ["fixed", "from_env", "said"] },
            "auth": [{ "type": "bearer", "env": "env:CRM_KEY" }],
        });
        let options = json!({
            "http": http,
            "args": { "fixed": { "fixed": "env:CRM_KEY" } },
            "envs": { "from_env": file },
        });
        define(&self.api, json!({ "tool_name": tool, "options": options })).await;
    }

    /// Asserts that no answer, log line, metric, span or stored byte has a secret.
    async fn assert_no_secret_anywhere(&self, ended: &Value) {
        let api = &self.api;
        let operator = api.clone().key(&operator_token(&self.server.data_dir()));
        assert_no_secret("the call", &ended.to_string());
        let id = ended["tool_call_id"].as_str().unwrap();
        for path in [
            format!("/v1/tool_calls/{id}/cards"),
            "/v1/tool_calls".to_owned(),
            "/v1/tools".to_owned(),
            "/projects/default/tools".to_owned(),
            "/metrics".to_owned(),
        ] {
            assert_no_secret(&path, &api.get(&path).await.text);
        }
        for path in ["/v1/audit/export", "/v1/sources/mcp/echo", "/metrics"] {
            assert_no_secret(path, &operator.get(path).await.text);
        }
        let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
        assert_no_secret("the events", &format!("{:?}", events.rest().await));
        assert!(!self.traces.spans_of(id, 1).await.is_empty());
        for secret in [ENV_SECRET, FILE_SECRET, ROTATED, MCP_SECRET] {
            for spelling in spellings(secret) {
                assert!(!self.traces.heard(&spelling), "the traces have {spelling}");
            }
        }
        assert_no_secret("the log", &self.server.log());
        match &self.database {
            Some(database) => assert_no_secret("PostgreSQL", &dump(database).await),
            None => {
                for entry in std::fs::read_dir(self.server.data_dir()).unwrap() {
                    let path = entry.unwrap().path();
                    let bytes = std::fs::read(&path).unwrap();
                    assert_no_secret(&path.display().to_string(), &String::from_utf8_lossy(&bytes));
                }
            }
        }
    }

    async fn finish(mut self) {
        self.server.stop().await;
        if let Some(database) = self.database {
            database.drop().await;
        }
    }
}

/// Returns every row of every table as text.
async fn dump(database: &Database) -> String {
    let client = database.client().await;
    let tables = "SELECT table_schema || '.' || table_name FROM information_schema.tables \
                  WHERE table_type = 'BASE TABLE' \
                  AND table_schema IN ('toolcrib', 'public', 'resource', 'state')";
    let mut text = String::new();
    for table in client.query(tables, &[]).await.unwrap() {
        let table: String = table.get(0);
        let rows = format!("SELECT coalesce(string_agg(r::text, ' '), '') FROM {table} r");
        text += &client.query_one(&rows, &[]).await.unwrap().get::<_, String>(0);
    }
    assert!(text.contains("crm.ask"), "the dump has the calls");
    text
}

async fn check_http_secrets(setup: &Setup) {
    for path in ["/echo", "/text", "/status/400", "/status/500", "/error"] {
        setup.define("crm.ask", path).await;
        // A caller cannot name a secret.
        let args = json!({ "said": "env:CRM_KEY" });
        let ended = call(&setup.api, "crm.ask", args).await;
        let request = setup.upstream.last();
        let bearer = format!("Bearer {ENV_SECRET}");
        assert_eq!(request.header("authorization"), Some(bearer.as_str()), "{ended}");
        assert_eq!(request.header("x-file"), Some(FILE_SECRET));
        assert_eq!(request.header("x-plain"), Some("env:is not a reference"));
        assert_eq!(request.header("x-said"), Some("env:CRM_KEY"));
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let expected =
            json!({ "fixed": ENV_SECRET, "from_env": FILE_SECRET, "said": "env:CRM_KEY" });
        assert_eq!(body, expected);
        assert!(ended.to_string().contains("[secret]"), "{path}: {ended}");
        setup.assert_no_secret_anywhere(&ended).await;
    }
    // A rotated file is seen by the next call, without a restart.
    std::fs::write(setup.key_file(), ROTATED).unwrap();
    let ended = call(&setup.api, "crm.ask", json!({})).await;
    assert_eq!(setup.upstream.last().header("x-file"), Some(ROTATED));
    setup.assert_no_secret_anywhere(&ended).await;
    // Another tool may not use them: nothing is sent.
    let count = setup.upstream.requests().len();
    setup.define("mail.ask", "/echo").await;
    let ended = call(&setup.api, "mail.ask", json!({})).await;
    assert_eq!(ended["error"]["code"], "UNAUTHENTICATED", "{ended}");
    assert_eq!(setup.upstream.requests().len(), count);
    let log = setup.server.log();
    assert!(log.contains("mail.ask may not use"), "the operator learns why: {log:.2000}");
}

async fn check_mcp_secrets(setup: &Setup) {
    for tool in ["echo.say", "echo.fail"] {
        let ended = call(&setup.api, tool, json!({})).await;
        let text = ended.to_string();
        assert!(text.contains("[secret]") && text.contains("stays"), "{ended}");
        assert!(text.contains(&MCP_SECRET.len().to_string()), "the server has it: {ended}");
        setup.assert_no_secret_anywhere(&ended).await;
    }
    // A secret that is split between two messages of progress.
    let id = setup.api.invoke("echo.wait", json!({})).await;
    let mut events = setup.api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let mut messages = Vec::new();
    while messages.len() < 3 {
        let event = events.next().await.unwrap();
        messages.extend(event.data["message"].as_str().map(str::to_owned));
    }
    messages.sort();
    assert_eq!(messages, ["[secret]", "[secret] indeed", "it is [secret]"]);
    std::fs::write(setup.server.directory.path().join("release"), "").unwrap();
    let ended = setup.api.finished(&id).await;
    setup.assert_no_secret_anywhere(&ended).await;
}

#[tokio::test]
async fn secrets_are_redacted_everywhere_on_sqlite() {
    let setup = Setup::start(None).await;
    check_http_secrets(&setup).await;
    check_mcp_secrets(&setup).await;
    setup.finish().await;
}

#[tokio::test]
async fn secrets_are_redacted_everywhere_on_postgresql() {
    let Some(database) = Database::new().await else { return };
    let setup = Setup::start(Some(database)).await;
    check_http_secrets(&setup).await;
    check_mcp_secrets(&setup).await;
    setup.finish().await;
}

#[tokio::test]
async fn a_key_adds_servers_only_with_secrets_that_a_rule_allows() {
    let server = crate::support::Server::with(|config| {
        config.mcp_servers.allow_env = true;
        config.mcp_servers.allow_private = true;
        config.secrets = vec![toolcrib_protocol::secrets::SecretRule {
            tools: vec!["wiki.*".into()],
            allow: vec!["env:WIKI_*".into()],
        }];
    })
    .await;
    let admin = server.keyed("default", "boss", "admin", &[]).await;
    let source = |name: &str, value: &str| json!({ "name": name, "url": "http://127.0.0.1:9/mcp", "headers": { "X-Key": value } });
    for (name, value) in [
        ("wiki", "env:OTHER_KEY"),
        ("wiki", "file:/etc/hostname"),
        ("wiki", "Bearer ${file:/etc/hostname}"),
        ("mail", "env:WIKI_KEY"),
    ] {
        let refused = admin.post("/v1/sources/mcp", source(name, value)).await;
        let error = refused.refused(403, "PERMISSION_DENIED");
        assert!(error["message"].as_str().unwrap().contains("[[secrets]]"), "{error}");
    }
    admin.post("/v1/sources/mcp", source("wiki", "env:WIKI_KEY")).await.is(201);
}
