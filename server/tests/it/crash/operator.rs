//! Commands on the data directory of a running server take effect within seconds.

use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::process::{Server, eventually, text};

const SOON: Duration = Duration::from_secs(2);

/// Runs a command on the data directory. Returns its output.
fn run(server: &Server, arguments: &[&str]) -> Value {
    let ran = server.command(arguments).arg("--json").output().unwrap();
    assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    serde_json::from_slice(&ran.stdout).unwrap()
}

async fn invoke_status(server: &Server, tool: &str, args: &Value, key: Option<&str>) -> StatusCode {
    let mut request = server.invoking(tool, &json!({ "run_id": "run_operator", "args": args }));
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    request.send().await.unwrap().status()
}

#[tokio::test]
async fn commands_change_keys_and_rules_of_a_running_server() {
    let mut server = Server::ready().await;
    let (eval, sum) = ("calculation.eval", json!({ "expression": "1+1" }));
    let (query, sql) = ("database.query", json!({ "sql": "SELECT 1" }));
    let soon = async |tool: &str, args: &Value, key: Option<&str>, status: StatusCode| {
        let description = format!("{tool} is answered {status}");
        let answered =
            async || (invoke_status(&server, tool, args, key).await == status).then_some(());
        eventually(&description, SOON, answered).await;
    };
    assert_eq!(invoke_status(&server, eval, &sum, None).await, StatusCode::ACCEPTED);

    run(&server, &["keys", "create", "--agent", "operator", "--role", "admin"]);
    let created = run(&server, &["keys", "create", "--agent", "ada", "--allow", eval]);
    let (id, key) = (text(&created, "id"), text(&created, "key"));
    soon(eval, &sum, None, StatusCode::UNAUTHORIZED).await;
    let ada = Some(key.as_str());
    assert_eq!(
        invoke_status(&server, eval, &sum, Some("tck_wrong")).await,
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(invoke_status(&server, eval, &sum, ada).await, StatusCode::ACCEPTED);
    assert_eq!(invoke_status(&server, query, &sql, ada).await, StatusCode::FORBIDDEN);

    run(&server, &["allow", "--agent", "ada", "database.*"]);
    soon(query, &sql, ada, StatusCode::ACCEPTED).await;
    run(&server, &["deny", "--agent", "ada", eval]);
    soon(eval, &sum, ada, StatusCode::FORBIDDEN).await;
    assert_eq!(invoke_status(&server, query, &sql, ada).await, StatusCode::ACCEPTED);

    run(&server, &["keys", "revoke", &id]);
    soon(query, &sql, ada, StatusCode::UNAUTHORIZED).await;
    soon(eval, &sum, None, StatusCode::UNAUTHORIZED).await;

    server.kill();
    server.start().await;
    assert_eq!(invoke_status(&server, query, &sql, ada).await, StatusCode::UNAUTHORIZED);
}
