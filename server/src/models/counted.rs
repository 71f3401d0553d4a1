//! A model whose tokens are counted under its configured name.

use std::sync::Arc;

use async_trait::async_trait;
use toolcrib::model::{CountedAs, Listener, Model, Prompt, Reply, Silence};

/// The metric label of models that the configuration does not name.
pub(super) const OTHER: &str = "other";

pub(super) struct Counted {
    model: Arc<dyn Model>,
    provider: &'static str,
    name: String,
}

impl Counted {
    /// Wraps a model and initializes its token counters with 0.
    pub(super) fn over(
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
impl Model for Counted {
    async fn reply(&self, prompt: &Prompt, listener: Listener<'_>) -> Result<Reply, Silence> {
        self.model.reply(prompt, listener).await
    }

    fn counted_as(&self) -> CountedAs<'_> {
        CountedAs { provider: self.provider, model: &self.name }
    }
}
