//! Upstreams as the HTTP transport shows and changes them.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value, json};
use toolcrib::domain::caller::AuthMethod;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::{Caller, Engine, Json, RoleSet};
use toolcrib_sources::mcp::{
    AuthorizationStatus, McpServerSettings, McpSettingsError, ToolChange, UpstreamStatus,
    parse_desktop_config,
};
use toolcrib_transport::http::{
    OauthCallback, SkippedToolBody, SourceAdmin, SourceBody, SourceOauth, SourceToolChange,
};

use super::{MCP_UPSTREAM_KIND, McpServerReconciler, outbound_policy};

/// Maximum number of servers in one request.
const MAX_SERVERS_PER_REQUEST: usize = 100;

/// Returns the servers in a desktop client's configuration document, or `None` if it is not one.
pub fn find_desktop_servers(document: &mut Value) -> Option<&mut Map<String, Value>> {
    let mut keys = ["mcpServers", "servers"].into_iter();
    let key = keys.find(|key| document.get(key).is_some_and(Value::is_object))?;
    document.get_mut(key)?.as_object_mut()
}

/// Parses the servers to add: a single server, or the `mcpServers` of a desktop client. A server
/// that is pinned stays pinned when it is imported again, unless the document sets `pin`.
pub fn parse_servers_to_add(
    engine: &Engine,
    caller: &Caller,
    mut document: Value,
) -> Result<Vec<McpServerSettings>, Error> {
    let pinned = |name: &str| {
        let mut upstreams = engine.upstreams().list_all().into_iter();
        let upstream =
            upstreams.find(|upstream| upstream.project == caller.project && upstream.name == name);
        upstream.is_some_and(|upstream| upstream.settings.to_value()["pin"] == true)
    };
    let settings = match find_desktop_servers(&mut document).is_some() {
        true => parse_desktop_config(&document, pinned).map_err(invalid_settings_error)?,
        false => {
            let server_settings: McpServerSettings =
                serde_json::from_value(document).map_err(|error| {
                    Error::refused(
                        Code::ValidationError,
                        format!("the source cannot be read: {error}"),
                    )
                })?;
            vec![server_settings]
        }
    };
    if settings.is_empty() || settings.len() > MAX_SERVERS_PER_REQUEST {
        let message = format!("mcpServers must have from 1 to {MAX_SERVERS_PER_REQUEST} servers");
        return Err(Error::refused(Code::ValidationError, message));
    }
    let mut names = HashSet::new();
    for server_settings in &settings {
        server_settings.check().map_err(invalid_settings_error)?;
        if !names.insert(server_settings.name.as_str()) {
            let reason =
                format!("has two servers whose name here would be \"{}\"", server_settings.name);
            return Err(invalid_settings_error(McpSettingsError {
                field: "mcpServers",
                why: reason,
            }));
        }
    }
    Ok(settings)
}

fn invalid_settings_error(error: McpSettingsError) -> Error {
    let message = format!("{}: {}", error.field, error.why);
    let detail = json!({ "pointer": format!("/{}", error.field) });
    Fault::new(Code::ValidationError, message).with_detail(detail).into()
}

/// Returns the settings in their stored form. The project is stored separately, so it is reset
/// here.
pub fn to_stored_settings(settings: &McpServerSettings) -> Json {
    let without_project = McpServerSettings { project: "default".to_owned(), ..settings.clone() };
    Json::from_serialize(&without_project).unwrap_or_else(|_| Json::empty_object())
}

