//! Reads deliveries and their attempts from rows.

use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::ports::store::StoreError;

use super::{RowReader, columns};

columns! {
    /// The columns of `deliveries` that [`read_delivery`] reads.
    DELIVERY_COLUMNS, DeliveryColumn {
        Project = "project",
        CallId = "call_id",
        Url = "url",
        Status = "status",
        DueMs = "due_ms",
        Attempts = "tries",
        Failures = "failures",
        LastError = "last_error",
        Version = "version",
    }
}

pub(crate) fn read_delivery(row: &impl RowReader) -> Result<Delivery, StoreError> {
    let status = row.text(DeliveryColumn::Status as usize)?;
    Ok(Delivery {
        project: row.text(DeliveryColumn::Project as usize)?,
        call_id: row.call_id(DeliveryColumn::CallId as usize)?,
        url: row.text(DeliveryColumn::Url as usize)?,
        status: status.parse().map_err(|()| StoreError::Corrupt(format!("status {status}")))?,
        due_ms: row.optional_unsigned(DeliveryColumn::DueMs as usize)?,
        attempts: row.count(DeliveryColumn::Attempts as usize)?,
        failures: row.count(DeliveryColumn::Failures as usize)?,
        last_error: row.optional_text(DeliveryColumn::LastError as usize)?,
        version: row.unsigned(DeliveryColumn::Version as usize)?,
    })
}

/// Reads `number, at_ms, duration_ms, status_code, error`.
pub(crate) fn read_try(row: &impl RowReader) -> Result<DeliveryAttempt, StoreError> {
    let code = row.optional_integer(3)?;
    let narrow = |code: i64| {
        u16::try_from(code).map_err(|_| StoreError::Corrupt(format!("a status code of {code}")))
    };
    Ok(DeliveryAttempt {
        number: row.count(0)?,
        at_ms: row.unsigned(1)?,
        duration_ms: row.unsigned(2)?,
        status_code: code.map(narrow).transpose()?,
        error: row.optional_text(4)?,
    })
}
