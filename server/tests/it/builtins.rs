//! The built-in tools, called over HTTP.

use serde_json::{Value, json};

use crate::support::api::message;
use crate::support::{Api, Server, weather};

async fn run(api: &Api, tool: &str, args: Value) -> Value {
    let id = api.invoke(tool, args).await;
    api.finished(&id).await
}

#[tokio::test]
async fn calculation_eval_computes_and_rejects_invalid_expressions() {
    let server = Server::start().await;
    let api = server.api();
    for (expression, result) in [
        ("2*21", json!(42)),
        ("sqrt(3^2 + 4^2)", json!(5)),
        ("17 % 5 == 2 && 3 < 4", json!(true)),
        ("round(199 * 1.19, 2)", json!(236.81)),
        ("9223372036854775807", json!(9_223_372_036_854_775_807u64)),
    ] {
        let call = run(&api, "calculation.eval", json!({ "expression": expression })).await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        assert_eq!(call["result"]["result"], result, "{expression}");
    }
    let deep = "(".repeat(2_000) + "1";
    for expression in ["1/0", "2 +", "system('ls')", "9^9^9^9", &deep] {
        let call = run(&api, "calculation.eval", json!({ "expression": expression })).await;
        assert_eq!(call["status"], "FAILED", "{expression}");
        assert_eq!(call["error"]["code"], "VALIDATION_ERROR");
        assert_eq!(call["outcome"]["metrics"]["attempts"], 1, "a retry cannot help");
    }
}

#[tokio::test]
async fn database_query_reads_the_sample_database() {
    let server = Server::start().await;
    let api = server.api();
    let tool = api.get("/v1/tools/database.query").await.is(200);
    assert!(tool["description"].as_str().unwrap().contains("SAMPLE"), "{tool}");
    let args = json!({ "sql": "SELECT name, city FROM customers WHERE id = ?1", "params": [3] });
    let call = run(&api, "database.query", args).await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert_eq!(call["result"]["columns"], json!(["name", "city"]));
    assert_eq!(call["result"]["rows"], json!([["Chen Wei", "Beijing"]]));
    assert_eq!(call["result"]["truncated"], false);
    let wrong = run(&api, "database.query", json!({ "sql": "SELECT nme FROM customers" })).await;
    assert_eq!(wrong["error"]["code"], "VALIDATION_ERROR");
    assert!(message(&wrong["error"]).contains("nme"), "{wrong}");
}

#[tokio::test]
async fn database_query_cannot_write() {
    let server = Server::start().await;
    let api = server.api();
    let count = json!({ "sql": "SELECT count(*), sum(length(name)) FROM customers" });
    let before = run(&api, "database.query", count.clone()).await["result"].clone();
    let database = server.config.data_dir.join("toolcrib.db");
    let stolen = server.config.data_dir.join("stolen.db");
    for sql in [
        "DELETE FROM customers".to_owned(),
        "UPDATE customers SET name = 'x'".to_owned(),
        "INSERT INTO customers VALUES (99, 'x', 'x', 'x', 'x', 'x')".to_owned(),
        "DROP TABLE customers".to_owned(),
        "CREATE TABLE t (a)".to_owned(),
        "WITH x AS (SELECT 1) DELETE FROM customers".to_owned(),
        "PRAGMA writable_schema = 1".to_owned(),
        "SELECT 1; DELETE FROM customers".to_owned(),
        format!("ATTACH DATABASE '{}' AS own", database.display()),
        format!("VACUUM INTO '{}'", stolen.display()),
        "SELECT load_extension('x')".to_owned(),
    ] {
        let call = run(&api, "database.query", json!({ "sql": sql })).await;
        assert_eq!(call["status"], "FAILED", "{sql}: {call}");
    }
    assert!(!stolen.exists());
    assert_eq!(run(&api, "database.query", count).await["result"], before, "the data is unchanged");
}

#[tokio::test]
async fn a_result_over_max_rows_is_truncated_with_a_note() {
    let server = Server::with(|config| config.builtin.database.max_rows = 5).await;
    let api = server.api();
    let call = run(&api, "database.query", json!({ "sql": "SELECT id FROM customers" })).await;
    let result = &call["result"];
    assert_eq!((&result["row_count"], &result["truncated"]), (&json!(5), &json!(true)));
    assert!(result["note"].as_str().unwrap().contains('5'), "{result}");
}

#[tokio::test]
async fn an_endless_query_times_out() {
    let server = Server::with(|config| config.builtin.database.timeout_ms = 300).await;
    let api = server.api();
    let sql =
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";
    let call = run(&api, "database.query", json!({ "sql": sql })).await;
    assert!(["FAILED", "TIMEOUT"].contains(&call["status"].as_str().unwrap()), "{call}");
    assert_eq!(call["error"]["code"], "TIMEOUT");
}

#[tokio::test]
async fn database_query_reads_the_configured_database() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shop.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (7)").unwrap();
    let url = format!("sqlite:{}", path.display());
    let server = Server::with(|config| config.builtin.database.url = Some(url)).await;
    let api = server.api();
    let call = run(&api, "database.query", json!({ "sql": "SELECT a FROM t" })).await;
    assert_eq!(call["result"]["rows"], json!([[7]]));
    let tool = api.get("/v1/tools/database.query").await.is(200);
    assert!(!tool["description"].as_str().unwrap().contains("SAMPLE"));
}

#[tokio::test]
async fn weather_query_returns_the_current_weather() {
    let address = weather::stand_in().await;
    let server = Server::with(|config| {
        config.builtin.weather.geocoding_url = address.clone();
        config.builtin.weather.forecast_url = address;
    })
    .await;
    let api = server.api();
    for query in ["weather in Beijing", "Beijing weather", "Beijing"] {
        let call = run(&api, "weather.query", json!({ "query": query })).await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        assert_eq!(call["result"]["weather"], "Sunny");
        assert_eq!(call["result"]["temperature"], 31.4);
        assert_eq!(call["result"]["place"], "Beijing");
    }
    let call = run(&api, "weather.query", json!({ "query": "weather in Atlantis" })).await;
    assert_eq!(call["status"], "FAILED", "never a made-up answer: {call}");
    assert!(message(&call["error"]).contains("Atlantis"), "{call}");
}

#[tokio::test]
async fn an_unreachable_weather_service_fails_the_call() {
    // A port that was free a moment ago, without a listener.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let server = Server::with(|config| {
        config.builtin.weather.geocoding_url = address.clone();
        config.builtin.weather.forecast_url = address;
        config.policy.max_retries = 1;
        config.policy.backoff.initial_ms = 1;
    })
    .await;
    let call = run(&server.api(), "weather.query", json!({ "query": "Beijing" })).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert_eq!(call["error"]["code"], "UPSTREAM_UNAVAILABLE");
    assert_eq!((&call["error"]["retryable"], &call["result"]), (&json!(true), &Value::Null));
    assert_eq!(call["outcome"]["metrics"]["retries"], 1, "the call was retried");
    assert!(message(&call["error"]).contains("cannot be reached"), "{call}");
}

#[tokio::test]
async fn builtin_tools_can_be_disabled() {
    let server = Server::with(|config| config.builtin.enabled = false).await;
    assert_eq!(server.api().get("/v1/tools").await.is(200), json!({ "tools": [] }));
}
