//! Language models: the configured endpoints behind the engine's model port, and the scripted
//! `demo`. Each sends one request and reports its result or its error; the engine decides about
//! retries.
//!
//! An API key is read when it is used. Toolcrib never logs or returns it, and redacts it from the
//! replies of endpoints.

mod anthropic;
mod counted;
mod demo;
mod discreet;
mod http;
mod openai;

use std::collections::BTreeMap;
use std::sync::Arc;

use toolcrib::model::{Chosen, Model, Models};

use crate::config::LlmSettings;
use counted::{Counted, OTHER};

pub use anthropic::Anthropic;
pub use demo::Demo;
pub use http::{Endpoint, KeyPlace, Patience};
pub use openai::OpenAi;

/// The name of the scripted model.
pub const DEMO: &str = "demo";

/// The API that an endpoint implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    OpenAi,
    Anthropic,
}

impl Kind {
    /// Returns the name of the API in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
        }
    }

    /// Returns the base URL of the vendor's own endpoint.
    pub fn usual_base(self) -> &'static str {
        match self {
            Self::OpenAi => "https://api.openai.com/v1",
            Self::Anthropic => "https://api.anthropic.com/v1",
        }
    }
}

/// All configured models.
pub struct Shelf {
    /// The model of requests that name none.
    usual: Option<String>,
    named: BTreeMap<String, Known>,
    /// The endpoint for names that are not registered.
    others: Option<Arc<dyn Model>>,
}

#[derive(Clone)]
struct Known {
    model: Arc<dyn Model>,
    /// The name of the model at its endpoint.
    upstream: String,
}

impl Shelf {
    /// Builds the registry from the configuration, and adds the demo.
    pub fn new(settings: &LlmSettings) -> Self {
        let demo = Counted::over(Arc::new(Demo), DEMO, DEMO);
        let demo = Known { model: demo, upstream: DEMO.into() };
        let mut named = BTreeMap::from([(DEMO.to_owned(), demo)]);
        let mut others = None;
        if let Some(endpoint) = settings.endpoint() {
            let (provider, model) = (endpoint.kind.as_str(), at(endpoint));
            if let Some(name) = &settings.model {
                let model = Counted::over(model.clone(), provider, name);
                named.insert(name.clone(), Known { model, upstream: name.clone() });
            }
            others = settings.other_models.then(|| Counted::over(model, provider, OTHER));
        }
        for (name, upstream, endpoint) in settings.named() {
            let provider = endpoint.kind.as_str();
            let model = Counted::over(at(endpoint), provider, name);
            named.insert(name.clone(), Known { model, upstream });
        }
        // A single configured model is the default.
        let only = settings.models.keys().next().filter(|_| settings.models.len() == 1).cloned();
        Self { usual: settings.model.clone().or(only), named, others }
    }
}

impl Models for Shelf {
    fn find(&self, name: &str) -> Option<Chosen> {
        if let Some(known) = self.named.get(name) {
            return Some(Chosen { model: known.model.clone(), name: known.upstream.clone() });
        }
        let others = self.others.as_ref().filter(|_| is_name(name))?;
        Some(Chosen { model: others.clone(), name: name.to_owned() })
    }

    fn names(&self) -> Vec<String> {
        let others = self.named.keys().filter(|name| Some(*name) != self.usual.as_ref());
        self.usual.iter().chain(others).cloned().collect()
    }
}

/// Returns whether a name may be sent to an endpoint.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=200).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn at(endpoint: Endpoint) -> Arc<dyn Model> {
    match endpoint.kind {
        Kind::OpenAi => Arc::new(OpenAi::at(endpoint)),
        Kind::Anthropic => Arc::new(Anthropic::at(endpoint)),
    }
}

fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests;
