//! Upstreams and their tools in memory.

use super::MemoryState;
use crate::domain::directory::DirectoryChange;

impl MemoryState {
    /// Applies a change to upstreams or their tools.
    pub(super) fn change_upstream(&mut self, change: DirectoryChange) {
        let upstreams = &mut self.directory.upstreams;
        match change {
            DirectoryChange::PutUpstream(upstream) => {
                upstreams.retain(|k| k.project != upstream.project || k.name != upstream.name);
                upstreams.push(*upstream);
            }
            DirectoryChange::DropUpstream { project, name } => {
                upstreams.retain(|k| k.project != project || k.name != name);
                self.drop_upstream_tools(&project, &name);
                self.credentials.remove(&(project, name));
            }
            DirectoryChange::SetUpstreamTools { project, upstream, tools } => {
                self.drop_upstream_tools(&project, &upstream);
                self.upstream_tools.extend(tools.into_iter().map(|tool| (upstream.clone(), tool)));
            }
            _ => {}
        }
    }

    fn drop_upstream_tools(&mut self, project: &str, upstream: &str) {
        self.upstream_tools
            .retain(|(from, tool)| from != upstream || tool.project.as_deref() != Some(project));
    }
}
