-- The audit log is a hash chain: each row has a hash over the row before it and itself. The rows of
-- the earlier table are moved and chained by the program, in the same transaction.
DROP INDEX audit_by_project;

ALTER TABLE audit RENAME TO audit_unchained;

CREATE TABLE audit (
    number     INTEGER PRIMARY KEY,
    at_ms      INTEGER NOT NULL,
    project    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    action     TEXT NOT NULL,
    subject    TEXT NOT NULL,
    reason     TEXT NOT NULL,
    user       TEXT,
    credential TEXT,
    transport  TEXT,
    peer       TEXT,
    request_id TEXT,
    hash       TEXT NOT NULL
) STRICT;

CREATE INDEX audit_by_project ON audit (project, number);

-- `head` is the last row, `pruned` the last one that retention deleted.
CREATE TABLE audit_chain (
    name    TEXT PRIMARY KEY CHECK (name IN ('head', 'pruned')),
    number  INTEGER NOT NULL,
    hash    TEXT NOT NULL,
    entries INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO audit_chain
SELECT name, 0, '0000000000000000000000000000000000000000000000000000000000000000', 0
FROM (SELECT 'head' AS name UNION ALL SELECT 'pruned');

CREATE TRIGGER audit_is_never_changed BEFORE UPDATE ON audit
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;

-- Retention moves the checkpoint before it deletes rows.
CREATE TRIGGER audit_is_deleted_by_retention_only BEFORE DELETE ON audit
WHEN old.number > (SELECT number FROM audit_chain WHERE name = 'pruned')
BEGIN
    SELECT RAISE(ABORT, 'the audit log is append-only');
END;
