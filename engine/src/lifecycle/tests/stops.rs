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
