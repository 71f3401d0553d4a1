//! Measures the agent loop with a scripted model: the time that a step takes beyond the time of the
//! model, many runs at once, and the delay of streamed text.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::StreamExt;
use futures::future::try_join_all;
use serde_json::{Value, json};
use toolcrib::registry::name_for_model;

use super::{Bench, median};
use crate::model::{RecordedRequest, ScriptedAnswer, ScriptedBehavior, ScriptedModel};
use crate::processes::TOOL;
use crate::report::{Limit, Measurement};

/// Number of steps, each with one call, of the run whose overhead is measured.
const STEPS: usize = 20;
/// Number of concurrent runs.
const CONCURRENT_RUNS: usize = 200;
/// Response delay of the model of the concurrent runs.
const MODEL_DELAY: Duration = Duration::from_millis(200);
/// Number of runs in the measurement of the first word.
const FIRST_WORD_RUNS: usize = 40;

impl Bench<'_> {
    /// Measures the agent loop: its overhead, many runs at once, and the delay of the first word.
    pub(super) async fn measure_runs(&mut self) -> anyhow::Result<()> {
        self.advance_progress("runs: start");
        let model = ScriptedModel::start_with_script(scripted_behavior).await?;
        let settings =
            [("TOOLCRIB_LLM__BASE_URL", model.url.as_str()), ("TOOLCRIB_LLM__MODEL", "steps")];
        let dir = self.scratch.dir("runs")?;
        let (product, _) = self.launcher.start_toolcrib(&dir, &settings).await?;
        let client = BenchRunClient::new(&product.addr)?;
        client.run_to_end("steps").await?;
        self.measure_overhead(&client, &model).await?;
        self.measure_concurrent_runs(&client).await?;
        self.measure_first_word(&client, &model).await
    }

    /// Measures a run of many steps against the same requests made directly to the model. The
    /// difference includes the calls of the steps.
    async fn measure_overhead(
        &mut self,
        client: &BenchRunClient,
        model: &ScriptedModel,
    ) -> anyhow::Result<()> {
        let mut overheads_ms = Vec::new();
        for _ in 0..self.plan.rounds * 3 {
            self.advance_progress("runs: overhead of a step");
            let before = model.requests().len();
            let began = Instant::now();
            client.run_to_end("steps").await?;
            let whole = began.elapsed();
            let requests = model.requests().split_off(before);
            let began = Instant::now();
            for request in &requests {
                client.ask_model(&model.url, &request.body).await?;
            }
            let alone = began.elapsed();
            let overhead_ms = whole.saturating_sub(alone).as_secs_f64() * 1e3;
            overheads_ms.push(overhead_ms / requests.len() as f64);
        }
        let name = "run: overhead per step, p50";
        self.push_measurement(Measurement::absolute(
            name,
            "ms",
            median(overheads_ms),
            Limit::AtMost(5.0),
        ));
        Ok(())
    }

    async fn measure_concurrent_runs(&mut self, client: &BenchRunClient) -> anyhow::Result<()> {
        let (mut many, mut one) = (Vec::new(), Vec::new());
        for _ in 0..self.plan.rounds {
            self.advance_progress(&format!("runs: one, and {CONCURRENT_RUNS} at once"));
            let began = Instant::now();
            client.run_to_end("thinks").await?;
            one.push(began.elapsed().as_secs_f64() * 1e3);
            let began = Instant::now();
            try_join_all((0..CONCURRENT_RUNS).map(|_| client.run_to_end("thinks"))).await?;
            many.push(began.elapsed().as_secs_f64() * 1e3);
        }
        let name = format!("{CONCURRENT_RUNS} runs at once, model of 200 ms, against one");
        let (many, one) = (median(many), median(one));
        self.push_measurement(Measurement::against_baseline(
            name,
            "ms",
            many,
            one,
            Limit::AtMost(1.5),
        ));
        Ok(())
    }

    /// Measures the time from the first word leaving the model to its arrival at the client.
    async fn measure_first_word(
        &mut self,
        client: &BenchRunClient,
        model: &ScriptedModel,
    ) -> anyhow::Result<()> {
        self.advance_progress("runs: first words");
        let mut delays_ms = Vec::new();
        for _ in 0..FIRST_WORD_RUNS {
            let first_word_at = client.first_word_at().await?;
            let requests = model.requests();
            let sent_at = requests.last().and_then(RecordedRequest::first_event_time);
            let sent_at = sent_at.context("the model sent no text")?;
            delays_ms.push(first_word_at.saturating_duration_since(sent_at).as_secs_f64() * 1e3);
        }
        let name = "run: first word from the model to the client, p50";
        self.push_measurement(Measurement::absolute(
            name,
            "ms",
            median(delays_ms),
            Limit::AtMost(5.0),
        ));
        Ok(())
    }
}

/// Decides the behavior of the model by its name.
fn scripted_behavior(request: &RecordedRequest) -> ScriptedBehavior {
    let results = request.messages().iter().filter(|message| message["role"] == "tool").count();
    let call = || {
        let id = format!("c{results}");
        let arguments = json!({ "expression": results.to_string() }).to_string();
        ScriptedAnswer::text("").with_call(&id, &name_for_model(TOOL), arguments)
    };
    match request.body["model"].as_str() {
        Some("steps") if results < STEPS => ScriptedBehavior::Reply(call()),
        Some("thinks") if results < 1 => ScriptedBehavior::Reply(call().with_delay(MODEL_DELAY)),
        Some("thinks") => {
            ScriptedBehavior::Reply(ScriptedAnswer::text("done").with_delay(MODEL_DELAY))
        }
        _ => ScriptedBehavior::Reply(ScriptedAnswer::text("That is all there is to say about it.")),
    }
}

/// An HTTP client that starts runs.
struct BenchRunClient {
    http: reqwest::Client,
    url: String,
}

impl BenchRunClient {
    fn new(addr: &str) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?;
        Ok(Self { http, url: format!("http://{addr}/v1/runs") })
    }

    fn body(model: &str) -> Value {
        json!({
            "model": model, "tools": [TOOL], "wait_ms": 60_000,
            "messages": [{ "role": "user", "content": "Do what there is to do." }],
        })
    }

    /// Starts a run and waits for its end.
    async fn run_to_end(&self, model: &str) -> anyhow::Result<()> {
        let request = self.http.post(&self.url).json(&Self::body(model));
        let run: Value = request.send().await?.json().await?;
        ensure!(run["status"] == "SUCCEEDED", "a run ended otherwise: {run}");
        Ok(())
    }

    /// Sends a request to the model directly, with the body that the server sent.
    async fn ask_model(&self, url: &str, body: &Value) -> anyhow::Result<()> {
        let request = self.http.post(format!("{url}/chat/completions")).json(body);
        request.send().await?.error_for_status()?.bytes().await?;
        Ok(())
    }

    /// Returns the time at which the first word of a streamed run arrives.
    async fn first_word_at(&self) -> anyhow::Result<Instant> {
        let mut body = Self::body("words");
        body["stream"] = true.into();
        let answer = self.http.post(&self.url).json(&body).send().await?.error_for_status()?;
        let (mut chunks, mut read) = (answer.bytes_stream(), Vec::new());
        let mut first_word_at = None;
        while let Some(chunk) = chunks.next().await {
            read.extend_from_slice(&chunk?);
            let word = b"event: run.text";
            if first_word_at.is_none() && read.windows(word.len()).any(|window| window == word) {
                first_word_at = Some(Instant::now());
            }
        }
        first_word_at.context("no word came")
    }
}
