//! Starts that must fail with a helpful reason.

use std::time::Duration;

use rusqlite::Connection;

use crate::support::process::{Server, free_port};

/// Waits until the process has failed. Returns its log.
async fn expect_failed_start(server: &mut Server) -> String {
    let status = server.ended(Duration::from_secs(10)).await;
    assert!(!status.success(), "it started");
    server.log()
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_not_changed() {
    let mut server = Server::ready().await;
    server.evaluated("1+1").await;
    assert!(server.stop().await.success());
    let database = Connection::open(server.database()).unwrap();
    let version = |database: &Connection| {
        database.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0)).unwrap()
    };
    let newer = version(&database) + 1;
    database.pragma_update(None, "user_version", newer).unwrap();
    server.spawn();
    let log = expect_failed_start(&mut server).await;
    assert!(log.contains(&format!("schema version {newer}")), "{log}");
    assert!(log.contains("newer toolcrib"), "{log}");
    let keys = server.command(&["keys", "ls"]).output().unwrap();
    assert!(!keys.status.success(), "the command line refuses it, too");
    assert!(String::from_utf8_lossy(&keys.stderr).contains("newer toolcrib"));
    assert_eq!(version(&database), newer);
}

#[tokio::test]
async fn a_non_loopback_address_requires_a_key() {
    let mut server = Server::new();
    server.spawn_on(&format!("0.0.0.0:{}", server.port));
    let log = expect_failed_start(&mut server).await;
    assert!(log.contains("is not a loopback address and there are no keys"), "{log}");
    assert!(log.contains("toolcrib keys create"), "{log}");
}

#[tokio::test]
async fn the_error_names_a_port_in_use() {
    let first = Server::ready().await;
    let mut second = Server::new();
    second.spawn_on(&format!("127.0.0.1:{}", first.port));
    let log = expect_failed_start(&mut second).await;
    assert!(log.contains(&format!("127.0.0.1:{}", first.port)), "{log}");
    assert!(log.contains("another program listens there"), "{log}");
    first.evaluated("1+1").await;
}

#[tokio::test]
async fn two_servers_cannot_share_a_data_directory() {
    let first = Server::ready().await;
    let mut second = Server::new().with_data_dir(&first.data_dir());
    second.port = free_port();
    second.spawn();
    let log = expect_failed_start(&mut second).await;
    assert!(log.contains("another toolcrib serves"), "{log}");
    first.evaluated("1+1").await;
}
