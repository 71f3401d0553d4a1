//! MCP: the crib as a server.

mod asking;
mod calling;
mod entering;
mod listing;
mod tasks;
