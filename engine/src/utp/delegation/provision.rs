//! `provision_agent`: an agent defines another one. A refusal is a result that says why, because
//! the model can act on it.

use serde_json::{Value, json};

use super::Delegation;
use crate::domain::agent::{AgentDefinition, AgentDriver, AgentLimits, AgentProfile};
use crate::domain::call::Call;
use crate::domain::fault::{Error, Fault};
use crate::domain::json::Json;
use crate::domain::run::options::RunLimits;
use crate::domain::utp::Route;

/// The reason why an agent is not defined, as a code and in words.
struct ProvisionRefusal {
    code: &'static str,
    message: String,
}

impl ProvisionRefusal {
    fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The result of a request: the entry changed or not, or the reason.
type Provisioned = Result<bool, ProvisionRefusal>;

impl Delegation {
    /// Defines an agent as the arguments of `provision_agent` say.
    pub(super) async fn provision(&self, call: &Call, args: &Value) -> Result<Json, Fault> {
        let agent_id = read_text(args, "agent_id");
        let result = match self.try_provision(call, args, agent_id.as_deref()).await? {
            Ok(is_updated) => json!({
                "status": "accepted",
                "agent_id": agent_id,
                "roster_updated": is_updated,
            }),
            Err(refusal) => json!({
                "status": "rejected",
                "agent_id": agent_id,
                "error_code": refusal.code,
                "message": refusal.message,
            }),
        };
        Ok(Json::from_value(&result))
    }

    async fn try_provision(
        &self,
        call: &Call,
        args: &Value,
        agent_id: Option<&str>,
    ) -> Result<Provisioned, Fault> {
        let action = read_text(args, "action").unwrap_or_default();
        if !matches!(action.as_str(), "ensure" | "create" | "derive") {
            let message = "action must be ensure, create or derive";
            return Ok(Err(ProvisionRefusal::new("invalid_action", message)));
        }
        let Some(agent_id) = agent_id else {
            return Ok(Err(ProvisionRefusal::new("missing_agent_id", "agent_id is missing")));
        };
        let existing = self.registry.find_agent_entry(&call.project, agent_id);
        if existing.is_some() && action == "ensure" {
            return Ok(Ok(false));
        }
        let creator = self.find_creator(call).await.map_err(super::into_fault)?;
        let built = self.build_definition(call, args, &action, agent_id, creator);
        let (definition, source) = match built {
            Ok(built) => built,
            Err(refusal) => return Ok(Err(refusal)),
        };
        if let Some(existing) = existing {
            // The same request may have been interrupted after it had defined the agent.
            let current = existing.definition.as_deref();
            let is_same = current.is_some_and(|current| current.profile == definition.profile);
            if is_same {
                return Ok(Ok(false));
            }
            let message = format!("there is an agent \"{agent_id}\" already; choose another id");
            return Ok(Err(ProvisionRefusal::new("agent_exists", message)));
        }
        let caller = call.caller();
        match self.roster.define_agent(&caller, definition, source.as_ref()).await {
            Ok(_) => Ok(Ok(true)),
            Err(Error::Refused { fault, .. }) => {
                Ok(Err(ProvisionRefusal::new(fault.code.utp_code(), fault.message)))
            }
            Err(error) => Err(super::into_fault(error)),
        }
    }

    /// Returns the agent that acts in the call, with the bounds of the run or turn in which it
    /// acts.
    async fn find_creator(&self, call: &Call) -> Result<Option<AgentDefinition>, Error> {
        let find = |id: &str| self.registry.find_agent_definition(&call.project, id);
        if let Some(turn) = self.utp.find_calling_turn(call).await? {
            let mut creator = find(&turn.agent_id);
            let lineage = turn.delegation.as_ref().map(|delegation| &delegation.lineage);
            if let (Some(creator), Some(lineage)) = (&mut creator, lineage) {
                let depth = lineage.max_depth.map(|max| max.saturating_sub(turn.depth));
                narrow_limits(creator, lineage.calls, lineage.tokens, depth);
            }
            return Ok(creator);
        }
        let Some(run) = self.utp.find_calling_run(call).await? else {
            return Ok(find(&Route::for_call(call).agent_id));
        };
        let lineage = run.lineage.as_deref();
        let active = run.active_agent_id();
        let agent_id = active.or_else(|| lineage.map(|lineage| lineage.agent_id.as_str()));
        let fallback =
            || AgentDefinition { agent_id: run.owner.agent.clone(), ..AgentDefinition::default() };
        let mut creator = agent_id.and_then(find).unwrap_or_else(fallback);
        if let Some(tools) = run.options.offered_tools() {
            creator.profile.tools = Some(tools.to_vec());
        }
        let (limits, default) = (&run.options.limits, RunLimits::default());
        let calls = (limits.calls != default.calls).then(|| u64::from(limits.calls));
        let tokens = (limits.tokens != default.tokens).then_some(limits.tokens);
        let depth = lineage.map(|lineage| lineage.max_depth.saturating_sub(lineage.depth));
        narrow_limits(&mut creator, calls, tokens, depth);
        Ok(Some(creator))
    }

