//! The tools that a model sees.

use std::sync::Arc;

use super::catalog::CatalogEntry;
use crate::domain::access_rules;
use crate::domain::caller::Caller;
use crate::domain::json::Json;
use crate::model_formats::{ToolFormat, accepts_object, describe_tool};
use crate::registry::{Registry, model_tool_names};

impl Registry {
    /// Returns the tools the caller may call, described for a model in this format: ready for a
    /// model request, with names that model APIs accept and
    /// [`Calls::invoke`](crate::calls::Calls::invoke) understands. For an agent on the roster, only
    /// the tools that its entry allows.
    pub fn model_tool_definitions(&self, caller: &Caller, format: ToolFormat) -> Vec<Json> {
        let tools = self.tools_for_model(caller);
        let names = model_tool_names::names_for_model(
            tools.iter().map(|entry| entry.definition.name.as_str()),
        );
        let pairs = tools.iter().zip(&names);
        pairs.map(|(entry, name)| describe_tool(format, name, &entry.definition)).collect()
    }

    /// Returns the tools that this caller's model sees. Tools that a model cannot call are left
    /// out.
    pub(crate) fn tools_for_model(&self, caller: &Caller) -> Vec<Arc<CatalogEntry>> {
        let mut tools = self.tools(caller);
        tools.retain(|entry| accepts_object(&entry.definition));
        let member = self.find_agent_entry(&caller.project, &caller.agent);
        if let Some(list) = member.and_then(|member| member.allowed_tools) {
            let listed = |name: &str| {
                list.iter().any(|pattern| access_rules::pattern_matches(pattern, name))
            };
            tools.retain(|entry| listed(&entry.definition.name));
        }
        tools
    }
}
