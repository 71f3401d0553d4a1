//! A tool service that receives commands over NATS and uses plain SQL for everything else, like
//! services written for the database of UTP.

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::database::Database;
use crate::support::nats::{Nats, NatsPeer, report, tool};
use crate::support::{Api, Server, process, until};

/// The documented privileges of a tool service.
pub(super) const GRANTS: &str = "
    GRANT USAGE ON SCHEMA resource, state TO tool_service;
    GRANT SELECT, INSERT, UPDATE ON public.cards TO tool_service;
    GRANT SELECT ON resource.tools, resource.project_agents TO tool_service;
    GRANT SELECT, INSERT ON state.agent_inbox, state.execution_edges TO tool_service;";

struct Fixture {
    database: Database,
    _nats: Nats,
    server: Server,
    api: Api,
    peer: NatsPeer,
    sql: Client,
}

/// A row of `state.agent_inbox`, as the server left it.
#[derive(Debug, PartialEq)]
struct InboxRow {
    status: String,
    agent: String,
    depth: i32,
}

impl Fixture {
    async fn new() -> Option<Self> {
        let database = Database::new().await?;
        let nats = Nats::start().await?;
        let (nats_url, url) = (nats.url(), database.url.clone());
        let server = Server::with(|config| {
            config.nats.url = Some(nats_url);
            config.store.url = Some(url);
        })
        .await;
        let (api, peer) = (server.api(), nats.peer().await);
        let sql = database.client_with_grants(GRANTS).await;
        api.post("/projects/default/tools", tool("hand.work", "hand", json!({}))).await.is(201);
        api.put("/v1/agents/default", json!({ "worker_target": "w1" })).await.is(200);
        Some(Self { database, _nats: nats, server, api, peer, sql })
    }

    async fn command(&self) -> (String, Value) {
        let id = self.api.invoke("hand.work", json!({ "x": 1.5 })).await;
        let command = self.peer.next("hand").await;
        command.ack().await;
        (id, command.payload)
    }

    async fn put_card(&self, command: &Value, card_id: &str, result: &Value) {
        put_card(&self.sql, command, card_id, result).await;
    }

    async fn report(&self, inbox_id: &str, payload: &Value) -> u64 {
        write_report(&self.sql, inbox_id, payload).await
    }

    /// Returns the status of a row once the server has processed it.
    async fn wait_for_status(&self, inbox_id: &str) -> String {
        until("the row is processed", || async {
            let sql = "SELECT status FROM state.agent_inbox WHERE inbox_id = $1";
            let row = self.sql.query_opt(sql, &[&inbox_id]).await.unwrap()?;
            Some(row.get::<_, String>(0)).filter(|status| status != "pending")
        })
        .await
    }
}

/// Writes the result card, as a service does before its report.
async fn put_card(client: &Client, command: &Value, card_id: &str, result: &Value) {
    let sql = "INSERT INTO public.cards (card_id, tenant_id, content, tool_call_id, metadata) \
               VALUES ($1, 'default', $2, $3, $4) \
               ON CONFLICT (card_id) DO UPDATE SET content = excluded.content";
    let content = json!({
        "__type__": "ToolResultContent", "status": "success",
        "after_execution": command["after_execution"], "result": result, "error": null,
    });
    let metadata = json!({
        "project_id": "default", "type": "tool.result", "author_id": "tool.sql",
        "created_at": "2026-01-01T00:00:00+00:00", "role": "tool",
        "agent_turn_id": command["agent_turn_id"], "step_id": command["step_id"],
        "tool_call_id": command["tool_call_id"], "function_name": command["tool_name"],
    });
    let call = command["tool_call_id"].as_str().unwrap();
    client.execute(sql, &[&card_id, &content, &call, &metadata]).await.unwrap();
}

