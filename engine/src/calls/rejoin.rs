//! Rejoin: a repeated request joins the work of an earlier one whose answer was not delivered.
//!
//! A client that loses its connection cannot know if its request arrived, and many client libraries
//! send it again by themselves, without an idempotency key. A second execution would repeat a side
//! effect. Toolcrib records every such request as a candidate, identified by a digest of caller and
//! content, until its answer is delivered. While the requester is connected, the candidate is
//! `waiting`: two identical requests that are both waiting make two calls. When a requester
//! disconnects before its answer is delivered, its candidate becomes `gone`, and the next request
//! with the same digest takes it over: it is `waiting` again, for the new requester.
//!
//! Candidates are stored with their work ([`crate::ports::store::undelivered`]), so that they
//! survive a crash: every candidate that a start finds is gone. A delivered one leaves memory at
//! once and the store a moment later, so that no response waits for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::domain::caller::{AuthMethod, Caller};
use crate::domain::fault::Error;
use crate::domain::id::hex;
use crate::ports::core::{Core, from_store_error};
use crate::ports::store::undelivered::{RequestKind, UndeliveredRequest};

/// Minimum number of candidates in memory at which expired ones are removed.
const MIN_SWEEP_SIZE: usize = 1_024;

/// The state of a candidate's requester.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequesterState {
    /// The requester waits for the answer.
    Waiting,
    /// The requester went without an answer, at this time.
    Gone { since_ms: u64 },
}

struct Candidate {
    request: UndeliveredRequest,
    requester: RequesterState,
    /// Number of the delivery to the present requester. A requester that another one replaced may
    /// end later, and does not decide the state of this one.
    delivery: u64,
}

#[derive(Default)]
struct CandidateIndex {
    by_digest: HashMap<String, Vec<Candidate>>,
    /// Digest of each candidate, by its id.
    digests: HashMap<String, String>,
    /// Ids to remove from the store.
    delivered: Vec<String>,
    is_removing: bool,
    /// Number of the latest delivery.
    last_delivery: u64,
    sweep_size: usize,
}

impl CandidateIndex {
    fn candidate(&mut self, id: &str) -> Option<&mut Candidate> {
        let candidates = self.by_digest.get_mut(self.digests.get(id)?)?;
        candidates.iter_mut().find(|candidate| candidate.request.id == id)
    }

    /// Inserts a candidate. Returns the number of the delivery to its requester.
    fn insert(
        &mut self,
        request: UndeliveredRequest,
        requester: RequesterState,
        now_ms: u64,
    ) -> u64 {
        if self.digests.len() >= self.sweep_size.max(MIN_SWEEP_SIZE) {
            self.remove_expired(now_ms);
            self.sweep_size = self.digests.len() * 2;
        }
        self.remove(&request.id);
        self.digests.insert(request.id.clone(), request.digest.clone());
        let candidates = self.by_digest.entry(request.digest.clone()).or_default();
        self.last_delivery += 1;
        candidates.push(Candidate { request, requester, delivery: self.last_delivery });
        self.last_delivery
    }

    /// Gives a candidate a requester that waits. Returns its request and the number of the
    /// delivery.
    fn set_waiting(&mut self, id: &str) -> Option<(UndeliveredRequest, u64)> {
        let delivery = self.last_delivery + 1;
        let candidate = self.candidate(id)?;
        (candidate.requester, candidate.delivery) = (RequesterState::Waiting, delivery);
        let request = candidate.request.clone();
        self.last_delivery = delivery;
        Some((request, delivery))
    }

    fn remove(&mut self, id: &str) -> Option<Candidate> {
        let digest = self.digests.remove(id)?;
        let candidates = self.by_digest.get_mut(&digest)?;
        let index = candidates.iter().position(|candidate| candidate.request.id == id)?;
        let removed = candidates.remove(index);
        if candidates.is_empty() {
            self.by_digest.remove(&digest);
        }
        Some(removed)
    }

    /// Removes the candidates whose requester is gone and that are too old to be joined.
    fn remove_expired(&mut self, now_ms: u64) {
        let is_current = |candidate: &Candidate| {
            candidate.requester == RequesterState::Waiting || candidate.request.expires_ms >= now_ms
        };
        let digests = &mut self.digests;
        self.by_digest.retain(|_, candidates| {
            candidates.retain(|candidate| {
                let keeps = is_current(candidate);
                if !keeps {
                    digests.remove(&candidate.request.id);
                }
                keeps
            });
            !candidates.is_empty()
        });
    }
}

