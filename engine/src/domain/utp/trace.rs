//! Traces as UTP carries them: `traceparent` texts. Pure.

use sha2::{Digest, Sha256};

use crate::domain::id::hex;
use crate::domain::trace::TraceParent;

/// Returns the trace id and span id of a `traceparent`, or `None` if it is not valid. Lenient, as
/// UTP is: accepts upper case and ignores the values of version and flags.
pub fn parse(text: &str) -> Option<(String, String)> {
    let text = text.to_ascii_lowercase();
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace_id, span_id, flags] = parts.as_slice() else { return None };
    let is_hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let has_valid_lengths = is_hex(version, 2) && is_hex(trace_id, 32) && is_hex(span_id, 16);
    let is_nonzero_trace = trace_id.bytes().any(|byte| byte != b'0');
    (has_valid_lengths && is_nonzero_trace && is_hex(flags, 2))
        .then(|| ((*trace_id).to_owned(), (*span_id).to_owned()))
}

/// Normalizes a `traceparent` to W3C's form, which permits no capitals and no zero span id. A
/// stricter reader would otherwise start another trace.
pub fn normalize(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    parse(&text)?;
    Some(match text.parse::<TraceParent>() {
        Ok(parsed) => parsed.to_string(),
        Err(_) => child_traceparent(&text, &text),
    })
}

/// Returns true if a text is a valid `tracestate`: at most 512 printable characters.
pub fn is_valid_tracestate(text: &str) -> bool {
    text.len() <= 512 && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Derives a trace from a seed: the same seed gives the same trace.
pub fn from_seed(seed: &str) -> String {
    let hash = Sha256::digest(seed.as_bytes());
    format!("00-{}-{}-01", hex(&hash[..16]), hex(&hash[16..24]))
}

/// Derives a child span from a parent and a seed.
pub fn child_traceparent(parent: &str, seed: &str) -> String {
    let Some((trace_id, _)) = parse(parent) else { return from_seed(seed) };
    let hash = Sha256::digest(seed.as_bytes());
    format!("00-{trace_id}-{}-01", hex(&hash[..8]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_its_parents_trace() {
        let parent = "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01";
        let child = child_traceparent(parent, "x");
        assert!(child.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-"), "{child}");
        assert_ne!(parse(&child).unwrap().1, parse(parent).unwrap().1);
        for bad in ["", "00-0-0-01", &parent[..54], &"0".repeat(55)] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let zero = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        assert_eq!(parse(&zero), None);
        assert!(parse(&from_seed("tc_1")).is_some());
    }

    #[test]
    fn utp_traceparents_are_normalized_to_w3c_form() {
        let usual = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(normalize(usual).as_deref(), Some(usual));
        assert_eq!(normalize(&usual.to_uppercase()).as_deref(), Some(usual));
        let no_span = usual.replace("00f067aa0ba902b7", "0000000000000000");
        let other = normalize(&no_span).unwrap();
        assert!(other.parse::<TraceParent>().is_ok(), "{other}");
        assert_eq!(parse(&other).unwrap().0, parse(usual).unwrap().0, "the same trace");
        assert_eq!(normalize("nonsense"), None);
    }
}
