//! Supervises one upstream: reconnects with exponential backoff when the connection ends, and
//! fetches the tool list whenever it may have changed.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::FutureExt;
use rmcp::model::ErrorCode;
use rmcp::service::Peer;
use rmcp::{RoleClient, ServiceError};
use toolcrib::tool::Definition;

use super::connection::{Connection, Dialing, never_sent};
use super::ears::Ears;
use super::environment::Filled;
use super::listen::listen;
use super::pages::Listed;
use super::state::Phase;
use super::tape::Tape;
use super::tools::{Offered, ToolChange, changes};
use super::upstream::{Live, Upstream};
use super::{Ledger, now_ms, pages};

/// Bounds of the backoff between connection attempts.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// A connection that lasted this long resets the backoff.
const STEADY: Duration = Duration::from_secs(60);

/// Maximum time for any answer after an upstream failed to return its tool list.
const ANSWERING: Duration = Duration::from_secs(10);

/// Minimum pause between two refreshes, however often the list changes.
const PAUSE: Duration = Duration::from_millis(500);

/// Reasons for which Toolcrib closes a connection.
const SIGNED_OUT: &str = "it was signed out";
const SPOILED: &str = "it asked something that may be of a call which was given up";

impl Upstream {
    /// Runs until `stop` is canceled.
    pub(super) async fn supervise(self: Arc<Self>, ledger: Arc<dyn Ledger>) {
        if !self.settings.enabled {
            return;
        }
        let (mut failures, mut older) = (0_u32, false);
        loop {
            let began = Instant::now();
            let wanted = self.wanted.load(Ordering::Acquire);
            // A panic in Toolcrib must not leave the upstream disconnected for good. Unwinding
            // drops everything the attempt held.
            let tried = AssertUnwindSafe(self.once(&*ledger, older)).catch_unwind().await;
            let (reached, why) = tried.unwrap_or_else(|_| {
                tracing::error!(upstream = self.settings.name, "the supervisor panicked");
                (false, "a fault of Toolcrib's own; the server's log has it".to_owned())
            });
            self.set_live(None);
            if self.stop.is_cancelled() {
                return;
            }
            if self.pass.as_ref().is_some_and(|pass| pass.is_shut()) {
                self.wait_for_a_person(wanted).await;
                if self.stop.is_cancelled() {
                    return;
                }
                (failures, older) = (0, false);
                continue;
            }
            failures = if began.elapsed() > STEADY && reached { 0 } else { failures + 1 };
            // Some servers crash on a request that they do not know: try the legacy handshake next.
            older = !reached && !older && self.settings.command.is_some();
            let name = &self.settings.name;
            let wait =
                (FIRST_WAIT * 2_u32.pow(failures.min(8) - failures.min(1))).min(LONGEST_WAIT);
            tracing::warn!(upstream = name, problem = why, ?wait, "an MCP server is unavailable");
            self.wait_after(why, wait, wanted).await;
            if self.stop.is_cancelled() {
                return;
            }
            self.state.lock().enter(Phase::Starting);
            self.set_live(None);
        }
    }

