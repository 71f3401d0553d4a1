//! Guards outbound connections to addresses that a caller names.
//!
//! A caller's URL must not give access to the network of the server: its loopback, its neighbors,
//! or the metadata service of its cloud. A URL is checked when it is given
//! ([`OutboundPolicy::check`]), which catches mistakes early. Host names are resolved by a resolver
//! that returns only permitted addresses ([`OutboundPolicy::client_builder`]), so the address that
//! was checked is the one that is connected to, regardless of what a later DNS query returns.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use futures::future::BoxFuture;
use jiff::Timestamp;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{ClientBuilder, Url, redirect};

/// The rules for outbound connections, as the operator configures them.
#[derive(Debug, Clone)]
pub struct OutboundPolicy {
    allow_private: bool,
    allow_hosts: Vec<String>,
    /// The configuration table of the rules, for error messages.
    table: &'static str,
}

/// The error for a host that has only addresses in private networks.
#[derive(Debug, thiserror::Error)]
#[error("{host} has only addresses of private networks, which {table}.allow_private forbids")]
pub struct PrivateAddressError {
    host: String,
    table: &'static str,
}

impl OutboundPolicy {
    /// Returns the rules. `allow_hosts` are names, addresses, or `*.name`, for which private
    /// addresses are allowed.
    pub fn new(table: &'static str, allow_private: bool, allow_hosts: &[String]) -> Self {
        let allow_hosts = allow_hosts.iter().map(|host| normalize_host(host)).collect();
        Self { allow_private, allow_hosts, table }
    }

