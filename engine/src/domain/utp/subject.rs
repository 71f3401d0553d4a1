//! Subjects: `cg.<version>.<project>.<channel>.<category>.<component>.<target>.<suffix…>`. Pure.

use super::is_token;

/// The parts of a subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject<'a> {
    /// Protocol version, such as `v1r3`.
    pub version: &'a str,
    /// Id of the project.
    pub project: &'a str,
    /// Channel inside the project, such as `public`.
    pub channel: &'a str,
    /// Kind of message: `cmd` for commands, `evt` for events, ….
    pub category: &'a str,
    /// Kind of addressee or sender: `tool`, `agent`, ….
    pub component: &'a str,
    /// Name of the tool service, worker or agent.
    pub target: &'a str,
    /// All remaining tokens, with their dots.
    pub suffix: &'a str,
}

/// Parses a subject; `None` if it is not one of UTP's.
pub fn parse(text: &str) -> Option<Subject<'_>> {
    parse_prefix(text).filter(|parts| !parts.suffix.is_empty())
}

/// Parses a subject that may end with its target: then the suffix is empty.
pub fn parse_prefix(text: &str) -> Option<Subject<'_>> {
    let mut tokens = text.splitn(8, '.');
    let mut next = || tokens.next().filter(|token| !token.is_empty());
    if next()? != "cg" {
        return None;
    }
    Some(Subject {
        version: next()?,
        project: next()?,
        channel: next()?,
        category: next()?,
        component: next()?,
        target: next()?,
        suffix: next().unwrap_or_default(),
    })
}

/// Returns true if this can be the subject of a command for a tool of this project.
pub fn is_command_of(text: &str, project: &str) -> bool {
    let is_valid = text.split('.').all(is_token);
    parse(text).is_some_and(|parts| {
        is_valid && parts.project == project && (parts.category, parts.component) == ("cmd", "tool")
    })
}

/// Validates the target of a tool's commands and returns it in full: `cmd.tool.x.y` is short for
/// `cg.<version>.{project_id}.{channel_id}.cmd.tool.x.y`.
pub fn expand_target(text: &str, version: &str, project: &str) -> Result<String, String> {
    let full = match text.starts_with("cmd.") {
        true => format!("cg.{version}.{{project_id}}.{{channel_id}}.{text}"),
        false => text.replace("{version}", version),
    };
    let expected = "cg.<version>.{project_id}.{channel_id}.cmd.tool.<target>.<suffix…>";
    let Some(parts) = parse(&full) else {
        return Err(format!("target_subject \"{text}\" must have the form {expected}"));
    };
    if (parts.category, parts.component) != ("cmd", "tool") {
        let is = format!("{}.{}", parts.category, parts.component);
        return Err(format!("target_subject must be cmd.tool.*, not {is}.*"));
    }
    if parts.version != version {
        let found = parts.version;
        return Err(format!(
            "target_subject is of version \"{found}\"; this server publishes under \"{version}\""
        ));
    }
    let fixed = full.replace("{project_id}", "p");
    let fixed = fixed.replace("{channel_id}", "c").replace("{agent_id}", "a");
    if !fixed.split('.').all(is_token) || fixed.contains(['{', '}']) {
        return Err(format!(
            "target_subject \"{text}\" has an empty part, a blank or a wildcard in it; only \
             {{project_id}}, {{channel_id}} and {{agent_id}} are filled in"
        ));
    }
    if parts.project != "{project_id}" && parts.project != project {
        return Err(format!("target_subject names project \"{}\"", parts.project));
    }
    Ok(full)
}

