//! Secrets by reference: `env:NAME` and `file:/path`.
//!
//! A definition names a secret and never contains it. The operator decides which tool may use
//! which secret; the source reads it at the moment of execution, so that a rotated file is seen
//! by the next call; and everything that comes back is redacted ([`redaction`]).

pub mod redaction;
use std::fmt;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use schemars::JsonSchema;
use serde::Deserialize;
use toolcrib::domain::access_rules::pattern_matches;

/// Maximum size of a file with a secret.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The name of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SecretReference {
    /// A variable of the server's environment.
    Env(String),
    /// A file on the server's machine, by its absolute path.
    File(PathBuf),
}

impl SecretReference {
    /// Reads `env:NAME` or `file:/path`. Returns `None` for any other text, which is a plain value.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(name) = text.strip_prefix("env:") {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let is_name = !name.is_empty() && name.len() <= 128 && name.chars().all(is_plain);
            return is_name.then(|| Self::Env(name.to_owned()));
        }
        let path = Path::new(text.strip_prefix("file:")?);
        // A path that goes up could leave the directory that a pattern allows.
        let is_direct =
            path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        let has_dots = text.split('/').any(|part| part == "." || part == "..");
        (path.is_absolute() && is_direct && !has_dots).then(|| Self::File(path.to_owned()))
    }

    /// Reads the secret. The error names the reference and never a part of the secret.
    pub fn read(&self) -> Result<String, String> {
        match self {
            Self::Env(name) => {
                // The server's own variables may contain its keys.
                if name.to_ascii_uppercase().starts_with("TOOLCRIB_") {
                    return Err(format!("{self} is a variable of the server itself"));
                }
                let value = std::env::var(name).ok().filter(|value| !value.is_empty());
                value.ok_or_else(|| format!("{self} is not set in the server's environment"))
            }
            Self::File(path) => self.read_file(path),
        }
    }

    fn read_file(&self, path: &Path) -> Result<String, String> {
        let unreadable = |error: std::io::Error| format!("{self} cannot be read: {}", error.kind());
        let file = std::fs::File::open(path).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err(format!("{self} is not a regular file"));
        }
        let mut text = String::new();
        let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
        if read as u64 > MAX_FILE_BYTES {
            return Err(format!("{self} is larger than {MAX_FILE_BYTES} bytes"));
        }
        // Editors and `echo` end a file with a line break that is not part of the secret.
        let secret = text.trim_end_matches(['\n', '\r']);
        if secret.is_empty() {
            return Err(format!("{self} is empty"));
        }
        Ok(secret.to_owned())
    }
}

impl fmt::Display for SecretReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// Allows tools to use secrets.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SecretRule {
    /// Patterns of the tools: `crm.*`. The tools of an MCP server are `NAME.*`.
    pub tools: Vec<String>,
    /// Patterns of the references that these tools may use: `env:CRM_*`, `file:/run/secrets/crm/*`.
    pub allow: Vec<String>,
}

/// The operator's rules on secrets. Without a rule, no tool may use any.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SecretPolicy(Vec<SecretRule>);

impl SecretPolicy {
    /// Creates the policy, or returns an error message about a rule.
    pub fn new(rules: Vec<SecretRule>) -> Result<Self, String> {
        for rule in &rules {
            if rule.tools.is_empty() || rule.allow.is_empty() {
                return Err("a rule needs tools and allow".to_owned());
            }
            let is_reference =
                |text: &String| text.starts_with("env:") || text.starts_with("file:/");
            if let Some(other) = rule.allow.iter().find(|text| !is_reference(text)) {
                return Err(format!("allow: \"{other}\" must begin with env: or file:/"));
            }
        }
        Ok(Self(rules))
    }

    /// Returns true if a tool may use a secret.
    pub fn allows(&self, tool: &str, reference: &SecretReference) -> bool {
        let reference = reference.to_string();
        self.0.iter().any(|rule| {
            rule.tools.iter().any(|pattern| pattern_matches(pattern, tool))
                && rule.allow.iter().any(|pattern| pattern_matches(pattern, &reference))
        })
    }

    /// Reads a secret for a tool. The error says why there is none.
    pub fn read(&self, tool: &str, reference: &SecretReference) -> Result<String, String> {
        if !self.allows(tool, reference) {
            return Err(format!(
                "{tool} may not use {reference}: no rule of [[secrets]] allows it"
            ));
        }
        reference.read()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn policy() -> SecretPolicy {
        let rule = |tools: &str, allow: &str| SecretRule {
            tools: vec![tools.into()],
            allow: vec![allow.into()],
        };
        SecretPolicy::new(vec![
            rule("crm.*", "env:CRM_*"),
            rule("crm.read", "file:/run/secrets/crm/*"),
        ])
        .unwrap()
    }

    #[test]
    fn references_are_recognized_and_paths_cannot_go_up() {
        let env = SecretReference::parse("env:CRM_KEY").unwrap();
        assert_eq!(env, SecretReference::Env("CRM_KEY".into()));
        let file = SecretReference::parse("file:/run/secrets/crm/key").unwrap();
        assert_eq!(file.to_string(), "file:/run/secrets/crm/key");
        for plain in [
            "",
            "env:",
            "env:A B",
            "environment",
            "file:relative",
            "file:",
            "file:/run/secrets/crm/../../../etc/shadow",
            "file:/run/./x",
            "Bearer env:CRM_KEY",
        ] {
            assert_eq!(SecretReference::parse(plain), None, "{plain}");
        }
    }

    #[test]
    fn a_secret_is_allowed_per_tool() {
        let (policy, parse) = (policy(), |text| SecretReference::parse(text).unwrap());
        assert!(policy.allows("crm.read", &parse("env:CRM_KEY")));
        assert!(policy.allows("crm.read", &parse("file:/run/secrets/crm/key")));
        assert!(!policy.allows("crm.write", &parse("file:/run/secrets/crm/key")));
        assert!(!policy.allows("mail.send", &parse("env:CRM_KEY")));
        assert!(!policy.allows("crm.read", &parse("env:PATH")));
        assert!(!SecretPolicy::default().allows("crm.read", &parse("env:CRM_KEY")));
        assert!(SecretPolicy::new(vec![SecretRule::default()]).is_err());
    }

    #[test]
    fn a_file_is_read_anew_each_time_without_its_line_break() {
        let directory = std::env::temp_dir().join(format!("secret-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("key");
        let reference = SecretReference::parse(&format!("file:{}", path.display())).unwrap();
        assert!(reference.read().unwrap_err().contains("cannot be read"));
        for secret in ["first", "second"] {
            std::fs::write(&path, format!("{secret}\n")).unwrap();
            assert_eq!(reference.read().unwrap(), secret);
        }
        std::fs::write(&path, "\n").unwrap();
        assert!(reference.read().unwrap_err().ends_with("is empty"));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
