//! Calls: a stored call reads back unchanged, and a save replaces exactly the preceding version.

use serde_json::json as value;
use toolcrib::domain::call::{Call, FailedAttempt, Hold, Origin, Status, Target};
use toolcrib::domain::elicitation::Elicitation;
use toolcrib::domain::event::EventKind;
use toolcrib::domain::fault::{Code, Fault};
use toolcrib::domain::retry::Backoff;
use toolcrib::domain::tool::{Effect, Executor};
use toolcrib::domain::utp::Route;
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
            })),
            callback_url: Some("https://hooks.example/a".into()),
            predecessor: Some("tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse().unwrap()),
        },
        target: Target {
            tool: "weather.query".into(),
            version: "a1b2".into(),
            executor: Executor::Client,
            effect: Effect::Idempotent,
            args: json(r#"{"city":"Oslo"}"#),
        },
        fallbacks: vec![
            target("weather.backup", r#"{"q":"Oslo"}"#),
            Target { effect: Effect::Irreversible, ..target("weather.third", "[1]") },
        ],
        max_retries: 7,
        backoff: Backoff { initial_ms: 11, factor: 1.7, max_ms: 1_234, jitter: 0.1 },
        hold: Some(Hold::Retry { at_ms: NOW + 777 }),
        attempt: 3,
        target_attempts: 3,
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
    let mut asked = call();
    asked.args = json(text);
    asked.target.args = json(text);
    asked.fallbacks = vec![target("weather.backup", r#"{"price":2.50}"#)];
    put(store, &asked).await;
    let mut done = ended(&asked, Status::Succeeded, NOW + 1);
    done.outcome.as_mut().unwrap().data = Some(json("1.10"));
    save(store, &done).await;
    let stored = read(store, &asked).await;
    assert_eq!(stored.target.args.text(), text);
    assert_eq!(stored.fallbacks[0].args.text(), r#"{"price":2.50}"#);
    assert_eq!(stored.outcome.unwrap().data.unwrap().text(), "1.10");
}

pub async fn text_of_every_kind_is_kept(store: &dyn Store) {
    let odd = "Zürich 東京 🦀 'quoted' \"twice\" %_\\ \u{202e} ; DROP TABLE calls";
    // Names cannot contain this character: the transports refuse it.
    let odder = format!("{odd} \u{0}");
    let mut strange = call();
    strange.project = odd.into();
    strange.run_id = format!("run {odd}");
    strange.origin.user_id = Some(odder.clone());
    strange.args = toolcrib::Json::from_value(&value!({ odder.as_str(): odder }));
    strange.target.args = strange.args.clone();
    put(store, &strange).await;
    assert_eq!(read(store, &strange).await, strange);
    assert_eq!(ids_of(store, odd).await, [strange.id]);
}

pub async fn an_unknown_call_is_none(store: &dyn Store) {
    put(store, &call()).await;
    assert_eq!(found(store, &call()).await, None);
}

pub async fn a_call_of_another_project_is_none(store: &dyn Store) {
    let mine = call();
    put(store, &mine).await;
    let theirs = Call { project: "q".into(), ..mine.clone() };
    assert_eq!(found(store, &theirs).await, None);
    append(store, &theirs, record(EventKind::ReportIgnored)).await;
    assert_eq!(history(store, of_call(&theirs)).await, []);
    assert_eq!(store.last_event_number(of_call(&theirs)).await.unwrap(), 0);
    let stolen = saving(store, &running(&theirs), vec![record(EventKind::Started)]).await.unwrap();
    assert_eq!(stolen, SaveResult::Conflict);
    assert_eq!(read(store, &mine).await, mine);
    assert_eq!(history(store, of_call(&mine)).await.len(), 1);
}

pub async fn every_status_and_hold_is_read_back(store: &dyn Store) {
    for hold in [Hold::Queue, Hold::Unacknowledged, Hold::Retry { at_ms: NOW + 5 }] {
        let failed = matches!(hold, Hold::Retry { .. })
            .then(|| Box::new(FailedAttempt::new(1, &Fault::runtime("no paper"))));
        let held = Call { hold: Some(hold), failed_attempt: failed, ..call() };
        put(store, &held).await;
        assert_eq!(read(store, &held).await, held);
    }
    let dialogue = |open: bool| {
        let word = |key: &str| [(key.to_owned(), value!({ "n": 1 }))].into_iter().collect();
        let open = if open { word("name") } else { Default::default() };
        Some(Box::new(Elicitation {
            unanswered: open,
            answers: word("city"),
            source_state: Some("so far".into()),
            handle: Some("task-7".into()),
        }))
    };
    let asking = Call { hold: Some(Hold::Input), elicitation: dialogue(true), ..call() };
    let answered = Call { elicitation: dialogue(false), ..call() };
    for held in [asking, answered] {
        put(store, &held).await;
        assert_eq!(read(store, &held).await, held);
    }
    let other = call();
    put(store, &other).await;
    let asked = Origin { predecessor: Some(other.id.clone()), ..call().origin };
    let behind = Call { hold: Some(Hold::Predecessor { timeout_ms: 70 }), origin: asked, ..call() };
    put(store, &behind).await;
    assert_eq!(read(store, &behind).await, behind);
    let (hold, deadline_ms) = (Some(Hold::Queue), behind.deadline_ms - 5);
    let in_line = Call { hold, deadline_ms, version: behind.version + 1, ..behind };
    assert_eq!(saving(store, &in_line, vec![]).await.unwrap(), SaveResult::Saved);
    assert_eq!(read(store, &in_line).await, in_line);
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
            let (asked, mut partly) = (call(), next.clone());
            partly.id = asked.id.clone();
            partly.outcome.as_mut().unwrap().partial = true;
            put(store, &asked).await;
            save(store, &partly).await;
            assert_eq!(read(store, &asked).await, partly);
        }
        // A call may also be stored for the first time in its later state.
        let at_once = Call { id: call().id, version: 1, ..next };
        put(store, &at_once).await;
        assert_eq!(read(store, &at_once).await, at_once);
    }
}

pub async fn a_fault_is_read_back_with_all_it_says(store: &dyn Store) {
    let detail = value!({ "problems": [{ "at": "/city", "why": "fehlt 🦀" }], "n": 1.5 });
    for code in Code::all() {
        let plain = Fault::new(code, "the sky fell");
        let told = Fault::new(code, "").with_detail(detail.clone()).without_side_effect();
        for fault in [plain, told.clone().retryable(true), told.retryable(false)] {
            let waiting = call();
            put(store, &waiting).await;
            let mut failed = ended(&waiting, Status::Failed, NOW + 9);
            failed.outcome.as_mut().unwrap().error = Some(fault);
            save(store, &failed).await;
            assert_eq!(read(store, &waiting).await, failed);
        }
    }
}

pub async fn what_a_tool_gave_and_was_refused_is_kept_with_its_fault(store: &dyn Store) {
    let raw = r#"{ "price": 1.10, "deep": [[["🦀", null]]] }"#;
    let waiting = call();
    put(store, &waiting).await;
    let mut failed = ended(&waiting, Status::Failed, NOW + 9);
    let fault = Fault::new(Code::ValidationError, "does not fit").with_raw(json(raw));
    failed.outcome.as_mut().unwrap().error = Some(fault);
    save(store, &failed).await;
    let stored = read(store, &waiting).await;
    assert_eq!(stored, failed);
    let kept = stored.outcome.unwrap().error.unwrap().raw.unwrap();
    assert_eq!(kept.text(), raw, "as it was given");
}

/// Applies a fallback like `lifecycle`: it leaves the list, and its attempts are counted from zero.
fn fallen_back(call: &Call) -> Call {
    let mut next = running(call);
    next.target = next.fallbacks.remove(0);
    next.target_attempts = 0;
    (next.status, next.hold) = (Status::Pending, Some(Hold::Retry { at_ms: NOW + 20 }));
    next
}

pub async fn an_alternate_in_the_targets_place_is_read_back(store: &dyn Store) {
    let alternates = vec![target("weather.backup", r#"{"q":1.10}"#), target("weather.third", "[]")];
    let first = Call { fallbacks: alternates, ..call() };
    put(store, &first).await;
    let fallen = fallen_back(&first);
    save(store, &fallen).await;
    let stored = read(store, &first).await;
    assert_eq!(stored, fallen);
    assert_eq!(stored.target.args.text(), r#"{"q":1.10}"#);
    let again = running(&fallen);
    save(store, &again).await;
    assert_eq!(read(store, &first).await, again);
}

pub async fn an_alternate_of_the_same_name_keeps_its_own_arguments(store: &dyn Store) {
    let alternates = vec![target("weather.query", r#"{"city":"Bergen"}"#)];
    let first = Call { fallbacks: alternates, ..call() };
    put(store, &first).await;
    let fallen = fallen_back(&first);
    save(store, &fallen).await;
    assert_eq!(read(store, &first).await.target.args.text(), r#"{"city":"Bergen"}"#);
    save(store, &running(&fallen)).await;
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

pub async fn saving_a_stale_version_changes_nothing(store: &dyn Store) {
    let first = call();
    put(store, &first).await;
    let second = running(&first);
    save(store, &second).await;
    let told = history(store, of_call(&first)).await;
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
    assert_eq!(history(store, of_call(&first)).await, told);
}

pub async fn saving_an_unknown_call_is_stale(store: &dyn Store) {
    let unknown = running(&call());
    let records = vec![record(EventKind::Started)];
    assert_eq!(saving(store, &unknown, records).await.unwrap(), SaveResult::Conflict);
    assert_eq!(found(store, &unknown).await, None);
    assert_eq!(history(store, of_call(&unknown)).await, []);
}

pub async fn of_many_savers_of_one_version_one_wins(store: &dyn Store) {
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
    let told = history(store, of_call(&first)).await;
    assert_eq!(told.len(), 2);
    assert_eq!(told[1].record.data["node"], winners[0]);
}

pub async fn the_store_says_it_is_well(store: &dyn Store) {
    store.check_health().await.unwrap();
    put(store, &call()).await;
    store.check_health().await.unwrap();
    store.size_bytes().await.unwrap();
}
