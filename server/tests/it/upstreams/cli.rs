//! `toolcrib mcp add` and its sisters, and `toolcrib calls answer`: the real binary.

use serde_json::{Value, json};
use tokio::process::Command;

use super::in_state;
use crate::support::process::TOOLCRIB;
use crate::support::upstream::{Http, program};
use crate::support::{Server, soon, until};

/// What came of a command.
async fn done(words: &[&str]) -> std::process::Output {
    let mut command = Command::new(TOOLCRIB);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("TOOLCRIB_")) {
        command.env_remove(name);
    }
    soon("the command", command.args(words).output()).await.unwrap()
}

/// What a command says on standard output; it must succeed.
async fn run(words: &[&str]) -> String {
    let done = done(words).await;
    let errors = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{words:?}: {errors}");
    String::from_utf8(done.stdout).unwrap()
}

#[tokio::test]
async fn servers_are_added_listed_and_removed_on_a_running_server() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let at = format!("http://{}", server.address);
    let to = ["--server", at.as_str()];
    let url = upstream.url();
    let added = run(&[&["mcp", "add", "far", &url, "--pin"], &to[..]].concat()).await;
    assert!(added.starts_with("far is ready: 20 tools"), "{added}");
    let settings = program("good");
    let variable = settings.env.iter().next().map(|(n, v)| format!("{n}={v}")).unwrap();
    let mut words = vec!["mcp", "add", "near", "--env", &variable];
    words.extend(to);
    words.extend(["--", settings.command.as_deref().unwrap()]);
    words.extend(settings.args.iter().map(String::as_str));
    let added = run(&words).await;
    assert!(added.starts_with("near is ready"), "{added}");
    let listed = run(&[&["mcp", "ls"], &to[..]].concat()).await;
    assert!(listed.contains("near") && listed.contains("far"), "{listed}");
    let shown = run(&[&["mcp", "show", "far"], &to[..]].concat()).await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["pinned"], true);
    upstream.fixture.change();
    let api = server.api();
    until("the change", || async {
        let shown = api.get("/v1/sources/mcp/far").await.is(200);
        (shown["pending"] != json!([])).then_some(())
    })
    .await;
    let accepted = run(&[&["mcp", "accept", "far"], &to[..]].concat()).await;
    assert_eq!(accepted.trim(), "far.echo (changed)");
    run(&[&["mcp", "rm", "near"], &to[..]].concat()).await;
    api.get("/v1/sources/mcp/near").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn what_is_added_to_a_data_directory_is_taken_up_by_its_server() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let directory = server.config.data_dir.to_str().unwrap().to_owned();
    let file = server.config.data_dir.join("client.json");
    let document = json!({ "mcpServers": { "fixture": { "url": upstream.url() } } });
    std::fs::write(&file, document.to_string()).unwrap();
    let file = file.to_str().unwrap();
    run(&["mcp", "add", "--file", file, "--data-dir", &directory]).await;
    in_state(&server.api(), "fixture", "ready").await;
    let listed = run(&["mcp", "ls", "--data-dir", &directory, "--json"]).await;
    assert!(listed.contains("fixture"), "{listed}");
    run(&["mcp", "rm", "fixture", "--data-dir", &directory]).await;
    let api = server.api();
    until("it to be gone", || async {
        (api.get("/v1/sources/mcp/fixture").await.status == 404).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_is_said_beside_a_file_is_said_of_each_server_in_it() {
    let (server, upstream) = (Server::start().await, Http::start().await);
    let api = server.api();
    let directory = server.config.data_dir.to_str().unwrap().to_owned();
    let at = format!("http://{}", server.address);
    let path = server.config.data_dir.join("client.json");
    let entry = json!({ "url": upstream.url(), "disabledTools": ["fail"] });
    std::fs::write(&path, json!({ "mcpServers": { "one": entry, "two": entry } }).to_string())
        .unwrap();
    let file = path.to_str().unwrap();
    let add = ["mcp", "add", "--file", file];
    for place in [["--server", at.as_str()], ["--data-dir", directory.as_str()]] {
        run(&[&add[..], &place, &["--pin", "--risk", "critical"]].concat()).await;
        for name in ["one", "two"] {
            let shown = in_state(&api, name, "ready").await;
            assert_eq!((&shown["pinned"], &shown["tools"]), (&json!(true), &json!(19)), "{shown}");
            let tool = api.get(&format!("/v1/tools/{name}.echo")).await.is(200);
            assert_eq!(tool["risk"], "critical", "{tool}");
            api.get(&format!("/v1/tools/{name}.fail")).await.refused(404, "TOOL_NOT_FOUND");
        }
        // Imported again it stays pinned.
        run(&[&add[..], &place].concat()).await;
        until("the risk to be as it was", || async {
            let tool = api.get("/v1/tools/one.echo").await;
            let shown = api.get("/v1/sources/mcp/one").await.is(200);
            assert_eq!(shown["pinned"], true, "{shown}");
            (tool.body["risk"] == "critical" && shown["pending"] != json!([])).then_some(())
        })
        .await;
        for name in ["one", "two"] {
            run(&["mcp", "rm", name, "--server", &at]).await;
        }
    }
    for of_one in [["--env", "A=b"], ["--env-from", "A"], ["--header", "A: b"], ["--cwd", "/"]] {
        let refused = done(&[&add[..], &["--server", &at], &of_one].concat()).await;
        assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    }
    // Of several, it is said which one is wrong.
    let odd = json!({ "mcpServers": { "one": entry, "two": { "args": ["x"] } } });
    std::fs::write(&path, odd.to_string()).unwrap();
    let refused = done(&[&add[..], &["--server", &at]].concat()).await;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("\"two\""), "{refused:?}");
}

#[tokio::test]
async fn a_question_is_answered_from_the_command_line() {
    let upstream = Http::start().await;
    let server = super::server(vec![super::at(&upstream.url())]).await;
    let at = format!("http://{}", server.address);
    let api = server.api();
    for (answer, said) in [("name=Ada", "Hello, Ada!"), ("--decline", "Hello, nobody!")] {
        let id = api.invoke("fixture.ask", json!({})).await;
        until("the question", || async {
            (api.call(&id).await["hold"]["reason"] == "input").then_some(())
        })
        .await;
        run(&["calls", "answer", &id, answer, "--server", &at]).await;
        assert_eq!(super::words(&api.finished(&id).await), said);
    }
}
