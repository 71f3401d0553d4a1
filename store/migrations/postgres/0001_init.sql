-- The PostgreSQL schema. Toolcrib's own tables are in the schema `toolcrib`. The tables that UTP's
-- tool services know by name are in `public`, `resource` and `state`, with the columns that those
-- services read and write. Additional columns for Toolcrib start with `toolcrib_` and have defaults,
-- so that other programs can insert rows without them.
--
-- Ids are compared byte by byte (collation "C"), whatever the database's own collation is.

CREATE SCHEMA IF NOT EXISTS resource;
CREATE SCHEMA IF NOT EXISTS state;

-- One row: the generation of the writer lease (`owner`, incremented by each server that starts), the
-- number of commits, and the last assigned numbers. After a lost connection the server reads it to
-- determine whether its last transaction was committed.
CREATE TABLE toolcrib.writer (
    one        BOOLEAN PRIMARY KEY DEFAULT true CHECK (one),
    owner      BIGINT NOT NULL,
    commits    BIGINT NOT NULL,
    last_event BIGINT NOT NULL,
    last_place BIGINT NOT NULL
);

INSERT INTO toolcrib.writer (owner, commits, last_event, last_place) VALUES (0, 0, 0, 0);

CREATE TABLE toolcrib.counters (
    name  TEXT PRIMARY KEY,
    value BIGINT NOT NULL
);

INSERT INTO toolcrib.counters VALUES ('directory_version', 0), ('checks', 0);

-- One row per call. `place` is the position of the call in commit order.
CREATE TABLE toolcrib.calls (
    place        BIGINT PRIMARY KEY,
    id           TEXT COLLATE "C" NOT NULL,
    project      TEXT COLLATE "C" NOT NULL,
    run_id       TEXT COLLATE "C" NOT NULL,
    tool_name    TEXT COLLATE "C" NOT NULL,
    executor     TEXT NOT NULL,
    status       TEXT NOT NULL,
    hold         TEXT CHECK (hold IN ('queue', 'retry', 'parked')),
    created_ms   BIGINT NOT NULL,
    deadline_ms  BIGINT NOT NULL,
    started_ms   BIGINT,
    completed_ms BIGINT,
    version      BIGINT NOT NULL CHECK (version > 0),
    background   BOOLEAN NOT NULL,
    -- JSON stored as text, so that it is returned exactly as it was received.
    args         TEXT NOT NULL,
    result       TEXT,
    error        TEXT,
    envelope     TEXT NOT NULL,
    state        TEXT NOT NULL,
    CHECK ((status IN ('PENDING', 'RUNNING')) = (completed_ms IS NULL)),
    CHECK ((status = 'PENDING') = (hold IS NOT NULL)),
    CHECK (status <> 'RUNNING' OR started_ms IS NOT NULL),
    CHECK ((status = 'SUCCEEDED') = (result IS NOT NULL)),
    CHECK ((status IN ('FAILED', 'TIMEOUT', 'CANCELED')) = (error IS NOT NULL)),
    CHECK (status IN ('PENDING', 'RUNNING') OR result IS NOT NULL OR error IS NOT NULL),
    CHECK (completed_ms IS NULL OR completed_ms >= created_ms)
);

CREATE UNIQUE INDEX calls_by_id ON toolcrib.calls (project, id);
CREATE INDEX calls_by_run ON toolcrib.calls (project, run_id, id);
CREATE INDEX calls_by_tool ON toolcrib.calls (project, tool_name, id);
CREATE INDEX calls_open ON toolcrib.calls (place) WHERE completed_ms IS NULL;
CREATE INDEX calls_ended ON toolcrib.calls (completed_ms) WHERE completed_ms IS NOT NULL;
CREATE INDEX calls_not_ok ON toolcrib.calls (project, status, id) WHERE error IS NOT NULL;
CREATE INDEX calls_background ON toolcrib.calls (project, id) WHERE background;

