//! The checks of `toolcrib doctor`, one function each. The checks of the port and of NATS have
//! their own files.

use std::path::Path;
use std::time::Duration;

use toolcrib_protocol::outbound::is_loopback_host;
use toolcrib_store::{SQLITE_SCHEMA_VERSION, SqliteOpenError, SqliteStore};

use super::{CheckResult, disk};
use crate::cli::CommandContext;
use crate::cli::failure::CommandFailure;
use crate::cli::output::format_bytes;
use crate::config::{Config, DEFAULT_FILE, StoreLocation};

/// Free space below which the disk check is a warning.
const LOW_SPACE_BYTES: u64 = 1 << 30;
/// Free space below which the disk check is an error. A server has no such threshold: it refuses
/// calls once a commit fails.
const MIN_SPACE_BYTES: u64 = 64 << 20;
const NETWORK_TIMEOUT: Duration = Duration::from_secs(10);

pub fn check_config(
    context: &CommandContext,
    loaded: &Result<Config, CommandFailure>,
) -> CheckResult {
    const CHECK_NAME: &str = "config";
    match loaded {
        Ok(config) => {
            let origin = match &config.file {
                Some(file) => file.display().to_string(),
                None => format!("defaults (there is no {DEFAULT_FILE} here)"),
            };
            CheckResult::ok(CHECK_NAME, origin)
        }
        Err(failure) => {
            let hint = failure.hint.clone().unwrap_or_else(|| {
                let config_file =
                    context.global.config.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
                format!("look into {}", config_file.display())
            });
            CheckResult::error(CHECK_NAME, failure.message.clone(), hint)
        }
    }
}

pub fn check_data_dir(config: &Config) -> Vec<CheckResult> {
    const CHECK_NAME: &str = "data";
    let dir = config.data_dir.as_path();
    let dir_text = dir.display();
    let hint = "choose another with --data-dir, or give the server's user the right to write there";
    let existing = disk::nearest_existing(dir);
    if dir.exists() && !dir.is_dir() {
        return vec![CheckResult::error(
            CHECK_NAME,
            format!("{dir_text} is not a directory"),
            hint,
        )];
    }
    if let Err(error) = disk::probe_write(&existing) {
        let message = format!("cannot write in {}: {error}", existing.display());
        return vec![CheckResult::error(CHECK_NAME, message, hint)];
    }
    let mut findings = vec![if dir.is_dir() {
        CheckResult::ok(CHECK_NAME, format!("{dir_text} exists and is writable"))
    } else {
        CheckResult::ok(
            CHECK_NAME,
            format!("{dir_text} does not exist yet; the first start creates it"),
        )
    }];
    findings.push(check_disk_space(&existing));
    findings
}

fn check_disk_space(dir: &Path) -> CheckResult {
    const CHECK_NAME: &str = "disk";
    let kind = disk::filesystem_type(dir).unwrap_or_else(|| "unknown".into());
    let Some(free) = disk::free_bytes(dir) else {
        return CheckResult::ok(CHECK_NAME, format!("filesystem {kind}; free space is not known"));
    };
    let message = format!("{} free, filesystem {kind}", format_bytes(free));
    if free < MIN_SPACE_BYTES {
        return CheckResult::error(CHECK_NAME, message, "free disk space: calls cannot be stored");
    }
    if disk::is_network_filesystem(&kind) {
        let hint = "SQLite needs locks that work: put the data on a disk of this machine";
        return CheckResult::warning(CHECK_NAME, message, hint);
    }
    if disk::is_memory_filesystem(&kind) {
        let hint = "this is a file system in memory: all data is lost when the machine stops";
        return CheckResult::warning(CHECK_NAME, message, hint);
    }
    if free < LOW_SPACE_BYTES {
        let hint = "free disk space, or lower retention.finished_calls_days";
        return CheckResult::warning(CHECK_NAME, message, hint);
    }
    CheckResult::ok(CHECK_NAME, message)
}

/// Checks the limit on open files: each connection is an open file.
pub fn check_open_files(config: &Config) -> CheckResult {
    const CHECK_NAME: &str = "files";
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft_limit = line.and_then(|rest| rest.split_whitespace().next());
    // The store, MCP servers and outgoing requests need open files too.
    let required = config.limits.max_connections as u64 + 100;
    match soft_limit.map(str::parse::<u64>) {
        None => CheckResult::ok(CHECK_NAME, "the limit on open files is not known"),
        // Not a number: "unlimited".
        Some(Err(_)) => CheckResult::ok(CHECK_NAME, "no limit on open files"),
        Some(Ok(limit)) if limit < required => CheckResult::warning(
            CHECK_NAME,
            format!("{limit} open files allowed, and limits.max_connections needs {required}"),
            "raise it (ulimit -n, LimitNOFILE), or lower limits.max_connections",
        ),
        Some(Ok(limit)) => CheckResult::ok(CHECK_NAME, format!("{limit} open files allowed")),
    }
}

