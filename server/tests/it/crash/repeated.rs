//! Many concurrent submits of equal and different results cause one transition, and each submit is
//! answered with the outcome.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::process::{Server, check, text};

async fn make_acknowledged_call(server: &Server) -> String {
    let body = json!({ "run_id": "run_repeated", "args": {}, "timeout_ms": 60_000 });
    let id = server.ticket("probe.once", body).await;
    let delivered = server.poll_requests("client", 1).await;
    assert_eq!(text(&delivered[0], "tool_call_id"), id);
    id
}

/// Submits all results concurrently.
async fn submit_all(server: &Server, id: &str, results: Vec<Value>) -> Vec<(StatusCode, Value)> {
    let url = server.url(&format!("/internal/tool_calls/{id}/submit"));
    let requests = results.into_iter().map(|result| {
        let body = json!({ "status": "SUCCEEDED", "result": result, "client_id": "client" });
        let sending = server.http.post(&url).json(&body).send();
        async move {
            let answer = sending.await.unwrap();
            (answer.status(), answer.json().await.unwrap())
        }
    });
    futures::future::join_all(requests).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_concurrent_results_cause_one_transition() {
    let mut server = Server::ready().await;
    server.register("client", "probe.once", "irreversible").await;

    let same_call = make_acknowledged_call(&server).await;
    let answers = submit_all(&server, &same_call, vec![json!({ "sent": 1 }); 200]).await;
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    assert_eq!((answers[0].0, &answers[0].1["status"]), (StatusCode::OK, &json!("SUCCEEDED")));

    let contested = make_acknowledged_call(&server).await;
    let results = (0..200).map(|number| json!({ "sent": number % 2 })).collect();
    let answers = submit_all(&server, &contested, results).await;
    let winner = server.call(&contested, 0).await["result"]["sent"].clone();
    for (number, (status, body)) in answers.iter().enumerate() {
        let expected =
            if winner == json!(number % 2) { StatusCode::OK } else { StatusCode::CONFLICT };
        assert_eq!(*status, expected, "{number}: {body}");
    }
    assert!(server.stop().await.success());
    // `check` fails unless each call has exactly one end.
    assert_eq!(check(&server.data_dir()).count("SUCCEEDED"), 2);
    let database = rusqlite::Connection::open(server.database()).unwrap();
    let count = |kind: &str, id: &str| -> i64 {
        let sql = "SELECT count(*) FROM events JOIN tool_calls USING (place) \
                   WHERE kind = ? AND tool_call_id = ?";
        database.query_row(sql, [kind, id], |row| row.get(0)).unwrap()
    };
    assert_eq!(count("tool.call.late", &same_call), 0, "an equal result is not late");
    assert_eq!(
        count("tool.call.late", &contested),
        100,
        "each rejected result is stored as an event"
    );
}
