//! Calls that a tool service executes, from the invoke to the result.

use async_nats::jetstream::consumer::pull;
use serde_json::{Value, json};
use toolcrib_sources::utp::host::ToolHost;

use crate::support::nats::{Nats, report, result_card, tool};
use crate::support::{Server, until};

#[tokio::test]
async fn a_tool_service_executes_a_call_and_returns_its_result() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let schema = json!({ "type": "object", "properties": { "text": { "type": "string" } } });
    api.post(
        "/projects/default/tools",
        tool("text.count", "count", json!({ "parameters": schema })),
    )
    .await
    .is(201);
    let _host = nats
        .host("count", |host| {
            host.with_tool("text.count", |job| async move {
                let words = job.args["text"].as_str().unwrap().split_whitespace().count();
                Ok(json!({ "words": words }))
            })
        })
        .await;
    let body = json!({ "run_id": "run_1", "args": { "text": "four words in here" } });
    let call = api.post("/v1/tools/text.count/invoke?wait_ms=30000", body).await.is(202);
    assert_eq!(
        (&call["status"], &call["executor"]),
        (&json!("SUCCEEDED"), &json!("utp")),
        "{call}"
    );
    assert_eq!(call["result"], json!({ "words": 4 }));
    let id = call["tool_call_id"].as_str().unwrap();
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200)["cards"].clone();
    let (call_card, result) = (&cards[0], &cards[1]);
    assert_eq!((&call_card["type"], &result["type"]), (&json!("tool.call"), &json!("tool.result")));
    assert_eq!(call_card["content"]["__type__"], "ToolCallContent");
    assert_eq!(call_card["content"]["arguments"], json!({ "text": "four words in here" }));
    assert_eq!(call_card["content"]["tool_name"], "text.count");
    assert_eq!(result["content"]["__type__"], "ToolResultContent");
    assert_eq!(result["content"]["result"], json!({ "words": 4 }));
    assert_eq!(result["content"]["status"], "success");
    assert_eq!(result["author_id"], "tool.rust");
    for name in ["agent_turn_id", "step_id", "tool_call_id", "trace_id"] {
        assert!(call_card["metadata"][name].is_string(), "{name}: {call_card}");
        assert_eq!(call_card["metadata"][name], result["metadata"][name], "{name}");
    }
    for card in [call_card, result] {
        let id = card["card_id"].as_str().unwrap();
        assert_eq!(&api.get(&format!("/v1/cards/{id}")).await.is(200), card);
        let over_nats =
            nats.peer().await.request("sys.cards.get", json!({ "card_ids": [id] })).await;
        assert_eq!(over_nats["cards"], json!([card]), "{over_nats}");
        assert_eq!(over_nats["ok"], true);
    }
}

#[tokio::test]
async fn a_command_has_the_fields_and_headers_of_the_protocol() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let id = api.invoke("hand.work", json!({ "a": 1 })).await;
    let peer = nats.peer().await;
    let command = peer.next("hand").await;
    assert_eq!(command.message.subject.as_str(), "cg.v1r3.default.public.cmd.tool.hand.run");
    let payload = &command.payload;
    assert_eq!(payload["tool_call_id"], id.as_str());
    assert_eq!(payload["agent_turn_id"], "run_1");
    assert_eq!(payload["turn_epoch"], 1);
    assert_eq!(payload["agent_id"], "default");
    assert_eq!(payload["tool_name"], "hand.work");
    assert_eq!(payload["after_execution"], "suspend");
    assert_eq!(payload["project_id"], "default");
    for forbidden in ["args", "arguments", "result"] {
        assert!(payload.get(forbidden).is_none(), "{payload}");
    }
    for header in ["traceparent", "CG-Timestamp", "CG-Version", "CG-Msg-Type", "CG-Sender"] {
        assert!(!command.header(header).is_empty(), "{header}");
    }
    assert_eq!(api.call(&id).await["status"], "PENDING", "not acknowledged yet");
    // Reading the card acknowledges the call.
    let card_request = json!({ "card_ids": [payload["tool_call_card_id"]] });
    let card = peer.request("sys.cards.get", card_request).await["cards"][0].clone();
    assert_eq!(card["content"]["arguments"], json!({ "a": 1 }));
    let target = "cg.v1r3.{project_id}.{channel_id}.cmd.tool.hand.run";
    assert_eq!(card["content"]["target_subject"], target);
    let trace_id = &command.header("traceparent")[3..35];
    assert_eq!(card["metadata"]["trace_id"], trace_id, "one trace from the card to the command");
    api.until_status(&id, "RUNNING").await;
    let result = result_card(payload, "mine1", "success", json!({ "ok": 1 }));
    let put = peer.request("sys.cards.put", json!({ "card": result })).await;
    assert_eq!((&put["ok"], &put["card_id"]), (&json!(true), &json!("mine1")), "{put}");
    let answer = peer.request("sys.l0.report", report(payload, "mine1", "success")).await;
    assert_eq!((&answer["ok"], &answer["duplicate"]), (&json!(true), &json!(false)), "{answer}");
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "ok": 1 })));
    let copied = api.get("/v1/cards/mine1").await.is(200);
    assert_eq!(copied["metadata"]["trace_id"], trace_id);
    assert_eq!(copied["metadata"]["step_id"], card["metadata"]["step_id"]);
}

