//! UTP: reports of tool services, agents' inboxes, turns, cards and dead letters.

pub mod cards;
pub mod inbox;
pub mod reports;
pub mod shared_tables;
pub mod turns;
