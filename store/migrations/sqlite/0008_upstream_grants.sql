-- Credentials granted by the issuers of upstreams: tokens, and the client they were granted to. One
-- row per upstream of the configuration or the directory; deleted with the upstream.
CREATE TABLE upstream_grants (
    project  TEXT NOT NULL,
    upstream TEXT NOT NULL,
    body     TEXT NOT NULL,
    PRIMARY KEY (project, upstream)
) STRICT, WITHOUT ROWID;
