-- A call can wait for a person's approval.
ALTER TABLE toolcrib.tool_calls
    DROP CONSTRAINT tool_calls_hold_check,
    ADD CONSTRAINT tool_calls_hold_check
        CHECK (hold IN ('queue', 'retry', 'parked', 'input', 'after', 'approval'));

-- One row per approval. `request` is what the person decides about and never changes; `decision` is set
-- when the approval has ended, with or without a person's decision.
CREATE TABLE toolcrib.approvals (
    approval_id   TEXT COLLATE "C" PRIMARY KEY,
    project       TEXT NOT NULL,
    tool_call_id  TEXT COLLATE "C" NOT NULL,
    agent         TEXT NOT NULL,
    tool_name     TEXT NOT NULL,
    status        TEXT NOT NULL CHECK (status IN
        ('pending', 'approved', 'rejected', 'expired', 'superseded', 'canceled')),
    created_ms    BIGINT NOT NULL,
    expires_ms    BIGINT NOT NULL,
    decided_ms    BIGINT,
    request       TEXT NOT NULL,
    decision      TEXT,
    -- The next try of the webhook that announces the approval.
    webhook_ms    BIGINT,
    webhook_tries BIGINT NOT NULL DEFAULT 0,
    CHECK ((status = 'pending') = (decision IS NULL)),
    CHECK ((decision IS NULL) = (decided_ms IS NULL))
);

CREATE INDEX approvals_by_project ON toolcrib.approvals (project, approval_id);
CREATE INDEX approvals_by_call ON toolcrib.approvals (project, tool_call_id);
CREATE INDEX approvals_pending ON toolcrib.approvals (project, approval_id)
    WHERE status = 'pending';
CREATE INDEX approvals_approved ON toolcrib.approvals (project, tool_name, decided_ms)
    WHERE status = 'approved';
CREATE INDEX approvals_webhook ON toolcrib.approvals (webhook_ms) WHERE webhook_ms IS NOT NULL;

-- Approvals for every equal call of one requester, in one run or until a date.
CREATE TABLE toolcrib.standing_approvals (
    standing_id TEXT COLLATE "C" PRIMARY KEY,
    project     TEXT NOT NULL,
    expires_ms  BIGINT NOT NULL,
    body        TEXT NOT NULL
);
