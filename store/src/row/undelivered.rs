//! Reads undelivered requests from rows.

use toolcrib::ports::store::StoreError;
use toolcrib::ports::store::undelivered::UndeliveredRequest;

use super::RowReader;

/// Reads `id, digest, kind, project, expires_ms`.
pub(crate) fn read_undelivered(row: &impl RowReader) -> Result<UndeliveredRequest, StoreError> {
    let kind = row.text(2)?;
    Ok(UndeliveredRequest {
        id: row.text(0)?,
        digest: row.text(1)?,
        kind: kind.parse().map_err(|()| StoreError::Corrupt(format!("request kind {kind}")))?,
        project: row.text(3)?,
        expires_ms: row.unsigned(4)?,
    })
}
