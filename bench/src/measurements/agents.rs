//! Measures agents that call agents, with a scripted model that answers at once: a fork of eight
//! against one, and the memory of a large tree.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use super::{Bench, SETTLE_TIME, median};
use crate::model::{RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel, text_reply};
use crate::processes::MeasuredServer;
use crate::report::{Limit, Measurement};

/// Number of agents of the fork.
const FORKED: usize = 8;
/// Number of agents that each run of the tree calls, on three levels.
const FAN_OUT: usize = 10;
/// Number of runs of the whole tree, its first run included.
const TREE_RUNS: usize = 1 + FAN_OUT + FAN_OUT * FAN_OUT + FAN_OUT * FAN_OUT * FAN_OUT;
/// Pairs of measurements per round.
const PAIRS: usize = 15;
/// Maximum time of the tree.
const TREE_LIMIT: Duration = Duration::from_secs(300);

impl Bench<'_> {
    /// Measures agents that call agents.
    pub(super) async fn measure_agents(&mut self) -> anyhow::Result<()> {
        self.advance_progress("agents: start");
        let model = ScriptedModel::start_with_script(reply).await?;
        let settings =
            [("TOOLCRIB_LLM__BASE_URL", model.url.as_str()), ("TOOLCRIB_LLM__MODEL", "agents")];
        let dir = self.scratch.dir("agents")?;
        let (server, _) = self.launcher.start_toolcrib(&dir, &settings).await?;
        let client = AgentClient::new(&server.addr)?;
        for name in ["one", "two", "leaf"] {
            client.define(name).await?;
        }
        client.fork(1).await?;
        tokio::time::sleep(SETTLE_TIME).await;
        self.measure_tree(&client, &server).await?;
        self.measure_fork(&client).await
    }

    /// Measures a fork of several agents against one.
    async fn measure_fork(&mut self, client: &AgentClient) -> anyhow::Result<()> {
        let (mut many, mut one) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            self.advance_progress("agents: a fork");
            for _ in 0..PAIRS {
                one.push(client.call_one().await?.as_secs_f64() * 1e3);
                many.push(client.fork(FORKED).await?.as_secs_f64() * 1e3);
            }
        }
        let name = format!("fork_join of {FORKED} agents, against one agent");
        let (many, one) = (median(many), median(one));
        let limit = Limit::AtMost(3.0);
        self.push_measurement(Measurement::against_baseline(name, "ms", many, one, limit));
        Ok(())
    }

    /// Measures the memory of a tree. The model checks that every run has the results of its calls.
    async fn measure_tree(
        &mut self,
        client: &AgentClient,
        server: &MeasuredServer,
    ) -> anyhow::Result<()> {
        self.advance_progress(&format!("agents: a tree of {TREE_RUNS} runs"));
        let idle_mib = server.resident_mib()?;
        client.run_tree().await?;
        let name = format!("a tree of {TREE_RUNS} runs: memory above idle, at the peak");
        let above_mib = server.peak_resident_mib()? - idle_mib;
        let limit = Limit::AtMost(150.0);
        self.push_measurement(Measurement::absolute(name, "MiB", above_mib, limit));
        Ok(())
    }
}

/// Replies by the level of the agent: each calls ten agents of the next level, and answers when it
/// has all their results.
fn reply(request: &RecordedRequest) -> ScriptedBehavior {
    let messages = request.messages();
    let results = messages.iter().filter(|message| message["role"] == "tool").count();
    let is_system = messages.first().is_some_and(|first| first["role"] == "system");
    let role = messages.first().filter(|_| is_system).and_then(|first| first["content"].as_str());
    let next = match role {
        None => "one",
        Some("one") => "two",
        Some("two") => "leaf",
        Some(_) => return text_reply("done"),
    };
    if results == 0 {
        let arguments = json!({ "instruction": "work" }).to_string();
        let call = |answer: ScriptedAnswer, n: usize| {
            answer.with_call(&format!("c{n}"), &format!("agent__{next}"), arguments.clone())
        };
        return ScriptedBehavior::Reply((0..FAN_OUT).fold(ScriptedAnswer::text(""), call));
    }
    text_reply(if results == FAN_OUT { "done" } else { "notices are missing" })
}

/// Calls agents over HTTP.
struct AgentClient {
    http: reqwest::Client,
    url: String,
}

impl AgentClient {
    fn new(addr: &str) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?;
        Ok(Self { http, url: format!("http://{addr}") })
    }

    async fn define(&self, name: &str) -> anyhow::Result<()> {
        let body = json!({ "driver": "loop", "profile": { "instructions": name } });
        let request = self.http.put(format!("{}/v1/agents/{name}", self.url)).json(&body);
        request.send().await?.error_for_status()?;
        Ok(())
    }

    async fn invoke(&self, tool: &str, args: Value) -> anyhow::Result<(Duration, Value)> {
        let url = format!("{}/v1/tools/{tool}/invoke?wait_ms=60000", self.url);
        let began = Instant::now();
        let call: Value = self
            .http
            .post(url)
            .json(&json!({ "run_id": "run_bench", "args": args }))
            .send()
            .await?
            .json()
            .await?;
        let took = began.elapsed();
        ensure!(call["status"] == "SUCCEEDED", "a call of {tool} ended otherwise: {call}");
        Ok((took, call["result"].clone()))
    }

    async fn call_one(&self) -> anyhow::Result<Duration> {
        Ok(self.invoke("agent.leaf", json!({ "instruction": "work" })).await?.0)
    }

    async fn fork(&self, count: usize) -> anyhow::Result<Duration> {
        let task = json!({
            "target_strategy": "new", "target_ref": "leaf", "instruction": "work",
        });
        let (took, result) =
            self.invoke("fork_join", json!({ "tasks": vec![task; count] })).await?;
        ensure!(result["status"] == "success", "a fork ended otherwise: {result}");
        Ok(took)
    }

    async fn run_tree(&self) -> anyhow::Result<()> {
        let body = json!({ "messages": [{ "role": "user", "content": "go" }] });
        let request = self.http.post(format!("{}/v1/runs", self.url)).json(&body);
        let run: Value = request.send().await?.json().await?;
        let id = run["run_id"].as_str().unwrap_or_default().to_owned();
        let began = Instant::now();
        loop {
            let url = format!("{}/v1/runs/{id}?wait_ms=20000", self.url);
            let run: Value = self.http.get(url).send().await?.json().await?;
            if run["status"] == "SUCCEEDED" {
                ensure!(run["answer"] == "done", "the tree ended otherwise: {run}");
                break;
            }
            ensure!(began.elapsed() < TREE_LIMIT, "the tree has not ended: {run}");
        }
        let url = format!("{}/v1/runs/{id}/tree", self.url);
        let tree: Value = self.http.get(url).send().await?.json().await?;
        let counts = (tree["run_count"].as_u64(), tree["open_count"].as_u64());
        ensure!(counts == (Some(TREE_RUNS as u64), Some(0)), "runs and open runs: {counts:?}");
        Ok(())
    }
}
