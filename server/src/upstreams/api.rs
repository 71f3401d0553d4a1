//! Upstreams as the HTTP transport shows and changes them.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use toolcrib::caller::Trust;
use toolcrib::fault::{Code, Error, Fault};
use toolcrib::{Caller, Engine, Json};

use super::{KIND, Keeper, outbound};
use crate::doors::http::{Returned, SourceBody, SourceChange, SourceOauth, SourceSkipped, Sources};
use crate::sources::mcp::{McpSettings, PassShown, Shown, ToolChange, Wrong, of_desktop_clients};

/// Maximum number of servers in one request.
const MOST: usize = 100;

/// Returns the servers in a desktop client's configuration document, or `None` if it is not one.
pub fn imported(document: &mut Value) -> Option<&mut Map<String, Value>> {
    let mut keys = ["mcpServers", "servers"].into_iter();
    let key = keys.find(|key| document.get(key).is_some_and(Value::is_object))?;
    document.get_mut(key)?.as_object_mut()
}

/// Parses the servers to add: a single server, or the `mcpServers` of a desktop client. A server
/// that is pinned stays pinned when it is imported again, unless the document sets `pin`.
pub fn to_add(
    engine: &Engine,
    caller: &Caller,
    mut document: Value,
) -> Result<Vec<McpSettings>, Error> {
    let pinned = |name: &str| {
        let mut known = engine.upstreams().into_iter();
        let known = known.find(|known| known.project == caller.project && known.name == name);
        known.is_some_and(|known| known.settings.value()["pin"] == true)
    };
    let settings = match imported(&mut document).is_some() {
        true => of_desktop_clients(&document, pinned).map_err(invalid)?,
        false => {
            let one: McpSettings = serde_json::from_value(document).map_err(|error| {
                Error::refused(Code::ValidationError, format!("the source cannot be read: {error}"))
            })?;
            vec![one]
        }
    };
    if settings.is_empty() || settings.len() > MOST {
        let message = format!("mcpServers must have from 1 to {MOST} servers");
        return Err(Error::refused(Code::ValidationError, message));
    }
    let mut names = HashSet::new();
    for one in &settings {
        one.check().map_err(invalid)?;
        if !names.insert(one.name.as_str()) {
            let why = format!("has two servers whose name here would be \"{}\"", one.name);
            return Err(invalid(Wrong { field: "mcpServers", why }));
        }
    }
    Ok(settings)
}

fn invalid(wrong: Wrong) -> Error {
    let message = format!("{}: {}", wrong.field, wrong.why);
    let detail = json!({ "pointer": format!("/{}", wrong.field) });
    Fault::new(Code::ValidationError, message).with_detail(detail).into()
}

/// Returns the settings in their stored form. The project is stored beside them, so it is reset
/// here.
pub fn stored(settings: &McpSettings) -> Json {
    let plain = McpSettings { project: "default".to_owned(), ..settings.clone() };
    Json::of(&plain).unwrap_or_else(|_| Json::empty_object())
}

impl Keeper {
    /// Checks that the caller may add these settings. Starting programs, reading the environment
    /// and reaching private networks are for the operator of the machine to allow, not for the
    /// holder of an API key.
    fn check(&self, caller: &Caller, settings: &mut McpSettings) -> Result<(), Error> {
        settings.guarded = false;
        settings.project.clone_from(&caller.project);
        if self.is_configured(&caller.project, &settings.name) {
            let message = format!("\"{}\" is in the server's configuration", settings.name);
            return Err(Error::refused(Code::Conflict, message));
        }
        if caller.trust == Trust::Local {
            return Ok(());
        }
        let denied = |message: &str| Err(Error::refused(Code::PermissionDenied, message));
        if settings.command.is_some() && !self.settings.allow_commands {
            return denied(
                "a key may not start programs on the server's machine: the operator adds them \
                 there (toolcrib mcp add), or sets upstreams.allow_commands",
            );
        }
        let named = settings.reads_environment();
        if named && !self.settings.allow_env {
            return denied(
                "a key may not read the server's environment with ${…}: write the value itself, \
                 or the operator sets upstreams.allow_env",
            );
        }
        if let Some(url) = &settings.url {
            settings.guarded = true;
            let checked = outbound(&self.settings).check(url);
            checked.map_err(|why| invalid(Wrong { field: "url", why }))?;
        }
        Ok(())
    }

    fn is_configured(&self, project: &str, name: &str) -> bool {
        self.configured.iter().any(|known| known.project == project && known.name == name)
    }

