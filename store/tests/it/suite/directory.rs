//! The directory: tools, clients, keys, rules, and the audit log of their changes.

use std::collections::BTreeMap;

use serde_json::json as value;
use toolcrib::domain::access_rules::{
    AccessRule, RULE_VERSIONS_KEPT, RuleAction, RuleSetChange, RuleVerdict,
};
use toolcrib::domain::caller::Role;
use toolcrib::domain::directory::credential::{
    AssertableAttribute, McpPreferences, SessionTokenAttributes, ToolNameForm,
};
use toolcrib::domain::directory::{
    ApiKey, AuditEntry, Client, Directory, DirectoryChange, KeyAttributes, SessionToken, ToolOffer,
    UnlistedTools, Upstream,
};
use toolcrib::domain::retry::{Backoff, ExecutionPolicyPatch};
use toolcrib::domain::tool::args;
use toolcrib::domain::tool::{Effect, Executor, Fallback, Risk, ToolDefinition};
use toolcrib::ports::store::{SaveResult, Store};

use crate::support::{NOW, json, on_threads};

pub fn client(project: &str, client_id: &str) -> Client {
    let (project, client_id) = (project.to_owned(), client_id.to_owned());
    Client { project, client_id, owner: "ada".into(), registered_ms: NOW }
}

