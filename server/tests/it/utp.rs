//! Tools over NATS: projects and definitions, cards, commands, reports, turns, inboxes.

mod away;
mod calls;
mod commands;
mod fences;
mod identity;
mod news;
mod outbox;
mod projects;
mod reports;
mod services;
mod sharing;
mod steps;
mod together;
mod turns;
