//! A tool service that was written for the database of UTP: it receives commands over NATS, finds
//! the agent, the tool and the arguments with SQL, and reports with SQL. It knows nothing of
//! Toolcrib, and reads every column that such services read.

use async_nats::HeaderMap;
use async_nats::jetstream;
use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use super::shared_tables::GRANTS;
use crate::support::database::Database;
use crate::support::nats::{Nats, NatsPeer, ReceivedMessage, tool};
use crate::support::{Api, Server};

type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// The identity of a command: in the payload with v1r3, in headers with v1r4.
struct Identity {
    project: String,
    channel: String,
    agent: String,
    turn: String,
    epoch: i64,
    step: String,
    call: String,
    depth: i32,
    traceparent: String,
}

impl Identity {
    fn read(version: &str, command: &ReceivedMessage) -> Self {
        let subject = command.message.subject.as_str();
        let parts: Vec<&str> = subject.split('.').collect();
        let text = |field: &str, header: &str| match version {
            "v1r3" => {
                let value = &command.payload[field];
                value.as_str().map_or_else(|| value.to_string(), str::to_owned)
            }
            _ => command.header(header),
        };
        Self {
            project: parts[2].to_owned(),
            channel: parts[3].to_owned(),
            agent: text("agent_id", "CG-Agent-Id"),
            turn: text("agent_turn_id", "CG-Turn-Id"),
            epoch: text("turn_epoch", "CG-Turn-Epoch").parse().unwrap(),
            step: text("step_id", "CG-Step-Id"),
            call: text("tool_call_id", "CG-Tool-Call-Id"),
            depth: command.header("CG-Recursion-Depth").parse().unwrap(),
            traceparent: command.header("traceparent"),
        }
    }
}

struct ReferenceService {
    version: &'static str,
    sql: Client,
    peer: NatsPeer,
}

impl ReferenceService {
    /// Executes the next command of `word_count`. Returns the target of the wakeup that it sent.
    async fn execute_next(&self) -> Option<String> {
        let stream = format!("cg_cmd_{}", self.version);
        // Such a service listens for one word after its target.
        let subject = format!("cg.{}.*.*.cmd.tool.word_count.*", self.version);
        let durable = format!("tool_word_count_cmd_{}", self.version);
        let command = self.peer.next_in(&stream, &subject, &durable).await;
        let identity = Identity::read(self.version, &command);
        let worker_target = self.find_worker_target(&identity).await;
        let result = match &worker_target {
            None => Err("missing worker_target for agent"),
            Some(_) => self.count_words(&identity, &command.payload).await,
        };
        let (status, result_card) = self.put_result_card(&identity, &command.payload, result).await;
        let payload = json!({
            "after_execution": command.payload["after_execution"],
            "status": status,
            "tool_result_card_id": result_card,
        });
        let inbox_id = match self.version {
            "v1r3" => self.report(&identity, payload).await,
            _ => self.report_from_anchor(&identity, payload).await,
        };
        if let Some(target) = &worker_target {
            self.publish_wakeup(&identity, target, &inbox_id).await;
        }
        command.ack().await;
        worker_target
    }

    async fn find_worker_target(&self, identity: &Identity) -> Option<String> {
        let sql = "SELECT project_id, agent_id, profile_box_id::text, worker_target, tags, \
                   display_name, owner_agent_id, status, metadata, last_seen_at::text, \
                   created_at::text, updated_at::text FROM resource.project_agents \
                   WHERE project_id = $1 AND agent_id = $2";
        let row = self.sql.query_opt(sql, &[&identity.project, &identity.agent]).await.unwrap()?;
        assert_eq!(row.get::<_, String>(2), "00000000-0000-0000-0000-000000000000");
        assert_eq!(row.get::<_, Value>(4), json!([]));
        assert_eq!(row.get::<_, String>(7), "active");
        Some(row.get::<_, String>(3)).filter(|target| !target.trim().is_empty())
    }

