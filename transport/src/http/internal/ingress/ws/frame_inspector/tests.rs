//! Oversized messages, in one frame, in fragments and in partial reads, and the header recovered
//! from them.

use super::*;

const LIMIT: usize = 100;

/// Builds a frame as a client sends it.
fn frame(kind: u8, ends: bool, text: &[u8]) -> Vec<u8> {
    let mask = [7, 200, 3, 99];
    let mut bytes = vec![kind | if ends { 0x80 } else { 0 }];
    match text.len() {
        length @ 0..126 => bytes.push(0x80 | length as u8),
        length @ 126..65_536 => {
            bytes.push(0x80 | 126);
            bytes.extend((length as u16).to_be_bytes());
        }
        length => {
            bytes.push(0x80 | 127);
            bytes.extend((length as u64).to_be_bytes());
        }
    }
    bytes.extend(mask);
    bytes.extend(text.iter().enumerate().map(|(index, byte)| byte ^ mask[index % 4]));
    bytes
}

/// Returns the header of the first oversized message when the bytes arrive in chunks of this size.
fn inspect(bytes: &[u8], chunk_size: usize) -> Option<OversizedMessageHeader> {
    let mut scanner = FrameScanner { limit: LIMIT as u64, ..FrameScanner::default() };
    bytes.chunks(chunk_size).for_each(|chunk| scanner.scan(chunk));
    let last: Vec<u8> = scanner.last.iter().copied().collect();
    scanner.too_large.map(|_| OversizedMessageHeader::parse(&scanner.first, &last))
}

fn header(kind: &str, id: &str, attempt: Option<u32>) -> OversizedMessageHeader {
    let (kind, tool_call_id) = (Some(kind.to_owned()), Some(id.to_owned()));
    OversizedMessageHeader { kind, tool_call_id, attempt }
}

#[test]
fn header_fields_at_either_end_of_a_message_are_recovered() {
    let text = "x, \\\"tool_call_id\\\": y".repeat(5_000);
    let result = format!(r#"[{{"tool_call_id": "tc_nested", "type": "n"}}, "{text}"]"#);
    let messages = [
        format!(
            r#"{{"type": "tool_result", "tool_call_id": "tc_1", "attempt": 2, "result": {result}}}"#
        ),
        format!(
            r#"{{"attempt":2,"result":{result},"status":"SUCCEEDED","tool_call_id":"tc_1","type":"tool_result"}}"#
        ),
        format!(
            r#"{{"result": {result}, "tool_call_id": "tc_1", "attempt": 2, "type": "tool_result"}}"#
        ),
    ];
    for message in messages {
        let whole = frame(1, true, message.as_bytes());
        let (one, two) = message.as_bytes().split_at(90);
        let parts = [
            frame(1, true, b"{}"),
            frame(1, false, one),
            frame(9, true, b"ping"),
            frame(0, false, &two[..70_000]),
            frame(0, true, &two[70_000..]),
            frame(1, true, br#"{"type": "another"}"#),
        ]
        .concat();
        for chunk_size in [1, 7, 4_096, 1 << 20] {
            let expected = header("tool_result", "tc_1", Some(2));
            assert_eq!(
                inspect(&whole, chunk_size),
                Some(expected),
                "{chunk_size}: {:.60}",
                message
            );
            let expected = header("tool_result", "tc_1", Some(2));
            assert_eq!(
                inspect(&parts, chunk_size),
                Some(expected),
                "{chunk_size}: {:.60}",
                message
            );
        }
    }
}

#[test]
fn fields_inside_a_result_are_not_taken_for_the_header() {
    let text = "x".repeat(5_000);
    let message = format!(r#"{{"result": ["{text}", {{"a": 1, "tool_call_id": "tc_other"}}]}}"#);
    let nothing = Some(OversizedMessageHeader::default());
    assert_eq!(inspect(&frame(1, true, message.as_bytes()), 1_000), nothing);
    let message = format!(r#"{{"result": {{"tool_call_id": "tc_other", "text": "{text}"}}}}"#);
    assert_eq!(inspect(&frame(1, true, message.as_bytes()), 1_000), nothing);
}

#[test]
fn messages_within_the_limit_are_not_inspected() {
    let parts = [
        frame(1, true, &[b'x'; LIMIT]),
        frame(1, false, &[b'y'; LIMIT - 1]),
        frame(10, true, &[b'z'; 125]),
        frame(0, true, b"y"),
        frame(2, true, b""),
    ];
    for chunk_size in [1, 3, 1_000] {
        assert_eq!(inspect(&parts.concat(), chunk_size), None, "{chunk_size}");
    }
}
