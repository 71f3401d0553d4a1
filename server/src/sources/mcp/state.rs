//! How an upstream is, for whoever looks at it.

use std::collections::VecDeque;

use serde::Serialize;

use super::now_ms;
use super::oauth::PassShown;
use super::settings::McpSettings;
use super::tools::ToolChange;

/// One that is tried again within this is waited for.
const SOON_MS: u64 = 1_500;

/// Where an upstream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is being connected to.
    Starting,
    /// Its tools can be called.
    Ready,
    /// It is not there, and will be tried again.
    Waiting,
    /// Somebody must sign in before it can be used.
    NeedsSignIn,
    /// Its settings say that it is not to be used.
    Off,
}

impl Phase {
    /// Every one.
    pub const ALL: [Self; 5] =
        [Self::Starting, Self::Ready, Self::Waiting, Self::NeedsSignIn, Self::Off];

    /// As written on the wire.
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

/// What is known of an upstream.
#[derive(Debug, Clone)]
pub struct State {
    pub phase: Phase,
    pub since_ms: u64,
    /// What is wrong with it, or was when it was last looked at.
    pub problem: Option<String>,
    /// How often it had to be connected to again.
    pub restarts: u64,
    pub next_try_ms: Option<u64>,
    pub process: Option<u32>,
    pub protocol: Option<String>,
    pub server: Option<(String, String)>,
    pub tools: usize,
    pub skipped: Vec<(String, String)>,
    pub flagged: Vec<String>,
    /// Of a pinned one: what is not accepted.
    pub pending: Vec<ToolChange>,
    /// What has changed, the newest last.
    pub changes: VecDeque<ToolChange>,
}

impl State {
    pub(super) fn new(phase: Phase) -> Self {
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

    /// Whether it is known not to be there, and not to be tried within a moment.
    pub(super) fn is_away(&self) -> bool {
        let soon = self.next_try_ms.is_some_and(|at_ms| at_ms < now_ms() + SOON_MS);
        let shut = matches!(self.phase, Phase::Off | Phase::NeedsSignIn);
        shut || self.phase == Phase::Waiting && !soon
    }

    pub(super) fn enter(&mut self, phase: Phase) {
        if self.phase != phase {
            self.phase = phase;
            self.since_ms = now_ms();
        }
    }
}

/// An upstream as it is shown: its settings, and how it is.
pub struct Shown {
    pub settings: McpSettings,
    pub state: State,
    /// The last lines of a program's standard error.
    pub stderr: Vec<String>,
    /// How it stands with its tokens, where it may need some.
    pub pass: Option<PassShown>,
}
