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
const EDGE: usize = 2_048;

/// A connection whose incoming frames are inspected.
pub(super) struct Tap<S> {
    inner: S,
    watch: Watch,
}

impl<S: AsyncRead + Unpin> Tap<S> {
    /// Wraps a connection. Messages over `limit` bytes are oversized.
    pub(super) fn new(inner: S, limit: usize) -> Self {
        Self { inner, watch: Watch { limit: limit as u64, ..Watch::default() } }
    }

    /// Reads to the end of the oversized message, but at most `most` bytes of it. A client that is
    /// still sending reads no response before it has finished.
    pub(super) async fn pass_over(&mut self, most: usize) {
        let mut scrap = vec![0; 65_536];
        let mut passed = 0;
        while self.watch.too_large == Some(Passing::Comes) && passed < most {
            match self.inner.read(&mut scrap).await {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    self.watch.see(&scrap[..read]);
                    passed += read;
                }
            }
        }
    }

    /// Returns the header of the oversized message, as far as its retained ends contain it.
    pub(super) fn about(&self) -> About {
        let last: Vec<u8> = self.watch.last.iter().copied().collect();
        About::of(&self.watch.first, &last)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Tap<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        self.watch.see(&buf.filled()[before..]);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tap<S> {
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
struct Watch {
    limit: u64,
    /// The received part of a frame's header.
    head: Vec<u8>,
    /// The frame whose payload is being received.
    frame: Option<Frame>,
    /// Size of the current message, over all its frames.
    size: u64,
    too_large: Option<Passing>,
    first: Vec<u8>,
    last: VecDeque<u8>,
}

/// Progress of an oversized message. Frames after it are not inspected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Passing {
    Comes,
    Over,
}

struct Frame {
    left: u64,
    mask: [u8; 4],
    /// Position of the next byte in the mask.
    turn: usize,
    part: Part,
    ends: bool,
    /// True if the ends of this frame's payload are retained; false if the message is read as a
    /// whole.
    kept: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The first frame of a message; `Continuation` is a later one.
    First,
    Later,
    /// A control frame such as a ping, which may occur between the frames of a message.
    Between,
}

impl Frame {
    /// Parses a frame's header, once it is complete.
    fn of(head: &[u8]) -> Option<Self> {
        let (kind, length) = (*head.first()?, *head.get(1)?);
        let more = match length & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let more_length = head.get(2..2 + more)?;
        let left = match more {
            0 => u64::from(length & 0x7f),
            _ => more_length.iter().fold(0, |sum, byte| (sum << 8) | u64::from(*byte)),
        };
        let mut mask = [0; 4];
        if length & 0x80 != 0 {
            mask.copy_from_slice(head.get(2 + more..6 + more)?);
        }
        let part = match kind & 0x0f {
            0 => Part::Later,
            1..=7 => Part::First,
            _ => Part::Between,
        };
        Some(Self { left, mask, turn: 0, part, ends: kind & 0x80 != 0, kept: false })
    }
}

impl Watch {
    fn see(&mut self, mut bytes: &[u8]) {
        while let Some(next) = bytes.first().filter(|_| self.too_large != Some(Passing::Over)) {
            let Some(mut frame) = self.frame.take() else {
                self.head.push(*next);
                bytes = &bytes[1..];
                if let Some(frame) = Frame::of(&self.head) {
                    self.head.clear();
                    self.begin(frame);
                }
                continue;
            };
            let here = usize::try_from(frame.left).unwrap_or(usize::MAX).min(bytes.len());
            if frame.kept {
                self.keep_edges(&bytes[..here], |at| frame.mask[(frame.turn + at) % 4]);
            }
            frame.left -= here as u64;
            frame.turn = (frame.turn + here) % 4;
            bytes = &bytes[here..];
            self.go_on(frame);
        }
    }

    fn begin(&mut self, mut frame: Frame) {
        if frame.part != Part::Between && self.too_large.is_none() {
            if frame.part == Part::First {
                self.size = 0;
                self.first.clear();
                self.last.clear();
            }
            self.size = self.size.saturating_add(frame.left);
            self.too_large = (self.size > self.limit).then_some(Passing::Comes);
        }
        let whole = frame.part == Part::First && frame.ends && self.too_large.is_none();
        frame.kept = frame.part != Part::Between && !whole;
        self.go_on(frame);
    }

    fn go_on(&mut self, frame: Frame) {
        if frame.left > 0 {
            self.frame = Some(frame);
        } else if frame.ends && frame.part != Part::Between && self.too_large.is_some() {
            self.too_large = Some(Passing::Over);
        }
    }

    fn keep_edges(&mut self, part: &[u8], mask: impl Fn(usize) -> u8) {
        let room = EDGE.saturating_sub(self.first.len()).min(part.len());
        self.first.extend(part[..room].iter().enumerate().map(|(at, byte)| byte ^ mask(at)));
        let begin = part.len().saturating_sub(EDGE);
        let more = part[begin..].iter().enumerate().map(|(at, byte)| byte ^ mask(begin + at));
        self.last.extend(more);
        let too_many = self.last.len().saturating_sub(EDGE);
        self.last.drain(..too_many);
    }
}

/// The header of an oversized message.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct About {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) tool_call_id: Option<String>,
    pub(super) attempt: Option<u32>,
}

impl About {
    /// Extracts the header from the first and last bytes of a message. Only top-level fields count,
    /// because a result may contain fields with the same names.
    fn of(first: &[u8], last: &[u8]) -> Self {
        let mut about = Self::default();
        // Fails where the retained bytes end; fields that were read until then remain.
        let _ = serde_json::Deserializer::from_slice(first).deserialize_map(Reading(&mut about));
        let end = Self::of_end(last);
        Self {
            kind: about.kind.or(end.kind),
            tool_call_id: about.tool_call_id.or(end.tool_call_id),
            attempt: about.attempt.or(end.attempt),
        }
    }

    /// Parses the fields after a comma, if only top-level fields of the message follow it: only
    /// then does the rest become a valid object when an opening brace is put before it.
    fn of_end(last: &[u8]) -> Self {
        let commas = last.iter().enumerate().filter(|(_, byte)| **byte == b',');
        let rests = commas.map(|(at, _)| [b"{", &last[at + 1..]].concat());
        let mut read = rests.filter_map(|rest| serde_json::from_slice(&rest).ok());
        read.next().unwrap_or_default()
    }
}

struct Reading<'a>(&'a mut About);

impl<'de> Visitor<'de> for Reading<'_> {
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
