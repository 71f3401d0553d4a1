//! Terminates the process groups that a killed server leaves behind.
//!
//! A killed server cannot stop its child processes. Their standard input closes, and most exit for
//! that reason. For those that do not, the server starts its own executable a second time as a
//! reaper, which only reads from a pipe held by the server. When the pipe closes, the server is
//! gone, regardless of the cause, and the reaper sends SIGTERM and then SIGKILL to the remaining
//! groups.
//!
//! Only the `toolcrib` program can do this, because only its executable accepts the reaper's
//! argument. When the server is embedded in another program, no reaper runs.

use std::ffi::OsStr;
use std::process::ExitCode;

/// The command-line argument that makes the program run as the reaper.
const REAPER_ARGUMENT: &str = "watch-for-orphans";

/// A process group that the reaper terminates when the server is gone. Dropping the guard
/// unregisters the group.
pub(crate) struct ProcessGroupGuard(#[cfg_attr(not(unix), allow(dead_code))] i32);

#[cfg(unix)]
impl Drop for ProcessGroupGuard {
    fn drop(&mut self) {
        unix::update_group(self.0, false);
    }
}

/// Registers a process group with the reaper.
pub(crate) fn guard_process_group(group: i32) -> ProcessGroupGuard {
    #[cfg(unix)]
    unix::update_group(group, true);
    ProcessGroupGuard(group)
}

/// Runs the reaper if this process was started as one, and returns its exit code. Otherwise returns
/// `None`, and from then on this process may start a reaper.
pub fn run_if_reaper(first: Option<&OsStr>) -> Option<ExitCode> {
    #[cfg(unix)]
    {
        if first.is_some_and(|word| word == REAPER_ARGUMENT) {
            unix::run_reaper();
            return Some(ExitCode::SUCCESS);
        }
        unix::enable();
    }
    #[cfg(not(unix))]
    let _ = first;
    None
}

#[cfg(unix)]
mod unix {
    use std::collections::BTreeSet;
    use std::io::{BufRead, Write};
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::{Child, ChildStdin, Command, Stdio};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;
    use rustix::process::{Pid, Signal, kill_process_group, setsid, test_kill_process_group};

    /// Grace period before SIGTERM is sent, and again after each signal.
    const EXIT_GRACE_PERIOD: Duration = Duration::from_secs(2);

    /// Interval between checks for groups that have exited.
    const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(50);

    /// Delay before a reaper that died is restarted.
    const RESTART_DELAY: Duration = Duration::from_secs(1);

    /// The server's view of the reaper.
    struct ReaperState {
        enabled: bool,
        groups: BTreeSet<i32>,
        /// Standard input of the current reaper.
        input: Option<ChildStdin>,
        generation: u64,
    }

    static REAPER: Mutex<ReaperState> = Mutex::new(ReaperState {
        enabled: false,
        groups: BTreeSet::new(),
        input: None,
        generation: 0,
    });

    pub(crate) fn enable() {
        REAPER.lock().enabled = true;
    }

    /// Reports to the reaper that a group exists, or that it is gone.
    pub(crate) fn update_group(group: i32, exists: bool) {
        let mut processes = REAPER.lock();
        if !processes.enabled {
            return;
        }
        let changed = match exists {
            true => processes.groups.insert(group),
            false => processes.groups.remove(&group),
        };
        let sign = if exists { '+' } else { '-' };
        if changed && processes.write_line(&format!("{sign}{group}\n")).is_err() {
            processes.start_reaper();
        }
    }

    impl ReaperState {
        fn write_line(&mut self, line: &str) -> std::io::Result<()> {
            let input = self.input.as_mut().ok_or(std::io::ErrorKind::NotConnected)?;
            input.write_all(line.as_bytes())
        }

        /// Starts a reaper, possibly replacing one that died, and sends it all groups.
        fn start_reaper(&mut self) {
            self.input = None;
            if self.groups.is_empty() {
                return;
            }
            let lines: String = self.groups.iter().map(|group| format!("+{group}\n")).collect();
            let spawned = spawn_reaper_process().and_then(|mut watcher| {
                self.input = watcher.stdin.take();
                self.generation += 1;
                let number = self.generation;
                std::thread::Builder::new().spawn(move || restart_when_ended(watcher, number))?;
                self.write_line(&lines)
            });
            if let Err(error) = spawned {
                tracing::warn!(%error, "child processes may outlive this server if it is killed");
            }
        }
    }

    /// Waits for a reaper to exit and starts another, unless a newer one already runs.
    fn restart_when_ended(mut watcher: Child, number: u64) {
        let _ = watcher.wait();
        std::thread::sleep(RESTART_DELAY);
        let mut processes = REAPER.lock();
        if processes.generation == number {
            processes.start_reaper();
        }
    }

    fn spawn_reaper_process() -> std::io::Result<Child> {
        // This path refers to the running program even after its file was replaced.
        let itself = PathBuf::from("/proc/self/exe");
        let program = if itself.exists() { itself } else { std::env::current_exe()? };
        Command::new(program)
            .arg0("toolcrib")
            .arg(super::REAPER_ARGUMENT)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    }

    /// Reads the list of groups until the server is gone, then terminates those that are left.
    pub(crate) fn run_reaper() {
        // A new session, so that signals to the server's terminal or process group do not reach the
        // reaper.
        let _ = setsid();
        let mut groups = BTreeSet::new();
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            match line.split_at_checked(1) {
                Some(("+", group)) => groups.extend(group.parse::<i32>()),
                Some(("-", group)) => drop(group.parse().map(|group: i32| groups.remove(&group))),
                _ => {}
            }
        }
        // 0 would mean the reaper's own group, and 1 every process.
        groups.retain(|group| *group > 1);
        for signal in [None, Some(Signal::TERM), Some(Signal::KILL)] {
            for group in groups.iter().filter_map(|group| Pid::from_raw(*group)) {
                // The group may have exited in the meantime.
                let _ = signal.map(|signal| kill_process_group(group, signal));
            }
            let until = Instant::now() + EXIT_GRACE_PERIOD;
            while !groups.is_empty() && Instant::now() < until {
                // Once a group is gone, its number may be reused: it must not be signalled again.
                groups.retain(|group| {
                    Pid::from_raw(*group)
                        .is_some_and(|group| test_kill_process_group(group).is_ok())
                });
                std::thread::sleep(EXIT_CHECK_INTERVAL);
            }
        }
    }
}
