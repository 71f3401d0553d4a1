//! The catalog: every tool, compiled, with the clients that offer it and the rules on its callers.
//!
//! A catalog is an immutable snapshot of the directory and is replaced as a whole. A tool's schemas
//! are compiled when it is registered, within the budget of the request, and otherwise at its first
//! call; in both cases on a thread where no other call waits.

mod agent_tools;
mod project_map;
mod registration_checks;
pub(crate) mod rule_index;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use project_map::{NameMap, ProjectMap};
use rule_index::RuleIndex;
use serde_json::json;

use crate::domain::caller::{AuthMethod, Caller, LOCAL_AGENT, Role};
use crate::domain::directory::kill_switches::KillSwitchSet;
use crate::domain::directory::usage_limits::{ConfiguredLimit, UsageLimitSet};
use crate::domain::directory::{AuditEntry, Client, Directory, DirectoryChange, UnlistedTools};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::json::Json;
use crate::domain::retry::TIMEOUT_MS_RANGE;
use crate::domain::tool::args::ArgumentRules;
use crate::domain::tool::{Executor, Risk, ToolDefinition, check_tool_name};
use crate::model_formats::{ToolFormat, describe_tool};
use crate::ports::bus::Topic;
use crate::ports::clock::Clock;
use crate::ports::core::{ExecutionPolicies, from_store_error};
use crate::ports::store::SaveResult;
use crate::registry::credentials::CredentialIndex;
use crate::registry::{Registry, model_tool_names};
use crate::schema::{self, CompileBudget, Schema};

/// Name of the tool that reads results.
pub const RESULT_READ: &str = "result.read";

/// Name of the tool that ends a run.
pub const RUN_FINISH: &str = "run.finish";

/// A tool with its compiled schemas, ready to be called.
#[derive(Debug, Clone)]
pub struct CatalogEntry {
    /// The tool's definition as registered.
    pub definition: ToolDefinition,
    /// Fingerprint of the definition.
    pub version: String,
    /// Schema that the executed arguments must match.
    pub input_schema: Schema,
    /// Schema that results must match, if the definition has one.
    pub output_schema: Option<Schema>,
    /// Argument rules of the definition.
    pub rules: Option<ArgumentRules>,
    /// Risk of the tool: the operator's value, else the definition's.
    pub risk: Risk,
    /// Description of the tool in the chat format with the name that it has there. All runs share
    /// it.
    model_description: OnceLock<(String, Json)>,
}

impl CatalogEntry {
    /// Returns the tool in the chat format under this name.
    pub(crate) fn describe_for_model(&self, name: &str) -> Json {
        let describe = || describe_tool(ToolFormat::OpenAi, name, &self.definition);
        let (described_name, described) =
            self.model_description.get_or_init(|| (name.to_owned(), describe()));
        // Tools whose names collide in the chat format get another name there.
        match described_name == name {
            true => described.clone(),
            false => describe(),
        }
    }

    /// Compiles a definition at once and without a budget. For tools of the program itself.
    pub fn compile(definition: ToolDefinition) -> Result<Self, Fault> {
        let per_schema = &mut CompileBudget::new(usize::MAX);
        Self::compile_within(definition, per_schema)
    }

    /// Compiles a definition within a budget.
    pub fn compile_within(
        definition: ToolDefinition,
        budget: &mut CompileBudget,
    ) -> Result<Self, Fault> {
        let refused = |field: &str, error: schema::SchemaError| {
            let (name, pointer) = (&definition.name, &error.pointer);
            let reason = &error.reason;
            let message = format!("{name}: {field} is not usable at {field}{pointer}: {reason}");
            let detail = json!({
                "tool": definition.name,
                "pointer": format!("/{field}{}", error.pointer),
                "reason": error.reason,
            });
            Fault::new(Code::ValidationError, message).with_detail(detail)
        };
        let (rules, executed) = definition.argument_rules();
        let project = definition.project.as_deref().unwrap_or_default();
        let mut compile =
            |schema: &Json| Schema::compile_within(project, &schema.to_value(), &mut *budget);
        let input = compile(&executed).map_err(|error| refused("schema", error))?;
        let output = definition.output_schema.as_ref().map(compile).transpose();
        let output = output.map_err(|error| refused("output_schema", error))?;
        Ok(Self {
            version: definition.version(),
            risk: definition.risk,
            definition,
            input_schema: input,
            output_schema: output,
            rules,
            model_description: OnceLock::new(),
        })
    }

