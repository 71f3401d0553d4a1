//! Boxes: ordered sets of cards that give agents their context. A box never changes; a new box
//! inherits the cards of others.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::domain::agent::{CardBox, agent_tool_name};
use crate::domain::caller::Caller;
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::id::hex;
use crate::ports::core::{Core, from_store_error};
use crate::utp::cards::Cards;
use crate::utp::turns::delegated::turn_id_of;

/// Maximum number of cards in one box, without those that it inherits.
const MAX_CARDS: usize = 1_000;

/// Maximum number of cards in one box together with those that it inherits.
const MAX_TOTAL_CARDS: usize = 10_000;

/// Maximum number of boxes that a box inherits, directly and indirectly.
const MAX_INHERITED_BOXES: usize = 64;

/// The boxes of a project's cards.
pub struct Boxes {
    core: Arc<Core>,
    cards: Arc<Cards>,
    /// Numbers of boxes by project, for projects that created one since the start.
    counts: Mutex<HashMap<String, BoxCount>>,
}

/// The number of a project's boxes. It is never too low: boxes that were deleted, or could not be
/// stored, since the last count are in it.
#[derive(Debug, Clone, Copy, Default)]
struct BoxCount {
    total: usize,
    /// Boxes among them that are being stored.
    in_flight: usize,
    /// Boxes that were reserved since the start.
    reserved: usize,
}

impl BoxCount {
    /// Counts one more box, unless there are as many as there may be.
    fn reserve(&mut self, max: usize) -> bool {
        let fits = self.total < max;
        self.total += usize::from(fits);
        self.in_flight += usize::from(fits);
        self.reserved += usize::from(fits);
        fits
    }

    /// Sets the total to the number of stored boxes. That number may lack the boxes that were being
    /// stored when the count began (`before`), and those that were reserved since.
    fn recount(&mut self, stored: usize, before: Self) {
        self.total = stored + before.in_flight + (self.reserved - before.reserved);
    }
}

/// A box that counts already and is being stored.
struct BoxReservation<'a> {
    boxes: &'a Boxes,
    project: &'a str,
}

impl Drop for BoxReservation<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.boxes.counts.lock().get_mut(self.project) {
            count.in_flight = count.in_flight.saturating_sub(1);
        }
    }
}

impl Boxes {
    pub(crate) fn new(core: &Arc<Core>, cards: &Arc<Cards>) -> Self {
        Self { core: core.clone(), cards: cards.clone(), counts: Mutex::default() }
    }

