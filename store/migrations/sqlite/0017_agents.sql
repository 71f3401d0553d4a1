-- Agents that can be called as tools. `definition` is NULL for agents that can only be woken.
ALTER TABLE roster ADD COLUMN definition TEXT;

-- Every version of an agent; kept after the agent is removed.
CREATE TABLE agent_versions (
    project    TEXT NOT NULL,
    agent_id   TEXT NOT NULL,
    version    INTEGER NOT NULL CHECK (version > 0),
    definition TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (project, agent_id, version)
) STRICT, WITHOUT ROWID;

-- The runs of agents, by the first run of their tree.
CREATE TABLE run_tree (
    project     TEXT NOT NULL,
    root_run_id TEXT NOT NULL,
    run_id      TEXT NOT NULL,
    PRIMARY KEY (project, root_run_id, run_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX run_tree_by_run ON run_tree (project, run_id);

-- Boxes: ordered sets of cards.
CREATE TABLE card_boxes (
    project    TEXT NOT NULL,
    box_id     TEXT NOT NULL,
    body       TEXT NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (project, box_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX card_boxes_by_time ON card_boxes (created_ms);
