//! Tools over NATS: projects and definitions, cards, commands, reports, turns, inboxes.

mod calls;
mod projects;
