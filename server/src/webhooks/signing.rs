//! Signatures as Standard Webhooks defines them, and the keys to sign with.
//!
//! A key is read when it is used, from an environment variable or a file that the configuration
//! names. No message contains its value.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use toolcrib_protocol::secrets::SecretReference;

use crate::config::{SIGNING_KEY_PREFIX, WebhookSettings};

/// Allowed key lengths, as Standard Webhooks specifies them.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// The source of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SigningKeySource {
    pub variable: Option<String>,
    /// A file with the key, which takes precedence over the variable.
    pub file: Option<PathBuf>,
}

impl From<SecretReference> for SigningKeySource {
    fn from(reference: SecretReference) -> Self {
        match reference {
            SecretReference::Env(name) => Self { variable: Some(name), file: None },
            SecretReference::File(path) => Self { variable: None, file: Some(path) },
        }
    }
}

/// The sources of all keys: the default, and those of single projects.
#[derive(Debug, Clone)]
pub struct SigningKeySources {
    pub default: SigningKeySource,
    pub projects: BTreeMap<String, SigningKeySource>,
}

/// Keys to sign with: the newest first, then older ones that receivers still use.
pub struct SigningKeys(Vec<Vec<u8>>);

impl SigningKeySources {
    /// Returns the sources that the settings name.
    pub fn from_settings(settings: &WebhookSettings) -> Self {
        let referenced = |reference: &Option<String>| {
            SecretReference::parse(reference.as_deref()?).map(SigningKeySource::from)
        };
        let default = referenced(&settings.signing_key).unwrap_or_else(|| SigningKeySource {
            variable: Some(settings.signing_key_env.clone()),
            file: settings.signing_key_file.clone(),
        });
        let projects = settings.projects.iter().map(|(name, key)| {
            let (variable, file) = (key.signing_key_env.clone(), key.signing_key_file.clone());
            let named = SigningKeySource { variable, file };
            (name.clone(), referenced(&key.signing_key).unwrap_or(named))
        });
        Self { default, projects: projects.collect() }
    }

    /// Returns the keys of a project. The error says what is missing.
    pub fn load_keys(&self, project: &str) -> Result<SigningKeys, String> {
        let source = self.projects.get(project).unwrap_or(&self.default);
        // Callers see this error, so it does not name the path, which is for the operator only.
        let text = source.read().map_err(|reason| {
            tracing::warn!(why = reason, "the webhook signing key cannot be read");
            "the signing key cannot be read; the server's log says why".to_owned()
        })?;
        match text {
            Some(text) => SigningKeys::parse(&text).map_err(|reason| {
                tracing::warn!(
                    place = source.describe(),
                    why = reason,
                    "the webhook signing key is invalid"
                );
                format!("the signing key cannot be used: {reason}")
            }),
            None => Err(format!(
                "there is no signing key: the operator makes one with `toolcrib webhooks key` \
                 and puts it into {}",
                source.describe()
            )),
        }
    }

    /// Checks the keys that are set. A missing key is an error only when it is used.
    pub fn check(&self) -> Result<(), String> {
        for source in self.projects.values().chain([&self.default]) {
            if let Some(text) = source.read()? {
                SigningKeys::parse(&text)
                    .map_err(|reason| format!("{}: {reason}", source.describe()))?;
            }
        }
        Ok(())
    }
}

impl SigningKeySource {
    fn describe(&self) -> String {
        match (&self.file, &self.variable) {
            (Some(file), _) => format!("the file {}", file.display()),
            (None, Some(variable)) => format!("the environment variable {variable}"),
            (None, None) => "the configuration (signing_key_env or signing_key_file)".to_owned(),
        }
    }

    fn read(&self) -> Result<Option<String>, String> {
        if let Some(file) = &self.file {
            let read = std::fs::read_to_string(file);
            return read.map(Some).map_err(|error| format!("{}: {error}", self.describe()));
        }
        let value = self.variable.as_ref().and_then(|variable| std::env::var(variable).ok());
        Ok(value.filter(|text| !text.trim().is_empty()))
    }
}