    async fn count_words(
        &self,
        identity: &Identity,
        payload: &Value,
    ) -> Result<Value, &'static str> {
        let sql = "SELECT tool_name, description, parameters, target_subject, after_execution, \
                   options FROM resource.tools WHERE project_id = $1 AND tool_name = $2";
        let name = payload["tool_name"].as_str().unwrap();
        let tool = self.sql.query_opt(sql, &[&identity.project, &name]).await.unwrap();
        let tool = tool.ok_or("tool not found")?;
        assert_eq!(tool.get::<_, String>(4), payload["after_execution"].as_str().unwrap());
        let card = self.call_card(identity, payload).await.ok_or("card not found")?;
        let text = card["arguments"]["text"].as_str().ok_or("text is missing")?;
        let site = card["arguments"]["site"].clone();
        Ok(json!({ "words": text.split_whitespace().count(), "site": site }))
    }

    async fn call_card(&self, identity: &Identity, payload: &Value) -> Option<Value> {
        let sql = "SELECT card_id, tenant_id, content, tool_calls, tool_call_id, ttl_seconds, \
                   expires_at::text, deleted_at::text, metadata, created_at::text \
                   FROM public.cards WHERE card_id = $1 AND tenant_id = $2";
        let card_id = payload["tool_call_card_id"].as_str().unwrap();
        let row = self.sql.query_opt(sql, &[&card_id, &identity.project]).await.unwrap()?;
        let (content, metadata): (Value, Value) = (row.get(2), row.get(8));
        assert_eq!(
            (&metadata["type"], &content["__type__"]),
            (&json!("tool.call"), &json!("ToolCallContent"))
        );
        assert_eq!(row.get::<_, Option<String>>(4).as_deref(), Some(identity.call.as_str()));
        Some(content)
    }

    /// Writes the result card with the lineage of the call card. Returns its status and its id.
    async fn put_result_card(
        &self,
        identity: &Identity,
        payload: &Value,
        result: Result<Value, &str>,
    ) -> (&'static str, String) {
        let sql = "SELECT metadata FROM public.cards WHERE card_id = $1";
        let call_card = payload["tool_call_card_id"].as_str().unwrap();
        let lineage: Value = self.sql.query_one(sql, &[&call_card]).await.unwrap().get(0);
        let (status, result, error) = match result {
            Ok(result) => ("success", result, Value::Null),
            Err(message) => {
                let error = json!({ "code": "bad_request", "message": message, "source": "tool" });
                let result = json!({ "error_code": "bad_request", "error_message": message });
                ("failed", result, error)
            }
        };
        let content = json!({
            "__type__": "ToolResultContent", "status": status,
            "after_execution": payload["after_execution"], "result": result, "error": error,
        });
        let metadata = json!({
            "project_id": identity.project, "type": "tool.result", "author_id": "tool.word_count",
            "created_at": "2026-01-01T00:00:00+00:00", "role": "tool",
            "agent_turn_id": identity.turn, "tool_call_id": identity.call,
            "function_name": payload["tool_name"], "step_id": lineage["step_id"],
            "trace_id": lineage["trace_id"], "parent_step_id": lineage["parent_step_id"],
        });
        let card_id = format!("result{}", identity.call.to_lowercase().replace('_', ""));
        let sql = "INSERT INTO public.cards (card_id, tenant_id, content, tool_calls, \
                   tool_call_id, ttl_seconds, expires_at, metadata, created_at) \
                   VALUES ($1, $2, $3, NULL, $4, NULL, NULL, $5, now()) \
                   ON CONFLICT (card_id) DO UPDATE SET content = excluded.content";
        let params: Params<'_> =
            &[&card_id, &identity.project, &content, &identity.call, &metadata];
        self.sql.execute(sql, params).await.unwrap();
        (status, card_id)
    }

    /// Reports as v1r3: the identity is in the payload, and a missing request edge is added first.
    async fn report(&self, identity: &Identity, mut payload: Value) -> String {
        payload["tool_call_id"] = json!(identity.call);
        payload["agent_turn_id"] = json!(identity.turn);
        payload["turn_epoch"] = json!(identity.epoch);
        payload["agent_id"] = json!(identity.agent);
        payload["step_id"] = json!(identity.step);
        self.put_edge(identity, "tool_call", "request").await;
        self.check_request_edge(identity).await;
        let inbox_id = format!("inbox_{}", identity.call);
        let sql = "INSERT INTO state.agent_inbox (inbox_id, project_id, agent_id, message_type, \
                   enqueue_mode, correlation_id, recursion_depth, traceparent, tracestate, \
                   trace_id, parent_step_id, source_agent_id, source_step_id, payload, status, \
                   created_at) VALUES ($1, $2, $3, 'tool_result', NULL, $4, $5, $6, NULL, $7, $8, \
                   'tool.word_count', NULL, $9, 'pending', now()) \
                   ON CONFLICT (project_id, message_type, md5(correlation_id)) DO NOTHING";
        let trace_id = identity.traceparent.split('-').nth(1).unwrap();
        let params: Params<'_> = &[
            &inbox_id,
            &identity.project,
            &identity.agent,
            &identity.call,
            &identity.depth,
            &identity.traceparent,
            &trace_id,
            &identity.step,
            &payload,
        ];
        self.sql.batch_execute("BEGIN").await.unwrap();
        assert_eq!(self.sql.execute(sql, params).await.unwrap(), 1);
        self.put_edge(identity, "report", "response").await;
        self.sql.batch_execute("COMMIT").await.unwrap();
        inbox_id
    }

    /// Reports as v1r4: the target comes from the row that was written with the command, and the
    /// identity is in columns and headers.
    async fn report_from_anchor(&self, identity: &Identity, payload: Value) -> String {
        let sql = "SELECT status, agent_id, agent_turn_id, turn_epoch::bigint, channel_id, \
                   context_headers, retry_count::bigint, next_retry_at::text, last_error, \
                   defer_reason FROM state.agent_inbox WHERE project_id = $1 \
                   AND message_type = 'command_anchor' AND correlation_id = $2";
        let anchor = self.sql.query_opt(sql, &[&identity.project, &identity.call]).await.unwrap();
        let anchor = anchor.expect("protocol_violation: the command has no anchor");
        assert_eq!(anchor.get::<_, String>(0), "consumed");
        assert_eq!(anchor.get::<_, String>(1), identity.agent);
        assert_eq!(anchor.get::<_, String>(2), identity.turn);
        assert_eq!(anchor.get::<_, i64>(3), identity.epoch);
        assert_eq!(anchor.get::<_, String>(4), identity.channel);
        assert_eq!(anchor.get::<_, i64>(6), 0);
        let headers: Value = anchor.get(5);
        assert_eq!(headers["CG-Recursion-Depth"], identity.depth.to_string());
        assert_eq!(headers["CG-Tool-Call-Id"], identity.call.as_str());
        self.check_request_edge(identity).await;
        let inbox_id = format!("inbox_{}", identity.call);
        let sql = "INSERT INTO state.agent_inbox (inbox_id, project_id, channel_id, agent_id, \
                   agent_turn_id, turn_epoch, message_type, enqueue_mode, correlation_id, \
                   context_headers, payload, status, retry_count) VALUES ($1, $2, $3, $4, $5, \
                   $6::bigint::int, 'tool_result', NULL, $7, $8, $9, 'pending', 0) \
                   ON CONFLICT (project_id, message_type, md5(correlation_id)) DO NOTHING";
        let params: Params<'_> = &[
            &inbox_id,
            &identity.project,
            &identity.channel,
            &identity.agent,
            &identity.turn,
            &identity.epoch,
            &identity.call,
            &headers,
            &payload,
        ];
        self.sql.batch_execute("BEGIN").await.unwrap();
        assert_eq!(self.sql.execute(sql, params).await.unwrap(), 1);
        self.put_edge(identity, "report", "response").await;
        self.sql.batch_execute("COMMIT").await.unwrap();
        inbox_id
    }

    async fn check_request_edge(&self, identity: &Identity) {
        let sql = "SELECT recursion_depth FROM state.execution_edges WHERE project_id = $1 \
                   AND correlation_id = $2 AND primitive = 'tool_call' AND edge_phase = 'request'";
        let row = self.sql.query_one(sql, &[&identity.project, &identity.call]).await.unwrap();
        assert_eq!(row.get::<_, i32>(0), identity.depth);
    }

    async fn put_edge(&self, identity: &Identity, primitive: &str, phase: &str) {
        let sql = "INSERT INTO state.execution_edges (edge_id, project_id, channel_id, primitive, \
                   edge_phase, source_agent_id, target_agent_id, target_agent_turn_id, \
                   correlation_id, enqueue_mode, recursion_depth, trace_id, parent_step_id, \
                   metadata, created_at) VALUES ($1, $2, $3, $4, $5, 'tool.word_count', $6, $7, \
                   $8, NULL, $9, $10, $11, '{}', now()) ON CONFLICT DO NOTHING";
        let edge_id = format!("edge_{primitive}_{}", identity.call);
        let trace_id = identity.traceparent.split('-').nth(1).unwrap();
        let params: Params<'_> = &[
            &edge_id,
            &identity.project,
            &identity.channel,
            &primitive,
            &phase,
            &identity.agent,
            &identity.turn,
            &identity.call,
            &identity.depth,
            &trace_id,
            &identity.step,
        ];
        self.sql.execute(sql, params).await.unwrap();
    }

    async fn publish_wakeup(&self, identity: &Identity, target: &str, inbox_id: &str) {
        let Identity { project, channel, .. } = identity;
        let subject = format!("cg.{}.{project}.{channel}.cmd.agent.{target}.wakeup", self.version);
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", identity.traceparent.as_str());
        let payload = json!({ "agent_id": identity.agent, "inbox_id": inbox_id });
        let jetstream = jetstream::new(self.peer.client.clone());
        let payload = payload.to_string().into_bytes();
        jetstream
            .publish_with_headers(subject, headers, payload.into())
            .await
            .unwrap()
            .await
            .unwrap();
    }
}

