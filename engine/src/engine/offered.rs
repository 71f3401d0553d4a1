//! The tools that a model is told of.

use std::sync::Arc;

use super::Engine;
use super::catalog::Entry;
use crate::caller::Caller;
use crate::dialect::{Format, definition, takes_object};
use crate::json::Json;
use crate::{names, policy};

impl Engine {
    /// The tools the caller may call, described for a model in this format: ready to be put into
    /// a request, under names that model APIs take and that [`Engine::invoke`] understands. Of an
    /// agent on the roster, those that the roster allows it.
    pub fn definitions(&self, caller: &Caller, format: Format) -> Vec<Json> {
        let tools = self.tools_for_model(caller);
        let told = names::for_models(tools.iter().map(|entry| entry.definition.name.as_str()));
        let pairs = tools.iter().zip(&told);
        pairs.map(|(entry, name)| definition(format, name, &entry.definition)).collect()
    }

    /// The tools that the model of this caller is told of: those that a model can call.
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
