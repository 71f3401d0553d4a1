//! Starts that must be refused, with a reason that helps.

use std::time::Duration;

use rusqlite::Connection;

use crate::support::process::{Server, free_port};

/// The process must end by itself, without success. Answers with what it said.
async fn refused(server: &mut Server) -> String {
    let status = server.ended(Duration::from_secs(10)).await;
    assert!(!status.success(), "it started");
    server.log()
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_not_touched() {
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
    let said = refused(&mut server).await;
    assert!(said.contains(&format!("schema version {newer}")), "{said}");
    assert!(said.contains("newer toolcrib"), "{said}");
    let keys = server.command(&["keys", "ls"]).output().unwrap();
    assert!(!keys.status.success(), "nor by the command line");
    assert!(String::from_utf8_lossy(&keys.stderr).contains("newer toolcrib"));
    assert_eq!(version(&database), newer);
}

#[tokio::test]
async fn an_open_address_needs_a_key() {
    let mut server = Server::new();
    server.spawn_on(&format!("0.0.0.0:{}", server.port));
    let said = refused(&mut server).await;
    assert!(said.contains("is not a loopback address and there are no keys"), "{said}");
    assert!(said.contains("toolcrib keys create"), "{said}");
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let first = Server::ready().await;
    let mut second = Server::new();
    second.spawn_on(&format!("127.0.0.1:{}", first.port));
    let said = refused(&mut second).await;
    assert!(said.contains(&format!("127.0.0.1:{}", first.port)), "{said}");
    assert!(said.contains("something listens there already"), "{said}");
    first.evaluated("1+1").await;
}

#[tokio::test]
async fn two_servers_do_not_share_a_directory() {
    let first = Server::ready().await;
    let mut second = Server::new().keeping_data_in(&first.data_dir());
    second.port = free_port();
    second.spawn();
    let said = refused(&mut second).await;
    assert!(said.contains("another toolcrib serves"), "{said}");
    first.evaluated("1+1").await;
}
