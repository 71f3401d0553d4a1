-- A key has a set of roles, attributes of its bearer and an end. `roles` is a list of names in a
-- fixed order with commas; `attributes` is JSON.
ALTER TABLE toolcrib.keys DROP CONSTRAINT keys_role_check;
ALTER TABLE toolcrib.keys RENAME COLUMN role TO roles;
ALTER TABLE toolcrib.keys ADD CHECK (roles <> '' AND replace(replace(replace(replace(replace(roles || ',', 'agent,', ''),
        'provider,', ''), 'approver,', ''), 'auditor,', ''), 'admin,', '') = '');
ALTER TABLE toolcrib.keys ADD COLUMN attributes TEXT NOT NULL DEFAULT '{}';
ALTER TABLE toolcrib.keys ADD COLUMN expires_ms BIGINT;

-- Tokens that narrow a key for a while. A token ends with its key.
CREATE TABLE toolcrib.session_tokens (
    id         TEXT COLLATE "C" PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    key_id     TEXT NOT NULL,
    project    TEXT NOT NULL,
    attributes TEXT NOT NULL DEFAULT '{}',
    created_ms BIGINT NOT NULL,
    expires_ms BIGINT NOT NULL,
    revoked_ms BIGINT CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms)
);

-- The latest time of day that a process recorded, in Unix milliseconds. Setting the clock back
-- extends no key and no token.
INSERT INTO toolcrib.counters VALUES ('latest_time_ms', 0) ON CONFLICT DO NOTHING;
