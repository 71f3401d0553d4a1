//! The `toolcrib-bench` binary.

use std::process::ExitCode;

/// The same allocator as in the `toolcrib` binary, so that the baseline has no disadvantage.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    toolcrib_bench::cli::main()
}
