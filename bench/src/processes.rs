//! The processes of a benchmark: the measured servers, and the programs that they talk to.
//!
//! `toolcrib` is a separate program. The baseline and the other helpers are this program itself,
//! started with a hidden command of [`crate::cli`]. Every process ends when its handle is dropped.

pub mod memory;
mod scratch_dir;
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::{baseline, load};

pub use scratch_dir::ScratchDir;

/// Maximum time until a server answers its first call.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The tool that Toolcrib is measured with: the cheapest of its built-in tools.
pub const TOOL: &str = "calculation.eval";

/// Body of a measured call. Both servers receive the same bytes.
pub const CALL_BODY: &str = r#"{"run_id":"run_bench","args":{"expression":"0"}}"#;

/// A child process that is killed on drop.
pub struct ChildProcess(Child);

impl ChildProcess {
    /// Starts a process without input and output.
    ///
    /// # Errors
    ///
    /// When the program cannot be started.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        Ok(Self(child))
    }

    /// Waits for the process to end.
    ///
    /// # Errors
    ///
    /// When the process fails.
    pub async fn wait(mut self) -> anyhow::Result<()> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "a benchmark process failed ({status})");
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // The process may already have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running server, Toolcrib or the baseline.
pub struct MeasuredServer {
    process: ChildProcess,
    pub addr: String,
    /// Path of a call of the server's cheapest tool that waits for the result.
    pub call_path: String,
    log: PathBuf,
}

impl MeasuredServer {
    /// Starts a server and waits for its first answered call. Returns the time that took as well.
    async fn start(
        mut command: Command,
        dir: &Path,
        addr: String,
        tool: &str,
    ) -> anyhow::Result<(Self, Duration)> {
        let log = dir.with_extension("log");
        let errors =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        // Not the current directory, where a toolcrib.toml could change what is measured.
        command.current_dir(dir).stderr(errors);
        let since = Instant::now();
        let process = ChildProcess::start(&mut command)?;
        let mut server = Self { process, addr, call_path: call_path(tool), log };
        match server.wait_until_ready(since).await {
            Ok(took) => Ok((server, took)),
            Err(error) => Err(error.context(server.log_tail())),
        }
    }

