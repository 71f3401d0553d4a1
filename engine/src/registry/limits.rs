//! Administration of usage limits.

use serde_json::json;

use crate::domain::caller::{Caller, Role};
use crate::domain::directory::DirectoryChange;
use crate::domain::directory::usage_limits::{EVERY_MEMBER, LimitKind, LimitValues, UsageLimit};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::check_tool_name;
use crate::registry::Admin;
use crate::registry::keys::check_identifier;

/// Maximum value of a limit. Higher ones would not fit into every store.
const MAX_LIMIT: u32 = 1_000_000_000;

impl Admin {
    /// Sets the limit of a member, or replaces it: an absent value sets no limit.
    pub async fn set_limit(
        &self,
        caller: &Caller,
        kind: LimitKind,
        name: &str,
        values: LimitValues,
    ) -> Result<UsageLimit, Error> {
        let project = self.limit_project(caller, kind, name)?;
        check_limit_name(kind, name)?;
        check_values(values)?;
        let updated_ms = self.core.clock.wall_ms();
        let name = name.to_owned();
        let limit = UsageLimit { project, kind, name, values, updated_ms };
        let subject = format!("{} {}", kind.as_str(), limit.name);
        let entry = self.registry.audit_entry(
            caller,
            &limit.project,
            "limit.set",
            &subject,
            &describe_values(values),
        );
        self.registry
            .change_directory(|_| {
                Ok((DirectoryChange::PutLimit(limit.clone()), Some(entry.clone())))
            })
            .await?;
        Ok(limit)
    }

    /// Removes the limit of a member.
    pub async fn remove_limit(
        &self,
        caller: &Caller,
        kind: LimitKind,
        name: &str,
    ) -> Result<(), Error> {
        let project = self.limit_project(caller, kind, name)?;
        let subject = format!("{} {name}", kind.as_str());
        let entry = self.registry.audit_entry(caller, &project, "limit.removed", &subject, "");
        self.registry
            .change_directory(|catalog| {
                let is_it = |limit: &UsageLimit| is_limit(limit, &project, kind, name);
                if !catalog.directory().limits.iter().any(is_it) {
                    return Err(limit_not_found(kind, name));
                }
                let (project, name) = (project.clone(), name.to_owned());
                Ok((DirectoryChange::DropLimit { project, kind, name }, Some(entry.clone())))
            })
            .await
    }

    /// Returns the stored limits of the caller's project, by kind and name. A caller that spans
    /// projects also gets the limits of the kind `project` in all other projects.
    pub fn limits(&self, caller: &Caller) -> Result<Vec<UsageLimit>, Error> {
        self.require_reader(caller)?;
        let catalog = self.registry.catalog();
        let is_shown = |limit: &&UsageLimit| {
            let is_project = limit.kind == LimitKind::Project;
            limit.project == caller.project || (is_project && caller.spans_projects())
        };
        let limits = catalog.directory().limits.iter();
        let mut limits: Vec<UsageLimit> = limits.filter(is_shown).cloned().collect();
        limits.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        Ok(limits)
    }

    /// Returns the stored limit of a member.
    pub fn limit(&self, caller: &Caller, kind: LimitKind, name: &str) -> Result<UsageLimit, Error> {
        let limits = self.limits(caller)?.into_iter();
        let mut found = limits.filter(|limit| limit.kind == kind && limit.name == name);
        found.next().ok_or_else(|| limit_not_found(kind, name))
    }

    /// Returns the project that a limit belongs to, if the caller administers it.
    fn limit_project(&self, caller: &Caller, kind: LimitKind, name: &str) -> Result<String, Error> {
        let project = if kind == LimitKind::Project { name } else { &caller.project };
        self.registry.require_operator(caller, Some(project))?;
        Ok(project.to_owned())
    }

    /// Requires the operator, or a key with the role admin or auditor.
    pub(crate) fn require_reader(&self, caller: &Caller) -> Result<(), Error> {
        if caller.roles.contains(Role::Auditor) && !caller.may_administer() {
            return Ok(());
        }
        self.registry.require_operator(caller, None)
    }
}

fn is_limit(limit: &UsageLimit, project: &str, kind: LimitKind, name: &str) -> bool {
    limit.project == project && limit.kind == kind && limit.name == name
}

fn check_limit_name(kind: LimitKind, name: &str) -> Result<(), Error> {
    if name == EVERY_MEMBER {
        return Ok(());
    }
    if name.contains('*') {
        let message = format!(
            "\"{name}\" is no {}'s name: a limit is for one {0}, or for each with *",
            kind.as_str()
        );
        return Err(Error::refused(Code::ValidationError, message));
    }
    match kind {
        LimitKind::Tool => check_tool_name(name)
            .map_err(|error| Error::refused(Code::ValidationError, error.to_string())),
        LimitKind::User => {
            let fits = (1..=255).contains(&name.len()) && !name.chars().any(char::is_control);
            let message = "a user's name has 1 to 255 bytes and no control characters";
            fits.then_some(()).ok_or_else(|| Error::refused(Code::ValidationError, message))
        }
        LimitKind::Agent | LimitKind::Project => check_identifier(kind.as_str(), name),
    }
}

fn check_values(values: LimitValues) -> Result<(), Error> {
    let refused = |field: &str, message: String| {
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        Err(fault.with_detail(json!({ "pointer": format!("/{field}") })).into())
    };
    if values.is_empty() {
        let message = "give at least one of per_minute, max_open and max_parallel; DELETE removes \
                       a limit";
        return refused("", message.to_owned());
    }
    let fields = [
        ("per_minute", values.per_minute),
        ("max_open", values.max_open),
        ("max_parallel", values.max_parallel),
    ];
    for (field, value) in fields {
        if value.is_some_and(|value| !(1..=MAX_LIMIT).contains(&value)) {
            let message = format!(
                "{field} must be from 1 to {MAX_LIMIT}; to stop calls altogether, use a switch"
            );
            return refused(field, message);
        }
    }
    Ok(())
}

fn describe_values(values: LimitValues) -> String {
    let fields = [
        ("per_minute", values.per_minute),
        ("max_open", values.max_open),
        ("max_parallel", values.max_parallel),
    ];
    let set = fields.into_iter().filter_map(|(field, value)| Some(format!("{field} {}", value?)));
    set.collect::<Vec<_>>().join(", ")
}

fn limit_not_found(kind: LimitKind, name: &str) -> Error {
    let excerpt: String = name.chars().take(128).collect();
    let message = format!("there is no limit of {} \"{excerpt}\"", kind.as_str());
    Error::not_found(message, "toolcrib limits ls lists the limits")
}
