//! What is taken from the server's environment, at the moment it is needed: only what is named.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::settings::McpSettings;

/// What every program needs to run at all, and nothing that is secret.
const USUAL: [&str; 10] =
    ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SHELL", "TERM", "SYSTEMROOT"];

/// Shorter values are not taken out of what a program says: they would be found in every word.
const SHORT: usize = 6;

/// Settings with everything filled in, and what must not be repeated from it.
#[derive(Default)]
pub struct Filled {
    pub command: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub url: String,
    pub headers: BTreeMap<String, String>,
    pub client_id: Option<String>,
    pub client_secret: Option<String>,
    pub private_key: Option<String>,
    secrets: Vec<(String, String)>,
}

impl Filled {
    /// Looks up what the settings name.
    pub fn of(settings: &McpSettings) -> Result<Self, String> {
        Self::with(settings, |name| std::env::var(name).ok())
    }

    fn with(settings: &McpSettings, look: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let mut filled = Self::default();
        // Whatever is put somewhere from the environment is nobody's to read there.
        let put = RefCell::new(Vec::new());
        let fill = |text: &str| {
            filled_in(text, |name| {
                let value = look(name);
                put.borrow_mut().extend(value.clone().map(|value| (name.to_owned(), value)));
                value
            })
        };
        filled.command = fill(settings.command.as_deref().unwrap_or_default())?;
        filled.url = fill(settings.url.as_deref().unwrap_or_default())?;
        filled.args = settings.args.iter().map(|arg| fill(arg)).collect::<Result<_, _>>()?;
        for (name, value) in &settings.headers {
            filled.headers.insert(name.clone(), fill(value)?);
        }
        if let Some(oauth) = &settings.oauth {
            let filled_in = |text: &Option<String>| text.as_deref().map(fill).transpose();
            filled.client_id = filled_in(&oauth.client_id)?;
            filled.client_secret = filled_in(&oauth.client_secret)?;
            filled.private_key = filled_in(&oauth.private_key)?;
        }
        let usual = USUAL.iter().filter_map(|name| Some(((*name).to_owned(), look(name)?)));
        filled.env.extend(usual);
        for (name, value) in &settings.env {
            filled.env.insert(name.clone(), fill(value)?);
        }
        for name in &settings.env_from {
            let value = look(name).ok_or_else(|| not_set(name))?;
            filled.env.insert(name.clone(), value);
        }
        let of_settings = settings.env.keys().chain(&settings.env_from);
        let named = of_settings.filter_map(|name| Some((name, filled.env.get(name)?)));
        let named = named.chain(filled.headers.iter());
        let named = named.map(|(name, value)| (name.clone(), value.clone()));
        let of_ours = [("client_secret", &filled.client_secret), ("key", &filled.private_key)];
        let of_ours = of_ours.map(|(name, value)| Some((name.to_owned(), value.clone()?)));
        let hidden = hidden_in(&filled.url).into_iter().map(|part| ("url".to_owned(), part));
        let all = named.chain(of_ours.into_iter().flatten()).chain(hidden).chain(put.take());
        filled.hide(all.collect());
        Ok(filled)
    }

    /// These must not be repeated, in none of their forms.
    fn hide(&mut self, mut values: Vec<(String, String)>) {
        let longest_first = |(_, value): &(String, String)| std::cmp::Reverse(value.len());
        values.sort_by_key(longest_first);
        let formed = values.into_iter().flat_map(|(name, value)| {
            forms(&value).into_iter().map(move |form| (name.clone(), form))
        });
        self.secrets = formed.filter(|(_, form)| form.len() >= SHORT).collect();
        // The longest first: one may be a part of another.
        self.secrets.sort_by_key(longest_first);
    }

    /// The length of the longest text that must not be repeated.
    pub fn longest(&self) -> usize {
        self.secrets.first().map_or(0, |(_, form)| form.len())
    }

    /// A text that was cut off, without the beginning of a value at its end.
    pub fn without_start<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        let starts = |form: &str| {
            let most = form.len().saturating_sub(1).min(text.len());
            (1..=most).rev().find(|length| text.ends_with(&form.as_bytes()[..*length]))
        };
        let longest = self.secrets.iter().filter_map(|(_, form)| starts(form)).max();
        &text[..text.len() - longest.unwrap_or(0)]
    }

    /// Only what is not to be repeated.
    #[cfg(test)]
    pub fn hiding(values: &[(&str, &str)]) -> Self {
        let mut filled = Self::default();
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        filled.hide(values.collect());
        filled
    }

    /// A text in which the values that were named are told by their names.
    pub fn clean(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (name, form) in &self.secrets {
            if text.contains(form.as_str()) {
                text = text.replace(form.as_str(), &format!("[{name}]"));
            }
        }
        text
    }
}

