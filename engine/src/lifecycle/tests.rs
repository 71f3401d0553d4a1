//! The transition table: every status (with its hold) times every event, all rows present. A new
//! status or event fails to compile or to pass until it has its rows.

mod after;
mod again;

use super::*;
use crate::domain::call::{Origin, Target};
use crate::domain::id::CallId;
use crate::domain::retry::Backoff;
use crate::domain::tool::Executor;

const CREATED: u64 = 1_000_000;
const NOW: u64 = CREATED + 1_000;
const DEADLINE: u64 = CREATED + 30_000;

/// The states a call can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Queue,
    RetryDue,
    RetryLater,
    Parked,
    Input,
    Running,
    Succeeded,
    Failed,
    Timeout,
    Canceled,
}

const EVERYWHERE: [At; 10] = [
    At::Queue,
    At::RetryDue,
    At::RetryLater,
    At::Parked,
    At::Input,
    At::Running,
    At::Succeeded,
    At::Failed,
    At::Timeout,
    At::Canceled,
];

/// The events that can occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Did {
    Claim,
    Taken,
    TakenByOther,
    TakenOldAttempt,
    Done,
    DoneOtherwise,
    DoneOldAttempt,
    FailedForGood,
    ToldPartial,
    ToldTimedOut,
    ToldCanceled,
    ToldOldAttempt,
    Handed,
    HandedOldAttempt,
    DeadlineEarly,
    DeadlineDue,
    Asks,
    AsksOldAttempt,
    AnswersAll,
    AnswersSome,
    AnswersNothing,
    Cancel,
    Lost,
}

const EVERYTHING: [Did; 23] = [
    Did::Claim,
    Did::Taken,
    Did::TakenByOther,
    Did::TakenOldAttempt,
    Did::Done,
    Did::DoneOtherwise,
    Did::DoneOldAttempt,
    Did::FailedForGood,
    Did::ToldPartial,
    Did::ToldTimedOut,
    Did::ToldCanceled,
    Did::ToldOldAttempt,
    Did::Handed,
    Did::HandedOldAttempt,
    Did::DeadlineEarly,
    Did::DeadlineDue,
    Did::Asks,
    Did::AsksOldAttempt,
    Did::AnswersAll,
    Did::AnswersSome,
    Did::AnswersNothing,
    Did::Cancel,
    Did::Lost,
];

fn call(executor: Executor, effect: Effect) -> Call {
    Call {
        id: "tc_01ARZ3NDEKTSV4RRFFQ69G5FAV".parse::<CallId>().unwrap(),
        project: "p".into(),
        run_id: "r".into(),
        tool_name: "t".into(),
        args: Json::empty_object(),
        origin: Origin::default(),
        target: Target {
            tool: "t".into(),
            version: "v".into(),
            executor,
            effect,
            args: Json::empty_object(),
        },
        fallbacks: Vec::new(),
        max_retries: 2,
        backoff: Backoff { initial_ms: 100, factor: 2.0, max_ms: 1_000, jitter: 0.0 },
        status: Status::Pending,
        hold: Some(Hold::Queue),
        attempt: 0,
        target_attempts: 0,
        acknowledged_by: None,
        elicitation: None,
        failed_attempt: None,
        node: None,
        created_ms: CREATED,
        deadline_ms: DEADLINE,
        started_ms: None,
        attempt_dispatched_ms: None,
        completed_ms: None,
        outcome: None,
        version: 1,
    }
}