-- The events of all calls, numbered in commit order.
CREATE TABLE toolcrib.events (
    number  BIGINT PRIMARY KEY,
    place   BIGINT NOT NULL,
    project TEXT COLLATE "C" NOT NULL,
    kind    TEXT NOT NULL,
    at_ms   BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    data    TEXT NOT NULL
);

CREATE INDEX events_of_call ON toolcrib.events (place, number);
CREATE INDEX events_of_project ON toolcrib.events (project, number);

CREATE TABLE toolcrib.idempotency_keys (
    project     TEXT COLLATE "C" NOT NULL,
    agent       TEXT COLLATE "C" NOT NULL,
    key         TEXT COLLATE "C" NOT NULL,
    fingerprint TEXT NOT NULL,
    place       BIGINT NOT NULL,
    PRIMARY KEY (project, agent, key)
);

CREATE INDEX idempotency_keys_by_call ON toolcrib.idempotency_keys (place);

CREATE TABLE toolcrib.deliveries (
    place      BIGINT PRIMARY KEY,
    project    TEXT COLLATE "C" NOT NULL,
    call_id    TEXT COLLATE "C" NOT NULL,
    url        TEXT NOT NULL,
    status     TEXT NOT NULL
        CHECK (status IN ('waiting', 'pending', 'delivered', 'gone', 'exhausted')),
    due_ms     BIGINT,
    tries      BIGINT NOT NULL,
    failures   BIGINT NOT NULL,
    last_error TEXT,
    version    BIGINT NOT NULL CHECK (version > 0),
    CHECK ((status = 'pending') = (due_ms IS NOT NULL))
);

CREATE INDEX deliveries_due ON toolcrib.deliveries (due_ms, call_id) WHERE due_ms IS NOT NULL;
CREATE UNIQUE INDEX deliveries_by_call ON toolcrib.deliveries (project, call_id);
CREATE INDEX deliveries_by_status ON toolcrib.deliveries (project, status, call_id);

CREATE TABLE toolcrib.tries (
    place       BIGINT NOT NULL,
    number      BIGINT NOT NULL,
    at_ms       BIGINT NOT NULL,
    duration_ms BIGINT NOT NULL,
    status_code BIGINT,
    error       TEXT,
    PRIMARY KEY (place, number)
);

CREATE TABLE toolcrib.runs (
    project          TEXT COLLATE "C" NOT NULL,
    run_id           TEXT COLLATE "C" NOT NULL,
    tool_definitions TEXT NOT NULL,
    updated_ms       BIGINT NOT NULL,
    PRIMARY KEY (project, run_id)
);

CREATE INDEX runs_by_time ON toolcrib.runs (updated_ms);

CREATE TABLE toolcrib.loops (
    project     TEXT COLLATE "C" NOT NULL,
    run_id      TEXT COLLATE "C" NOT NULL,
    status      TEXT NOT NULL
        CHECK (status IN ('RUNNING', 'WAITING', 'SUCCEEDED', 'FAILED', 'CANCELED')),
    model       TEXT NOT NULL,
    created_ms  BIGINT NOT NULL,
    ended_ms    BIGINT,
    version     BIGINT NOT NULL CHECK (version > 0),
    agent       TEXT COLLATE "C" NOT NULL,
    key         TEXT COLLATE "C",
    fingerprint TEXT,
    body        TEXT NOT NULL,
    PRIMARY KEY (project, run_id),
    CHECK ((status IN ('RUNNING', 'WAITING')) = (ended_ms IS NULL))
);

