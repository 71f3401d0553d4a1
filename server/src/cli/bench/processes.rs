//! The measured servers: child processes of this same binary, which end when their handle is
//! dropped, and a scratch directory that is removed with its contents.

use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use toolcrib_bench::{load, process};

/// Maximum time until a server answers its first call.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A directory for the measured stores, removed on drop.
pub struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    pub fn new(parent: &Path) -> anyhow::Result<Self> {
        let path = parent.join(format!("toolcrib-bench-{}", ulid::Ulid::generate()));
        let path = std::path::absolute(path)?;
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a subdirectory.
    pub fn dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.path.join(name);
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // Files that cannot be removed are left to the system's cleanup.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The kind of a measured server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BenchServerKind {
    Product,
    Baseline,
}

/// A running server.
pub struct BenchServer {
    child: Child,
    pub addr: String,
    log: PathBuf,
}

impl BenchServer {
    /// Starts a server on a free port. Returns the time to its first answered call as well.
    pub async fn start(kind: BenchServerKind, dir: &Path) -> anyhow::Result<(Self, Duration)> {
        Self::start_with(kind, dir, &[]).await
    }

    /// Same as [`BenchServer::start`], with settings as environment variables.
    pub async fn start_with(
        kind: BenchServerKind,
        dir: &Path,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<(Self, Duration)> {
        let addr = format!("127.0.0.1:{}", process::free_port()?);
        let mut command = self_command()?;
        match kind {
            BenchServerKind::Product => {
                command.args(["serve", "--listen", &addr, "--data-dir"]).arg(dir);
                command.env("TOOLCRIB_BENCH_NOOP", "1").env("TOOLCRIB_QUIET", "1");
                command.env("TOOLCRIB_LOG", "warn");
            }
            BenchServerKind::Baseline => {
                command.args(["bench-floor", "--listen", &addr, "--dir"]).arg(dir);
            }
        }
        command.envs(settings.iter().copied());
        let log = dir.with_extension("log");
        let errors =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        // Not the current directory, where a toolcrib.toml could change what is measured.
        command.current_dir(dir);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let since = Instant::now();
        let child = command.spawn().context("cannot start this program a second time")?;
        let mut server = Self { child, addr, log };
        let answered = server.wait_until_ready(since).await;
        match answered {
            Ok(took) => Ok((server, took)),
            Err(error) => Err(error.context(server.log_tail())),
        }
    }

    async fn wait_until_ready(&mut self, since: Instant) -> anyhow::Result<Duration> {
        let (addr, path) = (self.addr.clone(), call_path());
        let answer = load::time_to_first_success(&addr, since, &path, CALL_BODY, None, START_LIMIT);
        let mut answer = std::pin::pin!(answer);
        loop {
            tokio::select! {
                took = &mut answer => return took,
                () = tokio::time::sleep(Duration::from_millis(200)) => {
                    if let Some(status) = self.child.try_wait()? {
                        bail!("the server ended by itself ({status})");
                    }
                }
            }
        }
    }

    /// Returns the last log lines of a server that failed.
    fn log_tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(5).collect();
        let lines: Vec<&str> = lines.into_iter().rev().collect();
        format!("the measured server did not come up; it said: {}", lines.join(" | "))
    }

    pub fn resident_mib(&self) -> anyhow::Result<f64> {
        Ok(process::resident_bytes(self.child.id())? as f64 / f64::from(1 << 20))
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        // The process may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A helper process of the benchmark.
pub struct BenchProcess {
    child: Child,
}

impl BenchProcess {
    pub fn start_fill(dir: &Path, count: u64) -> anyhow::Result<Self> {
        let mut command = self_command()?;
        command.args(["bench-fill", "--count", &count.to_string(), "--data-dir"]).arg(dir);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().context("cannot start this program a second time")?;
        Ok(Self { child })
    }

    /// Waits for the process to end.
    pub async fn wait(mut self) -> anyhow::Result<()> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                anyhow::ensure!(status.success(), "filling the store failed ({status})");
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a server with NATS, and a tool service in another process.
pub async fn start_nats_server(
    dir: &Path,
    url: &str,
) -> anyhow::Result<(BenchServer, BenchProcess)> {
    let (server, _) =
        BenchServer::start_with(BenchServerKind::Product, dir, &[("TOOLCRIB_NATS__URL", url)])
            .await?;
    Ok((server, start_tool_service(dir, url, &[])?))
}

/// Starts the NATS baseline, and its tool service in another process.
pub async fn start_nats_baseline(
    dir: &Path,
    url: &str,
) -> anyhow::Result<(BenchServer, BenchProcess)> {
    // Started first: it answers the call that tests whether the server is ready.
    let service = start_tool_service(dir, url, &["--bare"])?;
    let (server, _) =
        BenchServer::start_with(BenchServerKind::Baseline, dir, &[("TOOLCRIB_BENCH_NATS", url)])
            .await?;
    Ok((server, service))
}

fn start_tool_service(dir: &Path, url: &str, more: &[&str]) -> anyhow::Result<BenchProcess> {
    let mut command = self_command()?;
    command.args(["bench-utp", "--nats", url]).args(more).current_dir(dir);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.spawn().context("cannot start this program a second time")?;
    Ok(BenchProcess { child })
}

/// Returns the command for this binary, without Toolcrib's and OpenTelemetry's variables from the
/// environment.
pub fn self_command() -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("where is this program?")?);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TOOLCRIB_") || text.starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    Ok(command)
}

/// Body of the measured call.
pub const CALL_BODY: &str = r#"{"run_id":"run_bench","args":{}}"#;

/// Returns the body of a batch of such calls, in the form that a model uses.
pub fn batch_body(entries: usize) -> String {
    let name = toolcrib::registry::model_tool_names::name_for_model(toolcrib_bench::baseline::TOOL);
    let function = serde_json::json!({ "name": name, "arguments": "{}" });
    let entry = serde_json::json!({ "id": "call_0", "type": "function", "function": function });
    let entries = vec![entry; entries];
    serde_json::json!({ "run_id": "run_bench", "mode": "parallel", "tool_calls": entries })
        .to_string()
}

pub fn call_path() -> String {
    format!("/v1/tools/{}/invoke?wait_ms=10000", toolcrib_bench::baseline::TOOL)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_scratch_directory_goes_with_its_contents() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchDir::new(parent.path()).unwrap();
        std::fs::write(scratch.dir("a").unwrap().join("x"), "x").unwrap();
        assert_ne!(ScratchDir::new(parent.path()).unwrap().path(), scratch.path());
        drop(scratch);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