    fn body(&self, shown: Shown, all: bool) -> SourceBody {
        let configured = self.is_configured(&shown.settings.project, &shown.settings.name);
        let Shown { settings, state, stderr, pass } = shown;
        let place = settings.place();
        let program = settings.command.is_some();
        let (server_name, server_version) = state.server.unzip();
        let skipped = state.skipped.into_iter().take(if all { 1_000 } else { 10 });
        SourceBody {
            name: settings.name,
            project: settings.project,
            kind: KIND,
            transport: if program { "stdio" } else { "http" },
            place,
            origin: if configured { "configuration" } else { "api" },
            state: state.phase.as_str(),
            since_ms: state.since_ms,
            problem: state.problem,
            restarts: state.restarts,
            next_try_at_ms: state.next_try_ms,
            pid: state.process,
            protocol_version: state.protocol,
            server_name,
            server_version,
            tools: state.tools,
            pinned: settings.pin,
            skipped: skipped.map(|(tool, why)| SourceSkipped { tool, why }).collect(),
            flagged: state.flagged,
            pending: state.pending.into_iter().map(change).collect(),
            changes: state.changes.into_iter().rev().map(change).collect(),
            env: settings.env.into_keys().chain(settings.env_from).collect(),
            headers: settings.headers.into_keys().collect(),
            oauth: pass.map(oauth),
            stderr: all.then_some(stderr),
        }
    }
}

fn oauth(pass: PassShown) -> SourceOauth {
    let (url, expires_ms) = pass.sign_in.map(|wanted| (wanted.url, wanted.expires_ms)).unzip();
    SourceOauth {
        grant: pass.grant.as_str(),
        signed_in: pass.signed_in,
        issuer: pass.issuer,
        scopes: pass.scopes,
        sign_in_url: url,
        sign_in_expires_at_ms: expires_ms,
    }
}

fn change(change: ToolChange) -> SourceChange {
    SourceChange {
        tool: change.tool,
        change: change.change,
        fields: change.fields,
        at_ms: change.at_ms,
    }
}

fn unknown(name: &str) -> Error {
    let shown: String = name.chars().take(80).collect();
    Error::refused(Code::NotFound, format!("there is no source \"{shown}\""))
}

#[async_trait]
impl Sources for Keeper {
    fn list(&self, caller: &Caller) -> Result<Vec<SourceBody>, Error> {
        self.engine.check_upstreams(caller)?;
        let all = self.upstreams.shown(&caller.project);
        Ok(all.into_iter().map(|shown| self.body(shown, false)).collect())
    }

    fn one(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error> {
        self.engine.check_upstreams(caller)?;
        let found = self.upstreams.one(&caller.project, name);
        found.map(|shown| self.body(shown, true)).ok_or_else(|| unknown(name))
    }

    async fn add(
        &self,
        caller: &Caller,
        document: Value,
        wait: Duration,
    ) -> Result<Vec<SourceBody>, Error> {
        self.engine.check_upstreams(caller)?;
        let mut settings = to_add(&self.engine, caller, document)?;
        for one in &mut settings {
            self.check(caller, one)?;
        }
        for one in &settings {
            self.engine.put_upstream(caller, &one.name, KIND, stored(one)).await?;
        }
        self.look();
        let until = tokio::time::Instant::now() + wait;
        let mut bodies = Vec::new();
        for one in &settings {
            self.upstreams.known_by(&caller.project, &one.name, until).await;
            bodies.push(self.one(caller, &one.name)?);
        }
        Ok(bodies)
    }

    async fn remove(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.engine.check_upstreams(caller)?;
        if self.is_configured(&caller.project, name) {
            let message = format!("\"{name}\" is in the server's configuration: remove it there");
            return Err(Error::refused(Code::Conflict, message));
        }
        self.engine.drop_upstream(caller, name).await?;
        self.look();
        Ok(())
    }

    async fn accept(
        &self,
        caller: &Caller,
        name: &str,
        tools: Option<Vec<String>>,
    ) -> Result<Vec<SourceChange>, Error> {
        self.one(caller, name)?;
        let accepting = self.upstreams.accept(&caller.project, name, tools.as_deref());
        let accepted = accepting.await.map_err(|why| Error::later(Code::Overloaded, why, 1_000))?;
        Ok(accepted.into_iter().map(change).collect())
    }

    async fn refresh(
        &self,
        caller: &Caller,
        name: &str,
        wait: Duration,
    ) -> Result<SourceBody, Error> {
        self.one(caller, name)?;
        let until = tokio::time::Instant::now() + wait;
        self.upstreams.look_again(&caller.project, name, until).await;
        self.one(caller, name)
    }

    async fn sign_in(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error> {
        self.one(caller, name)?;
        let begun = self.upstreams.sign_in(&caller.project, name).await;
        begun.map_err(|why| {
            Error::from(Fault::new(Code::Conflict, format!("{name}: {why}")).retryable(false))
        })?;
        self.one(caller, name)
    }

    async fn sign_out(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.one(caller, name)?;
        let done = self.upstreams.sign_out(&caller.project, name).await;
        done.map_err(|why| Error::later(Code::Overloaded, why, 1_000))
    }

    async fn signed_in(&self, returned: Returned) -> Option<(String, Result<(), String>)> {
        let Returned { state, code, issuer } = returned;
        let code = code.as_deref().map_err(String::as_str);
        self.upstreams.signed_in(&state, code, issuer.as_deref()).await
    }

    fn counted(&self) -> Vec<(&'static str, usize)> {
        self.upstreams.counted().to_vec()
    }

    fn base(&self) -> String {
        self.upstreams.base()
    }
}
