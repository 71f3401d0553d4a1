//! Changes of the in-memory directory.

use crate::domain::directory::kill_switches::SwitchKind;
use crate::domain::directory::usage_limits::LimitKind;
use crate::domain::directory::{Directory, DirectoryChange, ToolOffer, UnlistedTools};

/// Applies a change that concerns neither project tools, nor upstreams, nor rules.
pub(super) fn apply(directory: &mut Directory, change: DirectoryChange) {
    match change {
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
        change => apply_credential_change(directory, change),
    }
}

/// Applies a change of a key or a session token.
fn apply_credential_change(directory: &mut Directory, change: DirectoryChange) {
    match change {
        DirectoryChange::AddKey(key) => directory.keys.push(key),
        DirectoryChange::RevokeKey { id, at_ms } => {
            for key in directory.keys.iter_mut().filter(|key| key.id == id) {
                key.revoked_ms.get_or_insert(at_ms.max(key.created_ms));
            }
        }
        DirectoryChange::RotateKey { id, ends_ms, successor } => {
            for key in directory.keys.iter_mut().filter(|key| key.id == id) {
                key.expires_ms = Some(key.expires_ms.unwrap_or(ends_ms).min(ends_ms));
            }
            directory.keys.push(*successor);
        }
        DirectoryChange::AddSessionToken(token) => directory.session_tokens.push(*token),
        DirectoryChange::RevokeSessionToken { id, at_ms } => {
            for token in directory.session_tokens.iter_mut().filter(|token| token.id == id) {
                token.revoked_ms.get_or_insert(at_ms.max(token.created_ms));
            }
        }
        DirectoryChange::ExpireSessionTokens { at_ms, delete_before_ms } => {
            let tokens = &mut directory.session_tokens;
            for token in tokens.iter_mut().filter(|token| token.expires_ms <= at_ms) {
                token.revoked_ms.get_or_insert(at_ms.max(token.created_ms));
            }
            tokens.retain(|token| token.revoked_ms.is_none_or(|at_ms| at_ms >= delete_before_ms));
        }
        change => apply_limit_change(directory, change),
    }
}

/// Applies a change of a usage limit or a kill switch.
fn apply_limit_change(directory: &mut Directory, change: DirectoryChange) {
    match change {
        DirectoryChange::PutLimit(limit) => {
            drop_limit(directory, &limit.project, limit.kind, &limit.name);
            directory.limits.push(limit);
        }
        DirectoryChange::DropLimit { project, kind, name } => {
            drop_limit(directory, &project, kind, &name);
        }
        DirectoryChange::PutSwitch(switch) => {
            drop_switch(directory, &switch.project, switch.kind, &switch.name);
            directory.switches.push(switch);
        }
        DirectoryChange::DropSwitch { project, kind, name } => {
            drop_switch(directory, &project, kind, &name);
        }
        _ => {}
    }
}

fn drop_member(directory: &mut Directory, project: &str, agent_id: &str) {
    directory.roster.retain(|m| m.project != project || m.agent_id != agent_id);
}

fn drop_limit(directory: &mut Directory, project: &str, kind: LimitKind, name: &str) {
    directory.limits.retain(|limit| {
        (limit.project.as_str(), limit.kind, limit.name.as_str()) != (project, kind, name)
    });
}

fn drop_switch(directory: &mut Directory, project: &str, kind: SwitchKind, name: &str) {
    directory.switches.retain(|switch| {
        (switch.project.as_str(), switch.kind, switch.name.as_str()) != (project, kind, name)
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
