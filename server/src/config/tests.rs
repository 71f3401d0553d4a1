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

fn load_error(toml: &str, variables: &[(&str, &str)]) -> String {
    load(toml, variables).unwrap_err().to_string()
}

#[test]
fn an_empty_configuration_equals_the_defaults() {
    assert_eq!(load("", &[]).unwrap(), Config::default());
    let config = Config::default();
    assert_eq!(config.listen, "127.0.0.1:8080");
    assert_eq!(config.store_location().unwrap().redacted(), "./toolcrib-data/toolcrib.db");
    assert_eq!(config.limits.max_body_bytes, 2_097_152);
}

#[test]
fn precedence_is_flags_environment_file_defaults() {
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
fn environment_values_are_converted_to_the_settings_type() {
    let config = load(
        "[policy]\nmax_retries = 9\n[builtin]\nenabled = true\n",
        &[
            ("TOOLCRIB_POLICY__MAX_PARALLEL", "12"),
            ("TOOLCRIB_POLICY__BACKOFF__FACTOR", "3"),
            ("TOOLCRIB_BUILTIN__ENABLED", "no"),
            ("TOOLCRIB_BUILTIN__DATABASE__URL", "postgres://u:hunter2@h/d"),
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
    assert_eq!(config.store.url, None, "an empty variable counts as unset");
    assert!(!format!("{config:?}").contains("hunter2"), "passwords are not printed");
}

#[test]
fn environment_variables_that_are_not_settings_are_ignored() {
    let variables = [
        ("TOOLCRIB_SERVER", "http://x"),
        ("TOOLCRIB_KEY", "k"),
        ("TOOLCRIB_CONFIG", "f"),
        ("TOOLCRIB_LOG", "debug"),
        ("TOOLCRIB_QUIET", "1"),
        ("TOOLCRIB_TEST_POSTGRES", "1"),
        ("TOOLCRIB_WEBHOOK_SIGNING_KEY", "whsec_x"),
        ("TOOLCRIB_SERVICE_HOST", "10.0.0.1"),
        ("TOOLCRIB_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("OTHER", "x"),
    ];
    assert_eq!(load("", &variables).unwrap(), Config::default());
}

#[test]
fn unknown_keys_are_refused_with_a_suggestion() {
    let message = load_error("[policy]\nmax_paralel = 1\n", &[]);
    assert!(message.contains("policy.max_paralel;"), "{message}");
    assert!(message.contains("did you mean policy.max_parallel?"), "{message}");
    assert!(message.contains("toolcrib.toml"), "where it came from: {message}");
    let message = load_error("max_parallel = 1\n", &[]);
    assert!(message.contains("did you mean policy.max_parallel?"), "{message}");
    let message = load_error("[nonsense]\nx = 1\n", &[]);
    assert!(message.ends_with("there is no setting nonsense"), "{message}");
    let message = load_error("", &[("TOOLCRIB_POLICY__MAX_PARALELL", "1")]);
    assert!(message.contains("TOOLCRIB_POLICY__MAX_PARALELL"), "{message}");
    assert!(message.contains("did you mean TOOLCRIB_POLICY__MAX_PARALLEL?"), "{message}");
    let message = load_error("", &[("TOOLCRIB_", "1")]);
    assert!(message.contains("no setting TOOLCRIB_"), "{message}");
    let message = load_error("[tools.\"a.b\".policy]\nmax_retry = 1\n", &[]);
    assert!(message.contains("tools.\"a.b\".policy.max_retries"), "{message}");
    let message =
        load_error("[[tools.\"a.b\".fallback]]\ntool = \"c\"\nargs.q.form = \"/x\"\n", &[]);
    assert!(message.contains("args.q.from"), "{message}");
}

#[test]
fn a_wrong_type_is_reported_with_key_and_origin() {
    let message = load_error("[policy]\nmax_parallel = \"many\"\n", &[]);
    let expected = "policy.max_parallel must be a whole number from 0 to 4294967295, and is \
                  the text \"many\"";
    assert!(message.contains(expected) && message.contains("toolcrib.toml"), "{message}");
    let message = load_error("", &[("TOOLCRIB_INGRESS__WINDOW", "-1")]);
    assert!(
        message.contains("TOOLCRIB_INGRESS__WINDOW must be") && message.contains("-1"),
        "{message}"
    );
    let message = load_error("[log]\nformat = \"xml\"\n", &[]);
    assert!(
        message.contains("log.format must be one of \"auto\", \"text\", \"json\""),
        "{message}"
    );
    for (toml, key) in [
        ("listen = 8080", "listen"),
        ("policy = 1", "policy"),
        ("[policy]\nmax_parallel = 4294967296", "policy.max_parallel"),
        ("[policy]\nmax_parallel = 1.5", "policy.max_parallel"),
        ("[auth]\ndefault_allow = \"x\"", "auth.default_allow"),
        ("[auth]\ndefault_allow = [1]", "auth.default_allow.0"),
        ("[builtin]\nenabled = 1", "builtin.enabled"),
    ] {
        let message = load_error(toml, &[]);
        assert!(message.contains(&format!(": {key} must be")), "{message}");
    }
}

#[test]
fn a_toml_syntax_error_is_reported_with_its_location() {
    let message = load_error("listen = \n", &[]);
    assert!(message.contains("not valid TOML") && message.contains("line 1"), "{message}");
    let none = Config::from_parts(
        Some(Path::new("/nonexistent.toml")),
        std::iter::empty::<(OsString, OsString)>(),
        &ConfigOverrides::default(),
    );
    assert!(none.unwrap_err().to_string().contains("/nonexistent.toml"));
}

#[test]
fn invalid_values_are_refused_with_their_key() {
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
        let message = load_error(toml, &[]);
        assert!(message.starts_with(&format!("{key}: ")), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
    assert!(load_error("[store]\nurl = \"mysql://h\"", &[]).contains("postgres://"));
}

#[test]
fn valid_addresses_levels_and_urls_are_accepted() {
    for listen in ["0.0.0.0:80", "[::1]:0", "localhost:8080", "my-host.example:1"] {
        assert!(load(&format!("listen = \"{listen}\""), &[]).is_ok(), "{listen}");
    }
    for level in ["DEBUG", "info,toolcrib=debug", "off"] {
        assert!(load(&format!("[log]\nlevel = \"{level}\""), &[]).is_ok(), "{level}");
    }
    let config = load("[store]\nurl = \"sqlite:///var/x.db\"", &[]).unwrap();
    assert_eq!(config.store_location().unwrap().redacted(), "/var/x.db");
    let config = load("[store]\nurl = \"postgres://u:hunter2@h/x\"", &[]).unwrap();
    assert_eq!(config.store_location().unwrap().redacted(), "postgres://h/x");
    assert!(!format!("{config:?}").contains("hunter2"), "passwords are not printed");
}

/// Every setting has a doc comment, because the doc comments are the documentation.
#[test]
fn every_setting_is_described() {
    fn check_descriptions(schema: &serde_json::Value, path: &str) {
        let Some(properties) = schema["properties"].as_object() else { return };
        for (name, member) in properties {
            let path = format!("{path}.{name}");
            assert!(member["description"].is_string(), "{path} has no description");
            check_descriptions(member, &path);
            check_descriptions(&member["additionalProperties"], &path);
        }
    }
    check_descriptions(layers::schema(), "");
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
        let error = load_error(text, &[]);
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn models_can_be_configured_by_the_environment() {
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
    let endpoints: Vec<_> = config.llm.named_endpoints().collect();
    let (name, model, claude) = &endpoints[0];
    assert_eq!((name.as_str(), model.as_str()), ("claude", "claude"));
    assert_eq!(claude.base_url, "https://api.anthropic.com/v1", "the default of its own kind");
    assert_eq!(claude.key.variable.as_deref(), Some("ANTHROPIC_API_KEY"));
    let (name, model, small) = &endpoints[1];
    assert_eq!((name.as_str(), model.as_str()), ("small", "small-1"));
    assert_eq!(small.base_url, endpoint.base_url);
}