    /// Creates the entry of a stored definition. Its schemas are compiled at the first call.
    pub(crate) fn deferred(definition: ToolDefinition) -> Self {
        let (rules, executed) = definition.argument_rules();
        let project = definition.project.as_deref().unwrap_or_default();
        let output = definition.output_schema.clone();
        Self {
            version: definition.version(),
            risk: definition.risk,
            input_schema: Schema::deferred(project, executed),
            output_schema: output.map(|schema| Schema::deferred(project, schema)),
            rules,
            model_description: OnceLock::new(),
            definition,
        }
    }

    /// Returns the definition as it is shown: with the risk that is in force.
    pub fn shown_definition(&self) -> Cow<'_, ToolDefinition> {
        match self.risk == self.definition.risk {
            true => Cow::Borrowed(&self.definition),
            false => Cow::Owned(ToolDefinition { risk: self.risk, ..self.definition.clone() }),
        }
    }

    /// Compiles the input schema on another thread if it is not compiled.
    pub(crate) async fn prepare_input(&self) {
        self.input_schema.prepare().await;
    }
}

/// Compiles the definitions of one request on another thread, within one budget.
///
/// # Errors
///
/// Returns the position and the fault of the first definition that is refused.
pub async fn compile_definitions(
    project: &str,
    definitions: Vec<ToolDefinition>,
) -> Result<Vec<Arc<CatalogEntry>>, (usize, Error)> {
    let compiling = schema::compile_off_thread(project, move || {
        let mut budget = CompileBudget::for_request();
        let definitions = definitions.into_iter().enumerate();
        let entries = definitions.map(|(n, definition)| {
            let entry = CatalogEntry::compile_within(definition, &mut budget);
            entry.map(Arc::new).map_err(|fault| (n, Error::from(fault)))
        });
        entries.collect()
    });
    compiling.await.unwrap_or_else(|error| Err((0, Error::Internal(Box::new(error)))))
}

/// One version of the catalog.
#[derive(Default)]
pub struct Catalog {
    version: u64,
    pub(super) shared_tools: NameMap<Arc<CatalogEntry>>,
    project_tools: ProjectMap<Arc<CatalogEntry>>,
    clients_offering: ProjectMap<Vec<String>>,
    /// Position of each client in the directory.
    client_positions: ProjectMap<usize>,
    pub(super) credentials: CredentialIndex,
    /// Project and agent of the active keys whose requests never join an earlier call.
    agents_without_rejoin: HashSet<(String, String)>,
    pub(super) directory: Directory,
    limits: Arc<UsageLimitSet>,
    switches: Arc<KillSwitchSet>,
    pub(super) rules: RuleIndex,
    /// Risks that the operator set, by tool.
    risks: Arc<HashMap<String, Risk>>,
    /// Tells the time to conditions of rules.
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// Tools by the names that models use. Built at the first lookup by such a name.
    by_model_name: OnceLock<NameMap<Vec<Arc<CatalogEntry>>>>,
}

impl Catalog {
    pub(crate) fn new(shared: HashMap<String, Arc<CatalogEntry>>) -> Self {
        Self { shared_tools: shared.into_iter().collect(), ..Self::default() }
    }

    /// Sets the clock of conditions, the risks that the operator set for tools, and the usage
    /// limits of the configuration.
    pub(crate) fn with_settings(self, clock: Arc<dyn Clock>, policies: &ExecutionPolicies) -> Self {
        let tools = policies.tools.iter();
        let risks = tools.filter_map(|(name, over)| Some((name.clone(), over.risk?))).collect();
        let limits = Arc::new(UsageLimitSet::new(&[], &policies.limits));
        let mut next = Self { clock: Some(clock), risks: Arc::new(risks), limits, ..self };
        let shared = std::mem::take(&mut next.shared_tools).into_iter();
        next.shared_tools = shared.map(|(name, entry)| (name, next.with_risk(entry))).collect();
        next
    }