impl SigningKeys {
    /// Parses one or more keys, separated by spaces. The error never contains the given value.
    fn parse(text: &str) -> Result<Self, String> {
        let message = "a signing key is whsec_ and then 24 to 64 bytes in base64";
        let mut keys = Vec::new();
        for word in text.split_whitespace() {
            let body = word.strip_prefix(SIGNING_KEY_PREFIX).ok_or(message)?;
            let key = STANDARD.decode(body).map_err(|_| message)?;
            if !KEY_BYTES.contains(&key.len()) {
                return Err(message.to_owned());
            }
            keys.push(key);
        }
        if keys.is_empty() { Err(message.to_owned()) } else { Ok(Self(keys)) }
    }

    /// Returns the value of `webhook-signature`: one signature for each key.
    pub fn sign(&self, message_id: &str, timestamp: i64, payload: &str) -> String {
        let signed = self.0.iter().filter_map(|key| {
            let mut mac = Hmac::<Sha256>::new_from_slice(key).ok()?;
            mac.update(format!("{message_id}.{timestamp}.").as_bytes());
            mac.update(payload.as_bytes());
            Some(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
        });
        signed.collect::<Vec<_>>().join(" ")
    }
}

/// Encodes 32 random bytes as a new key.
pub fn encode_key(random: &[u8; 32]) -> String {
    format!("{SIGNING_KEY_PREFIX}{}", STANDARD.encode(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    /// The test message of the specification, for which all of its libraries produce this
    /// signature.
    #[test]
    fn the_specifications_test_message_has_its_signature() {
        let keys = SigningKeys::parse(KEY).unwrap();
        let signed =
            keys.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn two_keys_produce_two_signatures() {
        let other = encode_key(&[7; 32]);
        let both = SigningKeys::parse(&format!("{other}\n{KEY}")).unwrap().sign("msg_1", 5, "{}");
        let (new, old) = both.split_once(' ').unwrap();
        assert_eq!(new, SigningKeys::parse(&other).unwrap().sign("msg_1", 5, "{}"));
        assert_eq!(old, SigningKeys::parse(KEY).unwrap().sign("msg_1", 5, "{}"));
    }

    #[test]
    fn invalid_keys_are_refused_and_not_shown() {
        let short = format!("whsec_{}", STANDARD.encode([1; 23]));
        let long = format!("whsec_{}", STANDARD.encode([1; 65]));
        let unprefixed = STANDARD.encode([1; 32]);
        for text in ["", " ", "secret-word", "whsec_", "whsec_!!!", &short, &long, &unprefixed] {
            let error = SigningKeys::parse(text).err().unwrap();
            assert!(!error.contains("secret-word") && error.contains("whsec_"), "{error}");
        }
        assert!(SigningKeys::parse(&encode_key(&[3; 32])).is_ok());
    }

    #[test]
    fn a_key_file_precedes_a_variable_and_a_projects_key_the_default() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("key");
        let source_of = |file: &PathBuf| SigningKeySource {
            variable: Some("TOOLCRIB_WEBHOOK_NOT_SET".into()),
            file: Some(file.clone()),
        };
        let variable = SigningKeySource { file: None, ..source_of(&file) };
        let projects = BTreeMap::from([("acme".to_owned(), source_of(&file))]);
        let sources = SigningKeySources { default: variable, projects };
        let none = sources.load_keys("other").err().unwrap();
        assert!(none.contains("TOOLCRIB_WEBHOOK_NOT_SET"), "{none}");
        assert!(sources.load_keys("acme").is_err(), "the file does not exist yet");
        assert!(sources.check().is_err());
        std::fs::write(&file, format!("{KEY}\n")).unwrap();
        assert!(sources.load_keys("acme").is_ok());
        assert!(sources.check().is_ok(), "an unset variable is not an error");
    }
}
