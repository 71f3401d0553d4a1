//! One upstream: its state, its connection and the attempts that run on it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rmcp::RoleClient;
use rmcp::service::Peer;
use tokio::sync::{Notify, broadcast, watch};
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::Attempt;
use toolcrib::tool::Definition;

use super::call::Suspended;
use super::child::Complaints;
use super::connection::Watch;
use super::direct;
use super::ears::{Ears, News};
use super::environment::Filled;
use super::now_ms;
use super::oauth::Pass;
use super::settings::McpSettings;
use super::state::{Phase, State};
use super::tools::{Offered, ToolChange};
use crate::outbound::Outbound;

/// Maximum time a call waits for an upstream that is being connected.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum number of tool changes that are stored for display.
const KEPT_CHANGES: usize = 50;

/// A usable connection.
pub(super) struct Live {
    pub(super) peer: Peer<RoleClient>,
    pub(super) ears: Arc<Ears>,
    pub(super) watch: Watch,
    pub(super) direct: direct::Shared,
    /// `true` if the upstream may send elicitations in the middle of a call over stdio, where
    /// nothing identifies the call.
    pub(super) asks_within: bool,
}

type Key = (CallId, u32);

/// An attempt that can be canceled. Dropping it unregisters the attempt.
pub(super) struct Running {
    upstream: Arc<Upstream>,
    key: Key,
    pub(super) token: CancellationToken,
    /// Latest progress message of the attempt.
    pub(super) said: Mutex<String>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.upstream.running.lock().remove(&self.key);
    }
}

/// One upstream.
pub struct Upstream {
    pub(super) settings: McpSettings,
    pub(super) state: Mutex<State>,
    pub(super) complaints: Complaints,
    pub(super) news: broadcast::Sender<News>,
    pub(super) outbound: Arc<Outbound>,
    /// Source of its tokens, if it may need some.
    pub(super) pass: Option<Arc<Pass>>,
    pub(super) stop: CancellationToken,
    /// Signals that the upstream is to be tried again at once.
    pub(super) again: Notify,
    /// Number of refreshes requested, and below it the number of those completed.
    pub(super) wanted: AtomicU64,
    pub(super) looked: watch::Sender<u64>,
    /// Signals that the connection is to be closed and opened again.
    pub(super) leave: Notify,
    /// Tools that the upstream offers now, accepted or not.
    pub(super) offered: Mutex<Offered>,
    /// Offered tools that the registry rejected, with the reasons. They are not submitted again.
    pub(super) unusable: Mutex<BTreeMap<String, (Definition, String)>>,
    pub(super) suspended: Mutex<HashMap<CallId, Suspended>>,
    live: watch::Sender<Option<Arc<Live>>>,
    running: Mutex<HashMap<Key, CancellationToken>>,
    filled: Mutex<Option<Arc<Filled>>>,
}

impl Upstream {
    pub(super) fn new(
        settings: McpSettings,
        news: broadcast::Sender<News>,
        outbound: Arc<Outbound>,
        pass: Option<Arc<Pass>>,
    ) -> Arc<Self> {
        let phase = if settings.enabled { Phase::Starting } else { Phase::Off };
        Arc::new(Self {
            settings,
            state: Mutex::new(State::new(phase)),
            complaints: Complaints::default(),
            news,
            outbound,
            pass,
            stop: CancellationToken::new(),
            again: Notify::new(),
            wanted: AtomicU64::new(0),
            looked: watch::Sender::new(0),
            leave: Notify::new(),
            offered: Mutex::default(),
            unusable: Mutex::default(),
            suspended: Mutex::default(),
            live: watch::Sender::new(None),
            running: Mutex::default(),
            filled: Mutex::default(),
        })
    }

    pub(super) fn set_live(&self, live: Option<Arc<Live>>) {
        self.live.send_replace(live);
    }

    pub(super) fn set_filled(&self, filled: Arc<Filled>) {
        *self.filled.lock() = Some(filled);
    }

    /// Redacts the secrets of the settings and the tokens from a text.
    pub(super) fn clean(&self, text: &str) -> String {
        let text = match &*self.filled.lock() {
            Some(filled) => filled.clean(text),
            None => text.to_owned(),
        };
        self.pass.as_ref().map_or(text.clone(), |pass| pass.clean(&text))
    }

    /// Returns the connection, if there is one.
    pub(super) fn connected(&self) -> Option<Arc<Live>> {
        self.live.borrow().clone().filter(|live| !live.peer.is_transport_closed())
    }

    /// Waits until the upstream is known to be available or unavailable.
    pub(super) async fn begun(&self) {
        let mut seen = self.live.subscribe();
        while self.state.lock().phase == Phase::Starting {
            if seen.changed().await.is_err() {
                return;
            }
        }
    }

