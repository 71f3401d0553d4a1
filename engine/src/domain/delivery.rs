//! The durable state of a webhook that reports the end of a call, and the meaning of a receiver's
//! response. Pure.
//!
//! A call with a callback URL has one delivery. It waits until the call has ended (the commit that
//! ends the call makes it due); then Toolcrib attempts it until the receiver accepts it, the
//! receiver declines it, or the retry schedule is exhausted. The rules are those of Standard
//! Webhooks: 2xx is success; 410 ends every delivery requested for this URL so far; every other
//! response is retried.

use std::str::FromStr;

use crate::domain::call::Call;
use crate::domain::id::CallId;
use crate::domain::retry::seeded_fraction;

/// Maximum number of stored attempts per delivery; the oldest are dropped first.
pub const MAX_STORED_ATTEMPTS: u32 = 100;

/// Maximum delay of a retry that a receiver may request.
const MAX_RETRY_AFTER_MS: u64 = 86_400_000;

/// Status of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeliveryStatus {
    /// The call has not ended.
    AwaitingOutcome,
    /// Due for its first attempt or for a retry.
    Pending,
    /// The receiver responded with 2xx.
    Delivered,
    /// The receiver responded with 410 to this delivery or to another for the same URL.
    Gone,
    /// Every retry of the schedule failed.
    Exhausted,
}

impl DeliveryStatus {
    /// Every status.
    pub const ALL: [Self; 5] =
        [Self::AwaitingOutcome, Self::Pending, Self::Delivered, Self::Gone, Self::Exhausted];

    /// Returns the status as stored and as written on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AwaitingOutcome => "waiting",
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::Gone => "gone",
            Self::Exhausted => "exhausted",
        }
    }
}

impl FromStr for DeliveryStatus {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|status| status.as_str() == text).ok_or(())
    }
}

/// The webhook delivery of one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Delivery {
    /// Id of the call's project.
    pub project: String,
    /// The call that it reports. A call has at most one delivery.
    pub call_id: CallId,
    /// Webhook URL from the call's request.
    pub url: String,
    /// Current status.
    pub status: DeliveryStatus,
    /// Time of the next attempt; set exactly while pending.
    pub due_ms: Option<u64>,
    /// Number of attempts so far.
    pub attempts: u32,
    /// Failed attempts since the delivery became due or was requested again: the position in the
    /// schedule.
    pub failures: u32,
    /// Error of the last attempt, if it failed.
    pub last_error: Option<String>,
    /// Counts the saved states, from 1.
    pub version: u64,
}

/// One attempt, as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryAttempt {
    /// Counts from 1.
    pub number: u32,
    /// Time when the attempt started, in Unix milliseconds.
    pub at_ms: u64,
    /// Time from the start of the attempt to its result, in milliseconds.
    pub duration_ms: u64,
    /// The receiver's HTTP status, if it responded.
    pub status_code: Option<u16>,
    /// The reason why the attempt does not count as delivered.
    pub error: Option<String>,
}

/// The result of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryResponse {
    /// The receiver's HTTP status, or the reason why there is none.
    pub result: Result<u16, String>,
    /// The delay that the receiver requested with `Retry-After`.
    pub retry_after_ms: Option<u64>,
}

impl DeliveryResponse {
    /// Returns true if the receiver is overloaded, so that other deliveries to it should wait too.
    pub fn is_receiver_overloaded(&self) -> bool {
        matches!(self.result, Ok(429 | 502 | 503 | 504))
    }

    fn error_message(&self) -> Option<String> {
        match &self.result {
            Ok(200..=299) => None,
            Ok(410) => Some("the receiver returned 410 Gone".to_owned()),
            Ok(code @ 300..=399) => {
                Some(format!("answered {code}: redirects are not followed, give the final URL"))
            }
            Ok(code) => Some(format!("answered {code}")),
            Err(reason) => Some(reason.clone()),
        }
    }
}