struct Fixture {
    database: Database,
    _nats: Nats,
    _server: Server,
    api: Api,
    service: ReferenceService,
}

impl Fixture {
    async fn new(version: &'static str) -> Option<Self> {
        let database = Database::new().await?;
        let nats = Nats::start().await?;
        let (nats_url, url) = (nats.url(), database.url.clone());
        let server = Server::with(|config| {
            config.nats.url = Some(nats_url);
            config.nats.version = version.to_owned();
            config.store.url = Some(url);
        })
        .await;
        let (api, peer) = (server.api(), nats.peer().await);
        let sql = database.client_with_grants(GRANTS).await;
        // The schema is closed, and the definition adds an argument that it does not list.
        let more = json!({
            "target_subject": "cmd.tool.word_count.run",
            "parameters": {
                "type": "object", "additionalProperties": false, "required": ["text"],
                "properties": { "text": { "type": "string" } },
            },
            "options": { "args": { "fixed": { "site": "{project_id}" } } },
        });
        let definition = tool("text.count", "word_count", more);
        api.post("/projects/default/tools", definition).await.is(201);
        let service = ReferenceService { version, sql, peer };
        Some(Self { database, _nats: nats, _server: server, api, service })
    }

    /// Calls the tool outside a turn, and lets the service execute the call.
    async fn call(&self) -> (Value, Option<String>) {
        let id = self.api.invoke("text.count", json!({ "text": "one two three" })).await;
        let worker_target = self.service.execute_next().await;
        (self.api.finished(&id).await, worker_target)
    }