fn result() -> Json {
    Json::parse(r#"{"n":1}"#).unwrap()
}

fn done(data: Json) -> Event {
    Event::Report { attempt: None, by: Some("c1".into()), result: Ok(data) }
}

fn failed_with(fault: Fault) -> Event {
    Event::Report { attempt: None, by: None, result: Err(fault) }
}

/// Returns a client tool's call in this state, on its second attempt if one is in flight.
fn standing(at: At) -> Call {
    let mut call = call(Executor::Client, Effect::Irreversible);
    let out = |call: &mut Call| (call.attempt, call.target_attempts) = (2, 2);
    let ended = |call: &Call, event: Event, now: u64| step(call, &event, now).unwrap().call;
    match at {
        At::Queue => {}
        At::RetryDue => call.hold = Some(Hold::Retry { at_ms: NOW }),
        At::RetryLater => call.hold = Some(Hold::Retry { at_ms: NOW + 1 }),
        At::Parked => {
            out(&mut call);
            call.hold = Some(Hold::Unacknowledged);
        }
        At::Input => {
            let asks = event(Did::Asks).0;
            call = step(&standing(At::Running), &asks, NOW).unwrap().call;
        }
        At::Running => {
            out(&mut call);
            (call.status, call.hold) = (Status::Running, None);
            call.started_ms = Some(NOW);
            call.acknowledged_by = Some("c1".into());
        }
        At::Succeeded => call = ended(&standing(At::Running), done(result()), NOW),
        At::Failed => {
            let fault = Fault::runtime("broken").retryable(false);
            call = ended(&standing(At::Running), failed_with(fault), NOW);
        }
        At::Timeout => call = ended(&standing(At::Running), Event::Deadline, DEADLINE),
        At::Canceled => {
            let cancel = Event::Cancel { by: "a".into(), reason: None };
            call = ended(&standing(At::Running), cancel, NOW);
        }
    }
    call
}

fn questions() -> crate::domain::elicitation::ElicitationRequest {
    let asked = ["name", "city"].map(|key| (key.to_owned(), Value::from("?")));
    crate::domain::elicitation::ElicitationRequest {
        questions: asked.into_iter().collect(),
        source_state: Some("n".into()),
    }
}

fn answers(keys: &[&str]) -> Event {
    let answers = keys.iter().map(|key| ((*key).to_owned(), Value::from("!"))).collect();
    Event::InputProvided { by: "a".into(), answers }
}

fn event(did: Did) -> (Event, u64) {
    let taken =
        |attempt, by: &str| Event::Acknowledged { attempt, by: by.into(), instead_of: None };
    let told = |attempt, told| Event::RemoteOutcome { attempt, by: "c1".into(), told };
    let event = match did {
        Did::ToldPartial => told(2, RemoteOutcome::Partial(result())),
        Did::ToldTimedOut => told(2, RemoteOutcome::TimedOut(Fault::new(Code::Timeout, "slow"))),
        Did::ToldCanceled => told(2, RemoteOutcome::Canceled(Fault::new(Code::Canceled, "no"))),
        Did::ToldOldAttempt => told(1, RemoteOutcome::Partial(result())),
        Did::Handed => Event::Detached { attempt: 2, handle: "there".into() },
        Did::HandedOldAttempt => Event::Detached { attempt: 1, handle: "there".into() },
        Did::Claim => Event::Claim { node: "n2".into() },
        Did::Taken => taken(2, "c1"),
        Did::TakenByOther => taken(2, "c2"),
        Did::TakenOldAttempt => taken(1, "c1"),
        Did::Done => done(result()),
        Did::DoneOtherwise => done(Json::null()),
        Did::DoneOldAttempt => {
            Event::Report { attempt: Some(1), by: Some("c1".into()), result: Ok(result()) }
        }
        Did::FailedForGood => failed_with(Fault::runtime("broken").retryable(false)),
        Did::DeadlineEarly | Did::DeadlineDue => Event::Deadline,
        Did::Asks => Event::InputRequired { attempt: 2, questions: questions() },
        Did::AsksOldAttempt => Event::InputRequired { attempt: 1, questions: questions() },
        Did::AnswersAll => answers(&["name", "city"]),
        Did::AnswersSome => answers(&["city", "nobody asked"]),
        Did::AnswersNothing => answers(&["nobody asked"]),
        Did::Cancel => Event::Cancel { by: "a".into(), reason: None },
        Did::Lost => Event::OwnerLost { node: "n2".into() },
    };
    (event, if did == Did::DeadlineDue { DEADLINE } else { NOW })
}

/// The expected result of a row.
#[derive(Debug, PartialEq, Eq)]
enum Expect {
    /// The call has this status and hold.
    To(Status, Option<&'static str>),
    Repeated,
    Ended,
    WrongAttempt,
    NotNow,
}

fn expected(at: At, did: Did) -> Expect {
    use At as A;
    use Did as D;
    use Expect::{Ended, NotNow, Repeated, To, WrongAttempt};
    use Status as S;
    let open = !matches!(at, A::Succeeded | A::Failed | A::Timeout | A::Canceled);
    match (did, at) {
        (D::Claim, A::Queue | A::RetryDue) => To(S::Pending, Some("parked")),
        (D::Claim, _) => NotNow,
        (D::Taken, A::Parked) => To(S::Running, None),
        (D::Taken, A::Running) => Repeated,
        (D::TakenByOther, A::Parked) => To(S::Running, None),
        (D::Taken | D::TakenByOther | D::TakenOldAttempt, _) if open => WrongAttempt,
        (D::Taken | D::TakenByOther | D::TakenOldAttempt, _) => Ended,
        (D::Done | D::DoneOtherwise, A::Parked | A::Running) => To(S::Succeeded, None),
        (D::FailedForGood, A::Parked | A::Running) => To(S::Failed, None),
        (D::Done | D::DoneOldAttempt, A::Succeeded) => Repeated,
        (D::FailedForGood, A::Failed) => Repeated,
        (D::Done | D::DoneOtherwise | D::DoneOldAttempt | D::FailedForGood, _) if open => {
            WrongAttempt
        }
        (D::Done | D::DoneOtherwise | D::DoneOldAttempt | D::FailedForGood, _) => Ended,
        (D::ToldPartial, A::Parked | A::Running) => To(S::Succeeded, None),
        (D::ToldTimedOut, A::Parked | A::Running) => To(S::Timeout, None),
        (D::ToldCanceled, A::Parked | A::Running) => To(S::Canceled, None),
        (D::ToldPartial | D::ToldTimedOut | D::ToldCanceled | D::ToldOldAttempt, _) if open => {
            WrongAttempt
        }
        (D::ToldPartial | D::ToldTimedOut | D::ToldCanceled | D::ToldOldAttempt, _) => Ended,
        (D::Handed, A::Parked) => To(S::Pending, Some("parked")),
        (D::Handed, A::Running) => To(S::Running, None),
        (D::Handed | D::HandedOldAttempt, _) if open => WrongAttempt,
        (D::Handed | D::HandedOldAttempt, _) => Ended,
        (D::DeadlineDue, _) if open => To(S::Timeout, None),
        (D::DeadlineEarly | D::DeadlineDue, _) => NotNow,
        (D::Asks, A::Parked | A::Running) => To(S::Pending, Some("input")),
        (D::Asks | D::AsksOldAttempt, _) if open => WrongAttempt,
        (D::Asks | D::AsksOldAttempt, _) => Ended,
        (D::AnswersAll, A::Input) => To(S::Pending, Some("queue")),
        (D::AnswersSome, A::Input) => To(S::Pending, Some("input")),
        (D::AnswersNothing, A::Input) => Repeated,
        (D::AnswersAll | D::AnswersSome | D::AnswersNothing, _) if open => NotNow,
        (D::AnswersAll | D::AnswersSome | D::AnswersNothing, _) => Ended,
        (D::Cancel, A::Canceled) => Repeated,
        (D::Cancel, _) if open => To(S::Canceled, None),
        (D::Cancel, _) => Ended,
        (D::Lost, A::Queue) => To(S::Pending, Some("queue")),
        (D::Lost, A::RetryDue | A::RetryLater) => To(S::Pending, Some("retry")),
        (D::Lost, A::Input) => To(S::Pending, Some("input")),
        (D::Lost, A::Parked) => To(S::Pending, Some("parked")),
        (D::Lost, A::Running) => To(S::Running, None),
        (D::Lost, _) => NotNow,
    }
}

#[test]
fn every_status_times_every_event() {
    let mut rows = 0;
    for at in EVERYWHERE {
        for did in EVERYTHING {
            let before = standing(at);
            let (event, now) = event(did);
            let got = match step(&before, &event, now) {
                Ok(step) => {
                    check_next(&before, &step, at, did);
                    Expect::To(step.call.status, step.call.hold.map(Hold::as_str))
                }
                Err(Refusal::Duplicate) => Expect::Repeated,
                Err(Refusal::AlreadyEnded(record)) => {
                    assert_eq!(record.kind, EventKind::ReportIgnored);
                    Expect::Ended
                }
                Err(Refusal::WrongAttempt(record)) => {
                    assert_eq!(record.kind, EventKind::ReportIgnored);
                    Expect::WrongAttempt
                }
                Err(Refusal::NotApplicable) => Expect::NotNow,
            };
            assert_eq!(got, expected(at, did), "{at:?} × {did:?}");
            rows += 1;
        }
    }
    assert_eq!(rows, EVERYWHERE.len() * EVERYTHING.len());
}

/// Checks the invariants of every transition.
fn check_next(before: &Call, step: &Transition, at: At, did: Did) {
    let (call, row) = (&step.call, format!("{at:?} × {did:?}"));
    assert!(!before.status.is_terminal(), "{row}: a terminal status never changes");
    assert_eq!(call.version, before.version + 1, "{row}");
    assert_eq!(call.status == Status::Pending, call.hold.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), call.completed_ms.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), call.outcome.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), step.actions.contains(&Action::NotifyEnded), "{row}");
    assert!(call.status != Status::Running || call.started_ms.is_some(), "{row}");
    // An executor that reported the end needs no stop request.
    let told = matches!(did, Did::ToldTimedOut | Did::ToldCanceled);
    let stopped = matches!(call.status, Status::Timeout | Status::Canceled) && !told;
    let stops = step.actions.iter().any(|action| matches!(action, Action::Stop { .. }));
    assert_eq!(
        stops,
        stopped && before.has_attempt_in_flight(),
        "{row}: cancel reaches the executor"
    );
    if call.status.is_terminal() {
        let ends = step.records.iter().filter(|record| record.kind.is_terminal()).count();
        assert_eq!(ends, 1, "{row}: one ending is written down");
    }
}