CREATE INDEX loops_open ON toolcrib.loops (project, run_id) WHERE ended_ms IS NULL;
CREATE INDEX loops_ended ON toolcrib.loops (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE UNIQUE INDEX loops_by_key ON toolcrib.loops (project, agent, key) WHERE key IS NOT NULL;

CREATE TABLE toolcrib.loop_entries (
    number   BIGINT PRIMARY KEY,
    project  TEXT COLLATE "C" NOT NULL,
    run_id   TEXT COLLATE "C" NOT NULL,
    kind     TEXT NOT NULL,
    at_ms    BIGINT NOT NULL,
    data     TEXT NOT NULL,
    messages TEXT NOT NULL
);

CREATE INDEX loop_entries_by_run ON toolcrib.loop_entries (project, run_id, number);

CREATE TABLE toolcrib.tools (
    project    TEXT COLLATE "C" NOT NULL,
    name       TEXT COLLATE "C" NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
);

CREATE TABLE toolcrib.clients (
    project       TEXT COLLATE "C" NOT NULL,
    client_id     TEXT COLLATE "C" NOT NULL,
    owner         TEXT NOT NULL,
    registered_ms BIGINT NOT NULL,
    PRIMARY KEY (project, client_id)
);

CREATE TABLE toolcrib.offers (
    project   TEXT COLLATE "C" NOT NULL,
    tool      TEXT COLLATE "C" NOT NULL,
    client_id TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (project, tool, client_id),
    FOREIGN KEY (project, tool) REFERENCES toolcrib.tools (project, name),
    FOREIGN KEY (project, client_id) REFERENCES toolcrib.clients (project, client_id)
);

CREATE TABLE toolcrib.keys (
    id         TEXT COLLATE "C" PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    project    TEXT NOT NULL,
    agent      TEXT NOT NULL,
    role       TEXT NOT NULL CHECK (role IN ('agent', 'provider', 'admin')),
    created_ms BIGINT NOT NULL,
    revoked_ms BIGINT CHECK (revoked_ms IS NULL OR revoked_ms >= created_ms)
);

CREATE TABLE toolcrib.rules (
    project TEXT COLLATE "C" NOT NULL,
    agent   TEXT COLLATE "C" NOT NULL,
    pattern TEXT COLLATE "C" NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN ('allow', 'deny')),
    PRIMARY KEY (project, agent, pattern)
);

CREATE TABLE toolcrib.audit (
    number  BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at_ms   BIGINT NOT NULL,
    project TEXT COLLATE "C" NOT NULL,
    agent   TEXT NOT NULL,
    action  TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason  TEXT NOT NULL
);

CREATE INDEX audit_by_project ON toolcrib.audit (project, number);

CREATE TABLE toolcrib.upstreams (
    project  TEXT COLLATE "C" NOT NULL,
    name     TEXT COLLATE "C" NOT NULL,
    kind     TEXT NOT NULL,
    settings TEXT NOT NULL,
    added_ms BIGINT NOT NULL,
    PRIMARY KEY (project, name)
);

CREATE TABLE toolcrib.upstream_tools (
    project    TEXT COLLATE "C" NOT NULL,
    name       TEXT COLLATE "C" NOT NULL,
    upstream   TEXT COLLATE "C" NOT NULL,
    definition TEXT NOT NULL,
    PRIMARY KEY (project, name)
);

CREATE INDEX upstream_tools_by_upstream ON toolcrib.upstream_tools (project, upstream);

-- Credentials granted by the issuers of upstreams; deleted with the upstream.
CREATE TABLE toolcrib.upstream_grants (
    project  TEXT COLLATE "C" NOT NULL,
    upstream TEXT COLLATE "C" NOT NULL,
    body     TEXT NOT NULL,
    PRIMARY KEY (project, upstream)
);

CREATE TABLE toolcrib.projects (
    id         TEXT COLLATE "C" PRIMARY KEY,
    title      TEXT NOT NULL,
    created_ms BIGINT NOT NULL
);

-- Every tool definition that a stored call may refer to; `replaced_ms` is NULL for the current one.
CREATE TABLE toolcrib.tool_versions (
    project     TEXT COLLATE "C" NOT NULL,
    name        TEXT COLLATE "C" NOT NULL,
    version     TEXT COLLATE "C" NOT NULL,
    definition  TEXT NOT NULL,
    replaced_ms BIGINT,
    PRIMARY KEY (project, name, version)
);