    /// Returns the entry with the risk that the operator set for its tool.
    fn with_risk(&self, entry: Arc<CatalogEntry>) -> Arc<CatalogEntry> {
        match self.risks.get(&entry.definition.name) {
            Some(risk) if *risk != entry.risk => {
                Arc::new(CatalogEntry { risk: *risk, ..entry.as_ref().clone() })
            }
            _ => entry,
        }
    }

    /// Returns the risk that the operator set for a name that is no tool, else the lowest.
    pub(super) fn operator_risk(&self, name: &str) -> Risk {
        self.risks.get(name).copied().unwrap_or(Risk::Low)
    }

    /// Builds the next version and reuses existing entries, and those that a request has just
    /// compiled.
    pub(crate) fn rebuild(
        &self,
        directory: Directory,
        compiled: &[Arc<CatalogEntry>],
        configured_limits: &[ConfiguredLimit],
    ) -> Self {
        let compiled: HashMap<&str, &Arc<CatalogEntry>> =
            compiled.iter().map(|entry| (entry.definition.name.as_str(), entry)).collect();
        let mut next = Self {
            shared_tools: self.shared_tools.clone(),
            rules: self.rules.rebuild(&directory.rules),
            risks: self.risks.clone(),
            clock: self.clock.clone(),
            ..Self::default()
        };
        let agents = directory.roster.iter().filter_map(|entry| {
            let definition = entry.definition.as_deref()?;
            let call = agent_tools::agent_tool(&entry.project, definition);
            let handoff = agent_tools::handoff_tool(&entry.project, definition);
            Some(std::iter::once(call).chain(handoff))
        });
        let agents: Vec<ToolDefinition> = agents.flatten().collect();
        for definition in directory.tools.iter().chain(&agents) {
            let project = definition.project.as_deref().unwrap_or_default();
            let name = definition.name.as_str();
            let unchanged = self
                .project_tools
                .get(project, name)
                .filter(|entry| entry.definition == *definition);
            let is_same = |entry: &&Arc<CatalogEntry>| entry.definition == *definition;
            let entry = match unchanged.or_else(|| compiled.get(name).copied().filter(is_same)) {
                Some(entry) => entry.clone(),
                None => Arc::new(CatalogEntry::deferred(definition.clone())),
            };
            let entry = self.with_risk(entry);
            next.project_tools.insert(project, name, entry);
        }
        for offer in &directory.offers {
            next.clients_offering
                .entry_or_default(&offer.project, &offer.tool)
                .push(offer.client_id.clone());
        }
        for (position, client) in directory.clients.iter().enumerate() {
            next.client_positions.insert(&client.project, &client.client_id, position);
        }
        next.credentials = CredentialIndex::new(&directory);
        let open = directory.keys.iter().filter(|key| key.revoked_ms.is_none());
        let without = open.filter(|key| !key.rejoin);
        next.agents_without_rejoin =
            without.map(|key| (key.project.clone(), key.agent.clone())).collect();
        next.limits = Arc::new(UsageLimitSet::new(&directory.limits, configured_limits));
        next.switches = Arc::new(KillSwitchSet::new(&directory.switches));
        next.version = directory.version;
        next.directory = directory;
        next
    }

    /// Returns the tool with this name in this project.
    pub fn find(&self, project: &str, name: &str) -> Option<Arc<CatalogEntry>> {
        self.shared_tools.get(name).or_else(|| self.project_tools.get(project, name)).cloned()
    }

    /// Resolves a name to a tool: its exact name, or the name that models use for it. A model's
    /// name is looked up only among the tools the caller may call, so that no others are revealed.
    /// A name that matches two of them resolves to neither.
    pub fn resolve(&self, caller: &Caller, name: &str) -> Option<Arc<CatalogEntry>> {
        let exact = self.find(&caller.project, name);
        // A tool whose exact name has the form of a model's name is chosen only if the caller may
        // call it.
        let is_model_name = || name.as_bytes().windows(2).any(|two| two == b"__" || two == b"--");
        if exact.is_some() && (!is_model_name() || self.may_call(caller, name)) {
            return exact;
        }
        let resolved = || {
            let index = self.by_model_name.get_or_init(|| self.build_model_name_index());
            let is_visible = |entry: &CatalogEntry| match &entry.definition.project {
                Some(project) => *project == caller.project,
                None => true,
            };
            let allowed = |entry: &CatalogEntry| self.may_call(caller, &entry.definition.name);
            let mut resolved =
                index.get(name)?.iter().filter(|entry| is_visible(entry) && allowed(entry));
            let first = resolved.next()?;
            resolved.next().is_none().then(|| first.clone())
        };
        resolved().or(exact)
    }

