//! The part of the store port for undelivered requests: requests that made a call or a run, and
//! whose requester has received neither a ticket nor a result.
//!
//! A row is written in the commit that creates the call or run, or with the checkpoints of a
//! conversation, and removed a moment after the answer was delivered. After a restart every
//! remaining row belongs to a requester that is gone. `calls/rejoin.rs` uses them.

use async_trait::async_trait;

use super::StoreError;

/// The kind of work that an undelivered request started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// One call of a tool.
    Call,
    /// A run, or the conversation behind a response of OpenAI's API.
    Run,
}

impl RequestKind {
    /// Returns the name used in the store and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Call => "call",
            Self::Run => "run",
        }
    }
}

impl std::str::FromStr for RequestKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Call, Self::Run].into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

/// A request whose answer has not been delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UndeliveredRequest {
    /// Id of the call, run or conversation that the request made; unique.
    pub id: String,
    /// Digest of the caller and of everything that makes a repeated request the same.
    pub digest: String,
    /// Kind of the work behind `id`.
    pub kind: RequestKind,
    /// Id of the project that the work belongs to.
    pub project: String,
    /// Time after which a repeated request does not join the work, in Unix milliseconds.
    pub expires_ms: u64,
}

/// Stores undelivered requests.
#[async_trait]
pub trait UndeliveredRequestStore: Send + Sync {
    /// Stores a request, or replaces the one with this id.
    async fn put_undelivered(&self, request: UndeliveredRequest) -> Result<(), StoreError>;

    /// Returns every request that expires at this time or later, ordered by id.
    async fn list_undelivered(&self, at_ms: u64) -> Result<Vec<UndeliveredRequest>, StoreError>;

    /// Removes the requests with these ids, and those that expire before this time.
    async fn remove_undelivered(
        &self,
        ids: Vec<String>,
        expired_before_ms: u64,
    ) -> Result<(), StoreError>;
}