/// The requests whose answers are not delivered yet.
pub struct Rejoin {
    core: Arc<Core>,
    index: Mutex<CandidateIndex>,
}

impl Rejoin {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core, index: Mutex::default() }
    }

    /// Loads the candidates that an earlier process left. Their requesters are gone.
    pub(crate) async fn load(&self) -> Result<(), Error> {
        let now_ms = self.core.now_ms();
        let store = self.core.store.undelivered();
        let listed = store.list_undelivered(now_ms).await.map_err(from_store_error)?;
        let mut index = self.index.lock();
        for request in listed {
            index.insert(request, RequesterState::Gone { since_ms: now_ms }, now_ms);
        }
        Ok(())
    }

    /// Adds a request whose requester waits for the answer. The request is stored already.
    pub(crate) fn add_waiting(self: &Arc<Self>, request: UndeliveredRequest) -> PendingDelivery {
        let (id, kind) = (request.id.clone(), request.kind);
        let now_ms = self.core.now_ms();
        let number = self.index.lock().insert(request, RequesterState::Waiting, now_ms);
        self.new_delivery(id, kind, number)
    }

    /// Takes over the oldest candidate with this digest whose requester is gone.
    pub(crate) fn take_over(self: &Arc<Self>, digest: &str) -> Option<PendingDelivery> {
        let now_ms = self.core.now_ms();
        let mut index = self.index.lock();
        let found = index.by_digest.get(digest)?.iter().find(|candidate| {
            candidate.requester != RequesterState::Waiting && candidate.request.expires_ms >= now_ms
        })?;
        let id = found.request.id.clone();
        let (request, number) = index.set_waiting(&id)?;
        drop(index);
        Some(self.new_delivery(id, request.kind, number))
    }

    /// Takes over the candidate with this id, for a requester that names the call, run or
    /// conversation.
    pub(crate) fn take_over_id(self: &Arc<Self>, id: &str) -> Option<PendingDelivery> {
        let (request, number) = self.index.lock().set_waiting(id)?;
        Some(self.new_delivery(request.id, request.kind, number))
    }

    /// Returns how long the requester of a candidate has been gone, or `None` if it waits or has
    /// its answer.
    fn gone_for_ms(&self, id: &str) -> Option<u64> {
        let now_ms = self.core.now_ms();
        match self.index.lock().candidate(id)?.requester {
            RequesterState::Waiting => None,
            RequesterState::Gone { since_ms } => Some(now_ms.saturating_sub(since_ms)),
        }
    }

    /// Waits this long for a repeated request to take over the work of a requester that is gone.
    /// Returns true if none did; false also if the engine shuts down.
    pub(crate) async fn wait_for_requester(&self, id: &str, grace_ms: u64) -> bool {
        let mut remaining_ms = grace_ms;
        loop {
            let until_ms = self.core.now_ms().saturating_add(remaining_ms);
            tokio::select! {
                () = self.core.clock.sleep_until(until_ms) => {}
                () = self.core.shutdown.cancelled() => return false,
            }
            match self.gone_for_ms(id) {
                None => return false,
                Some(gone_ms) if gone_ms >= grace_ms => return true,
                // A requester that came back and went again has the whole time once more.
                Some(gone_ms) => remaining_ms = grace_ms - gone_ms,
            }
        }
    }

    fn new_delivery(
        self: &Arc<Self>,
        id: String,
        kind: RequestKind,
        number: u64,
    ) -> PendingDelivery {
        let progress = AtomicU8::new(DeliveryProgress::Pending as u8);
        let rejoin = self.clone();
        PendingDelivery(Arc::new(DeliveryGuard { rejoin, id, kind, number, progress }))
    }

    /// Removes a candidate, whose row leaves the store a moment later.
    fn remove(self: &Arc<Self>, id: &str) {
        let mut index = self.index.lock();
        if index.remove(id).is_some() {
            self.schedule_removal(&mut index, id);
        }
    }

    fn schedule_removal(self: &Arc<Self>, index: &mut CandidateIndex, id: &str) {
        index.delivered.push(id.to_owned());
        // Without a runtime the process is exiting.
        if index.is_removing || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        index.is_removing = true;
        self.core.tasks.spawn(self.clone().remove_delivered());
    }

    /// Removes delivered requests from the store, those of one commit of the store together. The
    /// store commits in order, so the removal is part of the next commit that a caller waits for.
    async fn remove_delivered(self: Arc<Self>) {
        loop {
            let ids = {
                let mut index = self.index.lock();
                index.is_removing = !index.delivered.is_empty();
                std::mem::take(&mut index.delivered)
            };
            if ids.is_empty() {
                return;
            }
            let store = self.core.store.undelivered();
            if let Err(error) = store.remove_undelivered(ids, self.core.now_ms()).await {
                tracing::warn!(%error, "delivered requests could not be removed from the store");
            }
        }
    }

    /// Records that the requester of a delivery is gone, unless another requester waits meanwhile.
    fn mark_gone(&self, id: &str, number: u64) {
        let now_ms = self.core.now_ms();
        if let Some(candidate) = self.index.lock().candidate(id)
            && candidate.delivery == number
            && candidate.requester == RequesterState::Waiting
        {
            candidate.requester = RequesterState::Gone { since_ms: now_ms };
        }
    }
}

