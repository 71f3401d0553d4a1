-- A key has a set of roles, attributes of its bearer and an end. `roles` is a list of names in a
-- fixed order with commas; `attributes` is JSON.
CREATE TABLE keys_with_roles (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    project    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    roles      TEXT NOT NULL CHECK (roles <> '' AND replace(replace(replace(replace(replace(roles || ',', 'agent,', ''),
        'provider,', ''), 'approver,', ''), 'auditor,', ''), 'admin,', '') = ''),
    attributes TEXT NOT NULL DEFAULT '{}',
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    revoked_ms INTEGER CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms),
    rejoin     INTEGER NOT NULL DEFAULT 1
) STRICT, WITHOUT ROWID;

INSERT INTO keys_with_roles (id, digest, project, agent, roles, created_ms, revoked_ms, rejoin)
SELECT id, digest, project, agent, role, created_ms, revoked_ms, rejoin FROM keys;

DROP TABLE keys;
ALTER TABLE keys_with_roles RENAME TO keys;

-- Tokens that narrow a key for a while. A token ends with its key.
CREATE TABLE session_tokens (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    key_id     TEXT NOT NULL,
    project    TEXT NOT NULL,
    attributes TEXT NOT NULL DEFAULT '{}',
    created_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL,
    revoked_ms INTEGER CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms)
) STRICT, WITHOUT ROWID;

-- The latest time of day that a process recorded, in Unix milliseconds. Setting the clock back
-- extends no key and no token.
INSERT OR IGNORE INTO counters VALUES ('latest_time_ms', 0);
