//! The rules on the destinations of HTTP tools: the operator's allowlist of hosts, and the guard
//! against private networks. The source of HTTP tools enforces them, and an import checks them
//! early, so that its answer names the setting that is missing.

use reqwest::Url;

use super::host_allowlist::HostAllowlist;
use crate::outbound::OutboundPolicy;

/// The rules on the destinations of HTTP tools, as the operator configures them.
#[derive(Debug, Clone)]
pub struct DestinationRules {
    /// The setting `http.hosts`, as written.
    hosts: Vec<String>,
    /// The setting `http.allow_hosts`, as written.
    allow_hosts: Vec<String>,
    allowlist: HostAllowlist,
    outbound: OutboundPolicy,
}

/// The reason why a tool may not connect to a URL, and the settings that would permit it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForbiddenDestination {
    /// Names the destination and the rule.
    pub message: String,
    /// The exact settings that permit the destination, if settings can.
    pub hint: Option<String>,
}

impl DestinationRules {
    /// Creates the rules. The error names the setting that is invalid.
    pub fn new(
        hosts: &[String],
        allow_private: bool,
        allow_hosts: &[String],
    ) -> Result<Self, String> {
        let allowlist = HostAllowlist::parse(hosts).map_err(|reason| format!("hosts: {reason}"))?;
        let outbound = OutboundPolicy::new("http", allow_private, allow_hosts);
        let (hosts, allow_hosts) = (hosts.to_vec(), allow_hosts.to_vec());
        Ok(Self { hosts, allow_hosts, allowlist, outbound })
    }

    /// Returns the guard against private networks.
    pub fn outbound(&self) -> &OutboundPolicy {
        &self.outbound
    }

    /// Checks that tools may connect to this URL.
    pub fn check(&self, url: &Url) -> Result<(), ForbiddenDestination> {
        let origin = url.origin().ascii_serialization();
        let private = self.outbound.check(url.as_str()).err();
        let mut settings = Vec::new();
        if !self.allowlist.allows(url) {
            settings.push(setting("hosts", &self.hosts, &allowlist_entry(url)));
        }
        let is_listed = settings.is_empty();
        if private.is_some() && url.host_str().is_some() {
            let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
            settings.push(setting("allow_hosts", &self.allow_hosts, host));
        }
        let message = match private {
            _ if !is_listed => {
                format!("{origin} is not allowed: it is not in the setting http.hosts")
            }
            Some(reason) => format!("the tool's URL {reason}"),
            None => return Ok(()),
        };
        let settings = settings.join(" and ");
        let hint = (!settings.is_empty()).then(|| {
            format!("set {settings} in the server's configuration, and restart the server")
        });
        Err(ForbiddenDestination { message, hint })
    }
}

/// Returns the shortest entry of `http.hosts` that permits this URL.
fn allowlist_entry(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    match url.scheme() {
        "https" => format!("{host}{port}"),
        scheme => format!("{scheme}://{host}{port}"),
    }
}

/// Returns a setting as `toolcrib.toml` has it, with one more entry.
fn setting(key: &str, entries: &[String], more: &str) -> String {
    let entries = entries.iter().map(String::as_str).chain([more]);
    let entries: Vec<String> = entries.map(|entry| format!("\"{entry}\"")).collect();
    format!("http.{key} = [{}]", entries.join(", "))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check(url: &str) -> Result<(), ForbiddenDestination> {
        let rules = DestinationRules::new(&["a.example".to_owned()], false, &[]).unwrap();
        rules.check(&Url::parse(url).unwrap())
    }

    #[test]
    fn a_forbidden_destination_names_the_exact_settings() {
        assert_eq!(check("https://a.example/x"), Ok(()));
        let hint = |url| check(url).unwrap_err().hint.unwrap();
        let set = |settings: &str| {
            format!("set {settings} in the server's configuration, and restart the server")
        };
        let hosts = |entry: &str| set(&format!("http.hosts = [\"a.example\", \"{entry}\"]"));
        assert_eq!(hint("https://b.example/x"), hosts("b.example"));
        assert_eq!(hint("https://b.example:8443/x"), hosts("b.example:8443"));
        assert_eq!(hint("http://b.example/x"), hosts("http://b.example"));
        let both = "http.hosts = [\"a.example\", \"http://127.0.0.1:9\"] and \
                    http.allow_hosts = [\"127.0.0.1\"]";
        assert_eq!(hint("http://127.0.0.1:9/x"), set(both));
        let message = check("https://b.example/x").unwrap_err().message;
        assert_eq!(
            message,
            "https://b.example is not allowed: it is not in the setting http.hosts"
        );
    }
}
