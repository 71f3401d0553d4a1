//! MCP: the crib as a server.

mod asking;
mod calling;
mod catalogue;
mod entering;
mod listing;
mod oauth;
mod python;
mod stdio;
mod tasks;
