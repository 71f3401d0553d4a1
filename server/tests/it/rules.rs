//! Access rules over HTTP, MCP and the command line, with the effects that callers notice.

mod calls_of_others;
mod command_line;
mod documents;
mod waiting_calls;
