//! The tools that a model sees.

use std::sync::Arc;

use super::Engine;
use super::catalog::Entry;
use crate::caller::Caller;
use crate::dialect::{Format, definition, takes_object};
use crate::json::Json;
use crate::{names, policy};

impl Engine {
    /// Returns the tools the caller may call, described for a model in this format: ready for a
    /// model request, with names that model APIs accept and [`Engine::invoke`] understands. For an
    /// agent on the roster, only the tools that its entry allows.
    pub fn definitions(&self, caller: &Caller, format: Format) -> Vec<Json> {
        let tools = self.tools_for_model(caller);
        let told = names::for_models(tools.iter().map(|entry| entry.definition.name.as_str()));
        let pairs = tools.iter().zip(&told);
        pairs.map(|(entry, name)| definition(format, name, &entry.definition)).collect()
    }

    /// Returns the tools that this caller's model sees. Tools that a model cannot call are left
    /// out.
    pub(crate) fn tools_for_model(&self, caller: &Caller) -> Vec<Arc<Entry>> {
        let mut tools = self.tools(caller);
        tools.retain(|entry| takes_object(&entry.definition));
        let member = self.inner.member(&caller.project, &caller.agent);
        if let Some(list) = member.and_then(|member| member.allowed_tools) {
            let listed = |name: &str| list.iter().any(|pattern| policy::matches(pattern, name));
            tools.retain(|entry| listed(&entry.definition.name));
        }
        tools
    }
}
