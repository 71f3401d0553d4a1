//! Language models: the endpoints that are configured, behind the engine's port, and the scripted
//! `demo`. Each asks once and says honestly how it went.
//!
//! A key is looked up when it is used. It is in no message of ours, and an endpoint that says it is
//! not heard saying it.

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

/// How an endpoint is spoken with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    OpenAi,
    Anthropic,
}

impl Kind {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
        }
    }

    /// Where the vendor's own endpoint is.
    pub fn usual_base(self) -> &'static str {
        match self {
            Self::OpenAi => "https://api.openai.com/v1",
            Self::Anthropic => "https://api.anthropic.com/v1",
        }
    }
}

/// Every model there is.
pub struct Shelf {
    /// What is asked where nobody says which.
    usual: Option<String>,
    named: BTreeMap<String, Known>,
    /// Where a name is asked for that is not known here.
    others: Option<Arc<dyn Model>>,
}

#[derive(Clone)]
struct Known {
    model: Arc<dyn Model>,
    /// The name that its endpoint knows it by.
    upstream: String,
}

impl Shelf {
    /// What the configuration names, and the demo.
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
        // Where one is all there is, nobody has to name it.
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

/// What an endpoint may be asked for.
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