/// Checks the store. The second value is true if the store has keys.
pub async fn check_store(config: &Config) -> (CheckResult, bool) {
    const CHECK_NAME: &str = "store";
    let path = match config.store_location() {
        Ok(StoreLocation::Sqlite(path)) => path,
        Ok(location) => return check_postgres_store(config, &location).await,
        Err(error) => {
            return (CheckResult::error(CHECK_NAME, error.to_string(), error.hint()), false);
        }
    };
    let path_text = path.display().to_string();
    if !path.exists() {
        let message = format!("{path_text} does not exist yet; the first start creates it");
        return (CheckResult::ok(CHECK_NAME, message), false);
    }
    let hint = "stop the server, keep a copy of the file, and restore the last good one";
    let checked =
        match tokio::task::spawn_blocking(move || SqliteStore::open_for_admin(&path)).await {
            Ok(Ok(store)) => store.check_integrity().await.map_err(|error| error.to_string()),
            Ok(Err(error)) => {
                let hint = match &error {
                    SqliteOpenError::NewerSchema { .. } | SqliteOpenError::ForeignDatabase => {
                        "nothing was changed"
                    }
                    SqliteOpenError::Sqlite(_) | SqliteOpenError::Io(_) => hint,
                };
                let message = format!("{path_text}: {:#}", anyhow::Error::from(error));
                return (CheckResult::error(CHECK_NAME, message, hint), false);
            }
            Err(error) => Err(error.to_string()),
        };
    match checked {
        Ok(report) if report == "ok" => {}
        Ok(report) => {
            return (
                CheckResult::error(CHECK_NAME, format!("{path_text} is damaged: {report}"), hint),
                false,
            );
        }
        Err(reason) => {
            return (CheckResult::error(CHECK_NAME, format!("{path_text}: {reason}"), hint), false);
        }
    }
    match crate::bootstrap::open_admin_engine(config).await {
        Ok(engine) => {
            let size = engine.store_size_bytes().await.map(format_bytes);
            let size = size.unwrap_or_else(|_| "size not known".into());
            let version = format!("{path_text} is sound: version {SQLITE_SCHEMA_VERSION}, {size}");
            (CheckResult::ok(CHECK_NAME, version), engine.registry().credentials().has_keys())
        }
        Err(error) => (CheckResult::error(CHECK_NAME, format!("{error:#}"), hint), false),
    }
}

/// Reports a server that holds the lock of the database and does not listen on the configured port:
/// a second server on the database would not start. `responds_on_port` is true if a server responds
/// on that port.
pub fn check_store_lock(config: &Config, responds_on_port: bool) -> Option<CheckResult> {
    let path = match config.store_location() {
        Ok(StoreLocation::Sqlite(path)) if !responds_on_port => path,
        _ => return None,
    };
    crate::open_store::is_locked_by_server(&path).then(|| {
        let message = format!(
            "another toolcrib serves {}, and not on {}: a second one will not start",
            path.display(),
            config.listen
        );
        CheckResult::error(
            "server",
            message,
            "stop it, or choose another directory with --data-dir",
        )
    })
}

/// Checks a PostgreSQL store. The second value is true if the store has keys.
async fn check_postgres_store(config: &Config, location: &StoreLocation) -> (CheckResult, bool) {
    const CHECK_NAME: &str = "store";
    let url = location.redacted();
    match crate::bootstrap::open_admin_engine(config).await {
        Ok(engine) => {
            let size = engine.store_size_bytes().await.map(format_bytes);
            let size = size.unwrap_or_else(|_| "size not known".into());
            (
                CheckResult::ok(CHECK_NAME, format!("{url} answers, {size}")),
                engine.registry().credentials().has_keys(),
            )
        }
        Err(error) => {
            let hint = "check that PostgreSQL runs there and that the user may create tables in \
                        that database";
            (CheckResult::error(CHECK_NAME, format!("{error:#}"), hint), false)
        }
    }
}

pub fn check_keys(config: &Config, has_keys: bool) -> CheckResult {
    const CHECK_NAME: &str = "keys";
    let listen = &config.listen;
    match (has_keys, is_loopback_host(listen)) {
        _ if config.auth.oauth.is_some() => {
            CheckResult::ok(CHECK_NAME, "every request needs a key, or a token of the issuer")
        }
        (true, _) => CheckResult::ok(CHECK_NAME, "every request needs a key (toolcrib keys ls)"),
        (false, true) => CheckResult::ok(
            CHECK_NAME,
            format!("none; {listen} is loopback, so other machines cannot connect"),
        ),
        (false, false) => CheckResult::error(
            CHECK_NAME,
            format!("none, and {listen} is open to other machines: the server will not start"),
            "toolcrib keys create --agent operator --role admin, or listen on 127.0.0.1",
        ),
    }
}

