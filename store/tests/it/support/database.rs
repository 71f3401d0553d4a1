//! PostgreSQL databases for the tests. `TOOLCRIB_TEST_POSTGRES_URL` is a superuser's URL of a
//! disposable instance; each test creates its own database in it and drops it afterwards.
//!
//! Without the variable these tests fail, unless `TOOLCRIB_TEST_QUICK=1` allows them to be skipped.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio_postgres::{Client, Config, NoTls};
use toolcrib_store::PostgresStore;

use super::Opened;

/// A database used by one test only.
pub struct Database {
    admin: Client,
    name: String,
    pub url: String,
}

impl Database {
    /// Returns `None` when the tests may be skipped.
    pub async fn new() -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let admin_url = match std::env::var("TOOLCRIB_TEST_POSTGRES_URL") {
            Ok(url) => url,
            Err(_) if std::env::var("TOOLCRIB_TEST_QUICK").as_deref() == Ok("1") => return None,
            Err(_) => panic!(
                "TOOLCRIB_TEST_POSTGRES_URL is not set: give a superuser's URL of a throw-away \
                 instance, or TOOLCRIB_TEST_QUICK=1 to leave the PostgreSQL tests out"
            ),
        };
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("store_{}_{next}", std::process::id());
        let admin = connect(&admin_url).await;
        admin.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        let (start, _) = admin_url.rsplit_once('/').unwrap();
        Some(Self { admin, url: format!("{start}/{name}"), name })
    }

    /// Opens a connection of another program.
    pub async fn client(&self) -> Client {
        connect(&self.url).await
    }

    /// Ends every connection of the store, as a restart of PostgreSQL does.
    pub async fn cut(&self) {
        let sql = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'",
            self.name
        );
        self.admin.execute(&sql, &[]).await.unwrap();
    }

    /// Refuses new connections and ends the existing ones, or accepts connections again.
    pub async fn shut(&self, shut: bool) {
        let sql = format!("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}", self.name, !shut);
        self.admin.batch_execute(&sql).await.unwrap();
        if shut {
            self.cut().await;
        }
    }

    pub async fn drop(self) {
        let sql = format!("DROP DATABASE {} WITH (FORCE)", self.name);
        self.admin.batch_execute(&sql).await.unwrap();
    }
}

async fn connect(url: &str) -> Client {
    let config: Config = url.parse().unwrap();
    let (client, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Opens a store in a new database.
pub async fn store() -> Option<Opened> {
    let database = Database::new().await?;
    let store = PostgresStore::open(&database.url).await.unwrap();
    Some(Opened { store: Box::new(store), _directory: None, database: Some(database) })
}