#[tokio::test]
async fn each_report_status_maps_to_a_call_status() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let expected = [
        ("success", "SUCCEEDED", Value::Null),
        ("partial", "SUCCEEDED", Value::Null),
        ("failed", "FAILED", json!("UPSTREAM_UNAVAILABLE")),
        ("timeout", "TIMEOUT", json!("TIMEOUT")),
        ("canceled", "FAILED", json!("CANCELED")),
    ];
    for (status, call_status, code) in expected {
        let id = api.invoke("hand.work", json!({})).await;
        let command = peer.next("hand").await;
        command.ack().await;
        let card_id = format!("r-{status}");
        let card = result_card(&command.payload, &card_id, status, json!({ "n": 1 }));
        let mut report_body = report(&command.payload, &card_id, status);
        report_body["card"] = card;
        let answer = peer.request("sys.l0.report", report_body.clone()).await;
        assert_eq!(answer["ok"], true, "{status}: {answer}");
        let call = api.finished(&id).await;
        assert_eq!(call["status"], call_status, "{status}: {call}");
        assert_eq!(call["error"]["code"], code, "{status}: {call}");
        assert_eq!(call.get("partial"), (status == "partial").then_some(&json!(true)), "{call}");
        let again = peer.request("sys.l0.report", report_body).await;
        assert_eq!((&again["ok"], &again["duplicate"]), (&json!(true), &json!(true)), "{again}");
        let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
        assert_eq!(cards["cards"][1]["card_id"], card_id.as_str(), "the tool's own card: {cards}");
        assert_eq!(cards["cards"][1]["content"]["status"], status, "as the tool reported it");
    }
    assert_eq!(api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

#[tokio::test]
async fn a_call_keeps_the_definition_it_was_made_with() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    let first =
        api.post("/projects/default/tools", tool("hand.work", "old", json!({}))).await.is(201);
    let id = api.invoke("hand.work", json!({})).await;
    let command = peer.next("old").await;
    let ends = json!({ "after_execution": "terminate" });
    let second = api.post("/projects/default/tools", tool("hand.work", "new", ends)).await.is(201);
    assert_ne!(first["version"], second["version"]);
    let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200);
    let subject = cards["cards"][0]["content"]["target_subject"].as_str().unwrap();
    assert!(subject.contains(".old."), "{subject}");
    // The report is validated with the old definition, too.
    let mut report_body = report(&command.payload, "r1", "success");
    report_body["card"] = result_card(&command.payload, "r1", "success", json!(1));
    assert_eq!(peer.request("sys.l0.report", report_body).await["ok"], true);
    assert_eq!(api.finished(&id).await["status"], "SUCCEEDED");
    let other = api.invoke("hand.work", json!({})).await;
    let command = peer.next("new").await;
    assert_eq!(command.payload["tool_call_id"], other.as_str());
    assert_eq!(command.payload["after_execution"], "terminate");
    // Calls of a deleted tool continue unchanged.
    api.delete("/projects/default/tools/hand.work").await.is(204);
    let mut report_body = report(&command.payload, "r2", "success");
    report_body["card"] = result_card(&command.payload, "r2", "success", json!(2));
    assert_eq!(peer.request("sys.l0.report", report_body).await["ok"], true);
    assert_eq!(api.finished(&other).await["result"], 2);
}

