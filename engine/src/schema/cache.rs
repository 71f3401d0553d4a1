//! Compiled schemas in memory: made when first needed, and given up when they take too much.
//!
//! A schema stays usable without its compiled form, which is made again at the next use. That keeps
//! the start of a server independent of the number of stored tools, and bounds the memory of all
//! compiled schemas: in all, and for each project, so that one project's schemas never displace
//! those of another that uses less than its share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::{Mutex, RwLock};

use super::project_limiter::ProjectLimiter;
use super::{CompileBudget, CompiledSchema, SchemaError};
use crate::domain::json::Json;

/// Maximum bytes of the compiled schemas of one project.
const PROJECT_BYTES: usize = 64 * 1024 * 1024;
/// Maximum bytes of all compiled schemas of this process.
const PROCESS_BYTES: usize = 256 * 1024 * 1024;
/// Maximum number of threads that compile at the same time; one per project.
const COMPILE_THREADS: usize = 2;

static CACHE: LazyLock<SchemaCache> =
    LazyLock::new(|| SchemaCache::new(PROJECT_BYTES, PROCESS_BYTES));
static LIMITER: LazyLock<ProjectLimiter> =
    LazyLock::new(|| ProjectLimiter::new(COMPILE_THREADS, 1));

/// Runs work that compiles schemas on a thread of its own. A project compiles on one thread at a
/// time, so that its schemas delay no other project's.
pub async fn compile_off_thread<T, F>(project: &str, work: F) -> Result<T, tokio::task::JoinError>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    let permit = LIMITER.acquire(project).await;
    tokio::task::spawn_blocking(move || {
        // Released when the thread ends, not when the caller stops waiting.
        let _permit = permit;
        work()
    })
    .await
}

/// Returns the bytes of all compiled schemas of this process.
pub fn compiled_bytes() -> usize {
    CACHE.state.lock().bytes
}

/// Returns the bytes of the compiled schemas of one project.
#[cfg(test)]
pub(super) fn project_bytes(project: &str) -> usize {
    CACHE.state.lock().projects.get(project).map_or(0, |held| held.bytes)
}

/// A schema with or without its compiled form.
pub(super) struct SchemaSlot {
    id: u64,
    project: String,
    pub(super) source: Json,
    state: RwLock<SlotState>,
    /// Held while the compiled form is made, so that it is made once.
    compiling: Mutex<()>,
    last_used: AtomicU64,
}

enum SlotState {
    Deferred,
    Compiled(Arc<CompiledSchema>),
    Unusable(SchemaError),
}

impl SlotState {
    fn outcome(&self) -> Option<Result<Arc<CompiledSchema>, SchemaError>> {
        match self {
            SlotState::Deferred => None,
            SlotState::Compiled(schema) => Some(Ok(Arc::clone(schema))),
            SlotState::Unusable(error) => Some(Err(error.clone())),
        }
    }
}

impl SchemaSlot {
    /// Creates a slot that is compiled at its first use.
    pub(super) fn deferred(project: &str, source: Json) -> Arc<Self> {
        Self::with_state(project, source, SlotState::Deferred)
    }

    /// Creates a slot with its compiled form.
    pub(super) fn compiled_now(project: &str, source: Json, schema: CompiledSchema) -> Arc<Self> {
        let schema = Arc::new(schema);
        let bytes = schema.bytes;
        let slot = Self::with_state(project, source, SlotState::Compiled(schema));
        CACHE.insert(&slot, bytes);
        slot
    }

    fn with_state(project: &str, source: Json, state: SlotState) -> Arc<Self> {
        let number = CACHE.next_number();
        Arc::new(Self {
            id: number,
            project: project.to_owned(),
            source,
            state: RwLock::new(state),
            compiling: Mutex::new(()),
            last_used: AtomicU64::new(number),
        })
    }

    pub(super) fn project(&self) -> &str {
        &self.project
    }

    /// Returns whether the next use needs no compilation.
    pub(super) fn is_ready(&self) -> bool {
        !matches!(*self.state.read(), SlotState::Deferred)
    }

