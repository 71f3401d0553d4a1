//! Tests of precedence, unknown keys, types and rejected values.

#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::path::Path;

use super::*;

fn load(toml: &str, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    load_with(toml, variables, &ConfigOverrides::default())
}

fn load_with(
    toml: &str,
    variables: &[(&str, &str)],
    overrides: &ConfigOverrides,
) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("toolcrib.toml");
    std::fs::write(&file, toml).unwrap();
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let config = Config::from_parts(Some(&file), variables, overrides)?;
    assert_eq!(config.file.as_deref(), Some(file.as_path()));
    Ok(Config { file: None, ..config })
}

fn refused(toml: &str, variables: &[(&str, &str)]) -> String {
    load(toml, variables).unwrap_err().to_string()
}

#[test]
fn nothing_given_is_the_defaults() {
    assert_eq!(load("", &[]).unwrap(), Config::default());
    let config = Config::default();
    assert_eq!(config.listen, "127.0.0.1:8080");
    assert_eq!(config.store_location().unwrap().redacted(), "./toolcrib-data/toolcrib.db");
    assert_eq!(config.policies().global, ExecutionPolicy::default());
    assert_eq!(config.limits.max_body_bytes, 2_097_152);
}

#[test]
fn flags_go_before_environment_before_file_before_defaults() {
    let toml = "listen = \"127.0.0.1:1\"\ndata_dir = \"/file\"\n[policy]\nmax_parallel = 7\n";
    let variables = [("TOOLCRIB_LISTEN", "127.0.0.1:2"), ("TOOLCRIB_DATA_DIR", "/env")];
    let overrides =
        ConfigOverrides { listen: Some("127.0.0.1:3".into()), ..ConfigOverrides::default() };
    let config = load_with(toml, &variables, &overrides).unwrap();
    assert_eq!(config.listen, "127.0.0.1:3");
    assert_eq!(config.data_dir, Path::new("/env"));
    assert_eq!((config.policy.max_parallel, config.policy.max_retries), (7, 2));
}

#[test]
fn the_environment_is_read_as_what_is_wanted() {
    let config = load(
        "[policy]\nmax_retries = 9\n[builtin]\nenabled = true\n",
        &[
            ("TOOLCRIB_POLICY__MAX_PARALLEL", "12"),
            ("TOOLCRIB_POLICY__BACKOFF__FACTOR", "3"),
            ("TOOLCRIB_BUILTIN__ENABLED", "no"),
            ("TOOLCRIB_BUILTIN__DATABASE__URL", "postgres://u:secret@h/d"),
            ("TOOLCRIB_AUTH__DEFAULT_ALLOW", "weather.*, calculation.eval"),
            ("TOOLCRIB_LOG__FORMAT", "json"),
            ("TOOLCRIB_RETENTION__FINISHED_CALLS_DAYS", "0.5"),
            ("TOOLCRIB_PROJECTS__ACME__POLICY__MAX_PARALLEL", "3"),
            ("TOOLCRIB_STORE__URL", ""),
        ],
    )
    .unwrap();
    assert_eq!((config.policy.max_parallel, config.policy.max_retries), (12, 9));
    assert_eq!((config.policy.backoff.factor, config.policy.backoff.initial_ms), (3.0, 200));
    assert!(!config.builtin.enabled);
    assert_eq!(config.auth.default_allow, ["weather.*", "calculation.eval"]);
    assert_eq!(config.log.format, LogFormat::Json);
    assert_eq!(config.retention.finished_calls_days, 0.5);
    assert_eq!(config.projects["acme"].policy.max_parallel, Some(3));
    assert_eq!(config.store.url, None, "an empty variable says nothing");
    assert!(!format!("{config:?}").contains("secret"), "passwords are not printed");
}

