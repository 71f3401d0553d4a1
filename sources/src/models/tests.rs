//! Tests that a name resolves to the right model and endpoint.

use super::*;
use crate::models::settings::NamedModelSettings;

#[test]
fn without_configuration_only_the_demo_model_exists() {
    let registry = ModelRegistry::new(&LlmSettings::default());
    assert_eq!(registry.names(), ["demo"]);
    assert_eq!(registry.find("demo").unwrap().name, "demo");
    assert!(registry.find("gpt-9").is_none());
}

#[test]
fn configured_names_take_precedence_over_the_endpoints_models() {
    let mut settings = LlmSettings { model: Some("large".into()), ..LlmSettings::default() };
    let fast = NamedModelSettings { model: Some("small-2".into()), ..Default::default() };
    settings.models.insert("fast".into(), fast);
    let registry = ModelRegistry::new(&settings);
    assert_eq!(registry.names(), ["large", "demo", "fast"], "the default model is first");
    let upstream = |name| registry.find(name).map(|found| found.name);
    assert_eq!(upstream("fast").as_deref(), Some("small-2"));
    assert_eq!(upstream("another").as_deref(), Some("another"));
    assert_eq!((upstream(""), upstream("a\nb")), (None, None));
    settings.other_models = false;
    assert!(ModelRegistry::new(&settings).find("another").is_none());
}

#[test]
fn an_api_key_is_used_only_for_its_own_endpoint() {
    let mut settings = LlmSettings {
        base_url: Some("https://one.example/v1/".into()),
        api_key_env: Some("ONE_KEY".into()),
        ..LlmSettings::default()
    };
    let model_at = |base_url: Option<&str>| NamedModelSettings {
        base_url: base_url.map(str::to_owned),
        ..Default::default()
    };
    settings.models.insert("same".into(), model_at(None));
    settings.models.insert("said".into(), model_at(Some("https://one.example/v1")));
    settings.models.insert("other".into(), model_at(Some("https://two.example/v1")));
    settings.models.insert("vendor".into(), model_at(Some("https://api.openai.com/v1/")));
    let claude = Some(crate::models::settings::ModelKind::Anthropic);
    settings.models.insert("claude".into(), NamedModelSettings { kind: claude, ..model_at(None) });
    let proxy = model_at(Some("https://one.example/v1"));
    settings.models.insert("proxy".into(), NamedModelSettings { kind: claude, ..proxy });
    let with_key = NamedModelSettings {
        api_key_env: Some("TWO_KEY".into()),
        ..model_at(Some("https://two.example/v1"))
    };
    settings.models.insert("own".into(), with_key);
    let endpoint_of = |name: &str| {
        let found = settings.named_endpoints().find(|(model, ..)| *model == name).unwrap();
        (found.2.base_url, found.2.key.variable)
    };
    assert_eq!(endpoint_of("same"), ("https://one.example/v1".into(), Some("ONE_KEY".into())));
    assert_eq!(endpoint_of("said"), endpoint_of("same"), "the same address, stated explicitly");
    let key = |name: &str| endpoint_of(name).1;
    assert_eq!(key("other"), None, "another address");
    assert_eq!(key("proxy"), None, "another kind at the same address");
    assert_eq!(key("own").as_deref(), Some("TWO_KEY"));
    // The vendor's own endpoint uses the vendor's default variable.
    assert_eq!(key("vendor").as_deref(), Some("OPENAI_API_KEY"));
    let usual = ("https://api.anthropic.com/v1".to_owned(), Some("ANTHROPIC_API_KEY".to_owned()));
    assert_eq!(endpoint_of("claude"), usual);
}