/// Returns a running call of a function in this process.
fn running(effect: Effect) -> Call {
    let claim = Event::Claim { node: "n1".into() };
    step(&call(Executor::Builtin, effect), &claim, NOW).unwrap().call
}

#[test]
fn what_may_be_tried_again() {
    use Effect::{Idempotent, Irreversible, Read};
    let unsure = || Fault::new(Code::UpstreamUnavailable, "no answer");
    let harmless = || Fault::unreachable("refused");
    let invalid = || Fault::new(Code::ValidationError, "bad");
    for (effect, fault, retried) in [
        (Read, unsure(), true),
        (Idempotent, unsure(), true),
        (Irreversible, unsure(), false),
        (Irreversible, harmless(), true),
        (Read, Fault::runtime("broken"), true),
        (Irreversible, Fault::runtime("broken"), false),
        (Read, invalid(), false),
    ] {
        let name = format!("{effect:?} {fault}");
        let step = step(&running(effect), &failed_with(fault), NOW).unwrap();
        let expected = if retried { Status::Pending } else { Status::Failed };
        assert_eq!(step.call.status, expected, "{name}");
        assert_eq!(step.actions.contains(&Action::Enqueue), retried, "{name}");
    }
}

#[test]
fn retries_end_with_the_attempts_or_the_deadline() {
    let mut call = running(Effect::Read);
    let mut now = NOW;
    for attempt in 1..=3 {
        assert_eq!(call.attempt, attempt);
        call = step(&call, &failed_with(Fault::runtime("broken")), now).unwrap().call;
        if attempt == 3 {
            assert_eq!(call.status, Status::Failed);
            let metrics = call.outcome.as_ref().unwrap().metrics;
            assert_eq!((metrics.attempts, metrics.retries), (3, 2));
            break;
        }
        let Some(Hold::Retry { at_ms }) = call.hold else { panic!("{:?}", call.hold) };
        assert_eq!(at_ms, now + 100 * u64::from(attempt), "100 ms, then 200 ms");
        now = at_ms;
        call = step(&call, &Event::Claim { node: "n1".into() }, now).unwrap().call;
    }
    let late = step(&running(Effect::Read), &failed_with(Fault::runtime("x")), DEADLINE - 50);
    assert_eq!(late.unwrap().call.status, Status::Failed, "no time for another attempt");
}

