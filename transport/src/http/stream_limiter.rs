//! Limits the event streams, WebSockets and long polls that are open, in all and per caller.
//!
//! All of them hold a connection for as long as the client wants. Without a limit below that of
//! connections, one caller's streams could take every connection, and no other request would be
//! answered.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use futures::StreamExt;
use parking_lot::Mutex;
use toolcrib::domain::fault::{Code, Error};

use super::error_response;

/// Time after which a refused client may try again.
const RETRY_AFTER_MS: u64 = 5_000;

/// Gives permits for streams.
#[derive(Debug)]
pub struct StreamLimiter {
    max_streams: usize,
    max_per_caller: usize,
    hasher: RandomState,
    open: Mutex<OpenStreams>,
}

#[derive(Debug, Default)]
struct OpenStreams {
    count: usize,
    by_caller: HashMap<u64, usize>,
}

/// Identifies the caller of a request by its credentials, before they are checked.
#[derive(Debug, Clone, Copy)]
pub struct StreamCaller(u64);

/// Admits the long poll of one request, which its handler requests once it knows that it waits.
#[derive(Debug, Clone)]
pub struct LongPollAdmission {
    limiter: Arc<StreamLimiter>,
    caller: StreamCaller,
}

impl LongPollAdmission {
    /// Creates the admission of a request of this caller.
    pub fn new(limiter: &Arc<StreamLimiter>, caller: StreamCaller) -> Self {
        Self { limiter: Arc::clone(limiter), caller }
    }

    /// Returns a permit to hold during the wait.
    ///
    /// # Errors
    /// The caller, or the server, has as many streams open as it may have.
    pub(crate) fn admit(&self) -> Result<StreamPermit, Error> {
        self.limiter.reserve(self.caller)
    }
}

/// One open stream. Dropping the permit ends it.
#[derive(Debug)]
pub struct StreamPermit {
    limiter: Arc<StreamLimiter>,
    caller: u64,
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        let mut open = self.limiter.open.lock();
        open.count -= 1;
        if let Some(count) = open.by_caller.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                open.by_caller.remove(&self.caller);
            }
        }
        metrics::gauge!("toolcrib_streams_open").set(open.count as f64);
    }
}

impl StreamLimiter {
    /// Creates a limiter of `max_streams` permits, of which one caller holds at most
    /// `max_per_caller`.
    pub fn new(max_streams: usize, max_per_caller: usize) -> Arc<Self> {
        let (hasher, open) = (RandomState::new(), Mutex::default());
        Arc::new(Self { max_streams, max_per_caller, hasher, open })
    }

    /// Returns the caller of a request with these headers.
    pub fn caller(&self, headers: &HeaderMap) -> StreamCaller {
        let credentials = headers.get(AUTHORIZATION);
        StreamCaller(self.hasher.hash_one(credentials.map(|value| value.as_bytes())))
    }

    /// Returns a permit, or the response that refuses the stream.
    pub fn acquire(self: &Arc<Self>, caller: StreamCaller) -> Result<StreamPermit, Box<Response>> {
        self.reserve(caller).map_err(|refused| Box::new(error_response(refused)))
    }

    fn reserve(self: &Arc<Self>, caller: StreamCaller) -> Result<StreamPermit, Error> {
        let mut open = self.open.lock();
        let of_caller = open.by_caller.get(&caller.0).copied().unwrap_or_default();
        if of_caller >= self.max_per_caller {
            let limit = self.max_per_caller;
            let message = format!(
                "you have reached the maximum of {limit} open streams and long polls per caller \
                 (limits.max_streams_per_caller): close some, or share one"
            );
            return Err(refusal(Code::RateLimited, message, "caller"));
        }
        if open.count >= self.max_streams {
            let message = "the server has reached its maximum number of event streams, WebSockets \
                           and long polls (limits.max_streams)";
            return Err(refusal(Code::Overloaded, message.to_owned(), "server"));
        }
        open.count += 1;
        *open.by_caller.entry(caller.0).or_default() += 1;
        metrics::gauge!("toolcrib_streams_open").set(open.count as f64);
        Ok(StreamPermit { limiter: Arc::clone(self), caller: caller.0 })
    }

    /// Returns the response of a request, which holds a permit if it is an event stream that was
    /// opened with GET. The streams of other methods end with the work that the request started.
    pub fn admit(
        self: &Arc<Self>,
        method: &Method,
        caller: StreamCaller,
        answer: Response,
    ) -> Response {
        let content_type = answer.headers().get(CONTENT_TYPE);
        let is_stream = content_type.is_some_and(|t| t.as_bytes().starts_with(b"text/event-str"));
        if method != Method::GET || !is_stream {
            return answer;
        }
        match self.acquire(caller) {
            Ok(permit) => answer.map(|body| {
                Body::from_stream(body.into_data_stream().map(move |data| {
                    let _held = &permit;
                    data
                }))
            }),
            Err(refused) => *refused,
        }
    }
}

fn refusal(code: Code, message: String, scope: &'static str) -> Error {
    metrics::counter!("toolcrib_streams_refused_total", "limit" => scope).increment(1);
    Error::retry_later(code, message, RETRY_AFTER_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(limiter: &StreamLimiter, key: &'static str) -> StreamCaller {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, axum::http::HeaderValue::from_static(key));
        limiter.caller(&headers)
    }

    #[test]
    fn streams_are_limited_per_caller_and_in_all() {
        let limiter = StreamLimiter::new(3, 2);
        let (a, b) = (caller(&limiter, "Bearer a"), caller(&limiter, "Bearer b"));
        let first = limiter.acquire(a).unwrap();
        let second = limiter.acquire(a).unwrap();
        let refused = limiter.acquire(a).unwrap_err();
        assert_eq!(refused.status().as_u16(), 429);
        assert_eq!(refused.headers()["retry-after"], "5");
        let other = limiter.acquire(b).unwrap();
        let refused = limiter.acquire(b).unwrap_err();
        assert_eq!(refused.status().as_u16(), 503);
        assert_eq!(refused.headers()["retry-after"], "5");
        drop((first, second, other));
        assert!(limiter.open.lock().by_caller.is_empty());
        assert!(limiter.acquire(a).is_ok());
    }
}