impl McpServerReconciler {
    /// Checks that the caller may add these settings. Starting programs, reading the environment
    /// and reaching private networks are for the operator of the machine to allow, not for the
    /// holder of an API key.
    fn check_admission(
        &self,
        caller: &Caller,
        settings: &mut McpServerSettings,
    ) -> Result<(), Error> {
        settings.guarded = false;
        settings.project.clone_from(&caller.project);
        if self.is_configured(&caller.project, &settings.name) {
            let message = format!("\"{}\" is in the server's configuration", settings.name);
            return Err(Error::refused(Code::Conflict, message));
        }
        if caller.auth_method == AuthMethod::Local {
            return Ok(());
        }
        let denied = |message: &str| Err(Error::refused(Code::PermissionDenied, message));
        if settings.command.is_some() && !self.settings.allow_commands {
            return denied(
                "a key may not start programs on the server's machine: the operator adds them \
                 there (toolcrib mcp add), or sets upstreams.allow_commands",
            );
        }
        let reads_env = settings.reads_environment();
        if reads_env && !self.settings.allow_env {
            return denied(
                "a key may not read the server's environment with ${…}: write the value itself, \
                 or the operator sets upstreams.allow_env",
            );
        }
        // A rule on the tools of the server, `NAME.*`, allows its settings to name a secret.
        let tools = format!("{}.", settings.name);
        let references = settings.secret_references();
        if let Some(denied) = references.iter().find(|one| !self.secrets.allows(&tools, one)) {
            let message =
                format!("{} may not use {denied}: no rule of [[secrets]] allows it", settings.name);
            return Err(Error::refused(Code::PermissionDenied, message));
        }
        if let Some(url) = &settings.url {
            settings.guarded = true;
            let checked = outbound_policy(&self.settings).check(url);
            checked.map_err(|reason| {
                invalid_settings_error(McpSettingsError { field: "url", why: reason })
            })?;
        }
        Ok(())
    }

    fn is_configured(&self, project: &str, name: &str) -> bool {
        self.configured.iter().any(|settings| settings.project == project && settings.name == name)
    }

    fn to_source_body(&self, status: UpstreamStatus, all: bool) -> SourceBody {
        let configured = self.is_configured(&status.settings.project, &status.settings.name);
        let UpstreamStatus { settings, state, stderr, authorization } = status;
        let address = settings.display_address();
        let program = settings.command.is_some();
        let (server_name, server_version) = state.server.unzip();
        let skipped = state.skipped.into_iter().take(if all { 1_000 } else { 10 });
        SourceBody {
            name: settings.name,
            project: settings.project,
            kind: MCP_UPSTREAM_KIND,
            transport: if program { "stdio" } else { "http" },
            place: address,
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
            skipped: skipped.map(|(tool, reason)| SkippedToolBody { tool, why: reason }).collect(),
            flagged: state.flagged,
            pending: state.pending.into_iter().map(to_source_change).collect(),
            changes: state.changes.into_iter().rev().map(to_source_change).collect(),
            env: settings.env.into_keys().chain(settings.env_from).collect(),
            headers: settings.headers.into_keys().collect(),
            oauth: authorization.map(to_source_oauth),
            stderr: all.then_some(stderr),
        }
    }
}

fn to_source_oauth(status: AuthorizationStatus) -> SourceOauth {
    let (url, expires_ms) = status.sign_in.map(|sign_in| (sign_in.url, sign_in.expires_ms)).unzip();
    SourceOauth {
        grant: status.grant.as_str(),
        signed_in: status.signed_in,
        issuer: status.issuer,
        scopes: status.scopes,
        sign_in_url: url,
        sign_in_expires_at_ms: expires_ms,
    }
}

fn to_source_change(change: ToolChange) -> SourceToolChange {
    SourceToolChange {
        tool: change.tool,
        change: change.change,
        fields: change.fields,
        at_ms: change.at_ms,
    }
}

fn source_not_found(name: &str) -> Error {
    let excerpt: String = name.chars().take(80).collect();
    Error::refused(Code::NotFound, format!("there is no MCP server \"{excerpt}\""))
}

#[async_trait]
impl SourceAdmin for McpServerReconciler {
    fn list(&self, caller: &Caller) -> Result<Vec<SourceBody>, Error> {
        self.engine.upstreams().require_admin(caller)?;
        let all = self.upstreams.statuses(&caller.project);
        Ok(all.into_iter().map(|status| self.to_source_body(status, false)).collect())
    }

