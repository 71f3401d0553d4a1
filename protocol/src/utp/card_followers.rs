//! Tool services that receive the cards of commands in advance, so that they need not request them.
//!
//! This state is in memory only and expires quickly. A tool service that is not registered requests
//! its cards, as every tool service may.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time for which a tool service receives cards after it has registered.
pub const FOLLOW_TTL: Duration = Duration::from_secs(15);
/// Maximum number of targets that have followers.
const MAX_FOLLOWED_TARGETS: usize = 10_000;

struct CardFollower {
    inbox: Arc<str>,
    until: Instant,
}

/// The followers of each target, by project and target.
#[derive(Default)]
pub struct CardFollowers {
    projects: Mutex<HashMap<String, HashMap<String, Vec<CardFollower>>>>,
}

impl CardFollowers {
    /// Registers an inbox for the cards of a target, and removes expired followers.
    pub fn register(&self, project: &str, target: &str, inbox: &str) {
        let (now, mut projects) = (Instant::now(), self.projects.lock());
        projects.retain(|_, targets| {
            targets.retain(|_, followers| {
                followers.retain(|follower| follower.until > now && *follower.inbox != *inbox);
                !followers.is_empty()
            });
            !targets.is_empty()
        });
        if projects.values().map(HashMap::len).sum::<usize>() >= MAX_FOLLOWED_TARGETS {
            return;
        }
        let targets = projects.entry(project.to_owned()).or_default();
        let followers = targets.entry(target.to_owned()).or_default();
        followers.push(CardFollower { inbox: inbox.into(), until: now + FOLLOW_TTL });
    }

    /// Returns the inbox for the cards of a target. Returns `None` while several processes serve
    /// the target: the broker decides which of them gets the command, and the others would receive
    /// the card for nothing.
    pub fn sole_inbox(&self, project: &str, target: &str) -> Option<Arc<str>> {
        let (now, projects) = (Instant::now(), self.projects.lock());
        let mut active =
            projects.get(project)?.get(target)?.iter().filter(|follower| follower.until > now);
        let only = active.next()?.inbox.clone();
        active.next().is_none().then_some(only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sole_follower_of_a_target_gets_its_cards() {
        let followers = CardFollowers::default();
        assert_eq!(followers.sole_inbox("p", "t"), None);
        followers.register("p", "t", "_INBOX.a");
        followers.register("p", "t", "_INBOX.a");
        assert_eq!(followers.sole_inbox("p", "t").as_deref(), Some("_INBOX.a"));
        assert_eq!(followers.sole_inbox("p", "other"), None);
        assert_eq!(followers.sole_inbox("other", "t"), None);
        followers.register("p", "t", "_INBOX.b");
        assert_eq!(followers.sole_inbox("p", "t"), None, "two followers: neither is chosen");
    }
}
