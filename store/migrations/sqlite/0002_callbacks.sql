-- Background tasks, and webhooks that report ended calls. Other calls have no rows in these tables
-- and no extra cost.

-- The calls that are background tasks, so that they can be listed without a scan of all calls.
CREATE TABLE tasks (
    project TEXT NOT NULL,
    call_id TEXT NOT NULL,
    place   INTEGER NOT NULL,
    PRIMARY KEY (project, call_id)
) STRICT, WITHOUT ROWID;

INSERT INTO tasks
    SELECT project, id, place FROM calls WHERE json_extract(envelope, '$.background') = 1;

-- One delivery for each call with a callback URL. `place` is the place of the call.
CREATE TABLE deliveries (
    place      INTEGER PRIMARY KEY,
    project    TEXT NOT NULL,
    call_id    TEXT NOT NULL,
    url        TEXT NOT NULL,
    status     TEXT NOT NULL
        CHECK (status IN ('waiting', 'pending', 'delivered', 'gone', 'exhausted')),
    -- Time of the next attempt.
    due_ms     INTEGER,
    tries      INTEGER NOT NULL,
    -- Failures since the delivery became due or was repeated: the position in the retry schedule.
    failures   INTEGER NOT NULL,
    last_error TEXT,
    version    INTEGER NOT NULL CHECK (version > 0),
    CHECK ((status = 'pending') = (due_ms IS NOT NULL))
) STRICT;

CREATE INDEX deliveries_due ON deliveries (due_ms, call_id) WHERE due_ms IS NOT NULL;
CREATE UNIQUE INDEX deliveries_by_call ON deliveries (project, call_id);
CREATE INDEX deliveries_by_status ON deliveries (project, status, call_id);

-- The last attempts of each delivery, numbered from 1.
CREATE TABLE tries (
    place       INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    at_ms       INTEGER NOT NULL,
    duration_ms INTEGER NOT NULL,
    status_code INTEGER,
    error       TEXT,
    PRIMARY KEY (place, number)
) STRICT, WITHOUT ROWID;
