-- The tool definitions set for a run. The calls of a run are in `calls`.
CREATE TABLE runs (
    project          TEXT NOT NULL,
    run_id           TEXT NOT NULL,
    tool_definitions TEXT NOT NULL,
    updated_ms       INTEGER NOT NULL,
    PRIMARY KEY (project, run_id)
) STRICT, WITHOUT ROWID;

-- For the purge, which searches for the oldest rows.
CREATE INDEX runs_by_time ON runs (updated_ms);
