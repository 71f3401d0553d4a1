//! The source of tools that a tool service executes: commands on JetStream.
//!
//! The call is committed before its attempt is started here, and it is open until its report is
//! in: so the open calls are the outbox of commands, and what a crash kept from being published is
//! started again by the next process. A command waits while the broker is away, until its call has
//! ended. The broker and the tool service both know a command by the call's id, so one that is
//! published twice is executed once; what the broker has forgotten by then is looked for before it
//! is published again.

mod post;

use async_trait::async_trait;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_util::sync::{CancellationToken, DropGuard};
use toolcrib::CallId;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::{Attempt, Health, ProgressSink, Source, Started};
use toolcrib::tool::{Definition, Executor};

use crate::utp::{DEFAULT_VERSION, Link};
use post::{Outgoing, Post, Waiting};

/// Publishes commands.
pub struct Commands {
    link: Option<Link>,
    waiting: Waiting,
    line: UnboundedSender<Outgoing>,
    _goes: DropGuard,
}

impl Commands {
    /// Over this connection; without one, calls wait until their deadline.
    pub fn new(link: Option<Link>) -> Self {
        let (waiting, gone) = (Waiting::default(), CancellationToken::new());
        let (line, taken) = unbounded_channel();
        if let Some(link) = link.clone() {
            let (post, gone) = (Post::new(link, waiting.clone()), gone.clone());
            tokio::spawn(async move { gone.run_until_cancelled(post.run(taken)).await });
        }
        Self { link, waiting, line, _goes: gone.drop_guard() }
    }

    fn give_up(&self, call_id: &CallId, attempt: u32) {
        self.waiting.lock().remove(&(call_id.clone(), attempt));
    }
}

#[async_trait]
impl Source for Commands {
    fn executor(&self) -> Executor {
        Executor::Utp
    }

    fn list(&self) -> Vec<Definition> {
        Vec::new()
    }

    async fn start(&self, attempt: Attempt, _progress: ProgressSink) -> Started {
        // What a tool service has taken is with it, and not sent a second time.
        if attempt.again && attempt.taken_by.is_some() {
            return Started::Parked;
        }
        let version = self.link.as_ref().map_or(DEFAULT_VERSION, Link::version);
        match Outgoing::new(version, attempt) {
            Ok(Some(outgoing)) if self.link.is_some() => {
                self.waiting.lock().insert(outgoing.place());
                // Nobody takes it only when the server is going down; the next one does.
                let _ = self.line.send(outgoing);
                Started::Parked
            }
            Ok(_) => Started::Parked,
            Err(why) => {
                let fault = Fault::new(Code::ValidationError, why).not_happened();
                Started::Done(Err(fault))
            }
        }
    }

    fn cancel(&self, call_id: &CallId, attempt: u32) {
        self.give_up(call_id, attempt);
    }

    fn settled(&self, call_id: &CallId, attempt: u32) {
        self.give_up(call_id, attempt);
    }

    fn health(&self) -> Option<Health> {
        let link = self.link.as_ref()?;
        let waiting = self.waiting.lock().len();
        metrics::gauge!("toolcrib_utp_commands_waiting").set(waiting as f64);
        let away =
            || format!("NATS does not answer; {waiting} commands wait, everything else works");
        let down = || "wakeups and events are not published; see the server's log".to_owned();
        let trouble = match (link.is_up(), link.outbox_is_down()) {
            (false, _) => Some(away()),
            (true, true) => Some(down()),
            (true, false) => None,
        };
        Some(Health { name: "nats", trouble })
    }
}
