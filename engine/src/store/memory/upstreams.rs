//! Upstreams and their tools in memory.

use super::State;
use crate::directory::Change;

impl State {
    /// Applies a change to upstreams or their tools.
    pub(super) fn change_upstream(&mut self, change: Change) {
        let known = &mut self.directory.upstreams;
        match change {
            Change::PutUpstream(upstream) => {
                known.retain(|k| k.project != upstream.project || k.name != upstream.name);
                known.push(*upstream);
            }
            Change::DropUpstream { project, name } => {
                known.retain(|k| k.project != project || k.name != name);
                self.drop_brought(&project, &name);
                self.grants.remove(&(project, name));
            }
            Change::SetUpstreamTools { project, upstream, tools } => {
                self.drop_brought(&project, &upstream);
                self.brought.extend(tools.into_iter().map(|tool| (upstream.clone(), tool)));
            }
            _ => {}
        }
    }

    fn drop_brought(&mut self, project: &str, upstream: &str) {
        self.brought
            .retain(|(from, tool)| from != upstream || tool.project.as_deref() != Some(project));
    }
}