pub fn tool(project: &str, name: &str, description: &str) -> ToolDefinition {
    ToolDefinition {
        project: Some(project.into()),
        name: name.into(),
        description: description.into(),
        executor: Executor::CLIENT,
        input_schema: json(r#"{"type":"object"}"#),
        output_schema: None,
        timeout_ms: 30_000,
        effect: Effect::Read,
        risk: Risk::Low,
        policy: ExecutionPolicyPatch::default(),
        fallback: vec![],
        background: true,
        metadata: None,
        binding: None,
    }
}

fn register(
    project: &str,
    client_id: &str,
    tools: &[&str],
    others: UnlistedTools,
) -> DirectoryChange {
    let tools = tools.iter().map(|name| tool(project, name, "does it")).collect();
    DirectoryChange::Register { client: client(project, client_id), tools, unlisted_tools: others }
}

fn withdraw(project: &str, client_id: &str, tool: &str) -> DirectoryChange {
    let [project, client_id, tool] = [project, client_id, tool].map(str::to_owned);
    DirectoryChange::Withdraw { project, client_id, tool }
}

pub fn key(id: &str, role: Role) -> ApiKey {
    ApiKey {
        id: id.into(),
        digest: format!("digest of {id}"),
        project: "p".into(),
        agent: "ada".into(),
        roles: role.into(),
        attributes: KeyAttributes::default(),
        created_ms: NOW,
        expires_ms: None,
        revoked_ms: None,
        rejoin: role != Role::Provider,
    }
}

pub fn rule(agent: &str, pattern: &str, verdict: RuleVerdict) -> AccessRule {
    AccessRule::short("p", agent, pattern, verdict)
}

pub fn entry(project: &str, subject: &str) -> AuditEntry {
    AuditEntry {
        at_ms: NOW,
        project: project.into(),
        agent: "ada".into(),
        action: "key.created".into(),
        subject: subject.into(),
        reason: "weil 🦀".into(),
        ..AuditEntry::default()
    }
}

/// Applies a change based on the current version.
pub async fn change(store: &dyn Store, change: DirectoryChange) {
    let version = store.directory_version().await.unwrap();
    assert_eq!(store.change_directory(change, version, None).await.unwrap(), SaveResult::Saved);
    assert_eq!(store.directory_version().await.unwrap(), version + 1);
}

async fn load(store: &dyn Store) -> Directory {
    let directory = store.directory().await.unwrap();
    assert_eq!(directory.version, store.directory_version().await.unwrap());
    directory
}

/// Returns `project/tool` for each tool and `project/tool@client` for each offer, in order.
async fn tools_and_offers(store: &dyn Store) -> (Vec<String>, Vec<String>) {
    let directory = load(store).await;
    let format_tool =
        |tool: &ToolDefinition| format!("{}/{}", tool.project.as_ref().unwrap(), tool.name);
    let mut tools: Vec<String> = directory.tools.iter().map(format_tool).collect();
    let format_offer =
        |offer: &ToolOffer| format!("{}/{}@{}", offer.project, offer.tool, offer.client_id);
    let mut offers: Vec<String> = directory.offers.iter().map(format_offer).collect();
    tools.sort();
    offers.sort();
    (tools, offers)
}

pub async fn an_empty_directory_has_version_0(store: &dyn Store) {
    let directory = load(store).await;
    assert_eq!(directory.version, 0);
    assert!(directory.tools.is_empty() && directory.clients.is_empty());
    assert!(directory.offers.is_empty() && directory.keys.is_empty());
    assert!(directory.rules.is_empty());
    assert_eq!(store.audit_log(None, 10).await.unwrap(), []);
}

pub async fn a_registered_tool_is_read_back_field_by_field(store: &dyn Store) {
    let mapping = BTreeMap::from([
        ("q".to_owned(), args::ArgumentSource::Pointer("/city".into())),
        ("n".to_owned(), args::ArgumentSource::Value(value!(5))),
    ]);
    let full = ToolDefinition {
        executor: Executor::UTP,
        input_schema: json(r#"{ "type": "object", "maximum": 1.10 }"#),
        output_schema: Some(json(r#"{"type":"number"}"#)),
        timeout_ms: 86_400_000,
        effect: Effect::Idempotent,
        risk: Risk::Critical,
        policy: ExecutionPolicyPatch {
            max_parallel: Some(3),
            default_timeout_ms: Some(4_000),
            attempt_timeout_ms: Some(1_500),
            input_timeout_ms: Some(600_000),
            max_retries: Some(0),
            backoff: Some(Backoff { initial_ms: 1, factor: 1.1, max_ms: 9, jitter: 0.3 }),
            rejoin: Some(false),
            rejoin_window_ms: Some(5_000),
            disconnect_grace_ms: Some(0),
        },
        fallback: vec![
            Fallback { tool: "weather.backup".into(), args: Some(mapping) },
            Fallback { tool: "weather.third".into(), args: None },
        ],
        metadata: Some(json(r#"{"icon":"🌦"}"#)),
        ..tool("p", "weather.query", "Wie ist das Wetter? 🌧")
    };
    let tools = vec![full.clone(), tool("p", "calc.add", "")];
    let new = DirectoryChange::Register {
        client: client("p", "laptop"),
        tools,
        unlisted_tools: UnlistedTools::Keep,
    };
    change(store, new).await;
    let directory = load(store).await;
    let stored = directory.tools.iter().find(|tool| tool.name == "weather.query").unwrap();
    assert_eq!(*stored, full);
    assert_eq!(stored.input_schema.text(), full.input_schema.text());
    let plain = directory.tools.iter().find(|tool| tool.name == "calc.add").unwrap();
    assert_eq!(*plain, tool("p", "calc.add", ""));
    assert_eq!(directory.clients, [client("p", "laptop")]);
}

pub async fn registering_again_replaces_the_definition(store: &dyn Store) {
    change(store, register("p", "laptop", &["a", "b"], UnlistedTools::Keep)).await;
    let tools = vec![tool("p", "a", "does it better")];
    let new = DirectoryChange::Register {
        client: client("p", "phone"),
        tools,
        unlisted_tools: UnlistedTools::Keep,
    };
    change(store, new).await;
    let directory = load(store).await;
    let about: BTreeMap<&str, &str> =
        directory.tools.iter().map(|t| (t.name.as_str(), t.description.as_str())).collect();
    assert_eq!(about, BTreeMap::from([("a", "does it better"), ("b", "does it")]));
    assert_eq!(tools_and_offers(store).await.1, ["p/a@laptop", "p/a@phone", "p/b@laptop"]);
}

pub async fn a_client_stays_with_its_first_owner(store: &dyn Store) {
    change(store, register("p", "laptop", &["a"], UnlistedTools::Keep)).await;
    let other_owner =
        Client { owner: "eve".into(), registered_ms: NOW + 9, ..client("p", "laptop") };
    let other_project = Client { owner: "eve".into(), ..client("q", "laptop") };
    for client in [&other_owner, &other_project] {
        let (client, tools) = (client.clone(), vec![]);
        change(
            store,
            DirectoryChange::Register { client, tools, unlisted_tools: UnlistedTools::Keep },
        )
        .await;
    }
    let mut clients = load(store).await.clients;
    clients.sort_by(|one, two| one.project.cmp(&two.project));
    assert_eq!(clients, [client("p", "laptop"), other_project]);
}

pub async fn unlisted_tools_are_kept_or_withdrawn_as_requested(store: &dyn Store) {
    change(store, register("p", "laptop", &["a", "b"], UnlistedTools::Keep)).await;
    change(store, register("p", "phone", &["b", "z"], UnlistedTools::Keep)).await;
    change(store, register("p", "laptop", &["c"], UnlistedTools::Keep)).await;
    let (tools, _) = tools_and_offers(store).await;
    assert_eq!(tools, ["p/a", "p/b", "p/c", "p/z"]);
    // Only the client's own offers are withdrawn; tools that another client still offers stay.
    change(store, register("p", "laptop", &["c", "d"], UnlistedTools::Withdraw)).await;
    let (tools, offers) = tools_and_offers(store).await;
    assert_eq!(tools, ["p/b", "p/c", "p/d", "p/z"]);
    assert_eq!(offers, ["p/b@phone", "p/c@laptop", "p/d@laptop", "p/z@phone"]);
    change(store, register("p", "laptop", &[], UnlistedTools::Withdraw)).await;
    assert_eq!(tools_and_offers(store).await.1, ["p/b@phone", "p/z@phone"]);
}

pub async fn a_client_can_get_another_owner(store: &dyn Store) {
    change(store, register("p", "laptop", &["a"], UnlistedTools::Keep)).await;
    change(store, register("q", "laptop", &["a"], UnlistedTools::Keep)).await;
    let [project, client_id, owner] = ["p", "laptop", "grace"].map(str::to_owned);
    change(store, DirectoryChange::SetClientOwner { project, client_id, owner }).await;
    // A later registration does not take it back.
    change(store, register("p", "laptop", &["b"], UnlistedTools::Keep)).await;
    let clients = load(store).await.clients;
    let mut owners: Vec<_> =
        clients.iter().map(|c| (c.project.as_str(), c.owner.as_str(), c.registered_ms)).collect();
    owners.sort_unstable();
    assert_eq!(owners, [("p", "grace", NOW), ("q", "ada", NOW)]);
    assert_eq!(tools_and_offers(store).await.0, ["p/a", "p/b", "q/a"]);
}

pub async fn dropping_a_client_removes_its_offers(store: &dyn Store) {
    change(store, register("p", "laptop", &["a", "b"], UnlistedTools::Keep)).await;
    change(store, register("p", "phone", &["b"], UnlistedTools::Keep)).await;
    change(store, register("q", "laptop", &["a"], UnlistedTools::Keep)).await;
    let forget = |client_id: &str| DirectoryChange::DropClient {
        project: "p".to_owned(),
        client_id: client_id.to_owned(),
    };
    change(store, forget("laptop")).await;
    let (tools, offers) = tools_and_offers(store).await;
    assert_eq!(tools, ["p/b", "q/a"]);
    assert_eq!(offers, ["p/b@phone", "q/a@laptop"]);
    let clients = store.directory().await.unwrap().clients;
    let client_keys: Vec<_> =
        clients.iter().map(|c| (c.project.as_str(), c.client_id.as_str())).collect();
    assert_eq!(
        (client_keys.len(), client_keys.contains(&("p", "laptop"))),
        (2, false),
        "{client_keys:?}"
    );
    change(store, forget("nobody")).await;
    change(store, register("p", "laptop", &["a"], UnlistedTools::Keep)).await;
    assert_eq!(tools_and_offers(store).await.0, ["p/a", "p/b", "q/a"]);
}

pub async fn a_tool_exists_while_a_client_offers_it(store: &dyn Store) {
    change(store, register("p", "laptop", &["a"], UnlistedTools::Keep)).await;
    change(store, register("p", "phone", &["a"], UnlistedTools::Keep)).await;
    change(store, withdraw("p", "laptop", "a")).await;
    assert_eq!(tools_and_offers(store).await, (vec!["p/a".into()], vec!["p/a@phone".into()]));
    // Withdrawing a tool that was never offered, or no longer is, has no effect.
    change(store, withdraw("p", "laptop", "a")).await;
    change(store, withdraw("p", "nobody", "a")).await;
    assert_eq!(tools_and_offers(store).await.0, ["p/a"]);
    change(store, withdraw("p", "phone", "a")).await;
    assert_eq!(tools_and_offers(store).await, (vec![], vec![]));
    assert_eq!(load(store).await.clients.len(), 2);
}

pub async fn withdrawing_a_tool_affects_one_project_only(store: &dyn Store) {
    change(store, register("p", "laptop", &["a"], UnlistedTools::Keep)).await;
    change(store, register("q", "laptop", &["a"], UnlistedTools::Keep)).await;
    change(store, withdraw("p", "laptop", "a")).await;
    assert_eq!(tools_and_offers(store).await, (vec!["q/a".into()], vec!["q/a@laptop".into()]));
    change(store, register("p", "laptop", &["b"], UnlistedTools::Withdraw)).await;
    assert_eq!(tools_and_offers(store).await.0, ["p/b", "q/a"]);
}

pub async fn keys_are_added_and_revoked_once(store: &dyn Store) {
    let keys = [key("key_1", Role::Agent), key("key_2", Role::Provider), key("key_3", Role::Admin)];
    for key in &keys {
        change(store, DirectoryChange::AddKey(key.clone())).await;
    }
    assert_eq!(load(store).await.keys, keys);
    for at_ms in [NOW + 5, NOW + 900] {
        change(store, DirectoryChange::RevokeKey { id: "key_2".into(), at_ms }).await;
    }
    change(store, DirectoryChange::RevokeKey { id: "key_9".into(), at_ms: NOW }).await;
    let [one, two, three] = keys;
    let revoked = ApiKey { revoked_ms: Some(NOW + 5), ..two };
    assert_eq!(load(store).await.keys, [one, revoked, three]);
}

pub async fn every_attribute_of_a_key_is_stored(store: &dyn Store) {
    let full = ApiKey {
        roles: [Role::Agent, Role::Approver].into_iter().collect(),
        attributes: KeyAttributes {
            groups: vec!["eng".into(), "ops".into()],
            user: Some("u@example.com".into()),
            environment: Some("production".into()),
            tools: Some(vec!["weather.*".into()]),
            networks: vec!["10.0.0.0/8".into()],
            may_assert: AssertableAttribute::ALL.into(),
            rotated_from: Some("key_0".into()),
            mcp: Some(Box::new(McpPreferences {
                names: Some(ToolNameForm::Dotted),
                wait_ms: Some(5_000),
            })),
        },
        expires_ms: Some(NOW + 60_000),
        ..key("key_1", Role::Agent)
    };
    change(store, DirectoryChange::AddKey(full.clone())).await;
    assert_eq!(load(store).await.keys, [full]);
}

pub async fn a_rotation_ends_the_old_key_and_adds_the_new_one(store: &dyn Store) {
    let old = key("key_1", Role::Admin);
    let ending = ApiKey { expires_ms: Some(NOW + 10), ..key("key_2", Role::Agent) };
    for key in [&old, &ending] {
        change(store, DirectoryChange::AddKey(key.clone())).await;
    }
    for (id, successor) in [("key_1", "key_3"), ("key_2", "key_4")] {
        let successor = Box::new(key(successor, Role::Admin));
        let rotation = DirectoryChange::RotateKey { id: id.into(), ends_ms: NOW + 500, successor };
        change(store, rotation).await;
    }
    let keys = load(store).await.keys;
    assert_eq!(keys[0], ApiKey { expires_ms: Some(NOW + 500), ..old });
    assert_eq!(keys[1], ending, "a rotation never extends a key");
    assert_eq!(keys[2..], [key("key_3", Role::Admin), key("key_4", Role::Admin)]);
}

fn session_token(id: &str, expires_ms: u64) -> SessionToken {
    SessionToken {
        id: id.into(),
        digest: format!("digest of {id}"),
        key_id: "key_1".into(),
        project: "p".into(),
        attributes: SessionTokenAttributes {
            user: Some("u".into()),
            session: Some("s".into()),
            environment: Some("test".into()),
            tools: Some(vec!["a.*".into()]),
        },
        created_ms: NOW,
        expires_ms,
        revoked_ms: None,
    }
}

pub async fn session_tokens_are_added_revoked_expired_and_deleted(store: &dyn Store) {
    let tokens = ["st_1", "st_2", "st_3"].map(|id| session_token(id, NOW + 100));
    let long = session_token("st_4", NOW + 9_000);
    for token in tokens.iter().chain([&long]) {
        change(store, DirectoryChange::AddSessionToken(Box::new(token.clone()))).await;
    }
    assert_eq!(load(store).await.session_tokens.len(), 4);
    assert_eq!(load(store).await.session_tokens[0], tokens[0]);
    for at_ms in [NOW + 5, NOW + 900] {
        change(store, DirectoryChange::RevokeSessionToken { id: "st_2".into(), at_ms }).await;
    }
    let expire =
        |at_ms, delete_before_ms| DirectoryChange::ExpireSessionTokens { at_ms, delete_before_ms };
    change(store, expire(NOW + 100, NOW)).await;
    let revoked = |directory: Directory| {
        let tokens = directory.session_tokens.into_iter();
        tokens.map(|token| (token.id, token.revoked_ms.map(|ms| ms - NOW))).collect::<Vec<_>>()
    };
    let row = |id: &str, revoked_ms| (id.to_owned(), revoked_ms);
    let expected =
        [row("st_1", Some(100)), row("st_2", Some(5)), row("st_3", Some(100)), row("st_4", None)];
    assert_eq!(revoked(load(store).await), expected);
    change(store, expire(NOW + 200, NOW + 100)).await;
    let expected = [row("st_1", Some(100)), row("st_3", Some(100)), row("st_4", None)];
    assert_eq!(revoked(load(store).await), expected, "st_2 ended long ago");
}

pub async fn the_recorded_time_never_goes_back(store: &dyn Store) {
    assert_eq!(load(store).await.latest_time_ms, 0);
    for (at_ms, latest_ms) in [(NOW, NOW), (NOW - 5, NOW), (NOW + 7, NOW + 7)] {
        store.record_time(at_ms).await.unwrap();
        assert_eq!(load(store).await.latest_time_ms, latest_ms);
    }
    assert_eq!(store.directory_version().await.unwrap(), 0);
}

/// The clock was set back in the meantime: the key is revoked all the same.
pub async fn an_api_key_is_not_revoked_before_its_creation(store: &dyn Store) {
    change(store, DirectoryChange::AddKey(key("key_1", Role::Agent))).await;
    change(store, DirectoryChange::RevokeKey { id: "key_1".into(), at_ms: NOW - 5 }).await;
    assert_eq!(load(store).await.keys[0].revoked_ms, Some(NOW));
}

/// A change of the rules of project `p`.
pub fn change_of_rules(put: Vec<AccessRule>, dropped: &[&str]) -> DirectoryChange {
    let project = put.first().map_or("p".to_owned(), |rule| rule.project.clone());
    let dropped = dropped.iter().map(|id| (*id).to_owned()).collect();
    let (agent, summary) = ("ada".to_owned(), "changed".to_owned());
    DirectoryChange::ChangeRules(Box::new(RuleSetChange {
        project,
        put,
        dropped,
        at_ms: NOW,
        agent,
        summary,
    }))
}

pub async fn rules_are_replaced_and_dropped(store: &dyn Store) {
    let other = AccessRule { project: "q".into(), ..rule("ada", "a.*", RuleVerdict::Allow) };
    let longer = AccessRule {
        when: Some("args.n > 1".into()),
        actions: vec![RuleAction::Read, RuleAction::Cancel],
        effects: vec![Effect::Read],
        risk_min: Some(Risk::High),
        users: vec!["u*".into()],
        expires_in_ms: Some(5),
        note: "why \u{e9}".into(),
        ..AccessRule::new("p", "longer", RuleVerdict::Ask)
    };
    for rule in [
        rule("ada", "a.*", RuleVerdict::Allow),
        rule("*", "a.*", RuleVerdict::Allow),
        rule("ada", "b", RuleVerdict::Deny),
        other.clone(),
        rule("ada", "a.*", RuleVerdict::Deny),
        AccessRule { when: None, ..longer.clone() },
        longer.clone(),
    ] {
        change(store, change_of_rules(vec![rule], &[])).await;
    }
    let for_all_agents = rule("*", "a.*", RuleVerdict::Allow);
    let (first, last) =
        (rule("ada", "a.*", RuleVerdict::Deny), rule("ada", "b", RuleVerdict::Deny));
    let allow = rule("ada", "a.*", RuleVerdict::Allow);
    let in_force = [for_all_agents, allow, first.clone(), last, longer.clone(), other.clone()];
    assert_eq!(load(store).await.rules, in_force, "by project and id");
    let dropped = change_of_rules(vec![], &["allow:ada:a.*", "deny:ada:b", "allow:*:a.*", "none"]);
    change(store, dropped).await;
    assert_eq!(load(store).await.rules, [first, longer, other]);
}

pub async fn each_change_of_the_rules_makes_a_version(store: &dyn Store) {
    let one = rule("ada", "a", RuleVerdict::Allow);
    let noted = AccessRule { note: "two".into(), ..one.clone() };
    let other = AccessRule { project: "q".into(), ..one.clone() };
    change(store, change_of_rules(vec![one.clone()], &[])).await;
    change(store, change_of_rules(vec![noted.clone(), rule("*", "b", RuleVerdict::Deny)], &[]))
        .await;
    change(store, change_of_rules(vec![other.clone()], &[])).await;
    change(store, change_of_rules(vec![], &["allow:ada:a"])).await;
    let history = store.rule_history();
    let versions = history.rule_versions("p").await.unwrap();
    let numbers: Vec<u64> = versions.iter().map(|v| v.version).collect();
    assert_eq!(numbers, [3, 2, 1]);
    assert_eq!((versions[0].agent.as_str(), versions[0].summary.as_str()), ("ada", "changed"));
    assert_eq!(versions[0].at_ms, NOW);
    let denied = rule("*", "b", RuleVerdict::Deny);
    assert_eq!(history.rules_at("p", 1).await.unwrap(), [one]);
    assert_eq!(history.rules_at("p", 2).await.unwrap(), [noted, denied.clone()]);
    assert_eq!(history.rules_at("p", 3).await.unwrap(), [denied]);
    assert_eq!(history.rules_at("q", 1).await.unwrap(), [other]);
    assert!(history.rules_at("p", 0).await.unwrap().is_empty());
    let present = load(store).await.rule_versions;
    let present: Vec<_> = present.iter().map(|v| (v.project.as_str(), v.version)).collect();
    assert_eq!(present, [("p", 3), ("q", 1)]);
}

pub async fn old_versions_of_the_rules_are_deleted(store: &dyn Store) {
    for n in 0..=RULE_VERSIONS_KEPT {
        let rule = AccessRule { note: n.to_string(), ..rule("ada", "a", RuleVerdict::Allow) };
        change(store, change_of_rules(vec![rule], &[])).await;
    }
    let versions = store.rule_history().rule_versions("p").await.unwrap();
    assert_eq!(versions.len() as u64, RULE_VERSIONS_KEPT);
    assert_eq!(versions.last().unwrap().version, 2);
    let oldest = store.rule_history().rules_at("p", 2).await.unwrap();
    assert_eq!(oldest[0].note, "1");
    assert!(store.rule_history().rules_at("p", 1).await.unwrap().is_empty());
}

pub async fn a_change_based_on_another_version_is_a_conflict(store: &dyn Store) {
    change(store, DirectoryChange::AddKey(key("key_1", Role::Agent))).await;
    change(store, DirectoryChange::AddKey(key("key_2", Role::Agent))).await;
    for decided_on in [0, 1, 3, u64::MAX] {
        let late = DirectoryChange::RevokeKey { id: "key_1".into(), at_ms: NOW };
        assert_eq!(
            store.change_directory(late, decided_on, None).await.unwrap(),
            SaveResult::Conflict
        );
    }
    let directory = load(store).await;
    assert_eq!(directory.version, 2);
    assert!(directory.keys.iter().all(|key| key.revoked_ms.is_none()));
}

pub async fn one_of_many_concurrent_changes_of_a_version_succeeds(store: &dyn Store) {
    let saved = on_threads(8, async |n| {
        let add = DirectoryChange::AddKey(key(&format!("key_{n}"), Role::Agent));
        store.change_directory(add, 0, Some(entry("p", &format!("key_{n}")))).await.unwrap()
    });
    assert_eq!(saved.iter().filter(|saved| **saved == SaveResult::Saved).count(), 1);
    let directory = load(store).await;
    assert_eq!((directory.version, directory.keys.len()), (1, 1));
    let log = store.audit_log(None, 100).await.unwrap();
    assert_eq!(log, [entry("p", &directory.keys[0].id)]);
}

pub async fn an_audit_entry_is_written_with_its_change(store: &dyn Store) {
    let add = DirectoryChange::AddKey(key("key_1", Role::Agent));
    let saved = store.change_directory(add, 0, Some(entry("p", "key_1"))).await.unwrap();
    assert_eq!(saved, SaveResult::Saved);
    assert_eq!(store.audit_log(None, 10).await.unwrap(), [entry("p", "key_1")]);
    change(store, DirectoryChange::AddKey(key("key_2", Role::Agent))).await;
    assert_eq!(store.audit_log(None, 10).await.unwrap().len(), 1);
}

pub async fn no_audit_entry_is_written_for_a_conflicting_change(store: &dyn Store) {
    let add = DirectoryChange::AddKey(key("key_1", Role::Agent));
    let saved = store.change_directory(add, 7, Some(entry("p", "key_1"))).await.unwrap();
    assert_eq!(saved, SaveResult::Conflict);
    assert_eq!(store.audit_log(None, 10).await.unwrap(), []);
    assert_eq!(load(store).await.keys, []);
}

pub async fn the_audit_log_is_newest_first(store: &dyn Store) {
    // In insertion order, not by the timestamps.
    for (subject, at_ms) in [("one", NOW + 5), ("two", NOW + 1), ("three", NOW + 3)] {
        store.append_audit_entry(AuditEntry { at_ms, ..entry("p", subject) }).await.unwrap();
    }
    let log = store.audit_log(None, 10).await.unwrap();
    let subjects: Vec<&str> = log.iter().map(|entry| entry.subject.as_str()).collect();
    assert_eq!(subjects, ["three", "two", "one"]);
    assert_eq!(store.audit_log(None, 2).await.unwrap(), log[..2]);
    assert_eq!(store.audit_log(None, 0).await.unwrap(), []);
    assert_eq!(log[2], AuditEntry { at_ms: NOW + 5, ..entry("p", "one") });
}

pub async fn the_audit_log_of_a_project_has_only_its_own_entries(store: &dyn Store) {
    for (project, subject) in [("p", "one"), ("q", "two"), ("p", "three"), ("", "four")] {
        store.append_audit_entry(entry(project, subject)).await.unwrap();
    }
    let log = async |project: &str| store.audit_log(Some(project.into()), 10).await.unwrap();
    assert_eq!(log("p").await, [entry("p", "three"), entry("p", "one")]);
    assert_eq!(log("q").await, [entry("q", "two")]);
    assert_eq!(log("").await, [entry("", "four")]);
    assert_eq!(log("nobody").await, []);
    assert_eq!(store.audit_log(None, 10).await.unwrap().len(), 4);
    let newest = store.audit_log(Some("p".into()), 1).await.unwrap();
    assert_eq!(newest, [entry("p", "three")]);
}

/// Upstreams and the tools that they offer.
pub async fn upstreams_and_their_tools_are_stored(store: &dyn Store) {
    let upstream = |name: &str, settings: &str| Upstream {
        project: "p".into(),
        name: name.into(),
        kind: "mcp".into(),
        settings: json(settings),
        added_ms: NOW,
    };
    let set = |upstream: &str, tools: &[&str]| DirectoryChange::SetUpstreamTools {
        project: "p".into(),
        upstream: upstream.into(),
        tools: tools.iter().map(|name| tool("p", name, "does it")).collect(),
    };
    let drop =
        |name: &str| DirectoryChange::DropUpstream { project: "p".into(), name: name.into() };
    let changes = [
        DirectoryChange::PutUpstream(Box::new(upstream("a", r#"{"url":"x"}"#))),
        DirectoryChange::PutUpstream(Box::new(upstream("b", "{}"))),
        DirectoryChange::PutUpstream(Box::new(upstream("a", r#"{"url":"y"}"#))),
        set("a", &["a.one", "a.two"]),
        set("b", &["b.one"]),
        set("a", &["a.two", "a.three"]),
    ];
    let mut version = store.directory_version().await.unwrap();
    for change in changes {
        assert_eq!(store.change_directory(change, version, None).await.unwrap(), SaveResult::Saved);
        version += 1;
    }
    let names = |directory: &Directory| {
        let mut names: Vec<String> = directory.tools.iter().map(|t| t.name.clone()).collect();
        names.sort();
        names
    };
    let mut directory = store.directory().await.unwrap();
    directory.upstreams.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(directory.upstreams, [upstream("a", r#"{"url":"y"}"#), upstream("b", "{}")]);
    assert_eq!(names(&directory), ["a.three", "a.two", "b.one"]);
    assert_eq!(store.change_directory(drop("a"), version, None).await.unwrap(), SaveResult::Saved);
    let directory = store.directory().await.unwrap();
    assert_eq!(names(&directory), ["b.one"]);
    assert_eq!(directory.upstreams.len(), 1);
}

/// Stored credentials of an upstream.
pub async fn credentials_are_deleted_with_their_upstream(store: &dyn Store) {
    let grants = store.credentials();
    assert_eq!(grants.credential("default", "a").await.unwrap(), None);
    for (project, text) in [("default", "one"), ("other", "theirs"), ("default", "two")] {
        grants.set_credential(project, "a", Some(text.to_owned())).await.unwrap();
    }
    assert_eq!(grants.credential("default", "a").await.unwrap().as_deref(), Some("two"));
    let upstreams = [("default", "a"), ("other", "a")].map(|(p, n)| (p.to_owned(), n.to_owned()));
    assert_eq!(grants.upstreams_with_credentials().await.unwrap(), upstreams);
    let version = store.directory_version().await.unwrap();
    let drop_upstream =
        DirectoryChange::DropUpstream { project: "default".into(), name: "a".into() };
    assert_eq!(
        store.change_directory(drop_upstream, version, None).await.unwrap(),
        SaveResult::Saved
    );
    assert_eq!(grants.credential("default", "a").await.unwrap(), None);
    assert_eq!(grants.credential("other", "a").await.unwrap().as_deref(), Some("theirs"));
    grants.set_credential("other", "a", None).await.unwrap();
    assert!(grants.upstreams_with_credentials().await.unwrap().is_empty());
}
