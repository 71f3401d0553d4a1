//! The maximum size of a message from an upstream, so that an upstream cannot exhaust memory.

use futures::StreamExt;
use futures::stream::BoxStream;
use reqwest::Response;
use sse_stream::{Sse, SseStream};

/// Maximum size of a message.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The reason why a response cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("its answer is over {0} bytes")]
    TooLarge(usize),
    #[error(transparent)]
    Connection(#[from] reqwest::Error),
}

/// Reads the whole response, up to the limit.
pub(super) async fn read_body(answer: &mut Response, limit: usize) -> Result<Vec<u8>, BodyError> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        if body.len() + chunk.len() > limit {
            return Err(BodyError::TooLarge(limit));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Events as `rmcp` takes them.
pub(super) type SseEventStream = BoxStream<'static, Result<Sse, sse_stream::Error>>;

/// Returns the events of a stream, each limited in size.
pub(super) fn limited_event_stream(answer: Response, limit: usize) -> SseEventStream {
    let (mut size, mut at_start) = (0_usize, true);
    let chunks = answer.bytes_stream().map(move |chunk| {
        let chunk = chunk.map_err(std::io::Error::other)?;
        for byte in &chunk {
            match byte {
                // An empty line ends an event.
                b'\n' if at_start => size = 0,
                b'\n' => at_start = true,
                b'\r' => {}
                _ => at_start = false,
            }
            size += 1;
            if size > limit {
                let message = format!("an event of its stream is over {limit} bytes");
                return Err(std::io::Error::other(message));
            }
        }
        Ok(chunk)
    });
    SseStream::from_bytes_stream(chunks).boxed()
}