#[tokio::test]
async fn calls_of_other_executors_are_readable_as_cards() {
    let server = Server::start().await;
    let api = server.api();
    let good = api.invoke("calculation.eval", json!({ "expression": "6*7" })).await;
    let bad = api.invoke("calculation.eval", json!({ "expression": "1/0" })).await;
    for (id, status) in [(&good, "success"), (&bad, "failed")] {
        api.finished(id).await;
        let cards = api.get(&format!("/v1/tool_calls/{id}/cards")).await.is(200)["cards"].clone();
        assert_eq!(cards[0]["content"]["tool_name"], "calculation.eval");
        assert_eq!(cards[1]["content"]["status"], status, "{cards}");
        let card_id = cards[1]["card_id"].as_str().unwrap();
        assert_eq!(api.get(&format!("/v1/cards/{card_id}")).await.is(200), cards[1]);
    }
    let path = format!("/v1/tool_calls/{bad}/cards");
    let cards = api.get(&path).await.is(200);
    let content = &cards["cards"][1]["content"];
    assert_eq!(content["error"]["code"], "bad_request");
    assert_eq!(content["result"]["error_code"], "bad_request");
    assert!(content["error"]["message"].is_string());
    api.clone().project("other").get(&path).await.refused(404, "NOT_FOUND");
    api.get("/v1/cards/nothing").await.refused(404, "NOT_FOUND");
}

#[tokio::test]
async fn a_running_command_is_not_redelivered_and_a_dead_host_is_replaced() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let idempotent = json!({ "effect": "idempotent" });
    api.post("/projects/default/tools", tool("slow.work", "slow", idempotent)).await.is(201);
    api.post("/projects/default/tools", tool("once.work", "slow", json!({}))).await.is(201);
    let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (runs, duration) = (count.clone(), std::time::Duration::from_millis(2_500));
    let make = move |host: toolcrib_sources::utp::host::ToolHost| {
        let runs = runs.clone();
        host.with_ack_wait(std::time::Duration::from_secs(1)).with_fallback(move |job| {
            let n = runs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async move {
                // The first execution takes longer than the ack wait of the broker.
                tokio::time::sleep(if n == 0 { duration } else { duration / 100 }).await;
                toolcrib_sources::utp::host::ToolJobResult::success(
                    json!({ "tool": job.tool_name, "n": n }),
                )
            }
        })
    };
    let host = nats.host("slow", make.clone()).await;
    let id = api.invoke("slow.work", json!({})).await;
    assert_eq!(api.finished(&id).await["result"]["n"], 0);
    assert_eq!(count.load(std::sync::atomic::Ordering::SeqCst), 1, "it ran once");
    // After the death of a host in mid-call, another host repeats an idempotent call, but not an
    // irreversible one.
    count.store(0, std::sync::atomic::Ordering::SeqCst);
    let again = api.invoke("slow.work", json!({})).await;
    api.until_status(&again, "RUNNING").await;
    drop(host);
    let host = nats.host("slow", make.clone()).await;
    assert_eq!(api.finished(&again).await["status"], "SUCCEEDED");
    count.store(0, std::sync::atomic::Ordering::SeqCst);
    let once = api.invoke("once.work", json!({})).await;
    api.until_status(&once, "RUNNING").await;
    until("the execution to start", || async {
        (count.load(std::sync::atomic::Ordering::SeqCst) == 1).then_some(())
    })
    .await;
    drop(host);
    let _host = nats.host("slow", make).await;
    let call = api.finished(&once).await;
    assert_eq!(call["status"], "FAILED", "{call}");
    assert!(call["error"]["message"].as_str().unwrap().contains("may have taken effect"), "{call}");
    assert_eq!(call["error"]["code"], "OUTCOME_UNKNOWN", "{call}");
    assert_eq!(call["error"]["retryable"], false, "{call}");
    assert_eq!(count.load(std::sync::atomic::Ordering::SeqCst), 1, "it was executed once");
}

