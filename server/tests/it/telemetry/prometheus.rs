//! `/metrics`: every documented metric exists from the start, with help and type.

use serde_json::json;

use crate::support::process;

/// Every documented metric: its name, its type, and its required labels.
const METRICS: [(&str, &str, &[&str]); 30] = [
    ("toolcrib_tool_calls_accepted_total", "counter", &["source"]),
    ("toolcrib_tool_calls_total", "counter", &["source", "status", "error_code"]),
    ("toolcrib_tool_call_duration_seconds", "histogram", &["source", "tool", "le"]),
    ("toolcrib_tool_call_queue_seconds", "histogram", &["source", "tool", "le"]),
    ("toolcrib_tool_calls_open", "gauge", &["state"]),
    ("toolcrib_tool_calls_waiting", "gauge", &[]),
    ("toolcrib_dispatch_attempts_total", "counter", &["source", "outcome"]),
    ("toolcrib_late_results_total", "counter", &["reason"]),
    ("toolcrib_idempotent_replays_total", "counter", &[]),
    ("toolcrib_mcp_resumed_streams_total", "counter", &[]),
    ("toolcrib_rejoined_total", "counter", &["kind"]),
    ("toolcrib_policy_decisions_total", "counter", &["decision"]),
    ("toolcrib_clients_connected", "gauge", &[]),
    ("toolcrib_oldest_open_call_age_seconds", "gauge", &[]),
    ("toolcrib_store_commit_duration_seconds", "histogram", &["le"]),
    ("toolcrib_store_commit_group_size", "histogram", &["le"]),
    ("toolcrib_schemas_compiled_bytes", "gauge", &[]),
    ("toolcrib_streams_open", "gauge", &[]),
    ("toolcrib_streams_refused_total", "counter", &["limit"]),
    ("toolcrib_connections_stalled_total", "counter", &[]),
    ("toolcrib_store_size_bytes", "gauge", &[]),
    ("toolcrib_reconciled_calls_total", "counter", &[]),
    ("toolcrib_otlp_spans_total", "counter", &["outcome"]),
    ("toolcrib_build_info", "gauge", &["version"]),
    ("toolcrib_runs_open", "gauge", &[]),
    ("toolcrib_runs_total", "counter", &["status"]),
    ("toolcrib_model_requests_total", "counter", &["outcome"]),
    ("toolcrib_llm_tokens_total", "counter", &["provider", "model", "type"]),
    ("toolcrib_webhook_deliveries_total", "counter", &["outcome"]),
    ("toolcrib_bus_reconnects_total", "counter", &[]),
];

struct Scrape(String);

impl Scrape {
    async fn read(server: &process::Server) -> Self {
        let answer = server.http.get(server.url("/metrics")).send().await.unwrap();
        Self(answer.text().await.unwrap())
    }

    async fn read_with_key(server: &process::Server, key: &str) -> Self {
        let request = server.http.get(server.url("/metrics")).bearer_auth(key);
        Self(request.send().await.unwrap().text().await.unwrap())
    }

    /// Returns the value of a series, given as in the exposition format.
    #[track_caller]
    fn value(&self, series: &str) -> f64 {
        let found = self.0.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("no {series} in\n{}", self.0)).parse().unwrap()
    }
}

