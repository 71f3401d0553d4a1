-- Upstreams, and the tools that were accepted from them. An upstream of the configuration has rows
-- in `upstream_tools` and none in `upstreams`.

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