/// Retry schedule of a delivery.
#[derive(Debug, Clone, PartialEq)]
pub struct RetrySchedule {
    /// The delay after the first failure, after the second, and so on; no retry follows the last.
    pub retry_ms: Vec<u64>,
    /// Maximum random extension of a delay, as a fraction from 0 to 1 of its length.
    pub jitter: f64,
}

impl Default for RetrySchedule {
    /// The schedule of the specification: ten attempts over about three days.
    fn default() -> Self {
        const HOUR_MS: u64 = 3_600_000;
        let hours = [2, 5, 10, 14, 20, 24].map(|hours| hours * HOUR_MS);
        let retry_ms = [5_000, 300_000, 1_800_000].into_iter().chain(hours).collect();
        Self { retry_ms, jitter: 0.2 }
    }
}

impl RetrySchedule {
    fn wait_ms(&self, failures: u32, seed: &str) -> Option<u64> {
        let wait_ms = *self.retry_ms.get(failures.checked_sub(1)? as usize)?;
        let more = wait_ms as f64 * self.jitter * seeded_fraction(seed, failures);
        Some(wait_ms + more.round() as u64)
    }
}

impl Delivery {
    /// Returns the delivery that a new call requests, if any.
    pub fn for_call(call: &Call) -> Option<Self> {
        let url = call.origin.callback_url.clone()?;
        let status = match call.completed_ms {
            Some(_) => DeliveryStatus::Pending,
            None => DeliveryStatus::AwaitingOutcome,
        };
        Some(Self {
            project: call.project.clone(),
            call_id: call.id.clone(),
            url,
            status,
            due_ms: call.completed_ms,
            attempts: 0,
            failures: 0,
            last_error: None,
            version: 1,
        })
    }

    /// Returns the message id: the same in every attempt, so that a receiver detects duplicates.
    pub fn message_id(&self) -> String {
        let body = self.call_id.as_str().trim_start_matches(CallId::PREFIX);
        format!("msg_{body}")
    }

    /// Returns the receiver: scheme, host and port of the URL.
    pub fn receiver(&self) -> &str {
        let begin = self.url.find("://").map_or(0, |at| at + 3);
        let end = self.url[begin..].find(['/', '?', '#']).map_or(self.url.len(), |at| begin + at);
        &self.url[..end]
    }

    /// Returns the next state after the call has ended, or `None` if it does not wait for that.
    pub fn after_call_ended(&self, at_ms: u64) -> Option<Self> {
        let waits = self.status == DeliveryStatus::AwaitingOutcome;
        waits.then(|| Self {
            status: DeliveryStatus::Pending,
            due_ms: Some(at_ms),
            version: self.version + 1,
            ..self.clone()
        })
    }

    /// Returns the next state after an attempt, and the record of the attempt.
    pub fn after_attempt(
        &self,
        answer: &DeliveryResponse,
        (at_ms, now_ms): (u64, u64),
        schedule: &RetrySchedule,
    ) -> (Self, DeliveryAttempt) {
        let (mut next, tried) = self.with_attempt_recorded(answer, (at_ms, now_ms));
        next.due_ms = None;
        match (&answer.result, &tried.error) {
            (_, None) => {
                next.status = DeliveryStatus::Delivered;
                next.failures = 0;
            }
            (Ok(410), _) => next.status = DeliveryStatus::Gone,
            _ => match schedule.wait_ms(next.failures, self.call_id.as_str()) {
                Some(wait_ms) => {
                    let put_off_ms = answer.retry_after_ms.unwrap_or(0).min(MAX_RETRY_AFTER_MS);
                    next.due_ms = Some(now_ms + wait_ms.max(put_off_ms));
                }
                None => next.status = DeliveryStatus::Exhausted,
            },
        }
        (next, tried)
    }

