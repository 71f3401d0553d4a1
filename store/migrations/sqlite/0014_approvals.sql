-- A call can wait for a person's approval. The change of the CHECK does not touch any row, so the text
-- of the table is changed instead of the table.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema
SET sql = replace(sql, 'OR hold = ''after'')', 'OR hold = ''after'' OR hold = ''approval'')')
WHERE type = 'table' AND name = 'tool_calls';

-- One row per approval. `request` is what the person decides about and never changes; `decision` is set
-- when the approval has ended, with or without a person's decision.
CREATE TABLE approvals (
    approval_id   TEXT PRIMARY KEY,
    project       TEXT NOT NULL,
    tool_call_id  TEXT NOT NULL,
    agent         TEXT NOT NULL,
    tool_name     TEXT NOT NULL,
    status        TEXT NOT NULL CHECK (status IN
        ('pending', 'approved', 'rejected', 'expired', 'superseded', 'canceled')),
    created_ms    INTEGER NOT NULL,
    expires_ms    INTEGER NOT NULL,
    decided_ms    INTEGER,
    request       TEXT NOT NULL,
    decision      TEXT,
    -- The next try of the webhook that announces the approval.
    webhook_ms    INTEGER,
    webhook_tries INTEGER NOT NULL DEFAULT 0,
    CHECK ((status = 'pending') = (decision IS NULL)),
    CHECK ((decision IS NULL) = (decided_ms IS NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX approvals_by_project ON approvals (project, approval_id);
CREATE INDEX approvals_by_call ON approvals (project, tool_call_id);
CREATE INDEX approvals_pending ON approvals (project, approval_id) WHERE status = 'pending';
CREATE INDEX approvals_approved ON approvals (project, tool_name, decided_ms)
    WHERE status = 'approved';
CREATE INDEX approvals_webhook ON approvals (webhook_ms) WHERE webhook_ms IS NOT NULL;

-- Approvals for every equal call of one requester, in one run or until a date.
CREATE TABLE standing_approvals (
    standing_id TEXT PRIMARY KEY,
    project     TEXT NOT NULL,
    expires_ms  INTEGER NOT NULL,
    body        TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The connection reads the changed text of the table.
PRAGMA writable_schema = RESET;
