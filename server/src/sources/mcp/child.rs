//! A program that speaks MCP on its standard input and output: started with a clean environment,
//! its complaints kept, and ended with everything it has started itself.

use std::collections::VecDeque;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader, ReadBuf};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;

use super::connection::MAX_MESSAGE_BYTES;
use super::environment::Filled;
use super::tape::Tape;
use crate::orphans::{self, Kept};

/// What is kept of standard error: so many lines, each of at most so many bytes.
const LINES: usize = 200;
const LINE_BYTES: usize = 1_000;

/// How long it may take to end by itself, and then after being asked to.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long what it wrote last may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// The last lines of a program's standard error.
#[derive(Clone, Default)]
pub struct Complaints(Arc<Mutex<VecDeque<String>>>);

impl Complaints {
    /// The lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().iter().cloned().collect()
    }

    /// The last of them that says something.
    pub fn last(&self) -> Option<String> {
        self.0.lock().iter().rev().find(|line| !line.trim().is_empty()).cloned()
    }

    /// Keeps a line.
    pub fn add(&self, line: String) {
        let mut lines = self.0.lock();
        if lines.len() >= LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

/// A running program; it ends with this.
pub struct Program {
    child: Child,
    group: Option<i32>,
    /// Ends it also where the server cannot.
    _kept: Option<Kept>,
    errors: JoinHandle<()>,
}

/// What is read from it and written to it.
pub struct Pipes {
    pub input: ChildStdin,
    pub output: ChildStdout,
}

impl Program {
    /// Starts it, and keeps what it complains about.
    pub fn start(
        filled: &Arc<Filled>,
        cwd: Option<&str>,
        complaints: &Complaints,
    ) -> Result<(Self, Pipes), String> {
        let mut command = Command::new(&filled.command);
        command
            .args(&filled.args)
            .env_clear()
            .envs(&filled.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(cwd) = cwd {
            command.current_dir(cwd);
        }
        // A group of its own: what it starts ends with it, and Ctrl-C is the server's to handle.
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command
            .spawn()
            .map_err(|error| format!("{} cannot be started: {error}", filled.command))?;
        let missing = || format!("{} has no pipes", filled.command);
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        let errors = keep(errors, filled.clone(), complaints.clone());
        let group = child.id().and_then(|id| i32::try_from(id).ok());
        let kept = group.map(orphans::keep);
        Ok((Self { child, group, _kept: kept, errors }, Pipes { input, output }))
    }

    /// The process's number.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for it to end, and says how.
    pub async fn ended(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => format!("the program ended: {status}"),
            Err(error) => format!("the program cannot be waited for: {error}"),
        }
    }

    /// Ends it: its input is closed already, so it has been told. Nothing of it is left afterwards.
    pub async fn end(mut self) {
        if tokio::time::timeout(PATIENCE, self.child.wait()).await.is_err() {
            self.signal(false);
            let _ = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        }
        // Also what it has left behind.
        self.signal(true);
        let _ = self.child.start_kill();
        let _ = self.child.wait().await;
        // Its last words are there by then, unless somebody else holds its pipes open.
        let _ = tokio::time::timeout(LAST_WORDS, &mut self.errors).await;
        self.errors.abort();
    }

    /// Ends it at once, with everything it has started.
    pub fn kill(&self) {
        self.signal(true);
    }

    #[cfg(unix)]
    fn signal(&self, hard: bool) {
        use rustix::process::{Pid, Signal, kill_process_group};
        let signal = if hard { Signal::KILL } else { Signal::TERM };
        if let Some(group) = self.group.and_then(Pid::from_raw) {
            // It may have ended meanwhile.
            let _ = kill_process_group(group, signal);
        }
    }

    #[cfg(not(unix))]
    fn signal(&self, _hard: bool) {}
}

impl Drop for Program {
    fn drop(&mut self) {
        // After `end` the number may be another's: only what still runs is signalled.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(true);
        }
    }
}

/// Reads standard error to its end, without ever holding more than a line of it.
fn keep(
    errors: tokio::process::ChildStderr,
    filled: Arc<Filled>,
    complaints: Complaints,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut reader = BufReader::new(errors);
        // So much more that no value which must not be shown is seen in part.
        let most = LINE_BYTES + filled.longest();
        let mut line = Vec::new();
        while let Ok(available) = reader.fill_buf().await {
            if available.is_empty() {
                break;
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(available.len(), |end| end + 1);
            let room = most.saturating_sub(line.len());
            let text = &available[..end.unwrap_or(available.len())];
            line.extend_from_slice(&text[..text.len().min(room)]);
            reader.consume(taken);
            if end.is_some() {
                complaints.add(shown(&filled, &line, most));
                line.clear();
            }
        }
        if !line.is_empty() {
            complaints.add(shown(&filled, &line, most));
        }
    })
}

