//! The state of an upstream, and the status that the API shows of it.

use std::collections::VecDeque;

use serde::Serialize;

use crate::mcp::now_ms;
use crate::mcp::oauth::AuthorizationStatus;
use crate::mcp::offered_tools::ToolChange;
use crate::mcp::settings::McpServerSettings;

/// Calls wait for an upstream whose next connection attempt is due within this time.
const IMMINENT_CONNECT_MS: u64 = 1_500;

/// The phase of an upstream's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UpstreamPhase {
    /// Toolcrib is connecting to it.
    Starting,
    /// Its tools can be called.
    Ready,
    /// It is unavailable, and Toolcrib will try again.
    Waiting,
    /// A person must sign in before it can be used.
    NeedsSignIn,
    /// Its settings disable it.
    Off,
}

impl UpstreamPhase {
    /// All phases.
    pub const ALL: [Self; 5] =
        [Self::Starting, Self::Ready, Self::Waiting, Self::NeedsSignIn, Self::Off];

    /// Returns the phase as written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Waiting => "waiting",
            Self::NeedsSignIn => "needs_sign_in",
            Self::Off => "off",
        }
    }
}

/// The state of an upstream.
#[derive(Debug, Clone)]
pub struct UpstreamState {
    pub phase: UpstreamPhase,
    pub since_ms: u64,
    /// The current problem, or the one found by the last refresh.
    pub problem: Option<String>,
    /// Number of reconnections.
    pub restarts: u64,
    pub next_try_ms: Option<u64>,
    pub process: Option<u32>,
    pub protocol: Option<String>,
    pub server: Option<(String, String)>,
    pub tools: usize,
    pub skipped: Vec<(String, String)>,
    pub flagged: Vec<String>,
    /// Changes of a pinned upstream that are not accepted yet.
    pub pending: Vec<ToolChange>,
    /// Recent tool changes, the newest last.
    pub changes: VecDeque<ToolChange>,
}

impl UpstreamState {
    pub(super) fn new(phase: UpstreamPhase) -> Self {
        Self {
            phase,
            since_ms: now_ms(),
            problem: None,
            restarts: 0,
            next_try_ms: None,
            process: None,
            protocol: None,
            server: None,
            tools: 0,
            skipped: Vec::new(),
            flagged: Vec::new(),
            pending: Vec::new(),
            changes: VecDeque::new(),
        }
    }

    /// Returns `true` if the upstream is known to be unavailable and no connection attempt is
    /// imminent.
    pub(super) fn is_unavailable(&self) -> bool {
        let soon = self.next_try_ms.is_some_and(|at_ms| at_ms < now_ms() + IMMINENT_CONNECT_MS);
        let is_unavailable = matches!(self.phase, UpstreamPhase::Off | UpstreamPhase::NeedsSignIn);
        is_unavailable || self.phase == UpstreamPhase::Waiting && !soon
    }

    pub(super) fn enter(&mut self, phase: UpstreamPhase) {
        if self.phase != phase {
            self.phase = phase;
            self.since_ms = now_ms();
        }
    }
}

/// The status of an upstream: its settings and its state.
pub struct UpstreamStatus {
    pub settings: McpServerSettings,
    pub state: UpstreamState,
    /// The last lines of a child process's standard error.
    pub stderr: Vec<String>,
    /// Status of its tokens, if it may need some.
    pub authorization: Option<AuthorizationStatus>,
}
