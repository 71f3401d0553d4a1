-- Tools over NATS: projects and their tools, the roster of agents, cards, turns, inboxes, the
-- outbox and dead letters. The keys are columns; the rest is JSON in `body`.

CREATE TABLE projects (
    id         TEXT PRIMARY KEY,
    title      TEXT NOT NULL,
    created_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The protocol's resource.tools. Separate from `tools`, whose rows are deleted with their offers.
CREATE TABLE project_tools (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    version    TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
) STRICT, WITHOUT ROWID;

-- Every tool definition that a stored call may refer to.
CREATE TABLE tool_versions (
    project    TEXT NOT NULL,
    name       TEXT NOT NULL,
    version    TEXT NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name, version)
) STRICT, WITHOUT ROWID;

-- The protocol's resource.project_agents.
CREATE TABLE roster (
    project       TEXT NOT NULL,
    agent_id      TEXT NOT NULL,
    worker_target TEXT NOT NULL,
    profile       TEXT,
    allowed_tools TEXT,
    updated_ms    INTEGER NOT NULL,
    PRIMARY KEY (project, agent_id)
) STRICT, WITHOUT ROWID;

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

CREATE UNIQUE INDEX cards_by_id ON cards (project, card_id);
-- At most one result per call of a turn.
CREATE UNIQUE INDEX cards_result_of_call ON cards (project, turn_id, tool_call_id)
    WHERE type = 'tool.result';

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

CREATE INDEX turns_running ON turns (lease_until_ms) WHERE status = 'running';

-- The calls of a turn's steps. `inbox_id` is set once the outcome is in the agent's inbox.
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

CREATE UNIQUE INDEX turn_calls_by_id ON turn_calls (project, turn_id, tool_call_id);
CREATE INDEX turn_calls_by_call ON turn_calls (project, tool_call_id);
CREATE INDEX turn_calls_out ON turn_calls (number) WHERE inbox_id IS NULL;

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

-- At most one item per call of a turn, however often its result is reported.
CREATE UNIQUE INDEX inbox_once ON inbox (project, turn_id, tool_call_id);
CREATE INDEX inbox_waiting ON inbox (project, agent_id, number) WHERE taken_ms IS NULL;

CREATE TABLE outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id     TEXT NOT NULL UNIQUE,
    body   TEXT NOT NULL
) STRICT;

CREATE TABLE dead_letters (
    id         TEXT PRIMARY KEY,
    project    TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    body       TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX dead_letters_by_project ON dead_letters (project, id);
