-- Limits on the calls of an agent, a user, a tool or a project, and the kill switches that are set.
-- A row of the kind `project` has the name of the project in both columns.
CREATE TABLE usage_limits (
    project      TEXT NOT NULL,
    kind         TEXT NOT NULL CHECK (kind IN ('agent', 'user', 'tool', 'project')),
    name         TEXT NOT NULL,
    per_minute   INTEGER CHECK (per_minute > 0),
    max_open     INTEGER CHECK (max_open > 0),
    max_parallel INTEGER CHECK (max_parallel > 0),
    updated_ms   INTEGER NOT NULL,
    PRIMARY KEY (project, kind, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE kill_switches (
    project TEXT NOT NULL,
    kind    TEXT NOT NULL CHECK (kind IN ('tool', 'agent', 'source', 'project')),
    name    TEXT NOT NULL,
    reason  TEXT NOT NULL,
    set_by  TEXT NOT NULL,
    set_ms  INTEGER NOT NULL,
    PRIMARY KEY (project, kind, name)
) STRICT, WITHOUT ROWID;

-- Changes of the system time while a server ran, each with the position of the last call before it:
-- rate limits count the calls of the last minute after a restart.
CREATE TABLE clock_steps (
    place INTEGER PRIMARY KEY,
    by_ms INTEGER NOT NULL
) STRICT;
