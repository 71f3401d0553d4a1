//! A model whose tokens are counted under its configured name.

use std::sync::Arc;

use async_trait::async_trait;
use toolcrib::domain::model_reply::ModelReply;
use toolcrib::ports::model::{DeltaListener, Model, ModelError, ModelRequest, UsageLabel};

/// The metric label of models that the configuration does not name.
pub(super) const UNNAMED_MODEL: &str = "other";

pub(super) struct MeteredModel {
    model: Arc<dyn Model>,
    provider: &'static str,
    name: String,
}

impl MeteredModel {
    /// Wraps a model and initializes its token counters with 0.
    pub(super) fn wrap(
        model: Arc<dyn Model>,
        provider: &'static str,
        name: &str,
    ) -> Arc<dyn Model> {
        for kind in ["input", "output"] {
            let name = name.to_owned();
            let labels =
                [("provider", provider.to_owned()), ("model", name), ("type", kind.into())];
            metrics::counter!("toolcrib_llm_tokens_total", &labels).increment(0);
        }
        Arc::new(Self { model, provider, name: name.to_owned() })
    }
}

#[async_trait]
impl Model for MeteredModel {
    async fn reply(
        &self,
        prompt: &ModelRequest,
        listener: DeltaListener<'_>,
    ) -> Result<ModelReply, ModelError> {
        self.model.reply(prompt, listener).await
    }

    fn usage_label(&self) -> UsageLabel<'_> {
        UsageLabel { provider: self.provider, model: &self.name }
    }
}
