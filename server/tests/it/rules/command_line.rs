//! `toolcrib rules`: the real program, on a data directory and at a server.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::process::{self, Server, TOOLCRIB};

/// Builds the command with these arguments.
type CommandBuilder = Box<dyn Fn(&[&str]) -> Command>;

/// Makes commands of the program, on a data directory or at a server.
struct Program {
    directory: PathBuf,
    command: CommandBuilder,
}

fn run(program: &Program, words: &[&str]) -> (bool, String, String) {
    let output = (program.command)(words).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn json_of(server: &Program, words: &[&str]) -> Value {
    let mut words = words.to_vec();
    words.push("--json");
    let (is_ok, stdout, stderr) = run(server, &words);
    assert!(is_ok, "{words:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap()
}

fn check_commands(server: &Program) {
    let applied = json_of(server, &["rules", "apply", "locked-down"]);
    let ids = |rules: &Value| -> Vec<String> {
        let rules = rules["rules"].as_array().unwrap().iter();
        rules.map(|rule| rule["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids(&applied), ["allow-reads", "ask-before-writes", "deny-critical"]);
    let explained = json_of(
        server,
        &["rules", "explain", "--agent", "ada", "calculation.eval", "expression=1+1"],
    );
    assert_eq!(
        (&explained["decision"], &explained["rule_id"]),
        (&json!("allow"), &json!("allow-reads"))
    );
    let file = server.directory.join("rules.toml");
    std::fs::write(
        &file,
        "[[rules]]\nid = 'all'\nverdict = 'allow'\n\n[[rules]]\nid = 'big'\n\
        verdict = 'ask'\ntools = ['pay.*']\nwhen = 'args.amount > 100'\nexpires_in_ms = 60000\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    let rehearsed = json_of(server, &["rules", "rehearse", file, "--days", "1"]);
    assert!(rehearsed["changes"].is_array(), "{rehearsed}");
    assert_eq!(ids(&json_of(server, &["rules", "apply", file])), ["all", "big"]);
    assert_eq!(json_of(server, &["rules", "show", "big"])["when"], "args.amount > 100");
    json_of(
        server,
        &[
            "rules",
            "set",
            "night",
            "--verdict",
            "deny",
            "--effect",
            "irreversible",
            "--when",
            "now.getHours() < 6",
            "--note",
            "sleep",
        ],
    );
    json_of(server, &["rules", "allow", "ada", "weather.*"]);
    json_of(server, &["rules", "deny", "*", "database.*"]);
    let listed = json_of(server, &["rules"]);
    assert_eq!(ids(&listed), ["all", "allow:ada:weather.*", "big", "deny:*:database.*", "night"]);
    let findings = json_of(server, &["rules", "lint"]);
    assert!(findings["findings"].to_string().contains("allow:ada:weather.*"), "{findings}");
    json_of(server, &["rules", "rm", "night"]);
    json_of(server, &["rules", "rm", "--agent", "ada", "weather.*"]);
    let versions = json_of(server, &["rules", "versions"]);
    let applied_version = versions["versions"].as_array().unwrap().iter().rev().nth(1).unwrap();
    let number = applied_version["version"].as_u64().unwrap().to_string();
    assert_eq!(ids(&json_of(server, &["rules", "rollback", &number])), ["all", "big"]);
    for starter in ["open", "ask-before-writes"] {
        assert!(!ids(&json_of(server, &["rules", "apply", starter])).is_empty());
    }
    let (is_ok, table, _) = run(server, &["rules"]);
    assert!(is_ok && table.contains("ask-before-writes"), "{table}");
    let (is_ok, _, stderr) = run(server, &["rules", "apply", "opened"]);
    assert!(!is_ok && stderr.contains("open, ask-before-writes, locked-down"), "{stderr}");
    let bad = ["rules", "set", "x", "--verdict", "deny", "--when", "args.x >"];
    let (is_ok, _, stderr) = run(server, &bad);
    assert!(!is_ok && stderr.contains("line 1, column"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_managed_in_a_data_directory() {
    let server = Server::new();
    let directory = server.directory.path().to_owned();
    check_commands(&Program { directory, command: Box::new(move |words| server.command(words)) });
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_are_managed_at_a_running_server() {
    let server = Server::ready().await;
    let url = format!("http://127.0.0.1:{}", server.port);
    let token = process::operator_token(&server.data_dir());
    let directory = server.directory.path().to_owned();
    let work_dir = directory.clone();
    let command = move |words: &[&str]| {
        let mut command = Command::new(TOOLCRIB);
        command.args(words).current_dir(&work_dir).stdin(Stdio::null());
        command.env("TOOLCRIB_SERVER", &url).env("TOOLCRIB_KEY", &token);
        command
    };
    check_commands(&Program { directory, command: Box::new(command) });
}

#[tokio::test(flavor = "multi_thread")]
async fn configured_rules_are_in_force_from_the_start_and_broken_ones_stop_it() {
    let mut server = Server::new();
    let data_dir = server.data_dir();
    std::fs::create_dir_all(&data_dir).unwrap();
    let file = server.directory.path().join("rules.json");
    std::fs::write(
        &file,
        json!({"rules": [{"id": "no", "verdict": "deny", "tools": ["weather.*"]}]}).to_string(),
    )
    .unwrap();
    let config = server.directory.path().join("toolcrib.toml");
    std::fs::write(
        &config,
        format!(
            "rules_file = {:?}\n[[rules]]\nid = 'also'\nverdict = 'deny'\ntools = ['database.*']\n",
            file
        ),
    )
    .unwrap();
    server = server.variable("TOOLCRIB_CONFIG", config.to_str().unwrap());
    server.start().await;
    let api = crate::support::Api::new(&format!("127.0.0.1:{}", server.port));
    let body = json!({"run_id": "r", "args": {"city": "Oslo"}});
    let error =
        api.post("/v1/tools/weather.query/invoke", body).await.refused(403, "PERMISSION_DENIED");
    assert_eq!(error["detail"]["rule_id"], "no");
    server.kill();
    std::fs::write(&file, r#"{"rules": [{"id": "no", "verdict": "dney"}]}"#).unwrap();
    let output = server.command(&["serve", "--listen", "127.0.0.1:0"]).output().unwrap();
    let (is_ok, stderr) = (output.status.success(), String::from_utf8(output.stderr).unwrap());
    assert!(!is_ok && stderr.contains("verdict must be allow, deny or ask"), "{stderr}");
}