/// A line as it is kept: cleaned first, and then cut.
fn shown(filled: &Filled, line: &[u8], most: usize) -> String {
    let whole = if line.len() < most { line } else { filled.without_start(line) };
    let mut text = filled.clean(String::from_utf8_lossy(whole).trim_end());
    text.truncate(text.floor_char_boundary(LINE_BYTES));
    text
}

/// Lines that are no messages, in a row, before its output is taken for garbage.
const MOST_GARBAGE: u32 = 100;

/// What a program writes that is no message. Some print a word of welcome; one that prints nothing
/// else, or half a message, cannot be understood.
#[derive(Clone, Default)]
pub struct Garbage(Arc<Mutex<Option<String>>>);

impl Garbage {
    /// Why its output cannot be understood.
    pub fn seen(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// Reads, and looks at what passes.
pub struct Watched<R> {
    inner: R,
    garbage: Garbage,
    /// The first bytes of the line that is being read, and its last.
    head: Vec<u8>,
    last: u8,
    /// How much of it has come.
    length: usize,
    in_a_row: u32,
    tape: Tape,
    /// All of it, while somebody wants that.
    whole: Vec<u8>,
}

impl<R> Watched<R> {
    pub fn new(inner: R, garbage: Garbage, tape: Tape) -> Self {
        let (head, whole) = Default::default();
        Self { inner, garbage, head, last: 0, length: 0, in_a_row: 0, tape, whole }
    }

    /// Whether what has come so far can still be understood.
    fn look(&mut self, bytes: &[u8]) -> bool {
        let wanted = self.tape.is_wanted();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let ends = part.ends_with(b"\n");
            self.length += part.len();
            if self.length > MAX_MESSAGE_BYTES {
                let limit = MAX_MESSAGE_BYTES >> 20;
                *self.garbage.0.lock() = Some(format!("it wrote a message over {limit} MiB"));
                return false;
            }
            if wanted {
                self.whole.extend_from_slice(part);
            }
            if ends && !self.whole.is_empty() {
                self.tape.pass(&std::mem::take(&mut self.whole));
            }
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let text = text.strip_suffix(b"\r").unwrap_or(text);
            let room = 120_usize.saturating_sub(self.head.len());
            self.head.extend_from_slice(&text[..text.len().min(room)]);
            if let Some(last) = text.last() {
                self.last = *last;
            }
            if ends && !self.line() {
                return false;
            }
        }
        true
    }

    fn line(&mut self) -> bool {
        let head = std::mem::take(&mut self.head);
        let last = std::mem::take(&mut self.last);
        self.length = 0;
        let text = head.trim_ascii_start();
        if text.is_empty() {
            return true;
        }
        let whole = matches!((text[0], last), (b'{', b'}') | (b'[', b']'));
        if whole {
            self.in_a_row = 0;
            return true;
        }
        self.in_a_row += 1;
        let broken = text[0] == b'{';
        if !broken && self.in_a_row <= MOST_GARBAGE {
            return true;
        }
        let shown: String = String::from_utf8_lossy(text).chars().take(80).collect();
        let why = format!("it writes what is no message of MCP: {shown:?}");
        *self.garbage.0.lock() = Some(why);
        false
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Watched<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = read
            && !self.look(&buffer.filled()[before..])
        {
            // As at the end of the file: whoever waits is told why by the garbage that was kept.
            buffer.set_filled(before);
        }
        read
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_line_without_an_end_is_not_read_for_ever() {
        let garbage = Garbage::default();
        let mut watched = Watched::new(tokio::io::repeat(b'x'), garbage.clone(), Tape::default());
        let mut read = vec![0; 1 << 20];
        while watched.read(&mut read).await.unwrap() > 0 {}
        assert_eq!(garbage.seen().unwrap(), "it wrote a message over 16 MiB");
    }

    #[test]
    fn a_value_across_the_cut_of_a_line_is_not_shown_in_part() {
        let filled = Filled::hiding(&[("TOKEN", "sesame-open-123")]);
        let most = LINE_BYTES + filled.longest();
        for before in [LINE_BYTES - 20, LINE_BYTES - 7, LINE_BYTES, most - 8] {
            let mut line = format!("{}sesame-open-123 and more", "x".repeat(before)).into_bytes();
            line.truncate(most);
            let shown = shown(&filled, &line, most);
            assert!(!shown.contains("ses") && shown.len() <= LINE_BYTES, "{shown}");
        }
        // What is shorter once it is clean brings the end of what was read into view.
        let mut line = "sesame-open-123 ".repeat(100).into_bytes();
        line.truncate(most);
        assert!(!shown(&filled, &line, most).contains("ses"));
    }
}
