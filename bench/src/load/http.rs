//! A minimal HTTP/1.1 client for measurements: one request at a time on one connection.
//!
//! It shares two cores with the server it measures, so requests are prepared as bytes in advance
//! and responses are parsed in place. It never follows redirects, never retries, never pipelines
//! and supports no TLS: `load` decides how a failure counts.

use std::io;
use std::ops::Range;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Maximum size of a response in bytes. An endless response is a fault of the server and must not
/// exhaust the memory of the client.
const MAX_ANSWER: usize = 64 * 1024 * 1024;
const MAX_HEAD: usize = 64 * 1024;

/// Returns the bytes of a POST with a JSON body, to be sent any number of times.
#[must_use]
pub fn post(addr: &str, path: &str, body: &str, bearer: Option<&str>) -> Vec<u8> {
    let length = body.len();
    let auth = authorization(bearer);
    format!(
        "POST {path} HTTP/1.1\r\nhost: {addr}\r\n{auth}content-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Returns the bytes of a POST with a JSON body and custom headers.
#[must_use]
pub fn post_with(addr: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let length = body.len();
    let header_lines: String =
        headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!(
        "POST {path} HTTP/1.1\r\nhost: {addr}\r\n{header_lines}content-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Returns the bytes of a GET, to be sent any number of times.
#[must_use]
pub fn get(addr: &str, path: &str, bearer: Option<&str>) -> Vec<u8> {
    let auth = authorization(bearer);
    format!("GET {path} HTTP/1.1\r\nhost: {addr}\r\n{auth}\r\n").into_bytes()
}

fn authorization(bearer: Option<&str>) -> String {
    bearer.map_or_else(String::new, |token| format!("authorization: Bearer {token}\r\n"))
}

/// A response, borrowed from its connection.
#[derive(Debug)]
pub struct HttpResponse<'a> {
    /// The status code.
    pub status: u16,
    /// The body, with any chunked encoding removed.
    pub body: &'a [u8],
}

impl HttpResponse<'_> {
    /// Returns true if the status is 2xx.
    #[must_use]
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns true if the status is 2xx and the body reports that the call succeeded.
    #[must_use]
    pub fn has_succeeded(&self) -> bool {
        const WORD: &[u8] = b"SUCCEEDED";
        self.is_success() && self.body.windows(WORD.len()).any(|part| part == WORD)
    }

    /// Returns the number of calls of a batch that the body reports as successful.
    #[must_use]
    pub fn count_ok_entries(&self) -> usize {
        const WORD: &[u8] = b"\"ok\":true";
        self.body.windows(WORD.len()).filter(|part| *part == WORD).count()
    }
}

/// A keep-alive connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    /// The body of a chunked response, reassembled.
    joined: Vec<u8>,
    open: bool,
}

impl Connection {
    /// Connects to `addr` (`host:port`).
    ///
    /// # Errors
    ///
    /// When the connection is refused or the address is invalid.
    pub async fn open(addr: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, input: Vec::with_capacity(4096), joined: Vec::new(), open: true })
    }

    /// Returns true if another request may be sent: false once the server announced that it will
    /// close the connection, and after any failure.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Sends a request made by [`post`] or [`get`] and reads the whole response.
    ///
    /// # Errors
    ///
    /// When the connection breaks or the response is not HTTP. The connection is unusable
    /// afterwards.
    pub async fn round_trip(&mut self, request: &[u8]) -> io::Result<HttpResponse<'_>> {
        // Closed until the response is complete, so that a canceled request also leaves it closed.
        if !std::mem::replace(&mut self.open, false) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.input.clear();
        self.stream.write_all(request).await?;
        let mut ended = false;
        let parsed = loop {
            if let Some(parsed) = parse(&self.input, ended, &mut self.joined)? {
                break parsed;
            }
            if ended {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.input.len() > MAX_ANSWER {
                return Err(invalid_data("the response has no end"));
            }
            // Grows with the response, so that a long page is not read in tiny pieces.
            self.input.reserve(self.input.len().max(2048));
            ended = self.stream.read_buf(&mut self.input).await? == 0;
        };
        if parsed.bytes_used != self.input.len() {
            return Err(invalid_data("unexpected bytes after the answer"));
        }
        self.open = parsed.keep_alive && !ended;
        let body = match parsed.body {
            ResponseBody::InPlace(range) => self.input.get(range).unwrap_or_default(),
            ResponseBody::Joined => &self.joined,
        };
        Ok(HttpResponse { status: parsed.status, body })
    }
}