    /// Records an attempt without changing the schedule. Used for an attempt that started before a
    /// redelivery was requested: the requested attempt is still due.
    pub fn with_attempt_recorded(
        &self,
        answer: &DeliveryResponse,
        (at_ms, now_ms): (u64, u64),
    ) -> (Self, DeliveryAttempt) {
        let tried = DeliveryAttempt {
            number: self.attempts + 1,
            at_ms,
            duration_ms: now_ms.saturating_sub(at_ms),
            status_code: answer.result.as_ref().ok().copied(),
            error: answer.error_message(),
        };
        let next = Self {
            attempts: tried.number,
            failures: self.failures + u32::from(tried.error.is_some()),
            last_error: tried.error.clone(),
            version: self.version + 1,
            ..self.clone()
        };
        (next, tried)
    }

    /// Returns the next state after the same URL responded with 410 to another delivery; `None` if
    /// no attempt is due.
    pub fn after_url_gone(&self) -> Option<Self> {
        let to_come =
            matches!(self.status, DeliveryStatus::AwaitingOutcome | DeliveryStatus::Pending);
        to_come.then(|| Self {
            status: DeliveryStatus::Gone,
            due_ms: None,
            last_error: Some("not sent: this URL answered 410 to another callback".to_owned()),
            version: self.version + 1,
            ..self.clone()
        })
    }

