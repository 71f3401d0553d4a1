//! Measures the cost of access rules: a call with rules compared with one without, decisions among
//! many rules and tools, and the list of tools.
//!
//! The measurement runs in this process, with the store in memory: without HTTP and a disk, the
//! rules have a larger share of a call than in a server.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use toolcrib::calls::Until;
use toolcrib::domain::caller::AuthMethod;
use toolcrib::registry::rules::parse_rule_set;
use toolcrib::{CallRequest, Caller, Effect, Engine, Fault, FnTool, Role};

use super::{Bench, median};
use crate::report::{Limit, Measurement};

const MANY: usize = 1_000;
const ROUNDS: usize = 7;
const CALLS_PER_ROUND: usize = 2_000;

/// The measured costs.
#[derive(Debug)]
struct RuleCosts {
    /// Time of a call without rules and with 100 rules, in microseconds.
    call_us: (f64, f64),
    /// Median and 99th percentile of a decision, in microseconds.
    decision_us: (f64, f64),
    /// Time of a list of tools, in milliseconds.
    list_ms: f64,
}

impl Bench<'_> {
    /// Measures the cost of access rules.
    pub(super) async fn measure_rules(&mut self) -> anyhow::Result<()> {
        self.advance_progress("access rules");
        let costs = measure().await?;
        let (without, with) = costs.call_us;
        for measurement in [
            Measurement::against_baseline(
                "a no-op call with 100 rules, to one without",
                "µs",
                with,
                without,
                Limit::AtMost(1.1),
            ),
            Measurement::absolute(
                "decision, 1000 rules and tools, p50",
                "µs",
                costs.decision_us.0,
                Limit::AtMost(50.0),
            ),
            Measurement::absolute(
                "decision, 1000 rules and tools, p99",
                "µs",
                costs.decision_us.1,
                Limit::AtMost(500.0),
            ),
            Measurement::absolute(
                "list of 1000 tools with 1000 rules",
                "ms",
                costs.list_ms,
                Limit::AtMost(10.0),
            ),
        ] {
            self.push_measurement(measurement);
        }
        Ok(())
    }
}

fn caller() -> Caller {
    Caller::new("p", "ada", Role::Agent, AuthMethod::Key)
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct NoArguments {}

async fn engine_with(tools: usize, rules: Vec<Value>) -> anyhow::Result<Engine> {
    let mut builder = Engine::builder();
    for n in 0..tools {
        let name = format!("group{}.tool{n}", n % 20);
        let tool = FnTool::new(&name, "Does nothing", |_: NoArguments| async { Ok::<_, Fault>(1) });
        builder = builder.tool(tool.effect(Effect::Idempotent));
    }
    let engine = builder.start().await?;
    let rules = parse_rule_set("p", &json!({ "rules": rules }))?;
    engine.admin().replace_rules(&Caller::local("p"), "p", rules, "measured").await?;
    Ok(engine)
}

/// Returns rules of every form: exact names, patterns, other agents, users, conditions.
fn mixed_rules(count: usize) -> Vec<Value> {
    let mut rules = vec![json!({ "id": "all", "verdict": "allow", "agents": ["ada"] })];
    rules.extend((1..count).map(|n| {
        let (id, tool) = (format!("r{n}"), format!("group{}.tool{n}", n % 20));
        match n % 5 {
            0 => json!({ "id": id, "verdict": "deny", "tools": [format!("other{n}.*")] }),
            1 => json!({ "id": id, "verdict": "deny", "tools": [tool], "users": ["mallory"] }),
            2 => json!({ "id": id, "verdict": "allow", "agents": [format!("agent{n}")] }),
            3 => json!({ "id": id, "verdict": "ask", "tools": [tool], "risk_min": "critical" }),
            _ => json!({ "id": id, "verdict": "deny", "tools": [tool],
                "when": "caller.environment == 'production' && tool.risk == 'high'" }),
        }
    }));
    rules
}

async fn time_calls(engine: &Engine) -> anyhow::Result<Duration> {
    let (caller, start) = (caller(), Instant::now());
    for _ in 0..CALLS_PER_ROUND {
        let request = CallRequest::new("group4.tool4", "{}")?;
        let ticket = engine.calls().invoke(&caller, request).await?;
        engine.calls().wait(&caller, &ticket, Until::Ended).await?;
    }
    Ok(start.elapsed())
}

async fn measure() -> anyhow::Result<RuleCosts> {
    let without = engine_with(20, mixed_rules(1)).await?;
    let with = engine_with(20, mixed_rules(100)).await?;
    time_calls(&without).await?;
    time_calls(&with).await?;
    let (mut base, mut measured) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let per_call = |time: Duration| time.as_secs_f64() * 1e6 / CALLS_PER_ROUND as f64;
        base.push(per_call(time_calls(&without).await?));
        measured.push(per_call(time_calls(&with).await?));
    }
    let many = engine_with(MANY, mixed_rules(MANY)).await?;
    let (caller, registry) = (caller(), many.registry());
    let mut decisions = Vec::with_capacity(MANY * 20);
    for _ in 0..20 {
        for n in 0..MANY {
            let name = format!("group{}.tool{n}", n % 20);
            let start = Instant::now();
            let tool = registry.tool(&caller, &name);
            decisions.push(start.elapsed().as_secs_f64() * 1e6);
            anyhow::ensure!(tool.is_ok(), "{name} is not allowed");
        }
    }
    decisions.sort_by(f64::total_cmp);
    let mut lists = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let count = registry.tools(&caller).len();
        lists.push(start.elapsed().as_secs_f64() * 1e3);
        anyhow::ensure!(count == MANY, "{count} tools are listed");
    }
    Ok(RuleCosts {
        call_us: (median(base), median(measured)),
        decision_us: (decisions[decisions.len() / 2], decisions[decisions.len() * 99 / 100]),
        list_ms: median(lists),
    })
}
