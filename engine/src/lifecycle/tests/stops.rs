//! Kill switches, and calls that wait for a predecessor.

use super::*;

/// Returns the event of a kill switch on the tool.
pub(super) fn switched_off() -> Event {
    let fault = Fault::new(Code::PermissionDenied, "tool \"t\" is switched off: wrong receivers");
    Event::SwitchedOff { fault: fault.without_side_effect() }
}

#[test]
fn a_kill_switch_says_if_the_attempt_may_have_happened() {
    let end = |executor: Executor, effect: Effect, state: State| {
        let mut call = call_in(executor, state);
        call.target.effect = effect;
        let step = step(&call, &switched_off(), NOW).unwrap();
        (step.call.outcome.unwrap().error.unwrap(), step.actions)
    };
    let (fault, actions) = end(Executor::BUILTIN, Effect::Irreversible, State::Running);
    assert_eq!((fault.code, fault.retryable), (Code::OutcomeUnknown, false));
    assert_eq!(fault.side_effect, SideEffect::Possible);
    assert!(fault.message.contains("wrong receivers"), "{fault}");
    assert!(fault.message.contains(MAY_HAVE_HAPPENED), "{fault}");
    assert!(matches!(actions[..], [Action::Stop { .. }, Action::NotifyEnded]), "{actions:?}");
    for effect in [Effect::Read, Effect::Idempotent] {
        let (fault, _) = end(Executor::BUILTIN, effect, State::Running);
        assert_eq!((fault.code, fault.retryable), (Code::PermissionDenied, false));
        assert_eq!(fault.message.contains("may have taken effect"), effect != Effect::Read);
    }
    // A client acknowledges an attempt before it starts; a tool service need not.
    let (fault, _) = end(Executor::CLIENT, Effect::Irreversible, State::Unacknowledged);
    assert_eq!(fault.code, Code::PermissionDenied);
    let (fault, _) = end(Executor::UTP, Effect::Irreversible, State::Unacknowledged);
    assert_eq!(fault.code, Code::OutcomeUnknown);
    let queued = queued_call(Executor::BUILTIN, Effect::Irreversible);
    let fault = step(&queued, &switched_off(), NOW).unwrap().call.outcome.unwrap().error.unwrap();
    assert_eq!((fault.code, fault.side_effect), (Code::PermissionDenied, SideEffect::None));
}

#[test]
fn a_call_that_waits_for_input_says_that_it_may_have_happened() {
    let states = |effect: Effect| {
        let mut waiting = call_in(Executor::BUILTIN, State::Input);
        waiting.target.effect = effect;
        // The answers are there, and no slot is free.
        let answered = step(&waiting, &answers(&["name", "city"]), NOW).unwrap().call;
        assert_eq!(answered.hold, Some(Hold::Queue));
        [waiting, answered]
    };
    let ends = |call: &Call| {
        let canceled = (event_of(Case::Cancel).0, Code::Canceled, Code::Canceled);
        let denied = Code::PermissionDenied;
        let revoked = (event_of(Case::PermissionRevoked).0, Code::OutcomeUnknown, denied);
        let switched = (switched_off(), Code::OutcomeUnknown, denied);
        let late = (Event::Deadline, Code::Timeout, Code::Timeout);
        [canceled, revoked, switched, late].map(|(event, irreversible, other)| {
            let end = step(call, &event, call.deadline_ms).unwrap().call;
            (end.outcome.unwrap().error.unwrap(), irreversible, other)
        })
    };
    for call in states(Effect::Irreversible) {
        for (fault, code, _) in ends(&call) {
            assert_eq!((fault.code, fault.retryable), (code, false), "{fault}");
            assert_eq!(fault.side_effect, SideEffect::Possible, "{fault}");
            assert!(fault.message.contains("had begun when it requested input"), "{fault}");
            assert!(fault.message.ends_with(MAY_HAVE_HAPPENED), "{fault}");
        }
    }
    for call in states(Effect::Idempotent) {
        for (fault, _, code) in ends(&call) {
            assert_eq!((fault.code, fault.side_effect), (code, SideEffect::Possible), "{fault}");
            assert_eq!(fault.retryable, code == Code::Timeout, "{fault}");
            assert!(fault.message.ends_with("may have taken effect"), "{fault}");
        }
    }
    for call in states(Effect::Read) {
        for (fault, _, code) in ends(&call) {
            assert_eq!((fault.code, fault.retryable), (code, code == Code::Timeout), "{fault}");
            assert!(!fault.message.contains("may have"), "{fault}");
        }
    }
}

