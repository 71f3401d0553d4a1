//! Checks that the configured NATS server is usable.

use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::{self, ErrorCode};
use toolcrib_protocol::utp::nats_connection::NatsEndpoint;

use super::CheckResult;
use crate::cli::output::format_bytes;
use crate::config::Config;

const CHECK_NAME: &str = "nats";
const TIMEOUT: Duration = Duration::from_secs(5);

pub async fn check(config: &Config) -> CheckResult {
    let Some(endpoint) = crate::bootstrap::nats_endpoint(&config.nats) else {
        return CheckResult::ok(
            CHECK_NAME,
            "none; calls of tools over NATS wait for a report over HTTP",
        );
    };
    let redacted_urls = redact_urls(&endpoint.url);
    match tokio::time::timeout(TIMEOUT, probe_nats(&endpoint, &redacted_urls)).await {
        Ok(finding) => finding,
        Err(_) => unreachable_result(format!(
            "{redacted_urls} does not answer within {} s",
            TIMEOUT.as_secs()
        )),
    }
}

fn unreachable_result(message: String) -> CheckResult {
    let hint = "start it, or correct nats.url; until then calls of tools over NATS wait";
    CheckResult::error(CHECK_NAME, message, hint)
}

async fn probe_nats(endpoint: &NatsEndpoint, redacted_urls: &str) -> CheckResult {
    let mut options = ConnectOptions::new().name("toolcrib doctor").connection_timeout(TIMEOUT);
    if let Some(path) = &endpoint.credentials {
        options = match options.credentials_file(path).await {
            Ok(options) => options,
            Err(error) => {
                let message = format!("{} cannot be read: {error}", path.display());
                return CheckResult::error(CHECK_NAME, message, "correct nats.credentials");
            }
        };
    }
    let urls: Vec<&str> = endpoint.url.split(',').map(str::trim).collect();
    let client = match options.connect(urls).await {
        Ok(client) => client,
        Err(error) => {
            return unreachable_result(format!("{redacted_urls} cannot be used: {error}"));
        }
    };
    let (server, max_payload) = (client.server_info(), client.max_payload());
    let version = server.version;
    let stream = format!("cg_cmd_{}", endpoint.version);
    let stream_state = match jetstream::new(client).get_stream(&stream).await {
        Ok(_) => format!("stream {stream} is there"),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(reason)
                if reason.error_code() == ErrorCode::STREAM_NOT_FOUND =>
            {
                "the first start creates the streams".to_owned()
            }
            _ => {
                let message =
                    format!("{redacted_urls} (version {version}) has no JetStream: {error}");
                let hint = "start it with -js, or allow JetStream to this account";
                return CheckResult::error(CHECK_NAME, message, hint);
            }
        },
    };
    let max_payload = format_bytes(max_payload as u64);
    CheckResult::ok(
        CHECK_NAME,
        format!(
            "{redacted_urls}: version {version} with JetStream, {stream_state}, carries up to {max_payload}"
        ),
    )
}

/// Returns the hosts and ports of the URLs, because a URL may contain a password.
fn redact_urls(urls: &str) -> String {
    let redact_url = |url: &str| {
        let rest = url.trim().split("://").last().unwrap_or_default().to_owned();
        rest.rsplit('@').next().unwrap_or_default().trim_end_matches('/').to_owned()
    };
    urls.split(',').map(redact_url).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::CheckState;
    use super::*;

    #[tokio::test]
    async fn an_unreachable_nats_server_is_an_error_without_its_password() {
        let mut config = Config::default();
        assert_eq!(check(&config).await.state, CheckState::Ok);
        config.nats.url = Some("nats://user:secret@127.0.0.1:1,nats://token@127.0.0.1:2".into());
        let finding = check(&config).await;
        assert_eq!(finding.state, CheckState::Error);
        assert!(finding.message.contains("127.0.0.1:1, 127.0.0.1:2"), "{}", finding.message);
        assert!(!finding.message.contains("secret") && !finding.message.contains("token"));
    }
}
