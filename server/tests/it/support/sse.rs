//! Reads server-sent events from a stream.

use futures::StreamExt;
use futures::stream::BoxStream;
use reqwest::RequestBuilder;
use serde_json::Value;

use super::soon;

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub id: Option<u64>,
    pub name: String,
    pub data: Value,
}

/// An open stream.
pub struct Sse {
    bytes: BoxStream<'static, reqwest::Result<axum::body::Bytes>>,
    unread: Vec<u8>,
}

impl Sse {
    pub async fn open(request: RequestBuilder) -> Self {
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status(), response.headers().clone());
        if status != 200 {
            panic!("{status}: {}", response.text().await.unwrap());
        }
        let kind = headers["content-type"].to_str().unwrap();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        Self { bytes: response.bytes_stream().boxed(), unread: Vec::new() }
    }

    /// Returns the next event, or `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(index) = self.unread.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.unread.drain(..index + 2).collect();
                match parse(std::str::from_utf8(&block).unwrap()) {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            match soon("an event or the stream's end", self.bytes.next()).await {
                Some(Ok(bytes)) => self.unread.extend_from_slice(&bytes),
                _ => return None,
            }
        }
    }

    /// Returns the next event; panics at the end of the stream.
    pub async fn event(&mut self) -> Event {
        self.next().await.expect("the stream ended")
    }

    /// Returns the next event with this name; skips others.
    pub async fn wait_for(&mut self, name: &str) -> Event {
        loop {
            let event = self.event().await;
            if event.name == name {
                return event;
            }
        }
    }

    /// Returns all events until the stream ends.
    pub async fn rest(&mut self) -> Vec<Event> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

/// Parses a block; returns `None` for a comment.
fn parse(block: &str) -> Option<Event> {
    let (mut id, mut name, mut data) = (None, None, String::new());
    for line in block.lines() {
        match line.split_once(':').map(|(field, value)| (field, value.trim_start())) {
            Some(("id", value)) => id = Some(value.parse().unwrap()),
            Some(("event", value)) => name = Some(value.to_owned()),
            Some(("data", value)) => data.push_str(value),
            _ => {}
        }
    }
    let data = serde_json::from_str(&data).ok()?;
    Some(Event { id, name: name.unwrap_or_default(), data })
}
