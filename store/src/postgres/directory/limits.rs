//! Usage limits and kill switches in PostgreSQL.

use toolcrib::domain::directory::DirectoryChange;

use crate::postgres::session::{Session, SessionError, SqlParams};

pub(super) const LIMITS: &str = "SELECT project, kind, name, per_minute, max_open, max_parallel, updated_ms \
     FROM usage_limits ORDER BY project, kind, name";
pub(super) const SWITCHES: &str = "SELECT project, kind, name, reason, set_by, set_ms \
     FROM kill_switches ORDER BY project, kind, name";

/// Applies a change of a limit or a switch.
pub(super) async fn apply_change(
    session: &Session,
    change: &DirectoryChange,
) -> Result<(), SessionError> {
    let done = match change {
        DirectoryChange::PutLimit(limit) => {
            let values = &limit.values;
            let params: SqlParams<'_> = &[
                &limit.project,
                &limit.kind.as_str(),
                &limit.name,
                &values.per_minute.map(i64::from),
                &values.max_open.map(i64::from),
                &values.max_parallel.map(i64::from),
                &(limit.updated_ms as i64),
            ];
            let sql = "INSERT INTO usage_limits VALUES ($1, $2, $3, $4, $5, $6, $7) \
                       ON CONFLICT (project, kind, name) DO UPDATE SET \
                       per_minute = excluded.per_minute, max_open = excluded.max_open, \
                       max_parallel = excluded.max_parallel, updated_ms = excluded.updated_ms";
            session.execute(sql, params).await
        }
        DirectoryChange::DropLimit { project, kind, name } => {
            let sql = "DELETE FROM usage_limits WHERE project = $1 AND kind = $2 AND name = $3";
            session.execute(sql, &[project, &kind.as_str(), name]).await
        }
        DirectoryChange::PutSwitch(switch) => {
            let params: SqlParams<'_> = &[
                &switch.project,
                &switch.kind.as_str(),
                &switch.name,
                &switch.reason.replace('\0', ""),
                &switch.set_by,
                &(switch.set_ms as i64),
            ];
            let sql = "INSERT INTO kill_switches VALUES ($1, $2, $3, $4, $5, $6) \
                       ON CONFLICT (project, kind, name) DO UPDATE SET \
                       reason = excluded.reason, set_by = excluded.set_by, \
                       set_ms = excluded.set_ms";
            session.execute(sql, params).await
        }
        DirectoryChange::DropSwitch { project, kind, name } => {
            let sql = "DELETE FROM kill_switches WHERE project = $1 AND kind = $2 AND name = $3";
            session.execute(sql, &[project, &kind.as_str(), name]).await
        }
        _ => Ok(0),
    };
    done.map(drop)
}
