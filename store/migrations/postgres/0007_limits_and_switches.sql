-- Limits on the calls of an agent, a user, a tool or a project, and the kill switches that are set.
-- A row of the kind `project` has the name of the project in both columns.
CREATE TABLE toolcrib.usage_limits (
    project      TEXT COLLATE "C" NOT NULL,
    kind         TEXT NOT NULL CHECK (kind IN ('agent', 'user', 'tool', 'project')),
    name         TEXT COLLATE "C" NOT NULL,
    per_minute   BIGINT CHECK (per_minute > 0),
    max_open     BIGINT CHECK (max_open > 0),
    max_parallel BIGINT CHECK (max_parallel > 0),
    updated_ms   BIGINT NOT NULL,
    PRIMARY KEY (project, kind, name)
);

CREATE TABLE toolcrib.kill_switches (
    project TEXT COLLATE "C" NOT NULL,
    kind    TEXT NOT NULL CHECK (kind IN ('tool', 'agent', 'source', 'project')),
    name    TEXT COLLATE "C" NOT NULL,
    reason  TEXT NOT NULL,
    set_by  TEXT NOT NULL,
    set_ms  BIGINT NOT NULL,
    PRIMARY KEY (project, kind, name)
);

-- Changes of the system time while a server ran, each with the position of the last call before it:
-- rate limits count the calls of the last minute after a restart.
CREATE TABLE toolcrib.clock_steps (
    place BIGINT PRIMARY KEY,
    by_ms BIGINT NOT NULL
);
