//! Slices of results, over HTTP and with the tool `result.read`; and raw results that failed the
//! output schema, for operators only.

use serde_json::{Value, json};

use crate::support::api::{message, offer, offer_with};
use crate::support::{Api, Server};

/// Makes a call with this result.
async fn make_call_with_result(api: &Api, result: Value) -> String {
    api.register("c1", json!([offer("a.tool")])).await;
    let id = api.invoke("a.tool", json!({})).await;
    api.succeed(&id, result).await;
    id
}

fn sample_result() -> Value {
    let rows: Vec<Value> = (0..500).map(|n| json!({ "id": n, "name": format!("n{n}") })).collect();
    let log: String = (0..400).map(|n| format!("{n}: all is well\n")).collect();
    json!({ "rows": rows, "log": log, "count": 500 })
}

async fn read(api: &Api, id: &str, query: &str) -> Value {
    api.get(&format!("/v1/tool_calls/{id}/result?{query}")).await.is(200)
}

#[tokio::test]
async fn slices_of_a_result_can_be_read() {
    let server = Server::start().await;
    let api = server.api();
    let id = make_call_with_result(&api, sample_result()).await;
    let row = read(&api, &id, "pointer=/rows/10&offset=&limit=&grep=").await;
    assert_eq!(row["value"], json!({ "id": 10, "name": "n10" }));
    assert_eq!((&row["tool_call_id"], &row["type"]), (&json!(id), &json!("object")));

    let page = read(&api, &id, "pointer=/rows&offset=490&limit=4").await;
    assert_eq!(page["value"][0]["id"], 490);
    let figures = ["total", "offset", "shown", "next_offset"].map(|name| page[name].clone());
    assert_eq!(json!(figures), json!([500, 490, 4, 494]));

    let lines = read(&api, &id, "pointer=/log&offset=398").await;
    assert_eq!(lines["value"], "398: all is well\n399: all is well\n");
    assert_eq!((&lines["type"], &lines["next_offset"]), (&json!("text"), &Value::Null));

    let found = read(&api, &id, "grep=n49[89]").await;
    let pointers: Vec<&Value> =
        found["matches"].as_array().unwrap().iter().map(|found| &found["pointer"]).collect();
    assert_eq!(json!(pointers), json!(["/rows/498", "/rows/499"]));
    assert_eq!(found["matched"], 2);
    let found = read(&api, &id, "pointer=/log&grep=%5E7:&limit=1").await;
    assert_eq!(found["matches"][0]["line"], 7, "{found}");
}

#[tokio::test]
async fn rows_are_filtered_and_aggregated_over_http_and_by_the_tool() {
    let server = Server::start().await;
    let api = server.api();
    let row = |n: usize| {
        let status = if n % 10 == 3 { "past_due" } else { "paid" };
        json!({ "id": n, "status": status, "amount": format!("{n}.10") })
    };
    let rows: Vec<Value> = (0..300).map(row).collect();
    let id = make_call_with_result(&api, json!({ "page": 1, "invoices": rows })).await;
    let found = read(
        &api,
        &id,
        "where=%7B%22status%22:%22past_due%22,%22id%22:%7B%22gt%22:280%7D%7D&select=id,amount",
    )
    .await;
    assert_eq!(
        found["value"],
        json!([{ "id": 283, "amount": "283.10" }, { "id": 293, "amount": "293.10" }])
    );
    assert_eq!((&found["matched"], &found["pointer"]), (&json!(2), &json!("/invoices")), "{found}");
    assert_eq!(found["row_numbers"], json!([283, 293]));
    let sums =
        read(&api, &id, "pointer=/invoices&aggregate=sum:amount,count&group_by=status").await;
    assert_eq!(
        sums["value"][0],
        json!({ "status": "paid", "sum(amount)": 40_437.0, "count": 270 })
    );
    assert_eq!(sums["total"], 300);

    let args = json!({ "tool_call_id": id, "where": { "status": { "contains": "due" } },
        "aggregate": [{ "op": "max", "column": "id" }, { "op": "count" }] });
    let call = api.invoke("result.read", args).await;
    let call = api.finished(&call).await;
    assert_eq!(call["result"]["value"], json!({ "max(id)": 293, "count": 30 }), "{call}");

    for (query, field) in [
        ("where=status", "where"),
        ("where=%7B%22state%22:1%7D", "where"),
        ("where=%7B%22id%22:%7B%22like%22:1%7D%7D", "where"),
        ("aggregate=median:id", "aggregate"),
        ("aggregate=sum", "aggregate"),
        ("select=id&aggregate=count", "select"),
        ("pointer=/page&aggregate=count", "pointer"),
        ("budget_tokens=100&group_by=status", "group_by"),
    ] {
        let answer = api.get(&format!("/v1/tool_calls/{id}/result?{query}")).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert_eq!(error["detail"]["field"], field, "{query}: {error}");
    }
    let answer = api.get(&format!("/v1/tool_calls/{id}/result?where=%7B%22state%22:1%7D")).await;
    let error = answer.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["columns"], json!(["amount", "id", "status"]), "{error}");
}

