//! The tools that `toolcrib utp serve` offers: the built-in ones, and the HTTP API tools of the
//! data directory.
//!
//! The definitions belong to the server of that directory, which may be running: this process reads
//! them and never writes them. The tools are executed in this process.

use toolcrib::domain::fault::{Code, Error};
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::maintenance::directory_refresh;
use toolcrib::{Caller, Engine, Json};
use toolcrib_protocol::http_operation::HttpToolSpec;
use toolcrib_sources::utp::host::ToolJob;

use crate::config::Config;

pub(super) struct UtpToolCatalogue {
    config: Config,
    /// The engine that executes the tools.
    pub(super) engine: Engine,
    /// The engine that reads the definitions of the data directory, opened once it exists.
    definitions: tokio::sync::OnceCell<Engine>,
    /// The project whose tools are served for every command. Without it, each command uses the
    /// tools of the project it names.
    project: Option<String>,
}

impl UtpToolCatalogue {
    pub(super) fn new(config: Config, engine: Engine, project: Option<String>) -> Self {
        Self { config, engine, definitions: tokio::sync::OnceCell::new(), project }
    }

    /// Returns the names of the tools that are known before the first command.
    pub(super) async fn tool_names(&self) -> Vec<String> {
        let caller = Caller::local(self.project.as_deref().unwrap_or("default"));
        let builtin = self.engine.registry().tools(&caller);
        let mut names: Vec<String> =
            builtin.iter().map(|tool| tool.definition.name.clone()).collect();
        if let Ok(Some(definitions)) = self.open_definitions().await {
            let tools = definitions.projects().tools(&caller).unwrap_or_default();
            let executable =
                tools.iter().filter_map(|tool| executable_definition(&tool.definition));
            names.extend(executable.map(|tool| tool.name));
        }
        names
    }

    /// Returns the caller for a job, after updating the definition of its tool to the newest
    /// version.
    pub(super) async fn prepare_call(&self, job: &ToolJob) -> Result<Caller, Error> {
        let caller = Caller::local(self.project.as_deref().unwrap_or(&job.project));
        let Some(definitions) = self.open_definitions().await? else { return Ok(caller) };
        directory_refresh::run_once(definitions.registry()).await;
        let stored = definitions.projects().tool(&caller, &job.tool_name).ok();
        let definition = stored.and_then(|tool| executable_definition(&tool.definition));
        let local = self.engine.projects().tool(&caller, &job.tool_name).ok();
        match (definition, local) {
            (Some(definition), Some(local)) if local.version == definition.version() => {}
            (Some(definition), _) => {
                drop(self.engine.projects().put_tool(&caller, definition).await?)
            }
            (None, Some(_)) => self.engine.projects().remove_tool(&caller, &job.tool_name).await?,
            (None, None) => {}
        }
        Ok(caller)
    }

    /// Returns the engine of the data directory, if a server has created it.
    async fn open_definitions(&self) -> Result<Option<&Engine>, Error> {
        let exists = self.config.store_location().is_ok_and(|location| location.may_exist());
        if !exists && self.definitions.get().is_none() {
            return Ok(None);
        }
        let open = || crate::bootstrap::open_admin_engine(&self.config);
        let definitions = self.definitions.get_or_try_init(open).await.map_err(|error| {
            tracing::warn!(error = format!("{error:#}"), "the data directory cannot be read");
            Error::retry_later(Code::Overloaded, "the definitions cannot be read; try again", 1_000)
        })?;
        Ok(Some(definitions))
    }
}

/// Returns the definition in the form that is executed here, if it describes an HTTP API.
fn executable_definition(tool: &ToolDefinition) -> Option<ToolDefinition> {
    let mut tool = tool.clone();
    let utp = tool.binding.as_mut()?;
    let mut options = utp.options.to_value();
    if !HttpToolSpec::is_present(&options) {
        return None;
    }
    // The sender of the command has already applied the rules for arguments.
    if utp.target_subject.take().is_some()
        && let Some(options) = options.as_object_mut()
    {
        options.remove("args");
        utp.options = Json::from_value(&serde_json::Value::Object(options.clone()));
    }
    tool.executor = Executor::HTTP;
    Some(tool)
}
