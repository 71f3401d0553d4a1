//! Describes binary data in a digest: its type and its size in place of its characters.
//!
//! Binary data reaches a result as base64, as a data URL, or as text with control characters. None
//! of its characters help a model; the type, the size and the dimensions of an image do.

/// Minimum length of a text that is taken for base64, in bytes.
const MIN_BASE64: usize = 120;
/// Number of decoded bytes that show the type.
const SIGNATURE_BYTES: usize = 64;
/// Bytes that are inspected for control characters.
const INSPECTED_BYTES: usize = 4_096;

/// Binary data inside of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BinaryContent {
    /// Description for a model: `base64 of 84213 bytes: PNG image, 640 × 480`.
    pub(super) description: String,
    /// The text that was encoded, if it is one.
    pub(super) decoded_text: Option<String>,
}

/// Recognizes base64, also in a data URL.
pub(super) fn detect_base64(text: &str) -> Option<BinaryContent> {
    let trimmed = text.trim();
    let (media_type, encoded) =
        match trimmed.strip_prefix("data:").and_then(|url| url.split_once(";base64,")) {
            Some((media_type, encoded)) if media_type.len() < 100 => (Some(media_type), encoded),
            _ => (None, trimmed),
        };
    if encoded.len() < MIN_BASE64 || !is_base64(encoded) {
        return None;
    }
    let digits = encoded.bytes().filter(|byte| !byte.is_ascii_whitespace());
    let padding = encoded.bytes().rev().take_while(|byte| *byte == b'=').count();
    let bytes = (digits.count() * 3 / 4).saturating_sub(padding);
    let signature = decode(encoded, SIGNATURE_BYTES);
    let decoded = is_text(&signature).then(|| String::from_utf8(decode(encoded, usize::MAX)).ok());
    let decoded_text = decoded.flatten().filter(|text| !has_control_characters(text));
    let kind = match (media_type, describe_signature(&signature)) {
        (_, Some(kind)) => kind,
        (Some(media_type), None) => media_type.to_owned(),
        (None, None) if decoded_text.is_some() => "text".to_owned(),
        (None, None) => format!("unknown type, begins with {}", hexadecimal(&signature, 12)),
    };
    let description = format!("base64 of {bytes} bytes: {kind}");
    Some(BinaryContent { description, decoded_text })
}

/// Recognizes text that is binary data: one with many control or replacement characters.
pub(super) fn detect_binary(text: &str) -> Option<BinaryContent> {
    let begin = &text[..text.floor_char_boundary(INSPECTED_BYTES)];
    let is_odd =
        |c: &char| c.is_control() && !c.is_whitespace() && *c != '\u{1b}' || *c == '\u{fffd}';
    let odd = begin.chars().filter(is_odd).count();
    if odd * 20 < begin.chars().count().max(1) {
        return None;
    }
    let lossy: Vec<u8> =
        begin.chars().map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')).collect();
    let kind = describe_signature(&lossy)
        .unwrap_or_else(|| format!("begins with {}", hexadecimal(&lossy, 16)));
    let strings = printable_strings(text);
    let mut description = format!("binary data of about {} bytes: {kind}", text.len());
    if !strings.is_empty() {
        description = format!("{description}; readable parts: {}", strings.join(" | "));
    }
    Some(BinaryContent { description, decoded_text: None })
}

/// Returns whether a text consists of base64 and is no word, path or number.
fn is_base64(text: &str) -> bool {
    let (mut upper, mut lower, mut digits, mut line) = (0, 0, 0, 0_usize);
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' => upper += 1,
            b'a'..=b'z' => lower += 1,
            b'0'..=b'9' => digits += 1,
            b'+' | b'/' | b'-' | b'_' | b'=' => {}
            b'\r' => continue,
            b'\n' if line >= 40 => {
                line = 0;
                continue;
            }
            _ => return false,
        }
        line += 1;
    }
    let all = text.len();
    upper * 20 > all && lower * 20 > all && digits * 50 > all
}

fn decode(encoded: &str, max: usize) -> Vec<u8> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    };
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for digit in encoded.bytes().filter_map(value) {
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            if bytes.len() >= max {
                break;
            }
        }
    }
    bytes
}

