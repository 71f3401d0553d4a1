//! The hosts that HTTP tools may connect to. Only https with its default port is allowed, unless an
//! entry says otherwise.

use reqwest::Url;

/// One entry: `api.example.com`, `*.example.com`, `api.example.com:8443`, `http://10.0.0.7:8080`.
#[derive(Debug, Clone, PartialEq)]
struct HostPattern {
    scheme: String,
    host: String,
    port: u16,
}

/// The list of allowed hosts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostAllowlist(Vec<HostPattern>);

impl HostAllowlist {
    /// Parses the entries. The error names the entry that is invalid.
    pub fn parse(entries: &[String]) -> Result<Self, String> {
        entries.iter().map(|text| parse_host_pattern(text)).collect::<Result<_, _>>().map(Self)
    }

    /// Returns whether the host, scheme and port of a URL are on the list.
    pub fn allows(&self, url: &Url) -> bool {
        let Some(host) = url.host_str().map(normalize_host) else { return false };
        let port = url.port_or_known_default();
        self.0.iter().any(|entry| {
            let host_matches = match entry.host.strip_prefix("*.") {
                Some(parent) => host.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.')),
                None => entry.host == host,
            };
            host_matches && entry.scheme == url.scheme() && Some(entry.port) == port
        })
    }
}

fn normalize_host(host: &str) -> String {
    host.trim_end_matches('.').to_ascii_lowercase()
}

fn parse_host_pattern(text: &str) -> Result<HostPattern, String> {
    let invalid = || {
        format!(
            "\"{text}\" is not a host; write api.example.com, *.example.com, api.example.com:8443 \
             or http://127.0.0.1:8080"
        )
    };
    let (scheme, rest) = text.split_once("://").unwrap_or(("https", text));
    if !matches!(scheme, "http" | "https") {
        return Err(invalid());
    }
    let (wild, rest) = match rest.strip_prefix("*.") {
        Some(rest) => ("*.", rest),
        None => ("", rest),
    };
    // Parsed as a URL, so that the entry has the same normalized form as the URLs compared with it.
    let url = Url::parse(&format!("{scheme}://{rest}")).map_err(|_| invalid())?;
    let has_only_origin = url.path() == "/" && url.query().is_none() && url.username().is_empty();
    match (url.host_str(), url.port_or_known_default()) {
        (Some(host), Some(port)) if has_only_origin && !host.is_empty() && !host.contains('*') => {
            Ok(HostPattern {
                scheme: scheme.to_owned(),
                host: format!("{wild}{}", normalize_host(host)),
                port,
            })
        }
        _ => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entry: &str, url: &str) -> bool {
        HostAllowlist::parse(&[entry.to_owned()]).unwrap().allows(&Url::parse(url).unwrap())
    }

    #[test]
    fn entries_allow_https_on_its_default_port_unless_stated() {
        assert!(allows("api.example.com", "https://api.example.com/x"));
        assert!(allows("API.example.com.", "https://api.EXAMPLE.com./x"));
        for other in [
            "http://api.example.com/",
            "https://api.example.com:8443/",
            "https://example.com/",
            "https://api.example.com.evil.org/",
            "https://notapi.example.com/",
        ] {
            assert!(!allows("api.example.com", other), "{other}");
        }
        assert!(allows("api.example.com:8443", "https://api.example.com:8443/"));
        assert!(!allows("api.example.com:8443", "https://api.example.com/"));
        assert!(allows("http://127.0.0.1:8080", "http://127.0.0.1:8080/"));
        assert!(allows("http://127.0.0.1:8080", "http://0x7f.1:8080/"), "the same address");
        assert!(allows("http://[::1]:8080", "http://[0:0:0:0:0:0:0:1]:8080/"));
    }

    #[test]
    fn a_wildcard_matches_subdomains_only() {
        assert!(allows("*.example.com", "https://a.b.example.com/"));
        assert!(!allows("*.example.com", "https://example.com/"));
        assert!(!allows("*.example.com", "https://badexample.com/"));
    }

    #[test]
    fn invalid_entries_are_refused() {
        for text in ["", "*", "ftp://x", "a/b", "user@host", "a b", "x:99999", "a.*.b", "https://"]
        {
            assert!(HostAllowlist::parse(&[text.to_owned()]).is_err(), "{text}");
        }
    }
}
