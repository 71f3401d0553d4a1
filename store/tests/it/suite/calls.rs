//! Calls: a stored call reads back unchanged, and a save replaces exactly the preceding version.

use std::sync::Arc;

use serde_json::json as value;
use toolcrib::domain::call::elicitation::Elicitation;
use toolcrib::domain::call::{Call, FailedAttempt, Hold, Origin, Status, Target};
use toolcrib::domain::caller::{AuthMethod, CallerAttributes, DelegatingCaller, Role};
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::tool::{Effect, Executor, SourceTraits};
use toolcrib::domain::utp::{AfterExecution, Route};
use toolcrib::ports::store::{SaveResult, Store};

use crate::support::{
    NOW, append, call, ended, found, history, ids_of, json, of_call, on_threads, put, read, record,
    running, save, saving, target,
};

/// A call in which no field has its default value.
fn full_call() -> Call {
    Call {
        run_id: "run-7".into(),
        origin: Origin {
            agent: "ada".into(),
            auth_method: AuthMethod::Key,
            roles: [Role::Agent, Role::Approver].into_iter().collect(),
            attributes: Arc::new(CallerAttributes {
                groups: vec!["ops".into()],
                user: Some("u-9".into()),
                session: Some("s-1".into()),
                environment: Some("production".into()),
                tools: Some(vec!["weather.*".into()]),
                credential: Some("key_1".into()),
                on_behalf_of: Some(Box::new(DelegatingCaller {
                    agent: "gw".into(),
                    ..DelegatingCaller::default()
                })),
            }),
            caller_call_id: Some("call_1".into()),
            client_id: Some("laptop".into()),
            user_id: Some("u-9".into()),
            idempotency_key: Some("k-1".into()),
            traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
            background: true,
            route: Some(Box::new(Route {
                agent_id: "ada".into(),
                turn_id: "turn_1".into(),
                epoch: 3,
                step_id: "step_1".into(),
                tool_call_id: "call_0".into(),
                channel: "u_7".into(),
                parent_step_id: Some("step_0".into()),
                tracestate: Some("a=b".into()),
                context_box_id: Some("box".into()),
                depth: 2,
                project: Some("shop".into()),
                joined_by: Some("tc_1".into()),
                is_detached: true,
            })),
            depth: 3,
            callback_url: Some("https://hooks.example/a".into()),
            predecessor: Some("tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap()),
            replaces: Some(call().id),
            meta: Some(json(r#"{"example.com/a":1}"#)),
        },
        target: Target {
            tool: "weather.query".into(),
            version: "a1b2".into(),
            executor: Executor::CLIENT,
            traits: Executor::CLIENT.traits(),
            effect: Effect::Idempotent,
            after_execution: Some(AfterExecution::Terminate),
            args: json(r#"{"city":"Oslo"}"#),
        },
        fallbacks: vec![
            target("weather.backup", r#"{"q":"Oslo"}"#),
            Target {
                effect: Effect::Irreversible,
                // Traits that are not those of the executor are stored.
                traits: SourceTraits { retries: false, ..Executor::BUILTIN.traits() },
                ..target("weather.third", "[1]")
            },
        ],
        max_retries: 7,
        backoff: Backoff { initial_ms: 11, factor: 1.7, max_ms: 1_234, jitter: 0.1 },
        hold: Some(Hold::Retry { at_ms: NOW + 777 }),
        attempt: 3,
        target_attempts: 3,
        lost_attempts: 2,
        acknowledged_by: Some("laptop".into()),
        node: Some("node-1".into()),
        started_ms: Some(NOW + 3),
        attempt_dispatched_ms: Some(NOW + 700),
        ..call()
    }
}

pub async fn a_new_call_is_read_back_field_by_field(store: &dyn Store) {
    let full = full_call();
    put(store, &full).await;
    assert_eq!(read(store, &full).await, full);
}

pub async fn arguments_and_results_keep_their_text(store: &dyn Store) {
    let text = r#"{ "price": 1.10, "big": 12345678901234567890.0100, "a":1, "a":2 }"#;
    let mut requested = call();
    requested.args = json(text);
    requested.target.args = json(text);
    requested.fallbacks = vec![target("weather.backup", r#"{"price":2.50}"#)];
    put(store, &requested).await;
    let mut done = ended(&requested, Status::Succeeded, NOW + 1);
    done.outcome.as_mut().unwrap().data = Some(json("1.10"));
    save(store, &done).await;
    let stored = read(store, &requested).await;
    assert_eq!(stored.target.args.text(), text);
    assert_eq!(stored.fallbacks[0].args.text(), r#"{"price":2.50}"#);
    assert_eq!(stored.outcome.unwrap().data.unwrap().text(), "1.10");
}

pub async fn unusual_characters_are_preserved(store: &dyn Store) {
    let odd_text = "Zürich 東京 🦀 'quoted' \"twice\" %_\\ \u{202e} ; DROP TABLE calls";
    // Names cannot contain this character: the transports refuse it.
    let odd_text_with_nul = format!("{odd_text} \u{0}");
    let mut odd_call = call();
    odd_call.project = odd_text.into();
    odd_call.run_id = format!("run {odd_text}");
    odd_call.origin.user_id = Some(odd_text_with_nul.clone());
    odd_call.args =
        toolcrib::Json::from_value(&value!({ odd_text_with_nul.as_str(): odd_text_with_nul }));
    odd_call.target.args = odd_call.args.clone();
    put(store, &odd_call).await;
    assert_eq!(read(store, &odd_call).await, odd_call);
    assert_eq!(ids_of(store, odd_text).await, [odd_call.id]);
}

pub async fn an_unknown_call_is_not_found(store: &dyn Store) {
    put(store, &call()).await;
    assert_eq!(found(store, &call()).await, None);
}

pub async fn a_call_is_not_found_in_another_project(store: &dyn Store) {
    let own_call = call();
    put(store, &own_call).await;
    let foreign_call = Call { project: "q".into(), ..own_call.clone() };
    assert_eq!(found(store, &foreign_call).await, None);
    append(store, &foreign_call, record(EventKind::ReportIgnored)).await;
    assert_eq!(history(store, of_call(&foreign_call)).await, []);
    assert_eq!(store.last_event_number(of_call(&foreign_call)).await.unwrap(), 0);
    let overwritten =
        saving(store, &running(&foreign_call), vec![record(EventKind::Started)]).await.unwrap();
    assert_eq!(overwritten, SaveResult::Conflict);
    assert_eq!(read(store, &own_call).await, own_call);
    assert_eq!(history(store, of_call(&own_call)).await.len(), 1);
}

pub async fn every_status_and_hold_is_read_back(store: &dyn Store) {
    for hold in [Hold::Queue, Hold::Unacknowledged, Hold::Retry { at_ms: NOW + 5 }] {
        let failed = matches!(hold, Hold::Retry { .. })
            .then(|| Box::new(FailedAttempt::new(1, &Fault::runtime("no paper"))));
        let held = Call { hold: Some(hold), failed_attempt: failed, ..call() };
        put(store, &held).await;
        assert_eq!(read(store, &held).await, held);
    }
    let elicitation_with = |open: bool| {
        let word = |key: &str| [(key.to_owned(), value!({ "n": 1 }))].into_iter().collect();
        let open = if open { word("name") } else { Default::default() };
        Some(Box::new(Elicitation {
            unanswered: open,
            answers: word("city"),
            source_state: Some("so far".into()),
            handle: Some("task-7".into()),
        }))
    };
    let hold = Some(Hold::Input { remaining_ms: 400 });
    let waits_for_input =
        Call { hold, deadline_ms: NOW + 3_600_000, elicitation: elicitation_with(true), ..call() };
    let answered = Call { elicitation: elicitation_with(false), ..call() };
    let limited = Call {
        hold: Some(Hold::Unacknowledged),
        attempt_timeout_ms: Some(1_500),
        attempt_deadline_ms: Some(NOW + 1_500),
        input_timeout_ms: 60_000,
        ..call()
    };
    for held in [waits_for_input, answered, limited] {
        put(store, &held).await;
        assert_eq!(read(store, &held).await, held);
    }
    let other = call();
    put(store, &other).await;
    let requested = Origin { predecessor: Some(other.id.clone()), ..call().origin };
    let dependent =
        Call { hold: Some(Hold::Predecessor { timeout_ms: 70 }), origin: requested, ..call() };
    put(store, &dependent).await;
    assert_eq!(read(store, &dependent).await, dependent);
    let (hold, deadline_ms) = (Some(Hold::Queue), dependent.deadline_ms - 5);
    let queued = Call { hold, deadline_ms, version: dependent.version + 1, ..dependent };
    assert_eq!(saving(store, &queued, vec![]).await.unwrap(), SaveResult::Saved);
    assert_eq!(read(store, &queued).await, queued);
    for status in Status::ALL {
        let waiting = call();
        let next = match status {
            Status::Pending => continue,
            Status::Running => Call { acknowledged_by: Some("laptop".into()), ..running(&waiting) },
            _ => ended(&waiting, status, NOW + 9),
        };
        put(store, &waiting).await;
        save(store, &next).await;
        assert_eq!(read(store, &waiting).await, next);
        if status == Status::Succeeded {
            let (requested, mut partial_call) = (call(), next.clone());
            partial_call.id = requested.id.clone();
            partial_call.outcome.as_mut().unwrap().partial = true;
            put(store, &requested).await;
            save(store, &partial_call).await;
            assert_eq!(read(store, &requested).await, partial_call);
        }
        // A call may also be stored for the first time in its later state.
        let at_once = Call { id: call().id, version: 1, ..next };
        put(store, &at_once).await;
        assert_eq!(read(store, &at_once).await, at_once);
    }
}

pub async fn a_fault_is_read_back_with_all_fields(store: &dyn Store) {
    let detail = value!({ "problems": [{ "at": "/city", "why": "fehlt 🦀" }], "n": 1.5 });
    for code in Code::all() {
        let plain = Fault::new(code, "the sky fell");
        let detailed = Fault::new(code, "").with_detail(detail.clone()).without_side_effect();
        for fault in [plain, detailed.clone().retryable(true), detailed.retryable(false)] {
            let waiting = call();
            put(store, &waiting).await;
            let mut failed = ended(&waiting, Status::Failed, NOW + 9);
            failed.outcome.as_mut().unwrap().error = Some(fault);
            save(store, &failed).await;
            assert_eq!(read(store, &waiting).await, failed);
        }
    }
}

pub async fn a_rejected_raw_result_is_stored_with_its_fault(store: &dyn Store) {
    let raw = r#"{ "price": 1.10, "deep": [[["🦀", null]]] }"#;
    let waiting = call();
    put(store, &waiting).await;
    let mut failed = ended(&waiting, Status::Failed, NOW + 9);
    let fault = Fault::new(Code::ValidationError, "does not fit").with_raw(json(raw));
    failed.outcome.as_mut().unwrap().error = Some(fault);
    save(store, &failed).await;
    let stored = read(store, &waiting).await;
    assert_eq!(stored, failed);
    let stored_raw = stored.outcome.unwrap().error.unwrap().raw.unwrap();
    assert_eq!(stored_raw.text(), raw, "the raw text is unchanged");
}

/// Applies a fallback like `lifecycle`: it leaves the list, and its attempts are counted from zero.
fn apply_fallback(call: &Call) -> Call {
    let mut next = running(call);
    next.target = next.fallbacks.remove(0);
    next.target_attempts = 0;
    (next.status, next.hold) = (Status::Pending, Some(Hold::Retry { at_ms: NOW + 20 }));
    next
}

pub async fn a_fallback_that_became_the_target_is_read_back(store: &dyn Store) {
    let alternatives =
        vec![target("weather.backup", r#"{"q":1.10}"#), target("weather.third", "[]")];
    let first = Call { fallbacks: alternatives, ..call() };
    put(store, &first).await;
    let fallback_call = apply_fallback(&first);
    save(store, &fallback_call).await;
    let stored = read(store, &first).await;
    assert_eq!(stored, fallback_call);
    assert_eq!(stored.target.args.text(), r#"{"q":1.10}"#);
    let again = running(&fallback_call);
    save(store, &again).await;
    assert_eq!(read(store, &first).await, again);
}

pub async fn a_fallback_to_the_same_tool_keeps_its_own_arguments(store: &dyn Store) {
    let alternatives = vec![target("weather.query", r#"{"city":"Bergen"}"#)];
    let first = Call { fallbacks: alternatives, ..call() };
    put(store, &first).await;
    let fallback_call = apply_fallback(&first);
    save(store, &fallback_call).await;
    assert_eq!(read(store, &first).await.target.args.text(), r#"{"city":"Bergen"}"#);
    save(store, &running(&fallback_call)).await;
    assert_eq!(read(store, &first).await.target.args.text(), r#"{"city":"Bergen"}"#);
}

pub async fn saving_the_next_version_replaces_the_call(store: &dyn Store) {
    let (first, other) = (full_call(), full_call());
    put(store, &first).await;
    put(store, &other).await;
    let second = running(&first);
    save(store, &second).await;
    assert_eq!(read(store, &first).await, second);
    let third = ended(&second, Status::Succeeded, NOW + 40);
    save(store, &third).await;
    assert_eq!(read(store, &first).await, third);
    assert_eq!(read(store, &other).await, other);
}

pub async fn saving_a_stale_version_is_a_conflict(store: &dyn Store) {
    let first = call();
    put(store, &first).await;
    let second = running(&first);
    save(store, &second).await;
    let before = history(store, of_call(&first)).await;
    for version in [0, 1, 2, 4, 9] {
        let stale = Call { version, ..ended(&first, Status::Canceled, NOW + 1) };
        let late = vec![record(EventKind::Canceled)];
        assert_eq!(
            saving(store, &stale, late).await.unwrap(),
            SaveResult::Conflict,
            "version {version}"
        );
    }
    assert_eq!(read(store, &first).await, second);
    assert_eq!(history(store, of_call(&first)).await, before);
}

pub async fn saving_an_unknown_call_is_a_conflict(store: &dyn Store) {
    let unknown = running(&call());
    let records = vec![record(EventKind::Started)];
    assert_eq!(saving(store, &unknown, records).await.unwrap(), SaveResult::Conflict);
    assert_eq!(found(store, &unknown).await, None);
    assert_eq!(history(store, of_call(&unknown)).await, []);
}

pub async fn one_of_many_concurrent_saves_of_a_version_succeeds(store: &dyn Store) {
    let first = call();
    put(store, &first).await;
    let saved = on_threads(8, async |n| {
        let next = Call { node: Some(format!("node-{n}")), ..running(&first) };
        let won = record(EventKind::Started).with("node", n);
        (n, saving(store, &next, vec![won]).await.unwrap())
    });
    let winners: Vec<usize> = saved
        .into_iter()
        .filter(|(_, saved)| *saved == SaveResult::Saved)
        .map(|(n, _)| n)
        .collect();
    assert_eq!(winners.len(), 1);
    assert_eq!(read(store, &first).await.node, Some(format!("node-{}", winners[0])));
    let events = history(store, of_call(&first)).await;
    assert_eq!(events.len(), 2);
    assert_eq!(events[1].record.data["node"], winners[0]);
}

pub async fn the_health_check_succeeds(store: &dyn Store) {
    store.check_health().await.unwrap();
    put(store, &call()).await;
    store.check_health().await.unwrap();
    store.size_bytes().await.unwrap();
}

/// The deadline of an open call moves when the system time is changed.
pub async fn a_deadline_that_moved_is_read_back(store: &dyn Store) {
    let stored = call();
    put(store, &stored).await;
    let mut moved = running(&stored);
    moved.shift_schedule(-3_600_000);
    save(store, &moved).await;
    assert_eq!(read(store, &stored).await.deadline_ms, stored.deadline_ms - 3_600_000);
    assert_eq!(store.open_calls(0, 10).await.unwrap()[0].call, moved);
}
