-- Servers that tools are brought in from, and the tools that were accepted from them. What is in
-- the configuration has tools here, and no row of its own.

CREATE TABLE upstreams (
    project  TEXT NOT NULL,
    name     TEXT NOT NULL,
    kind     TEXT NOT NULL,
    settings TEXT NOT NULL,
    added_ms INTEGER NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;

CREATE TABLE upstream_tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    upstream   TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;

CREATE INDEX upstream_tools_by_upstream ON upstream_tools (project, upstream);
