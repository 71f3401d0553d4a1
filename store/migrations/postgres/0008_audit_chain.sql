-- The audit log is a hash chain: each row has a hash over the row before it and itself. The rows of
-- the earlier table are moved and chained by the program, in the same transaction.
DROP INDEX toolcrib.audit_by_project;

ALTER TABLE toolcrib.audit RENAME TO audit_unchained;

ALTER TABLE toolcrib.audit_unchained RENAME CONSTRAINT audit_pkey TO audit_unchained_pkey;

CREATE TABLE toolcrib.audit (
    number     BIGINT PRIMARY KEY,
    at_ms      BIGINT NOT NULL,
    project    TEXT COLLATE "C" NOT NULL,
    agent      TEXT NOT NULL,
    action     TEXT NOT NULL,
    subject    TEXT NOT NULL,
    reason     TEXT NOT NULL,
    "user"     TEXT,
    credential TEXT,
    transport  TEXT,
    peer       TEXT,
    request_id TEXT,
    hash       TEXT NOT NULL
);

CREATE INDEX audit_by_project ON toolcrib.audit (project, number);

-- `head` is the last row, `pruned` the last one that retention deleted.
CREATE TABLE toolcrib.audit_chain (
    name    TEXT PRIMARY KEY CHECK (name IN ('head', 'pruned')),
    number  BIGINT NOT NULL,
    hash    TEXT NOT NULL,
    entries BIGINT NOT NULL
);

INSERT INTO toolcrib.audit_chain
SELECT name, 0, repeat('0', 64), 0 FROM (VALUES ('head'), ('pruned')) AS links (name);

CREATE FUNCTION toolcrib.refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- Retention moves the checkpoint before it deletes rows.
    IF TG_OP = 'DELETE' AND old.number <=
        (SELECT number FROM toolcrib.audit_chain WHERE name = 'pruned') THEN
        RETURN old;
    END IF;
    RAISE EXCEPTION 'the audit log is append-only';
END
$$;

CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE ON toolcrib.audit
FOR EACH ROW EXECUTE FUNCTION toolcrib.refuse_audit_change();

CREATE TRIGGER audit_is_never_truncated BEFORE TRUNCATE ON toolcrib.audit
FOR EACH STATEMENT EXECUTE FUNCTION toolcrib.refuse_audit_change();
