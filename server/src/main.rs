//! The `toolcrib` binary: parses the command line, builds the async runtime and runs the command.

use std::process::ExitCode;

/// Calls are freed on a different thread than the one that allocated them; jemalloc handles that
/// pattern best.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    if let Some(code) =
        toolcrib_sources::child_reaper::run_if_reaper(std::env::args_os().nth(1).as_deref())
    {
        return code;
    }
    let ready = match toolcrib_server::cli::parse_command_line(std::env::args_os().collect()) {
        Ok(ready) => ready,
        Err(code) => return code.into(),
    };
    let mut builder = if ready.needs_multi_thread() {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    let runtime = match builder.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: the runtime cannot be started: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(toolcrib_server::cli::run(ready));
    // An abandoned blocking read must not keep the process alive.
    runtime.shutdown_background();
    code.into()
}
