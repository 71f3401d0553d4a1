-- What is kept of a run beside its calls: the tools that were set for it.
CREATE TABLE runs (
    project          TEXT NOT NULL,
    run_id           TEXT NOT NULL,
    tool_definitions TEXT NOT NULL,
    updated_ms       INTEGER NOT NULL,
    PRIMARY KEY (project, run_id)
) STRICT, WITHOUT ROWID;

-- For the purge, which looks for the oldest.
CREATE INDEX runs_by_time ON runs (updated_ms);
