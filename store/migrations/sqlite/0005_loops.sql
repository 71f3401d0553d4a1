-- Runs: conversations with language models. `body` has the current state of a run as JSON; the
-- other columns are for queries.
CREATE TABLE loops (
    project     TEXT NOT NULL,
    run_id      TEXT NOT NULL,
    status      TEXT NOT NULL
        CHECK (status IN ('RUNNING', 'WAITING', 'SUCCEEDED', 'FAILED', 'CANCELED')),
    model       TEXT NOT NULL,
    created_ms  INTEGER NOT NULL,
    ended_ms    INTEGER,
    version     INTEGER NOT NULL CHECK (version > 0),
    -- The idempotency key that the run was created with, if any.
    agent       TEXT NOT NULL,
    key         TEXT,
    fingerprint TEXT,
    body        TEXT NOT NULL,
    PRIMARY KEY (project, run_id),
    CHECK ((status IN ('RUNNING', 'WAITING')) = (ended_ms IS NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX loops_open ON loops (project, run_id) WHERE ended_ms IS NULL;
CREATE INDEX loops_ended ON loops (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE UNIQUE INDEX loops_by_key ON loops (project, agent, key) WHERE key IS NOT NULL;

-- The journals of runs. Entries share their numbers with the events of calls; each has the messages
-- that it added to the conversation.
CREATE TABLE loop_entries (
    number   INTEGER PRIMARY KEY,
    project  TEXT NOT NULL,
    run_id   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    at_ms    INTEGER NOT NULL,
    data     TEXT NOT NULL,
    messages TEXT NOT NULL
) STRICT;

CREATE INDEX loop_entries_by_run ON loop_entries (project, run_id, number);
