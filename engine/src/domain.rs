//! Plain records and pure functions. The store port, the lifecycle and every part of the engine
//! speak these types. Nothing here is asynchronous, reads a clock or logs.

pub mod access_rules;
pub mod agent;
pub mod call;
pub mod caller;
pub mod delivery;
pub mod derived;
pub mod directory;
pub mod event;
pub mod fault;
pub mod id;
pub mod json;
pub mod retry;
pub mod run;
pub mod tool;
pub mod trace;
pub mod utp;

pub use run::model_reply;
