-- Access rules are objects with an id. A change of a project's rules makes a new version of the set;
-- a row belongs to the versions from `since` up to, but not including, `until`. The set in force has
-- the rows without `until`. `rule` is JSON.
CREATE TABLE toolcrib.access_rules (
    project TEXT COLLATE "C" NOT NULL,
    id      TEXT COLLATE "C" NOT NULL,
    since   BIGINT NOT NULL,
    until   BIGINT,
    rule    TEXT NOT NULL CHECK ((rule::json ->> 'verdict') IN ('allow', 'ask', 'deny')),
    PRIMARY KEY (project, id, since),
    CHECK (until IS NULL OR until > since)
);

CREATE TABLE toolcrib.access_rule_versions (
    project TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    at_ms   BIGINT NOT NULL,
    agent   TEXT NOT NULL,
    summary TEXT NOT NULL,
    PRIMARY KEY (project, version)
);

INSERT INTO toolcrib.access_rules (project, id, since, until, rule)
SELECT project, verdict || ':' || agent || ':' || pattern, 1, NULL,
       (CASE agent
           WHEN '*' THEN json_build_object('verdict', verdict, 'tools', json_build_array(pattern))
           ELSE json_build_object('verdict', verdict, 'agents', json_build_array(agent),
                                  'tools', json_build_array(pattern))
       END)::text
FROM toolcrib.rules;

INSERT INTO toolcrib.access_rule_versions (project, version, at_ms, agent, summary)
SELECT DISTINCT project, 1, 0, '', 'rules of an earlier release' FROM toolcrib.rules;

DROP TABLE toolcrib.rules;