    /// Waits until a person has signed in. Renews the sign-in link before it expires, so that the
    /// shown link always works.
    async fn wait_for_a_person(&self, wanted: u64) {
        let Some(pass) = &self.pass else { return };
        let name = &self.settings.name;
        tracing::warn!(upstream = name, "an MCP server needs a person to sign in");
        {
            let mut state = self.state.lock();
            state.enter(Phase::NeedsSignIn);
            (state.process, state.next_try_ms) = (None, None);
            let failed = pass.problem().map(|why| format!("{why}; ")).unwrap_or_default();
            state.problem =
                Some(format!("{failed}somebody must sign in: toolcrib mcp sign-in {name}"));
        }
        self.set_live(None);
        self.has_looked(wanted);
        while pass.is_shut() {
            let left =
                pass.sign_in().map_or(0, |wanted| wanted.expires_ms.saturating_sub(now_ms()));
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(left).max(FIRST_WAIT)) => {
                    pass.readdress().await;
                }
                () = self.again.notified() => break,
                () = self.stop.cancelled() => return,
            }
        }
        self.state.lock().enter(Phase::Starting);
        self.set_live(None);
    }

    async fn wait_after(&self, why: String, wait: Duration, wanted: u64) {
        {
            let mut state = self.state.lock();
            state.enter(Phase::Waiting);
            state.restarts += 1;
            metrics::counter!("toolcrib_upstream_restarts_total").increment(1);
            state.process = None;
            state.next_try_ms = Some(now_ms() + wait.as_millis() as u64);
            let last = self.complaints.last();
            state.problem = Some(match last.filter(|_| self.settings.command.is_some()) {
                Some(line) => format!("{why}; it last said: {line}"),
                None => why,
            });
        }
        // Wakes the waiting calls, which then find the upstream unavailable.
        self.set_live(None);
        self.has_looked(wanted);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = self.again.notified() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Connects once and serves the connection until it ends. Returns whether the connection was
    /// established, and why it ended.
    async fn once(&self, ledger: &dyn Ledger, older: bool) -> (bool, String) {
        let filled = match Filled::of(&self.settings) {
            Ok(filled) => Arc::new(filled),
            Err(why) => return (false, why),
        };
        self.set_filled(filled.clone());
        if let Some(pass) = self.pass.as_ref().filter(|pass| !pass.is_shut()) {
            pass.forgive();
        }
        let ears = Ears::new(self.news.clone());
        let dialing = Dialing {
            settings: &self.settings,
            filled,
            complaints: &self.complaints,
            ears,
            outbound: &self.outbound,
            pass: self.pass.clone(),
            older: older || self.settings.older,
            limit: self.patience(),
        };
        // Only connecting may be dropped at any point: an established connection is shut down in
        // order.
        let dialled = tokio::select! {
            dialled = Connection::dial(dialing) => dialled,
            () = self.stop.cancelled() => return (false, "it was removed".to_owned()),
        };
        let mut connection = match dialled {
            Ok(connection) => connection,
            Err(why) => return (false, self.barred().unwrap_or(why)),
        };
        let why = tokio::select! {
            why = self.stay(ledger, &mut connection) => why,
            () = self.stop.cancelled() => "it was removed".to_owned(),
        };
        let why = connection.watch().trouble().or_else(|| self.barred()).unwrap_or(why);
        {
            let mut state = self.state.lock();
            state.enter(Phase::Waiting);
            state.problem = Some(why.clone());
            state.next_try_ms = Some(now_ms() + FIRST_WAIT.as_millis() as u64);
        }
        self.set_live(None);
        connection.end().await;
        (true, why)
    }

    async fn stay(&self, ledger: &dyn Ledger, connection: &mut Connection) -> String {
        let (peer, ears) = (connection.peer.clone(), connection.ears.clone());
        let modern = connection.is_modern();
        let (process, watch) = (connection.process, connection.watch());
        let (direct, tape) = (connection.direct(), connection.tape());
        let mut over = std::pin::pin!(connection.over());
        let mut wanted = self.wanted.load(Ordering::Acquire);
        let first = tokio::select! {
            first = self.refresh(ledger, &peer, &tape) => first,
            why = &mut over => return why,
        };
        if let Err(why) = first {
            return why;
        }
        self.ready(&peer, process);
        let asks_within = !modern && process.is_some();
        let live = Live { peer: peer.clone(), ears: ears.clone(), watch, direct, asks_within };
        self.set_live(Some(Arc::new(live)));
        self.has_looked(wanted);
        let mut listening = std::pin::pin!(listen(&peer, &ears, modern));
        loop {
            tokio::select! {
                why = &mut over => return why,
                () = ears.tools_changed.notified() => {}
                never = &mut listening => match never {},
                // An operator who requests a refresh may have made room for rejected tools.
                () = self.again.notified() => {
                    wanted = self.wanted.load(Ordering::Acquire);
                    self.unusable.lock().clear();
                }
                () = self.leave.notified() => return SIGNED_OUT.to_owned(),
                () = ears.spoiled() => return SPOILED.to_owned(),
            }
            // The end of the connection is noticed even while a refresh takes long.
            let looked = tokio::select! {
                looked = self.look(ledger, &peer, &tape) => looked,
                why = &mut over => return why,
                () = self.leave.notified() => return SIGNED_OUT.to_owned(),
            };
            if let Err(why) = looked {
                return why;
            }
            self.has_looked(wanted);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Marks the refreshes that were requested so far as completed.
    fn has_looked(&self, wanted: u64) {
        self.looked.send_modify(|looked| *looked = wanted.max(*looked));
    }

    /// Refreshes the tool list and records the result. Returns an error if the upstream cannot be
    /// used.
    async fn look(
        &self,
        ledger: &dyn Ledger,
        peer: &Peer<RoleClient>,
        tape: &Tape,
    ) -> Result<(), String> {
        let Err(why) = self.refresh(ledger, peer, tape).await else {
            let problem = self.offered_problem();
            self.state.lock().problem = problem;
            return Ok(());
        };
        self.state.lock().problem = Some(why.clone());
        let shut = self.pass.as_ref().is_some_and(|pass| pass.is_shut());
        match shut || peer.is_transport_closed() || !self.answers(peer).await {
            true => Err(why),
            false => Ok(()),
        }
    }

    /// Returns the authorization problem that makes the upstream unavailable, if there is one.
    fn barred(&self) -> Option<String> {
        self.pass.as_ref().and_then(|pass| pass.problem())
    }

    fn ready(&self, peer: &Peer<RoleClient>, process: Option<u32>) {
        let info = peer.peer_info();
        let problem = self.offered_problem();
        let mut state = self.state.lock();
        state.enter(Phase::Ready);
        state.problem = problem;
        state.next_try_ms = None;
        state.process = process;
        state.protocol = info.as_ref().map(|info| info.protocol_version.to_string());
        state.server = info.and_then(|info| {
            let server = info.server_info.as_ref()?;
            let short = |text: &str| text.chars().take(200).collect::<String>();
            Some((short(&server.name), short(&server.version)))
        });
    }

    /// Returns the problem of an upstream that offers more tools than its limit.
    fn offered_problem(&self) -> Option<String> {
        let offered = self.offered.lock();
        let over = offered.skipped.iter().find(|(_, why)| why.contains("max_tools"));
        over.map(|(_, why)| why.clone())
    }

    /// Returns `true` if the upstream responds. Silence counts as unresponsive.
    async fn answers(&self, peer: &Peer<RoleClient>) -> bool {
        match tokio::time::timeout(self.patience().min(ANSWERING), peer.list_tools(None)).await {
            Ok(Ok(_) | Err(ServiceError::McpError(_))) => true,
            Ok(Err(error)) => !never_sent(&error) && !peer.is_transport_closed(),
            Err(_) => false,
        }
    }

    /// Maximum time for the initial handshake, and for the tool list.
    fn patience(&self) -> Duration {
        Duration::from_millis(self.settings.connect_timeout_ms)
    }

    /// Fetches the offered tools and registers them, or records the changes to be accepted if the
    /// upstream is pinned.
    async fn refresh(
        &self,
        ledger: &dyn Ledger,
        peer: &Peer<RoleClient>,
        tape: &Tape,
    ) -> Result<(), String> {
        peer.clear_response_cache().await;
        let limit = self.patience();
        let listing = tokio::time::timeout(limit, list(peer, tape)).await;
        let list = listing
            .map_err(|_| format!("its list of tools did not come within {limit:?}"))?
            .map_err(|why| self.clean(&why))?;
        let (project, name) = (&self.settings.project, &self.settings.name);
        let (mut readable, mut unreadable) = (Vec::new(), Vec::new());
        for listed in list {
            match listed {
                Listed::Tool(tool) => readable.push(*tool),
                Listed::Unreadable(name, why) => unreadable.push((name, self.clean(&why))),
            }
        }
        let timeout_ms = ledger.default_timeout_ms(project);
        let offered = Offered::of(&self.settings, readable, unreadable, timeout_ms);
        let mut skipped = offered.skipped.clone();
        skipped.extend(self.refused_before(&offered.tools));
        *self.offered.lock() = offered.clone();
        let known = ledger.known(project, name);
        let usable = self.usable(&offered.tools);
        let found = changes(&known, &usable, now_ms());
        if self.settings.pin && !known.is_empty() {
            let mut state = self.state.lock();
            state.pending = found;
            state.tools = known.len();
            (state.flagged, state.skipped) = (offered.flagged, skipped);
            return Ok(());
        }
        skipped.extend(self.take(ledger, &known, usable, found).await?);
        let mut state = self.state.lock();
        (state.flagged, state.skipped) = (offered.flagged, skipped);
        Ok(())
    }

    /// Returns the offered tools without those that the registry has rejected in the same form.
    fn usable(&self, offered: &BTreeMap<String, Definition>) -> BTreeMap<String, Definition> {
        let unusable = self.unusable.lock();
        let same = |name: &str, tool: &Definition| {
            unusable.get(name).is_some_and(|(refused, _)| refused == tool)
        };
        let fine = offered.iter().filter(|(name, tool)| !same(name, tool));
        fine.map(|(name, tool)| (name.clone(), tool.clone())).collect()
    }

    /// Returns the tools that the registry has rejected and that are still offered in the same
    /// form, with the reasons.
    fn refused_before(&self, offered: &BTreeMap<String, Definition>) -> Vec<(String, String)> {
        let unusable = self.unusable.lock();
        let same = unusable.iter().filter(|(name, (tool, _))| offered.get(*name) == Some(tool));
        same.map(|(name, (_, why))| (name.clone(), why.clone())).collect()
    }

    /// Registers these tools. Returns those that the registry rejected, with the reasons.
    async fn take(
        &self,
        ledger: &dyn Ledger,
        known: &BTreeMap<String, Definition>,
        tools: BTreeMap<String, Definition>,
        found: Vec<ToolChange>,
    ) -> Result<Vec<(String, String)>, String> {
        let mut refusals = Vec::new();
        let (project, name) = (&self.settings.project, &self.settings.name);
        if !found.is_empty() || *known != tools {
            let why = in_words(&found);
            let list: Vec<Definition> = tools.values().cloned().collect();
            let refused: HashMap<String, String> =
                ledger.keep(project, name, list, &why).await?.into_iter().collect();
            let mut unusable = self.unusable.lock();
            // A changed definition may be accepted this time.
            unusable.retain(|name, _| !tools.contains_key(name));
            for (tool, why) in refused {
                if let Some(definition) = tools.get(&tool) {
                    unusable.insert(tool.clone(), (definition.clone(), why.clone()));
                }
                refusals.push((tool, why));
            }
            drop(unusable);
            if !known.is_empty() {
                tracing::info!(upstream = name, changes = why, "an MCP server's tools changed");
                self.note_changes(found);
            }
        }
        let mut state = self.state.lock();
        state.tools = tools.len() - tools.keys().filter(|n| self.is_unusable(n)).count();
        state.pending.clear();
        Ok(refusals)
    }

    fn is_unusable(&self, name: &str) -> bool {
        self.unusable.lock().contains_key(name)
    }

    /// Accepts the current definitions of the given tools, or of all. Returns the accepted changes.
    pub(super) async fn accept(
        &self,
        ledger: &dyn Ledger,
        wanted: Option<&[String]>,
    ) -> Result<Vec<ToolChange>, String> {
        let (project, name) = (&self.settings.project, &self.settings.name);
        let known = ledger.known(project, name);
        let offered = self.usable(&self.offered.lock().tools);
        let found = changes(&known, &offered, now_ms());
        let meant = |change: &ToolChange| wanted.is_none_or(|list| list.contains(&change.tool));
        let (accepted, left): (Vec<_>, Vec<_>) = found.into_iter().partition(meant);
        if accepted.is_empty() {
            return Ok(accepted);
        }
        let mut next = known.clone();
        for change in &accepted {
            match offered.get(&change.tool) {
                Some(tool) => drop(next.insert(change.tool.clone(), tool.clone())),
                None => drop(next.remove(&change.tool)),
            }
        }
        let refused = self.take(ledger, &known, next, accepted.clone()).await?;
        let mut state = self.state.lock();
        state.pending = left;
        state.skipped.extend(refused);
        Ok(accepted)
    }
}

fn in_words(found: &[ToolChange]) -> String {
    let shown = found.iter().take(10).map(|change| format!("{} {}", change.tool, change.change));
    let mut words: Vec<String> = shown.collect();
    if found.len() > 10 {
        words.push(format!("and {} more", found.len() - 10));
    }
    words.join(", ")
}

/// Fetches the complete tool list.
async fn list(peer: &Peer<RoleClient>, tape: &Tape) -> Result<Vec<Listed>, String> {
    match pages::tools(peer, tape).await {
        Err(ServiceError::McpError(error)) if error.code == ErrorCode::METHOD_NOT_FOUND => {
            Ok(Vec::new())
        }
        listed => listed.map_err(|error| format!("its list of tools cannot be had: {error}")),
    }
}
