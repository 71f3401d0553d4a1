-- Agents that can be called as tools: the definition is NULL for agents that can only be woken.
ALTER TABLE resource.project_agents ADD COLUMN toolcrib_definition TEXT;

-- Every version of an agent; kept after the agent is removed.
CREATE TABLE toolcrib.agent_versions (
    project    TEXT COLLATE "C" NOT NULL,
    agent_id   TEXT COLLATE "C" NOT NULL,
    version    BIGINT NOT NULL CHECK (version > 0),
    definition TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (project, agent_id, version)
);

-- The runs of agents, by the first run of their tree.
CREATE TABLE toolcrib.run_tree (
    project     TEXT COLLATE "C" NOT NULL,
    root_run_id TEXT COLLATE "C" NOT NULL,
    run_id      TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (project, root_run_id, run_id)
);

CREATE INDEX run_tree_by_run ON toolcrib.run_tree (project, run_id);

-- Boxes: ordered sets of cards.
CREATE TABLE toolcrib.card_boxes (
    project    TEXT COLLATE "C" NOT NULL,
    box_id     TEXT COLLATE "C" NOT NULL,
    body       TEXT NOT NULL,
    created_ms BIGINT NOT NULL,
    PRIMARY KEY (project, box_id)
);

CREATE INDEX card_boxes_by_time ON toolcrib.card_boxes (created_ms);
