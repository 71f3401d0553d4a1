//! Reads a row of either database by column position: numbers are 64-bit integers, everything else
//! is text.

use rusqlite::types::FromSql;
use toolcrib::domain::id::CallId;
use toolcrib::ports::store::StoreError;

/// A row of a query. The columns have the same order in both databases.
pub(crate) trait RowReader {
    fn text(&self, n: usize) -> Result<String, StoreError>;
    fn optional_text(&self, n: usize) -> Result<Option<String>, StoreError>;
    fn integer(&self, n: usize) -> Result<i64, StoreError>;
    fn optional_integer(&self, n: usize) -> Result<Option<i64>, StoreError>;

    /// Returns a timestamp, a version or an event number.
    fn unsigned(&self, n: usize) -> Result<u64, StoreError> {
        self.integer(n).map(|number| number as u64)
    }

    fn optional_unsigned(&self, n: usize) -> Result<Option<u64>, StoreError> {
        Ok(self.optional_integer(n)?.map(|number| number as u64))
    }

    /// Returns a value that fits into 32 bits, such as a counter.
    fn count(&self, n: usize) -> Result<u32, StoreError> {
        let number = self.integer(n)?;
        u32::try_from(number).map_err(|_| StoreError::Corrupt(format!("a count of {number}")))
    }

    fn call_id(&self, n: usize) -> Result<CallId, StoreError> {
        let id = self.text(n)?;
        id.parse().map_err(|_| StoreError::Corrupt(format!("call id {id}")))
    }
}

fn get_sqlite<T: FromSql>(row: &rusqlite::Row<'_>, n: usize) -> Result<T, StoreError> {
    row.get(n).map_err(|error| StoreError::Corrupt(error.to_string()))
}

impl RowReader for rusqlite::Row<'_> {
    fn text(&self, n: usize) -> Result<String, StoreError> {
        get_sqlite(self, n)
    }

    fn optional_text(&self, n: usize) -> Result<Option<String>, StoreError> {
        get_sqlite(self, n)
    }

    fn integer(&self, n: usize) -> Result<i64, StoreError> {
        get_sqlite(self, n)
    }

    fn optional_integer(&self, n: usize) -> Result<Option<i64>, StoreError> {
        get_sqlite(self, n)
    }
}

fn get_postgres<'a, T: tokio_postgres::types::FromSql<'a>>(
    row: &'a tokio_postgres::Row,
    n: usize,
) -> Result<T, StoreError> {
    row.try_get(n).map_err(|error| StoreError::Corrupt(error.to_string()))
}

impl RowReader for tokio_postgres::Row {
    fn text(&self, n: usize) -> Result<String, StoreError> {
        get_postgres(self, n)
    }

    fn optional_text(&self, n: usize) -> Result<Option<String>, StoreError> {
        get_postgres(self, n)
    }

    fn integer(&self, n: usize) -> Result<i64, StoreError> {
        get_postgres(self, n)
    }

    fn optional_integer(&self, n: usize) -> Result<Option<i64>, StoreError> {
        get_postgres(self, n)
    }
}