/// Checks that the database of the built-in tool `database.query` can be reached. It is not the
/// store.
pub async fn check_database(config: &Config) -> CheckResult {
    const CHECK_NAME: &str = "database";
    let hint = "check builtin.database.url, and that this machine may connect";
    let Some(url) = &config.builtin.database.url else {
        return CheckResult::ok(CHECK_NAME, "database.query uses its sample database");
    };
    if !url.starts_with("postgres") {
        let path = url.strip_prefix("sqlite:").unwrap_or(url);
        return match std::fs::File::open(path.strip_prefix("//").unwrap_or(path)) {
            Ok(_) => CheckResult::ok(CHECK_NAME, format!("{path} can be read")),
            Err(error) => CheckResult::error(CHECK_NAME, format!("{path}: {error}"), hint),
        };
    }
    // The URL contains a password, so messages show only host and port.
    let parsed = reqwest::Url::parse(url).ok();
    let Some(host) = parsed.as_ref().and_then(|url| url.host_str()) else {
        return CheckResult::error(CHECK_NAME, "builtin.database.url names no host", hint);
    };
    let port = parsed.as_ref().and_then(|url| url.port()).unwrap_or(5432);
    let address = format!("{host}:{port}");
    match tokio::time::timeout(NETWORK_TIMEOUT, tokio::net::TcpStream::connect(&address)).await {
        Ok(Ok(_)) => CheckResult::ok(CHECK_NAME, format!("{address} answers")),
        Ok(Err(error)) => CheckResult::error(CHECK_NAME, format!("{address}: {error}"), hint),
        Err(_) => CheckResult::error(CHECK_NAME, format!("{address} does not answer"), hint),
    }
}

/// Checks the two services that the built-in tool `weather.query` uses.
pub async fn check_weather(config: &Config) -> CheckResult {
    const CHECK_NAME: &str = "weather";
    let weather = &config.builtin.weather;
    let endpoints = [
        (&weather.geocoding_url, "/v1/search?name=Berlin&count=1"),
        (&weather.forecast_url, "/v1/forecast?latitude=52.5&longitude=13.4"),
    ];
    let http = match reqwest::Client::builder().timeout(NETWORK_TIMEOUT).build() {
        Ok(http) => http,
        Err(error) => {
            return CheckResult::warning(CHECK_NAME, error.to_string(), "is TLS set up here?");
        }
    };
    for (base, path) in endpoints {
        let hint = "weather.query will answer UPSTREAM_UNAVAILABLE; check the network, or set \
                    builtin.weather to a server that can be reached";
        match http.get(format!("{}{path}", base.trim_end_matches('/'))).send().await {
            Ok(answer) if answer.status().is_success() => {}
            Ok(answer) => {
                let message = format!("{base} answers with status {}", answer.status().as_u16());
                return CheckResult::warning(CHECK_NAME, message, hint);
            }
            Err(_) => {
                return CheckResult::warning(CHECK_NAME, format!("{base} cannot be reached"), hint);
            }
        }
    }
    CheckResult::ok(CHECK_NAME, "both services answer")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::CheckState;
    use super::*;

    #[test]
    fn a_public_address_without_keys_is_an_error() {
        let config = |listen: &str| Config { listen: listen.into(), ..Config::default() };
        assert_eq!(check_keys(&config("0.0.0.0:8080"), false).state, CheckState::Error);
        assert_eq!(check_keys(&config("0.0.0.0:8080"), true).state, CheckState::Ok);
        assert_eq!(check_keys(&config("[::1]:8080"), false).state, CheckState::Ok);
        // With OAuth configured, every request needs a token.
        let mut with_oauth = config("0.0.0.0:8080");
        with_oauth.auth.oauth = Some(crate::config::OauthSettings::default());
        assert_eq!(check_keys(&with_oauth, false).state, CheckState::Ok);
    }

    #[tokio::test]
    async fn a_corrupt_database_file_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().into(), ..Config::default() };
        std::fs::write(dir.path().join("toolcrib.db"), "no database".repeat(1_000)).unwrap();
        let (finding, _) = check_store(&config).await;
        assert!(finding.message.contains("not a database"), "{finding:?}");
        assert!(finding.hint.unwrap().contains("restore the last good one"));
    }

    #[test]
    fn a_locked_data_directory_is_an_error_unless_the_server_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().into(), ..Config::default() };
        assert!(check_store_lock(&config, false).is_none(), "no data directory yet");
        let lock = std::fs::File::create(dir.path().join("toolcrib.lock")).unwrap();
        assert!(check_store_lock(&config, false).is_none(), "the lock is free");
        lock.try_lock().unwrap();
        assert_eq!(check_store_lock(&config, false).unwrap().state, CheckState::Error);
        assert!(check_store_lock(&config, true).is_none());
    }

    #[test]
    fn an_unusable_data_directory_is_an_error() {
        let config = |dir: &str| Config { data_dir: dir.into(), ..Config::default() };
        assert_eq!(check_data_dir(&config("/dev/null/x"))[0].state, CheckState::Error);
        assert_eq!(check_data_dir(&config("/dev/null"))[0].state, CheckState::Error);
        assert_eq!(check_data_dir(&config("/proc/x"))[0].state, CheckState::Error);
    }

    #[tokio::test]
    async fn the_password_of_a_database_is_not_shown() {
        let mut config = Config::default();
        config.builtin.database.url = Some("postgres://u:secret@127.0.0.1:1/d".into());
        let finding = check_database(&config).await;
        assert_eq!(finding.state, CheckState::Error);
        assert!(!finding.message.contains("secret") && finding.message.contains("127.0.0.1:1"));
    }
}