#[tokio::test]
async fn every_documented_metric_has_help_type_and_labels() {
    let mut server = process::Server::new();
    server.start().await;
    server.evaluated("6*7").await;
    server.register("c1", "a.tool", "read").await;
    let open_call = server.ticket("a.tool", json!({ "run_id": "r", "args": {} })).await;
    let body = json!({ "run_id": "r", "args": { "expression": "1/0" }, "wait_ms": 10_000 });
    let failed = server.invoke("calculation.eval", body).await;
    let scrape = Scrape::read(&server).await;
    for (name, kind, labels) in METRICS {
        let text = &scrape.0;
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "type of {name} in\n{text}");
        let help = format!("# HELP {name} ");
        let help_text = text.lines().find_map(|line| line.strip_prefix(&help));
        assert!(help_text.is_some_and(|text| text.len() > 5), "help of {name} in\n{text}");
        let series = if kind == "histogram" { format!("{name}_bucket") } else { name.to_owned() };
        let is_series = |line: &&str| line.starts_with(&series) && line.contains([' ', '{']);
        let line = text.lines().find(is_series).unwrap_or_else(|| panic!("{series} in\n{text}"));
        for label in labels {
            assert!(line.contains(&format!("{label}=\"")), "{label} in {line}");
        }
    }
    let counted = [
        ("toolcrib_tool_calls_total{source=\"builtin\",status=\"SUCCEEDED\",error_code=\"\"}", 1.0),
        (
            "toolcrib_tool_call_duration_seconds_count{source=\"builtin\",tool=\"calculation.eval\"}",
            2.0,
        ),
        ("toolcrib_tool_calls_open{state=\"parked\"}", 1.0),
        ("toolcrib_tool_calls_open{state=\"running\"}", 0.0),
        ("toolcrib_dispatch_attempts_total{source=\"builtin\",outcome=\"ok\"}", 1.0),
        ("toolcrib_policy_decisions_total{decision=\"allow\"}", 3.0),
        // Events that have not occurred are exported as 0.
        ("toolcrib_tool_calls_total{source=\"client\",status=\"SUCCEEDED\",error_code=\"\"}", 0.0),
        ("toolcrib_late_results_total{reason=\"ended\"}", 0.0),
        ("toolcrib_idempotent_replays_total", 0.0),
        ("toolcrib_webhook_deliveries_total{outcome=\"delivered\"}", 0.0),
        ("toolcrib_bus_reconnects_total", 0.0),
        ("toolcrib_llm_tokens_total{provider=\"demo\",model=\"demo\",type=\"input\"}", 0.0),
        ("toolcrib_policy_decisions_total{decision=\"deny\"}", 0.0),
    ];
    for (series, value) in counted {
        assert_eq!(scrape.value(series), value, "{series}");
    }
    for id in [&open_call, &process::text(&failed, "tool_call_id")] {
        assert!(!scrape.0.contains(id.as_str()), "no ids in labels");
    }
}

#[tokio::test]
async fn counters_exist_before_the_first_call() {
    let mut server = process::Server::new();
    server.start().await;
    let scrape = Scrape::read(&server).await;
    for source in ["builtin", "client"] {
        let series = format!("toolcrib_tool_calls_accepted_total{{source=\"{source}\"}}");
        assert_eq!(scrape.value(&series), 0.0);
    }
}

#[tokio::test]
async fn calls_recovered_at_startup_are_counted() {
    let mut server = process::Server::new();
    server.start().await;
    server.register("c1", "a.tool", "read").await;
    let id = server.ticket("a.tool", json!({ "run_id": "r", "args": {} })).await;
    server.kill();
    server.start().await;
    server.submit(&id, json!({ "status": "SUCCEEDED", "result": 1 })).await;
    let scrape = Scrape::read(&server).await;
    assert_eq!(scrape.value("toolcrib_reconciled_calls_total"), 1.0);
    let ended = "toolcrib_tool_calls_total{source=\"client\",status=\"SUCCEEDED\",error_code=\"\"}";
    assert_eq!(scrape.value(ended), 1.0);
}

