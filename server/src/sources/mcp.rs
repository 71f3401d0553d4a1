//! The source of tools that MCP servers execute: programs that are started here, and servers that
//! are reached over streamable HTTP.
//!
//! Every upstream is kept connected by a task of its own, so that one which is slow, broken or gone
//! is no matter to the others. Their tools are in the directory under `NAME.tool`; what they offer
//! is put there through the [`Ledger`]. Without an upstream nothing of this runs.

mod authorised;
mod call;
mod child;
mod connection;
mod direct;
mod ears;
mod environment;
mod flags;
mod listen;
mod oauth;
mod outcome;
pub mod pages;
mod post;
mod settings;
mod state;
mod supervise;
mod tape;
mod task;
mod tools;
mod upstream;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use metrics::Counter;
use parking_lot::Mutex;
use rmcp::RoleClient;
use rmcp::service::Peer;
use tokio::sync::broadcast;
use tokio_util::task::TaskTracker;
use toolcrib::CallId;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::{Attempt, ProgressSink, Source, Started};
use toolcrib::tool::{Definition, Executor};

pub use ears::News;
pub use oauth::{Algorithm, GrantKind, McpOauth, PassShown, SignIn};
pub use settings::{McpSettings, McpToolSettings, Wrong, of_desktop_clients, shown_url};
pub use state::{Phase, Shown, State};
pub use tools::ToolChange;

use call::Try;
use oauth::{Base, Pass};
use upstream::Upstream;

use crate::outbound::Outbound;

/// How long an upstream may take to hear that a call is not wanted any more.
const TELLING: Duration = Duration::from_secs(2);

/// Changes beside tools that may wait to be heard.
const NEWS: usize = 256;

/// Where what upstreams offer is written down.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// What was accepted of an upstream, by name.
    fn known(&self, project: &str, upstream: &str) -> BTreeMap<String, Definition>;

    /// Sets what it offers. Answers with what could not be taken, and why.
    async fn keep(
        &self,
        project: &str,
        upstream: &str,
        tools: Vec<Definition>,
        why: &str,
    ) -> Result<Vec<(String, String)>, String>;

    /// What an upstream's issuer has granted, if anything.
    async fn grant(&self, project: &str, upstream: &str) -> Result<Option<String>, String>;

    /// Keeps what it has granted, or forgets it.
    async fn keep_grant(
        &self,
        project: &str,
        upstream: &str,
        grant: Option<String>,
    ) -> Result<(), String>;

    /// How long a call has where nobody says otherwise.
    fn default_timeout_ms(&self, project: &str) -> u64;
}

type Place = (String, String);

/// Every upstream.
pub struct Upstreams {
    known: Mutex<HashMap<Place, Arc<Upstream>>>,
    ledger: OnceLock<Arc<dyn Ledger>>,
    news: broadcast::Sender<(Place, News)>,
    tasks: TaskTracker,
    outbound: Arc<Outbound>,
    base: Base,
}

impl Upstreams {
    /// None yet. Those that a key has named may only be where these rules say.
    /// A person's browser reaches us at this address.
    pub fn new(outbound: Outbound, base: String) -> Self {
        let (known, ledger) = Default::default();
        let (news, tasks) = (broadcast::Sender::new(NEWS), TaskTracker::new());
        Self {
            known,
            ledger,
            news,
            tasks,
            outbound: Arc::new(outbound),
            base: Base::new(base.into()),
        }
    }

    /// A person's browser reaches us here.
    pub fn set_base(&self, base: String) {
        *self.base.write() = base;
    }

    /// Where a person's browser reaches us.
    pub fn base(&self) -> String {
        self.base.read().clone()
    }

    /// From now on, what is offered is written down here. Once.
    pub fn open(&self, ledger: Arc<dyn Ledger>) {
        let _ = self.ledger.set(ledger);
    }

