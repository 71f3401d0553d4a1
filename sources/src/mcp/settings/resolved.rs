//! Resolves settings against the server's environment and files at the moment of use. Only the
//! variables and files that the settings name are read.

use std::cell::RefCell;
use std::collections::BTreeMap;

use toolcrib_protocol::secrets::SecretReference;
use toolcrib_protocol::secrets::redaction::SecretRedactor;

use crate::mcp::settings::McpServerSettings;

/// Variables that every program needs to run. None of them is secret.
const BASE_VARIABLES: [&str; 10] =
    ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL", "TERM", "SYSTEMROOT"];

/// Values with fewer bytes are not redacted: they would match in ordinary words.
const SHORT: usize = 6;

/// Settings with all variables expanded, and the secrets to redact.
#[derive(Default)]
pub struct ResolvedSettings {
    pub command: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub url: String,
    pub headers: BTreeMap<String, String>,
    pub client_id: Option<String>,
    pub client_secret: Option<String>,
    pub private_key: Option<String>,
    secrets: Vec<(String, String)>,
    result_secrets: SecretRedactor,
}

/// Words in the name of a variable or header whose value is a secret, even if it is written out.
const SECRET_WORDS: [&str; 7] =
    ["key", "token", "secret", "password", "credential", "authorization", "cookie"];

fn has_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET_WORDS.iter().any(|word| name.contains(word))
}

impl ResolvedSettings {
    /// Expands the variables that the settings name.
    pub fn resolve(settings: &McpServerSettings) -> Result<Self, String> {
        Self::resolve_with(settings, |name| std::env::var(name).ok())
    }

