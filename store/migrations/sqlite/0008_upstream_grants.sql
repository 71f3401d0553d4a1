-- What the issuers of upstreams have granted us: tokens, and the client they were granted to. One
-- for each upstream, whether it is in the configuration or in the directory; gone with it.
CREATE TABLE upstream_grants (
    project  TEXT NOT NULL,
    upstream TEXT NOT NULL,
    body     TEXT NOT NULL,
    PRIMARY KEY (project, upstream)
) STRICT, WITHOUT ROWID;
