-- Finds the calls of a run that did not succeed. A run may contain every call in the database, and
-- few of them fail.
CREATE INDEX calls_not_ok_by_run ON calls (project, status, run_id, id) WHERE error IS NOT NULL;
