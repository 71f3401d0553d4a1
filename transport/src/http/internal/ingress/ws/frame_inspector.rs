//! Inspects incoming WebSocket frames without changing them.
//!
//! The WebSocket library rejects a message over the limit unread, so its call would stay unknown:
//! the request would be redelivered, and its result would be oversized again. This module therefore
//! retains both ends of an oversized message, where its type, call id and attempt are.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

/// Number of bytes retained of each end of a message.
const EDGE_BYTES: usize = 2_048;

/// A connection whose incoming frames are inspected.
pub(super) struct FrameInspector<S> {
    inner: S,
    scanner: FrameScanner,
}

impl<S: AsyncRead + Unpin> FrameInspector<S> {
    /// Wraps a connection. Messages over `limit` bytes are oversized.
    pub(super) fn new(inner: S, limit: usize) -> Self {
        Self { inner, scanner: FrameScanner { limit: limit as u64, ..FrameScanner::default() } }
    }

    /// Reads to the end of the oversized message, but stops after `limit` bytes. A client that is
    /// still sending reads no response before it has finished.
    pub(super) async fn drain_oversized(&mut self, limit: usize) {
        let mut scrap = vec![0; 65_536];
        let mut passed = 0;
        while self.scanner.too_large == Some(OversizeProgress::Receiving) && passed < limit {
            match self.inner.read(&mut scrap).await {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    self.scanner.scan(&scrap[..read]);
                    passed += read;
                }
            }
        }
    }

    /// Returns the header of the oversized message, as far as its retained ends contain it.
    pub(super) fn oversized_header(&self) -> OversizedMessageHeader {
        let last: Vec<u8> = self.scanner.last.iter().copied().collect();
        OversizedMessageHeader::parse(&self.scanner.first, &last)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for FrameInspector<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.scanner.scan(&buf.filled()[before..]);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FrameInspector<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// Parser state within the stream of frames (RFC 6455, section 5.2).
#[derive(Default)]
struct FrameScanner {
    limit: u64,
    /// The received part of a frame's header.
    head: Vec<u8>,
    /// The frame whose payload is being received.
    frame: Option<PartialFrame>,
    /// Size of the current message, over all its frames.
    size: u64,
    too_large: Option<OversizeProgress>,
    first: Vec<u8>,
    last: VecDeque<u8>,
}

/// Progress of an oversized message. Frames after it are not inspected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OversizeProgress {
    Receiving,
    Received,
}

struct PartialFrame {
    remaining: u64,
    mask: [u8; 4],
    /// Position of the next byte in the mask.
    mask_offset: usize,
    kind: FrameKind,
    is_final: bool,
    /// True if the ends of this frame's payload are retained; false if the message is read as a
    /// whole.
    keeps_edges: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FrameKind {
    /// The first frame of a message; `Continuation` is a later one.
    FirstFragment,
    Continuation,
    /// A control frame such as a ping, which may occur between the frames of a message.
    Control,
}

impl PartialFrame {
    /// Parses a frame's header, once it is complete.
    fn parse(head: &[u8]) -> Option<Self> {
        let (kind, length) = (*head.first()?, *head.get(1)?);
        let more = match length & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let more_length = head.get(2..2 + more)?;
        let remaining = match more {
            0 => u64::from(length & 0x7f),
            _ => more_length.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)),
        };
        let mut mask = [0; 4];
        if length & 0x80 != 0 {
            mask.copy_from_slice(head.get(2 + more..6 + more)?);
        }
        let part = match kind & 0x0f {
            0 => FrameKind::Continuation,
            1..=7 => FrameKind::FirstFragment,
            _ => FrameKind::Control,
        };
        Some(Self {
            remaining,
            mask,
            mask_offset: 0,
            kind: part,
            is_final: kind & 0x80 != 0,
            keeps_edges: false,
        })
    }
}