#[tokio::test]
async fn the_query_steers_the_digest_of_a_table() {
    let server = Server::start().await;
    let api = server.api();
    let row = |n: usize| json!({ "id": n, "owner": format!("owner {n}"), "price": 2_122.25 });
    let rows: Vec<Value> = (0..2_000).map(row).collect();
    let id = make_call_with_result(&api, json!(rows)).await;
    let answer = read(&api, &id, "budget_tokens=250&query=price%20of%20owner%201377").await;
    let text = answer["text"].as_str().unwrap();
    assert!(text.contains("[1377,\"owner 1377\",2122.25]"), "{text}");
    assert!(text.contains("sum 4244500.00"), "{text}");
}

#[tokio::test]
async fn pages_of_a_large_result_add_up_to_the_whole() {
    let server = Server::start().await;
    let api = server.api();
    let items: Vec<String> = (0..700).map(|n| format!("{n} {}", "x".repeat(1_000))).collect();
    let id = make_call_with_result(&api, json!(items)).await;
    let (mut all, mut offset, mut pages) = (Vec::new(), 0, 0);
    loop {
        let page = read(&api, &id, &format!("offset={offset}&limit=1000")).await;
        all.extend(page["value"].as_array().unwrap().iter().cloned());
        pages += 1;
        match page["next_offset"].as_u64() {
            Some(next) => {
                assert_eq!(page["truncated"], true, "the limit was not reached");
                offset = next;
            }
            None => break,
        }
    }
    assert_eq!(json!(all), json!(items));
    assert!(pages > 1);
}

#[tokio::test]
async fn an_invalid_slice_parameter_is_rejected_by_name() {
    let server = Server::start().await;
    let api = server.api();
    let id = make_call_with_result(&api, sample_result()).await;
    for (query, field) in [
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=1001", "limit"),
        ("limit=99999999999999999999999", "limit"),
        ("limit=ten", "limit"),
        ("offset=-1", "offset"),
        ("offset=1.5", "offset"),
        ("offset=99999999999999999999999", "offset"),
        ("pointer=rows", "pointer"),
        ("pointer=/~7", "pointer"),
        ("grep=(", "grep"),
        ("grep=(a%7B1000%7D)%7B1000%7D", "grep"),
        ("raw=perhaps", "raw"),
        ("budget_tokens=0", "budget_tokens"),
        ("budget_tokens=-5", "budget_tokens"),
        ("budget_tokens=1000001", "budget_tokens"),
        ("budget_tokens=500&pointer=/rows", "pointer"),
        ("budget_tokens=500&grep=x", "grep"),
        ("query=acme", "query"),
        ("limit=0&offset=-1&grep=(", "offset"),
    ] {
        let answer = api.get(&format!("/v1/tool_calls/{id}/result?{query}")).await;
        let error = answer.refused(422, "VALIDATION_ERROR");
        assert!(message(&error).contains(field), "{query}: {error}");
        assert_eq!(error["detail"]["field"], field, "{query}");
    }
}

