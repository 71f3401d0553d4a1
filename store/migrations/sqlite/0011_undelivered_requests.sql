-- Requests whose answer has not been delivered: a repeated request joins the call or run that the
-- first one made. A row is written with the call or run, and removed after the delivery.
CREATE TABLE undelivered_requests (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL,
    kind       TEXT NOT NULL CHECK (kind IN ('call', 'run')),
    project    TEXT NOT NULL,
    expires_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- 0 if requests with this key never join an earlier call.
ALTER TABLE keys ADD COLUMN rejoin INTEGER NOT NULL DEFAULT 1;