    /// These are wanted, and no others: what is new is connected to, what is gone is ended, what
    /// has other settings is begun again.
    pub fn set(&self, wanted: Vec<McpSettings>) {
        let Some(ledger) = self.ledger.get() else { return };
        let mut known = self.known.lock();
        let mut next: HashMap<Place, McpSettings> = HashMap::new();
        for settings in wanted {
            next.insert((settings.project.clone(), settings.name.clone()), settings);
        }
        known.retain(|place, upstream| {
            let stays = next.get(place).is_some_and(|settings| *settings == upstream.settings);
            if !stays {
                upstream.stop.cancel();
            }
            stays
        });
        for (place, settings) in next {
            if known.contains_key(&place) {
                continue;
            }
            let news = broadcast::Sender::new(NEWS);
            let heard = news.subscribe();
            let outbound = &self.outbound;
            let pass = Pass::of(&settings, ledger, outbound, &self.base);
            let upstream = Upstream::new(settings, news, outbound.clone(), pass);
            self.tasks.spawn(pass_on(place.clone(), heard, self.news.clone()));
            self.tasks.spawn(upstream.clone().supervise(ledger.clone()));
            known.insert(place, upstream);
        }
    }

    /// Ends all of them, and waits until nothing of them is left.
    pub async fn close(&self) {
        self.known.lock().drain().for_each(|(_, upstream)| upstream.stop.cancel());
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn find(&self, project: &str, name: &str) -> Option<Arc<Upstream>> {
        self.known.lock().get(&(project.to_owned(), name.to_owned())).cloned()
    }

    fn of_tool(&self, project: &str, tool: &str) -> Option<Arc<Upstream>> {
        self.find(project, tool.split_once('.')?.0)
    }

    /// How the upstreams of a project are, by name.
    pub fn shown(&self, project: &str) -> Vec<Shown> {
        let known = self.known.lock();
        let here = known.iter().filter(|((owner, _), _)| owner == project);
        let mut all: Vec<Shown> = here.map(|(_, upstream)| shown(upstream)).collect();
        all.sort_by(|a, b| a.settings.name.cmp(&b.settings.name));
        all
    }

    /// Whether there is one of this name.
    pub fn has(&self, project: &str, name: &str) -> bool {
        self.find(project, name).is_some()
    }

    /// How many are in each state, over all projects.
    pub fn counted(&self) -> [(&'static str, usize); 5] {
        let known = self.known.lock();
        let phases: Vec<Phase> = known.values().map(|known| known.state.lock().phase).collect();
        Phase::ALL
            .map(|phase| (phase.as_str(), phases.iter().filter(|known| **known == phase).count()))
    }

    /// How one of them is.
    pub fn one(&self, project: &str, name: &str) -> Option<Shown> {
        self.find(project, name).map(|upstream| shown(&upstream))
    }

    /// Accepts what one offers now: these tools, or all.
    pub async fn accept(
        &self,
        project: &str,
        name: &str,
        wanted: Option<&[String]>,
    ) -> Result<Vec<ToolChange>, String> {
        let (Some(upstream), Some(ledger)) = (self.find(project, name), self.ledger.get()) else {
            return Ok(Vec::new());
        };
        upstream.accept(&**ledger, wanted).await
    }

    /// Tries one again at once, or looks at what it offers, and waits until that is known, or the
    /// time is over.
    pub async fn look_again(&self, project: &str, name: &str, until: tokio::time::Instant) {
        if let Some(upstream) = self.find(project, name) {
            let _ = tokio::time::timeout_at(until, upstream.look_again()).await;
        }
    }

    /// Waits until one is known to be there or not, or the time is over.
    pub async fn known_by(&self, project: &str, name: &str, until: tokio::time::Instant) {
        if let Some(upstream) = self.find(project, name) {
            let _ = tokio::time::timeout_at(until, upstream.begun()).await;
        }
    }

    /// Begins a sign-in of a person.
    pub async fn sign_in(&self, project: &str, name: &str) -> Result<(), String> {
        let upstream = self.find(project, name);
        let pass = upstream.as_ref().and_then(|upstream| upstream.pass.as_ref());
        let pass = pass.ok_or_else(|| "it is not signed in to: it takes no tokens".to_owned())?;
        pass.sign_in_anew().await
    }

    /// Forgets its tokens, and tries it without.
    pub async fn sign_out(&self, project: &str, name: &str) -> Result<(), String> {
        let Some(upstream) = self.find(project, name) else { return Ok(()) };
        if let Some(pass) = &upstream.pass {
            pass.sign_out().await?;
        }
        upstream.leave.notify_one();
        Ok(())
    }

    /// A browser has come back from an issuer. Gives the name of the upstream it was for; none
    /// where nobody waits for it.
    pub async fn signed_in(
        &self,
        state: &str,
        code: Result<&str, &str>,
        issuer: Option<&str>,
    ) -> Option<(String, Result<(), String>)> {
        let waits = |upstream: &&Arc<Upstream>| {
            upstream.pass.as_ref().is_some_and(|pass| pass.expects(state))
        };
        let upstream = self.known.lock().values().find(waits).cloned()?;
        let (pass, name) = (upstream.pass.as_ref()?, upstream.settings.name.clone());
        let finished = match code {
            Ok(code) => pass.finish(state, code, issuer).await,
            Err(why) => {
                pass.declined(state, why).await;
                Err(why.to_owned())
            }
        };
        upstream.again.notify_one();
        Some((name, finished))
    }

    /// The connections of a project that can be used, by the names of their upstreams.
    pub fn peers(&self, project: &str) -> BTreeMap<String, Peer<RoleClient>> {
        let known = self.known.lock();
        let here = known.iter().filter(|((owner, _), _)| owner == project);
        let peers = here.filter_map(|((_, name), upstream)| {
            Some((name.clone(), upstream.connected()?.peer.clone()))
        });
        peers.collect()
    }

    /// A text of one of them, without the values that its settings name.
    pub fn clean(&self, project: &str, name: &str, text: &str) -> String {
        self.find(project, name).map_or_else(|| text.to_owned(), |upstream| upstream.clean(text))
    }

    /// Something is wrong with one that is there, beside its tools.
    pub fn complain(&self, project: &str, name: &str, why: &str) {
        if let Some(upstream) = self.find(project, name) {
            upstream.state.lock().problem.get_or_insert_with(|| why.to_owned());
        }
    }

    /// That is not wrong any more.
    pub fn withdraw(&self, project: &str, name: &str, why: &str) {
        if let Some(upstream) = self.find(project, name) {
            let mut state = upstream.state.lock();
            state.problem = state.problem.take().filter(|known| known != why);
        }
    }

    /// Changes beside tools, each with its project and upstream.
    pub fn changes(&self) -> broadcast::Receiver<(Place, News)> {
        self.news.subscribe()
    }
}

async fn pass_on(
    place: Place,
    mut heard: broadcast::Receiver<News>,
    all: broadcast::Sender<(Place, News)>,
) {
    loop {
        match heard.recv().await {
            Ok(news) => drop(all.send((place.clone(), news))),
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

fn shown(upstream: &Upstream) -> Shown {
    Shown {
        settings: upstream.settings.clone(),
        state: upstream.state.lock().clone(),
        stderr: upstream.complaints.lines(),
        pass: upstream.pass.as_ref().map(|pass| pass.shown()),
    }
}

#[async_trait]
impl Source for Upstreams {
    fn executor(&self) -> Executor {
        Executor::Mcp
    }

    fn list(&self) -> Vec<Definition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, progress: ProgressSink) -> Started {
        let Some(upstream) = self.of_tool(&attempt.project, &attempt.tool) else {
            let message = format!("the MCP server of {} is not there any more", attempt.tool);
            let fault = Fault::new(Code::UpstreamUnavailable, message).not_happened();
            return Started::Done(Err(fault.retryable(false)));
        };
        let running = upstream.begin(&attempt);
        let started = Try { upstream, attempt, progress, running }.run().await;
        CALLS.count(&started);
        started
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.each(|upstream| upstream.cancel(call_id, attempt));
    }

    fn settled(&self, call_id: &CallId, attempt: u32) {
        self.each(|upstream| upstream.settled(call_id, attempt));
    }
}

impl Upstreams {
    /// There are few, and only one of them knows the call.
    fn each(&self, mut act: impl FnMut(&Arc<Upstream>)) {
        self.known.lock().values().for_each(&mut act);
    }
}

/// Attempts, by what came of them.
struct Counted {
    ok: Counter,
    failed: Counter,
    asked: Counter,
    task: Counter,
}

impl Counted {
    fn count(&self, started: &Started) {
        match started {
            Started::Done(Ok(_)) => self.ok.increment(1),
            Started::Asks(_) => self.asked.increment(1),
            Started::GoesOn { .. } => self.task.increment(1),
            _ => self.failed.increment(1),
        }
    }
}

static CALLS: LazyLock<Counted> = LazyLock::new(|| {
    let of = |outcome: &'static str| metrics::counter!("toolcrib_upstream_calls_total", "outcome" => outcome);
    Counted { ok: of("ok"), failed: of("failed"), asked: of("asked"), task: of("task") }
});

/// The time, in milliseconds since 1970.
fn now_ms() -> u64 {
    u64::try_from(jiff::Timestamp::now().as_millisecond()).unwrap_or_default()
}
