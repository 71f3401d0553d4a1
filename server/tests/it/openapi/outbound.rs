//! Outbound protection: hosts and addresses that a definition cannot reach.

use std::net::ToSocketAddrs;

use serde_json::{Value, json};

use super::upstream::{Upstream, define_and_call};
use crate::support::Server;

async fn call_error(server: &Server, url: &str) -> Value {
    define_and_call(&server.api(), json!({ "http": { "url": url } }), json!({})).await["error"]
        .clone()
}

#[tokio::test]
async fn only_listed_hosts_over_https_on_its_port_are_allowed() {
    let server = Server::with(|config| {
        config.http.hosts = vec!["api.example.com".into()];
        config.policy.max_retries = 0;
    })
    .await;
    for url in [
        "https://other.example.com/",
        "http://api.example.com/",
        "https://api.example.com:8443/",
        "https://api.example.com.evil.org/",
        "http://127.0.0.1:8080/",
    ] {
        let error = call_error(&server, url).await;
        assert_eq!(error["code"], "PERMISSION_DENIED", "{url}: {error}");
        assert!(error["message"].as_str().unwrap().contains("http.hosts"), "{error}");
    }
}

#[tokio::test]
async fn private_addresses_are_refused_in_every_spelling() {
    let upstream = Upstream::start().await;
    let port = upstream.address.rsplit(':').next().unwrap();
    let hosts = [
        "127.0.0.1",
        "0x7f.1",
        "2130706433",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "[fd00::1]",
        "[fe80::1]",
        "0.0.0.0",
    ];
    let listed: Vec<String> = hosts.iter().map(|host| format!("http://{host}:{port}")).collect();
    let server = Server::with(|config| {
        config.http.hosts = listed.clone();
        config.policy.max_retries = 0;
    })
    .await;
    for host in hosts {
        let error = call_error(&server, &format!("http://{host}:{port}/x")).await;
        assert_eq!(error["code"], "PERMISSION_DENIED", "{host}: {error}");
        assert!(error["message"].as_str().unwrap().contains("private"), "{host}: {error}");
    }
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn a_name_that_resolves_to_a_private_address_is_not_connected_to() {
    let upstream = Upstream::start().await;
    let port = upstream.address.rsplit(':').next().unwrap().to_owned();
    // Names that resolve to this machine and are checked only after resolution.
    let hostname = std::fs::read_to_string("/etc/hostname").unwrap_or_default().trim().to_owned();
    let resolves =
        |name: &&str| (*name, 1).to_socket_addrs().is_ok_and(|mut to| to.next().is_some());
    let name = [hostname.as_str(), "ip6-localhost"].into_iter().find(resolves);
    let code = if name.is_some() { "PERMISSION_DENIED" } else { "UPSTREAM_UNAVAILABLE" };
    let name = name.unwrap_or("ip6-localhost");
    let server = Server::with(|config| {
        config.http.hosts = vec![format!("http://{name}:{port}")];
        config.policy.max_retries = 0;
    })
    .await;
    let error = call_error(&server, &format!("http://{name}:{port}/x")).await;
    assert_eq!(error["code"], code, "{error}");
    assert!(upstream.requests().is_empty());
}

#[tokio::test]
async fn redirects_to_other_hosts_are_not_followed() {
    let upstream = Upstream::start().await;
    let server = upstream.server_with(|config| config.policy.max_retries = 0).await;
    let api = server.api();
    let options_for = |path: &str| json!({ "http": { "url": upstream.url(path) } });
    let ended = define_and_call(&api, options_for("/redirect/same"), json!({})).await;
    assert_eq!(ended["result"]["path"], "/landed", "{ended}");
    let ended = define_and_call(&api, options_for("/redirect/elsewhere"), json!({})).await;
    assert_eq!(ended["error"]["code"], "UPSTREAM_UNAVAILABLE", "{ended}");
    let message = ended["error"]["message"].as_str().unwrap();
    assert!(message.contains("another host, http://169.254.169.254"), "{message}");
    let ended = define_and_call(&api, options_for("/redirect/round"), json!({})).await;
    assert!(ended["error"]["message"].as_str().unwrap().contains("more than 5"), "{ended}");
    let before = upstream.requests().len();
    let post = json!({ "http": { "method": "POST", "url": upstream.url("/redirect/same") } });
    let ended = define_and_call(&api, post, json!({})).await;
    assert_eq!(ended["status"], "FAILED", "a POST must not follow a redirect");
    assert_eq!(upstream.requests().len(), before + 1);
}

#[tokio::test]
async fn a_path_argument_cannot_escape_its_segment() {
    let upstream = Upstream::start().await;
    let server = upstream.server().await;
    let options = json!({ "http": { "url": upstream.url("/pets/{id}/toys") } });
    let api = server.api();
    let ended = define_and_call(&api, options.clone(), json!({ "id": "../../admin?x=#" })).await;
    assert_eq!(ended["result"]["path"], "/pets/..%2F..%2Fadmin%3Fx%3D%23/toys", "{ended}");
    let ended = define_and_call(&api, options, json!({ "id": ".." })).await;
    assert_eq!(ended["error"]["code"], "BAD_REQUEST");
    assert_eq!(upstream.requests().len(), 1);
}
