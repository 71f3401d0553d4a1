//! The time of attempts, the wait for input, and the final fault of an irreversible tool.

use super::*;

/// Returns a running call of a function in this process, with its fallbacks.
fn running_with(effect: Effect, fallbacks: usize, attempt_timeout_ms: Option<u64>) -> Call {
    let mut call = queued_call(Executor::BUILTIN, effect);
    let fallback = Target { tool: "other".into(), ..call.target.clone() };
    call.fallbacks = vec![fallback; fallbacks];
    call.attempt_timeout_ms = attempt_timeout_ms;
    step(&call, &claim_by("n1"), NOW).unwrap().call
}

fn time_out_attempt_at(call: &Call, now: u64, delivered_ms: Option<u64>) -> Transition {
    let event = Event::AttemptDeadline { attempt: call.attempt, delivered_ms };
    step(call, &event, now).unwrap()
}

#[test]
fn each_attempt_gets_an_equal_part_of_the_remaining_time() {
    use Effect::{Idempotent, Irreversible, Read};
    let remaining = DEADLINE - NOW;
    for (effect, fallbacks, limit_ms, part_ms) in [
        (Read, 0, None, Some(remaining / 3)),
        // Each fallback may be retried as often as the tool itself.
        (Read, 1, None, Some(remaining / 6)),
        // No fallback follows an attempt that may have had an effect, and no attempt one that may
        // have had an irreversible effect.
        (Idempotent, 1, None, Some(remaining / 3)),
        (Irreversible, 1, None, None),
        (Irreversible, 0, Some(500), Some(500)),
        (Read, 2, Some(500), Some(500)),
        (Read, 2, Some(remaining), None),
    ] {
        let call = running_with(effect, fallbacks, limit_ms);
        assert_eq!(call.attempt_deadline_ms, part_ms.map(|ms| NOW + ms), "{effect:?} {fallbacks}");
    }
    // A retry that would start after the deadline gets no part.
    let short = Call { deadline_ms: NOW + 120, ..queued_call(Executor::BUILTIN, Read) };
    assert_eq!(step(&short, &claim_by("n1"), NOW).unwrap().call.attempt_deadline_ms, None);
}

#[test]
fn a_hung_attempt_is_stopped_and_its_retries_and_fallbacks_run() {
    let mut call = running_with(Effect::Read, 1, Some(1_000));
    let (mut now, mut tools) = (NOW, Vec::new());
    while call.status == Status::Running {
        tools.push(call.target.tool.clone());
        now += 1_000;
        assert_eq!(call.attempt_deadline_ms, Some(now));
        let next = time_out_attempt_at(&call, now, None);
        assert_eq!(next.actions[0], Action::Stop { attempt: call.attempt });
        call = next.call;
        if let Some(Hold::Retry { at_ms }) = call.hold {
            assert_eq!(call.attempt_deadline_ms, None);
            now = at_ms;
            call = step(&call, &claim_by("n1"), now).unwrap().call;
        }
    }
    assert_eq!(tools, ["t", "t", "t", "other", "other", "other"]);
    let fault = call.outcome.unwrap().error.unwrap();
    assert_eq!((call.status, fault.code), (Status::Timeout, Code::Timeout));
    assert!(fault.message.contains("did not answer attempt 6 within 1000 ms"), "{fault}");
}

#[test]
fn an_irreversible_attempt_that_may_have_begun_ends_with_an_unknown_outcome() {
    let call = running_with(Effect::Irreversible, 1, Some(1_000));
    let ended = time_out_attempt_at(&call, NOW + 1_000, None);
    assert_eq!(ended.actions, [Action::Stop { attempt: 1 }, Action::NotifyEnded]);
    let fault = ended.call.outcome.unwrap().error.unwrap();
    assert_eq!((ended.call.status, fault.code), (Status::Failed, Code::OutcomeUnknown));
    assert!(!fault.retryable && fault.message.contains("a retry is not safe"), "{fault}");
}

/// Returns an unacknowledged call of a client's tool.
fn unacknowledged(effect: Effect, fallbacks: usize) -> Call {
    let mut call = queued_call(Executor::CLIENT, effect);
    call.fallbacks = vec![queued_call(Executor::BUILTIN, Effect::Read).target; fallbacks];
    call.attempt_timeout_ms = Some(2_000);
    step(&call, &claim_by("n1"), NOW).unwrap().call
}

