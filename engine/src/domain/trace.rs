//! The trace of a call, in W3C Trace Context. Pure.
//!
//! The ids of a call's spans derive from the call's id. So the store need not hold them, and a span
//! whose parent was sent to an executor before a restart still has the right parent after it.

use std::fmt;
use std::str::FromStr;

use crate::domain::id::CallId;

/// The flag of a sampled trace.
const SAMPLED: u8 = 1;
/// The flags of version 00: sampled, and random trace id.
const KNOWN_FLAGS: u8 = 3;

/// The header `traceparent`: a trace, the parent span, and the sampling flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// Id of the whole trace.
    pub trace_id: [u8; 16],
    /// Id of the sender's span: the parent of the spans that continue the trace.
    pub span_id: [u8; 8],
    flags: u8,
}

/// The error for a text that is not a `traceparent`; callers treat it like a missing one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a valid W3C traceparent")]
pub struct InvalidTraceParent;

impl TraceParent {
    /// Returns true if the sender records the trace.
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the trace id in hexadecimal.
    pub fn trace_id_text(&self) -> String {
        let mut text = [0; 32];
        write_hex(&mut text, &self.trace_id);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Returns another span of the same trace.
    fn with_span(self, span_id: [u8; 8], sampled: bool) -> Self {
        let flags = self.flags & !SAMPLED | if sampled { SAMPLED } else { 0 };
        Self { span_id, flags, ..self }
    }
}

impl FromStr for TraceParent {
    type Err = InvalidTraceParent;

    /// Parses version 00, and the version 00 part of later versions, as W3C requires.
    fn from_str(text: &str) -> Result<Self, InvalidTraceParent> {
        let bytes = text.as_bytes();
        let dashes = |at: usize| bytes.get(at) == Some(&b'-');
        if bytes.len() < 55 || !dashes(2) || !dashes(35) || !dashes(52) {
            return Err(InvalidTraceParent);
        }
        let [version] = parse_hex::<1>(&bytes[..2])?;
        let ends_well = bytes.len() == 55 || version > 0 && dashes(55);
        if version == 0xff || !ends_well {
            return Err(InvalidTraceParent);
        }
        let (trace_id, span_id) =
            (parse_hex::<16>(&bytes[3..35])?, parse_hex::<8>(&bytes[36..52])?);
        let [flags] = parse_hex::<1>(&bytes[53..55])?;
        if trace_id == [0; 16] || span_id == [0; 8] {
            return Err(InvalidTraceParent);
        }
        Ok(Self { trace_id, span_id, flags: flags & KNOWN_FLAGS })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = *b"00-                                -                -  ";
        write_hex(&mut text[3..35], &self.trace_id);
        write_hex(&mut text[36..52], &self.span_id);
        write_hex(&mut text[53..55], &[self.flags]);
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

/// Parses lowercase digits only: W3C permits no others.
fn parse_hex<const N: usize>(text: &[u8]) -> Result<[u8; N], InvalidTraceParent> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        _ => Err(InvalidTraceParent),
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Ok(bytes)
}

fn write_hex(text: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

/// The ids of a call's spans.
#[derive(Debug, Clone, Copy)]
pub struct SpanIds {
    /// The `traceparent` of the request; `None` if the trace starts here.
    pub parent: Option<TraceParent>,
    /// The call's span.
    call: TraceParent,
    attempt_seed: u64,
}

impl SpanIds {
    /// Returns the ids for a call id and the `traceparent` of its request.
    pub(crate) fn new(id: &CallId, traceparent: Option<&str>) -> Self {
        let parent = traceparent.and_then(|text| text.parse().ok());
        // An id of zeros is invalid.
        let [first, second, call_span, attempt_seed] =
            hash_to_words(id.as_str().as_bytes()).map(|id| id.max(1));
        let new_trace = || TraceParent {
            trace_id: (u128::from(first) << 64 | u128::from(second)).to_be_bytes(),
            span_id: [0; 8],
            flags: 0,
        };
        let trace = parent.unwrap_or_else(new_trace);
        Self {
            parent,
            call: trace.with_span(call_span.to_be_bytes(), trace.is_sampled()),
            attempt_seed,
        }
    }

    /// Returns the trace id.
    pub fn trace_id(&self) -> [u8; 16] {
        self.call.trace_id
    }

    /// Returns the call's span.
    pub fn call(&self, sampled: bool) -> TraceParent {
        self.call.with_span(self.call.span_id, sampled)
    }

    /// Returns the span of one attempt, which the executor receives.
    pub fn attempt(&self, number: u32, sampled: bool) -> TraceParent {
        // An odd step visits every other id before it returns to the first.
        let step = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let span_id = self.attempt_seed.wrapping_add(step).max(1).to_be_bytes();
        self.call.with_span(span_id, sampled)
    }
}

/// Hashes bytes to four numbers that look random. They need not resist an attacker: the call's id
/// is no secret from a reader of its spans. A cryptographic digest would cost each call ten times
/// as much.
fn hash_to_words(bytes: &[u8]) -> [u64; 4] {
    let (mut one, mut other) = (bytes.len() as u64, !(bytes.len() as u64));
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        let word = u64::from_le_bytes(word);
        one = mix(one ^ word);
        other = mix(other.wrapping_add(word));
    }
    [1, 2, 3, 4].map(|n| mix(one.wrapping_add(other.rotate_left(16 * n))))
}

/// The finalizer of SplitMix64: each input bit changes about half of the output bits.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_traceparent_round_trips() {
        let parsed: TraceParent = TRACEPARENT.parse().unwrap();
        assert!(parsed.is_sampled());
        assert_eq!(parsed.to_string(), TRACEPARENT);
        assert_eq!(parsed.trace_id_text(), "0af7651916cd43dd8448eb211c80319c");
        let unsampled = TRACEPARENT.replace("-01", "-00").parse::<TraceParent>().unwrap();
        assert!(!unsampled.is_sampled());
    }

