//! The store location: the database that `store.url` and `data_dir` resolve to.

use std::fmt;
use std::path::PathBuf;

use toolcrib_store::PostgresStore;

use super::{Config, ConfigError, StoreSettings};

/// The database that stores calls. Does not implement `Debug`, because a URL may hold a password.
pub enum StoreLocation {
    /// A SQLite file.
    Sqlite(PathBuf),
    /// The URL of a PostgreSQL database.
    Postgres(String),
}

impl StoreLocation {
    /// Returns the location for display, without user and password.
    pub fn redacted(&self) -> String {
        match self {
            Self::Sqlite(path) => path.display().to_string(),
            Self::Postgres(url) => redact_url(url),
        }
    }

    /// Returns true if the database may already exist, so that reading it would not create it.
    pub fn may_exist(&self) -> bool {
        match self {
            Self::Sqlite(path) => path.exists(),
            Self::Postgres(_) => true,
        }
    }
}

/// Returns the host and database of a URL, without credentials.
fn redact_url(url: &str) -> String {
    let (_, rest) = url.split_once("://").unwrap_or_default();
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("postgres://{host}")
}

/// Omits user and password.
impl fmt::Debug for StoreSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = self.url.as_deref();
        let url =
            url.map(|url| if PostgresStore::is_url(url) { redact_url(url) } else { url.into() });
        f.debug_struct("StoreSettings").field("url", &url).finish()
    }
}

impl Config {
    /// Returns the location of the store. Default: a SQLite file in the data directory.
    pub fn store_location(&self) -> Result<StoreLocation, ConfigError> {
        let Some(url) = &self.store.url else {
            return Ok(StoreLocation::Sqlite(self.data_dir.join("toolcrib.db")));
        };
        if PostgresStore::is_url(url) {
            return Ok(StoreLocation::Postgres(url.clone()));
        }
        let path = url.strip_prefix("sqlite:").map(|rest| rest.strip_prefix("//").unwrap_or(rest));
        match path {
            Some(path) if !path.is_empty() => Ok(StoreLocation::Sqlite(PathBuf::from(path))),
            // The URL of another database may hold a password, so the message shows only its
            // scheme.
            _ => Err(ConfigError::invalid(
                "store.url",
                format!(
                    "\"{}:…\" cannot be used; write postgres://USER:PASSWORD@HOST/NAME, or \
                     sqlite:PATH, or leave it out for a file in the data directory",
                    url.split(':').next().unwrap_or_default()
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::redact_url;

    #[test]
    fn user_and_password_are_redacted() {
        for url in [
            "postgres://u:p@h:5432/crib",
            "postgresql://u:p%40@h:5432/crib?sslmode=disable",
            "postgres://u:p@ss@h:5432/crib",
        ] {
            assert_eq!(redact_url(url), "postgres://h:5432/crib");
        }
        assert_eq!(redact_url("postgres://h/crib?password=p"), "postgres://h/crib");
    }
}