/// Returns calls whose tool requested input, with the answers: each waits for something else.
fn answered_calls(executor: Executor, effect: Effect) -> Vec<Call> {
    let mut waiting = call_in(executor, State::Input);
    waiting.target.effect = effect;
    let queued = step(&waiting, &answers(&["name", "city"]), NOW).unwrap().call;
    let held = step(&queued, &approvals::required("apr_1"), NOW).unwrap().call;
    let replace = approvals::decided("apr_1", ApprovalVerdict::Replace { deadline_ms: DEADLINE });
    let replaced = step(&held, &replace, NOW).unwrap().call;
    let continued = step(&queued, &claim_by("n1"), NOW).unwrap().call;
    let harmless = failure_report(Some(continued.attempt), Fault::unreachable("refused"));
    let retried = step(&continued, &harmless, NOW).unwrap().call;
    assert!(matches!(retried.hold, Some(Hold::Retry { .. })), "{:?}", retried.hold);
    vec![queued, held, replaced, retried]
}

#[test]
fn an_answered_call_says_that_it_may_have_happened_whatever_it_waits_for() {
    let end = |call: &Call, event: &Event, at_ms: u64| {
        step(call, event, at_ms).unwrap().call.outcome.unwrap().error.unwrap()
    };
    for executor in [Executor::BUILTIN, Executor::CLIENT] {
        for call in answered_calls(executor, Effect::Irreversible) {
            assert!(call.is_interrupted(), "{:?}", call.hold);
            let revoked = event_of(Case::PermissionRevoked).0;
            let mut faults = vec![
                end(&call, &event_of(Case::Cancel).0, NOW),
                end(&call, &revoked, NOW),
                end(&call, &switched_off(), NOW),
            ];
            if !matches!(call.hold, Some(Hold::Predecessor { .. })) {
                faults.push(end(&call, &Event::Deadline, call.deadline_ms));
            }
            if call.waits_for_approval() {
                let rejected = approvals::decided("apr_1", ApprovalVerdict::Reject);
                faults.push(end(&call, &rejected, NOW));
                let both = &faults[faults.len() - 2..];
                assert!(both.iter().all(|fault| fault.code == Code::OutcomeUnknown), "{both:?}");
            }
            for fault in faults {
                assert_eq!((fault.side_effect, fault.retryable), (SideEffect::Possible, false));
                assert!(fault.message.ends_with(MAY_HAVE_HAPPENED), "{fault}");
                assert!(fault.message.contains(HAD_BEGUN), "{fault}");
            }
        }
        for call in answered_calls(executor, Effect::Idempotent) {
            let fault = end(&call, &Event::Deadline, call.deadline_ms);
            assert_eq!(fault.side_effect, SideEffect::Possible, "{:?} {fault}", call.hold);
        }
    }
    let rejected = approvals::decided("apr_1", ApprovalVerdict::Reject);
    let new = approvals::waiting_call(queued_call(Executor::BUILTIN, Effect::Irreversible));
    let fault = end(&new, &rejected, NOW);
    assert_eq!((fault.code, fault.side_effect), (Code::PermissionDenied, SideEffect::None));
}

#[test]
fn no_tool_receives_the_answers_that_another_one_requested() {
    let fallback = Target { tool: "other".into(), ..running_call(Effect::Read).target };
    for (effect, replaced) in [(Effect::Read, true), (Effect::Irreversible, false)] {
        let mut call = answered_calls(Executor::BUILTIN, effect).remove(0);
        (call.max_retries, call.fallbacks) = (0, vec![fallback.clone()]);
        let call = step(&call, &claim_by("n1"), NOW).unwrap().call;
        let failed = failure_report(Some(call.attempt), Fault::unreachable("refused"));
        let next = step(&call, &failed, NOW).unwrap().call;
        assert_eq!(next.target.tool == "other", replaced, "{effect:?}");
        if replaced {
            assert_eq!(next.elicitation, None);
            continue;
        }
        // The tool had begun before it asked, so nothing replaces it.
        let fault = next.outcome.as_ref().unwrap().error.clone().unwrap();
        assert_eq!((fault.side_effect, fault.retryable), (SideEffect::Possible, false), "{fault}");
        assert_eq!(step(&next, &failed, NOW), Err(Refusal::Duplicate));
    }
}