    fn build_model_name_index(&self) -> NameMap<Vec<Arc<CatalogEntry>>> {
        let mut index = NameMap::<Vec<Arc<CatalogEntry>>>::default();
        for entry in self.shared_tools.values().chain(self.project_tools.values()) {
            let name = &entry.definition.name;
            let (model_name, hashed_name) = (
                model_tool_names::name_for_model(name),
                model_tool_names::hashed_name_for_model(name),
            );
            if model_name != hashed_name {
                index.entry(hashed_name).or_default().push(entry.clone());
            }
            index.entry(model_name).or_default().push(entry.clone());
        }
        index
    }

    /// Returns every tool available in a project, sorted by name. [`RUN_FINISH`] and handoffs
    /// are none of them: they have a meaning only in a run, whose model gets them with the others.
    pub fn tools(&self, project: &str) -> Vec<Arc<CatalogEntry>> {
        let project_tools = self.project_tools.values_in(project);
        let shared = self.shared_tools.values();
        let is_listed = |entry: &&Arc<CatalogEntry>| {
            entry.definition.name != RUN_FINISH && entry.definition.executor != Executor::HANDOFF
        };
        let mut tools: Vec<_> = shared.chain(project_tools).filter(is_listed).cloned().collect();
        tools.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
        tools
    }

    /// Returns the handoffs to agents of the project, sorted by name.
    pub(crate) fn handoffs(&self, project: &str) -> Vec<Arc<CatalogEntry>> {
        let tools = self.project_tools.values_in(project);
        let is_handoff =
            |entry: &&Arc<CatalogEntry>| entry.definition.executor == Executor::HANDOFF;
        let mut tools: Vec<_> = tools.filter(is_handoff).cloned().collect();
        tools.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
        tools
    }