/// How a value may be repeated: as it is, without the word before it (`Bearer …`), as JSON writes
/// it, and where it has several lines, each of them.
fn forms(value: &str) -> Vec<String> {
    let mut forms = vec![value.to_owned()];
    forms.extend(value.split_once(' ').map(|(_, bare)| bare.to_owned()));
    let lines = value.lines().map(str::trim).filter(|line| *line != value);
    forms.extend(lines.map(str::to_owned));
    for plain in forms.clone() {
        let written = serde_json::Value::from(plain.as_str()).to_string();
        let written = written[1..written.len() - 1].to_owned();
        forms.extend(Some(in_ascii(&written)).filter(|ascii| *ascii != written));
        forms.extend(Some(written).filter(|written| *written != plain));
    }
    forms
}

/// JSON as many write it, with other letters than ASCII's escaped.
fn in_ascii(written: &str) -> String {
    let mut units = [0; 2];
    let escaped = written.chars().map(|letter| match letter.is_ascii() {
        true => letter.to_string(),
        false => {
            let units = letter.encode_utf16(&mut units).iter();
            units.map(|unit| format!("\\u{unit:04x}")).collect()
        }
    });
    escaped.collect()
}

/// What an address carries that may open something: the values of its query, and a password.
fn hidden_in(url: &str) -> Vec<String> {
    let Ok(url) = reqwest::Url::parse(url) else { return Vec::new() };
    let plain = url.query_pairs().map(|(_, value)| value.into_owned());
    // As they are written, too.
    let written = url.query().unwrap_or_default().split('&');
    let written = written.filter_map(|pair| Some(pair.split_once('=')?.1.to_owned()));
    plain.chain(written).chain(url.password().map(str::to_owned)).collect()
}

fn not_set(name: &str) -> String {
    format!("the variable {name} is not set in the server's environment")
}

/// `${NAME}`, `${env:NAME}` and `${NAME:-otherwise}`, as desktop clients write them.
fn filled_in(text: &str, look: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut made = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let Some((inside, behind)) = after.split_once('}') else { break };
        made.push_str(before);
        let inside = inside.strip_prefix("env:").unwrap_or(inside);
        let (name, otherwise) = match inside.split_once(":-") {
            Some((name, otherwise)) => (name, Some(otherwise)),
            None => (inside, None),
        };
        let value = look(name).or_else(|| otherwise.map(str::to_owned));
        made.push_str(&value.ok_or_else(|| not_set(name))?);
        rest = behind;
    }
    made.push_str(rest);
    Ok(made)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn look(name: &str) -> Option<String> {
        let known = [("TOKEN", "secret-token"), ("PATH", "/bin"), ("OTHER", "not-for-you")];
        known.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_owned())
    }

    #[test]
    fn only_what_is_named_is_taken() {
        let mut settings = McpSettings { command: Some("x".into()), ..McpSettings::default() };
        settings.env.insert("A".into(), "b ${TOKEN} ${env:NONE:-c}".into());
        settings.headers.insert("authorization".into(), "Bearer ${TOKEN}".into());
        let filled = Filled::with(&settings, look).unwrap();
        let env: Vec<(&str, &str)> =
            filled.env.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(env, [("A", "b secret-token c"), ("PATH", "/bin")]);
        assert_eq!(filled.clean("said secret-token"), "said [authorization]");
        settings.args.push("--key=${OTHER}".into());
        settings.url = Some("http://u:opensesame@h/mcp?key=${TOKEN}&page=literally".into());
        let filled = Filled::with(&settings, look).unwrap();
        let clean = filled.clean(&format!("{} {}", filled.args[0], filled.url));
        for secret in ["not-for-you", "opensesame", "secret-token", "literally"] {
            assert!(!clean.contains(secret), "{clean}");
        }
        let letter = "-----BEGIN KEY-----\nfirst line of it\n\"quoted\" Schlüssel\n";
        let filled = Filled::hiding(&[("KEY", letter)]);
        let json = serde_json::to_string(letter).unwrap();
        let ascii = json.replace('ü', "\\u00fc");
        for said in [letter, "first line of it", &json, &ascii, r#"\"quoted\" Schlüssel"#] {
            let clean = filled.clean(&format!("it is: {said}"));
            assert!(!clean.contains("first") && !clean.contains("quoted"), "{clean}");
        }
        settings.env_from.push("MISSING".into());
        assert!(Filled::with(&settings, look).is_err());
    }
}
