//! A scripted model.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use toolcrib::domain::model_reply::{FinishReason, ModelReply, ToolCallRequest};
use toolcrib::ports::model::{
    Delta, DeltaListener, Model, ModelError, ModelRequest, ModelResolver, ResolvedModel,
};
use toolcrib::{Code, Fault};

pub type ScriptedReply = Box<dyn FnOnce(&ModelRequest) -> Result<ModelReply, ModelError> + Send>;

/// Replies as scripted, in order, and records the requests.
#[derive(Default)]
pub struct Script {
    replies: Mutex<VecDeque<ScriptedReply>>,
    requests: Mutex<Vec<ModelRequest>>,
}

impl Script {
    pub fn replies_with(
        self,
        reply: impl FnOnce(&ModelRequest) -> Result<ModelReply, ModelError> + Send + 'static,
    ) -> Self {
        self.replies.lock().push_back(Box::new(reply));
        self
    }

    pub fn says(self, text: &str) -> Self {
        let text = text.to_owned();
        self.replies_with(move |_| Ok(ModelReply { text, ..ModelReply::default() }))
    }

    pub fn calls(self, calls: &[(&str, &str, &str)]) -> Self {
        let calls: Vec<ToolCallRequest> = calls.iter().map(tool_call_request).collect();
        self.replies_with(move |_| {
            Ok(ModelReply {
                calls,
                finish_reason: FinishReason::ToolCalls,
                ..ModelReply::default()
            })
        })
    }

    pub fn fails(self, transient: bool, retry_after: Option<Duration>) -> Self {
        let fault = Fault::new(Code::UpstreamUnavailable, "the endpoint said 503");
        self.replies_with(move |_| Err(ModelError { fault, is_transient: transient, retry_after }))
    }

    pub fn request(&self, n: usize) -> ModelRequest {
        self.requests.lock()[n].clone()
    }
}

pub fn tool_call_request((id, name, arguments): &(&str, &str, &str)) -> ToolCallRequest {
    ToolCallRequest { id: (*id).into(), name: (*name).into(), arguments: (*arguments).into() }
}

#[async_trait]
impl Model for Script {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        self.requests.lock().push(prompt.clone());
        let scripted = self.replies.lock().pop_front();
        let reply = scripted.unwrap_or_else(|| panic!("asked once too often: {prompt:?}"))(prompt)?;
        if !reply.text.is_empty() {
            listener(Delta::Text(reply.text.clone()));
        }
        Ok(reply)
    }
}

/// A registry with a single model.
pub struct SingleModel(pub Arc<dyn Model>);

impl ModelResolver for SingleModel {
    fn find(&self, name: &str) -> Option<ResolvedModel> {
        let is_known = name == "scripted";
        is_known.then(|| ResolvedModel { model: self.0.clone(), name: "the-endpoints-name".into() })
    }

    fn names(&self) -> Vec<String> {
        vec!["scripted".into()]
    }
}