/// The progress of an answer to its requester.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeliveryProgress {
    Pending,
    /// The answer is written to the connection, and the connection may still break.
    Written,
    Delivered,
}

/// The answer that a requester waits for. Dropped without [`mark_delivered`], it means that the
/// requester is gone: a repeated request joins the work. All clones are one delivery.
///
/// [`mark_delivered`]: PendingDelivery::mark_delivered
#[derive(Clone)]
pub struct PendingDelivery(Arc<DeliveryGuard>);

struct DeliveryGuard {
    rejoin: Arc<Rejoin>,
    id: String,
    kind: RequestKind,
    number: u64,
    progress: AtomicU8,
}

impl PendingDelivery {
    /// Returns the id of the call, run or conversation that the answer is about.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Records that the answer was written to the connection. A later start does not take the
    /// requester for gone; this process does if the delivery is dropped.
    pub fn mark_written(&self) {
        let guard = &self.0;
        let (pending, written) = (DeliveryProgress::Pending as u8, DeliveryProgress::Written as u8);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        if guard.progress.compare_exchange(pending, written, order.0, order.1).is_ok() {
            guard.rejoin.schedule_removal(&mut guard.rejoin.index.lock(), &guard.id);
        }
    }

    /// Records that the requester has the answer: no repeated request joins the work.
    pub fn mark_delivered(&self) {
        let guard = &self.0;
        let delivered = DeliveryProgress::Delivered as u8;
        if guard.progress.swap(delivered, Ordering::AcqRel) != delivered {
            guard.rejoin.remove(&guard.id);
        }
    }

    /// Records that the requester is gone without the answer, although the work that holds this
    /// delivery continues: a repeated request joins it from now on.
    pub fn mark_gone(&self) {
        let guard = &self.0;
        if guard.progress.load(Ordering::Acquire) != DeliveryProgress::Delivered as u8 {
            guard.rejoin.mark_gone(&guard.id, guard.number);
        }
    }

    /// Counts a request that joined the work.
    pub fn record_join(&self) {
        let kind = self.0.kind.as_str();
        tracing::info!(id = self.0.id, kind, "a repeated request joined earlier work");
        metrics::counter!("toolcrib_rejoined_total", "kind" => kind).increment(1);
    }
}

impl std::fmt::Debug for PendingDelivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("PendingDelivery").field(&self.0.id).finish()
    }
}

impl Drop for DeliveryGuard {
    fn drop(&mut self) {
        if *self.progress.get_mut() != DeliveryProgress::Delivered as u8 {
            self.rejoin.mark_gone(&self.id, self.number);
        }
    }
}

/// Computes the digest of a request. Equal parts of one caller have equal digests.
pub(crate) fn request_digest(caller: &Caller, kind: &str, parts: &[&str]) -> String {
    let method = match caller.auth_method {
        AuthMethod::Key => "key",
        AuthMethod::Local => "local",
        AuthMethod::Anonymous => "anonymous",
    };
    let roles = caller.roles.to_string();
    let owner = caller.owner_name();
    let identity = [&caller.project, &owner, roles.as_str(), method, kind];
    let mut hash = Sha256::new();
    for part in identity.iter().copied().chain(parts.iter().copied()) {
        // The length keeps the parts apart.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}
