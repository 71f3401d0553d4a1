//! Tests of duplicates: a failure that led to another attempt, an attempt acknowledged twice.

use super::*;

fn report(attempt: Option<u32>, fault: Fault) -> Event {
    Event::Report { attempt, by: None, result: Err(fault) }
}

#[test]
fn a_failure_that_is_tried_again_is_answered_the_same_when_it_is_reported_again() {
    let fault = || Fault::runtime("no paper").retryable(true);
    let waits = step(&running(Effect::Read), &report(Some(1), fault()), NOW).unwrap().call;
    assert!(matches!(waits.hold, Some(Hold::Retry { .. })), "{:?}", waits.hold);
    for attempt in [None, Some(1)] {
        let again = step(&waits, &report(attempt, fault()), NOW + 1);
        assert_eq!(again, Err(Refusal::Duplicate), "{attempt:?}");
    }
    let other = step(&waits, &report(Some(1), Fault::runtime("no ink")), NOW + 1);
    assert!(matches!(other, Err(Refusal::WrongAttempt(_))), "{other:?}");
    // A numbered duplicate is also recognized while the next attempt is in flight.
    let claim = Event::Claim { node: "n".into() };
    let next = step(&waits, &claim, DEADLINE - 1).unwrap().call;
    assert_eq!((next.status, next.attempt), (Status::Running, 2));
    assert_eq!(step(&next, &report(Some(1), fault()), DEADLINE - 1), Err(Refusal::Duplicate));
    let late = step(&next, &report(Some(1), Fault::runtime("no ink")), DEADLINE - 1);
    assert!(matches!(late, Err(Refusal::WrongAttempt(_))), "{late:?}");
    // Without a number the report is about the attempt in flight, which may fail in the same way.
    let taken = step(&next, &report(None, fault()), DEADLINE - 1).unwrap().call;
    assert_eq!(taken.status, Status::Failed, "there was no time for a third");
    // After the end the first failure is still known.
    let ended = step(&next, &done(result()), DEADLINE - 1).unwrap().call;
    assert_eq!(step(&ended, &report(Some(1), fault()), DEADLINE), Err(Refusal::Duplicate));
}

#[test]
fn whoever_says_when_to_come_again_is_not_asked_before() {
    let busy = |after_ms: u64| {
        let fault = Fault::new(Code::RateLimited, "too many").without_side_effect();
        report(Some(1), fault.with_retry_after(Some(after_ms)))
    };
    let waits = |event: &Event| step(&running(Effect::Irreversible), event, NOW).unwrap().call;
    let later = waits(&busy(700));
    assert!(matches!(later.hold, Some(Hold::Retry { at_ms }) if at_ms == NOW + 700));
    let sooner = waits(&busy(1));
    assert!(matches!(sooner.hold, Some(Hold::Retry { at_ms }) if at_ms == NOW + 100), "backoff");
    for never in [DEADLINE - NOW, u64::MAX] {
        assert_eq!(waits(&busy(never)).status, Status::Failed, "there is no time for it");
    }
}

#[test]
fn what_one_has_taken_another_takes_only_in_its_place() {
    let taken = |by: &str, instead_of: Option<&str>| Event::Acknowledged {
        attempt: 1,
        by: by.into(),
        instead_of: instead_of.map(str::to_owned),
    };
    for effect in [Effect::Read, Effect::Idempotent, Effect::Irreversible] {
        let parked = step(&call(Executor::Client, effect), &Event::Claim { node: "n".into() }, NOW);
        let first = step(&parked.unwrap().call, &taken("c1", None), NOW).unwrap().call;
        assert_eq!(step(&first, &taken("c1", None), NOW), Err(Refusal::Duplicate));
        for instead_of in [None, Some("c3")] {
            let second = step(&first, &taken("c2", instead_of), NOW);
            assert!(matches!(second, Err(Refusal::WrongAttempt(_))), "{effect:?} {second:?}");
        }
        let given_on = step(&first, &taken("c2", Some("c1")), NOW);
        match effect {
            Effect::Irreversible => assert!(matches!(given_on, Err(Refusal::WrongAttempt(_)))),
            _ => assert_eq!(given_on.unwrap().call.acknowledged_by.as_deref(), Some("c2")),
        }
    }
}

#[test]
fn a_call_that_nobody_else_looks_at_goes_the_same_ways() {
    for at in EVERYWHERE {
        for did in EVERYTHING {
            let before = standing(at);
            let (event, now) = event(did);
            match (step_owned(before.clone(), &event, now), step(&before, &event, now)) {
                (Ok(on), Ok(step)) => assert_eq!(on, step, "{at:?} {did:?}"),
                (Err(back), Err(refusal)) => {
                    assert_eq!(*back, (before, refusal), "{at:?} {did:?}");
                }
                (on, step) => panic!("{at:?} {did:?}: {on:?} and {step:?}"),
            }
        }
    }
}