    /// Returns the normalized URL. The error is a phrase that follows the name of the field.
    pub fn check(&self, text: &str) -> Result<Url, String> {
        let mut url = Url::parse(text).map_err(|error| format!("is not a URL: {error}"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err("must begin with https:// or http://".to_owned());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("must not have a user name or password in it".to_owned());
        }
        let Some(host) = url.host_str().map(normalize_host) else {
            return Err("must name a host".to_owned());
        };
        if url.port() == Some(0) {
            return Err("must not have port 0".to_owned());
        }
        if !self.permits_literal(&host) {
            return Err(format!(
                "must not lead to a private network, as {host} does; if it should, the operator \
                 can set {table}.allow_hosts or {table}.allow_private",
                table = self.table
            ));
        }
        url.set_fragment(None);
        Ok(url)
    }

    /// Returns the builder of a client that connects only to permitted addresses. It uses no proxy,
    /// which would resolve names itself, and follows no redirects.
    pub fn client_builder(&self) -> ClientBuilder {
        self.client_builder_with_lookup(|host| {
            Box::pin(async move {
                let found = tokio::net::lookup_host((host.as_str(), 0)).await?;
                Ok(found.collect())
            })
        })
    }

    fn client_builder_with_lookup(&self, lookup: impl HostLookup) -> ClientBuilder {
        let guard = GuardedResolver { rules: self.clone(), lookup: Arc::new(lookup) };
        reqwest::Client::builder()
            .dns_resolver(guard)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .user_agent(concat!("toolcrib/", env!("CARGO_PKG_VERSION")))
    }

    fn permits_literal(&self, host: &str) -> bool {
        match host.parse::<IpAddr>() {
            Ok(address) => self.permits(host, address),
            Err(_) => {
                let local = host == "localhost" || host.ends_with(".localhost");
                !local || self.permits(host, Ipv4Addr::LOCALHOST.into())
            }
        }
    }

    fn permits(&self, host: &str, address: IpAddr) -> bool {
        self.allow_private || is_public(address) || self.is_listed(&normalize_host(host))
    }

    fn is_listed(&self, host: &str) -> bool {
        self.allow_hosts.iter().any(|listed| match listed.strip_prefix("*.") {
            Some(parent) => host.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.')),
            None => listed == host,
        })
    }
}

/// Returns a host in lower case, without the brackets of IPv6 and without a final dot.
fn normalize_host(host: &str) -> String {
    let host = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    host.to_ascii_lowercase()
}

trait HostLookup:
    Fn(String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> + Send + Sync + 'static
{
}

impl<F> HostLookup for F where
    F: Fn(String) -> BoxFuture<'static, std::io::Result<Vec<SocketAddr>>> + Send + Sync + 'static
{
}

/// Resolves names to permitted addresses.
struct GuardedResolver {
    rules: OutboundPolicy,
    lookup: Arc<dyn HostLookup>,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (rules, lookup, host) =
            (self.rules.clone(), self.lookup.clone(), name.as_str().to_owned());
        Box::pin(async move {
            let mut found = lookup(host.clone()).await?;
            if found.is_empty() {
                return Err(format!("{host} has no address").into());
            }
            found.retain(|address| rules.permits(&host, address.ip()));
            if found.is_empty() {
                return Err(PrivateAddressError { host, table: rules.table }.into());
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// Describes a request error with its causes, without the URL, which may contain a secret.
pub fn error_chain_without_url(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Returns the rule that prevented a request, if there is one.
pub fn find_private_address_error(error: &reqwest::Error) -> Option<&PrivateAddressError> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(private) = error.downcast_ref() {
            return Some(private);
        }
        cause = error.source();
    }
    None
}

/// Returns the delay of a `Retry-After` header in either of its forms.
pub fn retry_after_ms(headers: &HeaderMap) -> Option<u64> {
    parse_retry_after_ms(headers.get(RETRY_AFTER)?.to_str().ok()?)
}

/// Parses the text of a `Retry-After` header.
pub fn parse_retry_after_ms(text: &str) -> Option<u64> {
    let text = text.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(seconds.saturating_mul(1_000));
    }
    // Some servers send fractions, which the standard does not allow.
    if let Ok(seconds) = text.parse::<f64>() {
        let fits = (0.0..=u32::MAX.into()).contains(&seconds);
        return fits.then_some((seconds * 1_000.0).ceil() as u64);
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    u64::try_from(date.as_millisecond() - Timestamp::now().as_millisecond()).ok()
}

/// Returns whether an address is on the public internet. An IPv6 address that contains an IPv4
/// address counts as the latter.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// The platform service of Azure virtual machines, which hands out their configuration. It has a
/// public address and answers only to the machine itself.
const AZURE_PLATFORM: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    address != AZURE_PLATFORM
        && !matches!(
            (a, b, c),
            // This network, private, carrier-grade NAT, loopback, link-local (which includes the
            // metadata services of clouds), private, IETF, documentation, 6to4 relays, private,
            // benchmarks, documentation, documentation, multicast and reserved.
            (0 | 10 | 127, _, _)
                | (100, 64..=127, _)
                | (169, 254, _)
                | (172, 16..=31, _)
                | (192, 0, 0 | 2)
                | (192, 88, 99)
                | (192, 168, _)
                | (198, 18 | 19, _)
                | (198, 51, 100)
                | (203, 0, 113)
                | (224..=255, _, _)
        )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let parts = address.segments();
    let embedded = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match parts {
        // NAT64, 6to4 and mapped addresses contain an IPv4 address, which decides.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x2002, high, low, ..]
        | [0, 0, 0, 0, 0, 0xffff, high, low] => embedded(high, low),
        // Teredo, ORCHID and other IETF ranges; documentation, twice.
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Of the rest only global unicast is public: not loopback, unique local, link-local,
        // site-local, multicast, or ranges that are not assigned yet.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

/// Returns whether `host` or `host:port` names the loopback interface.
pub fn is_loopback_host(host: &str) -> bool {
    host_without_port(host).is_some_and(|bare| {
        bare.eq_ignore_ascii_case("localhost")
            || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    })
}

/// Returns the name or address of `host` or `host:port`, an IPv6 address without its brackets.
/// Returns `None` if anything else is in the text: `[::1].example.com` is no host.
pub fn host_without_port(text: &str) -> Option<&str> {
    let is_port = |port: &str| {
        (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit())
    };
    if let Some(rest) = text.strip_prefix('[') {
        let (address, after) = rest.split_once(']')?;
        let is_end = after.is_empty() || after.strip_prefix(':').is_some_and(is_port);
        return (is_end && address.parse::<Ipv6Addr>().is_ok()).then_some(address);
    }
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let is_name = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    (is_name && port.is_none_or(is_port)).then_some(name)
}

#[cfg(test)]
mod tests;
