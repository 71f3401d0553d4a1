-- The tables `tools` and `tool_calls` have the columns that other programs expect in them:
--   tool_calls: tool_call_id, run_id, tool_name, source, status, args, result, error, created_at,
--               completed_at
--   tools:      name, source, schema, timeout_ms, metadata, client_id, created_at
-- Holds are stored under their own names: `input` and `after` were stored as `queue`.

ALTER TABLE toolcrib.calls RENAME TO tool_calls;
ALTER TABLE toolcrib.tool_calls RENAME COLUMN id TO tool_call_id;
ALTER INDEX toolcrib.calls_pkey RENAME TO tool_calls_pkey;
ALTER INDEX toolcrib.calls_by_id RENAME TO tool_calls_by_id;
ALTER INDEX toolcrib.calls_by_run RENAME TO tool_calls_by_run;
ALTER INDEX toolcrib.calls_by_tool RENAME TO tool_calls_by_tool;
ALTER INDEX toolcrib.calls_open RENAME TO tool_calls_open;
ALTER INDEX toolcrib.calls_ended RENAME TO tool_calls_ended;
ALTER INDEX toolcrib.calls_not_ok RENAME TO tool_calls_not_ok;
ALTER INDEX toolcrib.calls_background RENAME TO tool_calls_background;

ALTER TABLE toolcrib.tool_calls
    DROP CONSTRAINT calls_hold_check,
    ADD CONSTRAINT tool_calls_hold_check
        CHECK (hold IN ('queue', 'retry', 'parked', 'input', 'after')),
    -- `client` if the caller or a client executes the call.
    ADD COLUMN source TEXT GENERATED ALWAYS AS
        (CASE WHEN executor IN ('client', 'caller') THEN 'client' ELSE 'server' END) STORED,
    ADD COLUMN created_at TIMESTAMPTZ GENERATED ALWAYS AS
        (to_timestamp(created_ms::double precision / 1000)) STORED,
    ADD COLUMN completed_at TIMESTAMPTZ GENERATED ALWAYS AS
        (to_timestamp(completed_ms::double precision / 1000)) STORED;

-- The expressions fill the columns of the existing rows. For new rows the writer sets them: PostgreSQL
-- would prepare the expressions again for every insert and update, at about 10 µs each.
ALTER TABLE toolcrib.tool_calls
    ALTER COLUMN source DROP EXPRESSION,
    ALTER COLUMN source SET NOT NULL,
    ALTER COLUMN created_at DROP EXPRESSION,
    ALTER COLUMN created_at SET NOT NULL,
    ALTER COLUMN completed_at DROP EXPRESSION;

-- A call waits for input while its state has open questions, and for its predecessor while its state
-- has the timeout that starts when that one ends. `state` is searched as text, because JSON that
-- PostgreSQL cannot represent (a NUL character in an argument) must not stop the migration.
UPDATE toolcrib.tool_calls SET hold = CASE
        WHEN strpos(state, '"dialogue":{"open":{') > 0 THEN 'input'
        ELSE 'after'
    END
WHERE hold = 'queue'
    AND (strpos(state, '"dialogue":{"open":{') > 0 OR strpos(state, '"after_timeout_ms":') > 0);

-- Tools are stored where they come from: offered by clients, defined in projects, imported from
-- upstreams. The view `tools` shows them all.
ALTER TABLE toolcrib.tools RENAME TO client_tools;
ALTER INDEX toolcrib.tools_pkey RENAME TO client_tools_pkey;
ALTER TABLE toolcrib.client_tools ADD COLUMN created_at TIMESTAMPTZ NOT NULL DEFAULT now();
ALTER TABLE toolcrib.upstream_tools ADD COLUMN created_at TIMESTAMPTZ NOT NULL DEFAULT now();
ALTER TABLE resource.tools ADD COLUMN toolcrib_created_at TIMESTAMPTZ NOT NULL DEFAULT now();

-- The time of the other tools is not known: they have that of the migration.
UPDATE toolcrib.client_tools t SET created_at = to_timestamp(first.registered_ms / 1000.0)
FROM (
    SELECT o.project, o.tool, min(c.registered_ms) AS registered_ms
    FROM toolcrib.offers o JOIN toolcrib.clients c USING (project, client_id)
    GROUP BY o.project, o.tool
) AS first
WHERE first.project = t.project AND first.tool = t.name;

-- Returns a member of a stored definition as text. A definition is stored as text, exactly as it was
-- received: one that PostgreSQL cannot read as JSON has no members.
CREATE FUNCTION toolcrib.definition_member(definition TEXT, member TEXT) RETURNS TEXT
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN replace(definition, '\u0000', '\ufffd')::json ->> member;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END
$$;

CREATE VIEW toolcrib.tools AS
SELECT project, name,
    CASE WHEN toolcrib.definition_member(definition, 'executor') IN ('client', 'caller')
        THEN 'client' ELSE 'server'
    END AS source,
    coalesce(toolcrib.definition_member(definition, 'input_schema'), '{}') AS schema,
    coalesce(toolcrib.definition_member(definition, 'timeout_ms')::bigint, 0) AS timeout_ms,
    toolcrib.definition_member(definition, 'metadata') AS metadata,
    client_id,
    created_at
FROM (
    -- The first client by name, when several offer a tool.
    SELECT t.project, t.name, t.definition, t.created_at,
        (SELECT min(o.client_id) FROM toolcrib.offers o
            WHERE o.project = t.project AND o.tool = t.name) AS client_id
    FROM toolcrib.client_tools t
    UNION ALL
    SELECT project, name, definition, created_at, NULL FROM toolcrib.upstream_tools
    UNION ALL
    SELECT project_id, tool_name, toolcrib_definition, toolcrib_created_at, NULL
    FROM resource.tools WHERE toolcrib_definition IS NOT NULL
) AS stored;