fn invalid_data(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[derive(Debug, PartialEq)]
enum ResponseBody {
    InPlace(Range<usize>),
    Joined,
}

#[derive(Debug, PartialEq)]
struct ParsedResponse {
    status: u16,
    body: ResponseBody,
    bytes_used: usize,
    keep_alive: bool,
}

struct ResponseHead {
    status: u16,
    length: Option<usize>,
    chunked: bool,
    keep_alive: bool,
}

/// Parses one response from the start of `input`; `None` means that more bytes are needed.
///
/// It starts from the beginning each time: most responses arrive in one read, so keeping state is
/// not worth the effort.
fn parse(input: &[u8], ended: bool, joined: &mut Vec<u8>) -> io::Result<Option<ParsedResponse>> {
    let mut start = 0;
    let (head, body_start) = loop {
        let rest = input.get(start..).unwrap_or_default();
        let Some(length) = head_length(rest) else {
            return if rest.len() > MAX_HEAD {
                Err(invalid_data("a head without end"))
            } else {
                Ok(None)
            };
        };
        let head = parse_head(rest.get(..length).unwrap_or_default())?;
        start += length;
        // 1xx is an interim response: the final one is still to come.
        if head.status >= 200 {
            break (head, start);
        }
    };
    let (body, used) = if matches!(head.status, 204 | 304) {
        (ResponseBody::InPlace(body_start..body_start), body_start)
    } else if head.chunked {
        let Some(used) = join_chunks(input, body_start, joined)? else {
            return Ok(None);
        };
        (ResponseBody::Joined, used)
    } else if let Some(length) = head.length {
        let end = body_start
            .checked_add(length)
            .ok_or_else(|| invalid_data("a content-length too large"))?;
        if input.len() < end {
            return Ok(None);
        }
        (ResponseBody::InPlace(body_start..end), end)
    } else if ended {
        (ResponseBody::InPlace(body_start..input.len()), input.len())
    } else {
        return Ok(None);
    };
    Ok(Some(ParsedResponse {
        status: head.status,
        body,
        bytes_used: used,
        keep_alive: head.keep_alive,
    }))
}

/// Returns the length of the head, including its empty line.
fn head_length(input: &[u8]) -> Option<usize> {
    input.windows(4).position(|part| part == b"\r\n\r\n").map(|end| end + 4)
}

fn parse_head(head: &[u8]) -> io::Result<ResponseHead> {
    let head = std::str::from_utf8(head).map_err(|_| invalid_data("a head that is not text"))?;
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().splitn(3, ' ');
    let version = first.next().unwrap_or_default();
    let status = first.next().and_then(|code| code.parse().ok());
    let (Some(status), true) = (status, version.starts_with("HTTP/1.")) else {
        return Err(invalid_data("not an HTTP/1 status line"));
    };
    let mut parsed =
        ResponseHead { status, length: None, chunked: false, keep_alive: version != "HTTP/1.0" };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) =
            line.split_once(':').ok_or_else(|| invalid_data("a header without colon"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().map_err(|_| invalid_data("an invalid content-length"))?;
            parsed.length = Some(length);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            parsed.chunked = value.to_ascii_lowercase().ends_with("chunked");
        } else if name.eq_ignore_ascii_case("connection") {
            if value.eq_ignore_ascii_case("close") {
                parsed.keep_alive = false;
            } else if value.eq_ignore_ascii_case("keep-alive") {
                parsed.keep_alive = true;
            }
        }
    }
    Ok(parsed)
}

/// Removes the chunked encoding and returns the position where the response ends, or `None` if it
/// is incomplete.
fn join_chunks(input: &[u8], start: usize, joined: &mut Vec<u8>) -> io::Result<Option<usize>> {
    joined.clear();
    let mut offset = start;
    loop {
        let Some((line, next)) = take_line(input, offset) else {
            return Ok(None);
        };
        offset = next;
        // Extensions follow a semicolon and may be ignored.
        let digits = line.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
        let size = std::str::from_utf8(digits)
            .ok()
            .and_then(|digits| usize::from_str_radix(digits, 16).ok())
            .filter(|&size| size <= MAX_ANSWER)
            .ok_or_else(|| invalid_data("an invalid chunk size"))?;
        if size == 0 {
            break;
        }
        let Some(end) = input.get(offset + size..offset + size + 2) else {
            return Ok(None);
        };
        if end != b"\r\n" {
            return Err(invalid_data("a chunk that is longer than its size"));
        }
        joined.extend_from_slice(input.get(offset..offset + size).unwrap_or_default());
        offset += size + 2;
    }
    // Trailers, up to an empty line.
    while let Some((line, next)) = take_line(input, offset) {
        offset = next;
        if line.is_empty() {
            return Ok(Some(offset));
        }
    }
    Ok(None)
}

