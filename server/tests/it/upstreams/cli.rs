//! `toolcrib mcp add` and related commands, and `toolcrib calls answer`: the real binary.

use serde_json::{Value, json};
use tokio::process::Command;

use super::wait_for_state;
use crate::support::process::TOOLCRIB;
use crate::support::upstream::{Http, program};
use crate::support::{Server, soon, until};

/// Runs a command and returns its output.
async fn run_command(arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new(TOOLCRIB);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOOLCRIB_")) {
        command.env_remove(name);
    }
    soon("the command", command.args(arguments).output()).await.unwrap()
}

/// Runs a command that must succeed and returns its standard output.
async fn run_successfully(arguments: &[&str]) -> String {
    let output = run_command(arguments).await;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn servers_are_added_listed_and_removed_on_a_running_server() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let server_url = format!("http://{}", server.address);
    let target = ["--server", server_url.as_str()];
    let url = upstream.url();
    let added =
        run_successfully(&[&["mcp", "add", "far", &url, "--pin"], &target[..]].concat()).await;
    assert!(added.starts_with("far is ready: 20 tools"), "{added}");
    let settings = program("good");
    let variable = settings.env.iter().next().map(|(n, v)| format!("{n}={v}")).unwrap();
    let mut arguments = vec!["mcp", "add", "near", "--env", &variable];
    arguments.extend(target);
    arguments.extend(["--", settings.command.as_deref().unwrap()]);
    arguments.extend(settings.args.iter().map(String::as_str));
    let added = run_successfully(&arguments).await;
    assert!(added.starts_with("near is ready"), "{added}");
    let listed = run_successfully(&[&["mcp", "ls"], &target[..]].concat()).await;
    assert!(listed.contains("near") && listed.contains("far"), "{listed}");
    let output = run_successfully(&[&["mcp", "show", "far"], &target[..]].concat()).await;
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["pinned"], true);
    upstream.fixture.change();
    let api = server.operator();
    until("the change", || async {
        let source = api.get("/v1/sources/mcp/far").await.is(200);
        (source["pending"] != json!([])).then_some(())
    })
    .await;
    let accepted = run_successfully(&[&["mcp", "accept", "far"], &target[..]].concat()).await;
    assert_eq!(accepted.trim(), "far.echo (changed)");
    run_successfully(&[&["mcp", "rm", "near"], &target[..]].concat()).await;
    api.get("/v1/sources/mcp/near").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn an_upstream_added_to_a_data_directory_is_started_by_its_server() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let directory = server.config.data_dir.to_str().unwrap().to_owned();
    let file = server.config.data_dir.join("client.json");
    let document = json!({ "mcpServers": { "fixture": { "url": upstream.url() } } });
    std::fs::write(&file, document.to_string()).unwrap();
    let file = file.to_str().unwrap();
    run_successfully(&["mcp", "add", "--file", file, "--data-dir", &directory]).await;
    wait_for_state(&server.operator(), "fixture", "ready").await;
    let listed = run_successfully(&["mcp", "ls", "--data-dir", &directory, "--json"]).await;
    assert!(listed.contains("fixture"), "{listed}");
    run_successfully(&["mcp", "rm", "fixture", "--data-dir", &directory]).await;
    let api = server.operator();
    until("it to be gone", || async {
        (api.get("/v1/sources/mcp/fixture").await.status == 404).then_some(())
    })
    .await;
}

#[tokio::test]
async fn options_beside_a_file_apply_to_each_server_in_it() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let api = server.operator();
    let directory = server.config.data_dir.to_str().unwrap().to_owned();
    let server_url = format!("http://{}", server.address);
    let path = server.config.data_dir.join("client.json");
    let entry = json!({ "url": upstream.url(), "disabledTools": ["fail"] });
    std::fs::write(&path, json!({ "mcpServers": { "one": entry, "two": entry } }).to_string())
        .unwrap();
    let file = path.to_str().unwrap();
    let add = ["mcp", "add", "--file", file];
    for target in [["--server", server_url.as_str()], ["--data-dir", directory.as_str()]] {
        run_successfully(&[&add[..], &target, &["--pin", "--risk", "critical"]].concat()).await;
        for name in ["one", "two"] {
            let source = wait_for_state(&api, name, "ready").await;
            assert_eq!(
                (&source["pinned"], &source["tools"]),
                (&json!(true), &json!(19)),
                "{source}"
            );
            let tool = api.get(&format!("/v1/tools/{name}.echo")).await.is(200);
            assert_eq!(tool["risk"], "critical", "{tool}");
            api.get(&format!("/v1/tools/{name}.fail")).await.refused(404, "TOOL_NOT_FOUND");
        }
        // After a second import it is still pinned.
        run_successfully(&[&add[..], &target].concat()).await;
        until("the risk to be as it was", || async {
            let tool = api.get("/v1/tools/one.echo").await;
            let source = api.get("/v1/sources/mcp/one").await.is(200);
            assert_eq!(source["pinned"], true, "{source}");
            (tool.body["risk"] == "critical" && source["pending"] != json!([])).then_some(())
        })
        .await;
        for name in ["one", "two"] {
            run_successfully(&["mcp", "rm", name, "--server", &server_url]).await;
        }
    }
    for option in [["--env", "A=b"], ["--env-from", "A"], ["--header", "A: b"], ["--cwd", "/"]] {
        let refused = run_command(&[&add[..], &["--server", &server_url], &option].concat()).await;
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    }
    // The error names the invalid server of several.
    let invalid = json!({ "mcpServers": { "one": entry, "two": { "args": ["x"] } } });
    std::fs::write(&path, invalid.to_string()).unwrap();
    let refused = run_command(&[&add[..], &["--server", &server_url]].concat()).await;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("\"two\""), "{refused:?}");
}

#[tokio::test]
async fn an_elicitation_is_answered_from_the_command_line() {
    let upstream = Http::start().await;
    let server = super::server(vec![super::http_upstream(&upstream.url())]).await;
    let server_url = format!("http://{}", server.address);
    let api = server.operator();
    for (answer, greeting) in [("name=Ada", "Hello, Ada!"), ("--decline", "Hello, nobody!")] {
        let id = api.invoke("fixture.ask", json!({})).await;
        until("the question", || async { (api.call(&id).await["hold"] == "input").then_some(()) })
            .await;
        run_successfully(&["calls", "answer", &id, answer, "--server", &server_url]).await;
        assert_eq!(super::result_text(&api.finished(&id).await), greeting);
    }
}
