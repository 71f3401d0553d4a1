//! The tools that are served: the built-in ones, and those of the data directory that are HTTP
//! APIs.
//!
//! Definitions belong to the server of that directory, which may be running; they are read from it
//! and never written to it. What is executed is executed here.

use toolcrib::fault::{Code, Error};
use toolcrib::task::refresh;
use toolcrib::tool::{Definition, Executor};
use toolcrib::{Caller, Engine, Json};

use crate::config::Config;
use crate::operation::Plan;
use crate::utp::Job;

pub(super) struct Shelf {
    config: Config,
    /// What runs them.
    pub(super) engine: Engine,
    /// What the data directory says, once there is one.
    kept: tokio::sync::OnceCell<Engine>,
    /// Whose tools are served to everybody; without it, to each project its own.
    project: Option<String>,
}

impl Shelf {
    pub(super) fn new(config: Config, engine: Engine, project: Option<String>) -> Self {
        Self { config, engine, kept: tokio::sync::OnceCell::new(), project }
    }

    /// The names of what is served, as far as it is known before anybody asks.
    pub(super) async fn names(&self) -> Vec<String> {
        let caller = Caller::local(self.project.as_deref().unwrap_or("default"));
        let builtin = self.engine.tools(&caller);
        let mut names: Vec<String> =
            builtin.iter().map(|tool| tool.definition.name.clone()).collect();
        if let Ok(Some(kept)) = self.kept().await {
            let own = kept.project_tools(&caller).unwrap_or_default();
            let asked = own.iter().filter_map(|tool| served(&tool.definition));
            names.extend(asked.map(|tool| tool.name));
        }
        names
    }

    /// Whose call it is, with the newest definition of its tool in place.
    pub(super) async fn ready(&self, job: &Job) -> Result<Caller, Error> {
        let caller = Caller::local(self.project.as_deref().unwrap_or(&job.project));
        let Some(kept) = self.kept().await? else { return Ok(caller) };
        refresh::run_once(kept).await;
        let known = kept.project_tool(&caller, &job.tool_name).ok();
        let wanted = known.and_then(|tool| served(&tool.definition));
        let here = self.engine.project_tool(&caller, &job.tool_name).ok();
        match (wanted, here) {
            (Some(wanted), Some(here)) if here.version == wanted.version() => {}
            (Some(wanted), _) => drop(self.engine.put_tool(&caller, wanted).await?),
            (None, Some(_)) => self.engine.drop_tool(&caller, &job.tool_name).await?,
            (None, None) => {}
        }
        Ok(caller)
    }

    /// The data directory, when a server has made it.
    async fn kept(&self) -> Result<Option<&Engine>, Error> {
        let there = self.config.kept().is_ok_and(|kept| kept.may_be_there());
        if !there && self.kept.get().is_none() {
            return Ok(None);
        }
        let open = || crate::assemble::operator(&self.config);
        let kept = self.kept.get_or_try_init(open).await.map_err(|error| {
            tracing::warn!(error = format!("{error:#}"), "the data directory cannot be read");
            Error::later(Code::Overloaded, "the definitions cannot be read; try again", 1_000)
        })?;
        Ok(Some(kept))
    }
}

/// A definition as it is executed here, where it says how an HTTP API is asked.
fn served(tool: &Definition) -> Option<Definition> {
    let mut tool = tool.clone();
    let utp = tool.utp.as_mut()?;
    let mut options = utp.options.value();
    if !Plan::is_in(&options) {
        return None;
    }
    // Whoever sent the command for it has applied the rules for arguments already.
    if utp.target_subject.take().is_some()
        && let Some(options) = options.as_object_mut()
    {
        options.remove("args");
        utp.options = Json::of_value(&serde_json::Value::Object(options.clone()));
    }
    tool.executor = Executor::Http;
    Some(tool)
}