#[test]
fn a_fallback_is_used_only_where_nothing_happened() {
    use Effect::{Idempotent, Irreversible, Read};
    let alternate = Target { tool: "other".into(), ..call(Executor::Builtin, Read).target };
    for (effect, fault, used) in [
        (Read, Fault::runtime("broken"), true),
        (Irreversible, Fault::unreachable("refused"), true),
        (Irreversible, Fault::runtime("broken"), false),
        (Idempotent, Fault::runtime("broken"), false),
    ] {
        let mut call = running(effect);
        (call.max_retries, call.fallbacks) = (0, vec![alternate.clone()]);
        let step = step(&call, &failed_with(fault), NOW).unwrap();
        assert_eq!(step.call.status == Status::Pending, used, "{effect:?}");
        if used {
            assert_eq!(
                (step.call.target.tool.as_str(), step.call.tool_name.as_str()),
                ("other", "t")
            );
            assert_eq!(step.call.target_attempts, 0);
            assert!(step.records.iter().any(|record| record.kind == EventKind::Fallback));
        }
    }
}

#[test]
fn answers_reach_the_next_attempt_and_asking_costs_no_retry() {
    let waiting = standing(At::Input);
    assert_eq!((waiting.attempt, waiting.target_attempts), (2, 1));
    let some = step(&waiting, &answers(&["city", "nobody asked"]), NOW).unwrap();
    let dialogue = some.call.elicitation.as_ref().unwrap();
    assert_eq!(dialogue.unanswered.keys().collect::<Vec<_>>(), ["name"]);
    assert!(some.actions.is_empty());
    let all = step(&some.call, &answers(&["name"]), NOW).unwrap();
    assert_eq!(all.actions, [Action::Enqueue]);
    let next = step(&all.call, &Event::Claim { node: "n1".into() }, NOW).unwrap().call;
    let dialogue = next.elicitation.as_ref().unwrap();
    let heard: Vec<&str> = dialogue.answers.keys().map(String::as_str).collect();
    assert_eq!((heard, dialogue.source_state.as_deref()), (vec!["city", "name"], Some("n")));
    // A second elicitation starts a new round.
    let again = Event::InputRequired { attempt: next.attempt, questions: questions() };
    let again = step(&next, &again, NOW).unwrap().call;
    assert!(again.elicitation.unwrap().answers.is_empty());
    let message = step(&waiting, &Event::Deadline, DEADLINE).unwrap().call.outcome.unwrap();
    assert!(message.error.unwrap().message.contains("no answer"));
}