    fn resolve_with(
        settings: &McpServerSettings,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let mut resolved = Self::default();
        // Every value taken from the environment is treated as a secret.
        let put = RefCell::new(Vec::new());
        let fill = |text: &str| {
            if let Some(reference) = SecretReference::parse(text) {
                let value = reference.read()?;
                put.borrow_mut().push((reference.to_string(), value.clone()));
                return Ok(value);
            }
            expand_variables(text, |name| {
                let value = match SecretReference::parse(name) {
                    Some(reference) => reference.read().ok(),
                    None => lookup(name),
                };
                put.borrow_mut().extend(value.clone().map(|value| (name.to_owned(), value)));
                value
            })
        };
        resolved.command = fill(settings.command.as_deref().unwrap_or_default())?;
        resolved.url = fill(settings.url.as_deref().unwrap_or_default())?;
        resolved.args = settings.args.iter().map(|arg| fill(arg)).collect::<Result<_, _>>()?;
        for (name, value) in &settings.headers {
            resolved.headers.insert(name.clone(), fill(value)?);
        }
        if let Some(oauth) = &settings.oauth {
            let fill_optional = |text: &Option<String>| text.as_deref().map(fill).transpose();
            resolved.client_id = fill_optional(&oauth.client_id)?;
            resolved.client_secret = fill_optional(&oauth.client_secret)?;
            resolved.private_key = fill_optional(&oauth.private_key)?;
        }
        let defaults =
            BASE_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), lookup(name)?)));
        resolved.env.extend(defaults);
        for (name, value) in &settings.env {
            resolved.env.insert(name.clone(), fill(value)?);
        }
        for name in &settings.env_from {
            let value = lookup(name).ok_or_else(|| not_set(name))?;
            resolved.env.insert(name.clone(), value);
        }
        let of_settings = settings.env.keys().chain(&settings.env_from);
        let secrets = of_settings.filter_map(|name| Some((name, resolved.env.get(name)?)));
        let secrets = secrets.chain(resolved.headers.iter());
        let secrets = secrets.map(|(name, value)| (name.clone(), value.clone()));
        let client_secrets =
            [("client_secret", &resolved.client_secret), ("key", &resolved.private_key)];
        let client_secrets =
            client_secrets.map(|(name, value)| Some((name.to_owned(), value.clone()?)));
        let hidden = url_secrets(&resolved.url).into_iter().map(|part| ("url".to_owned(), part));
        let of_client: Vec<(String, String)> = client_secrets.into_iter().flatten().collect();
        let references = put.take();
        let all: Vec<(String, String)> =
            secrets.chain(of_client.clone()).chain(hidden).chain(references.clone()).collect();
        resolved.set_secrets(all);
        resolved.set_result_secrets(settings, references.into_iter().chain(of_client).collect());
        Ok(resolved)
    }

    /// Sets the secrets to redact from results: values by reference, and those whose name says that
    /// they are secret. Other values that are written out may be ordinary words, which results
    /// need.
    fn set_result_secrets(&mut self, settings: &McpServerSettings, named: Vec<(String, String)>) {
        let inherited = settings.env_from.iter().filter_map(|name| self.env.get_key_value(name));
        let written = self.env.iter().chain(&self.headers);
        let written = written.filter(|(name, _)| has_secret_name(name));
        let of_env = inherited.chain(written).map(|(name, value)| (name.clone(), value.clone()));
        let of_url = url_secrets(&self.url).into_iter().map(|part| ("url".to_owned(), part));
        let mut secrets = SecretRedactor::default();
        for (name, value) in named.into_iter().chain(of_env).chain(of_url) {
            if BASE_VARIABLES.contains(&name.as_str()) {
                continue;
            }
            let bare = value.split_once(' ').map(|(_, bare)| bare);
            let lines = value.lines().map(str::trim);
            let forms = [value.as_str()].into_iter().chain(bare).chain(lines);
            forms.filter(|form| form.len() >= SHORT).for_each(|form| secrets.add(form));
        }
        self.result_secrets = secrets;
    }

    /// Returns the secrets to redact from results, in every encoding.
    pub fn result_secrets(&self) -> &SecretRedactor {
        &self.result_secrets
    }

    /// Sets the secrets to redact, in all the forms in which they may appear.
    fn set_secrets(&mut self, mut values: Vec<(String, String)>) {
        let longest_first = |(_, value): &(String, String)| std::cmp::Reverse(value.len());
        values.sort_by_key(longest_first);
        let formed = values.into_iter().flat_map(|(name, value)| {
            secret_variants(&value).into_iter().map(move |variant| (name.clone(), variant))
        });
        self.secrets = formed.filter(|(_, variant)| variant.len() >= SHORT).collect();
        // The longest first: one secret may be part of another.
        self.secrets.sort_by_key(longest_first);
    }

    /// Returns the length of the longest form of a secret.
    pub fn longest_secret(&self) -> usize {
        self.secrets.first().map_or(0, |(_, variant)| variant.len())
    }

    /// Removes the beginning of a secret from the end of a truncated text.
    pub fn trim_partial_secret<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        let starts = |variant: &str| {
            let max_length = variant.len().saturating_sub(1).min(text.len());
            (1..=max_length).rev().find(|length| text.ends_with(&variant.as_bytes()[..*length]))
        };
        let longest = self.secrets.iter().filter_map(|(_, variant)| starts(variant)).max();
        &text[..text.len() - longest.unwrap_or(0)]
    }

    /// Creates settings with nothing but secrets.
    #[cfg(test)]
    pub fn with_secrets(values: &[(&str, &str)]) -> Self {
        let mut resolved = Self::default();
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        resolved.set_secrets(values.collect());
        resolved
    }

    /// Replaces secrets in a text with the names of their settings.
    pub fn redact(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, variant) in &self.secrets {
            if text.contains(variant.as_str()) {
                text = text.replace(variant.as_str(), &format!("[{name}]"));
            }
        }
        text
    }
}

/// Returns the forms in which a value may appear: unchanged, without the word before it (`Bearer
/// …`), as JSON writes it, and each line of a value with several lines.
fn secret_variants(value: &str) -> Vec<String> {
    let mut variants = vec![value.to_owned()];
    variants.extend(value.split_once(' ').map(|(_, bare)| bare.to_owned()));
    let lines = value.lines().map(str::trim).filter(|line| *line != value);
    variants.extend(lines.map(str::to_owned));
    for plain in variants.clone() {
        let written = serde_json::Value::from(plain.as_str()).to_string();
        let written = written[1..written.len() - 1].to_owned();
        variants.extend(Some(escape_non_ascii(&written)).filter(|ascii| *ascii != written));
        variants.extend(Some(written).filter(|written| *written != plain));
    }
    variants
}

