//! Protects a server without keys from web pages: a page in the operator's browser can send
//! requests to this machine, and can point its own host name at it (DNS rebinding).
//!
//! Only requests without credentials are checked. A page cannot add a key that it does not know, so
//! a request with a valid key or operator token was not forged.

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use toolcrib::domain::fault::{Code, Error};
use toolcrib_protocol::outbound::{host_without_port, is_loopback_host};

/// The browser's own statement about the page that caused a request. A page cannot change it.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The host names of this server, and the web origins that may use it without credentials.
#[derive(Debug, Clone, Default)]
pub struct OriginPolicy {
    /// Host names of this server in addition to loopback, with or without a port.
    pub allowed_hosts: Vec<String>,
    /// Host of the URL at which browsers reach this server, if the settings give one.
    pub public_host: Option<String>,
    /// Origins of web pages that may use this server without credentials, such as
    /// `http://localhost:5173`.
    pub allowed_origins: Vec<String>,
    /// The settings table of the lists, for error messages.
    pub table: &'static str,
}

impl OriginPolicy {
    /// Checks a request without credentials: it must be for a name of this server, and if a web
    /// page caused it, that page must be this server's own or of an allowed origin. This applies to
    /// every method, because a GET request can take work from the client queue.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), Error> {
        if let Some(host) = find(headers, &header::HOST, |host| !self.is_own_host(host)) {
            let message = format!(
                "\"{}\" is not a name of this server, which has no keys: use localhost as the \
                 host, add the name to {}.allowed_hosts, or make a key with toolcrib keys create",
                excerpt(host),
                self.table
            );
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        let host = headers.get(header::HOST).map(header_text);
        let mut origins = headers.get_all(header::ORIGIN).iter().map(header_text).peekable();
        let is_foreign = match origins.peek() {
            // A browser sends the origin with every request that another page can read or that has
            // a body; where it is present it is more precise than the site.
            Some(_) => origins.any(|origin| !self.is_own_origin(origin, host)),
            // Images, links and forms with GET come without an origin. `same-site` is foreign too:
            // every port of this machine is the same site.
            None => find(headers, &SEC_FETCH_SITE, |site| !matches!(site, "same-origin" | "none"))
                .is_some(),
        };
        if is_foreign {
            let message = format!(
                "this server has no keys, and a web page of another origin caused this request; add \
                 the origin to {}.allowed_origins, or make a key with toolcrib keys create and \
                 send it",
                self.table
            );
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        Ok(())
    }

    /// Returns true if a `Host` header names this server.
    pub(crate) fn is_own_host(&self, host: &str) -> bool {
        let Some(bare) = host_without_port(host) else { return false };
        let is_named = |name: &String| {
            name.eq_ignore_ascii_case(host)
                || host_without_port(name).is_some_and(|name| name.eq_ignore_ascii_case(bare))
                    && !name.contains(':')
        };
        is_loopback_host(host)
            || self.public_host.as_ref().is_some_and(is_named)
            || self.allowed_hosts.iter().any(is_named)
    }

    fn is_own_origin(&self, origin: &str, host: Option<&str>) -> bool {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        let is_same = authority
            .is_some_and(|authority| host.is_some_and(|host| host.eq_ignore_ascii_case(authority)));
        is_same || self.allowed_origins.iter().any(|allowed| allowed == origin)
    }
}

/// Returns the first value of a header that has the property. Every value is looked at, because a
/// request can repeat a header.
fn find<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    has_property: impl Fn(&str) -> bool,
) -> Option<&'a str> {
    headers.get_all(name).iter().map(header_text).find(|text| has_property(text))
}

fn header_text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("")
}

fn excerpt(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check(policy: &OriginPolicy, pairs: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        policy.check(&headers).is_ok()
    }

    #[test]
    fn only_exact_names_of_this_server_are_hosts() {
        let allowed_hosts = vec!["tools.example.com".to_owned(), "other.example:8443".to_owned()];
        let policy = OriginPolicy { allowed_hosts, ..OriginPolicy::default() };
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1:1",
            "127.8.8.8",
            "[::1]",
            "[::1]:8080",
            "tools.example.com",
            "Tools.Example.Com:443",
            "other.example:8443",
        ] {
            assert!(check(&policy, &[("host", host)]), "{host}");
        }
        for host in [
            "[::1].evil.example",
            "[::1]evil.example:80",
            "[::1",
            "::1",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "localhost:80:80",
            "localhost:evil.example",
            "localhost:",
            "localhost@evil.example",
            "evil.example",
            "other.example",
            "other.example:8444",
            "tools.example.com.evil.example",
            "",
        ] {
            assert!(!check(&policy, &[("host", host)]), "{host}");
        }
        assert!(!check(&policy, &[("host", "localhost"), ("host", "evil.example")]));
        assert!(check(&policy, &[]));
    }

    #[test]
    fn pages_of_other_origins_are_refused_unless_they_are_listed() {
        let allowed_origins = vec!["http://localhost:5173".to_owned()];
        let policy = OriginPolicy { allowed_origins, ..OriginPolicy::default() };
        let host = ("host", "localhost:8080");
        for (origin, site, fine) in [
            (None, None, true),
            (None, Some("none"), true),
            (None, Some("same-origin"), true),
            (None, Some("same-site"), false),
            (None, Some("cross-site"), false),
            (Some("http://localhost:8080"), Some("same-origin"), true),
            (Some("http://localhost:8080"), None, true),
            (Some("http://localhost:5173"), Some("same-site"), true),
            (Some("http://localhost:3000"), Some("same-site"), false),
            (Some("http://localhost:3000"), None, false),
            (Some("http://127.0.0.1:8080"), None, false),
            (Some("https://evil.example"), Some("cross-site"), false),
            (Some("null"), None, false),
            (Some("localhost:8080"), None, false),
        ] {
            let mut pairs = vec![host];
            pairs.extend(origin.map(|origin| ("origin", origin)));
            pairs.extend(site.map(|site| ("sec-fetch-site", site)));
            assert_eq!(check(&policy, &pairs), fine, "{pairs:?}");
        }
    }
}
