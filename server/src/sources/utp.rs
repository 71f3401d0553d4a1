//! The source of tools that a tool service executes: commands on JetStream.
//!
//! The call is committed before its attempt is started here, and it is open until its report is
//! in: so the open calls are the outbox of commands, and what a crash kept from being published is
//! started again by the next process. A command waits while the broker is away, until its call has
//! ended. The broker and the tool service both know a command by the call's id, so one that is
//! published twice is executed once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use toolcrib::CallId;
use toolcrib::fault::{Code, Fault};
use toolcrib::source::{Attempt, Health, ProgressSink, Source, Started};
use toolcrib::tool::{Definition, Executor};

use crate::utp::{DEFAULT_VERSION, Link, wire};

/// Commands that are on their way to the broker at once.
const ON_THEIR_WAY: usize = 512;

type Waiting = Arc<Mutex<HashMap<(CallId, u32), CancellationToken>>>;

/// Publishes commands.
pub struct Commands {
    link: Option<Link>,
    waiting: Waiting,
    places: Arc<Semaphore>,
}

impl Commands {
    /// Over this connection; without one, calls wait until their deadline.
    pub fn new(link: Option<Link>) -> Self {
        let places = Arc::new(Semaphore::new(ON_THEIR_WAY));
        Self { link, waiting: Waiting::default(), places }
    }

    fn publish_until_there(&self, attempt: &Attempt, message: Outgoing) {
        let Some(link) = self.link.clone() else { return };
        let place = (attempt.call_id.clone(), attempt.number);
        let over = CancellationToken::new();
        self.waiting.lock().insert(place.clone(), over.clone());
        let (waiting, places) = (self.waiting.clone(), self.places.clone());
        tokio::spawn(async move {
            let publishing = async {
                let mut wait = Duration::from_millis(50);
                loop {
                    link.up().await;
                    let Ok(_place) = places.acquire().await else { return };
                    let Outgoing { subject, headers, payload, id } = message.clone();
                    match link.publish(subject, headers, payload, &id).await {
                        Ok(()) => return,
                        Err(error) => {
                            tracing::debug!(command = id, %error, "will be published again");
                        }
                    }
                    drop(_place);
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(Duration::from_secs(2));
                }
            };
            tokio::select! {
                () = publishing => {}
                () = over.cancelled() => {}
            }
            waiting.lock().remove(&place);
        });
    }

    fn give_up(&self, call_id: &CallId, attempt: u32) {
        if let Some(over) = self.waiting.lock().remove(&(call_id.clone(), attempt)) {
            over.cancel();
        }
    }
}

#[derive(Clone)]
struct Outgoing {
    subject: String,
    headers: async_nats::HeaderMap,
    payload: Vec<u8>,
    id: String,
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
        let Some(command) = &attempt.command else { return Started::Parked };
        let version = self.link.as_ref().map_or(DEFAULT_VERSION, Link::version);
        match wire::command(version, &attempt, command) {
            Ok((subject, headers, payload)) => {
                let id = format!("cmd-{}-{}", attempt.call_id, attempt.number);
                let payload = payload.to_string().into_bytes();
                self.publish_until_there(&attempt, Outgoing { subject, headers, payload, id });
                Started::Parked
            }
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
        let trouble = (!link.is_up()).then(|| {
            format!("NATS does not answer; {waiting} commands wait, everything else works")
        });
        Some(Health { name: "nats", trouble })
    }
}