#[tokio::test]
async fn tools_of_projects_are_named_only_to_operators() {
    let finish_call = async |server: &process::Server, key: Option<&str>| {
        let send = async |path: &str, body: serde_json::Value| {
            let mut request = server.http.post(server.url(path)).json(&body);
            if let Some(key) = key {
                request = request.bearer_auth(key);
            }
            let answer = request.send().await.unwrap();
            assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
            answer.json::<serde_json::Value>().await.unwrap()
        };
        let tools = json!([{ "name": "a.secret.name", "schema": { "type": "object" } }]);
        send("/internal/tools/register", json!({ "client_id": "c", "tools": tools })).await;
        let call = json!({ "run_id": "r", "args": {} });
        let ticket = send("/v1/tools/a.secret.name/invoke", call).await;
        let id = ticket["tool_call_id"].as_str().unwrap();
        let result = json!({ "status": "SUCCEEDED", "result": 1 });
        send(&format!("/internal/tool_calls/{id}/submit"), result).await;
    };
    let count = |tool: &str| {
        format!("toolcrib_tool_call_duration_seconds_count{{source=\"client\",tool=\"{tool}\"}}")
    };
    let mut server = process::Server::new();
    server.start().await;
    finish_call(&server, None).await;
    let scrape = Scrape::read(&server).await;
    assert_eq!(scrape.value(&count("other")), 1.0);
    assert!(!scrape.0.contains("a.secret.name"), "{}", scrape.0);
    let token = process::operator_token(&server.data_dir());
    let scrape = Scrape::read_with_key(&server, &token).await;
    assert_eq!(scrape.value(&count("a.secret.name")), 1.0);

    let mut public = process::Server::new().with("TELEMETRY__TOOL_NAMES_IN_METRICS", true);
    public.start().await;
    finish_call(&public, None).await;
    assert_eq!(Scrape::read(&public).await.value(&count("a.secret.name")), 1.0);

    let mut keyed = process::Server::new();
    let create = ["keys", "create", "--agent", "operator", "--role", "admin", "--json"];
    let output = keyed.command(&create).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let created: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let key = process::text(&created, "key");
    keyed.start().await;
    finish_call(&keyed, Some(&key)).await;
    let scrape = Scrape::read(&keyed).await;
    assert_eq!(scrape.value(&count("other")), 1.0);
    assert!(!scrape.0.contains("a.secret.name"), "{}", scrape.0);
    let scrape = Scrape::read_with_key(&keyed, &key).await;
    assert_eq!(scrape.value(&count("a.secret.name")), 1.0);
    let unknown = Scrape::read_with_key(&keyed, "tck_unknown").await;
    assert!(!unknown.0.contains("a.secret.name"), "{}", unknown.0);
}

/// Returns the counters that docs/telemetry.md lists.
fn documented_counters() -> Vec<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/telemetry.md");
    let page = std::fs::read_to_string(path).unwrap();
    let rows = page.lines().filter(|line| line.contains(" | counter | "));
    rows.map(|row| row.split(['`', '{']).nth(1).unwrap().to_owned()).collect()
}

#[tokio::test]
async fn counters_with_known_labels_exist_before_their_first_event() {
    let server = process::Server::ready().await;
    let scrape = Scrape::read(&server).await;
    let counters = documented_counters();
    assert!(counters.len() >= 25, "{counters:?}");
    for name in counters.iter().filter(|name| *name != "toolcrib_llm_tokens_total") {
        let is_series = |line: &&str| {
            line.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with(['{', ' ']))
        };
        assert!(scrape.0.lines().any(|line| is_series(&line)), "{name} in\n{}", scrape.0);
        assert!(scrape.0.contains(&format!("# HELP {name} ")), "{name} has a description");
    }
    for series in [
        "toolcrib_policy_decisions_total{decision=\"ask\"}",
        "toolcrib_rejoined_total{kind=\"approval\"}",
        "toolcrib_approval_decisions_total{decision=\"superseded\"}",
        "toolcrib_approval_requests_total",
        "toolcrib_approval_webhooks_total{result=\"failed\"}",
        "toolcrib_agent_wakeup_webhooks_total{result=\"ok\"}",
        "toolcrib_mcp_event_deliveries_total{result=\"failed\"}",
        "toolcrib_sign_in_failures_total",
        "toolcrib_dead_letters_total{reason=\"wrong_epoch\"}",
        "toolcrib_dead_letters_total{reason=\"other\"}",
        "toolcrib_tool_calls_accepted_total{source=\"internal\"}",
    ] {
        assert_eq!(scrape.value(series), 0.0, "{series}");
    }
}