    async fn wait_until_ready(&mut self, since: Instant) -> anyhow::Result<Duration> {
        let (addr, path) = (self.addr.clone(), self.call_path.clone());
        let answer = load::time_to_first_success(&addr, since, &path, CALL_BODY, None, START_LIMIT);
        let mut answer = std::pin::pin!(answer);
        loop {
            tokio::select! {
                took = &mut answer => return took,
                () = tokio::time::sleep(Duration::from_millis(200)) => {
                    if let Some(status) = self.process.0.try_wait()? {
                        bail!("the server exited ({status})");
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
        format!("the measured server did not start; its output: {}", lines.join(" | "))
    }

    /// Returns the resident memory of the server in MiB.
    ///
    /// # Errors
    ///
    /// When the server has ended.
    pub fn resident_mib(&self) -> anyhow::Result<f64> {
        Ok(memory::resident_bytes(self.process.0.id())? as f64 / f64::from(1 << 20))
    }

    /// Returns the largest resident memory that the server has had, in MiB.
    ///
    /// # Errors
    ///
    /// When the server has ended.
    pub fn peak_resident_mib(&self) -> anyhow::Result<f64> {
        Ok(memory::peak_resident_bytes(self.process.0.id())? as f64 / f64::from(1 << 20))
    }
}

/// Starts the processes of a benchmark.
pub struct Launcher {
    /// The measured program.
    toolcrib: PathBuf,
    /// This program, for the baseline and the helpers.
    bench: PathBuf,
}

impl Launcher {
    /// Finds the programs: `toolcrib` is the given one, or the one next to this program.
    ///
    /// # Errors
    ///
    /// When there is no `toolcrib`.
    pub fn new(toolcrib: Option<PathBuf>) -> anyhow::Result<Self> {
        let bench = std::env::current_exe().context("cannot determine the path of this program")?;
        let toolcrib = toolcrib.unwrap_or_else(|| bench.with_file_name("toolcrib"));
        ensure!(
            toolcrib.is_file(),
            "there is no program {}: build it with `cargo build --release -p toolcrib-server`, or \
             name one with --toolcrib PATH",
            toolcrib.display()
        );
        // Servers run in a directory of their own.
        let toolcrib = std::path::absolute(toolcrib)?;
        Ok(Self { toolcrib, bench })
    }

    /// Returns the version that `toolcrib` reports.
    ///
    /// # Errors
    ///
    /// When the program cannot be run.
    pub fn toolcrib_version(&self) -> anyhow::Result<String> {
        let output = without_settings(&self.toolcrib).arg("--version").output();
        let output = output.with_context(|| format!("cannot run {}", self.toolcrib.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.trim().strip_prefix("toolcrib ");
        Ok(version.context("the program does not report a version of toolcrib")?.to_owned())
    }

    /// Starts Toolcrib on a free port, with settings as environment variables. Returns the time to
    /// its first answered call as well.
    ///
    /// # Errors
    ///
    /// When the server does not answer a call.
    pub async fn start_toolcrib(
        &self,
        dir: &Path,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<(MeasuredServer, Duration)> {
        let addr = format!("127.0.0.1:{}", free_port()?);
        let mut command = without_settings(&self.toolcrib);
        command.args(["serve", "--listen", &addr, "--data-dir"]).arg(dir);
        command.env("TOOLCRIB_QUIET", "1").env("TOOLCRIB_LOG", "warn");
        command.envs(settings.iter().copied());
        MeasuredServer::start(command, dir, addr, TOOL).await
    }

    /// Starts the baseline on a free port. With the URL of a NATS server, its tool runs in
    /// another process, which must be running.
    ///
    /// # Errors
    ///
    /// When the server does not answer a call.
    pub async fn start_baseline(
        &self,
        dir: &Path,
        nats: Option<&str>,
    ) -> anyhow::Result<MeasuredServer> {
        let addr = format!("127.0.0.1:{}", free_port()?);
        let mut command = without_settings(&self.bench);
        command.args(["baseline", "--listen", &addr, "--dir"]).arg(dir);
        if let Some(url) = nats {
            command.args(["--nats", url]);
        }
        Ok(MeasuredServer::start(command, dir, addr, baseline::TOOL).await?.0)
    }

    /// Starts a process that fills a store with finished calls and then ends.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub fn start_fill(&self, dir: &Path, count: u64) -> anyhow::Result<ChildProcess> {
        let mut command = without_settings(&self.bench);
        command.args(["fill-store", "--count", &count.to_string(), "--data-dir"]).arg(dir);
        ChildProcess::start(&mut command)
    }

    /// Starts the service that executes the tools called over NATS: those of Toolcrib, or the one
    /// of the baseline.
    ///
    /// # Errors
    ///
    /// When the process cannot be started.
    pub fn start_tool_service(
        &self,
        dir: &Path,
        nats: &str,
        tools: ServiceTools,
    ) -> anyhow::Result<ChildProcess> {
        let mut command = without_settings(&self.bench);
        command.args(["tool-service", "--nats", nats]).current_dir(dir);
        if tools == ServiceTools::Baseline {
            command.arg("--bare");
        }
        ChildProcess::start(&mut command)
    }

    /// Starts an MCP server with two tools. Returns its address as well.
    ///
    /// # Errors
    ///
    /// When the server does not listen.
    pub async fn start_mcp_server(&self) -> anyhow::Result<(ChildProcess, String)> {
        let addr = format!("127.0.0.1:{}", free_port()?);
        let mut command = without_settings(&self.bench);
        command.args(["mcp-server", "--listen", &addr]).stderr(Stdio::null());
        let process = ChildProcess::start(&mut command)?;
        wait_until_listening(&addr, Duration::from_secs(30))
            .await
            .context("the upstream does not answer")?;
        Ok((process, addr))
    }
}

/// The tools that a tool service executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceTools {
    Toolcrib,
    Baseline,
}

/// Waits until a program accepts connections.
///
/// # Errors
///
/// When it does not within `limit`.
pub async fn wait_until_listening(addr: &str, limit: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + limit;
    while let Err(error) = tokio::net::TcpStream::connect(addr).await {
        if Instant::now() >= until {
            return Err(error).with_context(|| format!("no connection to {addr}"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Returns the command for a program, without Toolcrib's and OpenTelemetry's variables from the
/// environment.
fn without_settings(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TOOLCRIB_") || text.starts_with("OTEL_") {
            command.env_remove(name);
        }
    }
    command
}

/// Returns the path that calls a tool and waits for its result.
#[must_use]
pub fn call_path(tool: &str) -> String {
    format!("/v1/tools/{tool}/invoke?wait_ms=10000")
}

/// Returns a loopback port that was free a moment ago, for a child process that needs its address
/// in advance.
///
/// The port is released before this returns, so another process could take it first; the kernel
/// assigns ports in turn, so on a quiet machine that does not happen.
///
/// # Errors
///
/// When no loopback port can be bound.
pub fn free_port() -> anyhow::Result<u16> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot bind a loopback port")?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_can_be_bound() {
        assert_ne!(free_port().unwrap(), 0);
    }

    #[test]
    fn a_missing_program_is_reported_with_the_command_that_builds_it() {
        let error = Launcher::new(Some("/nonexistent/toolcrib".into())).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("/nonexistent/toolcrib"), "{text}");
        assert!(text.contains("cargo build --release -p toolcrib-server"), "{text}");
        assert!(text.contains("--toolcrib PATH"), "{text}");
    }
}
