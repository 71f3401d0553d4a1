-- Tickets, their history, and the directory (tools, clients, keys, rules).

-- One call. `place` is the order of the commits; lists go by `id`, which sorts by when a call was
-- made. Every tree that a call touches is a page in the flush that somebody waits for, so there
-- are few: what is open is known to the one writer and needs no index, and a call knows the
-- numbers of its events.
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
    -- What never changes after the first commit: who asked, and with which policy.
    envelope     TEXT NOT NULL,
    -- What changes with every commit and is never filtered by: attempts, target, alternates.
    state        TEXT NOT NULL,
    -- The numbers of its events, each with a comma behind it; with an `r` or `s` when this row
    -- says all there is to say: when it was requested, when its first attempt started.
    events       TEXT NOT NULL DEFAULT '',
    -- What may be large comes last, so that reading the rest does not read it.
    args         TEXT NOT NULL,
    result       TEXT,
    error        TEXT,
    -- A status and its timestamps cannot contradict each other, whatever a program does. Spelled
    -- with OR: for a list behind IN, SQLite builds a table each time a row is written.
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
-- Few calls go wrong, so these stay small and cost the usual call nothing.
CREATE INDEX calls_not_ok ON calls (project, status, id) WHERE error IS NOT NULL;
CREATE INDEX calls_not_ok_by_tool ON calls (project, status, tool_name, id)
    WHERE error IS NOT NULL;

-- What happened, numbered over everything in the order of the commits; but for what the rows of
-- the calls say already.
CREATE TABLE events (
    number  INTEGER PRIMARY KEY,
    place   INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    at_ms   INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    data    TEXT NOT NULL
) STRICT;

-- `last_event`: numbers never come again, also after the newest events were purged.
-- `first_open`: no call before this place is open.
-- `directory_version`: rises with every change of tools, clients, keys and rules.
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

-- Secrets are not here: only their digests.
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
