//! Listing calls: every filter, and pages without gaps or repeats while calls are being made.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::support::api::{message, offer};
use crate::support::{Api, Server};

fn ids(list: &Value) -> Vec<String> {
    let calls = list["tool_calls"].as_array().unwrap();
    calls.iter().map(|call| call["tool_call_id"].as_str().unwrap().to_owned()).collect()
}

async fn list(api: &Api, query: &str) -> Vec<String> {
    ids(&api.get(&format!("/v1/tool_calls?{query}")).await.is(200))
}

async fn call_in(api: &Api, tool: &str, run_id: &str) -> String {
    api.invoke_with(tool, json!({ "run_id": run_id, "args": {} })).await
}

#[tokio::test]
async fn calls_are_listed_newest_first_with_every_filter() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool"), offer("b.tool")])).await;
    assert_eq!(list(&api, "").await, Vec::<String>::new());
    let a1 = call_in(&api, "a.tool", "run_1").await;
    let b1 = call_in(&api, "b.tool", "run_1").await;
    let a2 = call_in(&api, "a.tool", "run_2").await;
    let b2 = call_in(&api, "b.tool", "run_2").await;
    api.succeed(&a1, json!(1)).await;
    api.fail(&a2, json!("no")).await;
    let all = [&b2, &a2, &b1, &a1].map(String::clone);
    assert_eq!(list(&api, "").await, all, "newest first");
    assert_eq!(list(&api, "run_id=run_1").await, [b1.as_str(), a1.as_str()]);
    assert_eq!(list(&api, "tool_name=a.tool").await, [a2.as_str(), a1.as_str()]);
    assert_eq!(list(&api, "status=PENDING").await, [b2.as_str(), b1.as_str()]);
    assert_eq!(list(&api, "status=succeeded").await, [a1.as_str()], "either casing");
    assert_eq!(list(&api, "status=FAILED&run_id=run_2").await, [a2.as_str()]);
    assert_eq!(list(&api, "run_id=run_1&tool_name=a.tool&status=SUCCEEDED").await, [a1.as_str()]);
    assert_eq!(list(&api, "run_id=run_1&tool_name=a.tool&status=FAILED").await.len(), 0);
    assert_eq!(list(&api, "run_id=run_9").await.len(), 0);
    assert_eq!(list(&api, "status=&run_id=run_2&since=").await, [b2.as_str(), a2.as_str()]);
    let one = api.get("/v1/tool_calls?run_id=run_2&tool_name=a.tool").await.is(200);
    assert_eq!(one["tool_calls"][0], api.call(&a2).await, "equal to the single call");
    assert_eq!(one["next_cursor"], Value::Null);
}

#[tokio::test]
async fn since_accepts_seconds_milliseconds_and_rfc_3339() {
    let server = Server::start().await;
    let api = server.api();
    let first = api.invoke("calculation.eval", json!({ "expression": "1" })).await;
    let first_ms = api.finished(&first).await["created_at_ms"].as_u64().unwrap();
    // The next call is made in another millisecond.
    crate::support::until("the clock", || async {
        (server.engine.now_ms() > first_ms).then_some(())
    })
    .await;
    let second = api.invoke("calculation.eval", json!({ "expression": "2" })).await;
    let second_ms = api.finished(&second).await["created_at_ms"].as_u64().unwrap();
    let both = [second.clone(), first.clone()];
    assert_eq!(list(&api, &format!("since={first_ms}")).await, both);
    assert_eq!(list(&api, &format!("since={second_ms}")).await, [second.as_str()]);
    assert_eq!(list(&api, &format!("since={}", first_ms / 1_000)).await, both, "seconds");
    assert_eq!(list(&api, &format!("since={}", second_ms / 1_000 + 60)).await.len(), 0);
    assert_eq!(list(&api, "since=2020-01-01T00:00:00Z").await, both);
    assert_eq!(list(&api, "since=2999-01-01T00:00:00%2B02:00").await.len(), 0);
    assert_eq!(list(&api, "since=18446744073709551615").await.len(), 0, "very far ahead");
    assert_eq!(list(&api, "since=9223372036854775807").await.len(), 0, "very far ahead");
}

