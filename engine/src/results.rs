//! Results in the size that a reader asked for: digests, slices and token counts. Pure functions.

pub mod digest;
pub mod slice;
pub mod text_lines;
pub mod tokens;