    async fn roster(&self) -> Vec<Value> {
        let listed = self.api.get("/v1/agents").await.is(200);
        listed["agents"].as_array().unwrap().clone()
    }

    async fn count_dead_letters(&self) -> usize {
        let listed = self.api.get("/v1/dead_letters").await.is(200);
        listed["dead_letters"].as_array().unwrap().len()
    }
}

async fn a_call_outside_a_turn_completes(version: &'static str) {
    let Some(fixture) = Fixture::new(version).await else { return };
    let expected = json!({ "words": 3, "site": "default" });
    let (call, worker_target) = fixture.call().await;
    assert_eq!((&call["status"], &call["result"]), (&json!("SUCCEEDED"), &expected), "{call}");
    assert_eq!(call["taken_by"], "tool.word_count");
    // The service found the agent in the table. For Toolcrib the agent has no worker: it has no
    // inbox, and the wakeup that the service published reaches no worker.
    let automatic = worker_target.unwrap();
    assert_eq!(fixture.roster().await, Vec::<Value>::new());
    assert_eq!(fixture.count_dead_letters().await, 0);
    // An entry that an operator makes replaces the automatic one, and no call changes it.
    let entry = json!({ "worker_target": "w1" });
    fixture.api.put("/v1/agents/default", entry).await.is(200);
    for _ in 0..2 {
        let (call, worker_target) = fixture.call().await;
        assert_eq!(call["status"], "SUCCEEDED", "{call}");
        assert_eq!(worker_target.as_deref(), Some("w1"));
    }
    assert_eq!(fixture.roster().await[0]["worker_target"], "w1");
    let found = fixture.api.get("/v1/agents/default/inbox?wait_ms=30000").await.is(200);
    assert!(!found["items"].as_array().unwrap().is_empty(), "{found}");
    // If the operator removes the agent, services find it all the same.
    fixture.api.delete("/v1/agents/default").await.is(204);
    let (call, worker_target) = fixture.call().await;
    assert_eq!(call["status"], "SUCCEEDED", "{call}");
    assert_eq!(worker_target, Some(automatic));
    assert_eq!(fixture.count_dead_letters().await, 0);
    fixture.database.drop().await;
}

