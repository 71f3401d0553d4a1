//! Secrets exist in the environment of the server and in the request that needs them only.

use serde_json::{Value, json};

use super::upstream::{Upstream, call, define};
use crate::support::Api;
use crate::support::process::{Server, operator_token};

const KEY: &str = "s3cret-key/with=odd chars";
const TOKEN: &str = "t0ken-that-nobody-sees";
const PASSWORD: &str = "pa55word:nobody:knows";
const PIN: &str = "90210777";

/// Starts the real binary with secrets in its environment and access to the upstream.
async fn start_server(upstream: &Upstream) -> (Server, Api) {
    let env = [
        format!("PET_KEY={KEY}"),
        format!("PET_TOKEN={TOKEN}"),
        format!("PET_PASSWORD={PASSWORD}"),
        format!("PET_PIN={PIN}"),
        "PET_USER=ada".to_owned(),
        "FORBIDDEN_KEY=forbidden-value".to_owned(),
        "PET_EMPTY=".to_owned(),
    ];
    let mut wrapper = vec!["env"];
    wrapper.extend(env.iter().map(String::as_str));
    let mut server = Server::new().through(&wrapper).with("LOG__LEVEL", "debug");
    let settings = format!(
        "[policy]\nmax_retries = 1\n[http]\nhosts = [\"http://{0}\"]\nallow_private = true\n\
         allow_envs = [\"PET_*\"]\n",
        upstream.address
    );
    std::fs::write(server.directory.path().join("toolcrib.toml"), settings).unwrap();
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    (server, api)
}

fn secret_spellings() -> Vec<String> {
    let plain = [KEY, TOKEN, PASSWORD, PIN, "forbidden-value"].map(str::to_owned);
    let encoded = ["s3cret-key%2Fwith%3Dodd", "s3cret-key%2fwith%3dodd", "pa55word%3Anobody"];
    // ada:pa55word:nobody:knows
    let basic = ["YWRhOnBhNTV3b3JkOm5vYm9keTprbm93cw"];
    plain.into_iter().chain(encoded.into_iter().chain(basic).map(str::to_owned)).collect()
}

fn assert_no_secret(origin: &str, text: &str) {
    for secret in secret_spellings() {
        assert!(!text.contains(&secret), "{origin} has {secret}: {text:.2000}");
    }
}

/// Asserts that no response, stored file or log line about the call has a secret.
async fn assert_no_secret_stored(server: &Server, api: &Api, ended: &Value) {
    let operator = api.clone().key(&operator_token(&server.data_dir()));
    assert_no_secret("the call", &ended.to_string());
    let id = ended["tool_call_id"].as_str().unwrap();
    assert_no_secret("the cards", &api.get(&format!("/v1/tool_calls/{id}/cards")).await.text);
    assert_no_secret("the list", &api.get("/v1/tool_calls").await.text);
    assert_no_secret("the tools", &api.get("/v1/tools").await.text);
    assert_no_secret("the definitions", &api.get("/projects/default/tools").await.text);
    assert_no_secret("the audit", &operator.get("/v1/audit").await.text);
    let mut events = api.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    assert_no_secret("the events", &format!("{:?}", events.rest().await));
    for entry in std::fs::read_dir(server.data_dir()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        assert_no_secret(&path.display().to_string(), &String::from_utf8_lossy(&bytes));
    }
    assert_no_secret("the log", &server.log());
}

/// An operation that sends every kind of secret to this URL.
fn operation(url: String) -> Value {
    json!({
        "tool_name": "pets.ask",
        "effect": "read",
        "options": {
            "http": {
                "method": "POST",
                "url": url,
                "parameters": [
                    { "name": "X-Pin", "in": "header", "arg": "pin" },
                    { "name": "again", "in": "query", "arg": "key" },
                ],
                "body": { "args": ["token", "said"] },
                "auth": [
                    { "type": "api_key", "in": "query", "name": "k", "env": "PET_KEY" },
                    { "type": "basic", "username_env": "PET_USER", "password_env": "PET_PASSWORD" },
                ],
            },
            "envs": { "pin": "PET_PIN", "key": "PET_KEY", "token": "PET_TOKEN", "x": "PET_EMPTY" },
        },
    })
}

#[tokio::test]
async fn secrets_echoed_by_an_upstream_are_redacted_everywhere() {
    let upstream = Upstream::start().await;
    let (server, api) = start_server(&upstream).await;
    for path in ["/echo", "/text", "/status/400", "/status/401", "/status/500", "/error"] {
        define(&api, operation(upstream.url(path))).await;
        let ended = call(&api, "pets.ask", json!({ "said": "hello", "pin": "mine" })).await;
        let request = upstream.last();
        assert_eq!(request.header("x-pin"), Some(PIN), "the secret must be sent");
        let basic = "Basic YWRhOnBhNTV3b3JkOm5vYm9keTprbm93cw==";
        assert_eq!(request.header("authorization"), Some(basic));
        assert!(request.path.contains("k=s3cret-key%2Fwith%3Dodd+chars"), "{}", request.path);
        let body: Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body, json!({ "token": TOKEN, "said": "hello" }));
        assert!(ended.to_string().contains("[secret]"), "{path}: {ended}");
        assert!(ended.to_string().contains("hello"), "{path}: other content must stay: {ended}");
        assert_no_secret_stored(&server, &api, &ended).await;
    }
}

