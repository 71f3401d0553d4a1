-- Columns that existing tool services of UTP read and write in the shared tables.

ALTER TABLE resource.project_agents
    ADD COLUMN profile_box_id     UUID NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    ADD COLUMN tags               JSONB NOT NULL DEFAULT '[]',
    ADD COLUMN display_name       TEXT,
    ADD COLUMN owner_agent_id     TEXT,
    ADD COLUMN status             TEXT NOT NULL DEFAULT 'active',
    ADD COLUMN last_seen_at       TIMESTAMPTZ,
    -- True if Toolcrib added the row for a command: services refuse a command of an agent without a
    -- row. Toolcrib itself ignores such a row; the roster has only the agents of operators.
    ADD COLUMN toolcrib_automatic BOOLEAN NOT NULL DEFAULT false;

-- Services of v1r4 write the identity of a report into columns and headers, and neither its depth
-- nor its trace.
ALTER TABLE state.agent_inbox
    ALTER COLUMN recursion_depth SET DEFAULT 0,
    ALTER COLUMN traceparent SET DEFAULT '',
    ADD COLUMN channel_id      TEXT,
    ADD COLUMN agent_turn_id   TEXT,
    ADD COLUMN turn_epoch      BIGINT,
    ADD COLUMN context_headers JSONB NOT NULL DEFAULT '{}',
    ADD COLUMN retry_count     INT NOT NULL DEFAULT 0,
    ADD COLUMN next_retry_at   TIMESTAMPTZ,
    ADD COLUMN last_error      TEXT,
    ADD COLUMN defer_reason    TEXT;