/// Returns the line that starts at `offset`, without its terminator, and the position of the next
/// line.
fn take_line(input: &[u8], offset: usize) -> Option<(&[u8], usize)> {
    let rest = input.get(offset..)?;
    let length = rest.windows(2).position(|part| part == b"\r\n")?;
    Some((rest.get(..length)?, offset + length + 2))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Parses every prefix of the response: it must be complete at the last byte and not before.
    fn feed(text: &str) -> (ParsedResponse, Vec<u8>) {
        let bytes = text.as_bytes();
        let mut joined = Vec::new();
        for end in 0..bytes.len() {
            let parsed = parse(&bytes[..end], false, &mut joined).unwrap();
            assert_eq!(parsed, None, "whole after {end} bytes");
        }
        let parsed = parse(bytes, false, &mut joined).unwrap().unwrap();
        assert_eq!(parsed.bytes_used, bytes.len());
        let body = match &parsed.body {
            ResponseBody::InPlace(range) => bytes[range.clone()].to_vec(),
            ResponseBody::Joined => joined,
        };
        (parsed, body)
    }

    #[test]
    fn a_body_with_content_length_is_read() {
        let (parsed, body) = feed("HTTP/1.1 202 Accepted\r\nContent-Length: 5\r\n\r\nhello");
        assert_eq!((parsed.status, parsed.keep_alive), (202, true));
        assert_eq!(body, b"hello");
        let (_, body) = feed("HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n");
        assert_eq!(body, b"");
    }

    #[test]
    fn a_chunked_body_with_extension_and_trailer_is_read() {
        let (_, body) = feed(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
             5;x=1\r\nhello\r\nC\r\n, the\r\nworld\r\n0\r\nx-sum: 1\r\n\r\n",
        );
        assert_eq!(body, b"hello, the\r\nworld");
        let (_, body) = feed("HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n0\r\n\r\n");
        assert_eq!(body, b"");
    }

    #[test]
    fn interim_responses_are_skipped_and_204_has_no_body() {
        let (parsed, body) =
            feed("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
        assert_eq!((parsed.status, body.as_slice()), (200, b"ok".as_slice()));
        let (parsed, body) = feed("HTTP/1.1 204 No Content\r\n\r\n");
        assert_eq!((parsed.status, body.len()), (204, 0));
    }

    #[test]
    fn without_a_length_the_body_ends_with_the_connection() {
        let text = b"HTTP/1.0 200 OK\r\n\r\nall of it";
        let mut joined = Vec::new();
        assert_eq!(parse(text, false, &mut joined).unwrap(), None);
        let parsed = parse(text, true, &mut joined).unwrap().unwrap();
        assert_eq!(parsed.body, ResponseBody::InPlace(19..text.len()));
        assert!(!parsed.keep_alive);
    }

    #[test]
    fn connection_close_is_detected() {
        let (parsed, _) = feed("HTTP/1.1 200 OK\r\nConnection: Close\r\ncontent-length: 0\r\n\r\n");
        assert!(!parsed.keep_alive);
    }

    #[test]
    fn malformed_responses_are_refused() {
        for text in [
            "SSH-2.0-x\r\n\r\n",
            "HTTP/1.1 abc\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
            "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\nab\r\n",
        ] {
            assert!(parse(text.as_bytes(), false, &mut Vec::new()).is_err(), "{text}");
        }
    }

    #[test]
    fn requests_have_host_credentials_and_length() {
        let text = String::from_utf8(post("h:1", "/p", "{}", Some("t"))).unwrap();
        assert!(text.starts_with("POST /p HTTP/1.1\r\nhost: h:1\r\nauthorization: Bearer t\r\n"));
        assert!(text.ends_with("content-length: 2\r\n\r\n{}"));
        let text = String::from_utf8(get("h:1", "/p", None)).unwrap();
        assert_eq!(text, "GET /p HTTP/1.1\r\nhost: h:1\r\n\r\n");
    }

    #[test]
    fn success_requires_the_status_code_and_the_status_field() {
        let answer = |status, body| HttpResponse { status, body };
        assert!(answer(202, br#"{"status":"SUCCEEDED"}"#.as_slice()).has_succeeded());
        assert!(!answer(202, b"RUNNING".as_slice()).has_succeeded());
        assert!(!answer(500, b"SUCCEEDED".as_slice()).has_succeeded());
        let batch = br#"{"results":[{"ok":true},{"ok":false},{"ok":true}]}"#.as_slice();
        assert_eq!(answer(200, batch).count_ok_entries(), 2);
    }
}
