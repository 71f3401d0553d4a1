//! Ends what the server has started and left behind.
//!
//! A server that is killed cannot end its programs any more. They see the end of their standard
//! input, and most end by that; for those that do not, this very program is started a second time
//! and does nothing but hold a pipe of the server's. When that ends, the server is gone, however it
//! went, and the groups of processes that it still had are ended: asked first, and then killed.
//!
//! Only the program `toolcrib` can do this, since it is the one that can be started so. Where the
//! server is part of another program, nobody watches.

use std::ffi::OsStr;
use std::process::ExitCode;

/// The word that makes the program one that watches.
const WORD: &str = "watch-for-orphans";

/// A group of processes that is ended when the server is gone; until this is dropped.
pub(crate) struct Kept(#[cfg_attr(not(unix), allow(dead_code))] i32);

#[cfg(unix)]
impl Drop for Kept {
    fn drop(&mut self) {
        unix::tell(self.0, false);
    }
}

/// Keeps an eye on a group of processes.
pub(crate) fn keep(group: i32) -> Kept {
    #[cfg(unix)]
    unix::tell(group, true);
    Kept(group)
}

/// Whether this process was started to watch; then it does, and ends with this code. Otherwise, one
/// can be started from now on.
pub fn watch(first: Option<&OsStr>) -> Option<ExitCode> {
    #[cfg(unix)]
    {
        if first.is_some_and(|word| word == WORD) {
            unix::watch();
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

    /// How long they may take to end by themselves, and then after being asked to.
    const PATIENCE: Duration = Duration::from_secs(2);

    /// How often it is looked whether they have.
    const LOOK: Duration = Duration::from_millis(50);

    /// How long to wait before one that has died is started again.
    const AGAIN: Duration = Duration::from_secs(1);

    /// What the server knows.
    struct Watched {
        able: bool,
        groups: BTreeSet<i32>,
        /// To the watcher that was started last.
        input: Option<ChildStdin>,
        started: u64,
    }

    static WATCHED: Mutex<Watched> =
        Mutex::new(Watched { able: false, groups: BTreeSet::new(), input: None, started: 0 });

    pub(super) fn enable() {
        WATCHED.lock().able = true;
    }

    /// Tells the watcher of a group, or that it is gone.
    pub(super) fn tell(group: i32, here: bool) {
        let mut watched = WATCHED.lock();
        if !watched.able {
            return;
        }
        let changed = match here {
            true => watched.groups.insert(group),
            false => watched.groups.remove(&group),
        };
        let sign = if here { '+' } else { '-' };
        if changed && watched.say(&format!("{sign}{group}\n")).is_err() {
            watched.begin();
        }
    }

    impl Watched {
        fn say(&mut self, line: &str) -> std::io::Result<()> {
            let input = self.input.as_mut().ok_or(std::io::ErrorKind::NotConnected)?;
            input.write_all(line.as_bytes())
        }

        /// Starts a watcher, also in place of one that has died, and tells it everything.
        fn begin(&mut self) {
            self.input = None;
            if self.groups.is_empty() {
                return;
            }
            let lines: String = self.groups.iter().map(|group| format!("+{group}\n")).collect();
            let begun = start().and_then(|mut watcher| {
                self.input = watcher.stdin.take();
                self.started += 1;
                let number = self.started;
                std::thread::Builder::new().spawn(move || replace(watcher, number))?;
                self.say(&lines)
            });
            if let Err(error) = begun {
                tracing::warn!(%error, "programs may outlive this server if it is killed");
            }
        }
    }

    /// Waits for the end of a watcher, and starts another unless somebody has.
    fn replace(mut watcher: Child, number: u64) {
        let _ = watcher.wait();
        std::thread::sleep(AGAIN);
        let mut watched = WATCHED.lock();
        if watched.started == number {
            watched.begin();
        }
    }

    fn start() -> std::io::Result<Child> {
        // By this name it is the same program also after its file was replaced.
        let itself = PathBuf::from("/proc/self/exe");
        let program = if itself.exists() { itself } else { std::env::current_exe()? };
        Command::new(program)
            .arg0("toolcrib")
            .arg(super::WORD)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    }

    /// Reads which groups there are until the server is gone, and ends those that are left.
    pub(super) fn watch() {
        // What is done to the server's terminal or group is not done to this.
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
        // Never this group's own number, nor all there are.
        groups.retain(|group| *group > 1);
        for signal in [None, Some(Signal::TERM), Some(Signal::KILL)] {
            for group in groups.iter().filter_map(|group| Pid::from_raw(*group)) {
                // It may be gone meanwhile.
                let _ = signal.map(|signal| kill_process_group(group, signal));
            }
            let until = Instant::now() + PATIENCE;
            while !groups.is_empty() && Instant::now() < until {
                // A number that was free once may be another's afterwards.
                groups.retain(|group| {
                    Pid::from_raw(*group)
                        .is_some_and(|group| test_kill_process_group(group).is_ok())
                });
                std::thread::sleep(LOOK);
            }
        }
    }
}
