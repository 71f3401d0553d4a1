//! Results in the size that a reader asked for: digests, slices and token counts. Pure functions.

pub mod digest;
pub mod embedded;
pub mod mcp_content;
pub(crate) mod pointer;
pub(crate) mod rows;
pub mod shorten;
pub mod slice;
pub mod text_lines;
pub mod tokens;