    /// Requests a reconnection or a refresh, and waits until it is done.
    pub(super) async fn look_again(&self) {
        if !self.settings.enabled {
            return;
        }
        let number = self.wanted.fetch_add(1, Ordering::AcqRel) + 1;
        self.again.notify_one();
        let mut looked = self.looked.subscribe();
        tokio::select! {
            _ = looked.wait_for(|looked| *looked >= number) => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Waits for the connection and returns it.
    ///
    /// # Errors
    /// Returns a fault when the upstream is known to be unavailable, or the wait times out or is
    /// canceled.
    pub(super) async fn live(
        &self,
        deadline_ms: u64,
        token: &CancellationToken,
    ) -> Result<Arc<Live>, Fault> {
        if let Some(live) = self.connected() {
            return Ok(live);
        }
        let left = Duration::from_millis(deadline_ms.saturating_sub(now_ms()));
        let mut seen = self.live.subscribe();
        let waiting = async {
            loop {
                let found = seen.borrow_and_update().clone();
                if let Some(live) = found.filter(|live| !live.peer.is_transport_closed()) {
                    return Some(live);
                }
                // Do not wait for an unavailable upstream, unless its next attempt is due soon.
                if self.state.lock().is_away() {
                    return None;
                }
                if seen.changed().await.is_err() {
                    return None;
                }
            }
        };
        tokio::select! {
            found = waiting => found.ok_or_else(|| self.away()),
            () = tokio::time::sleep(left.min(PATIENCE)) => Err(self.away()),
            () = self.stop.cancelled() => Err(self.away()),
            () = token.cancelled() => Err(Fault::new(Code::Canceled, "canceled")),
        }
    }

    /// Returns the fault that says why the upstream cannot be used now.
    pub(super) fn away(&self) -> Fault {
        let name = &self.settings.name;
        let state = self.state.lock();
        let why = match (&state.problem, state.phase) {
            (Some(problem), _) => problem.clone(),
            (None, Phase::Off) => "it is switched off".to_owned(),
            (None, _) => "it has not answered yet".to_owned(),
        };
        let message = format!("the MCP server {name} is not there: {why}");
        let shut = matches!(state.phase, Phase::Off | Phase::NeedsSignIn);
        Fault::unreachable(message).retryable(!shut)
    }

    /// Returns the upstream's own name for one of its registered tools.
    pub(super) fn their_name(&self, tool: &str) -> Result<String, Fault> {
        let found = self.offered.lock().names.get(tool).cloned();
        found.ok_or_else(|| {
            let name = &self.settings.name;
            let message = format!("the MCP server {name} does not offer {tool} any more");
            Fault::new(Code::ToolNotFound, message).not_happened()
        })
    }

    /// Returns `true` if arguments of the tool are repeated in HTTP headers.
    pub(super) fn is_mirrored(&self, tool: &str) -> bool {
        self.offered.lock().mirrored.contains(tool)
    }

    /// Refuses a tool of a pinned upstream whose definition is not the accepted one.
    pub(super) fn check_pin(&self, tool: &str) -> Result<(), Fault> {
        if !self.settings.pin {
            return Ok(());
        }
        let state = self.state.lock();
        let Some(pending) = state.pending.iter().find(|pending| pending.tool == tool) else {
            return Ok(());
        };
        let name = &self.settings.name;
        let what = match pending.fields.as_slice() {
            [] => pending.change.to_owned(),
            fields => format!("{} ({})", pending.change, fields.join(", ")),
        };
        let message = format!(
            "{tool} is not what was accepted: the MCP server {name} is pinned, and the tool was \
             {what}; an operator can accept it (toolcrib mcp accept {name})"
        );
        Err(Fault::new(Code::Conflict, message).not_happened().retryable(false))
    }

    pub(super) fn begin(self: &Arc<Self>, attempt: &Attempt) -> Running {
        let (token, key) = (CancellationToken::new(), (attempt.call_id.clone(), attempt.number));
        self.running.lock().insert(key.clone(), token.clone());
        Running { upstream: self.clone(), key, token, said: Mutex::default() }
    }

    /// Cancels an attempt, and the suspended request that waits for an answer.
    pub(super) fn cancel(&self, call_id: &CallId, attempt: u32) {
        if let Some(token) = self.running.lock().get(&(call_id.clone(), attempt)) {
            token.cancel();
        }
        self.abandon(call_id);
    }

    /// Records that an attempt is over for the engine. For an attempt that sent an elicitation the
    /// second report means that its call has ended, so no answer will come and the request is
    /// abandoned.
    pub(super) fn settled(&self, call_id: &CallId, attempt: u32) {
        let over = {
            let mut suspended = self.suspended.lock();
            match suspended.get_mut(call_id).filter(|known| known.attempt == attempt) {
                Some(known) => std::mem::replace(&mut known.settled, true),
                None => false,
            }
        };
        if over {
            self.abandon(call_id);
        }
    }

    fn abandon(&self, call_id: &CallId) {
        if let Some(suspended) = self.suspended.lock().remove(call_id) {
            tokio::spawn(suspended.abandon());
        }
    }

    /// Keeps a request that waits for an answer, until its call's deadline at the latest.
    pub(super) fn suspend(self: &Arc<Self>, attempt: &Attempt, suspended: Suspended) {
        let (call_id, number) = (attempt.call_id.clone(), attempt.number);
        self.suspended.lock().insert(call_id.clone(), suspended);
        let left = Duration::from_millis(attempt.deadline_ms.saturating_sub(now_ms()));
        let upstream = Arc::downgrade(self);
        tokio::spawn(async move {
            tokio::time::sleep(left).await;
            let Some(upstream) = upstream.upgrade() else { return };
            let same = |known: &Suspended| known.attempt == number;
            let still = upstream.suspended.lock().get(&call_id).is_some_and(same);
            if still {
                upstream.abandon(&call_id);
            }
        });
    }

    pub(super) fn note_changes(&self, changes: Vec<ToolChange>) {
        let mut state = self.state.lock();
        let kept: &mut VecDeque<ToolChange> = &mut state.changes;
        kept.extend(changes);
        let over = kept.len().saturating_sub(KEPT_CHANGES);
        kept.drain(..over);
    }
}