    fn get(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error> {
        self.engine.upstreams().require_admin(caller)?;
        let found = self.upstreams.status(&caller.project, name);
        found.map(|status| self.to_source_body(status, true)).ok_or_else(|| source_not_found(name))
    }

    async fn add(
        &self,
        caller: &Caller,
        document: Value,
        wait: Duration,
    ) -> Result<Vec<SourceBody>, Error> {
        self.engine.upstreams().require_admin(caller)?;
        let mut settings = parse_servers_to_add(&self.engine, caller, document)?;
        for server_settings in &mut settings {
            self.check_admission(caller, server_settings)?;
        }
        for server_settings in &settings {
            self.engine
                .upstreams()
                .put(
                    caller,
                    &server_settings.name,
                    MCP_UPSTREAM_KIND,
                    to_stored_settings(server_settings),
                )
                .await?;
        }
        self.reconcile();
        let until = tokio::time::Instant::now() + wait;
        let mut bodies = Vec::new();
        for server_settings in &settings {
            self.upstreams.wait_until_known(&caller.project, &server_settings.name, until).await;
            bodies.push(self.get(caller, &server_settings.name)?);
        }
        Ok(bodies)
    }

    async fn remove(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.engine.upstreams().require_admin(caller)?;
        if self.is_configured(&caller.project, name) {
            let message = format!("\"{name}\" is in the server's configuration: remove it there");
            return Err(Error::refused(Code::Conflict, message));
        }
        self.engine.upstreams().remove(caller, name).await?;
        self.reconcile();
        Ok(())
    }

    async fn accept(
        &self,
        caller: &Caller,
        name: &str,
        tools: Option<Vec<String>>,
    ) -> Result<Vec<SourceToolChange>, Error> {
        self.get(caller, name)?;
        let reason = tools.as_ref().map_or_else(|| "all".to_owned(), |tools| tools.join(", "));
        self.engine.admin().record_action(caller, "upstream.accepted", name, &reason).await?;
        let accepting = self.upstreams.accept(&caller.project, name, tools.as_deref());
        let accepted = accepting
            .await
            .map_err(|reason| Error::retry_later(Code::Overloaded, reason, 1_000))?;
        Ok(accepted.into_iter().map(to_source_change).collect())
    }

    async fn refresh(
        &self,
        caller: &Caller,
        name: &str,
        wait: Duration,
    ) -> Result<SourceBody, Error> {
        self.get(caller, name)?;
        let until = tokio::time::Instant::now() + wait;
        self.upstreams.refresh(&caller.project, name, until).await;
        self.get(caller, name)
    }

    async fn sign_in(&self, caller: &Caller, name: &str) -> Result<SourceBody, Error> {
        self.get(caller, name)?;
        let started = self.upstreams.sign_in(&caller.project, name).await;
        started.map_err(|reason| {
            Error::from(Fault::new(Code::Conflict, format!("{name}: {reason}")).retryable(false))
        })?;
        self.get(caller, name)
    }

    async fn sign_out(&self, caller: &Caller, name: &str) -> Result<(), Error> {
        self.get(caller, name)?;
        self.engine.admin().record_action(caller, "upstream.signed_out", name, "").await?;
        let done = self.upstreams.sign_out(&caller.project, name).await;
        done.map_err(|reason| Error::retry_later(Code::Overloaded, reason, 1_000))
    }

    async fn complete_sign_in(
        &self,
        returned: OauthCallback,
    ) -> Option<(String, Result<(), String>)> {
        let OauthCallback { state, code, issuer } = returned;
        let code = code.as_deref().map_err(String::as_str);
        let finished = self.upstreams.complete_sign_in(&state, code, issuer.as_deref()).await;
        let (project, name, result) = finished?;
        // The browser that returns from the issuer has no credentials of Toolcrib.
        let caller = Caller::new(project, "oauth", RoleSet::default(), AuthMethod::Anonymous);
        let (action, reason) = match &result {
            Ok(()) => ("upstream.signed_in", ""),
            Err(reason) => ("upstream.sign_in_failed", reason.as_str()),
        };
        if let Err(error) = self.engine.admin().record_action(&caller, action, &name, reason).await
        {
            tracing::warn!(%error, upstream = name, "a sign-in was not audited");
        }
        Some((name, result))
    }

    fn count_by_state(&self) -> Vec<(&'static str, usize)> {
        self.upstreams.count_by_phase().to_vec()
    }

    fn public_base_url(&self) -> String {
        self.upstreams.public_base_url()
    }
}