#[tokio::test]
async fn commands_of_ended_calls_are_not_executed() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("late.work", "late", json!({}))).await.is(201);
    let peer = nats.peer().await;
    let canceled = api.invoke("late.work", json!({ "n": 1 })).await;
    // The command of an ended call is never published, so wait for its publication first.
    peer.next("late").await;
    api.post(&format!("/v1/tool_calls/{canceled}/cancel"), json!({})).await.is(200);
    let body = json!({ "run_id": "r", "args": { "n": 2 }, "timeout_ms": 2_000 });
    let timed_out = api.invoke_with("late.work", body).await;
    peer.next("late").await;
    assert_eq!(api.finished(&timed_out).await["status"], "TIMEOUT");
    let open = api.invoke("late.work", json!({ "n": 3 })).await;
    // The tool service starts after two of the three calls ended; their commands still exist.
    let executed = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
    let recorder = executed.clone();
    let _host = nats
        .host("late", move |host| {
            host.with_tool("late.work", move |job| {
                recorder.lock().push(job.args["n"].clone());
                async move { Ok(job.args) }
            })
        })
        .await;
    assert_eq!(api.finished(&open).await["status"], "SUCCEEDED");
    for id in [&canceled, &timed_out] {
        until("the late report of the tool service", || async {
            api.history(id).await.contains(&"tool.call.late".to_owned()).then_some(())
        })
        .await;
    }
    assert_eq!(*executed.lock(), [json!(3)]);
    assert_eq!(api.call(&canceled).await["status"], "CANCELED");
    assert_eq!(api.get("/v1/dead_letters").await.is(200)["dead_letters"], json!([]));
}

#[tokio::test]
async fn a_stopping_tool_service_finishes_its_commands() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let (api, peer) = (server.api(), nats.peer().await);
    api.post("/projects/default/tools", tool("once.work", "once", json!({}))).await.is(201);
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(0));
    let opened = gate.clone();
    let host = ToolHost::with_connection(nats.connect("v1r3").await)
        .with_max_concurrency(3)
        .with_tool("once.work", move |job| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                Ok(job.args)
            }
        });
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(async move {
        let stopped = async { stopped.await.unwrap_or_default() };
        host.serve("once", stopped).await
    });
    let mut ids = Vec::new();
    for n in 0..5 {
        ids.push(api.invoke("once.work", json!({ "n": n })).await);
    }
    // The host has three commands; the others are not delivered yet.
    let jetstream = async_nats::jetstream::new(peer.client.clone());
    until("three deliveries", || async {
        let stream = jetstream.get_stream("cg_cmd_v1r3").await.ok()?;
        let found = stream.get_consumer::<pull::Config>("tool_once_cmd_v1r3").await;
        (found.ok()?.cached_info().num_ack_pending == 3).then_some(())
    })
    .await;
    stop.send(()).unwrap();
    opened.add_permits(3);
    crate::support::soon("it to stop", serving).await.unwrap().unwrap();
    for (n, id) in ids[..3].iter().enumerate() {
        let call = api.finished(id).await;
        assert_eq!(call["result"], json!({ "n": n }), "{call}");
    }
    let _next =
        nats.host("once", |host| host.with_tool("once.work", |job| async { Ok(job.args) })).await;
    for (n, id) in ids.iter().enumerate() {
        let call = api.finished(id).await;
        assert_eq!(call["result"], json!({ "n": n }), "{call}");
    }
}

