//! A PostgreSQL database for each test, in the temporary instance that
//! `TOOLCRIB_TEST_POSTGRES_URL` names. With `--quick` there is none, and such tests are skipped.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::{Client, NoTls};

/// The database of one test.
pub struct Database {
    admin: Client,
    name: String,
    pub url: String,
}

impl Database {
    /// Creates a database. Returns `None` if only quick tests run.
    pub async fn new() -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if std::env::var_os("TOOLCRIB_TEST_QUICK").is_some() {
            return None;
        }
        let base_url = std::env::var("TOOLCRIB_TEST_POSTGRES_URL")
            .expect("TOOLCRIB_TEST_POSTGRES_URL is not set: ./scripts/test sets it");
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("server_{}_{next}", std::process::id());
        let admin = connect(&base_url).await;
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        let (start, _) = base_url.rsplit_once('/').unwrap();
        Some(Self { admin, url: format!("{start}/{name}"), name })
    }

    /// Opens a connection of another program.
    pub async fn client(&self) -> Client {
        connect(&self.url).await
    }

    /// Opens a connection of a role with these privileges only.
    pub async fn client_with_grants(&self, grants: &str) -> Client {
        let name = &self.name;
        let script = format!(
            "CREATE ROLE {name} LOGIN PASSWORD 'service'; {}",
            grants.replace("tool_service", name)
        );
        self.client().await.batch_execute(&script).await.unwrap();
        let (_, location) = self.url.rsplit_once('@').unwrap();
        connect(&format!("postgres://{name}:service@{location}")).await
    }

    /// Rejects and terminates all connections, or accepts connections again.
    pub async fn set_outage(&self, outage: bool) {
        let name = &self.name;
        let sql = format!("ALTER DATABASE {name} WITH ALLOW_CONNECTIONS {}", !outage);
        self.admin.batch_execute(&sql).await.unwrap();
        if outage {
            let sql = format!(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            );
            self.admin.execute(&sql, &[]).await.unwrap();
        }
    }

    pub async fn drop(self) {
        for sql in ["DROP DATABASE NAME WITH (FORCE)", "DROP ROLE IF EXISTS NAME"] {
            self.admin.batch_execute(&sql.replace("NAME", &self.name)).await.unwrap();
        }
    }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}