    /// Creates a box with these cards, after those of the parent boxes. Every card and every parent
    /// must exist in the caller's project.
    pub async fn create_box(
        &self,
        caller: &Caller,
        card_ids: Vec<String>,
        parent_ids: Vec<String>,
    ) -> Result<CardBox, Error> {
        if !caller.may_invoke() && !caller.may_provide() {
            let message = format!("a key with the role {} cannot create boxes", caller.roles);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        for (field, len, max) in [
            ("card_ids", card_ids.len(), MAX_CARDS),
            ("parent_ids", parent_ids.len(), MAX_INHERITED_BOXES),
        ] {
            if len > max {
                let message = format!("{field} has {len} entries, at most {max} are allowed");
                return Err(invalid(field, message));
            }
        }
        for (n, card_id) in card_ids.iter().enumerate() {
            self.cards.card(caller, card_id).await.map_err(|error| match error.code() {
                Code::NotFound => {
                    let excerpt: String = card_id.chars().take(80).collect();
                    invalid(&format!("card_ids/{n}"), format!("there is no card \"{excerpt}\""))
                }
                _ => error,
            })?;
        }
        for (n, parent_id) in parent_ids.iter().enumerate() {
            self.card_box(caller, parent_id).await.map_err(|error| match error.code() {
                Code::NotFound => {
                    let excerpt: String = parent_id.chars().take(80).collect();
                    let message = format!("there is no box \"{excerpt}\"");
                    invalid(&format!("parent_ids/{n}"), message)
                }
                _ => error,
            })?;
        }
        self.check_total(&caller.project, &card_ids, &parent_ids).await?;
        let _reservation = self.reserve_box(&caller.project).await?;
        let created_ms = self.core.wall_ms();
        let new = CardBox {
            box_id: self.next_box_id(created_ms),
            project: caller.project.clone(),
            card_ids,
            parent_ids,
            created_by: caller.agent.clone(),
            created_ms,
        };
        self.core.store.agents().put_box(new.clone()).await.map_err(from_store_error)?;
        Ok(new)
    }

    /// Counts a new box of a project. Refuses it if the project has as many as it may have.
    async fn reserve_box<'a>(&'a self, project: &'a str) -> Result<BoxReservation<'a>, Error> {
        let max = self.core.limits.max_boxes_per_project;
        let known = self.counts.lock().get_mut(project).map(|count| (count.reserve(max), *count));
        let (is_reserved, before) = known.unwrap_or_default();
        if !is_reserved {
            let stored = self.core.store.agents().count_boxes(project).await;
            let stored = stored.map_err(from_store_error)?;
            let mut counts = self.counts.lock();
            let count = counts.entry(project.to_owned()).or_default();
            count.recount(stored, before);
            if !count.reserve(max) {
                let message = format!(
                    "the project has {max} boxes, the maximum (limits.max_boxes_per_project); use \
                     an existing box, or wait until the retention has deleted old ones"
                );
                return Err(Error::refused(Code::PayloadTooLarge, message));
            }
        }
        Ok(BoxReservation { boxes: self, project })
    }

    /// Checks the number of cards and of boxes that a new box has with those that it inherits.
    async fn check_total(
        &self,
        project: &str,
        card_ids: &[String],
        parent_ids: &[String],
    ) -> Result<(), Error> {
        let (cards, boxes) = self.collect_cards(project, parent_ids.to_vec()).await?;
        let inherited: HashSet<&String> = cards.iter().collect();
        let own = card_ids.iter().filter(|id| !inherited.contains(id)).count();
        let total = own + cards.len();
        if total > MAX_TOTAL_CARDS {
            let message = format!(
                "the box would have {total} cards with those of its parents, at most \
                 {MAX_TOTAL_CARDS} are allowed"
            );
            return Err(invalid("parent_ids", message));
        }
        if boxes > MAX_INHERITED_BOXES {
            let message = format!(
                "the box would inherit {boxes} boxes, at most {MAX_INHERITED_BOXES} are allowed"
            );
            return Err(invalid("parent_ids", message));
        }
        Ok(())
    }

    /// Returns a box and the ids of its cards that the caller may read in order, inherited ones
    /// first. A box of which the caller may read no card is answered like one that does not exist.
    pub async fn card_box(
        &self,
        caller: &Caller,
        box_id: &str,
    ) -> Result<(CardBox, Vec<String>), Error> {
        let found = self.find_box(&caller.project, box_id).await?;
        let mut found = found.ok_or_else(|| box_not_found(box_id))?;
        let all = self.collect_cards(&caller.project, vec![box_id.to_owned()]).await?.0;
        let mut readers: Vec<Caller> =
            std::iter::successors(Some(caller.clone()), Caller::caller_above).collect();
        let mut card_ids = self.select_readable(&readers, &all).await?;
        if card_ids.len() < all.len() {
            readers.extend(self.find_handing_callers(caller, box_id).await?);
            card_ids = self.select_readable(&readers, &all).await?;
        }
        if card_ids.is_empty() && !all.is_empty() {
            return Err(box_not_found(box_id));
        }
        found.card_ids.retain(|card_id| card_ids.contains(card_id));
        Ok((found, card_ids))
    }

    /// Returns those of the cards that one of these callers may read.
    async fn select_readable(
        &self,
        readers: &[Caller],
        card_ids: &[String],
    ) -> Result<Vec<String>, Error> {
        let mut readable = Vec::with_capacity(card_ids.len());
        for card_id in card_ids {
            if self.cards.is_readable(readers, card_id).await? {
                readable.push(card_id.clone());
            }
        }
        Ok(readable)
    }

    /// Returns the callers whose open calls hand this box to the agent that asks for it.
    async fn find_handing_callers(
        &self,
        caller: &Caller,
        box_id: &str,
    ) -> Result<Vec<Caller>, Error> {
        let name = agent_tool_name(&caller.agent);
        let mut callers = Vec::new();
        for call in self.cards.dispatcher.open_calls.all().iter().map(|entry| entry.call()) {
            if call.project != caller.project || call.target.tool != name {
                continue;
            }
            let turn_id = turn_id_of(&call.id, call.attempt);
            let turn = self.core.store.utp().turn(&call.project, &turn_id).await;
            let handed = turn.map_err(from_store_error)?.and_then(|turn| turn.context_box_id);
            if handed.as_deref() == Some(box_id) {
                let first = Some(call.caller());
                callers.extend(std::iter::successors(first, Caller::caller_above));
            }
        }
        Ok(callers)
    }

    async fn find_box(&self, project: &str, box_id: &str) -> Result<Option<CardBox>, Error> {
        self.core.store.agents().card_box(project, box_id).await.map_err(from_store_error)
    }

    /// Returns the ids of the cards of these boxes in order, those of their parents first, each
    /// once; and the number of boxes that they come from.
    async fn collect_cards(
        &self,
        project: &str,
        box_ids: Vec<String>,
    ) -> Result<(Vec<String>, usize), Error> {
        let (mut rest, mut seen) = (box_ids, HashSet::new());
        let mut parts: Vec<Vec<String>> = Vec::new();
        while let Some(id) = rest.pop() {
            // One more than allowed, so that a box with too many is found.
            if seen.len() > MAX_INHERITED_BOXES || !seen.insert(id.clone()) {
                continue;
            }
            let Some(found) = self.find_box(project, &id).await? else { continue };
            rest.extend(found.parent_ids);
            parts.push(found.card_ids);
        }
        let mut known = HashSet::new();
        let cards = parts.into_iter().rev().flatten();
        Ok((cards.filter(|card_id| known.insert(card_id.clone())).collect(), seen.len()))
    }

    /// Returns a new UUID.
    fn next_box_id(&self, now_ms: u64) -> String {
        let digest = Sha256::digest(self.core.id_generator.next_id("box_", now_ms));
        let mut bytes = [0_u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        // The version and variant bits of a random UUID.
        (bytes[6], bytes[8]) = (bytes[6] & 0x0f | 0x40, bytes[8] & 0x3f | 0x80);
        let text = hex(&bytes);
        [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
    }
}

/// Builds the refusal for a box that does not exist.
fn box_not_found(box_id: &str) -> Error {
    let excerpt: String = box_id.chars().take(80).collect();
    let message = format!("there is no box \"{excerpt}\"");
    Error::not_found(message, "POST /v1/boxes creates a box")
}

fn invalid(field: &str, message: String) -> Error {
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    fault.with_detail(json!({ "pointer": format!("/{field}") })).into()
}

#[cfg(test)]
mod tests {
    use super::BoxCount;

    #[test]
    fn a_count_is_never_too_low() {
        let mut count = BoxCount { total: 5, ..BoxCount::default() };
        assert!(count.reserve(6) && !count.reserve(6));
        // One box is being stored when the count begins. It is stored, and then another one, after
        // the store has read a number without them.
        let before = count;
        count.in_flight -= 1;
        count.recount(3, before);
        assert_eq!(count.total, 4);
        assert!(count.reserve(6));
        count.in_flight -= 1;
        count.recount(3, before);
        assert_eq!(count.total, 5);
    }
}