async fn a_call_in_a_turn_completes(version: &'static str) {
    let Some(fixture) = Fixture::new(version).await else { return };
    let entry = json!({ "worker_target": "w1" });
    fixture.api.put("/v1/agents/ada", entry).await.is(200);
    let lease = json!({ "agent_turn_id": "turn_1", "parent_step_id": "step_above" });
    fixture.api.post("/v1/agents/ada/turns", lease).await.is(201);
    let path = "/v1/agents/ada/turns/turn_1";
    let call = json!({
        "tool_call_id": "call_7", "tool_name": "text.count", "arguments": { "text": "a b" },
    });
    let step = json!({ "turn_epoch": 1, "calls": [call] });
    fixture.api.post(&format!("{path}/dispatch"), step).await.is(200);
    assert_eq!(fixture.service.execute_next().await.as_deref(), Some("w1"));
    let resume = json!({ "turn_epoch": 1, "wait_ms": 30_000 });
    let resumed = fixture.api.post(&format!("{path}/resume"), resume).await.is(200);
    let result = &resumed["results"][0];
    assert_eq!(result["result"], json!({ "words": 2, "site": "default" }), "{resumed}");
    assert_eq!((&resumed["status"], &resumed["turn_epoch"]), (&json!("running"), &json!(2)));
    assert_eq!(fixture.count_dead_letters().await, 0);
    fixture.database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_service_executes_a_call_outside_a_turn() {
    a_call_outside_a_turn_completes("v1r3").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_service_executes_a_call_in_a_turn() {
    a_call_in_a_turn_completes("v1r3").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_v1r4_service_executes_a_call_outside_a_turn() {
    a_call_outside_a_turn_completes("v1r4").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_v1r4_service_executes_a_call_in_a_turn() {
    a_call_in_a_turn_completes("v1r4").await;
}
