//! Limits the work that the messages of one client cause at a time.

use std::sync::Arc;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Limits the messages of one client in progress: their number, and their total size to that of one
/// maximum message in addition to the one that was read last.
pub(super) struct MessageLimiter {
    slots: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// A permit for one message: a slot, and the bytes of the message.
pub(super) struct MessagePermit {
    _slot: OwnedSemaphorePermit,
    bytes: OwnedSemaphorePermit,
}

impl MessageLimiter {
    pub(super) fn new(number: usize, bytes: usize) -> Self {
        let bytes = bytes.min(u32::MAX as usize);
        Self { slots: Arc::new(Semaphore::new(number)), bytes: Arc::new(Semaphore::new(bytes)) }
    }

    pub(super) async fn acquire(&self) -> Result<MessagePermit, AcquireError> {
        let slot = self.slots.clone().acquire_owned().await?;
        Ok(MessagePermit { _slot: slot, bytes: self.bytes.clone().acquire_owned().await? })
    }

    /// Extends a permit once the size of its message is known. If fewer bytes are free, takes all
    /// of them; the next message is then not read until some are released.
    pub(super) fn reserve_bytes(&self, mut permit: MessagePermit, size: usize) -> MessagePermit {
        let more = size.saturating_sub(1).min(self.bytes.available_permits());
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        if let Ok(more) = self.bytes.clone().try_acquire_many_owned(more) {
            permit.bytes.merge(more);
        }
        permit
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn try_acquire(limiter: &MessageLimiter, size: usize) -> Option<MessagePermit> {
        limiter.acquire().now_or_never().map(|permit| limiter.reserve_bytes(permit.unwrap(), size))
    }

    #[test]
    fn messages_and_bytes_are_limited() {
        let limiter = MessageLimiter::new(3, 100);
        let small: Vec<MessagePermit> = (0..3).filter_map(|_| try_acquire(&limiter, 0)).collect();
        assert_eq!((small.len(), try_acquire(&limiter, 0).is_none()), (3, true), "three at a time");
        drop(small);
        let first = try_acquire(&limiter, 60);
        let second = try_acquire(&limiter, 1_000);
        assert!(first.is_some() && second.is_some(), "some bytes were left");
        assert!(try_acquire(&limiter, 1).is_none(), "no bytes are left");
        drop(first);
        let third = try_acquire(&limiter, 60);
        assert!(third.is_some() && try_acquire(&limiter, 1).is_none());
        drop((second, third));
        assert_eq!(limiter.bytes.available_permits(), 100);
    }
}
