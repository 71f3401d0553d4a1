-- Access rules are objects with an id. A change of a project's rules makes a new version of the set;
-- a row belongs to the versions from `since` up to, but not including, `until`. The set in force has
-- the rows without `until`. `rule` is JSON.
CREATE TABLE access_rules (
    project TEXT NOT NULL,
    id      TEXT NOT NULL,
    since   INTEGER NOT NULL,
    until   INTEGER,
    rule    TEXT NOT NULL CHECK (json_extract(rule, '$.verdict') IN ('allow', 'ask', 'deny')),
    PRIMARY KEY (project, id, since),
    CHECK (until IS NULL OR until > since)
) STRICT, WITHOUT ROWID;

CREATE TABLE access_rule_versions (
    project TEXT NOT NULL,
    version INTEGER NOT NULL,
    at_ms   INTEGER NOT NULL,
    agent   TEXT NOT NULL,
    summary TEXT NOT NULL,
    PRIMARY KEY (project, version)
) STRICT, WITHOUT ROWID;

INSERT INTO access_rules (project, id, since, until, rule)
SELECT project, verdict || ':' || agent || ':' || pattern, 1, NULL,
       CASE agent
           WHEN '*' THEN json_object('verdict', verdict, 'tools', json_array(pattern))
           ELSE json_object('verdict', verdict, 'agents', json_array(agent),
                            'tools', json_array(pattern))
       END
FROM rules;

INSERT INTO access_rule_versions (project, version, at_ms, agent, summary)
SELECT DISTINCT project, 1, 0, '', 'rules of an earlier release' FROM rules;

DROP TABLE rules;
