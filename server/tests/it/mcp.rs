//! MCP: the crib as a server.

mod calling;
mod entering;
mod listing;
mod tasks;