#[test]
fn variables_that_are_not_settings_are_left_alone() {
    let variables = [
        ("TOOLCRIB_SERVER", "http://x"),
        ("TOOLCRIB_KEY", "k"),
        ("TOOLCRIB_CONFIG", "f"),
        ("TOOLCRIB_LOG", "debug"),
        ("TOOLCRIB_QUIET", "1"),
        ("TOOLCRIB_TEST_POSTGRES", "1"),
        ("TOOLCRIB_BENCH_NOOP", "1"),
        ("TOOLCRIB_WEBHOOK_SIGNING_KEY", "whsec_x"),
        ("TOOLCRIB_SERVICE_HOST", "10.0.0.1"),
        ("TOOLCRIB_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("OTHER", "x"),
    ];
    assert_eq!(load("", &variables).unwrap(), Config::default());
}

#[test]
fn unknown_keys_are_named_with_the_nearest() {
    let said = refused("[policy]\nmax_paralel = 1\n", &[]);
    assert!(said.contains("policy.max_paralel;"), "{said}");
    assert!(said.contains("did you mean policy.max_parallel?"), "{said}");
    assert!(said.contains("toolcrib.toml"), "where it came from: {said}");
    let said = refused("max_parallel = 1\n", &[]);
    assert!(said.contains("did you mean policy.max_parallel?"), "{said}");
    let said = refused("[nonsense]\nx = 1\n", &[]);
    assert!(said.ends_with("there is no setting nonsense"), "{said}");
    let said = refused("", &[("TOOLCRIB_POLICY__MAX_PARALELL", "1")]);
    assert!(said.contains("TOOLCRIB_POLICY__MAX_PARALELL"), "{said}");
    assert!(said.contains("did you mean TOOLCRIB_POLICY__MAX_PARALLEL?"), "{said}");
    let said = refused("", &[("TOOLCRIB_", "1")]);
    assert!(said.contains("no setting TOOLCRIB_"), "{said}");
    let said = refused("[tools.\"a.b\".policy]\nmax_retry = 1\n", &[]);
    assert!(said.contains("tools.\"a.b\".policy.max_retries"), "{said}");
    let said = refused("[[tools.\"a.b\".fallback]]\ntool = \"c\"\nargs.q.form = \"/x\"\n", &[]);
    assert!(said.contains("args.q.from"), "{said}");
}

#[test]
fn a_wrong_type_names_key_and_origin() {
    let said = refused("[policy]\nmax_parallel = \"many\"\n", &[]);
    let wanted = "policy.max_parallel must be a whole number from 0 to 4294967295, and is \
                  the text \"many\"";
    assert!(said.contains(wanted) && said.contains("toolcrib.toml"), "{said}");
    let said = refused("", &[("TOOLCRIB_INGRESS__WINDOW", "-1")]);
    assert!(said.contains("TOOLCRIB_INGRESS__WINDOW must be") && said.contains("-1"), "{said}");
    let said = refused("[log]\nformat = \"xml\"\n", &[]);
    assert!(said.contains("log.format must be one of \"auto\", \"text\", \"json\""), "{said}");
    for (toml, key) in [
        ("listen = 8080", "listen"),
        ("policy = 1", "policy"),
        ("[policy]\nmax_parallel = 4294967296", "policy.max_parallel"),
        ("[policy]\nmax_parallel = 1.5", "policy.max_parallel"),
        ("[auth]\ndefault_allow = \"x\"", "auth.default_allow"),
        ("[auth]\ndefault_allow = [1]", "auth.default_allow.0"),
        ("[builtin]\nenabled = 1", "builtin.enabled"),
    ] {
        let said = refused(toml, &[]);
        assert!(said.contains(&format!(": {key} must be")), "{said}");
    }
}

#[test]
fn what_is_not_toml_says_where() {
    let said = refused("listen = \n", &[]);
    assert!(said.contains("not valid TOML") && said.contains("line 1"), "{said}");
    let none = Config::from_parts(
        Some(Path::new("/nonexistent.toml")),
        std::iter::empty::<(OsString, OsString)>(),
        &ConfigOverrides::default(),
    );
    assert!(none.unwrap_err().to_string().contains("/nonexistent.toml"));
}

#[test]
fn projects_tools_and_fallbacks_reach_the_engine() {
    let toml = "
        [projects.acme.policy]
        max_parallel = 4
        [tools.\"weather.query\".policy]
        default_timeout_ms = 5000
        backoff = { initial_ms = 10 }
        [[tools.\"weather.query\".fallback]]
        tool = \"weather.backup\"
        args = { q = { from = \"/query\" }, units = { value = \"metric\" } }
        [limits]
        max_open_calls = 11
    ";
    let config = load(toml, &[]).unwrap();
    let policies = config.policies();
    assert_eq!(policies.projects["acme"].max_parallel, Some(4));
    let tool = &policies.tools["weather.query"];
    assert_eq!(tool.policy.default_timeout_ms, Some(5_000));
    assert_eq!(tool.policy.backoff.as_ref().unwrap().initial_ms, 10);
    assert_eq!(tool.fallback[0].tool, "weather.backup");
    assert_eq!(tool.fallback[0].args.as_ref().unwrap().len(), 2);
    assert_eq!(config.limits().max_open_calls, 11);
}

#[test]
fn values_that_make_no_sense_name_their_key() {
    for (toml, key) in [
        ("listen = \"8080\"", "listen"),
        ("listen = \"127.0.0.1:99999\"", "listen"),
        ("data_dir = \"\"", "data_dir"),
        ("[store]\nurl = \"mysql://u:secret@h/d\"", "store.url"),
        ("[store]\nurl = \"sqlite:\"", "store.url"),
        ("[log]\nlevel = \"inof\"", "log.level"),
        ("[auth]\ndefault_allow = [\"a b\"]", "auth.default_allow"),
        ("[policy]\nmax_parallel = 0", "policy.max_parallel"),
        ("[policy.backoff]\nfactor = 0.5", "policy.backoff.factor"),
        ("[projects.p.policy]\nmax_retries = 101", "projects.p.policy.max_retries"),
        ("[tools.\"a b\".policy]\nmax_retries = 1", "tools.\"a b\""),
        ("[[tools.a.fallback]]\ntool = \"a\"", "tools.\"a\".fallback"),
        ("[limits]\nmax_connections = 0", "limits.max_connections"),
        ("[retention]\nfinished_calls_days = -1", "retention.finished_calls_days"),
        ("[ingress]\ndead_after_ms = 15000", "ingress.dead_after_ms"),
        ("[webhooks]\nsigning_key_env = \"whsec_secret\"", "webhooks.signing_key_env"),
        ("[webhooks]\nsigning_key_env = \"my/secret+\"", "webhooks.signing_key_env"),
        ("[webhooks.projects.p]", "webhooks.projects.p"),
        ("[webhooks]\nallow_hosts = [\"http://a\"]", "webhooks.allow_hosts"),
        ("[webhooks]\ntimeout_ms = 0", "webhooks.timeout_ms"),
        ("[webhooks]\nretry_schedule_ms = [0]", "webhooks.retry_schedule_ms"),
        ("[webhooks]\njitter = 1.5", "webhooks.jitter"),
        ("[webhooks]\nmax_parallel = 0", "webhooks.max_parallel"),
        ("[llm]\nbase_url = \"ftp://x\"", "llm.base_url"),
        ("[llm]\nbase_url = \"https://u:secret@h/v1\"", "llm.base_url"),
        ("[llm]\napi_key_env = \"sk-secret\"", "llm.api_key_env"),
        ("[llm]\nmodel = \"\"", "llm.model"),
        ("[llm]\ntimeout_ms = 0", "llm.timeout_ms"),
        ("[llm]\nmax_answer_bytes = 0", "llm.max_answer_bytes"),
        ("[llm]\nsummary_model = \"none\"", "llm.summary_model"),
        ("[llm.models.demo]\nmodel = \"x\"", "llm.models.demo"),
        ("[llm.models.a]\nbase_url = \"secret\"", "llm.models.a.base_url"),
        ("[llm.models.a]\nmax_tokens = 0", "llm.models.a.max_tokens"),
        ("[builtin.weather]\nforecast_url = \"ftp://x\"", "builtin.weather.forecast_url"),
        ("[builtin.database]\nurl = \"mysql://u:secret@h\"", "builtin.database.url"),
    ] {
        let said = refused(toml, &[]);
        assert!(said.starts_with(&format!("{key}: ")), "{said}");
        assert!(!said.contains("secret"), "{said}");
    }
    assert!(refused("[store]\nurl = \"mysql://h\"", &[]).contains("postgres://"));
}

#[test]
fn addresses_and_filters_that_are_fine() {
    for listen in ["0.0.0.0:80", "[::1]:0", "localhost:8080", "my-host.example:1"] {
        assert!(load(&format!("listen = \"{listen}\""), &[]).is_ok(), "{listen}");
    }
    for level in ["DEBUG", "info,toolcrib=debug", "off"] {
        assert!(load(&format!("[log]\nlevel = \"{level}\""), &[]).is_ok(), "{level}");
    }
    let config = load("[store]\nurl = \"sqlite:///var/x.db\"", &[]).unwrap();
    assert_eq!(config.store_location().unwrap().redacted(), "/var/x.db");
    let config = load("[store]\nurl = \"postgres://u:secret@h/x\"", &[]).unwrap();
    assert_eq!(config.store_location().unwrap().redacted(), "postgres://h/x");
    assert!(!format!("{config:?}").contains("secret"), "passwords are not printed");
}

/// Every setting has a doc comment, because the doc comments are the documentation.
#[test]
fn every_setting_is_described() {
    fn look(schema: &serde_json::Value, path: &str) {
        let Some(properties) = schema["properties"].as_object() else { return };
        for (name, member) in properties {
            let path = format!("{path}.{name}");
            assert!(member["description"].is_string(), "{path} has no description");
            look(member, &path);
            look(&member["additionalProperties"], &path);
        }
    }
    look(layers::schema(), "");
}

#[test]
fn mcp_servers_are_read_and_checked() {
    let text = r#"
        [[mcp]]
        name = "files"
        command = "npx"
        args = ["-y", "@modelcontextprotocol/server-filesystem", "/srv/files"]
        pin = true

        [[mcp]]
        name = "far"
        url = "https://mcp.example.com/mcp"
        headers = { Authorization = "Bearer ${FAR_TOKEN}" }
        risk = "high"
        tools.delete_all = { enabled = false }
    "#;
    let config = load(text, &[]).unwrap();
    assert_eq!(config.mcp.len(), 2);
    assert!(config.mcp[0].pin);
    assert_eq!(config.mcp[1].risk, Some(toolcrib::Risk::High));
    assert_eq!(config.mcp[1].tools["delete_all"].enabled, Some(false));
    for (text, key) in [
        ("[[mcp]]\nname = 'a'", "mcp.a.command"),
        ("[[mcp]]\nname = 'a.b'\nurl = 'http://x/'", "mcp.a.b.name"),
        ("[[mcp]]\nname = 'a'\ncolour = 'blue'\nurl = 'http://x/'", "colour"),
        ("[[mcp]]\nname = 'a'\nurl = 'http://x/'\nrisk = 'huge'", "risk"),
    ] {
        let error = refused(text, &[]);
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn models_are_configured_by_the_environment_too() {
    let config = load(
        "[llm.models.small]\nmodel = \"small-1\"",
        &[
            ("TOOLCRIB_LLM__BASE_URL", "http://127.0.0.1:9/v1/"),
            ("TOOLCRIB_LLM__MODEL", "large"),
            ("TOOLCRIB_LLM__MODELS__CLAUDE__KIND", "anthropic"),
        ],
    )
    .unwrap();
    let endpoint = config.llm.endpoint().unwrap();
    assert_eq!(endpoint.base_url, "http://127.0.0.1:9/v1");
    assert_eq!(endpoint.key.variable.as_deref(), Some("OPENAI_API_KEY"));
    let named: Vec<_> = config.llm.named_endpoints().collect();
    let (name, model, claude) = &named[0];
    assert_eq!((name.as_str(), model.as_str()), ("claude", "claude"));
    assert_eq!(claude.base_url, "https://api.anthropic.com/v1", "not the address of another kind");
    assert_eq!(claude.key.variable.as_deref(), Some("ANTHROPIC_API_KEY"));
    let (name, model, small) = &named[1];
    assert_eq!((name.as_str(), model.as_str()), ("small", "small-1"));
    assert_eq!(small.base_url, endpoint.base_url);
}
