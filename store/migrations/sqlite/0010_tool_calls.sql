-- The tables `tools` and `tool_calls` have the columns that other programs expect in them:
--   tool_calls: tool_call_id, run_id, tool_name, source, status, args, result, error, created_at,
--               completed_at
--   tools:      name, source, schema, timeout_ms, metadata, client_id, created_at
-- Times in `…_at` columns are UTC, in the format of CURRENT_TIMESTAMP. Holds are stored under their
-- own names: `input` and `after` were stored as `queue`.

-- One row per call. `place` is the position of the call in commit order; lists go by `tool_call_id`,
-- which sorts by creation time. Few indexes, because each tree that a call touches is one more page
-- in the flush that its caller waits for: the writer knows the open calls, and a call's row lists the
-- numbers of its events. Generated columns are computed when they are read.
CREATE TABLE tool_calls (
    place        INTEGER PRIMARY KEY,
    tool_call_id TEXT NOT NULL,
    project      TEXT NOT NULL,
    run_id       TEXT NOT NULL,
    tool_name    TEXT NOT NULL,
    executor     TEXT NOT NULL,
    -- `client` if the caller or a client executes the call.
    source       TEXT GENERATED ALWAYS AS
        (CASE executor WHEN 'client' THEN 'client' WHEN 'caller' THEN 'client' ELSE 'server' END)
        VIRTUAL,
    status       TEXT NOT NULL,
    hold         TEXT CHECK (hold = 'queue' OR hold = 'retry' OR hold = 'parked' OR hold = 'input'
        OR hold = 'after'),
    created_ms   INTEGER NOT NULL,
    created_at   TEXT GENERATED ALWAYS AS (datetime(created_ms / 1000, 'unixepoch')) VIRTUAL,
    deadline_ms  INTEGER NOT NULL,
    started_ms   INTEGER,
    completed_ms INTEGER,
    completed_at TEXT GENERATED ALWAYS AS (datetime(completed_ms / 1000, 'unixepoch')) VIRTUAL,
    version      INTEGER NOT NULL CHECK (version > 0),
    -- The part that never changes after the insert: the requester and the policy.
    envelope     TEXT NOT NULL,
    -- The part that changes with every commit and is never filtered by: attempts, target, fallbacks.
    state        TEXT NOT NULL,
    -- The numbers of the call's events, each followed by a comma; with a letter when this row already
    -- contains the event.
    events       TEXT NOT NULL DEFAULT '',
    -- Values that may be large come last, so that reading the others does not read them.
    args         TEXT NOT NULL,
    result       TEXT,
    error        TEXT,
    -- A status and its timestamps cannot contradict each other, whatever program writes them. Spelled
    -- with OR, because SQLite builds a table for each IN when it writes a row.
    CHECK ((status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)),
    CHECK ((status = 'PENDING') = (hold IS NOT NULL)),
    CHECK (status <> 'RUNNING' OR started_ms IS NOT NULL),
    CHECK ((status = 'SUCCEEDED') = (result IS NOT NULL)),
    CHECK ((status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')
        = (error IS NOT NULL)),
    CHECK (status = 'PENDING' OR status = 'RUNNING' OR result IS NOT NULL OR error IS NOT NULL),
    CHECK (completed_ms IS NULL OR completed_ms >= created_ms)
) STRICT;

-- A call waits for input while its state has open questions, and for its predecessor while its state
-- has the timeout that starts when that one ends.
INSERT INTO tool_calls (place, tool_call_id, project, run_id, tool_name, executor, status, hold,
    created_ms, deadline_ms, started_ms, completed_ms, version, envelope, state, events, args, result,
    error)
SELECT place, id, project, run_id, tool_name, executor, status,
    CASE
        WHEN hold = 'queue' AND instr(state, '"dialogue":{"open":{') > 0 THEN 'input'
        WHEN hold = 'queue' AND instr(state, '"after_timeout_ms":') > 0 THEN 'after'
        ELSE hold
    END,
    created_ms, deadline_ms, started_ms, completed_ms, version, envelope, state, events, args, result,
    error
FROM calls ORDER BY place;

DROP TABLE calls;

CREATE UNIQUE INDEX tool_calls_by_id ON tool_calls (project, tool_call_id);
CREATE INDEX tool_calls_by_run ON tool_calls (project, run_id, tool_call_id);
CREATE INDEX tool_calls_by_tool ON tool_calls (project, tool_name, tool_call_id);
-- Few calls fail, so these stay small and cost most calls nothing.
CREATE INDEX tool_calls_not_ok ON tool_calls (project, status, tool_call_id)
    WHERE error IS NOT NULL;
CREATE INDEX tool_calls_not_ok_by_tool ON tool_calls (project, status, tool_name, tool_call_id)
    WHERE error IS NOT NULL;
CREATE INDEX tool_calls_not_ok_by_run ON tool_calls (project, status, run_id, tool_call_id)
    WHERE error IS NOT NULL;

-- Tools are stored where they come from: offered by clients, defined in projects, imported from
-- upstreams. The view `tools` shows them all.
ALTER TABLE tools RENAME TO client_tools;
ALTER TABLE client_tools ADD COLUMN created_at TEXT;
ALTER TABLE project_tools ADD COLUMN created_at TEXT;
ALTER TABLE upstream_tools ADD COLUMN created_at TEXT;

UPDATE client_tools SET created_at = (
    SELECT datetime(min(c.registered_ms) / 1000, 'unixepoch')
    FROM offers o JOIN clients c ON c.project = o.project AND c.client_id = o.client_id
    WHERE o.project = client_tools.project AND o.tool = client_tools.name
);
-- The time of these is not known: they have that of the migration.
UPDATE client_tools SET created_at = CURRENT_TIMESTAMP WHERE created_at IS NULL;
UPDATE project_tools SET created_at = CURRENT_TIMESTAMP;
UPDATE upstream_tools SET created_at = CURRENT_TIMESTAMP;

CREATE VIEW tools AS
SELECT project, name,
    CASE definition ->> 'executor'
        WHEN 'client' THEN 'client' WHEN 'caller' THEN 'client' ELSE 'server'
    END AS source,
    definition -> 'input_schema' AS schema,
    definition ->> 'timeout_ms' AS timeout_ms,
    definition -> 'metadata' AS metadata,
    client_id,
    created_at
FROM (
    -- The first client by name, when several offer a tool.
    SELECT t.project, t.name, t.definition, t.created_at,
        (SELECT min(o.client_id) FROM offers o WHERE o.project = t.project AND o.tool = t.name)
            AS client_id
    FROM client_tools t
    UNION ALL
    SELECT project, name, definition, created_at, NULL FROM project_tools
    UNION ALL
    SELECT project, name, definition, created_at, NULL FROM upstream_tools
);
