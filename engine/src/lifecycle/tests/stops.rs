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