    /// Returns the clients that offer a tool.
    pub fn offered_by(&self, project: &str, tool: &str) -> &[String] {
        self.clients_offering.get(project, tool).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the tools that a client offers.
    pub fn tools_offered_by(&self, project: &str, client_id: &str) -> HashSet<String> {
        let offers = self.directory.offers.iter();
        let client_offers = offers.filter(|o| o.project == project && o.client_id == client_id);
        client_offers.map(|offer| offer.tool.clone()).collect()
    }

    pub(crate) fn client(&self, project: &str, client_id: &str) -> Option<&Client> {
        self.directory.clients.get(*self.client_positions.get(project, client_id)?)
    }

    /// Returns the usage limits in force.
    pub(crate) fn limits(&self) -> &Arc<UsageLimitSet> {
        &self.limits
    }

    /// Returns the kill switches that are set.
    pub(crate) fn switches(&self) -> &Arc<KillSwitchSet> {
        &self.switches
    }

    pub(crate) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Returns true if this caller's key may adopt a client: the client was registered before the
    /// server had keys, and no key that may provide tools has the agent name that such clients
    /// belong to.
    fn is_adoptable(&self, caller: &Caller, client_id: &str) -> bool {
        let Some(client) = self.client(&caller.project, client_id) else { return false };
        let keys = &self.directory.keys;
        let first_key_ms = keys.iter().map(|key| key.created_ms).min();
        let is_provider =
            caller.auth_method == AuthMethod::Key && caller.roles == Role::Provider.into();
        // Revoked keys count: the client of another provider is never adopted.
        let owner_has_key = keys.iter().any(|key| {
            key.project == client.project
                && key.agent == client.owner
                && key.roles != Role::Agent.into()
        });
        is_provider
            && client.owner == LOCAL_AGENT
            && caller.agent != LOCAL_AGENT
            && !owner_has_key
            && first_key_ms.is_some_and(|first_ms| client.registered_ms <= first_ms)
    }

    /// Returns true if a repeated request of this caller may join an earlier call.
    pub(crate) fn allows_rejoin(&self, caller: &Caller) -> bool {
        let without = &self.agents_without_rejoin;
        without.is_empty() || !without.contains(&(caller.project.clone(), caller.agent.clone()))
    }

    /// Returns true if a key was ever created. Revoked keys count: revoking the last key must lock
    /// the server, not open it.
    pub(crate) fn has_keys(&self) -> bool {
        !self.directory.keys.is_empty()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns similar names of tools that are listed for the caller.
    pub fn suggest_names(&self, caller: &Caller, name: &str) -> Vec<String> {
        let tools = self.tools(&caller.project);
        let listed = tools.iter().filter(|entry| self.is_listed(caller, entry));
        let allowed = listed.map(|entry| entry.definition.name.as_str());
        model_tool_names::suggest_similar(name, allowed).into_iter().map(str::to_owned).collect()
    }
}

/// A request by a client to offer tools.
#[derive(Debug, Clone)]
pub struct ClientRegistration {
    /// Id of the client, unique within its project.
    pub client_id: String,
    /// Definitions of the tools that the client executes.
    pub tools: Vec<ToolDefinition>,
    /// Treatment of tools that the client registered before and does not list here.
    pub unlisted_tools: UnlistedTools,
}

impl Registry {
    /// Returns the tools that are listed for the caller.
    pub fn tools(&self, caller: &Caller) -> Vec<Arc<CatalogEntry>> {
        let catalog = self.catalog();
        let mut tools = catalog.tools(&caller.project);
        tools.retain(|entry| catalog.is_listed(caller, entry));
        tools
    }

    /// Returns one tool, if the caller may call it.
    pub fn tool(&self, caller: &Caller, name: &str) -> Result<Arc<CatalogEntry>, Error> {
        let catalog = self.catalog();
        let allowed = |e: &Arc<CatalogEntry>| catalog.may_call(caller, &e.definition.name);
        let found = catalog.resolve(caller, name).filter(allowed);
        found.ok_or_else(|| tool_not_found(&catalog, caller, name))
    }

    /// Returns one tool, if it is listed for the caller or is a companion that the caller may call.
    pub fn listed_tool(&self, caller: &Caller, name: &str) -> Result<Arc<CatalogEntry>, Error> {
        let catalog = self.catalog();
        let found = catalog.resolve(caller, name);
        let listed = found.filter(|entry| {
            let is_companion = catalog.is_companion(&entry.definition.name);
            catalog.is_listed(caller, entry)
                || is_companion && catalog.may_call(caller, &entry.definition.name)
        });
        listed.ok_or_else(|| tool_not_found(&catalog, caller, name))
    }

    /// Returns the timeout of a call whose tool and request set none.
    pub fn default_timeout_ms(&self, caller: &Caller) -> u64 {
        let policies = &self.core.policies;
        let project_default =
            policies.projects.get(&caller.project).and_then(|p| p.default_timeout_ms);
        project_default.unwrap_or(policies.global.default_timeout_ms)
    }

    /// Registers the tools that a client offers. Returns their number.
    pub async fn register(
        &self,
        caller: &Caller,
        registration: ClientRegistration,
    ) -> Result<usize, Error> {
        require_provider(caller)?;
        check_client_id(&registration.client_id)?;
        let limit = self.core.limits.max_tools_per_registration;
        if registration.tools.len() > limit {
            let message = format!("at most {limit} tools in one registration");
            return Err(Error::refused(Code::PayloadTooLarge, message));
        }
        let mut seen = HashSet::new();
        for tool in &registration.tools {
            check_definition(tool)?;
            if !seen.insert(&tool.name) {
                let message = format!("\"{}\" is named twice in this registration", tool.name);
                return Err(Error::refused(Code::Conflict, message));
            }
        }
        let count = registration.tools.len();
        self.adopt_client(caller, &registration.client_id).await?;
        let compiled = compile_definitions(&caller.project, registration.tools.clone()).await;
        let compiled = compiled.map_err(|(_, error)| error)?;
        self.check_registration_rules(caller, &compiled).await?;
        self.change_directory_with(&compiled, |catalog| {
            registration_checks::check_registration(
                catalog,
                caller,
                &registration,
                &self.core.limits,
            )?;
            let client = Client {
                project: caller.project.clone(),
                client_id: registration.client_id.clone(),
                owner: caller.agent.clone(),
                registered_ms: self.core.clock.wall_ms(),
            };
            let (tools, unlisted_tools) = (registration.tools.clone(), registration.unlisted_tools);
            Ok((DirectoryChange::Register { client, tools, unlisted_tools }, None))
        })
        .await?;
        self.refresh_client_offers(&caller.project, &registration.client_id);
        Ok(count)
    }

    /// Gives a client that was registered before the server had keys to the first provider whose
    /// key uses it, so that turning keys on does not lock its provider out. Does nothing for any
    /// other client.
    pub(crate) async fn adopt_client(&self, caller: &Caller, client_id: &str) -> Result<(), Error> {
        // An issuer's tokens can have any agent name, so the name does not show who owns the
        // client.
        let is_adoptable = |catalog: &Catalog| {
            !self.credentials.accepts_issuer_tokens() && catalog.is_adoptable(caller, client_id)
        };
        if !is_adoptable(&self.catalog()) {
            return Ok(());
        }
        let (project, owner) = (&caller.project, &caller.agent);
        let reason = "registered before the server had keys";
        let entry = self.audit_entry(caller, project, "client.adopted", client_id, reason);
        self.change_directory(|catalog| {
            if !is_adoptable(catalog) {
                // Another key was first.
                require_client_owner(catalog, caller, client_id)?;
            }
            let change = DirectoryChange::SetClientOwner {
                project: project.clone(),
                client_id: client_id.to_owned(),
                owner: owner.clone(),
            };
            Ok((change, Some(entry.clone())))
        })
        .await?;
        tracing::info!(project, client_id, agent = owner, "the key adopted the client");
        Ok(())
    }

    /// Withdraws a tool that a client offered.
    pub async fn withdraw(
        &self,
        caller: &Caller,
        client_id: &str,
        tool: &str,
    ) -> Result<(), Error> {
        require_provider(caller)?;
        let project = caller.project.clone();
        self.change_directory(|catalog| {
            require_client_owner(catalog, caller, client_id)?;
            if !catalog.tools_offered_by(&project, client_id).contains(tool) {
                let message = format!("client \"{client_id}\" does not offer \"{tool}\"");
                return Err(Error::not_found(
                    message,
                    "GET /v1/clients lists the tools of each client",
                ));
            }
            let (client_id, tool) = (client_id.to_owned(), tool.to_owned());
            Ok((DirectoryChange::Withdraw { project: project.clone(), client_id, tool }, None))
        })
        .await?;
        self.refresh_client_offers(&caller.project, client_id);
        Ok(())
    }
}

impl Registry {
    pub(crate) fn catalog(&self) -> Arc<Catalog> {
        self.catalog.load()
    }

    /// Reloads the directory if this or another process changed it.
    pub(crate) async fn reload_catalog(&self) -> Result<(), Error> {
        self.reload_catalog_with(&[]).await
    }

    async fn reload_catalog_with(&self, compiled: &[Arc<CatalogEntry>]) -> Result<(), Error> {
        let version = self.core.store.directory_version().await.map_err(from_store_error)?;
        if version == self.catalog().version() {
            return Ok(());
        }
        let directory = self.core.store.directory().await.map_err(from_store_error)?;
        self.credentials.raise_time_floor(directory.latest_time_ms);
        let limits = &self.core.policies.limits;
        let next = Arc::new(self.catalog().rebuild(directory, compiled, limits));
        self.directory_changed_ms.store(self.core.clock.wall_ms(), Ordering::Release);
        self.catalog.replace(next);
        self.listeners().iter().for_each(|listener| listener.directory_changed());
        self.core.bus.wake(&Topic::Directory);
        Ok(())
    }

    /// Decides a change on the present directory and stores it. Decides again if another process
    /// changed the directory first.
    pub(crate) async fn change_directory<F>(&self, decide: F) -> Result<(), Error>
    where
        F: Fn(&Catalog) -> Result<(DirectoryChange, Option<AuditEntry>), Error>,
    {
        self.change_directory_with(&[], decide).await
    }

    /// Changes the directory and reuses the entries that were compiled for the change.
    pub(crate) async fn change_directory_with<F>(
        &self,
        compiled: &[Arc<CatalogEntry>],
        decide: F,
    ) -> Result<(), Error>
    where
        F: Fn(&Catalog) -> Result<(DirectoryChange, Option<AuditEntry>), Error>,
    {
        let _one_at_a_time = self.directory_lock.lock().await;
        for _ in 0..16 {
            self.reload_catalog().await?;
            let catalog = self.catalog();
            let (change, audit) = decide(&catalog)?;
            let saved = self.core.store.change_directory(change, catalog.version(), audit).await;
            if saved.map_err(from_store_error)? == SaveResult::Saved {
                return self.reload_catalog_with(compiled).await;
            }
        }
        Err(Error::retry_later(Code::Overloaded, "the directory changes too fast; try again", 100))
    }

    pub(crate) fn refresh_client_offers(&self, project: &str, client_id: &str) {
        let offers = self.catalog().tools_offered_by(project, client_id);
        for listener in self.listeners() {
            listener.client_tools_changed(project, client_id, &offers);
        }
    }
}

pub(crate) fn tool_not_found(catalog: &Catalog, caller: &Caller, name: &str) -> Error {
    let excerpt: String = name.chars().take(128).collect();
    let nearest = catalog.suggest_names(caller, name);
    let hint = match nearest.first() {
        Some(first) => format!("; did you mean \"{first}\"?"),
        None => "; GET /v1/tools lists what you may call".to_owned(),
    };
    Fault::new(Code::ToolNotFound, format!("there is no tool \"{excerpt}\"{hint}"))
        .with_detail(json!({ "nearest": nearest }))
        .into()
}

pub(crate) fn require_provider(caller: &Caller) -> Result<(), Error> {
    if caller.may_provide() {
        return Ok(());
    }
    let message = format!(
        "a key with the role {} can neither offer tools nor report results; \
         toolcrib keys create --role provider makes one that can",
        caller.roles
    );
    Err(Error::refused(Code::PermissionDenied, message))
}

/// Requires that the caller owns the client. A client belongs to the agent that registered it
/// first, or that adopted it.
pub(crate) fn require_client_owner(
    catalog: &Catalog,
    caller: &Caller,
    client_id: &str,
) -> Result<(), Error> {
    let owner = catalog.client(&caller.project, client_id).map(|client| client.owner.as_str());
    if caller.may_administer() || owner.is_none_or(|owner| owner == caller.agent) {
        return Ok(());
    }
    let message = format!("client \"{client_id}\" belongs to another key");
    let hint = "use a key with the agent name that registered the client, or another client_id";
    Err(Fault::new(Code::PermissionDenied, message).with_hint(hint).into())
}

pub(crate) fn require_registered(
    catalog: &Catalog,
    project: &str,
    client_id: &str,
) -> Result<(), Error> {
    if catalog.client(project, client_id).is_some() {
        return Ok(());
    }
    let message =
        format!("client \"{client_id}\" has not registered; POST /internal/tools/register first");
    Err(Error::not_found(message, "register the client's tools, then connect"))
}

pub(crate) fn check_client_id(client_id: &str) -> Result<(), Error> {
    let is_visible = |c: char| c.is_ascii_graphic();
    if (1..=128).contains(&client_id.len()) && client_id.chars().all(is_visible) {
        return Ok(());
    }
    let message = "client_id must be 1 to 128 visible ASCII characters";
    Err(Error::refused(Code::ValidationError, message))
}

/// Checks a definition, except its schemas, which [`compile_definitions`] checks.
pub(crate) fn check_definition(tool: &ToolDefinition) -> Result<(), Error> {
    let invalid = |message: String| Error::refused(Code::ValidationError, message);
    check_tool_name(&tool.name).map_err(|error| invalid(error.to_string()))?;
    if !TIMEOUT_MS_RANGE.contains(&tool.timeout_ms) {
        let message = format!("{}: timeout_ms must be from 1 to 86400000 (24 h)", tool.name);
        return Err(invalid(message));
    }
    if tool.description.len() > 16_384 {
        return Err(invalid(format!("{}: description is over 16384 bytes", tool.name)));
    }
    if let Some(problem) = tool.policy.find_problem() {
        return Err(invalid(format!("{}: {problem}", tool.name)));
    }
    if tool.fallback.len() > 8 {
        return Err(invalid(format!("{}: at most 8 fallback tools", tool.name)));
    }
    Ok(())
}
