//! Language models: the configured endpoints behind the engine's model port, and the scripted
//! `demo`. Each sends one request and reports its result or its error; the engine decides about
//! retries.
//!
//! An API key is read when it is used. Toolcrib never logs or returns it, and redacts it from the
//! replies of endpoints.

mod anthropic;
mod demo;
mod endpoint_client;
mod key_redaction;
mod metered;
mod openai;
mod responses;
pub mod settings;
use std::collections::BTreeMap;
use std::sync::Arc;

use toolcrib::ports::model::{Model, ModelResolver, ResolvedModel};

use crate::models::metered::{MeteredModel, UNNAMED_MODEL};
use crate::models::settings::LlmSettings;

pub use crate::models::endpoint_client::{ApiKeySource, ModelEndpoint, ModelResponseLimits};
pub use anthropic::AnthropicModel;
pub use demo::DemoModel;
pub use openai::OpenAiModel;
pub use responses::ResponsesModel;

/// The name of the scripted model.
pub(crate) const DEMO: &str = "demo";

/// The API that an endpoint implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelApi {
    OpenAi,
    Anthropic,
    Responses,
}

impl ModelApi {
    /// Returns the name of the API in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
            Self::Responses => "responses",
        }
    }

    /// Returns the base URL of the vendor's own endpoint.
    pub(crate) fn default_base_url(self) -> &'static str {
        match self {
            Self::OpenAi | Self::Responses => "https://api.openai.com/v1",
            Self::Anthropic => "https://api.anthropic.com/v1",
        }
    }
}

/// All configured models.
pub struct ModelRegistry {
    /// The model of requests that name none.
    default_model: Option<String>,
    models: BTreeMap<String, RegisteredModel>,
    /// The endpoint for names that are not registered.
    fallback: Option<Arc<dyn Model>>,
}

#[derive(Clone)]
struct RegisteredModel {
    model: Arc<dyn Model>,
    /// The name of the model at its endpoint.
    remote_name: String,
}

impl ModelRegistry {
    /// Builds the registry from the configuration, and adds the demo.
    pub fn new(settings: &LlmSettings) -> Self {
        let demo = MeteredModel::wrap(Arc::new(DemoModel), DEMO, DEMO);
        let demo = RegisteredModel { model: demo, remote_name: DEMO.into() };
        let mut models = BTreeMap::from([(DEMO.to_owned(), demo)]);
        let mut fallback = None;
        if let Some(endpoint) = settings.endpoint() {
            let (provider, model) = (endpoint.kind.as_str(), build_model(endpoint));
            if let Some(name) = &settings.model {
                let model = MeteredModel::wrap(model.clone(), provider, name);
                models.insert(name.clone(), RegisteredModel { model, remote_name: name.clone() });
            }
            fallback =
                settings.other_models.then(|| MeteredModel::wrap(model, provider, UNNAMED_MODEL));
        }
        for (name, upstream, endpoint) in settings.named_endpoints() {
            let provider = endpoint.kind.as_str();
            let model = MeteredModel::wrap(build_model(endpoint), provider, name);
            models.insert(name.clone(), RegisteredModel { model, remote_name: upstream });
        }
        // A single configured model is the default.
        let only = settings.models.keys().next().filter(|_| settings.models.len() == 1).cloned();
        Self { default_model: settings.model.clone().or(only), models, fallback }
    }
}

impl ModelResolver for ModelRegistry {
    fn find(&self, name: &str) -> Option<ResolvedModel> {
        if let Some(registered) = self.models.get(name) {
            return Some(ResolvedModel {
                model: registered.model.clone(),
                name: registered.remote_name.clone(),
            });
        }
        let fallback = self.fallback.as_ref().filter(|_| is_model_name(name))?;
        Some(ResolvedModel { model: fallback.clone(), name: name.to_owned() })
    }

    fn names(&self) -> Vec<String> {
        let other_names =
            self.models.keys().filter(|name| Some(*name) != self.default_model.as_ref());
        self.default_model.iter().chain(other_names).cloned().collect()
    }
}

/// Returns whether a name may be sent to an endpoint.
pub(crate) fn is_model_name(name: &str) -> bool {
    (1..=200).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn build_model(endpoint: ModelEndpoint) -> Arc<dyn Model> {
    match endpoint.kind {
        ModelApi::OpenAi => Arc::new(OpenAiModel::new(endpoint)),
        ModelApi::Anthropic => Arc::new(AnthropicModel::new(endpoint)),
        ModelApi::Responses => Arc::new(ResponsesModel::new(endpoint)),
    }
}

fn sanitize_name(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests;