CREATE TABLE toolcrib.turns (
    project        TEXT COLLATE "C" NOT NULL,
    turn_id        TEXT COLLATE "C" NOT NULL,
    agent_id       TEXT NOT NULL,
    status         TEXT NOT NULL,
    lease_until_ms BIGINT NOT NULL,
    updated_ms     BIGINT NOT NULL,
    version        BIGINT NOT NULL CHECK (version > 0),
    body           TEXT NOT NULL,
    PRIMARY KEY (project, turn_id)
);

CREATE INDEX turns_running ON toolcrib.turns (lease_until_ms) WHERE status = 'running';
CREATE INDEX turns_by_time ON toolcrib.turns (updated_ms);

CREATE TABLE toolcrib.turn_calls (
    number       BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    project      TEXT COLLATE "C" NOT NULL,
    turn_id      TEXT COLLATE "C" NOT NULL,
    tool_call_id TEXT COLLATE "C" NOT NULL,
    step_id      TEXT COLLATE "C" NOT NULL,
    call_id      TEXT,
    inbox_id     TEXT,
    body         TEXT NOT NULL
);

CREATE UNIQUE INDEX turn_calls_by_id ON toolcrib.turn_calls (project, turn_id, tool_call_id);
CREATE INDEX turn_calls_by_call ON toolcrib.turn_calls (project, tool_call_id);
CREATE INDEX turn_calls_out ON toolcrib.turn_calls (number) WHERE inbox_id IS NULL;

CREATE TABLE toolcrib.outbox (
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id     TEXT COLLATE "C" NOT NULL UNIQUE,
    body   TEXT NOT NULL
);

CREATE TABLE toolcrib.dead_letters (
    id         TEXT COLLATE "C" PRIMARY KEY,
    project    TEXT COLLATE "C" NOT NULL,
    created_ms BIGINT NOT NULL,
    body       TEXT NOT NULL
);

CREATE INDEX dead_letters_by_project ON toolcrib.dead_letters (project, id);

-- The tables shared with UTP's tool services.

CREATE TABLE public.cards (
    card_id       TEXT PRIMARY KEY,
    tenant_id     TEXT NOT NULL,
    content       JSONB,
    tool_calls    JSONB,
    tool_call_id  TEXT,
    ttl_seconds   INT,
    expires_at    TIMESTAMPTZ,
    deleted_at    TIMESTAMPTZ,
    -- Includes project_id, type, author_id and created_at.
    metadata      JSONB NOT NULL DEFAULT '{}',
    created_at    TIMESTAMPTZ NOT NULL DEFAULT now(),
    toolcrib_seq  BIGINT GENERATED BY DEFAULT AS IDENTITY,
    -- The card as JSON, when the columns cannot represent it exactly.
    toolcrib_body TEXT
);

CREATE UNIQUE INDEX uniq_cards_tool_result_call ON public.cards (tenant_id, md5(tool_call_id))
    WHERE metadata->>'type' = 'tool.result';
CREATE INDEX toolcrib_cards_results
    ON public.cards (tenant_id, (metadata->>'agent_turn_id'),
                     coalesce(tool_call_id, metadata->>'tool_call_id'))
    WHERE metadata->>'type' = 'tool.result';
CREATE INDEX toolcrib_cards_seq ON public.cards (toolcrib_seq);

CREATE TABLE resource.tools (
    project_id          TEXT NOT NULL,
    tool_name           TEXT NOT NULL,
    description         TEXT,
    parameters          JSONB NOT NULL DEFAULT '{}',
    target_subject      TEXT,
    after_execution     TEXT,
    options             JSONB NOT NULL DEFAULT '{}',
    toolcrib_version    TEXT,
    -- The exact and complete definition.
    toolcrib_definition TEXT,
    PRIMARY KEY (project_id, tool_name)
);