/// Escapes the non-ASCII characters of a JSON text, as many serializers do.
fn escape_non_ascii(written: &str) -> String {
    let mut units = [0; 2];
    let escaped = written.chars().map(|character| match character.is_ascii() {
        true => character.to_string(),
        false => {
            let units = character.encode_utf16(&mut units).iter();
            units.map(|unit| format!("\\u{unit:04x}")).collect()
        }
    });
    escaped.collect()
}

/// Returns the parts of a URL that may be secret: the values of its query, and a password.
fn url_secrets(url: &str) -> Vec<String> {
    let Ok(url) = reqwest::Url::parse(url) else { return Vec::new() };
    let query_values = url.query_pairs().map(|(_, value)| value.into_owned());
    // Also in their percent-encoded form.
    let written = url.query().unwrap_or_default().split('&');
    let written = written.filter_map(|pair| Some(pair.split_once('=')?.1.to_owned()));
    query_values.chain(written).chain(url.password().map(str::to_owned)).collect()
}

fn not_set(name: &str) -> String {
    format!("the variable {name} is not set in the server's environment")
}

/// Expands `${NAME}`, `${env:NAME}` and `${NAME:-default}`, as desktop clients write them, and
/// `${file:/path}`.
fn expand_variables(text: &str, lookup: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut output = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((inside, behind)) = after.split_once('}') else { break };
        output.push_str(before);
        let inside = inside.strip_prefix("env:").unwrap_or(inside);
        let (name, otherwise) = match inside.split_once(":-") {
            Some((name, otherwise)) => (name, Some(otherwise)),
            None => (inside, None),
        };
        let value = lookup(name).or_else(|| otherwise.map(str::to_owned));
        output.push_str(&value.ok_or_else(|| not_set(name))?);
        rest = behind;
    }
    output.push_str(rest);
    Ok(output)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn lookup(name: &str) -> Option<String> {
        let variables = [("TOKEN", "secret-token"), ("PATH", "/bin"), ("OTHER", "not-for-you")];
        variables
            .into_iter()
            .find(|(variable, _)| *variable == name)
            .map(|(_, value)| value.to_owned())
    }

    #[test]
    fn only_named_variables_are_resolved_and_secrets_are_redacted() {
        let mut settings =
            McpServerSettings { command: Some("x".into()), ..McpServerSettings::default() };
        settings.env.insert("A".into(), "b ${TOKEN} ${env:NONE:-c}".into());
        settings.headers.insert("authorization".into(), "Bearer ${TOKEN}".into());
        let resolved_settings = ResolvedSettings::resolve_with(&settings, lookup).unwrap();
        let env: Vec<(&str, &str)> =
            resolved_settings.env.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(env, [("A", "b secret-token c"), ("PATH", "/bin")]);
        assert_eq!(resolved_settings.redact("said secret-token"), "said [authorization]");
        settings.args.push("--key=${OTHER}".into());
        settings.url = Some("http://u:opensesame@h/mcp?key=${TOKEN}&page=literally".into());
        let resolved_settings = ResolvedSettings::resolve_with(&settings, lookup).unwrap();
        let redacted = resolved_settings
            .redact(&format!("{} {}", resolved_settings.args[0], resolved_settings.url));
        for secret in ["not-for-you", "opensesame", "secret-token", "literally"] {
            assert!(!redacted.contains(secret), "{redacted}");
        }
        let multi_line_secret = "-----BEGIN KEY-----\nfirst line of it\n\"quoted\" Schlüssel\n";
        let resolved_settings = ResolvedSettings::with_secrets(&[("KEY", multi_line_secret)]);
        let json = serde_json::to_string(multi_line_secret).unwrap();
        let ascii = json.replace('ü', "\\u00fc");
        for spelling in
            [multi_line_secret, "first line of it", &json, &ascii, r#"\"quoted\" Schlüssel"#]
        {
            let redacted = resolved_settings.redact(&format!("it is: {spelling}"));
            assert!(!redacted.contains("first") && !redacted.contains("quoted"), "{redacted}");
        }
        settings.env_from.push("MISSING".into());
        assert!(ResolvedSettings::resolve_with(&settings, lookup).is_err());
    }
}
