-- The time when a definition was replaced or removed. Later calls cannot refer to it, so the purge
-- deletes it together with the last earlier call. NULL for the current definition.
ALTER TABLE tool_versions ADD COLUMN replaced_ms INTEGER;

UPDATE tool_versions
SET replaced_ms = (SELECT created_ms FROM calls ORDER BY place DESC LIMIT 1)
WHERE NOT EXISTS (
    SELECT 1 FROM project_tools t
    WHERE t.project = tool_versions.project AND t.name = tool_versions.name
        AND t.version = tool_versions.version
);