CREATE TABLE resource.project_agents (
    project_id             TEXT NOT NULL,
    agent_id               TEXT NOT NULL,
    worker_target          TEXT NOT NULL,
    metadata               JSONB NOT NULL DEFAULT '{}',
    created_at             TIMESTAMPTZ NOT NULL DEFAULT now(),
    updated_at             TIMESTAMPTZ NOT NULL DEFAULT now(),
    toolcrib_profile       TEXT,
    toolcrib_allowed_tools TEXT,
    PRIMARY KEY (project_id, agent_id)
);

CREATE TABLE state.agent_inbox (
    inbox_id              TEXT PRIMARY KEY,
    project_id            TEXT NOT NULL,
    agent_id              TEXT NOT NULL,
    message_type          TEXT NOT NULL,
    enqueue_mode          TEXT,
    correlation_id        TEXT,
    recursion_depth       INT NOT NULL,
    traceparent           TEXT NOT NULL,
    tracestate            TEXT,
    trace_id              TEXT,
    parent_step_id        TEXT,
    source_agent_id       TEXT,
    source_step_id        TEXT,
    payload               JSONB,
    status                TEXT NOT NULL DEFAULT 'pending',
    processed_at          TIMESTAMPTZ,
    archived_at           TIMESTAMPTZ,
    created_at            TIMESTAMPTZ NOT NULL DEFAULT now(),
    toolcrib_seq          BIGINT GENERATED BY DEFAULT AS IDENTITY,
    -- True if Toolcrib inserted the item. A row of another program is a report that Toolcrib first
    -- has to accept.
    toolcrib_accepted     BOOLEAN NOT NULL DEFAULT false,
    toolcrib_turn_id      TEXT,
    toolcrib_tool_call_id TEXT,
    -- The item as JSON, when the columns cannot represent it exactly.
    toolcrib_body         TEXT
);

CREATE UNIQUE INDEX uniq_agent_inbox_correlation
    ON state.agent_inbox (project_id, message_type, md5(correlation_id));
CREATE UNIQUE INDEX toolcrib_inbox_once
    ON state.agent_inbox (project_id, toolcrib_turn_id, toolcrib_tool_call_id)
    WHERE toolcrib_accepted;
CREATE INDEX toolcrib_inbox_waiting ON state.agent_inbox (project_id, agent_id, toolcrib_seq)
    WHERE toolcrib_accepted AND status = 'pending';
CREATE INDEX toolcrib_inbox_reports ON state.agent_inbox (toolcrib_seq)
    WHERE NOT toolcrib_accepted AND status = 'pending';
CREATE INDEX toolcrib_inbox_seq ON state.agent_inbox (toolcrib_seq);

CREATE TABLE state.execution_edges (
    edge_id              TEXT PRIMARY KEY,
    project_id           TEXT NOT NULL,
    channel_id           TEXT,
    primitive            TEXT NOT NULL,
    edge_phase           TEXT NOT NULL,
    source_agent_id      TEXT,
    source_agent_turn_id TEXT,
    source_step_id       TEXT,
    target_agent_id      TEXT,
    target_agent_turn_id TEXT,
    target_step_id       TEXT,
    correlation_id       TEXT,
    enqueue_mode         TEXT,
    recursion_depth      INT,
    trace_id             TEXT,
    parent_step_id       TEXT,
    metadata             JSONB NOT NULL DEFAULT '{}',
    created_at           TIMESTAMPTZ NOT NULL DEFAULT now()
);

CREATE UNIQUE INDEX uniq_execution_edges_correlation
    ON state.execution_edges (project_id, md5(correlation_id), primitive, edge_phase);
CREATE INDEX toolcrib_edges_by_time ON state.execution_edges (created_at);

-- Notifies the server of a report that another program wrote.
CREATE FUNCTION toolcrib.tell_of_report() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('toolcrib_reports', '');
    RETURN NULL;
END
$$;

CREATE TRIGGER toolcrib_tell_of_report AFTER INSERT ON state.agent_inbox
    FOR EACH ROW WHEN (NOT NEW.toolcrib_accepted)
    EXECUTE FUNCTION toolcrib.tell_of_report();
