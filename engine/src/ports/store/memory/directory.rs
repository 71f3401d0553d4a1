//! Changes of the in-memory directory.

use crate::domain::directory::{Directory, DirectoryChange, ToolOffer, UnlistedTools};

/// Applies a change that concerns neither project tools nor upstreams.
pub(super) fn apply(directory: &mut Directory, change: DirectoryChange) {
    match change {
        DirectoryChange::PutTools(_)
        | DirectoryChange::DropTool { .. }
        | DirectoryChange::PutUpstream(_)
        | DirectoryChange::DropUpstream { .. }
        | DirectoryChange::SetUpstreamTools { .. } => {}
        DirectoryChange::AddProject(project) => directory.projects.push(project),
        DirectoryChange::PutAgent(member) => {
            drop_member(directory, &member.project, &member.agent_id);
            directory.roster.push(member);
        }
        DirectoryChange::DropAgent { project, agent_id } => {
            drop_member(directory, &project, &agent_id)
        }
        DirectoryChange::Register { client, tools, unlisted_tools: others } => {
            let (project, id) = (client.project.clone(), client.client_id.clone());
            let belongs_to_client =
                |offer: &ToolOffer| offer.project == project && offer.client_id == id;
            if others == UnlistedTools::Withdraw {
                directory.offers.retain(|offer| !belongs_to_client(offer));
            }
            for tool in tools {
                let offer = ToolOffer {
                    project: project.clone(),
                    tool: tool.name.clone(),
                    client_id: id.clone(),
                };
                let is_same = |existing: &crate::domain::tool::ToolDefinition| {
                    existing.project == tool.project && existing.name == tool.name
                };
                directory.tools.retain(|existing| !is_same(existing));
                directory.tools.push(tool);
                if !directory.offers.contains(&offer) {
                    directory.offers.push(offer);
                }
            }
            drop_orphans(directory);
            let is_client =
                |c: &crate::domain::directory::Client| c.project == project && c.client_id == id;
            if !directory.clients.iter().any(is_client) {
                directory.clients.push(client);
            }
        }
        DirectoryChange::Withdraw { project, client_id, tool } => {
            directory.offers.retain(|o| {
                *o != ToolOffer {
                    project: project.clone(),
                    tool: tool.clone(),
                    client_id: client_id.clone(),
                }
            });
            drop_orphans(directory);
        }
        DirectoryChange::SetClientOwner { project, client_id, owner } => {
            let clients = directory.clients.iter_mut();
            clients
                .filter(|c| c.project == project && c.client_id == client_id)
                .for_each(|client| client.owner.clone_from(&owner));
        }
        DirectoryChange::DropClient { project, client_id } => {
            directory.offers.retain(|o| o.project != project || o.client_id != client_id);
            directory.clients.retain(|c| c.project != project || c.client_id != client_id);
            drop_orphans(directory);
        }
        DirectoryChange::AddKey(key) => directory.keys.push(key),
        DirectoryChange::RevokeKey { id, at_ms } => {
            for key in directory.keys.iter_mut().filter(|key| key.id == id) {
                key.revoked_ms.get_or_insert(at_ms.max(key.created_ms));
            }
        }
        DirectoryChange::PutRule(rule) => {
            drop_rule(directory, &rule.project, &rule.agent, &rule.pattern);
            directory.rules.push(rule);
        }
        DirectoryChange::DropRule { project, agent, pattern } => {
            drop_rule(directory, &project, &agent, &pattern);
        }
    }
}

fn drop_member(directory: &mut Directory, project: &str, agent_id: &str) {
    directory.roster.retain(|m| m.project != project || m.agent_id != agent_id);
}

fn drop_rule(directory: &mut Directory, project: &str, agent: &str, pattern: &str) {
    directory.rules.retain(|rule| {
        (rule.project.as_str(), rule.agent.as_str(), rule.pattern.as_str())
            != (project, agent, pattern)
    });
}

/// Removes tools that no client provides any more.
fn drop_orphans(directory: &mut Directory) {
    let offers = std::mem::take(&mut directory.offers);
    directory.tools.retain(|tool| {
        offers.iter().any(|o| Some(&o.project) == tool.project.as_ref() && o.tool == tool.name)
    });
    directory.offers = offers;
}