#[tokio::test]
async fn a_retry_of_a_tool_service_is_refused() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    api.post("/projects/default/tools", tool("echo.work", "echo", json!({}))).await.is(201);
    let body = |retry: u32| json!({ "run_id": "run_1", "args": {}, "retry": retry });
    let error = api.post("/v1/tools/echo.work/invoke", body(1)).await;
    let error = error.refused(422, "VALIDATION_ERROR");
    assert_eq!(error["detail"]["pointer"], "/retry", "{error}");
    assert!(error["message"].as_str().unwrap().contains("retry must be 0 for echo.work"));
    api.post("/v1/tools/echo.work/invoke", body(0)).await.is(202);
    let entry = json!({ "call_id": "a", "name": "echo.work", "args": {}, "retry": 1 });
    let batch = json!({ "run_id": "run_1", "tool_calls": [entry] });
    let answer = api.post("/v1/tool_calls", batch).await.is(200);
    let error = &answer["results"][0]["error"];
    assert_eq!(error["code"], "VALIDATION_ERROR", "{answer}");
}

#[tokio::test]
async fn max_parallel_of_the_server_counts_the_work_of_tool_services() {
    let Some(nats) = Nats::start().await else { return };
    let url = nats.url();
    let server = Server::with(|config| {
        config.nats.url = Some(url);
        config.policy.max_parallel = 1;
    })
    .await;
    let api = server.api();
    api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
    let first = api.invoke("hand.work", json!({ "n": 1 })).await;
    let second = api.invoke("hand.work", json!({ "n": 2 })).await;
    let peer = nats.peer().await;
    let command = peer.next("hand").await;
    command.ack().await;
    let waiting = api.call(&second).await;
    assert_eq!((&waiting["hold"], &waiting["attempt"]), (&json!("queue"), &json!(0)));
    assert_eq!(command.payload["tool_call_id"], json!(first));
    let mut done = report(&command.payload, "r-first", "success");
    done["card"] = result_card(&command.payload, "r-first", "success", json!(1));
    assert_eq!(peer.request("sys.l0.report", done).await["ok"], true);
    let command = peer.next("hand").await;
    assert_eq!(command.payload["tool_call_id"], json!(second), "the slot is free again");
}

#[tokio::test]
async fn a_definition_sets_the_time_of_an_attempt() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let limits = json!({ "effect": "read", "attempt_timeout_ms": 300, "input_timeout_ms": 5_000 });
    api.post("/projects/default/tools", tool("echo.work", "echo", limits)).await.is(201);
    let wrong = tool("bad.work", "echo", json!({ "attempt_timeout_ms": "soon" }));
    let error = api.post("/projects/default/tools", wrong).await.refused(400, "BAD_REQUEST");
    assert!(error["message"].as_str().unwrap().contains("attempt_timeout_ms"), "{error}");
    let id = api.invoke("echo.work", json!({})).await;
    let call = api.finished(&id).await;
    assert_eq!((&call["status"], &call["error"]["code"]), (&json!("TIMEOUT"), &json!("TIMEOUT")));
    assert_eq!(
        (&call["attempt_timeout_ms"], &call["input_timeout_ms"]),
        (&json!(300), &json!(5_000))
    );
}

#[tokio::test]
async fn a_command_subject_may_have_several_parts_after_its_target() {
    let Some(nats) = Nats::start().await else { return };
    let server = nats.server().await;
    let api = server.api();
    let target = json!({ "target_subject": "cmd.tool.echo.run.fast.today" });
    let defined = api.post("/projects/default/tools", tool("echo.work", "echo", target)).await;
    let full = "cg.v1r3.{project_id}.{channel_id}.cmd.tool.echo.run.fast.today";
    assert_eq!(defined.is(201)["target_subject"], full);
    let _host = nats
        .host("echo", |host| host.with_tool("echo.work", |job| async move { Ok(job.args) }))
        .await;
    let id = api.invoke("echo.work", json!({ "n": 1 })).await;
    assert_eq!(api.finished(&id).await["result"], json!({ "n": 1 }));
    let subject = "cg.v1r3.default.public.cmd.tool.echo.run.fast.today";
    let command = nats.peer().await.next_on(subject, "reader").await;
    assert_eq!(command.payload["tool_call_id"], id.as_str());
}
