//! A child process that speaks MCP on its standard input and output. It starts with a clean
//! environment, its standard error is collected, and it is terminated together with everything it
//! has started.

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

use super::message_limit::MAX_MESSAGE_BYTES;
use crate::child_reaper::{self, ProcessGroupGuard};
use crate::mcp::raw_tool_list::ToolListCapture;
use crate::mcp::settings::resolved::ResolvedSettings;

/// Limits of the collected standard error: number of lines, and bytes per line.
const LINES: usize = 200;
const LINE_BYTES: usize = 1_000;

/// Grace period for exiting after the input is closed, and again after SIGTERM.
const EXIT_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// Maximum time to read the remaining standard error.
const STDERR_DRAIN_TIMEOUT: Duration = Duration::from_millis(300);

/// The last lines of a child process's standard error.
#[derive(Clone, Default)]
pub struct StderrTail(Arc<Mutex<VecDeque<String>>>);

impl StderrTail {
    /// Returns the lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().iter().cloned().collect()
    }

    /// Returns the last line that is not blank.
    pub fn last(&self) -> Option<String> {
        self.0.lock().iter().rev().find(|line| !line.trim().is_empty()).cloned()
    }

    /// Appends a line, dropping the oldest one at the limit.
    pub fn add(&self, line: String) {
        let mut lines = self.0.lock();
        if lines.len() >= LINES {
            lines.pop_front();
        }
        lines.push_back(line);
    }
}

/// A running child process. Dropping it kills the process.
pub struct ChildProcess {
    child: Child,
    group: Option<i32>,
    /// Makes the reaper kill the process group if the server cannot.
    _group_guard: Option<ProcessGroupGuard>,
    stderr_task: JoinHandle<()>,
}

/// The child process's standard input and output.
pub struct ChildPipes {
    pub input: ChildStdin,
    pub output: ChildStdout,
}

impl ChildProcess {
    /// Starts the process and collects its standard error.
    pub fn start(
        resolved: &Arc<ResolvedSettings>,
        cwd: Option<&str>,
        complaints: &StderrTail,
    ) -> Result<(Self, ChildPipes), String> {
        let mut command = Command::new(&resolved.command);
        command
            .args(&resolved.args)
            .env_clear()
            .envs(&resolved.env)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        if let Some(cwd) = cwd {
            command.current_dir(cwd);
        }
        // A separate process group: everything the child starts is terminated with it, and Ctrl-C
        // reaches only the server.
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command
            .spawn()
            .map_err(|error| format!("{} cannot be started: {error}", resolved.command))?;
        let missing = || format!("{} has no pipes", resolved.command);
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        let errors = collect_stderr(errors, resolved.clone(), complaints.clone());
        let group = child.id().and_then(|id| i32::try_from(id).ok());
        let group_guard = group.map(child_reaper::guard_process_group);
        Ok((
            Self { child, group, _group_guard: group_guard, stderr_task: errors },
            ChildPipes { input, output },
        ))
    }

    /// Returns the process id.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the process to exit, and returns a description of how it did.
    pub async fn wait_exit(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => format!("the program ended: {status}"),
            Err(error) => format!("the program cannot be waited for: {error}"),
        }
    }

    /// Terminates the process, whose input is already closed. No process of its group is left
    /// afterwards.
    pub async fn shut_down(mut self) {
        if tokio::time::timeout(EXIT_GRACE_PERIOD, self.child.wait()).await.is_err() {
            self.signal(false);
            let _ = tokio::time::timeout(EXIT_GRACE_PERIOD, self.child.wait()).await;
        }
        // Also kills what the process has left behind.
        self.signal(true);
        let _ = self.child.start_kill();
        let _ = self.child.wait().await;
        // Its last output has been read by then, unless another process holds the pipe open.
        let _ = tokio::time::timeout(STDERR_DRAIN_TIMEOUT, &mut self.stderr_task).await;
        self.stderr_task.abort();
    }

    /// Kills the process and everything it has started.
    pub fn kill(&self) {
        self.signal(true);
    }

    #[cfg(unix)]
    fn signal(&self, hard: bool) {
        use rustix::process::{Pid, Signal, kill_process_group};
        let signal = if hard { Signal::KILL } else { Signal::TERM };
        if let Some(group) = self.group.and_then(Pid::from_raw) {
            // The group may have exited in the meantime.
            let _ = kill_process_group(group, signal);
        }
    }

    #[cfg(not(unix))]
    fn signal(&self, _hard: bool) {}
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // After `shut_down` the group number may be reused: signal the group only while the process
        // runs.
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(true);
        }
    }
}

/// Reads standard error to its end, holding at most one line in memory.
fn collect_stderr(
    errors: tokio::process::ChildStderr,
    resolved: Arc<ResolvedSettings>,
    complaints: StderrTail,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut reader = BufReader::new(errors);
        // Reads enough beyond the limit that no secret is seen only in part.
        let max_bytes = LINE_BYTES + resolved.longest_secret();
        let mut line = Vec::new();
        while let Ok(available) = reader.fill_buf().await {
            if available.is_empty() {
                break;
            }
            let end = available.iter().position(|byte| *byte == b'\n');
            let consumed = end.map_or(available.len(), |end| end + 1);
            let capacity = max_bytes.saturating_sub(line.len());
            let text = &available[..end.unwrap_or(available.len())];
            line.extend_from_slice(&text[..text.len().min(capacity)]);
            reader.consume(consumed);
            if end.is_some() {
                complaints.add(redact_line(&resolved, &line, max_bytes));
                line.clear();
            }
        }
        if !line.is_empty() {
            complaints.add(redact_line(&resolved, &line, max_bytes));
        }
    })
}