    /// Builds the definition from the arguments. Also returns the agent that bounds it.
    fn build_definition(
        &self,
        call: &Call,
        args: &Value,
        action: &str,
        agent_id: &str,
        own: Option<AgentDefinition>,
    ) -> Result<(AgentDefinition, Option<AgentDefinition>), ProvisionRefusal> {
        let find = |id: &str| self.registry.find_agent_definition(&call.project, id);
        let source = match (action, read_text(args, "derived_from")) {
            ("derive", None) => {
                let message = "derived_from is missing: the id of the agent to start from";
                return Err(ProvisionRefusal::new("missing_derived_from", message));
            }
            ("derive", Some(id)) => Some(find(&id).ok_or_else(|| {
                let message = format!("there is no agent \"{id}\" to derive from");
                ProvisionRefusal::new("derived_from_not_found", message)
            })?),
            _ => None,
        };
        let template = match read_text(args, "profile_name") {
            Some(name) => Some(find(&name).ok_or_else(|| {
                let message = format!("there is no agent \"{name}\" with a profile");
                ProvisionRefusal::new("profile_not_found", message)
            })?),
            None => source.clone(),
        };
        if template.is_none() && !args["profile"].is_object() {
            let message = "profile or profile_name is missing";
            return Err(ProvisionRefusal::new("missing_profile", message));
        }
        // Limits that the arguments do not set are at most those of an agent below the source and
        // below the creator.
        let above = [&source, &own].into_iter().flatten();
        let bounds = above.fold(AgentLimits::default(), |bounds, agent| {
            bounds.lowered_to(&agent.profile.limits.one_level_below())
        });
        let mut base = template.map(|template| template.profile).unwrap_or_default();
        base.limits = base.limits.lowered_to(&bounds);
        let mut profile = overlay_profile(&base, &args["profile"])?;
        profile.limits = profile.limits.or_inherited(&bounds);
        // An agent bounds the agents that it defines.
        if let Some(own) = &own {
            profile = profile.narrowed_to(&own.profile).map_err(|problem| {
                ProvisionRefusal::new(
                    "exceeds_creator",
                    format!("the agent exceeds yours: {problem}"),
                )
            })?;
        }
        let worker_target = read_text(args, "worker_target");
        let definition = AgentDefinition {
            agent_id: agent_id.to_owned(),
            profile,
            driver: match worker_target.is_some() {
                true => AgentDriver::Worker,
                false => AgentDriver::Loop,
            },
            worker_target,
            ..AgentDefinition::default()
        };
        Ok((definition, source.or(own)))
    }
}

/// Lowers the limits of an agent to those of the run or turn in which it acts.
fn narrow_limits(
    agent: &mut AgentDefinition,
    calls: Option<u64>,
    tokens: Option<u64>,
    depth: Option<u32>,
) {
    let limits = &mut agent.profile.limits;
    let calls = calls.map(|calls| u32::try_from(calls).unwrap_or(u32::MAX));
    limits.calls = [limits.calls, calls].into_iter().flatten().min();
    limits.tokens = [limits.tokens, tokens].into_iter().flatten().min();
    limits.depth = [limits.depth, depth].into_iter().flatten().min();
}

/// Returns a text of the arguments that is not blank.
fn read_text(args: &Value, name: &str) -> Option<String> {
    let text = args[name].as_str()?.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Returns a profile with the fields of another in place of its own.
fn overlay_profile(base: &AgentProfile, fields: &Value) -> Result<AgentProfile, ProvisionRefusal> {
    let invalid = |error: serde_json::Error| {
        ProvisionRefusal::new("invalid_profile", format!("the profile cannot be read: {error}"))
    };
    let mut merged = serde_json::to_value(base).map_err(invalid)?;
    if let (Value::Object(merged), Value::Object(fields)) = (&mut merged, fields) {
        merged.extend(fields.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    serde_json::from_value(merged).map_err(invalid)
}
