//! Reads deliveries and their attempts from rows.

use toolcrib::domain::delivery::{Delivery, DeliveryAttempt};
use toolcrib::ports::store::StoreError;

use super::RowReader;

/// The columns that [`read_delivery`] reads, in this order.
pub(crate) const DELIVERY_COLUMNS: &str =
    "project, call_id, url, status, due_ms, tries, failures, last_error, version";

pub(crate) fn read_delivery(row: &impl RowReader) -> Result<Delivery, StoreError> {
    let status = row.text(3)?;
    Ok(Delivery {
        project: row.text(0)?,
        call_id: row.call_id(1)?,
        url: row.text(2)?,
        status: status.parse().map_err(|()| StoreError::Corrupt(format!("status {status}")))?,
        due_ms: row.optional_unsigned(4)?,
        attempts: row.count(5)?,
        failures: row.count(6)?,
        last_error: row.optional_text(7)?,
        version: row.unsigned(8)?,
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
