//! The same result, and different ones, from many at once: one transition, and everybody is told
//! what it came to.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::process::{Server, check, text};

async fn taken(server: &Server) -> String {
    let body = json!({ "run_id": "run_repeated", "args": {}, "timeout_ms": 60_000 });
    let id = server.ticket("probe.once", body).await;
    let requests = server.taken("client", 1).await;
    assert_eq!(text(&requests[0], "tool_call_id"), id);
    id
}

/// Submits all at once.
async fn submitted(server: &Server, id: &str, results: Vec<Value>) -> Vec<(StatusCode, Value)> {
    let url = server.url(&format!("/internal/tool_calls/{id}/submit"));
    let asked = results.into_iter().map(|result| {
        let body = json!({ "status": "SUCCEEDED", "result": result, "client_id": "client" });
        let asked = server.http.post(&url).json(&body).send();
        async move {
            let answer = asked.await.unwrap();
            (answer.status(), answer.json().await.unwrap())
        }
    });
    futures::future::join_all(asked).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_reports_are_one_transition() {
    let mut server = Server::ready().await;
    server.register("client", "probe.once", "irreversible").await;

    let same = taken(&server).await;
    let answers = submitted(&server, &same, vec![json!({ "sent": 1 }); 200]).await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    assert_eq!((answers[0].0, &answers[0].1["status"]), (StatusCode::OK, &json!("SUCCEEDED")));

    let contested = taken(&server).await;
    let results = (0..200).map(|number| json!({ "sent": number % 2 })).collect();
    let answers = submitted(&server, &contested, results).await;
    let winner = server.call(&contested, 0).await["result"]["sent"].clone();
    for (number, (status, body)) in answers.iter().enumerate() {
        let expected =
            if winner == json!(number % 2) { StatusCode::OK } else { StatusCode::CONFLICT };
        assert_eq!(*status, expected, "{number}: {body}");
    }
    assert!(server.stop().await.success());
    // The checker finds exactly one end of each call.
    assert_eq!(check(&server.data_dir()).count("SUCCEEDED"), 2);
    let database = rusqlite::Connection::open(server.database()).unwrap();
    let count = |kind: &str, id: &str| -> i64 {
        let sql = "SELECT count(*) FROM events JOIN calls USING (place) WHERE kind = ? AND id = ?";
        database.query_row(sql, [kind, id], |row| row.get(0)).unwrap()
    };
    assert_eq!(count("tool.call.late", &same), 0, "who says the same is not late");
    assert_eq!(count("tool.call.late", &contested), 100, "what lost is kept as an event");
}