#[tokio::test]
async fn a_digest_stays_within_its_token_budget() {
    let server = Server::start().await;
    let api = server.api();
    let id = make_call_with_result(&api, sample_result()).await;
    for budget in [1, 10, 64, 300, 2_000] {
        let answer = read(&api, &id, &format!("budget_tokens={budget}")).await;
        let text = answer["text"].as_str().unwrap();
        assert_eq!(answer["digest"], true);
        assert_eq!(answer["tokens"], toolcrib::results::tokens::count(text));
        assert!(answer["tokens"].as_u64().unwrap() <= budget, "{answer}");
        if budget >= 64 {
            assert!(text.contains(&id) && text.contains("result__read"), "{text}");
        }
    }
    let whole = read(&api, &id, "budget_tokens=100000").await;
    assert_eq!(whole["digest"], false);
    let text: Value = serde_json::from_str(whole["text"].as_str().unwrap()).unwrap();
    assert_eq!(text, sample_result(), "a result within the budget is unchanged");
    // The stored result is complete.
    assert_eq!(api.call(&id).await["result"], sample_result());
}

#[tokio::test]
async fn an_unknown_pointer_is_rejected_with_the_nearest_one() {
    let server = Server::start().await;
    let api = server.api();
    let id = make_call_with_result(&api, sample_result()).await;
    let answer = api.get(&format!("/v1/tool_calls/{id}/result?pointer=/rows/500/id")).await;
    let error = answer.refused(404, "NOT_FOUND");
    assert!(message(&error).contains("500 items"), "{error}");
    assert_eq!(
        (&error["detail"]["nearest"], &error["detail"]["items"]),
        (&json!("/rows"), &json!(500))
    );
    let answer = api.get(&format!("/v1/tool_calls/{id}/result?pointer=/row")).await;
    let error = answer.refused(404, "NOT_FOUND");
    assert_eq!(error["detail"]["keys"], json!(["count", "log", "rows"]));
}

