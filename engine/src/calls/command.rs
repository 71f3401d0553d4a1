//! Builds the command that a tool service or an HTTP API receives for an attempt.

use std::sync::Arc;

use crate::calls::Dispatcher;
use crate::domain::call::Call;
use crate::domain::fault::{Code, Fault};
use crate::domain::tool::Executor;
use crate::domain::{derived, utp};
use crate::ports::source::ToolCommand;

impl Dispatcher {
    /// Builds the command that a tool service or an HTTP API receives for the attempt in flight.
    pub(crate) async fn build_command(&self, call: &Arc<Call>) -> Result<ToolCommand, Fault> {
        let loaded_binding = self.registry.load_binding(call).await.map_err(|error| {
            let message = format!("cannot read the tool definition: {error}");
            Fault::new(Code::UpstreamUnavailable, message).without_side_effect()
        })?;
        let Some(binding) = loaded_binding else {
            let message = format!("the definition of {} no longer exists", call.target.tool);
            return Err(Fault::new(Code::Internal, message).without_side_effect().retryable(false));
        };
        let card_id = utp::card::derived_id(&call.id, utp::card::TOOL_CALL);
        let attempt_traceparent = self.attempt_traceparent(call).map(|span| span.to_string());
        let traceparent = attempt_traceparent.unwrap_or_else(|| derived::call_traceparent(call));
        let (route, call) = (utp::Route::for_call(call), call.clone());
        Ok(ToolCommand { call, route, binding, card_id, traceparent })
    }

    /// Writes the command's card to the shared tables, where the tool service may read it, before
    /// the command is sent.
    pub(crate) async fn publish_command_card(
        &self,
        call: &Call,
        command: ToolCommand,
    ) -> Result<ToolCommand, Fault> {
        let shared =
            self.core.store.utp().shared_tables().filter(|_| call.target.executor == Executor::UTP);
        let Some(shared) = shared else { return Ok(command) };
        let card = derived::call_card(call, Some(&command.binding));
        match shared.write_command(card, &command.route, &command.traceparent).await {
            Ok(()) => Ok(command),
            Err(error) => {
                let message = format!("cannot store the card of the command: {error}");
                Err(Fault::new(Code::UpstreamUnavailable, message).without_side_effect())
            }
        }
    }
}
