//! Tools over NATS: projects and definitions, cards, commands, reports, turns, inboxes.

mod batching;
mod calls;
mod commands;
mod delegation;
pub mod experts;
mod fences;
mod identity;
mod outages;
mod outbox;
mod projects;
mod reports;
mod services;
mod sharing;
mod steps;
mod sys_commands;
mod turn_events;
mod turns;
