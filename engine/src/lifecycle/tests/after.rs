//! Tests of calls with a predecessor.

use super::*;
use crate::domain::fault::SideEffect;

#[test]
fn only_who_waits_for_another_has_a_turn() {
    for at in EVERYWHERE {
        let turn = step(&standing(at), &Event::PredecessorEnded, NOW);
        assert_eq!(turn, Err(Refusal::NotApplicable), "{at:?}");
    }
}

#[test]
fn before_its_turn_nothing_is_executed() {
    let behind = Call {
        hold: Some(Hold::Predecessor { timeout_ms: 40 }),
        ..call(Executor::Builtin, Effect::Read)
    };
    for did in [Did::Claim, Did::DeadlineEarly, Did::AnswersAll] {
        let (event, now) = event(did);
        assert_eq!(step(&behind, &event, now), Err(Refusal::NotApplicable), "{did:?}");
    }
    for did in [Did::Taken, Did::Done, Did::FailedForGood, Did::Asks, Did::Handed] {
        let (event, now) = event(did);
        let refused = step(&behind, &event, now);
        assert!(matches!(refused, Err(Refusal::WrongAttempt(_))), "{did:?}: {refused:?}");
    }
    let (lost, now) = event(Did::Lost);
    let recovered = step(&behind, &lost, now).unwrap();
    assert_eq!(
        (recovered.call.hold, recovered.actions),
        (behind.hold, vec![Action::AwaitPredecessor])
    );
    let canceled = step(&behind, &event(Did::Cancel).0, NOW).unwrap();
    assert_eq!(canceled.actions, [Action::NotifyEnded]);
    let late = step(&behind, &Event::Deadline, DEADLINE).unwrap().call;
    let fault = late.outcome.unwrap().error.unwrap();
    assert!(fault.message.contains("the call before t had not ended"), "{fault}");
    assert_eq!((fault.retryable, fault.side_effect), (true, SideEffect::None));
}

#[test]
fn with_its_turn_its_time_begins() {
    for (timeout_ms, deadline_ms) in [(40, NOW + 40), (u64::MAX, DEADLINE)] {
        let hold = Some(Hold::Predecessor { timeout_ms });
        let behind = Call { hold, ..call(Executor::Builtin, Effect::Read) };
        let turn = step(&behind, &Event::PredecessorEnded, NOW).unwrap();
        assert_eq!(turn.actions, [Action::Enqueue]);
        assert_eq!((turn.call.hold, turn.call.deadline_ms), (Some(Hold::Queue), deadline_ms));
        let claim = Event::Claim { node: "n1".into() };
        assert_eq!(step(&turn.call, &claim, NOW).unwrap().call.status, Status::Running);
        assert_eq!(
            step(&turn.call, &Event::PredecessorEnded, NOW),
            Err(Refusal::NotApplicable),
            "once"
        );
    }
}