    /// Returns the next state after a redelivery request; `None` while the call has not ended.
    pub fn after_redelivery_request(&self, now_ms: u64) -> Option<Self> {
        let ended = self.status != DeliveryStatus::AwaitingOutcome;
        ended.then(|| Self {
            status: DeliveryStatus::Pending,
            due_ms: Some(now_ms),
            failures: 0,
            version: self.version + 1,
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending() -> Delivery {
        Delivery {
            project: "p".into(),
            call_id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap(),
            url: "https://hooks.example:8443/a?b=/c".into(),
            status: DeliveryStatus::Pending,
            due_ms: Some(1_000),
            attempts: 0,
            failures: 0,
            last_error: None,
            version: 2,
        }
    }

    fn response(code: u16) -> DeliveryResponse {
        DeliveryResponse { result: Ok(code), retry_after_ms: None }
    }

    #[test]
    fn every_response_code_leads_to_its_delivery_status() {
        use DeliveryStatus::{Delivered, Gone, Pending};
        let schedule = RetrySchedule::default();
        let codes = [
            (200, Delivered),
            (204, Delivered),
            (299, Delivered),
            (301, Pending),
            (307, Pending),
            (400, Pending),
            (404, Pending),
            (410, Gone),
            (429, Pending),
            (500, Pending),
            (503, Pending),
        ];
        for (code, expected) in codes {
            let (next, attempt) =
                pending().after_attempt(&response(code), (1_000, 1_020), &schedule);
            assert_eq!(next.status, expected, "{code}");
            assert_eq!(next.due_ms.is_some(), expected == Pending, "{code}");
            assert_eq!(attempt.error.is_none(), expected == Delivered, "{code}");
            assert_eq!((attempt.number, attempt.duration_ms), (1, 20));
            assert_eq!((next.attempts, next.version), (1, 3));
        }
        let silent = DeliveryResponse { result: Err("timed out".into()), retry_after_ms: None };
        let (next, attempt) = pending().after_attempt(&silent, (1_000, 1_020), &schedule);
        assert_eq!((next.status, attempt.status_code), (Pending, None));
        assert_eq!(next.last_error.as_deref(), Some("timed out"));
    }

    #[test]
    fn a_delivery_is_exhausted_at_the_end_of_its_schedule() {
        let schedule = RetrySchedule { jitter: 0.0, ..RetrySchedule::default() };
        let (mut delivery, mut now_ms, mut waits) = (pending(), 1_000, Vec::new());
        while delivery.status == DeliveryStatus::Pending {
            delivery = delivery.after_attempt(&response(500), (now_ms, now_ms), &schedule).0;
            waits.extend(delivery.due_ms.map(|due_ms| (due_ms - now_ms) / 1_000));
            now_ms = delivery.due_ms.unwrap_or(now_ms);
        }
        let hours = |hours: u64| hours * 3_600;
        let expected = [5, 300, 1_800, hours(2), hours(5), hours(10), hours(14), hours(20)];
        assert_eq!(waits, expected.into_iter().chain([hours(24)]).collect::<Vec<_>>());
        assert_eq!((delivery.status, delivery.attempts), (DeliveryStatus::Exhausted, 10));
        let again = delivery.after_redelivery_request(now_ms).unwrap();
        assert_eq!((again.status, again.due_ms), (DeliveryStatus::Pending, Some(now_ms)));
        let (next, attempt) = again.after_attempt(&response(500), (now_ms, now_ms), &schedule);
        assert_eq!(next.due_ms, Some(now_ms + 5_000), "from the beginning of the schedule");
        assert_eq!(attempt.number, 11);
    }

    #[test]
    fn retries_have_jitter_and_honor_retry_after() {
        let schedule = RetrySchedule::default();
        let dues: std::collections::HashSet<u64> = (0..100)
            .map(|n| {
                let call_id = format!("tc_{n}").parse().unwrap();
                let delivery = Delivery { call_id, ..pending() };
                delivery.after_attempt(&response(500), (0, 0), &schedule).0.due_ms.unwrap()
            })
            .collect();
        assert!(dues.len() > 50, "{dues:?}");
        assert!(dues.iter().all(|due_ms| (5_000..=6_000).contains(due_ms)));
        let later = DeliveryResponse { retry_after_ms: Some(120_000), ..response(503) };
        assert_eq!(pending().after_attempt(&later, (0, 0), &schedule).0.due_ms, Some(120_000));
        let never = DeliveryResponse { retry_after_ms: Some(u64::MAX), ..response(503) };
        assert_eq!(
            pending().after_attempt(&never, (0, 0), &schedule).0.due_ms,
            Some(MAX_RETRY_AFTER_MS)
        );
        let soon = DeliveryResponse { retry_after_ms: Some(1), ..response(429) };
        assert!(pending().after_attempt(&soon, (0, 0), &schedule).0.due_ms >= Some(5_000));
    }

    #[test]
    fn ids_receivers_and_status_names_are_derived() {
        let delivery = pending();
        assert_eq!(delivery.message_id(), "msg_01ARZ3NDEKTSV4RRFFQ69G5FAV");
        assert_eq!(delivery.receiver(), "https://hooks.example:8443");
        let bare = Delivery { url: "http://a.example?x".into(), ..delivery };
        assert_eq!(bare.receiver(), "http://a.example");
        for status in DeliveryStatus::ALL {
            assert_eq!(status.as_str().parse(), Ok(status));
        }
    }

    #[test]
    fn only_a_waiting_delivery_becomes_due_when_its_call_ends() {
        let waiting =
            Delivery { status: DeliveryStatus::AwaitingOutcome, due_ms: None, ..pending() };
        assert_eq!(waiting.after_redelivery_request(5), None);
        assert_eq!(waiting.after_call_ended(5).unwrap().due_ms, Some(5));
        assert_eq!(pending().after_call_ended(5), None);
    }

    #[test]
    fn only_open_deliveries_are_given_up_when_a_url_is_gone() {
        use DeliveryStatus::{AwaitingOutcome, Gone, Pending};
        for status in DeliveryStatus::ALL {
            let due_ms = (status == Pending).then_some(7);
            let before = Delivery { status, due_ms, ..pending() };
            let Some(next) = before.after_url_gone() else {
                assert!(!matches!(status, AwaitingOutcome | Pending), "{status:?}");
                continue;
            };
            assert_eq!((next.status, next.due_ms, next.version), (Gone, None, 3));
            assert_eq!(next.after_call_ended(9), None, "the end of the call has no effect");
            let again = next.after_redelivery_request(9).unwrap();
            assert_eq!((again.status, again.due_ms), (Pending, Some(9)));
        }
    }
}
