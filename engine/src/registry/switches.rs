//! Administration of kill switches, and the check of requests against them.

use serde_json::json;

use crate::domain::access_rules::check_pattern;
use crate::domain::caller::Caller;
use crate::domain::directory::DirectoryChange;
use crate::domain::directory::kill_switches::{KillSwitch, SwitchKind, source_names};
use crate::domain::fault::{Code, Error, Fault};
use crate::domain::tool::Executor;
use crate::registry::catalog::Catalog;
use crate::registry::keys::check_identifier;
use crate::registry::{Admin, Upstreams};

/// Maximum length of a reason.
const MAX_REASON_BYTES: usize = 1_000;

impl Catalog {
    /// Refuses a caller that is switched off, by itself or with its project.
    pub(crate) fn check_caller_is_on(&self, caller: &Caller) -> Result<(), Fault> {
        let above = caller.attributes.callers_above().map(|above| &above.agent);
        let mut agents = std::iter::once(&caller.agent).chain(above);
        let switch =
            agents.find_map(|agent| self.switches().find_for_agent(&caller.project, agent));
        switch.map_or(Ok(()), |switch| Err(switch.to_fault()))
    }
}

impl Upstreams {
    /// Returns true if neither the caller nor the upstream that a name belongs to is switched off.
    pub fn is_on(&self, caller: &Caller, name: &str) -> bool {
        let catalog = self.registry.catalog();
        let (switches, project) = (catalog.switches(), &caller.project);
        let sources = source_names(Executor::MCP, name);
        let is_off = |source: &str| switches.find_for_source(project, source).is_some();
        switches.is_empty()
            || (catalog.check_caller_is_on(caller).is_ok() && !sources.into_iter().any(is_off))
    }
}

impl Admin {
    /// Switches a subject off, or replaces the reason. New calls are refused, and open ones end.
    pub async fn set_switch(
        &self,
        caller: &Caller,
        kind: SwitchKind,
        name: &str,
        reason: &str,
    ) -> Result<KillSwitch, Error> {
        let project = self.switch_project(caller, kind, name)?;
        check_switch_name(kind, name)?;
        check_reason(reason)?;
        let switch = KillSwitch {
            project,
            kind,
            name: name.to_owned(),
            reason: reason.to_owned(),
            set_by: caller.agent.clone(),
            set_ms: self.core.clock.wall_ms(),
        };
        let subject = format!("{} {name}", kind.as_str());
        let entry =
            self.registry.audit_entry(caller, &switch.project, "switch.set", &subject, reason);
        self.registry
            .change_directory(|_| {
                Ok((DirectoryChange::PutSwitch(switch.clone()), Some(entry.clone())))
            })
            .await?;
        Ok(switch)
    }

    /// Removes a switch: its subject is on again. Calls that it ended stay ended.
    pub async fn remove_switch(
        &self,
        caller: &Caller,
        kind: SwitchKind,
        name: &str,
    ) -> Result<(), Error> {
        let project = self.switch_project(caller, kind, name)?;
        let subject = format!("{} {name}", kind.as_str());
        let entry = self.registry.audit_entry(caller, &project, "switch.removed", &subject, "");
        self.registry
            .change_directory(|catalog| {
                let is_it = |switch: &KillSwitch| {
                    switch.project == project && switch.kind == kind && switch.name == name
                };
                if !catalog.directory().switches.iter().any(is_it) {
                    return Err(switch_not_found(kind, name));
                }
                let (project, name) = (project.clone(), name.to_owned());
                Ok((DirectoryChange::DropSwitch { project, kind, name }, Some(entry.clone())))
            })
            .await
    }

    /// Returns the switches of the caller's project, by kind and name. A caller that spans projects
    /// also gets the switches of the kind `project` in all other projects.
    pub fn switches(&self, caller: &Caller) -> Result<Vec<KillSwitch>, Error> {
        self.require_reader(caller)?;
        let catalog = self.registry.catalog();
        let is_shown = |switch: &&KillSwitch| {
            let is_project = switch.kind == SwitchKind::Project;
            switch.project == caller.project || (is_project && caller.spans_projects())
        };
        let switches = catalog.directory().switches.iter();
        let mut switches: Vec<KillSwitch> = switches.filter(is_shown).cloned().collect();
        switches.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        Ok(switches)
    }

    /// Returns one switch.
    pub fn switch(
        &self,
        caller: &Caller,
        kind: SwitchKind,
        name: &str,
    ) -> Result<KillSwitch, Error> {
        let switches = self.switches(caller)?.into_iter();
        let mut found = switches.filter(|switch| switch.kind == kind && switch.name == name);
        found.next().ok_or_else(|| switch_not_found(kind, name))
    }

    /// Returns the number of switches that are set in all projects, by kind.
    pub fn switch_counts(&self) -> [(&'static str, usize); 4] {
        let catalog = self.registry.catalog();
        let switches = &catalog.directory().switches;
        SwitchKind::ALL.map(|kind| {
            (kind.as_str(), switches.iter().filter(|switch| switch.kind == kind).count())
        })
    }

    /// Returns the project that a switch belongs to, if the caller administers it.
    fn switch_project(
        &self,
        caller: &Caller,
        kind: SwitchKind,
        name: &str,
    ) -> Result<String, Error> {
        let project = if kind == SwitchKind::Project { name } else { &caller.project };
        self.registry.require_operator(caller, Some(project))?;
        Ok(project.to_owned())
    }
}

fn check_switch_name(kind: SwitchKind, name: &str) -> Result<(), Error> {
    let invalid = |message: String| Error::refused(Code::ValidationError, message);
    if kind.has_patterns() {
        return check_pattern(name).map_err(invalid);
    }
    if name.contains('*') {
        let message = format!(
            "a switch of the kind {} names one {0}; patterns are for tools and sources",
            kind.as_str()
        );
        return Err(invalid(message));
    }
    check_identifier(kind.as_str(), name)
}

fn check_reason(reason: &str) -> Result<(), Error> {
    let is_empty = reason.trim().is_empty();
    if is_empty || reason.len() > MAX_REASON_BYTES || reason.chars().any(char::is_control) {
        let message = format!(
            "reason must be 1 to {MAX_REASON_BYTES} bytes without control characters: callers \
             and models read it"
        );
        let fault = Fault::new(Code::ValidationError, message).without_side_effect();
        return Err(fault.with_detail(json!({ "pointer": "/reason" })).into());
    }
    Ok(())
}

fn switch_not_found(kind: SwitchKind, name: &str) -> Error {
    let excerpt: String = name.chars().take(128).collect();
    let message = format!("there is no switch for {} \"{excerpt}\"", kind.as_str());
    Error::not_found(message, "toolcrib switch ls lists the switches")
}