#[test]
fn waiting_for_an_absent_client_is_not_an_attempt() {
    let call = unacknowledged(Effect::Irreversible, 0);
    let waits = time_out_attempt_at(&call, NOW + 2_000, None);
    assert_eq!((waits.call.hold, waits.call.attempt), (Some(Hold::Unacknowledged), 1));
    assert!(waits.actions.is_empty() && waits.records.is_empty());
    assert_eq!(waits.call.attempt_deadline_ms, Some(NOW + 4_000));
    // A client that receives it late has the whole time of an attempt.
    let late = time_out_attempt_at(&waits.call, NOW + 4_000, Some(NOW + 3_500));
    assert_eq!(late.call.attempt_deadline_ms, Some(NOW + 5_500));
    // A client that does not acknowledge it has not begun: it is retried, regardless of its effect.
    let silent = time_out_attempt_at(&late.call, NOW + 5_500, Some(NOW + 3_500));
    assert!(matches!(silent.call.hold, Some(Hold::Retry { .. })), "{:?}", silent.call.hold);
    // With a fallback, the absence of the client is no reason to wait for the deadline.
    let replaced = time_out_attempt_at(&unacknowledged(Effect::Irreversible, 1), NOW + 2_000, None);
    assert!(replaced.records.iter().any(|record| record.kind == EventKind::Fallback));
    assert_eq!(replaced.call.target_attempts, 0);
}

#[test]
fn an_acknowledged_attempt_has_its_whole_time() {
    let call = unacknowledged(Effect::Read, 0);
    let by = |by: &str, instead_of: Option<&str>| Event::Acknowledged {
        attempt: 1,
        by: by.into(),
        instead_of: instead_of.map(str::to_owned),
    };
    let first = step(&call, &by("c1", None), NOW + 1_500).unwrap().call;
    assert_eq!(first.attempt_deadline_ms, Some(NOW + 3_500));
    let second = step(&first, &by("c2", Some("c1")), NOW + 3_000).unwrap().call;
    assert_eq!(second.attempt_deadline_ms, Some(NOW + 5_000), "the client that takes over");
    let lost = step(&second, &Event::OwnerLost { node: "n2".into() }, NOW + 4_000).unwrap().call;
    assert_eq!(lost.attempt_deadline_ms, Some(NOW + 6_000), "after a restart");
}

#[test]
fn the_wait_for_input_does_not_count_against_the_deadline() {
    let asks = |call: &Call, now| {
        let event = Event::InputRequired { attempt: call.attempt, questions: questions() };
        step(call, &event, now).unwrap().call
    };
    let remaining = DEADLINE - NOW - 400;
    let waiting = asks(&running_with(Effect::Irreversible, 0, None), NOW + 400);
    assert_eq!(waiting.hold, Some(Hold::Input { remaining_ms: remaining }));
    assert_eq!(waiting.deadline_ms, NOW + 400 + INPUT_TIMEOUT);
    assert!(step(&waiting, &Event::Deadline, DEADLINE).is_err(), "only the input timeout ends it");
    let later = DEADLINE + 600_000;
    let some = step(&waiting, &answers(&["city"]), later).unwrap().call;
    assert_eq!(some.deadline_ms, waiting.deadline_ms);
    let queued = step(&some, &answers(&["name"]), later).unwrap().call;
    assert_eq!((queued.hold, queued.deadline_ms), (Some(Hold::Queue), later + remaining));
    let again = step(&queued, &claim_by("n1"), later).unwrap().call;
    let again = asks(&again, later + 100);
    assert_eq!(again.hold, Some(Hold::Input { remaining_ms: remaining - 100 }), "each round");
    let ended = step(&waiting, &Event::Deadline, waiting.deadline_ms).unwrap().call;
    let fault = ended.outcome.unwrap().error.unwrap();
    assert_eq!((ended.status, fault.code), (Status::Timeout, Code::Timeout));
    assert!(fault.message.contains("got no answer within 3600000 ms"), "{fault}");
}

#[test]
fn a_call_waits_as_long_as_its_predecessor_waits_for_input() {
    let waiting = call_in(Executor::BUILTIN, State::Predecessor);
    let longer = Event::PredecessorExtended { deadline_ms: NOW + INPUT_TIMEOUT };
    let extended = step(&waiting, &longer, DEADLINE).unwrap().call;
    assert_eq!((extended.hold, extended.deadline_ms), (waiting.hold, NOW + INPUT_TIMEOUT + 40));
    assert_eq!(step(&extended, &longer, DEADLINE), Err(Refusal::NotApplicable));
}