    #[test]
    fn later_versions_are_read_up_to_the_known_fields() {
        for text in [
            "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-the-future-brings",
        ] {
            assert_eq!(text.parse::<TraceParent>().unwrap().to_string(), TRACEPARENT, "{text}");
        }
        let flags = TRACEPARENT.replace("-01", "-ff").parse::<TraceParent>().unwrap();
        assert!(flags.to_string().ends_with("-03"), "unknown flags are not propagated");
    }

    #[test]
    fn invalid_traceparents_are_refused() {
        let bad = [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-011",
            "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01.more",
            "00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331_01",
            "0é-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ];
        for text in bad {
            assert_eq!(text.parse::<TraceParent>(), Err(InvalidTraceParent), "{text}");
        }
    }

    #[test]
    fn span_ids_derive_from_the_call_id() {
        let id = "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap();
        let ids = SpanIds::new(&id, None);
        assert_eq!(ids.call(true), SpanIds::new(&id, None).call(true), "the ids are deterministic");
        assert!(ids.parent.is_none());
        let spans = [ids.call(true), ids.attempt(1, true), ids.attempt(2, true)];
        for (n, span) in spans.iter().enumerate() {
            assert!(span.is_sampled() && span.to_string().parse::<TraceParent>() == Ok(*span));
            assert_eq!(span.trace_id, ids.trace_id());
            assert!(spans[..n].iter().all(|other| other.span_id != span.span_id));
        }
        let within = SpanIds::new(&id, Some(TRACEPARENT));
        assert_eq!(within.parent.map(|parent| parent.to_string()).as_deref(), Some(TRACEPARENT));
        assert_eq!(within.call(true).trace_id_text(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(within.call(true).span_id, ids.call(true).span_id);
        assert!(!within.attempt(1, false).is_sampled());
        let nonsense = SpanIds::new(&id, Some("nonsense"));
        assert_eq!(nonsense.trace_id(), ids.trace_id(), "an invalid traceparent is ignored");
    }

    #[test]
    fn trace_ids_of_consecutive_calls_are_evenly_distributed() {
        let id_generator = crate::domain::id::IdGenerator::default();
        let mut seen = std::collections::HashSet::new();
        let mut upper = 0;
        for n in 0..20_000 {
            let ids = SpanIds::new(&id_generator.next_call_id(1_700_000_000_000 + n / 1_000), None);
            let trace_id = u128::from_be_bytes(ids.trace_id());
            upper += u64::from(trace_id as u64 >> 63 == 1);
            assert!(seen.insert(trace_id), "two calls in one trace");
            assert!(seen.insert(u128::from(u64::from_be_bytes(ids.call(true).span_id))));
            assert!(seen.insert(u128::from(u64::from_be_bytes(ids.attempt(1, true).span_id))));
        }
        // Ten standard deviations.
        assert!((9_293..=10_707).contains(&upper), "{upper} of 20000");
    }
}