    /// Returns the compiled form, and makes it if there is none.
    pub(super) fn compiled(self: &Arc<Self>) -> Result<Arc<CompiledSchema>, SchemaError> {
        self.last_used.store(CACHE.next_number(), Ordering::Relaxed);
        if let Some(ready) = self.state.read().outcome() {
            return ready;
        }
        let _once = self.compiling.lock();
        if let Some(ready) = self.state.read().outcome() {
            return ready;
        }
        let source = self.source.to_value();
        // Accepted before, within the budget of its request.
        let made = CompiledSchema::compile(&source, &mut CompileBudget::unlimited());
        let made = made.map(Arc::new);
        *self.state.write() = match &made {
            Ok(schema) => SlotState::Compiled(Arc::clone(schema)),
            Err(error) => SlotState::Unusable(error.clone()),
        };
        if let Ok(schema) = &made {
            CACHE.insert(self, schema.bytes);
        }
        made
    }

    fn give_up_compiled_form(&self) {
        let mut state = self.state.write();
        if matches!(*state, SlotState::Compiled(_)) {
            *state = SlotState::Deferred;
        }
        CACHE.remove(&self.project, self.id);
    }
}

impl Drop for SchemaSlot {
    fn drop(&mut self) {
        CACHE.remove(&self.project, self.id);
    }
}

/// The slots that have a compiled form.
struct SchemaCache {
    state: Mutex<CacheState>,
    numbers: AtomicU64,
    max_project_bytes: usize,
    max_bytes: usize,
}

#[derive(Default)]
struct CacheState {
    bytes: usize,
    projects: HashMap<String, ProjectSchemas>,
}

#[derive(Default)]
struct ProjectSchemas {
    bytes: usize,
    slots: HashMap<u64, (usize, Weak<SchemaSlot>)>,
}

impl SchemaCache {
    fn new(max_project_bytes: usize, max_bytes: usize) -> Self {
        let (state, numbers) = (Mutex::default(), AtomicU64::new(0));
        Self { state, numbers, max_project_bytes, max_bytes }
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn insert(&self, slot: &Arc<SchemaSlot>, bytes: usize) {
        let mut seen = Vec::new();
        {
            let mut state = self.state.lock();
            state.remove(&slot.project, slot.id);
            state.bytes += bytes;
            let project = state.projects.entry(slot.project.clone()).or_default();
            project.bytes += bytes;
            project.slots.insert(slot.id, (bytes, Arc::downgrade(slot)));
            if project.bytes > self.max_project_bytes {
                let target = self.max_project_bytes / 8 * 7;
                state.evict(&slot.project, slot.id, target, &mut seen);
            }
            while state.bytes > self.max_bytes {
                // The project with the most bytes gives up some of its own.
                let largest = state.projects.iter().max_by_key(|(_, held)| held.bytes);
                let Some((name, held)) = largest else { break };
                let (name, target) = (name.clone(), held.bytes / 2);
                let before = state.bytes;
                state.evict(&name, slot.id, target, &mut seen);
                if state.bytes == before {
                    break;
                }
            }
        }
        // Outside the lock: dropping the last reference to a slot takes the lock.
        for (slot, is_evicted) in seen {
            if is_evicted {
                slot.give_up_compiled_form();
            }
        }
    }

    fn remove(&self, project: &str, id: u64) {
        self.state.lock().remove(project, id);
    }
}

impl CacheState {
    fn remove(&mut self, project: &str, id: u64) {
        let Some(held) = self.projects.get_mut(project) else { return };
        let Some((bytes, _)) = held.slots.remove(&id) else { return };
        held.bytes -= bytes;
        self.bytes -= bytes;
        if held.slots.is_empty() {
            self.projects.remove(project);
        }
    }

    /// Evicts the slots of a project that were not used for the longest time, except `spared`.
    /// `seen` gets every slot that was looked at, and whether it is evicted.
    fn evict(
        &mut self,
        project: &str,
        spared: u64,
        target: usize,
        seen: &mut Vec<(Arc<SchemaSlot>, bool)>,
    ) {
        let Some(held) = self.projects.get(project) else { return };
        let mut slots: Vec<_> =
            held.slots.values().filter_map(|(_, slot)| slot.upgrade()).collect();
        slots.sort_by_key(|slot| (slot.last_used.load(Ordering::Relaxed), slot.id));
        for slot in slots {
            let is_over = self.projects.get(project).is_some_and(|held| held.bytes > target);
            let is_evicted = is_over && slot.id != spared;
            if is_evicted {
                self.remove(project, slot.id);
            }
            seen.push((slot, is_evicted));
        }
    }
}
