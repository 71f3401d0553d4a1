//! The `toolcrib` binary.

use std::process::ExitCode;

/// Calls are freed on a different thread than the one that allocated them; jemalloc handles that
/// pattern best.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    toolcrib_server::cli::main()
}
