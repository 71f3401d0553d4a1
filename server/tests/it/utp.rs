//! Tools over NATS: projects and definitions, cards, commands, reports, turns, inboxes.

mod away;
mod calls;
mod commands;
mod identity;
mod projects;
mod reports;
mod services;
mod turns;