/// Returns the type that the first bytes of a file show.
fn describe_signature(bytes: &[u8]) -> Option<String> {
    let number = |at: usize, little: bool| {
        let word = bytes.get(at..at + 2)?;
        let (a, b) = (u32::from(word[0]), u32::from(word[1]));
        Some(if little { b << 8 | a } else { a << 8 | b })
    };
    let with_size = |name: &str, size: Option<(u32, u32)>| match size {
        Some((width, height)) => format!("{name}, {width} × {height}"),
        None => name.to_owned(),
    };
    Some(match bytes {
        [0x89, b'P', b'N', b'G', ..] => {
            with_size("PNG image", number(18, false).zip(number(22, false)))
        }
        [b'G', b'I', b'F', b'8', ..] => {
            with_size("GIF image", number(6, true).zip(number(8, true)))
        }
        [0xff, 0xd8, 0xff, ..] => "JPEG image".to_owned(),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "WebP image".to_owned(),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => "WAV audio".to_owned(),
        [b'I', b'D', b'3', ..] => "MP3 audio".to_owned(),
        [b'O', b'g', b'g', b'S', ..] => "Ogg audio or video".to_owned(),
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "MP4 video".to_owned(),
        [b'%', b'P', b'D', b'F', ..] => "PDF document".to_owned(),
        [b'P', b'K', 3, 4, ..] => "ZIP archive or office document".to_owned(),
        [0x1f, 0x8b, ..] => "gzip data".to_owned(),
        [0x7f, b'E', b'L', b'F', ..] => "ELF program".to_owned(),
        [0, b'a', b's', b'm', ..] => "WebAssembly module".to_owned(),
        [b'S', b'Q', b'L', b'i', b't', b'e', ..] => "SQLite database".to_owned(),
        _ => return None,
    })
}

fn is_text(bytes: &[u8]) -> bool {
    let end = match std::str::from_utf8(bytes) {
        Ok(_) => bytes.len(),
        // The last character may be cut.
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        Err(_) => return false,
    };
    bytes[..end].iter().all(|byte| *byte >= b' ' || byte.is_ascii_whitespace())
}

fn has_control_characters(text: &str) -> bool {
    text.chars().any(|c| c.is_control() && !c.is_whitespace())
}

fn hexadecimal(bytes: &[u8], max: usize) -> String {
    let pairs: Vec<String> = bytes.iter().take(max).map(|byte| format!("{byte:02x}")).collect();
    pairs.join(" ")
}

/// Returns some of the longest readable parts of binary data.
fn printable_strings(text: &str) -> Vec<String> {
    let is_break = |c: char| c.is_control() || c == '\u{fffd}';
    let begin = &text[..text.floor_char_boundary(64 << 10)];
    let mut parts: Vec<&str> =
        begin.split(is_break).map(str::trim).filter(|part| part.len() >= 8).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.len()));
    parts.truncate(4);
    parts.iter().map(|part| part.chars().take(60).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PNG: &str =
        "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAYAAAA10dzkAAAABHNCSVQICAgIfAhkiAAAAAlwSFlz";

    #[test]
    fn base64_is_described_by_type_and_size() {
        let image = format!("{PNG}{}", "AbC3dEf9".repeat(40));
        let found = detect_base64(&image).unwrap();
        assert_eq!(found.description, "base64 of 297 bytes: PNG image, 640 × 480");
        let url = format!("data:image/png;base64,{image}");
        assert_eq!(detect_base64(&url), Some(found));
        // "hello, this is plain text number 1! " repeated.
        let text = "aGVsbG8sIHRoaXMgaXMgcGxhaW4gdGV4dCBudW1iZXIgMSEg".repeat(8);
        let found = detect_base64(&text).unwrap();
        assert!(found.decoded_text.unwrap().starts_with("hello, this is plain text number 1!"));
        for other in ["a plain text of several words ".repeat(20), "0123456789".repeat(30)] {
            assert_eq!(detect_base64(&other), None, "{other}");
        }
    }

    #[test]
    fn binary_text_is_described_by_its_signature() {
        let pdf = format!("%PDF-1.7\n{}", "\u{0}\u{1}\u{fffd}stream of bytes\u{2}".repeat(50));
        let found = detect_binary(&pdf).unwrap();
        assert!(found.description.contains("PDF document"), "{}", found.description);
        assert_eq!(detect_binary("plain\ttext\n"), None);
    }
}