/// Fills in a template under this protocol version, even if it was written for another one. Fails
/// if a value is not a valid token of a subject.
pub fn fill_template(
    template: &str,
    version: &str,
    project: &str,
    channel: &str,
    agent_id: &str,
) -> Result<String, String> {
    let rest = template.splitn(3, '.').nth(2).unwrap_or_default();
    let template = &format!("cg.{{version}}.{rest}");
    let variables = [
        ("{version}", version),
        ("{project_id}", project),
        ("{channel_id}", channel),
        ("{agent_id}", agent_id),
    ];
    let mut subject = template.to_owned();
    for (name, value) in variables.into_iter().filter(|(name, _)| template.contains(name)) {
        if !is_token(value) {
            let field = name.trim_matches(['{', '}']);
            return Err(format!("{field} \"{value}\" cannot be part of a NATS subject"));
        }
        subject = subject.replace(name, value);
    }
    Ok(subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_parsed_into_parts() {
        let parts = parse("cg.v1r3.p.public.cmd.tool.search.run.x").unwrap();
        assert_eq!((parts.target, parts.suffix), ("search", "run.x"));
        for other in ["cg.v1r3.p.public.cmd.tool.search", "xx.v1r3.p.c.cmd.tool.a.b", "", "cg....."]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_command_belongs_to_the_project_in_its_subject() {
        assert!(is_command_of("cg.v1r3.p.public.cmd.tool.search.run", "p"));
        for other in [
            "cg.v1r3.q.public.cmd.tool.search.run",
            "cg.v1r3.p.public.cmd.agent.w1.wakeup",
            "cg.v1r3.p.public.evt.agent.ada.state",
            "cg.v1r3.p.*.cmd.tool.search.run",
            "cg.v1r3.p.public.cmd.tool.search.>",
            "cg.v1r3.p.public.cmd.tool.search",
            "/v1/tool_results",
            "",
        ] {
            assert!(!is_command_of(other, "p"), "{other}");
        }
    }

    #[test]
    fn targets_are_expanded_to_tool_command_subjects() {
        let full = "cg.v1r3.{project_id}.{channel_id}.cmd.tool.search.run";
        assert_eq!(expand_target(full, "v1r3", "p").as_deref(), Ok(full));
        let short = expand_target("cmd.tool.search.run", "v1r3", "p").unwrap();
        assert_eq!(short, full, "the short form is expanded");
        let template = "cg.{version}.{project_id}.{channel_id}.cmd.tool.search.run";
        assert_eq!(expand_target(template, "v1r3", "p").as_deref(), Ok(full));
        assert_eq!(
            fill_template(&short, "v1r3", "p", "c", "a").unwrap(),
            "cg.v1r3.p.c.cmd.tool.search.run"
        );
        // The suffix may have several parts.
        let long = expand_target("cmd.tool.search.run.fast", "v1r3", "p").unwrap();
        assert_eq!(
            fill_template(&long, "v1r3", "p", "c", "a").unwrap(),
            "cg.v1r3.p.c.cmd.tool.search.run.fast"
        );
        // A server with a newer version has its streams under that version.
        assert_eq!(
            fill_template(full, "v1r4", "p", "c", "a").unwrap(),
            "cg.v1r4.p.c.cmd.tool.search.run"
        );
        for bad in [
            "zzz.cmd.tool.",
            "cmd.tool.search",
            "cg.v1r3.{project_id}.{channel_id}.cmd.sys.pmo.internal",
            "cg.v1r3.other.{channel_id}.cmd.tool.search.run",
            "cg.v1r3.{project_id}.{channel_id}.cmd.tool.search.*",
            "cg.v1r3.{project_id}.{channel_id}.cmd.tool.sea rch.run",
            "cg.v1r3.{project_id}.{channel_id}.cmd.tool.{what}.run",
            "cg.v1r3.{project_id}.{channel_id}.cmd.tool..run",
            "cg.v1r3.{project_id}.{channel_id}.cmd.tool.search.run..fast",
            "cmd.tool.search.run.",
            "cmd.tool.search.run.>",
            "cg.v1r4.{project_id}.{channel_id}.cmd.tool.search.run",
        ] {
            assert!(expand_target(bad, "v1r3", "p").is_err(), "{bad}");
        }
        assert!(fill_template(&short, "v1r3", "p.q", "c", "a").is_err());
    }
}
