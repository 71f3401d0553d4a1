-- What went wrong in a run: it may be the only run that there ever was, and few of its calls go
-- wrong.
CREATE INDEX calls_not_ok_by_run ON calls (project, status, run_id, id) WHERE error IS NOT NULL;