/// Returns a line as it is stored: redacted first, then truncated.
fn redact_line(resolved: &ResolvedSettings, line: &[u8], max_bytes: usize) -> String {
    let whole = if line.len() < max_bytes { line } else { resolved.trim_partial_secret(line) };
    let mut text = resolved.redact(String::from_utf8_lossy(whole).trim_end());
    text.truncate(text.floor_char_boundary(LINE_BYTES));
    text
}

/// Number of consecutive lines that are not messages before the output counts as invalid.
const MAX_INVALID_LINES: u32 = 100;

/// Output of a child process that is not MCP. Some programs print a banner, which is tolerated;
/// output with nothing else, or with a truncated message, is invalid.
#[derive(Clone, Default)]
pub struct InvalidOutput(Arc<Mutex<Option<String>>>);

impl InvalidOutput {
    /// Returns why the output is invalid, if it is.
    pub fn problem(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// A reader that inspects the bytes that pass through it.
pub struct InspectedOutput<R> {
    inner: R,
    invalid_output: InvalidOutput,
    /// The first bytes of the current line, and its last byte.
    head: Vec<u8>,
    last: u8,
    /// Length of the current line so far.
    length: usize,
    invalid_lines: u32,
    capture: ToolListCapture,
    /// The whole current line, while a capture is active.
    captured_line: Vec<u8>,
}

impl<R> InspectedOutput<R> {
    pub fn new(inner: R, invalid_output: InvalidOutput, capture: ToolListCapture) -> Self {
        let (head, captured_line) = Default::default();
        Self {
            inner,
            invalid_output,
            head,
            last: 0,
            length: 0,
            invalid_lines: 0,
            capture,
            captured_line,
        }
    }

    /// Returns `true` if the output is still valid after these bytes.
    fn inspect(&mut self, bytes: &[u8]) -> bool {
        let is_capturing = self.capture.is_capturing();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let ends = part.ends_with(b"\n");
            self.length += part.len();
            if self.length > MAX_MESSAGE_BYTES {
                let limit = MAX_MESSAGE_BYTES >> 20;
                *self.invalid_output.0.lock() =
                    Some(format!("it wrote a message over {limit} MiB"));
                return false;
            }
            if is_capturing {
                self.captured_line.extend_from_slice(part);
            }
            if ends && !self.captured_line.is_empty() {
                self.capture.capture_response(&std::mem::take(&mut self.captured_line));
            }
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            let text = text.strip_suffix(b"\r").unwrap_or(text);
            let capacity = 120_usize.saturating_sub(self.head.len());
            self.head.extend_from_slice(&text[..text.len().min(capacity)]);
            if let Some(last) = text.last() {
                self.last = *last;
            }
            if ends && !self.end_line() {
                return false;
            }
        }
        true
    }

    fn end_line(&mut self) -> bool {
        let head = std::mem::take(&mut self.head);
        let last = std::mem::take(&mut self.last);
        self.length = 0;
        let text = head.trim_ascii_start();
        if text.is_empty() {
            return true;
        }
        let whole = matches!((text[0], last), (b'{', b'}') | (b'[', b']'));
        if whole {
            self.invalid_lines = 0;
            return true;
        }
        self.invalid_lines += 1;
        let broken = text[0] == b'{';
        if !broken && self.invalid_lines <= MAX_INVALID_LINES {
            return true;
        }
        let excerpt: String = String::from_utf8_lossy(text).chars().take(80).collect();
        let reason = format!("it wrote something that is not an MCP message: {excerpt:?}");
        *self.invalid_output.0.lock() = Some(reason);
        false
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for InspectedOutput<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = read
            && !self.inspect(&buffer.filled()[before..])
        {
            // Reads as end of file: the recorded invalid output explains why.
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
    async fn an_endless_line_is_refused_at_the_size_limit() {
        let garbage = InvalidOutput::default();
        let mut inspected = InspectedOutput::new(
            tokio::io::repeat(b'x'),
            garbage.clone(),
            ToolListCapture::default(),
        );
        let mut read = vec![0; 1 << 20];
        while inspected.read(&mut read).await.unwrap() > 0 {}
        assert_eq!(garbage.problem().unwrap(), "it wrote a message over 16 MiB");
    }

    #[test]
    fn a_secret_at_the_truncation_point_is_not_shown_in_part() {
        let resolved = ResolvedSettings::with_secrets(&[("TOKEN", "sesame-open-123")]);
        let max_bytes = LINE_BYTES + resolved.longest_secret();
        for before in [LINE_BYTES - 20, LINE_BYTES - 7, LINE_BYTES, max_bytes - 8] {
            let mut line = format!("{}sesame-open-123 and more", "x".repeat(before)).into_bytes();
            line.truncate(max_bytes);
            let excerpt = redact_line(&resolved, &line, max_bytes);
            assert!(!excerpt.contains("ses") && excerpt.len() <= LINE_BYTES, "{excerpt}");
        }
        // Redaction shortens the line, so the end of what was read comes into view.
        let mut line = "sesame-open-123 ".repeat(100).into_bytes();
        line.truncate(max_bytes);
        assert!(!redact_line(&resolved, &line, max_bytes).contains("ses"));
    }
}