#[test]
fn a_crash_never_runs_an_irreversible_tool_twice() {
    let lost = Event::OwnerLost { node: "n2".into() };
    let ended = step(&running(Effect::Irreversible), &lost, NOW).unwrap().call;
    let fault = ended.outcome.unwrap().error.unwrap();
    assert_eq!((ended.status, fault.code), (Status::Failed, Code::OutcomeUnknown));
    for effect in [Effect::Read, Effect::Idempotent] {
        let again = step(&running(effect), &lost, NOW).unwrap().call;
        assert!(matches!(again.hold, Some(Hold::Retry { .. })), "{effect:?}");
    }
    let mut once = running(Effect::Read);
    once.max_retries = 0;
    assert_eq!(step(&once, &lost, NOW).unwrap().call.status, Status::Failed, "retry: 0");
}

#[test]
fn messages_say_whether_it_may_have_happened() {
    let message = |call: &Call| {
        let ended = step(call, &Event::Deadline, DEADLINE).unwrap().call;
        ended.outcome.unwrap().error.unwrap().message
    };
    assert!(message(&running(Effect::Irreversible)).contains("may have taken effect"));
    assert!(message(&running(Effect::Read)).contains("calling again is safe"));
    assert!(message(&standing(At::Parked)).contains("connected?"));
    assert!(message(&standing(At::Queue)).contains("no place was free"));
}

#[test]
fn what_a_tool_service_told_is_answered_the_same_when_told_again() {
    let telling = [
        RemoteOutcome::Partial(result()),
        RemoteOutcome::TimedOut(Fault::new(Code::Timeout, "slow")),
        RemoteOutcome::Canceled(Fault::new(Code::Canceled, "no")),
    ];
    for told in telling {
        let event = Event::RemoteOutcome { attempt: 2, by: "c1".into(), told: told.clone() };
        let ended = step(&standing(At::Running), &event, NOW).unwrap().call;
        let outcome = ended.outcome.as_ref().unwrap();
        assert_eq!(outcome.partial, matches!(told, RemoteOutcome::Partial(_)));
        assert_eq!(step(&ended, &event, NOW + 1), Err(Refusal::Duplicate), "{told:?}");
    }
}

/// A caller-executed call is running as soon as it is recorded, and Toolcrib never runs it.
#[test]
fn the_callers_own_call_runs_from_the_first_moment_and_once() {
    let own = Call { max_retries: 0, ..call(Executor::Caller, Effect::Irreversible) };
    let claimed = step(&own, &Event::Claim { node: "n1".into() }, NOW).unwrap();
    assert_eq!((claimed.call.status, claimed.call.hold), (Status::Running, None));
    assert_eq!(claimed.records[0].kind, EventKind::Started);
    let lost = step(&claimed.call, &Event::OwnerLost { node: "n2".into() }, NOW).unwrap();
    assert_eq!((lost.call.status, lost.call.attempt), (Status::Running, 1), "it is the caller's");
    let harmless = failed_with(Fault::unreachable("refused"));
    let failed = step(&lost.call, &harmless, NOW).unwrap().call;
    assert_eq!((failed.status, failed.attempt), (Status::Failed, 1));
    let late = step(&claimed.call, &Event::Deadline, DEADLINE).unwrap().call;
    assert_eq!(late.status, Status::Timeout);
    assert!(late.outcome.unwrap().error.unwrap().message.contains("may have taken effect"));
}
