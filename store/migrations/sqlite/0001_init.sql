-- Calls, their events, and the directory (tools, clients, keys, rules).

-- One row per call. `place` is the position of the call in commit order; lists are sorted by `id`,
-- which sorts by creation time. Every tree that a call touches adds a page to a flush that callers
-- wait for, so there are few: the one writer holds the open calls in memory and needs no index, and
-- a call stores the numbers of its events.
CREATE TABLE calls (
    place        INTEGER PRIMARY KEY,
    id           TEXT NOT NULL,
    project      TEXT NOT NULL,
    run_id       TEXT NOT NULL,
    tool_name    TEXT NOT NULL,
    executor     TEXT NOT NULL,
    status       TEXT NOT NULL,
    hold         TEXT CHECK (hold = 'queue' OR hold = 'retry' OR hold = 'parked'),
    created_ms   INTEGER NOT NULL,
    deadline_ms  INTEGER NOT NULL,
    started_ms   INTEGER,
    completed_ms INTEGER,
    version      INTEGER NOT NULL CHECK (version > 0),
    -- Data that never changes after the first commit: the origin and the execution policy.
    envelope     TEXT NOT NULL,
    -- Data that changes with every commit and is never a filter: attempts, target, fallbacks.
    state        TEXT NOT NULL,
    -- The numbers of the call's events, each followed by a comma. `r` or `s` after a number marks
    -- an implied event, which this row describes completely: requested, first attempt started.
    events       TEXT NOT NULL DEFAULT '',
    -- Columns that may be large come last, so that reading the others does not read them.
    args         TEXT NOT NULL,
    result       TEXT,
    error        TEXT,
    -- The constraints keep a status and its timestamps consistent, whatever a program writes. They
    -- use OR, because for an IN list SQLite builds a table each time a row is written.
    CHECK ((status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)),
    CHECK ((status = 'PENDING') = (hold IS NOT NULL)),
    CHECK (status <> 'RUNNING' OR started_ms IS NOT NULL),
    CHECK ((status = 'SUCCEEDED') = (result IS NOT NULL)),
    CHECK ((status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')
        = (error IS NOT NULL)),
    CHECK (status = 'PENDING' OR status = 'RUNNING' OR result IS NOT NULL OR error IS NOT NULL),
    CHECK (completed_ms IS NULL OR completed_ms >= created_ms)
) STRICT;

CREATE UNIQUE INDEX calls_by_id ON calls (project, id);
CREATE INDEX calls_by_run ON calls (project, run_id, id);
CREATE INDEX calls_by_tool ON calls (project, tool_name, id);
-- Few calls fail, so these indexes stay small and cost a successful call nothing.
CREATE INDEX calls_not_ok ON calls (project, status, id) WHERE error IS NOT NULL;
CREATE INDEX calls_not_ok_by_tool ON calls (project, status, tool_name, id)
    WHERE error IS NOT NULL;

-- The events of all calls, numbered in commit order, except the implied events, which have no row
-- here.
CREATE TABLE events (
    number  INTEGER PRIMARY KEY,
    place   INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    at_ms   INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    data    TEXT NOT NULL
) STRICT;

-- `last_event`: the last assigned number; numbers are never reused, even after a purge.
-- `first_open`: the low watermark; no call before this place is open.
-- `directory_version`: increases with every change of tools, clients, keys and rules.
CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

INSERT INTO counters VALUES ('directory_version', 0);

CREATE TABLE idempotency_keys (
    project     TEXT NOT NULL,
    agent       TEXT NOT NULL,
    key         TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    place       INTEGER NOT NULL,
    PRIMARY KEY (project, agent, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_by_call ON idempotency_keys (place);

CREATE TABLE tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE clients (
    project       TEXT NOT NULL,
    client_id     TEXT NOT NULL,
    owner         TEXT NOT NULL,
    registered_ms INTEGER NOT NULL,
    PRIMARY KEY (project, client_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE offers (
    project   TEXT NOT NULL,
    tool      TEXT NOT NULL,
    client_id TEXT NOT NULL,
    PRIMARY KEY (project, tool, client_id),
    FOREIGN KEY (project, tool) REFERENCES tools (project, name),
    FOREIGN KEY (project, client_id) REFERENCES clients (project, client_id)
) STRICT, WITHOUT ROWID;

-- Stores only the digests of secrets.
CREATE TABLE keys (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    project    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('agent', 'provider', 'admin')),
    created_ms INTEGER NOT NULL,
    revoked_ms INTEGER CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms)
) STRICT, WITHOUT ROWID;

CREATE TABLE rules (
    project TEXT NOT NULL,
    agent   TEXT NOT NULL,
    pattern TEXT NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('allow', 'deny')),
    PRIMARY KEY (project, agent, pattern)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL,
    project TEXT NOT NULL,
    agent   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason  TEXT NOT NULL
) STRICT;

CREATE INDEX audit_by_project ON audit (project, number);