#[tokio::test]
async fn a_bearer_token_is_sent_and_not_stored() {
    let upstream = Upstream::start().await;
    let (server, api) = start_server(&upstream).await;
    let auth = json!([{ "type": "bearer", "env": "PET_TOKEN" }]);
    let options = json!({ "http": { "url": upstream.url("/x"), "auth": auth } });
    define(&api, json!({ "tool_name": "pets.ask", "options": options })).await;
    let ended = call(&api, "pets.ask", json!({})).await;
    let expected = format!("Bearer {TOKEN}");
    assert_eq!(upstream.last().header("authorization"), Some(expected.as_str()));
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
    assert_no_secret_stored(&server, &api, &ended).await;
}

#[tokio::test]
async fn unset_and_forbidden_variables_are_not_sent() {
    let upstream = Upstream::start().await;
    let (_server, api) = start_server(&upstream).await;
    for name in ["PET_NOT_SET", "PET_EMPTY", "FORBIDDEN_KEY", "TOOLCRIB_LOG__LEVEL"] {
        let auth = json!([{ "type": "bearer", "env": name }]);
        let options = json!({ "http": { "url": upstream.url("/x"), "auth": auth } });
        define(&api, json!({ "tool_name": "pets.ask", "options": options })).await;
        let ended = call(&api, "pets.ask", json!({})).await;
        assert_eq!(ended["error"]["code"], "UNAUTHENTICATED", "{ended}");
        assert!(ended["error"]["message"].as_str().unwrap().contains(name), "{ended}");
        // As an argument it is omitted.
        let options = json!({ "http": { "url": upstream.url("/x") }, "envs": { "a": name } });
        define(&api, json!({ "tool_name": "pets.ask", "options": options })).await;
        call(&api, "pets.ask", json!({ "b": 1 })).await;
        assert_eq!(upstream.last().path, "/x?b=1", "{name}");
    }
}

#[tokio::test]
async fn a_document_imported_on_the_command_line_uses_its_key() {
    let upstream = Upstream::start().await;
    let (server, api) = start_server(&upstream).await;
    let spec = format!(
        "openapi: 3.1.0\ninfo: {{title: Pets}}\nservers: [{{url: 'http://{}/v1'}}]\n\
         security: [{{key: []}}]\npaths:\n  /pets/{{id}}:\n    get:\n      operationId: get\n      \
         parameters: [{{name: id, in: path, required: true, schema: {{type: integer}}}}]\n\
         components:\n  securitySchemes:\n    key: {{type: apiKey, in: header, name: X-Key}}\n",
        upstream.address
    );
    let file = server.directory.path().join("spec.yaml");
    std::fs::write(&file, spec).unwrap();
    let run = |more: &[&str]| {
        let mut command = std::process::Command::new(crate::support::process::TOOLCRIB);
        command.args(["tools", "import"]).arg(&file).args(["--prefix", "pet"]).args(more);
        command.arg("--server").arg(format!("http://127.0.0.1:{}", server.port));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = run(&["--dry-run"]);
    assert!(text.contains("pet.get") && text.contains("PET_KEY"), "{text}");
    api.get("/v1/tools/pet.get").await.refused(404, "TOOL_NOT_FOUND");
    let answer: Value = serde_json::from_str(&run(&["--json"])).unwrap();
    assert_eq!(answer["imported"][0]["envs"], json!(["PET_KEY"]));
    let ended = call(&api, "pet.get", json!({ "id": 7 })).await;
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
    let request = upstream.last();
    assert_eq!((request.path.as_str(), request.header("x-key")), ("/v1/pets/7", Some(KEY)));
    assert_no_secret_stored(&server, &api, &ended).await;
}

#[tokio::test]
async fn by_default_a_definition_reads_no_variable_and_the_operator_decides_which() {
    let upstream = Upstream::start().await;
    let (token, key) = (format!("PET_TOKEN={TOKEN}"), format!("PET_KEY={KEY}"));
    let mut server = Server::new().through(&["env", &token, &key]);
    let settings = format!(
        "[http]\nhosts = [\"http://{0}\"]\nallow_private = true\nenvs = {{ key = \"PET_KEY\" }}\n",
        upstream.address
    );
    std::fs::write(server.directory.path().join("toolcrib.toml"), settings).unwrap();
    server.start().await;
    let api = Api::new(&format!("127.0.0.1:{}", server.port));
    let options = json!({ "http": { "url": upstream.url("/x") }, "envs": { "a": "PET_TOKEN" } });
    define(&api, json!({ "tool_name": "pets.ask", "options": options })).await;
    let ended = call(&api, "pets.ask", json!({ "b": 1 })).await;
    assert_eq!(ended["status"], "SUCCEEDED", "{ended}");
    let path = upstream.last().path;
    assert!(!path.contains(TOKEN) && path.contains("b=1"), "{path}");
    assert!(path.contains("key=s3cret-key"), "the operator's own variables are sent: {path}");
    let auth = json!({ "type": "bearer", "env": "PET_TOKEN" });
    let options = json!({ "http": { "url": upstream.url("/y"), "auth": [auth] } });
    define(&api, json!({ "tool_name": "pets.auth", "options": options })).await;
    let ended = call(&api, "pets.auth", json!({})).await;
    assert_eq!(ended["error"]["code"], "UNAUTHENTICATED", "{ended}");
    assert_eq!(upstream.last().path, path, "nothing was sent");
}