#[test]
fn a_message_inside_another_one_loses_its_whole_warning() {
    let fault_of = |call: &Call, event: &Event, at_ms: u64| {
        step(call, event, at_ms).unwrap().call.outcome.unwrap().error.unwrap().message
    };
    let cancel = event_of(Case::Cancel).0;
    let running = call_in(Executor::BUILTIN, State::Running);
    let waiting = call_in(Executor::BUILTIN, State::Input);
    let sent = call_in(Executor::UTP, State::Unacknowledged);
    let lost = event_of(Case::OwnerLost).0;
    let (due, attempt) = (event_of(Case::DeadlineDue), event_of(Case::AttemptDeadlineDue));
    let reported = event_of(Case::ReportedFailure).0;
    let question = sent.target.executor.availability_question();
    let no_service = format!(
        "t did not answer within {} ms, and no tool service announced that it took the call: \
         {question}?",
        DEADLINE - CREATED
    );
    let messages = [
        (fault_of(&running, &cancel, NOW), "canceled by a"),
        (fault_of(&waiting, &cancel, NOW), "canceled by a"),
        (fault_of(&running, &lost, NOW), "the server stopped while t was in flight"),
        (fault_of(&running, &due.0, due.1), "t did not answer within 30000 ms"),
        (fault_of(&running, &attempt.0, attempt.1), "t did not answer attempt 2 within 9000 ms"),
        (fault_of(&running, &reported, NOW), "broken"),
        (
            fault_of(&waiting, &due.0, due.1),
            "t requested input and got no answer within 3600000 ms; it does not continue",
        ),
        (fault_of(&sent, &due.0, due.1), no_service.as_str()),
        (fault_of(&running, &switched_off(), NOW), "tool \"t\" is switched off: wrong receivers"),
    ];
    for (message, rest) in &messages {
        assert!(message.ends_with(MAY_HAVE_HAPPENED), "{message}");
        assert_eq!(split_warning(message), (*rest, true), "{message}");
    }
    assert_eq!(split_warning("broken"), ("broken", false));
    let twice = format!("x; {MAY_HAVE_HAPPENED}; {MAY_HAVE_HAPPENED}");
    assert_eq!(split_warning(&twice), ("x", true));
}

#[test]
fn a_call_executes_nothing_before_its_predecessor_ends() {
    let waiting = call_in(Executor::BUILTIN, State::Predecessor);
    let (lost, now) = event_of(Case::OwnerLost);
    let recovered = step(&waiting, &lost, now).unwrap();
    assert_eq!(
        (recovered.call.hold, recovered.actions),
        (waiting.hold, vec![Action::AwaitPredecessor])
    );
    let canceled = step(&waiting, &event_of(Case::Cancel).0, NOW).unwrap();
    assert_eq!(canceled.actions, [Action::NotifyEnded]);
    let late = step(&waiting, &Event::Deadline, DEADLINE).unwrap().call;
    let fault = late.outcome.unwrap().error.unwrap();
    assert!(fault.message.contains("the call before t had not ended"), "{fault}");
    assert_eq!((fault.retryable, fault.side_effect), (true, SideEffect::None));
}

#[test]
fn the_timeout_of_a_successor_starts_when_its_predecessor_ends() {
    for (timeout_ms, deadline_ms) in [(40, NOW + 40), (u64::MAX, DEADLINE)] {
        let hold = Some(Hold::Predecessor { timeout_ms });
        let waiting = Call { hold, ..queued_call(Executor::BUILTIN, Effect::Read) };
        let queued = step(&waiting, &Event::PredecessorEnded, NOW).unwrap();
        assert_eq!(queued.actions, [Action::Enqueue]);
        assert_eq!((queued.call.hold, queued.call.deadline_ms), (Some(Hold::Queue), deadline_ms));
        let claimed = step(&queued.call, &claim_by("n1"), NOW).unwrap();
        assert_eq!(claimed.call.status, Status::Running);
        assert_eq!(
            step(&queued.call, &Event::PredecessorEnded, NOW),
            Err(Refusal::NotApplicable),
            "once"
        );
    }
}
