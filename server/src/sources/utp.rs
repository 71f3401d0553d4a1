//! The source of tools that a tool service executes: publishes commands on JetStream.
//!
//! A call is committed before its attempt starts here, and stays open until its report arrives. The
//! open calls are therefore the outbox of commands: if a crash prevents a publication, the next
//! process starts the attempt again. While the broker is unavailable a command waits, until its
//! call has ended. The broker and the tool service both identify a command by the call's id, so a
//! command published twice is executed once. A command that is older than the broker's duplicate
//! window is searched in the stream before it is published again.

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

/// Publishes commands for tool services.
pub struct Commands {
    link: Option<Link>,
    waiting: Waiting,
    line: UnboundedSender<Outgoing>,
    _goes: DropGuard,
}

impl Commands {
    /// Creates the source for this connection. Without one, calls wait until their deadline.
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
        // A tool service has acknowledged the command and works on it: do not send it again.
        if attempt.again && attempt.taken_by.is_some() {
            return Started::Parked;
        }
        let version = self.link.as_ref().map_or(DEFAULT_VERSION, Link::version);
        match Outgoing::new(version, attempt) {
            Ok(Some(outgoing)) if self.link.is_some() => {
                self.waiting.lock().insert(outgoing.place());
                // Fails only when the server shuts down; the next process publishes the command.
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
