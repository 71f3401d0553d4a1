//! Reports: duplicates, delays that executors request, and other clients.

use super::*;

#[test]
fn a_repeated_remote_outcome_is_a_duplicate() {
    let outcomes = [
        RemoteOutcome::Partial(result()),
        RemoteOutcome::TimedOut(Fault::new(Code::Timeout, "slow")),
        RemoteOutcome::Canceled(Fault::new(Code::Canceled, "no")),
    ];
    for outcome in outcomes {
        let event = Event::RemoteOutcome { attempt: 2, by: "c1".into(), outcome: outcome.clone() };
        let ended = step(&call_in(Executor::CLIENT, State::Running), &event, NOW).unwrap().call;
        let is_partial = ended.outcome.as_ref().unwrap().partial;
        assert_eq!(is_partial, matches!(outcome, RemoteOutcome::Partial(_)));
        assert_eq!(step(&ended, &event, NOW + 1), Err(Refusal::Duplicate), "{outcome:?}");
    }
}

/// A caller-executed call is running as soon as it is recorded, and Toolcrib never runs it.
#[test]
fn a_caller_executed_call_runs_at_once_and_only_once() {
    let own = Call { max_retries: 0, ..queued_call(Executor::CALLER, Effect::Irreversible) };
    let claimed = step(&own, &claim_by("n1"), NOW).unwrap();
    assert_eq!((claimed.call.status, claimed.call.hold), (Status::Running, None));
    assert_eq!(claimed.records[0].kind, EventKind::Started);
    let lost = step(&claimed.call, &Event::OwnerLost { node: "n2".into() }, NOW).unwrap();
    assert_eq!((lost.call.status, lost.call.attempt), (Status::Running, 1), "it is the caller's");
    let harmless = failure_report(None, Fault::unreachable("refused"));
    let failed = step(&lost.call, &harmless, NOW).unwrap().call;
    assert_eq!((failed.status, failed.attempt), (Status::Failed, 1));
    let late = step(&claimed.call, &Event::Deadline, DEADLINE).unwrap().call;
    assert_eq!(late.status, Status::Timeout);
    assert!(late.outcome.unwrap().error.unwrap().message.contains("may have taken effect"));
}

#[test]
fn a_repeated_report_of_a_retried_failure_is_a_duplicate() {
    let fault = || Fault::runtime("no paper").retryable(true);
    let waits =
        step(&running_call(Effect::Read), &failure_report(Some(1), fault()), NOW).unwrap().call;
    assert!(matches!(waits.hold, Some(Hold::Retry { .. })), "{:?}", waits.hold);
    for attempt in [None, Some(1)] {
        let again = step(&waits, &failure_report(attempt, fault()), NOW + 1);
        assert_eq!(again, Err(Refusal::Duplicate), "{attempt:?}");
    }
    let other = step(&waits, &failure_report(Some(1), Fault::runtime("no ink")), NOW + 1);
    assert!(matches!(other, Err(Refusal::WrongAttempt(_))), "{other:?}");
    // A numbered duplicate is also recognized while the next attempt is in flight.
    let next = step(&waits, &claim_by("n"), DEADLINE - 1).unwrap().call;
    assert_eq!((next.status, next.attempt), (Status::Running, 2));
    assert_eq!(
        step(&next, &failure_report(Some(1), fault()), DEADLINE - 1),
        Err(Refusal::Duplicate)
    );
    let late = step(&next, &failure_report(Some(1), Fault::runtime("no ink")), DEADLINE - 1);
    assert!(matches!(late, Err(Refusal::WrongAttempt(_))), "{late:?}");
    // Without a number the report is about the attempt in flight, which may fail in the same way.
    let ended = step(&next, &failure_report(None, fault()), DEADLINE - 1).unwrap().call;
    assert_eq!(ended.status, Status::Failed, "there was no time for a third");
    // After the end the first failure is still known.
    let ended = step(&next, &success_report(result()), DEADLINE - 1).unwrap().call;
    assert_eq!(step(&ended, &failure_report(Some(1), fault()), DEADLINE), Err(Refusal::Duplicate));
}

#[test]
fn a_requested_retry_delay_is_respected() {
    let busy = |after_ms: u64| {
        let fault = Fault::new(Code::RateLimited, "too many").without_side_effect();
        failure_report(Some(1), fault.with_retry_after(Some(after_ms)))
    };
    let waits = |event: &Event| step(&running_call(Effect::Irreversible), event, NOW).unwrap().call;
    let later = waits(&busy(700));
    assert!(matches!(later.hold, Some(Hold::Retry { at_ms }) if at_ms == NOW + 700));
    let sooner = waits(&busy(1));
    assert!(matches!(sooner.hold, Some(Hold::Retry { at_ms }) if at_ms == NOW + 100), "backoff");
    for never in [DEADLINE - NOW, u64::MAX] {
        assert_eq!(waits(&busy(never)).status, Status::Failed, "there is no time for it");
    }
}

#[test]
fn another_client_acknowledges_only_after_the_lease_moved() {
    let acknowledged = |by: &str, instead_of: Option<&str>| Event::Acknowledged {
        attempt: 1,
        by: by.into(),
        instead_of: instead_of.map(str::to_owned),
    };
    for effect in [Effect::Read, Effect::Idempotent, Effect::Irreversible] {
        let parked = step(&queued_call(Executor::CLIENT, effect), &claim_by("n"), NOW);
        let first = step(&parked.unwrap().call, &acknowledged("c1", None), NOW).unwrap().call;
        assert_eq!(step(&first, &acknowledged("c1", None), NOW), Err(Refusal::Duplicate));
        for instead_of in [None, Some("c3")] {
            let second = step(&first, &acknowledged("c2", instead_of), NOW);
            assert!(matches!(second, Err(Refusal::WrongAttempt(_))), "{effect:?} {second:?}");
        }
        let moved = step(&first, &acknowledged("c2", Some("c1")), NOW);
        match effect {
            Effect::Irreversible => assert!(matches!(moved, Err(Refusal::WrongAttempt(_)))),
            _ => assert_eq!(moved.unwrap().call.acknowledged_by.as_deref(), Some("c2")),
        }
    }
}
