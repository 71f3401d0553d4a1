//! A scripted model.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use toolcrib::model::{
    Chosen, Listener, Model, Models, Piece, Prompt, Reply, Silence, Stopped, Wanted,
};
use toolcrib::{Code, Fault};

pub type Line = Box<dyn FnOnce(&Prompt) -> Result<Reply, Silence> + Send>;

/// Replies with its lines in order, and records its prompts.
#[derive(Default)]
pub struct Script {
    lines: Mutex<VecDeque<Line>>,
    asked: Mutex<Vec<Prompt>>,
}

impl Script {
    pub fn line(
        self,
        line: impl FnOnce(&Prompt) -> Result<Reply, Silence> + Send + 'static,
    ) -> Self {
        self.lines.lock().push_back(Box::new(line));
        self
    }

    pub fn says(self, text: &str) -> Self {
        let text = text.to_owned();
        self.line(move |_| Ok(Reply { text, ..Reply::default() }))
    }

    pub fn calls(self, calls: &[(&str, &str, &str)]) -> Self {
        let calls: Vec<Wanted> = calls.iter().map(wanted).collect();
        self.line(move |_| Ok(Reply { calls, stopped: Stopped::ToolCalls, ..Reply::default() }))
    }

    pub fn fails(self, passing: bool, retry_after: Option<Duration>) -> Self {
        let fault = Fault::new(Code::UpstreamUnavailable, "the endpoint said 503");
        self.line(move |_| Err(Silence { fault, passing, retry_after }))
    }

    pub fn asked(&self, n: usize) -> Prompt {
        self.asked.lock()[n].clone()
    }
}

pub fn wanted((id, name, arguments): &(&str, &str, &str)) -> Wanted {
    Wanted { id: (*id).into(), name: (*name).into(), arguments: (*arguments).into() }
}

#[async_trait]
impl Model for Script {
    async fn reply(&self, prompt: &Prompt, listener: Listener<'_>) -> Result<Reply, Silence> {
        self.asked.lock().push(prompt.clone());
        let line = self.lines.lock().pop_front();
        let reply = line.unwrap_or_else(|| panic!("asked once too often: {prompt:?}"))(prompt)?;
        if !reply.text.is_empty() {
            listener(Piece::Text(reply.text.clone()));
        }
        Ok(reply)
    }
}

/// A registry with a single model.
pub struct Only(pub Arc<dyn Model>);

impl Models for Only {
    fn find(&self, name: &str) -> Option<Chosen> {
        let known = name == "scripted";
        known.then(|| Chosen { model: self.0.clone(), name: "the-endpoints-name".into() })
    }

    fn names(&self) -> Vec<String> {
        vec!["scripted".into()]
    }
}