#[tokio::test]
async fn a_call_without_a_result_is_a_conflict() {
    let server = Server::start().await;
    let api = server.api();
    api.register("c1", json!([offer("a.tool")])).await;
    let open = api.invoke("a.tool", json!({})).await;
    let answer = api.get(&format!("/v1/tool_calls/{open}/result")).await;
    let error = answer.refused(409, "CONFLICT");
    assert_eq!(error["detail"]["status"], "PENDING");
    api.fail(&open, json!({ "message": "the tap is dry", "retryable": false })).await;
    let answer = api.get(&format!("/v1/tool_calls/{open}/result")).await;
    let error = answer.refused(409, "CONFLICT");
    assert!(message(&error).contains("the tap is dry"), "{error}");
    assert_eq!(error["detail"]["error"]["code"], "RUNTIME_ERROR");
    let unknown = "/v1/tool_calls/tc_00000000000000000000000000/result";
    api.get(unknown).await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn the_tool_result_read_returns_slices() {
    let server = Server::start().await;
    let api = server.api();
    let id = make_call_with_result(&api, sample_result()).await;
    let tool = api.get("/v1/tools/result.read").await.is(200);
    assert_eq!((&tool["effect"], &tool["risk"]), (&json!("read"), &json!("low")));
    let read = async |args: Value| {
        let call = api.invoke("result.read", args).await;
        api.finished(&call).await
    };
    let call = read(json!({ "tool_call_id": id, "pointer": "/rows", "offset": 499 })).await;
    assert_eq!(call["result"]["value"], json!([{ "id": 499, "name": "n499" }]), "{call}");
    let call = read(json!({ "tool_call_id": id, "grep": "n77\"" })).await;
    assert_eq!(call["result"]["matches"][0]["pointer"], "/rows/77", "{call}");
    // The result is limited to the size of a context, for any parameters.
    let call = read(json!({ "tool_call_id": id, "pointer": "/rows", "limit": 1_000 })).await;
    assert_eq!(call["result"]["truncated"], true);
    let tokens = toolcrib::results::tokens::count(&call["result"].to_string());
    assert!((1_000..=4_000).contains(&tokens), "{tokens}");
    let call = read(json!({ "tool_call_id": id, "pointer": "/none" })).await;
    assert_eq!((&call["status"], &call["error"]["code"]), (&json!("FAILED"), &json!("NOT_FOUND")));
    let body = json!({ "run_id": "run_1", "args": { "tool_call_id": id, "limit": 0 } });
    let answer = api.post("/v1/tools/result.read/invoke", body).await;
    assert!(message(&answer.refused(422, "VALIDATION_ERROR")).contains("limit"));
}

#[tokio::test]
async fn result_read_is_limited_to_the_project_and_needs_some_allow_rule() {
    let server = Server::start().await;
    let owner = server.keyed("mine", "boss", "admin", &[]).await;
    let ada = server.keyed("mine", "ada", "agent", &["weather.*"]).await;
    let without_rules = server.keyed("mine", "new", "agent", &[]).await;
    let theirs = server.keyed("theirs", "boss", "admin", &[]).await;
    let id = make_call_with_result(&owner, json!("of mine")).await;
    let args = json!({ "tool_call_id": id });
    let call = ada.invoke("result.read", args.clone()).await;
    assert_eq!(ada.finished(&call).await["error"]["code"], "NOT_FOUND", "the call is not ada's");
    let rule = json!({ "verdict": "allow", "agents": ["ada"], "actions": ["read"] });
    owner.put("/v1/rules/read-all", rule).await.is(200);
    let call = ada.invoke("result.read", args.clone()).await;
    assert_eq!(ada.finished(&call).await["result"]["value"], "of mine");
    let call = theirs.invoke("result.read", args.clone()).await;
    assert_eq!(theirs.finished(&call).await["error"]["code"], "NOT_FOUND");
    let body = json!({ "run_id": "run_1", "args": args });
    let path = "/v1/tools/result.read/invoke";
    without_rules.post(path, body.clone()).await.refused(403, "PERMISSION_DENIED");
    let rule = json!({ "agent": "ada", "pattern": "result.*", "verdict": "deny" });
    owner.put("/v1/rules", rule).await.is(200);
    ada.post(path, body).await.refused(403, "PERMISSION_DENIED");
}

#[tokio::test]
async fn a_raw_result_is_visible_to_operators_only() {
    let server = Server::start().await;
    let boss = server.keyed("p", "boss", "admin", &[]).await;
    let ada = server.keyed("p", "ada", "agent", &["*"]).await;
    let schema = json!({ "type": "object", "required": ["sum"] });
    let tool = offer_with("sum.tool", json!({ "output_schema": schema }));
    boss.register("c1", json!([tool])).await;
    let id = ada.invoke("sum.tool", json!({})).await;
    boss.succeed(&id, json!({ "oddity-417": [1, 2, 3] })).await;
    let call = ada.finished(&id).await;
    let failed = (&call["status"], &call["error"]["code"]);
    assert_eq!(failed, (&json!("FAILED"), &json!("VALIDATION_ERROR")), "{call}");
    // No response to the agent contains the raw result.
    let list = ada.get("/v1/tool_calls").await.is(200);
    let mut events = ada.follow(&format!("/v1/tool_calls/{id}/events"), None).await;
    let events: Vec<String> =
        events.rest().await.into_iter().map(|event| event.data.to_string()).collect();
    let path = format!("/v1/tool_calls/{id}/result");
    let plain = ada.get(&path).await.refused(409, "CONFLICT");
    for text in [call.to_string(), list.to_string(), events.concat(), plain.to_string()] {
        assert!(!text.contains("oddity-417"), "{text}");
    }
    ada.get(&format!("{path}?raw=true")).await.refused(403, "PERMISSION_DENIED");
    let raw = boss.get(&format!("{path}?raw=true")).await.is(200);
    assert_eq!(raw["value"], json!({ "oddity-417": [1, 2, 3] }));
    let slice = boss.get(&format!("{path}?raw=true&pointer=/oddity-417/1")).await.is(200);
    assert_eq!(slice["value"], 2);
    boss.get(&path).await.refused(409, "CONFLICT");
}

#[tokio::test]
async fn without_keys_the_local_caller_is_an_operator() {
    let server = Server::start().await;
    let api = server.api();
    let tool = offer_with("sum.tool", json!({ "output_schema": { "type": "number" } }));
    api.register("c1", json!([tool])).await;
    let id = api.invoke("sum.tool", json!({})).await;
    api.succeed(&id, json!("seven")).await;
    let raw = read(&api, &id, "raw=true").await;
    assert_eq!(raw["value"], "seven");
    let failed = api.invoke("sum.tool", json!({})).await;
    api.fail(&failed, json!({ "message": "no", "retryable": false })).await;
    let answer = api.get(&format!("/v1/tool_calls/{failed}/result?raw=true")).await;
    answer.refused(404, "NOT_FOUND");
}