#[test]
fn a_call_between_attempts_tells_if_an_earlier_one_may_have_happened() {
    use Effect::{Idempotent, Read};
    let (unsure, harmless) = (Fault::runtime("no paper"), Fault::unreachable("refused"));
    for (effect, faults, is_possible) in [
        (Idempotent, vec![unsure.clone()], true),
        // The later failure changes nothing about the earlier attempt.
        (Idempotent, vec![unsure.clone(), harmless.clone()], true),
        (Idempotent, vec![harmless.clone(), harmless.clone()], false),
        (Read, vec![unsure.clone()], false),
    ] {
        let mut call = queued_call(Executor::BUILTIN, effect);
        let mut now = NOW;
        for fault in &faults {
            call = step(&call, &claim_by("n1"), now).unwrap().call;
            let report = failure_report(Some(call.attempt), fault.clone());
            call = step(&call, &report, now).unwrap().call;
            let Some(Hold::Retry { at_ms }) = call.hold else { panic!("{:?}", call.hold) };
            now = at_ms;
        }
        let expected = if is_possible { SideEffect::Possible } else { SideEffect::None };
        let ended = step(&call, &Event::Deadline, DEADLINE).unwrap().call;
        let fault = ended.outcome.unwrap().error.unwrap();
        assert_eq!((fault.code, fault.side_effect), (Code::Timeout, expected), "{fault}");
        assert!(fault.retryable, "{fault}");
        let warns = fault.message.ends_with("an earlier attempt may have taken effect");
        assert_eq!(warns, is_possible, "{fault}");
        // A last attempt that certainly did nothing.
        let last = step(&call, &claim_by("n1"), now).unwrap().call;
        let last = Call { max_retries: 0, ..last };
        let report = failure_report(Some(last.attempt), harmless.clone());
        let fault = step(&last, &report, now).unwrap().call.outcome.unwrap().error.unwrap();
        assert_eq!(fault.side_effect, expected, "{effect:?} {fault}");
    }
    // A tool service may have received an attempt that it did not announce.
    let mut sent = call_in(Executor::UTP, State::Unacknowledged);
    sent.target.effect = Idempotent;
    let fault = step(&sent, &Event::Deadline, DEADLINE).unwrap().call.outcome.unwrap().error;
    let fault = fault.unwrap();
    assert_eq!((fault.side_effect, fault.retryable), (SideEffect::Possible, true), "{fault}");
}

#[test]
fn the_failure_of_an_irreversible_tool_says_that_a_retry_is_not_safe() {
    use Effect::{Idempotent, Irreversible, Read};
    for (effect, fault, is_safe) in [
        (Irreversible, Fault::runtime("no paper"), false),
        (Irreversible, Fault::runtime("no paper").retryable(false), false),
        (Irreversible, Fault::unreachable("refused"), true),
        (Idempotent, Fault::runtime("no paper"), true),
        (Read, Fault::runtime("no paper"), true),
    ] {
        let call = Call { max_retries: 0, ..running_call(effect) };
        let report = failure_report(Some(1), fault.clone());
        let ended = step(&call, &report, NOW).unwrap().call;
        let shown = ended.outcome.clone().unwrap().error.unwrap();
        assert_eq!(shown.retryable, is_safe, "{effect:?} {fault}");
        assert_eq!(shown.message.contains("a retry is not safe"), !is_safe, "{effect:?} {shown}");
        assert!(shown.message.starts_with(&fault.message), "{shown}");
        assert_eq!(step(&ended, &report, NOW), Err(Refusal::Duplicate), "{effect:?}");
    }
    let timed_out = RemoteOutcome::TimedOut(Fault::new(Code::Timeout, "slow"));
    let event = Event::RemoteOutcome { attempt: 2, by: "c1".into(), outcome: timed_out };
    let ended = step(&call_in(Executor::UTP, State::Running), &event, NOW).unwrap().call;
    let fault = ended.outcome.unwrap().error.unwrap();
    assert!(!fault.retryable && fault.message.contains("a retry is not safe"), "{fault}");
}

#[test]
fn a_call_whose_report_was_refused_ends_with_the_reason() {
    let parked = step(&queued_call(Executor::UTP, Effect::Irreversible), &claim_by("n1"), NOW);
    let parked = parked.unwrap().call;
    assert_eq!(parked.hold, Some(Hold::Unacknowledged));
    let message = |event: Event| {
        let ended = step(&parked, &event, DEADLINE).unwrap().call;
        assert_eq!(ended.status, Status::Timeout);
        ended.outcome.and_then(|outcome| outcome.error).unwrap().message
    };
    assert!(message(Event::Deadline).contains("no tool service announced"));
    let refused = message(Event::DeadlineAfterReport { refusal: "there is no card \"r\"".into() });
    assert!(refused.contains("the report on it was refused: there is no card \"r\""), "{refused}");
    assert!(!refused.contains("no tool service") && refused.ends_with(MAY_HAVE_HAPPENED));
}