#[tokio::test]
async fn pages_have_no_gaps_or_repeats_while_calls_are_made() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let mut call_ids = Vec::new();
    for _ in 0..23 {
        call_ids.push(call_in(&api, "a.tool", "run_1").await);
    }
    let (mut walked, mut cursor) = (Vec::new(), None);
    loop {
        let path = match &cursor {
            None => "/v1/tool_calls?limit=5&run_id=run_1".to_owned(),
            Some(cursor) => format!("/v1/tool_calls?limit=5&run_id=run_1&cursor={cursor}"),
        };
        let page = api.get(&path).await.is(200);
        assert!(ids(&page).len() <= 5);
        walked.extend(ids(&page));
        // New calls of this run and another one do not shift the following pages.
        call_in(&api, "a.tool", "run_1").await;
        call_in(&api, "a.tool", "run_2").await;
        match page["next_cursor"].as_str() {
            Some(next) => cursor = Some(next.to_owned()),
            None => break,
        }
    }
    call_ids.reverse();
    assert_eq!(walked, call_ids);
}

#[tokio::test]
async fn a_page_that_is_exactly_full_is_the_last() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    for _ in 0..4 {
        call_in(&api, "a.tool", "run_1").await;
    }
    let page = api.get("/v1/tool_calls?limit=4").await.is(200);
    assert_eq!((ids(&page).len(), &page["next_cursor"]), (4, &Value::Null));
    let page = api.get("/v1/tool_calls?limit=3").await.is(200);
    let cursor = page["next_cursor"].as_str().unwrap();
    let rest = api.get(&format!("/v1/tool_calls?limit=3&cursor={cursor}")).await.is(200);
    assert_eq!((ids(&rest).len(), &rest["next_cursor"]), (1, &Value::Null));
}

#[tokio::test]
async fn an_invalid_filter_is_rejected_with_the_valid_values() {
    let server = Server::start().await;
    let api = server.api();
    let cases = [
        ("status=DONE", "status", "SUCCEEDED"),
        ("since=yesterday", "since", "RFC 3339"),
        ("since=-5", "since", "Unix seconds"),
        ("cursor=not-one", "cursor", "not valid"),
        ("limit=0", "limit", "1 to 200"),
        ("limit=201", "limit", "1 to 200"),
    ];
    for (query, names, expected) in cases {
        let error = api.get(&format!("/v1/tool_calls?{query}")).await;
        let error = error.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains(names), "{query}: {error}");
        assert!(message(&error).contains(expected), "{query}: {error}");
    }
    let error = api.get("/v1/tool_calls?limit=many").await.refused(422, "VALIDATION_ERROR");
    assert!(message(&error).contains("limit"), "{error}");
}

#[tokio::test]
async fn a_page_has_50_calls_by_default_and_at_most_200() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let call_ids = (0..60).map(|_| call_in(&api, "a.tool", "run_1"));
    let call_ids: HashSet<String> = futures::future::join_all(call_ids).await.into_iter().collect();
    assert_eq!(call_ids.len(), 60);
    assert_eq!(list(&api, "").await.len(), 50, "50 by default");
    let all: HashSet<String> = list(&api, "limit=200").await.into_iter().collect();
    assert_eq!(all, call_ids);
}

#[tokio::test]
async fn a_page_of_large_calls_is_shorter_and_omits_none() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let large = "x".repeat(7 << 20);
    let mut call_ids = Vec::new();
    for _ in 0..5 {
        let id = api.invoke("a.tool", json!({})).await;
        api.succeed(&id, json!(large)).await;
        call_ids.insert(0, id);
    }
    let (mut pages, mut listed, mut cursor) = (Vec::new(), Vec::new(), String::new());
    loop {
        let page = api.get(&format!("/v1/tool_calls?limit=200{cursor}")).await.is(200);
        let calls = page["tool_calls"].as_array().unwrap();
        pages.push(calls.len());
        listed.extend(calls.iter().map(|call| call["tool_call_id"].as_str().unwrap().to_owned()));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!((pages, listed), (vec![3, 2], call_ids));
}

#[tokio::test]
async fn following_link_headers_visits_every_page() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool"), offer("b.tool")])).await;
    let mut call_ids = Vec::new();
    for _ in 0..5 {
        call_ids.insert(0, call_in(&api, "a.tool", "run & 1").await);
        call_in(&api, "b.tool", "run & 1").await;
    }
    let mut next =
        Some("/v1/tool_calls?cursor=&run_id=run%20%26%201&tool_name=a.tool&limit=2".to_owned());
    let (mut seen, mut pages) = (Vec::new(), 0);
    while let Some(path) = next {
        let page = api.get(&path).await;
        let link = page.header("link").map(|link| {
            let (address, rest) = link.strip_prefix('<').unwrap().split_once('>').unwrap();
            assert_eq!(rest, "; rel=\"next\"");
            address.to_owned()
        });
        let body = page.is(200);
        assert_eq!(link.is_some(), body["next_cursor"].is_string(), "{link:?} {body}");
        seen.extend(ids(&body));
        (next, pages) = (link, pages + 1);
    }
    assert_eq!((seen, pages), (call_ids, 3));
}