impl FrameScanner {
    fn scan(&mut self, mut bytes: &[u8]) {
        while let Some(next) =
            bytes.first().filter(|_| self.too_large != Some(OversizeProgress::Received))
        {
            let Some(mut frame) = self.frame.take() else {
                self.head.push(*next);
                bytes = &bytes[1..];
                if let Some(frame) = PartialFrame::parse(&self.head) {
                    self.head.clear();
                    self.begin_frame(frame);
                }
                continue;
            };
            let count = usize::try_from(frame.remaining).unwrap_or(usize::MAX).min(bytes.len());
            if frame.keeps_edges {
                self.keep_edges(&bytes[..count], |index| {
                    frame.mask[(frame.mask_offset + index) % 4]
                });
            }
            frame.remaining -= count as u64;
            frame.mask_offset = (frame.mask_offset + count) % 4;
            bytes = &bytes[count..];
            self.advance_frame(frame);
        }
    }

    fn begin_frame(&mut self, mut frame: PartialFrame) {
        if frame.kind != FrameKind::Control && self.too_large.is_none() {
            if frame.kind == FrameKind::FirstFragment {
                self.size = 0;
                self.first.clear();
                self.last.clear();
            }
            self.size = self.size.saturating_add(frame.remaining);
            self.too_large = (self.size > self.limit).then_some(OversizeProgress::Receiving);
        }
        let whole =
            frame.kind == FrameKind::FirstFragment && frame.is_final && self.too_large.is_none();
        frame.keeps_edges = frame.kind != FrameKind::Control && !whole;
        self.advance_frame(frame);
    }

    fn advance_frame(&mut self, frame: PartialFrame) {
        if frame.remaining > 0 {
            self.frame = Some(frame);
        } else if frame.is_final && frame.kind != FrameKind::Control && self.too_large.is_some() {
            self.too_large = Some(OversizeProgress::Received);
        }
    }

    fn keep_edges(&mut self, part: &[u8], mask: impl Fn(usize) -> u8) {
        let capacity = EDGE_BYTES.saturating_sub(self.first.len()).min(part.len());
        self.first
            .extend(part[..capacity].iter().enumerate().map(|(index, byte)| byte ^ mask(index)));
        let begin = part.len().saturating_sub(EDGE_BYTES);
        let more = part[begin..].iter().enumerate().map(|(index, byte)| byte ^ mask(begin + index));
        self.last.extend(more);
        let too_many = self.last.len().saturating_sub(EDGE_BYTES);
        self.last.drain(..too_many);
    }
}

/// The header of an oversized message.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct OversizedMessageHeader {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) tool_call_id: Option<String>,
    pub(super) attempt: Option<u32>,
}

impl OversizedMessageHeader {
    /// Extracts the header from the first and last bytes of a message. Only top-level fields count,
    /// because a result may contain fields with the same names.
    fn parse(first: &[u8], last: &[u8]) -> Self {
        let mut about = Self::default();
        // Fails where the retained bytes end; fields that were read until then remain.
        let _ =
            serde_json::Deserializer::from_slice(first).deserialize_map(HeaderVisitor(&mut about));
        let end = Self::from_tail(last);
        Self {
            kind: about.kind.or(end.kind),
            tool_call_id: about.tool_call_id.or(end.tool_call_id),
            attempt: about.attempt.or(end.attempt),
        }
    }

    /// Parses the fields after a comma, if only top-level fields of the message follow it: only
    /// then does the rest become a valid object when an opening brace is put before it.
    fn from_tail(last: &[u8]) -> Self {
        let commas = last.iter().enumerate().filter(|(_, byte)| **byte == b',');
        let rests = commas.map(|(index, _)| [b"{", &last[index + 1..]].concat());
        let mut read = rests.filter_map(|rest| serde_json::from_slice(&rest).ok());
        read.next().unwrap_or_default()
    }
}

struct HeaderVisitor<'a>(&'a mut OversizedMessageHeader);

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key::<String>()? {
            match field.as_str() {
                "type" => self.0.kind = map.next_value()?,
                "tool_call_id" => self.0.tool_call_id = map.next_value()?,
                "attempt" => self.0.attempt = map.next_value()?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
