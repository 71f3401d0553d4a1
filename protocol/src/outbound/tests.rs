//! Tests of the outbound policy: permitted addresses and URLs, and host names that resolve to
//! private addresses. Also tests of `Retry-After` and of loopback hosts.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::net::TcpListener;

use super::*;

fn policy_without_exceptions() -> OutboundPolicy {
    OutboundPolicy::new("webhooks", false, &[])
}

fn policy_allowing(hosts: &[&str]) -> OutboundPolicy {
    let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
    OutboundPolicy::new("webhooks", false, &hosts)
}

#[test]
fn private_addresses_in_every_notation_are_recognized() {
    for text in [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "10.255.255.255",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.9.9.9",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.5",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:168.63.129.16",
        "64:ff9b::168.63.129.16",
        "64:ff9b::127.0.0.1",
        "64:ff9b::10.1.2.3",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:0:7f00:1::",
        "2001:20::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2002:c0a8:101::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd12::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ] {
        assert!(!is_public(text.parse().unwrap()), "{text}");
    }
}

#[test]
fn public_addresses_are_recognized() {
    for text in [
        "1.1.1.1",
        "8.8.8.8",
        "100.63.255.255",
        "100.128.0.1",
        "172.15.0.1",
        "172.32.0.1",
        "192.0.1.1",
        "198.17.0.1",
        "198.20.0.1",
        "223.255.255.255",
        "2606:4700::1111",
        "2a00:1450::1",
        "2002:808:808::1",
        "64:ff9b::8.8.8.8",
        "::ffff:8.8.8.8",
        "2001:200::1",
    ] {
        assert!(is_public(text.parse().unwrap()), "{text}");
    }
}

#[test]
fn refused_urls_have_a_reason() {
    for (url, reason) in [
        ("", "is not a URL"),
        ("hooks.example/x", "is not a URL"),
        ("/x", "is not a URL"),
        ("https://", "is not a URL"),
        ("ftp://hooks.example", "must begin with"),
        ("file:///etc/passwd", "must begin with"),
        ("javascript:alert(1)", "must begin with"),
        ("https://user@hooks.example", "user name"),
        ("https://:secret@hooks.example", "user name"),
        ("https://hooks.example:0/", "port 0"),
        ("http://localhost/x", "private network"),
        ("http://LOCALHOST./x", "private network"),
        ("http://a.localhost/x", "private network"),
        ("http://127.0.0.1:9000", "private network"),
        ("http://127.1", "private network"),
        ("http://2130706433/", "private network"),
        ("http://0x7f.0.0.1/", "private network"),
        ("http://0177.0.0.1/", "private network"),
        ("http://[::1]:80/", "private network"),
        ("http://[::ffff:7f00:1]/", "private network"),
        ("http://169.254.169.254/latest/meta-data", "private network"),
    ] {
        let error = policy_without_exceptions().check(url).expect_err(url);
        assert!(error.contains(reason), "{url}: {error}");
    }
}

#[test]
fn permitted_urls_are_normalized() {
    for (url, normalized) in [
        ("https://hooks.example", "https://hooks.example/"),
        ("HTTPS://Hooks.Example:443/a?b=c#d", "https://hooks.example/a?b=c"),
        ("http://8.8.8.8:8080/x", "http://8.8.8.8:8080/x"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
    ] {
        assert_eq!(policy_without_exceptions().check(url).unwrap().as_str(), normalized);
    }
    let open = OutboundPolicy::new("webhooks", true, &[]);
    assert!(open.check("http://localhost:1/").is_ok());
    assert!(open.check("http://10.0.0.1/").is_ok());
    let with_exceptions = policy_allowing(&["Hooks.internal", "*.svc.local", "127.0.0.1", "::1"]);
    for url in ["http://127.0.0.1:9/", "http://[::1]/"] {
        assert!(with_exceptions.check(url).is_ok(), "{url}");
    }
    for url in ["http://127.0.0.2/", "http://localhost/", "http://10.0.0.1/"] {
        assert!(with_exceptions.check(url).is_err(), "{url}");
    }
    let private: IpAddr = [10, 0, 0, 1].into();
    for host in ["hooks.internal", "HOOKS.internal.", "a.svc.local", "a.b.svc.local"] {
        assert!(with_exceptions.permits(host, private), "{host}");
    }
    for host in ["xhooks.internal", "svc.local", "xsvc.local", "a.svc.local.example"] {
        assert!(!with_exceptions.permits(host, private), "{host}");
    }
}

/// Starts a listener that counts connections, and returns its address and the count.
async fn counting_listener() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, connections) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            drop(stream);
        }
    });
    (address, connections)
}