/// Writes the report: an inbox row and the response edge, in one transaction.
async fn write_report(client: &Client, inbox_id: &str, payload: &Value) -> u64 {
    let call = payload["tool_call_id"].as_str().unwrap_or("call_x");
    let agent = payload["agent_id"].as_str().unwrap_or("default");
    let edge = "SELECT recursion_depth FROM state.execution_edges WHERE project_id = 'default' \
                AND correlation_id = $1 AND primitive = 'tool_call' AND edge_phase = 'request'";
    let found = client.query_opt(edge, &[&call]).await.unwrap();
    let depth: i32 = found.map_or(0, |row| row.get(0));
    client.batch_execute("BEGIN").await.unwrap();
    let sql = "INSERT INTO state.agent_inbox (inbox_id, project_id, agent_id, message_type, \
               correlation_id, recursion_depth, traceparent, source_agent_id, payload) \
               VALUES ($1, 'default', $2, 'tool_result', $3, $4, $5, 'tool.sql', $6) \
               ON CONFLICT (project_id, message_type, md5(correlation_id)) DO NOTHING";
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let bound: &[&(dyn tokio_postgres::types::ToSql + Sync)] =
        &[&inbox_id, &agent, &call, &depth, &trace, payload];
    let written = client.execute(sql, bound).await.unwrap();
    let sql = "INSERT INTO state.execution_edges (edge_id, project_id, channel_id, primitive, \
               edge_phase, correlation_id, recursion_depth) \
               VALUES ('edge_' || $1, 'default', 'public', 'report', 'response', $2, $3) \
               ON CONFLICT DO NOTHING";
    client.execute(sql, &[&inbox_id, &call, &depth]).await.unwrap();
    client.batch_execute("COMMIT").await.unwrap();
    written
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_service_executes_a_call_with_sql_alone() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.command().await;
    // The card and the tool definition are in the shared tables.
    let sql = "SELECT content, metadata, tenant_id FROM public.cards WHERE card_id = $1";
    let card = command["tool_call_card_id"].as_str().unwrap();
    let row = fixture.sql.query_one(sql, &[&card]).await.unwrap();
    let (content, metadata): (Value, Value) = (row.get(0), row.get(1));
    assert_eq!(content["arguments"], json!({ "x": 1.5 }));
    assert_eq!(
        (&content["__type__"], &metadata["type"]),
        (&json!("ToolCallContent"), &json!("tool.call"))
    );
    assert_eq!(metadata["agent_turn_id"], command["agent_turn_id"]);
    let sql = "SELECT target_subject, after_execution FROM resource.tools \
               WHERE project_id = 'default' AND tool_name = 'hand.work'";
    let row = fixture.sql.query_one(sql, &[]).await.unwrap();
    assert!(row.get::<_, String>(0).contains(".cmd.tool.hand."));
    assert_eq!(row.get::<_, String>(1), "suspend");
    let sql = "SELECT worker_target FROM resource.project_agents WHERE agent_id = 'default'";
    assert_eq!(fixture.sql.query_one(sql, &[]).await.unwrap().get::<_, String>(0), "w1");

    fixture.put_card(&command, "r1", &json!({ "answer": 42 })).await;
    assert_eq!(fixture.report("inbox_a", &report(&command, "r1", "success")).await, 1);
    let call = fixture.api.finished(&id).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "answer": 42 })));
    assert_eq!(call["taken_by"], "tool.sql");
    // The inbox has the item once, and the agent receives a wakeup.
    let found = fixture.api.get("/v1/agents/default/inbox?wait_ms=30000").await.is(200);
    let items = found["items"].as_array().unwrap();
    assert_eq!((items.len(), &items[0]["payload"]["tool_result_card_id"]), (1, &json!("r1")));
    let subject = "cg.v1r3.default.public.cmd.agent.w1.wakeup";
    let woken = fixture.peer.next_on(subject, "worker").await;
    assert_eq!(woken.payload["inbox_id"], items[0]["inbox_id"]);
    let sql = "SELECT status, agent_id, recursion_depth FROM state.agent_inbox \
               WHERE correlation_id = $1";
    let rows = fixture.sql.query(sql, &[&id]).await.unwrap();
    let row = |n: usize| InboxRow {
        status: rows[n].get(0),
        agent: rows[n].get(1),
        depth: rows[n].get(2),
    };
    let waiting = InboxRow { status: "pending".into(), agent: "default".into(), depth: 0 };
    assert_eq!((rows.len(), row(0)), (1, waiting), "one row, pending for the agent");
    // A repeated report changes nothing.
    assert_eq!(fixture.report("inbox_b", &report(&command, "r1", "success")).await, 0);
    fixture.database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_report_row_becomes_an_error_and_a_dead_letter() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.command().await;
    fixture.put_card(&command, "r1", &json!({ "n": 1 })).await;
    let good = report(&command, "r1", "success");
    let with = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    let rejected = [
        (with("turn_epoch", json!(9)), "wrong_epoch"),
        (with("agent_turn_id", json!("other")), "wrong_turn"),
        (with("tool_call_id", json!("call_7")), "orphan"),
        (with("tool_result_card_id", json!("nowhere")), "no_card"),
        (with("tool_result_card_id", command["tool_call_card_id"].clone()), "wrong_card"),
        (with("status", json!("great")), "malformed"),
        (with("after_execution", json!("terminate")), "after_execution_mismatch"),
        (with("agent_turn_id", json!(null)), "malformed"),
        (json!("not an object"), "malformed"),
    ];
    for (n, (payload, reason)) in rejected.into_iter().enumerate() {
        let inbox_id = format!("inbox_{n}");
        assert_eq!(
            fixture.report(&inbox_id, &payload).await,
            1,
            "{reason}: no row with this correlation id"
        );
        assert_eq!(fixture.wait_for_status(&inbox_id).await, "error", "{reason}");
        let dead = fixture.api.get("/v1/dead_letters?limit=1").await.is(200);
        let dead = &dead["dead_letters"][0];
        assert_eq!(dead["reason"], reason, "{dead}");
        assert_eq!(dead["subject"], format!("state.agent_inbox/{inbox_id}"));
        assert_eq!(fixture.api.call(&id).await["status"], "PENDING", "{reason}");
    }
    // A card whose JSON only PostgreSQL accepts is rejected.
    for (n, odd) in
        ["1e400", &format!("{}1{}", "[".repeat(300), "]".repeat(300))].iter().enumerate()
    {
        let sql = format!(
            "UPDATE public.cards SET content = jsonb_set(content, '{{result}}', '{odd}') \
             WHERE card_id = 'r1'"
        );
        fixture.sql.batch_execute(&sql).await.unwrap();
        let inbox_id = format!("inbox_odd_{n}");
        assert_eq!(fixture.report(&inbox_id, &good).await, 1);
        assert_eq!(fixture.wait_for_status(&inbox_id).await, "error", "{n}");
        let dead = fixture.api.get("/v1/dead_letters?limit=1").await.is(200);
        assert_eq!(dead["dead_letters"][0]["reason"], "wrong_card", "{dead}");
    }
    fixture.put_card(&command, "r1", &json!({ "n": 1 })).await;
    // The rejected reports do not block the valid one.
    assert_eq!(fixture.report("inbox_good", &good).await, 1);
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "n": 1 }));
    fixture.database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unannounced_report_is_found_and_a_late_one_has_no_effect() {
    let Some(fixture) = Fixture::new().await else { return };
    let admin = fixture.database.client().await;
    admin.batch_execute("ALTER TABLE state.agent_inbox DISABLE TRIGGER ALL").await.unwrap();
    let (id, command) = fixture.command().await;
    fixture.put_card(&command, "r1", &json!({ "n": 1 })).await;
    fixture.report("inbox_quiet", &report(&command, "r1", "success")).await;
    assert_eq!(fixture.api.finished(&id).await["status"], "SUCCEEDED");

    let (id, command) = fixture.command().await;
    fixture.api.post(&format!("/v1/tool_calls/{id}/cancel"), json!({})).await.is(200);
    assert_eq!(fixture.api.finished(&id).await["status"], "CANCELED");
    fixture.put_card(&command, "r2", &json!({ "n": 2 })).await;
    fixture.report("inbox_late", &report(&command, "r2", "success")).await;
    let row = until("the late report is processed", || async {
        let sql = "SELECT status, correlation_id FROM state.agent_inbox WHERE inbox_id = $1";
        let row = fixture.sql.query_opt(sql, &[&"inbox_late"]).await.unwrap();
        // The end of the call may have written its row first; then this row was not inserted.
        let Some(row) = row else { return Some("skipped".to_owned()) };
        Some(row.get::<_, String>(0)).filter(|status| status != "pending")
    })
    .await;
    assert_eq!(row, "skipped");
    assert_eq!(fixture.api.call(&id).await["status"], "CANCELED");
    assert!(fixture.server.engine.utp().written_reports().pending(0, 9).await.unwrap().is_empty());
    fixture.database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_written_while_the_server_is_down_is_processed_at_startup() {
    let (Some(database), Some(nats)) = (Database::new().await, Nats::start().await) else { return };
    let mut server =
        process::Server::new().with("STORE__URL", &database.url).with("NATS__URL", nats.url());
    server.start().await;
    let created = server.http.post(server.url("/projects/default/tools"));
    let created = created.json(&tool("hand.work", "hand", json!({}))).send().await.unwrap();
    assert_eq!(created.status(), 201);
    let id = server.ticket("hand.work", json!({ "run_id": "r", "args": {} })).await;
    let peer = nats.peer().await;
    let command = peer.next("hand").await;
    command.ack().await;
    server.kill();
    let sql = database.client_with_grants(GRANTS).await;
    put_card(&sql, &command.payload, "r1", &json!({ "n": 3 })).await;
    write_report(&sql, "inbox_x", &report(&command.payload, "r1", "success")).await;
    server.start().await;
    let call = server.call(&id, 20_000).await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &json!({ "n": 3 })));
    server.stop().await;
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_card_with_the_lineage_of_another_call_is_refused() {
    let Some(fixture) = Fixture::new().await else { return };
    let (id, command) = fixture.command().await;
    fixture.put_card(&command, "r1", &json!({ "n": 1 })).await;
    let good = report(&command, "r1", "success");
    let set = async |name: &str, value: Value| {
        let sql = "UPDATE public.cards SET metadata = metadata || jsonb_build_object($1::text, \
                   $2::jsonb) WHERE card_id = 'r1'";
        fixture.sql.execute(sql, &[&name, &value]).await.unwrap();
    };
    let own_step = command["step_id"].clone();
    for (name, own) in
        [("step_id", own_step), ("trace_id", json!(null)), ("parent_step_id", json!(null))]
    {
        set(name, json!("other")).await;
        let inbox_id = format!("inbox_{name}");
        fixture.report(&inbox_id, &good).await;
        assert_eq!(fixture.wait_for_status(&inbox_id).await, "error", "{name}");
        let dead = fixture.api.get("/v1/dead_letters?limit=1").await.is(200);
        let dead = &dead["dead_letters"][0];
        assert_eq!(dead["reason"], "wrong_card", "{dead}");
        let message = dead["message"].as_str().unwrap();
        assert!(message.contains(&format!("metadata.{name} is not")), "{dead}");
        assert_eq!(fixture.api.call(&id).await["status"], "PENDING", "{name}");
        set(name, own).await;
    }
    fixture.report("inbox_good", &good).await;
    assert_eq!(fixture.api.finished(&id).await["result"], json!({ "n": 1 }));
    fixture.database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_does_not_deny_that_a_service_took_the_call() {
    let Some(fixture) = Fixture::new().await else { return };
    let body = json!({ "run_id": "r", "args": {}, "timeout_ms": 1_500 });
    let id = fixture.api.invoke_with("hand.work", body).await;
    let command = fixture.peer.next("hand").await;
    command.ack().await;
    // The service reads the arguments, which the server cannot see, and works until too late.
    let sql = "SELECT content FROM public.cards WHERE card_id = $1";
    let card = command.payload["tool_call_card_id"].as_str().unwrap();
    fixture.sql.query_one(sql, &[&card]).await.unwrap();
    let call = fixture.api.finished(&id).await;
    assert_eq!(call["status"], "TIMEOUT");
    let message = call["error"]["message"].as_str().unwrap();
    assert!(!message.contains("no executor took"), "{message}");
    assert!(message.contains("hand.work did not answer within 1500 ms"), "{message}");
    assert!(message.contains("no tool service announced that it took the call"), "{message}");
    fixture.database.drop().await;
}
