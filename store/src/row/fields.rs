//! Reads a row of either database by column position: numbers are 64-bit integers, everything else
//! is text.

use rusqlite::types::FromSql;
use toolcrib::id::CallId;
use toolcrib::store::StoreError;

/// A row of a query. The columns have the same order in both databases.
pub(crate) trait Fields {
    fn text(&self, n: usize) -> Result<String, StoreError>;
    fn maybe_text(&self, n: usize) -> Result<Option<String>, StoreError>;
    fn number(&self, n: usize) -> Result<i64, StoreError>;
    fn maybe_number(&self, n: usize) -> Result<Option<i64>, StoreError>;

    /// Returns a timestamp, a version or an event number.
    fn whole(&self, n: usize) -> Result<u64, StoreError> {
        self.number(n).map(|number| number as u64)
    }

    fn maybe_whole(&self, n: usize) -> Result<Option<u64>, StoreError> {
        Ok(self.maybe_number(n)?.map(|number| number as u64))
    }

    /// Returns a value that fits into 32 bits, such as a counter.
    fn count(&self, n: usize) -> Result<u32, StoreError> {
        let number = self.number(n)?;
        u32::try_from(number).map_err(|_| StoreError::Corrupt(format!("a count of {number}")))
    }

    fn call_id(&self, n: usize) -> Result<CallId, StoreError> {
        let id = self.text(n)?;
        id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))
    }
}

fn of_sqlite<T: FromSql>(row: &rusqlite::Row<'_>, n: usize) -> Result<T, StoreError> {
    row.get(n).map_err(|error| StoreError::Corrupt(error.to_string()))
}

impl Fields for rusqlite::Row<'_> {
    fn text(&self, n: usize) -> Result<String, StoreError> {
        of_sqlite(self, n)
    }

    fn maybe_text(&self, n: usize) -> Result<Option<String>, StoreError> {
        of_sqlite(self, n)
    }

    fn number(&self, n: usize) -> Result<i64, StoreError> {
        of_sqlite(self, n)
    }

    fn maybe_number(&self, n: usize) -> Result<Option<i64>, StoreError> {
        of_sqlite(self, n)
    }
}

fn of_postgres<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a tokio_postgres::Row,
    n: usize,
) -> Result<T, StoreError> {
    row.try_get(n).map_err(|error| StoreError::Corrupt(error.to_string()))
}

impl Fields for tokio_postgres::Row {
    fn text(&self, n: usize) -> Result<String, StoreError> {
        of_postgres(self, n)
    }

    fn maybe_text(&self, n: usize) -> Result<Option<String>, StoreError> {
        of_postgres(self, n)
    }

    fn number(&self, n: usize) -> Result<i64, StoreError> {
        of_postgres(self, n)
    }

    fn maybe_number(&self, n: usize) -> Result<Option<i64>, StoreError> {
        of_postgres(self, n)
    }
}
