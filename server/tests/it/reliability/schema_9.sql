-- The database of a server with schema version 9 that was killed with calls in every state, as an
-- SQL dump. The tests of upgrades move the deadlines of the open calls into the future.
PRAGMA foreign_keys = OFF;
BEGIN TRANSACTION;
CREATE TABLE audit (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL,
    project TEXT NOT NULL,
    agent   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason  TEXT NOT NULL
) STRICT;
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
    -- Data that never changes after the first commit: the origin and the execution policy.
    envelope     TEXT NOT NULL,
    -- Data that changes with every commit and is never a filter: attempts, target, fallbacks.
    state        TEXT NOT NULL,
    -- The numbers of the call's events, each followed by a comma. `r` or `s` after a number marks
    -- an implied event, which this row describes completely: requested, first attempt started.
    events       TEXT NOT NULL DEFAULT '',
    -- Columns that may be large come last, so that reading the others does not read them.
    args         TEXT NOT NULL,
    result       TEXT,
    error        TEXT,
    -- The constraints keep a status and its timestamps consistent, whatever a program writes. They
    -- use OR, because for an IN list SQLite builds a table each time a row is written.
    CHECK ((status = 'PENDING' OR status = 'RUNNING') = (completed_ms IS NULL)),
    CHECK ((status = 'PENDING') = (hold IS NOT NULL)),
    CHECK (status <> 'RUNNING' OR started_ms IS NOT NULL),
    CHECK ((status = 'SUCCEEDED') = (result IS NOT NULL)),
    CHECK ((status = 'FAILED' OR status = 'TIMEOUT' OR status = 'CANCELED')
        = (error IS NOT NULL)),
    CHECK (status = 'PENDING' OR status = 'RUNNING' OR result IS NOT NULL OR error IS NOT NULL),
    CHECK (completed_ms IS NULL OR completed_ms >= created_ms)
) STRICT;
INSERT INTO "calls" VALUES(1,'tc_01M7PQ9WWVA81M081PJYZWEBVV','default','run_old','calculation.eval','builtin','SUCCEEDED',NULL,1794985227163,1794992427163,1794985227163,1794985227164,2,'{"agent":"default","idempotency_key":"finished","max_retries":2}','{"attempt":1,"target_attempts":1,"target":{"version":"023ab4344c88e4ef","effect":"read"},"node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA"}','1r,2s,3,','{"expression": "6*7"}','{"result":42,"text":"42"}',NULL);
INSERT INTO "calls" VALUES(2,'tc_01M7PQ9WWXR2N8CGHQCY609032','default','run_old','probe.flaky','client','PENDING','retry',1794985227165,1794992427165,1794985227170,NULL,3,'{"agent":"default","idempotency_key":"flaky","max_retries":2,"backoff":{"initial_ms":3600000,"factor":1.0,"max_ms":3600000,"jitter":0.0}}','{"attempt":1,"target_attempts":1,"target":{"version":"cef0edb8c22b81ae","effect":"read"},"retry_at_ms":1794985200000,"node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA","failed":{"attempt":1,"code":"RUNTIME_ERROR","message":"later"}}','4r,5,6,7,','{}',NULL,NULL);
INSERT INTO "calls" VALUES(3,'tc_01M7PQ9WX4SW5W5E2Q1ZG9VVAJ','default','run_old','probe.once','client','RUNNING',NULL,1794985227172,1794992427172,1794985227174,NULL,2,'{"agent":"default","idempotency_key":"running","max_retries":2}','{"attempt":1,"target_attempts":1,"target":{"version":"e66c5ea052e5b989","effect":"irreversible"},"taken_by":"c1","node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA"}','8r,9,10,','{"n": 1}',NULL,NULL);
INSERT INTO "calls" VALUES(4,'tc_01M7PQ9WX7GPQP5FQ4WNCGWZ9M','default','run_old','probe.one','client','RUNNING',NULL,1794985227175,1794992427175,1794985227176,NULL,2,'{"agent":"default","idempotency_key":"slot","max_retries":2}','{"attempt":1,"target_attempts":1,"target":{"version":"62279360dd5696b1","effect":"idempotent"},"taken_by":"c1","node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA"}','11r,12,13,','{}',NULL,NULL);
INSERT INTO "calls" VALUES(5,'tc_01M7PQ9WX9PE2DG5E644QPN06Q','default','run_old','probe.one','client','PENDING','queue',1794985227177,1794992427177,NULL,NULL,1,'{"agent":"default","idempotency_key":"queued","max_retries":2}','{"attempt":0,"target_attempts":0,"target":{"version":"62279360dd5696b1","effect":"idempotent"}}','14r,','{}',NULL,NULL);
INSERT INTO "calls" VALUES(6,'tc_01M7PQ9WXBAR5FRWDGB6HDV80Q','default','run_old','probe.read','client','PENDING','parked',1794985227179,1794992427179,NULL,NULL,1,'{"agent":"default","idempotency_key":"parked","max_retries":2}','{"attempt":1,"target_attempts":1,"target":{"version":"4ad38a98a2548a10","effect":"read"},"node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA"}','15r,','{"n": 2}',NULL,NULL);
INSERT INTO "calls" VALUES(7,'tc_01M7PQ9WXCXVSMCF9JMKT3KK9M','default','run_old','probe.read','client','CANCELED',NULL,1794985227180,1794992427180,NULL,1794985227181,2,'{"agent":"default","idempotency_key":"canceled","max_retries":2}','{"attempt":1,"target_attempts":1,"target":{"version":"4ad38a98a2548a10","effect":"read"},"node":"node_01M7PQ9WVKJ3JJA91NYZTHH0FA"}','16r,17,','{}',NULL,'{"code":"CANCELED","message":"canceled by default","retryable":false,"not_happened":false}');
CREATE TABLE cards (
    number       INTEGER PRIMARY KEY,
    project      TEXT NOT NULL,
    card_id      TEXT NOT NULL,
    type         TEXT NOT NULL,
    turn_id      TEXT,
    tool_call_id TEXT,
    created_ms   INTEGER NOT NULL,
    body         TEXT NOT NULL
) STRICT;
CREATE TABLE clients (
    project       TEXT NOT NULL,
    client_id     TEXT NOT NULL,
    owner         TEXT NOT NULL,
    registered_ms INTEGER NOT NULL,
    PRIMARY KEY (project, client_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "clients" VALUES('default','c1','default',1794985227157);
CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "counters" VALUES('directory_version',1);
INSERT INTO "counters" VALUES('last_event',0);
CREATE TABLE dead_letters (
    id         TEXT PRIMARY KEY,
    project    TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    body       TEXT NOT NULL
) STRICT, WITHOUT ROWID;
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
CREATE TABLE events (
    number  INTEGER PRIMARY KEY,
    place   INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    at_ms   INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    data    TEXT NOT NULL
) STRICT;
INSERT INTO "events" VALUES(3,1,'tool.call.finished',1794985227164,1,'{"latency_ms":1,"queue_ms":0,"tool":"calculation.eval","result_bytes":25}');
INSERT INTO "events" VALUES(5,2,'tool.call.started',1794985227170,1,'{"tool":"probe.flaky"}');
INSERT INTO "events" VALUES(6,2,'tool.call.taken',1794985227170,1,'{"by":"c1"}');
INSERT INTO "events" VALUES(7,2,'tool.call.retrying',1794985227171,1,'{"code":"RUNTIME_ERROR","message":"later","duration_ms":6,"tool":"probe.flaky","next_attempt_at_ms":1794988827171}');
INSERT INTO "events" VALUES(9,3,'tool.call.started',1794985227174,1,'{"tool":"probe.once"}');
INSERT INTO "events" VALUES(10,3,'tool.call.taken',1794985227174,1,'{"by":"c1"}');
INSERT INTO "events" VALUES(12,4,'tool.call.started',1794985227176,1,'{"tool":"probe.one"}');
INSERT INTO "events" VALUES(13,4,'tool.call.taken',1794985227176,1,'{"by":"c1"}');
INSERT INTO "events" VALUES(17,7,'tool.call.canceled',1794985227181,1,'{"latency_ms":1,"queue_ms":1,"tool":"probe.read","by":"default"}');
CREATE TABLE idempotency_keys (
    project     TEXT NOT NULL,
    agent       TEXT NOT NULL,
    key         TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    place       INTEGER NOT NULL,
    PRIMARY KEY (project, agent, key)
) STRICT, WITHOUT ROWID;
INSERT INTO "idempotency_keys" VALUES('default','default','canceled','66853f130b95b6baaee5122a47524fbe59fba575bf336e51a886d3ee93ce1fca',7);
INSERT INTO "idempotency_keys" VALUES('default','default','finished','87cfe4ee73437256a294f9e4b00cf1a662cbc85ade3bc34c6ed4fb1a4b3b2a04',1);
INSERT INTO "idempotency_keys" VALUES('default','default','flaky','f12cf42e8ff3a6cd8d58425df6c025a2727a85f962de277f1d78389c03388d38',2);
INSERT INTO "idempotency_keys" VALUES('default','default','parked','a6f04955183b0742d01387d5f8740d8bad18966c20e972b4c3d8cea7d6c6a6a5',6);
INSERT INTO "idempotency_keys" VALUES('default','default','queued','1df2a9e32e2e91d1e6d757041f01432421b7586ecb89a5345e51253eb846cdd8',5);
INSERT INTO "idempotency_keys" VALUES('default','default','running','0ed3c00047356ad575537578ff2e89bc2a3800fd18d092207cf458b4dfd5e79b',3);
INSERT INTO "idempotency_keys" VALUES('default','default','slot','1df2a9e32e2e91d1e6d757041f01432421b7586ecb89a5345e51253eb846cdd8',4);
CREATE TABLE inbox (
    number       INTEGER PRIMARY KEY AUTOINCREMENT,
    inbox_id     TEXT NOT NULL,
    project      TEXT NOT NULL,
    agent_id     TEXT NOT NULL,
    turn_id      TEXT NOT NULL,
    tool_call_id TEXT NOT NULL,
    created_ms   INTEGER NOT NULL,
    taken_ms     INTEGER,
    body         TEXT NOT NULL
) STRICT;
CREATE TABLE keys (
    id         TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    project    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('agent', 'provider', 'admin')),
    created_ms INTEGER NOT NULL,
    revoked_ms INTEGER CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms)
) STRICT, WITHOUT ROWID;
CREATE TABLE loop_entries (
    number   INTEGER PRIMARY KEY,
    project  TEXT NOT NULL,
    run_id   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    at_ms    INTEGER NOT NULL,
    data     TEXT NOT NULL,
    messages TEXT NOT NULL
) STRICT;
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
CREATE TABLE offers (
    project   TEXT NOT NULL,
    tool      TEXT NOT NULL,
    client_id TEXT NOT NULL,
    PRIMARY KEY (project, tool, client_id),
    FOREIGN KEY (project, tool) REFERENCES tools (project, name),
    FOREIGN KEY (project, client_id) REFERENCES clients (project, client_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "offers" VALUES('default','probe.flaky','c1');
INSERT INTO "offers" VALUES('default','probe.once','c1');
INSERT INTO "offers" VALUES('default','probe.one','c1');
INSERT INTO "offers" VALUES('default','probe.read','c1');
CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id     TEXT NOT NULL UNIQUE,
    body   TEXT NOT NULL
) STRICT;
CREATE TABLE project_tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    version    TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE projects (
    id         TEXT PRIMARY KEY,
    title      TEXT NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE roster (
    project       TEXT NOT NULL,
    agent_id      TEXT NOT NULL,
    worker_target TEXT NOT NULL,
    profile       TEXT,
    allowed_tools TEXT,
    updated_ms    INTEGER NOT NULL,
    PRIMARY KEY (project, agent_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE rules (
    project TEXT NOT NULL,
    agent   TEXT NOT NULL,
    pattern TEXT NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('allow', 'deny')),
    PRIMARY KEY (project, agent, pattern)
) STRICT, WITHOUT ROWID;
CREATE TABLE runs (
    project          TEXT NOT NULL,
    run_id           TEXT NOT NULL,
    tool_definitions TEXT NOT NULL,
    updated_ms       INTEGER NOT NULL,
    PRIMARY KEY (project, run_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE tasks (
    project TEXT NOT NULL,
    call_id TEXT NOT NULL,
    place   INTEGER NOT NULL,
    PRIMARY KEY (project, call_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE tool_versions (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    version    TEXT NOT NULL,
    definition TEXT NOT NULL, replaced_ms INTEGER,
    PRIMARY KEY (project, name, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;
INSERT INTO "tools" VALUES('default','probe.flaky','{"description":"","executor":"client","input_schema":{"type": "object"},"timeout_ms":30000,"effect":"read","risk":"medium","policy":{"backoff":{"initial_ms":3600000,"factor":1.0,"max_ms":3600000,"jitter":0.0}}}');
INSERT INTO "tools" VALUES('default','probe.once','{"description":"","executor":"client","input_schema":{"type": "object"},"timeout_ms":30000,"effect":"irreversible","risk":"medium","policy":{}}');
INSERT INTO "tools" VALUES('default','probe.one','{"description":"","executor":"client","input_schema":{"type": "object"},"timeout_ms":30000,"effect":"idempotent","risk":"medium","policy":{"max_parallel":1}}');
INSERT INTO "tools" VALUES('default','probe.read','{"description":"","executor":"client","input_schema":{"type": "object"},"timeout_ms":30000,"effect":"read","risk":"medium","policy":{}}');
CREATE TABLE tries (
    place       INTEGER NOT NULL,
    number      INTEGER NOT NULL,
    at_ms       INTEGER NOT NULL,
    duration_ms INTEGER NOT NULL,
    status_code INTEGER,
    error       TEXT,
    PRIMARY KEY (place, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE turn_calls (
    number       INTEGER PRIMARY KEY,
    project      TEXT NOT NULL,
    turn_id      TEXT NOT NULL,
    tool_call_id TEXT NOT NULL,
    step_id      TEXT NOT NULL,
    call_id      TEXT,
    inbox_id     TEXT,
    body         TEXT NOT NULL
) STRICT;
CREATE TABLE turns (
    project        TEXT NOT NULL,
    turn_id        TEXT NOT NULL,
    agent_id       TEXT NOT NULL,
    status         TEXT NOT NULL,
    lease_until_ms INTEGER NOT NULL,
    updated_ms     INTEGER NOT NULL,
    version        INTEGER NOT NULL CHECK (version > 0),
    body           TEXT NOT NULL,
    PRIMARY KEY (project, turn_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE upstream_grants (
    project  TEXT NOT NULL,
    upstream TEXT NOT NULL,
    body     TEXT NOT NULL,
    PRIMARY KEY (project, upstream)
) STRICT, WITHOUT ROWID;
CREATE TABLE upstream_tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    upstream   TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE upstreams (
    project  TEXT NOT NULL,
    name     TEXT NOT NULL,
    kind     TEXT NOT NULL,
    settings TEXT NOT NULL,
    added_ms INTEGER NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX calls_by_id ON calls (project, id);
CREATE INDEX calls_by_run ON calls (project, run_id, id);
CREATE INDEX calls_by_tool ON calls (project, tool_name, id);
CREATE INDEX calls_not_ok ON calls (project, status, id) WHERE error IS NOT NULL;
CREATE INDEX calls_not_ok_by_tool ON calls (project, status, tool_name, id)
    WHERE error IS NOT NULL;
CREATE INDEX idempotency_keys_by_call ON idempotency_keys (place);
CREATE INDEX audit_by_project ON audit (project, number);
CREATE INDEX deliveries_due ON deliveries (due_ms, call_id) WHERE due_ms IS NOT NULL;
CREATE UNIQUE INDEX deliveries_by_call ON deliveries (project, call_id);
CREATE INDEX deliveries_by_status ON deliveries (project, status, call_id);
CREATE INDEX runs_by_time ON runs (updated_ms);
CREATE UNIQUE INDEX cards_by_id ON cards (project, card_id);
CREATE UNIQUE INDEX cards_result_of_call ON cards (project, turn_id, tool_call_id)
    WHERE type = 'tool.result';
CREATE INDEX turns_running ON turns (lease_until_ms) WHERE status = 'running';
CREATE UNIQUE INDEX turn_calls_by_id ON turn_calls (project, turn_id, tool_call_id);
CREATE INDEX turn_calls_by_call ON turn_calls (project, tool_call_id);
CREATE INDEX turn_calls_out ON turn_calls (number) WHERE inbox_id IS NULL;
CREATE UNIQUE INDEX inbox_once ON inbox (project, turn_id, tool_call_id);
CREATE INDEX inbox_waiting ON inbox (project, agent_id, number) WHERE taken_ms IS NULL;
CREATE INDEX dead_letters_by_project ON dead_letters (project, id);
CREATE INDEX loops_open ON loops (project, run_id) WHERE ended_ms IS NULL;
CREATE INDEX loops_ended ON loops (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE UNIQUE INDEX loops_by_key ON loops (project, agent, key) WHERE key IS NOT NULL;
CREATE INDEX loop_entries_by_run ON loop_entries (project, run_id, number);
CREATE INDEX upstream_tools_by_upstream ON upstream_tools (project, upstream);
CREATE INDEX calls_not_ok_by_run ON calls (project, status, run_id, id) WHERE error IS NOT NULL;
DELETE FROM "sqlite_sequence";
COMMIT;
PRAGMA application_id = 1413698114;
PRAGMA user_version = 9;
