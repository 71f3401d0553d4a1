-- When a definition was replaced or taken away: a call that was made later cannot refer to it, so it
-- goes when every call that was made before is gone. None while it is the one that is used.
ALTER TABLE tool_versions ADD COLUMN replaced_ms INTEGER;

UPDATE tool_versions
SET replaced_ms = (SELECT created_ms FROM calls ORDER BY place DESC LIMIT 1)
WHERE NOT EXISTS (
    SELECT 1 FROM project_tools t
    WHERE t.project = tool_versions.project AND t.name = tool_versions.name
        AND t.version = tool_versions.version
);