#[tokio::test]
async fn a_name_that_resolves_to_a_private_address_is_not_connected_to() {
    let (address, connections) = counting_listener().await;
    let lookup = move |_| -> BoxFuture<'static, _> { Box::pin(async move { Ok(vec![address]) }) };
    let url = format!("http://hooks.example:{}/", address.port());
    let client = policy_without_exceptions().client_builder_with_lookup(lookup).build().unwrap();
    let error = client.post(&url).send().await.unwrap_err();
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(cause) = source.filter(|cause| !cause.is::<PrivateAddressError>()) {
        source = cause.source();
    }
    let reason = source.expect("the policy refused the address").to_string();
    assert!(
        reason.contains("hooks.example") && reason.contains("webhooks.allow_private"),
        "{reason}"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 0);
    // The same client connects once the host is allowed, so the policy prevented the connection.
    let client =
        policy_allowing(&["hooks.example"]).client_builder_with_lookup(lookup).build().unwrap();
    assert!(client.post(&url).send().await.is_err(), "the listener closes the connection");
    assert!(connections.load(Ordering::SeqCst) > 0);
}

/// The first DNS response has a public and a private address, the later ones only the private one.
/// The client never connects to the private address.
#[tokio::test]
async fn dns_rebinding_does_not_bypass_the_address_check() {
    let (address, connections) = counting_listener().await;
    let lookups = Arc::new(AtomicUsize::new(0));
    let counting = lookups.clone();
    let lookup = move |_| -> BoxFuture<'static, _> {
        let public = SocketAddr::new([192, 88, 98, 1].into(), address.port());
        let first = counting.fetch_add(1, Ordering::SeqCst) == 0;
        Box::pin(async move { Ok(if first { vec![public, address] } else { vec![address] }) })
    };
    let client = policy_without_exceptions().client_builder_with_lookup(lookup);
    let client = client.timeout(std::time::Duration::from_millis(200)).build().unwrap();
    let url = format!("http://rebind.example:{}/", address.port());
    for _ in 0..3 {
        assert!(client.post(&url).send().await.is_err());
    }
    assert_eq!(lookups.load(Ordering::SeqCst), 3);
    assert_eq!(connections.load(Ordering::SeqCst), 0);
}

#[test]
fn both_forms_of_retry_after_are_parsed() {
    let parse = |text: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, text.parse().unwrap());
        retry_after_ms(&headers)
    };
    assert_eq!(parse("120"), Some(120_000));
    assert_eq!(parse(" 0 "), Some(0));
    assert_eq!(parse("-1"), None);
    assert_eq!(parse("soon"), None);
    assert_eq!(parse("Sun, 06 Nov 1994 08:49:37 GMT"), None, "a date in the past");
    let later = parse("Fri, 06 Nov 2093 08:49:37 GMT").unwrap();
    assert!(later > 86_400_000, "{later}");
    assert_eq!(retry_after_ms(&HeaderMap::new()), None);
}

#[test]
fn loopback_hosts_are_recognized() {
    for host in ["localhost", "localhost:8080", "127.0.0.1", "127.9.9.9:1", "[::1]:80", "[::1]"] {
        assert!(is_loopback_host(host), "{host}");
    }
    for host in [
        "example.com",
        "localhost.example.com",
        "10.0.0.1:80",
        "",
        "[::2]",
        "127.0.0.1.nip.io",
        "[::1].evil.example",
        "localhost:evil.example",
        "localhost:80/",
    ] {
        assert!(!is_loopback_host(host), "{host}");
    }
}
