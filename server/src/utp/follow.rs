//! Who is sent the cards of commands beforehand, and so need not ask for them.
//!
//! It is known in memory only and for a short time: whoever is forgotten asks, as everybody may.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a tool service is sent cards after it has asked for that.
pub const FOLLOWS: Duration = Duration::from_secs(15);
/// Most targets that are followed at once.
const MOST: usize = 10_000;

struct Follower {
    inbox: Arc<str>,
    until: Instant,
}

/// The followers of targets, by project and target.
#[derive(Default)]
pub struct Followers {
    known: Mutex<HashMap<String, HashMap<String, Vec<Follower>>>>,
}

impl Followers {
    /// Somebody wants the cards for a target.
    pub fn follow(&self, project: &str, target: &str, inbox: &str) {
        let (now, mut known) = (Instant::now(), self.known.lock());
        known.retain(|_, targets| {
            targets.retain(|_, followers| {
                followers.retain(|follower| follower.until > now && *follower.inbox != *inbox);
                !followers.is_empty()
            });
            !targets.is_empty()
        });
        if known.values().map(HashMap::len).sum::<usize>() >= MOST {
            return;
        }
        let targets = known.entry(project.to_owned()).or_default();
        let followers = targets.entry(target.to_owned()).or_default();
        followers.push(Follower { inbox: inbox.into(), until: now + FOLLOWS });
    }

    /// Where the cards for a target go. Nowhere while several processes serve it: nobody knows
    /// which of them is given the command, and all the others would be sent the card in vain.
    pub fn of(&self, project: &str, target: &str) -> Option<Arc<str>> {
        let (now, known) = (Instant::now(), self.known.lock());
        let mut there =
            known.get(project)?.get(target)?.iter().filter(|follower| follower.until > now);
        let only = there.next()?.inbox.clone();
        there.next().is_none().then_some(only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_only_follower_of_a_target_is_sent_its_cards() {
        let followers = Followers::default();
        assert_eq!(followers.of("p", "t"), None);
        followers.follow("p", "t", "_INBOX.a");
        followers.follow("p", "t", "_INBOX.a");
        assert_eq!(followers.of("p", "t").as_deref(), Some("_INBOX.a"));
        assert_eq!(followers.of("p", "other"), None);
        assert_eq!(followers.of("other", "t"), None);
        followers.follow("p", "t", "_INBOX.b");
        assert_eq!(followers.of("p", "t"), None, "which of the two?");
    }
}
