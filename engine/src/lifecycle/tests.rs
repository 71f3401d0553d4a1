//! The transition table: every status (with its hold) times every event, all cells present.
//!
//! A new status, hold, event or trait of a source does not compile here until it has its rows: the
//! matches in [`states_of`], [`cases_of`], [`expected_row`] and [`expected`] are exhaustive, and
//! each row of the table has one cell per state. The table holds for every executor. Other rules
//! (retries, fallbacks, duplicates, messages) follow it.

mod approvals;
mod reports;
mod stops;
mod time_limits;
use super::*;
use crate::domain::call::{Origin, Target};
use crate::domain::id::CallId;
use crate::domain::retry::Backoff;
use crate::domain::tool::SourceTraits;

const CREATED: u64 = 1_000_000;
const NOW: u64 = CREATED + 1_000;
const DEADLINE: u64 = CREATED + 30_000;
const INPUT_TIMEOUT: u64 = 3_600_000;
/// Time at which the attempts of `call_in` end.
const ATTEMPT_DEADLINE: u64 = NOW + 9_000;

/// Defines an enum together with the list of its variants.
macro_rules! listed_enum {
    ($(#[$doc:meta])* $name:ident { $($variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum $name { $($variant,)* }

        impl $name {
            const ALL: &[Self] = &[$(Self::$variant,)*];
        }
    };
}

listed_enum! {
    /// The states of a call: the columns of the table.
    State {
        Queue,
        RetryDue,
        RetryLater,
        Unacknowledged,
        Input,
        Predecessor,
        Replaced,
        Approval,
        Running,
        Succeeded,
        Failed,
        Timeout,
        Canceled,
    }
}

listed_enum! {
    /// The events, in each variation that matters: the rows of the table.
    Case {
        Claim,
        Acknowledged,
        AcknowledgedByOther,
        AcknowledgedOldAttempt,
        ReportedSuccess,
        ReportedOtherSuccess,
        ReportedOldAttempt,
        ReportedFailure,
        RemotePartial,
        RemoteTimedOut,
        RemoteCanceled,
        RemoteOldAttempt,
        Detached,
        DetachedOldAttempt,
        DeadlineEarly,
        DeadlineDue,
        AttemptDeadlineEarly,
        AttemptDeadlineDue,
        AttemptDeadlineAbsent,
        AttemptDeadlineOldAttempt,
        InputRequired,
        InputRequiredOldAttempt,
        AllAnswers,
        SomeAnswers,
        UnknownAnswers,
        PredecessorEnded,
        PredecessorExtended,
        ApprovalRequired,
        Approved,
        Rejected,
        ApprovedOther,
        Replaced,
        Waived,
        ReplacementEnded,
        Cancel,
        Abort,
        PermissionRevoked,
        SwitchedOff,
        OwnerLost,
    }
}

/// Returns the columns of a status with its hold.
fn states_of(status: Status, hold: Option<Hold>) -> &'static [State] {
    match (status, hold) {
        (Status::Pending, Some(hold)) => match hold {
            Hold::Queue => &[State::Queue],
            Hold::Retry { .. } => &[State::RetryDue, State::RetryLater],
            Hold::Unacknowledged => &[State::Unacknowledged],
            Hold::Input { .. } => &[State::Input],
            Hold::Predecessor { .. } => &[State::Predecessor, State::Replaced],
            Hold::Approval { .. } => &[State::Approval],
        },
        (Status::Running, None) => &[State::Running],
        (Status::Succeeded, None) => &[State::Succeeded],
        (Status::Failed, None) => &[State::Failed],
        (Status::Timeout, None) => &[State::Timeout],
        (Status::Canceled, None) => &[State::Canceled],
        // A call has a hold exactly while it is PENDING.
        (Status::Pending, None) => &[],
        (
            Status::Running
            | Status::Succeeded
            | Status::Failed
            | Status::Timeout
            | Status::Canceled,
            Some(_),
        ) => &[],
    }
}

/// Returns the rows of an event.
fn cases_of(event: &Event) -> &'static [Case] {
    match event {
        Event::Claim { .. } => &[Case::Claim],
        Event::Acknowledged { .. } => {
            &[Case::Acknowledged, Case::AcknowledgedByOther, Case::AcknowledgedOldAttempt]
        }
        Event::Report { result: Ok(_), .. } => {
            &[Case::ReportedSuccess, Case::ReportedOtherSuccess, Case::ReportedOldAttempt]
        }
        Event::Report { result: Err(_), .. } => &[Case::ReportedFailure],
        Event::InputRequired { .. } => &[Case::InputRequired, Case::InputRequiredOldAttempt],
        Event::InputProvided { .. } => &[Case::AllAnswers, Case::SomeAnswers, Case::UnknownAnswers],
        Event::Detached { .. } => &[Case::Detached, Case::DetachedOldAttempt],
        Event::RemoteOutcome { outcome, .. } => match outcome {
            RemoteOutcome::Partial(_) => &[Case::RemotePartial, Case::RemoteOldAttempt],
            RemoteOutcome::TimedOut(_) => &[Case::RemoteTimedOut],
            RemoteOutcome::Canceled(_) => &[Case::RemoteCanceled],
        },
        Event::PredecessorEnded => &[Case::PredecessorEnded],
        Event::PredecessorExtended { .. } => &[Case::PredecessorExtended],
        Event::ApprovalRequired { .. } => &[Case::ApprovalRequired],
        Event::ApprovalDecided { verdict, .. } => match verdict {
            ApprovalVerdict::Approve => &[Case::Approved, Case::ApprovedOther],
            ApprovalVerdict::Reject => &[Case::Rejected],
            ApprovalVerdict::Replace { .. } => &[Case::Replaced],
        },
        Event::ApprovalWaived { .. } => &[Case::Waived],
        Event::ReplacementEnded { .. } => &[Case::ReplacementEnded],
        Event::Deadline | Event::DeadlineAfterReport { .. } => {
            &[Case::DeadlineEarly, Case::DeadlineDue]
        }
        Event::AttemptDeadline { .. } => &[
            Case::AttemptDeadlineEarly,
            Case::AttemptDeadlineDue,
            Case::AttemptDeadlineAbsent,
            Case::AttemptDeadlineOldAttempt,
        ],
        Event::Cancel { .. } => &[Case::Cancel],
        Event::Abort { .. } => &[Case::Abort],
        Event::PermissionRevoked { .. } => &[Case::PermissionRevoked],
        Event::SwitchedOff { .. } => &[Case::SwitchedOff],
        Event::OwnerLost { .. } => &[Case::OwnerLost],
    }
}

/// Returns a new call in the queue.
fn queued_call(executor: Executor, effect: Effect) -> Call {
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
            traits: executor.traits(),
            effect,
            after_execution: None,
            args: Json::empty_object(),
        },
        fallbacks: Vec::new(),
        max_retries: 2,
        backoff: Backoff { initial_ms: 100, factor: 2.0, max_ms: 1_000, jitter: 0.0 },
        attempt_timeout_ms: None,
        input_timeout_ms: INPUT_TIMEOUT,
        status: Status::Pending,
        hold: Some(Hold::Queue),
        attempt: 0,
        target_attempts: 0,
        acknowledged_by: None,
        elicitation: None,
        approval: None,
        failed_attempt: None,
        lost_attempts: 0,
        node: None,
        created_ms: CREATED,
        deadline_ms: DEADLINE,
        attempt_deadline_ms: None,
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

fn success_report(data: Json) -> Event {
    Event::Report { attempt: None, by: Some("c1".into()), result: Ok(data) }
}

fn failure_report(attempt: Option<u32>, fault: Fault) -> Event {
    Event::Report { attempt, by: None, result: Err(fault) }
}

fn claim_by(node: &str) -> Event {
    Event::Claim { node: node.into() }
}

fn questions() -> ElicitationRequest {
    let questions = ["name", "city"].map(|key| (key.to_owned(), Value::from("?")));
    ElicitationRequest {
        questions: questions.into_iter().collect(),
        source_state: Some("n".into()),
    }
}

fn answers(keys: &[&str]) -> Event {
    let answers = keys.iter().map(|key| ((*key).to_owned(), Value::from("!"))).collect();
    Event::InputProvided { by: "a".into(), answers }
}

/// Returns a call of an irreversible tool in this state, on its second attempt if one was made.
fn call_in(executor: Executor, state: State) -> Call {
    let queued = queued_call(executor, Effect::Irreversible);
    let second = |status, hold| Call {
        attempt: 2,
        target_attempts: 2,
        status,
        hold,
        attempt_timeout_ms: Some(ATTEMPT_DEADLINE - NOW),
        attempt_deadline_ms: Some(ATTEMPT_DEADLINE),
        attempt_dispatched_ms: Some(NOW),
        ..queued_call(executor, Effect::Irreversible)
    };
    let after = |case: Case| {
        let (event, now) = event_of(case);
        step(&call_in(executor, State::Running), &event, now).unwrap().call
    };
    match state {
        State::Queue => queued,
        State::RetryDue => Call { hold: Some(Hold::Retry { at_ms: NOW }), ..queued },
        State::RetryLater => Call { hold: Some(Hold::Retry { at_ms: NOW + 1 }), ..queued },
        State::Unacknowledged => second(Status::Pending, Some(Hold::Unacknowledged)),
        State::Input => after(Case::InputRequired),
        State::Predecessor => Call { hold: Some(Hold::Predecessor { timeout_ms: 40 }), ..queued },
        State::Approval => approvals::waiting_call(queued),
        State::Replaced => approvals::replaced_call(queued),
        State::Running => Call {
            started_ms: Some(NOW),
            acknowledged_by: Some("c1".into()),
            ..second(Status::Running, None)
        },
        State::Succeeded => after(Case::ReportedSuccess),
        State::Failed => after(Case::ReportedFailure),
        State::Timeout => after(Case::DeadlineDue),
        State::Canceled => after(Case::Cancel),
    }
}

/// Returns the event of a row, and the time at which it occurs.
fn event_of(case: Case) -> (Event, u64) {
    let acknowledged =
        |attempt, by: &str| Event::Acknowledged { attempt, by: by.into(), instead_of: None };
    let remote = |attempt, outcome| Event::RemoteOutcome { attempt, by: "c1".into(), outcome };
    let detached = |attempt| Event::Detached { attempt, handle: "there".into() };
    let input_required = |attempt| Event::InputRequired { attempt, questions: questions() };
    let event = match case {
        Case::Claim => claim_by("n2"),
        Case::Acknowledged => acknowledged(2, "c1"),
        Case::AcknowledgedByOther => acknowledged(2, "c2"),
        Case::AcknowledgedOldAttempt => acknowledged(1, "c1"),
        Case::ReportedSuccess => success_report(result()),
        Case::ReportedOtherSuccess => success_report(Json::null()),
        Case::ReportedOldAttempt => {
            Event::Report { attempt: Some(1), by: Some("c1".into()), result: Ok(result()) }
        }
        Case::ReportedFailure => failure_report(None, Fault::runtime("broken").retryable(false)),
        Case::RemotePartial => remote(2, RemoteOutcome::Partial(result())),
        Case::RemoteTimedOut => {
            remote(2, RemoteOutcome::TimedOut(Fault::new(Code::Timeout, "slow")))
        }
        Case::RemoteCanceled => {
            remote(2, RemoteOutcome::Canceled(Fault::new(Code::Canceled, "no")))
        }
        Case::RemoteOldAttempt => remote(1, RemoteOutcome::Partial(result())),
        Case::Detached => detached(2),
        Case::DetachedOldAttempt => detached(1),
        Case::DeadlineEarly | Case::DeadlineDue => Event::Deadline,
        Case::AttemptDeadlineEarly | Case::AttemptDeadlineDue => {
            Event::AttemptDeadline { attempt: 2, delivered_ms: Some(NOW) }
        }
        Case::AttemptDeadlineAbsent => Event::AttemptDeadline { attempt: 2, delivered_ms: None },
        Case::AttemptDeadlineOldAttempt => {
            Event::AttemptDeadline { attempt: 1, delivered_ms: Some(NOW) }
        }
        Case::InputRequired => input_required(2),
        Case::InputRequiredOldAttempt => input_required(1),
        Case::AllAnswers => answers(&["name", "city"]),
        Case::SomeAnswers => answers(&["city", "not asked"]),
        Case::UnknownAnswers => answers(&["not asked"]),
        Case::PredecessorEnded => Event::PredecessorEnded,
        Case::PredecessorExtended => Event::PredecessorExtended { deadline_ms: DEADLINE },
        Case::ApprovalRequired => approvals::required("apr_2"),
        Case::Approved => approvals::decided("apr_1", ApprovalVerdict::Approve),
        Case::ApprovedOther => approvals::decided("apr_0", ApprovalVerdict::Approve),
        Case::Rejected => approvals::decided("apr_1", ApprovalVerdict::Reject),
        Case::Replaced => {
            approvals::decided("apr_1", ApprovalVerdict::Replace { deadline_ms: DEADLINE })
        }
        Case::Waived => Event::ApprovalWaived { approval_id: "apr_1".into() },
        Case::ReplacementEnded => approvals::replacement_ended(),
        Case::Cancel => Event::Cancel { by: "a".into(), reason: None },
        Case::Abort => Event::Abort { fault: Fault::new(Code::Conflict, "not stored") },
        Case::PermissionRevoked => {
            let fault = Fault::new(Code::PermissionDenied, "no rule allows it");
            Event::PermissionRevoked { fault: fault.without_side_effect() }
        }
        Case::SwitchedOff => stops::switched_off(),
        Case::OwnerLost => Event::OwnerLost { node: "n2".into() },
    };
    let at_ms = match case {
        // A wait for input ends later than the deadline of the call.
        Case::DeadlineDue => DEADLINE + INPUT_TIMEOUT,
        Case::AttemptDeadlineDue
        | Case::AttemptDeadlineAbsent
        | Case::AttemptDeadlineOldAttempt => ATTEMPT_DEADLINE,
        _ => NOW,
    };
    (event, at_ms)
}

/// The expected result of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// The call has this status and hold.
    To(Status, Option<&'static str>),
    Duplicate,
    AlreadyEnded,
    WrongAttempt,
    NotApplicable,
}

/// Returns the expected result for an executor: that of the table, unless its traits change it.
fn expected(executor: Executor, case: Case, state: State, in_table: Expect) -> Expect {
    let SourceTraits {
        reports_later,
        needs_acknowledgement,
        // The lifecycle does not depend on the others.
        in_process: _,
        retries: _,
        exact_numbers: _,
        speculative_reads: _,
        needs_command,
        mcp_results: _,
    } = executor.traits();
    match (case, state) {
        (Case::Claim, State::Queue | State::RetryDue) if !needs_acknowledgement => {
            Expect::To(Status::Running, None)
        }
        // The attempt is lost with its node, and the tool is not safe to repeat.
        (Case::OwnerLost, State::Unacknowledged | State::Running) if !reports_later => {
            Expect::To(Status::Failed, None)
        }
        // Such an attempt never waits for a client to receive it.
        (Case::AttemptDeadlineDue | Case::AttemptDeadlineAbsent, State::Unacknowledged)
            if needs_command =>
        {
            Expect::To(Status::Failed, None)
        }
        _ => in_table,
    }
}

/// Returns a row of the table, with one cell for each of [`State::ALL`], for an executor that
/// acknowledges its attempts and reports later.
#[rustfmt::skip]
fn expected_row(case: Case) -> [Expect; State::ALL.len()] {
    use Expect::To;
    const QUEUE: Expect = To(Status::Pending, Some("queue"));
    const RETRY: Expect = To(Status::Pending, Some("retry"));
    const UNACK: Expect = To(Status::Pending, Some("parked"));
    const INPUT: Expect = To(Status::Pending, Some("input"));
    const AFTER: Expect = To(Status::Pending, Some("after"));
    const ASKS: Expect = To(Status::Pending, Some("approval"));
    const RUN: Expect = To(Status::Running, None);
    const OK: Expect = To(Status::Succeeded, None);
    const FAIL: Expect = To(Status::Failed, None);
    const TIME: Expect = To(Status::Timeout, None);
    const STOP: Expect = To(Status::Canceled, None);
    const DUP: Expect = Expect::Duplicate;
    const ENDED: Expect = Expect::AlreadyEnded;
    const WRONG: Expect = Expect::WrongAttempt;
    const NO: Expect = Expect::NotApplicable;
    match case {
    //   Queue  Retry  Retry  Unack- Input  Prede- Repla- Appro- Run-   Suc-   Failed Time-  Can-
    //          due    later  nowl.         cessor ced    val    ning   ceeded        out    celed
        Case::Claim =>
        [UNACK, UNACK, NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO],
        Case::Acknowledged =>
        [WRONG, WRONG, WRONG, RUN,   WRONG, WRONG, WRONG, WRONG, DUP,   ENDED, ENDED, ENDED, ENDED],
        Case::AcknowledgedByOther =>
        [WRONG, WRONG, WRONG, RUN,   WRONG, WRONG, WRONG, WRONG, WRONG, ENDED, ENDED, ENDED, ENDED],
        Case::AcknowledgedOldAttempt | Case::RemoteOldAttempt | Case::DetachedOldAttempt
        | Case::InputRequiredOldAttempt =>
        [WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, ENDED, ENDED, ENDED, ENDED],
        Case::ReportedSuccess =>
        [WRONG, WRONG, WRONG, OK,    WRONG, WRONG, WRONG, WRONG, OK,    DUP,   ENDED, ENDED, ENDED],
        Case::ReportedOtherSuccess =>
        [WRONG, WRONG, WRONG, OK,    WRONG, WRONG, WRONG, WRONG, OK,    ENDED, ENDED, ENDED, ENDED],
        Case::ReportedOldAttempt =>
        [WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, WRONG, DUP,   ENDED, ENDED, ENDED],
        Case::ReportedFailure =>
        [WRONG, WRONG, WRONG, FAIL,  WRONG, WRONG, WRONG, WRONG, FAIL,  ENDED, DUP,   ENDED, ENDED],
        Case::RemotePartial =>
        [WRONG, WRONG, WRONG, OK,    WRONG, WRONG, WRONG, WRONG, OK,    ENDED, ENDED, ENDED, ENDED],
        Case::RemoteTimedOut =>
        [WRONG, WRONG, WRONG, TIME,  WRONG, WRONG, WRONG, WRONG, TIME,  ENDED, ENDED, ENDED, ENDED],
        Case::RemoteCanceled =>
        [WRONG, WRONG, WRONG, FAIL,  WRONG, WRONG, WRONG, WRONG, FAIL,  ENDED, ENDED, ENDED, ENDED],
        Case::Detached =>
        [WRONG, WRONG, WRONG, UNACK, WRONG, WRONG, WRONG, WRONG, RUN,   ENDED, ENDED, ENDED, ENDED],
        Case::DeadlineEarly | Case::AttemptDeadlineEarly | Case::AttemptDeadlineOldAttempt =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO],
        Case::DeadlineDue =>
        [TIME,  TIME,  TIME,  TIME,  TIME,  TIME,  TIME,  FAIL,  TIME,  NO,    NO,    NO,    NO],
        Case::AttemptDeadlineDue =>
        [NO,    NO,    NO,    RETRY, NO,    NO,    NO,    NO,    FAIL,  NO,    NO,    NO,    NO],
        Case::AttemptDeadlineAbsent =>
        [NO,    NO,    NO,    UNACK, NO,    NO,    NO,    NO,    FAIL,  NO,    NO,    NO,    NO],
        Case::InputRequired =>
        [WRONG, WRONG, WRONG, INPUT, WRONG, WRONG, WRONG, WRONG, INPUT, ENDED, ENDED, ENDED, ENDED],
        Case::AllAnswers =>
        [NO,    NO,    NO,    NO,    QUEUE, NO,    NO,    NO,    NO,    ENDED, ENDED, ENDED, ENDED],
        Case::SomeAnswers =>
        [NO,    NO,    NO,    NO,    INPUT, NO,    NO,    NO,    NO,    ENDED, ENDED, ENDED, ENDED],
        Case::UnknownAnswers =>
        [NO,    NO,    NO,    NO,    DUP,   NO,    NO,    NO,    NO,    ENDED, ENDED, ENDED, ENDED],
        Case::PredecessorEnded =>
        [NO,    NO,    NO,    NO,    NO,    QUEUE, NO,    NO,    NO,    NO,    NO,    NO,    NO],
        Case::PredecessorExtended =>
        [NO,    NO,    NO,    NO,    NO,    AFTER, NO,    NO,    NO,    NO,    NO,    NO,    NO],
        Case::Cancel =>
        [STOP,  STOP,  STOP,  STOP,  STOP,  STOP,  STOP,  STOP,  STOP,  ENDED, ENDED, ENDED, DUP],
        Case::Abort =>
        [FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  ENDED, ENDED, ENDED, ENDED],
        Case::PermissionRevoked =>
        [FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  NO,    NO,    NO,    NO,    NO],
        Case::SwitchedOff =>
        [FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  FAIL,  NO,    NO,    NO,    NO],
        Case::OwnerLost =>
        [QUEUE, RETRY, RETRY, UNACK, INPUT, AFTER, AFTER, ASKS,  RUN,   NO,    NO,    NO,    NO],
        Case::ApprovalRequired | Case::Approved | Case::Waived | Case::ApprovedOther
        | Case::Rejected | Case::Replaced | Case::ReplacementEnded => approval_row(case),
    }
}

/// Returns a row of the table for an event of approvals.
#[rustfmt::skip]
fn approval_row(case: Case) -> [Expect; State::ALL.len()] {
    use Expect::To;
    const QUEUE: Expect = To(Status::Pending, Some("queue"));
    const AFTER: Expect = To(Status::Pending, Some("after"));
    const ASKS: Expect = To(Status::Pending, Some("approval"));
    const OK: Expect = To(Status::Succeeded, None);
    const FAIL: Expect = To(Status::Failed, None);
    const ENDED: Expect = Expect::AlreadyEnded;
    const NO: Expect = Expect::NotApplicable;
    match case {
        Case::ApprovalRequired =>
        [ASKS,  ASKS,  ASKS,  NO,    NO,    NO,    NO,    ASKS,  NO,    NO,    NO,    NO,    NO],
        Case::Approved =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    QUEUE, NO,    ENDED, ENDED, ENDED, ENDED],
        Case::Waived =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    QUEUE, NO,    NO,    NO,    NO,    NO],
        Case::ApprovedOther =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    NO,    ENDED, ENDED, ENDED, ENDED],
        Case::Rejected =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    FAIL,  NO,    ENDED, ENDED, ENDED, ENDED],
        Case::Replaced =>
        [NO,    NO,    NO,    NO,    NO,    NO,    NO,    AFTER, NO,    ENDED, ENDED, ENDED, ENDED],
        Case::ReplacementEnded =>
        [NO,    NO,    NO,    NO,    NO,    NO,    OK,    NO,    NO,    NO,    NO,    NO,    NO],
        _ => unreachable!("{case:?} is no event of approvals"),
    }
}

#[test]
fn the_table_has_every_status_hold_and_event() {
    for state in State::ALL {
        let call = call_in(Executor::CLIENT, *state);
        assert!(states_of(call.status, call.hold).contains(state), "{state:?}");
    }
    for status in Status::ALL {
        let is_present = |state: &State| call_in(Executor::CLIENT, *state).status == status;
        assert!(State::ALL.iter().any(is_present), "{status:?}");
    }
    for case in Case::ALL {
        assert!(cases_of(&event_of(*case).0).contains(case), "{case:?}");
    }
}

#[test]
fn every_status_times_every_event() {
    for executor in Executor::STANDARD {
        for case in Case::ALL {
            for (state, in_table) in State::ALL.iter().zip(expected_row(*case)) {
                let expected = expected(executor, *case, *state, in_table);
                let row = format!("{executor:?}: {state:?} × {case:?}");
                assert_eq!(step_result(executor, *case, *state), expected, "{row}");
            }
        }
    }
}

/// Applies the event to a call in this state.
fn step_result(executor: Executor, case: Case, state: State) -> Expect {
    let before = call_in(executor, state);
    let (event, now) = event_of(case);
    match step(&before, &event, now) {
        Ok(step) => {
            check_transition(&before, &step, state, case);
            Expect::To(step.call.status, step.call.hold.map(Hold::as_str))
        }
        Err(Refusal::Duplicate) => Expect::Duplicate,
        Err(Refusal::AlreadyEnded(record)) => {
            assert_eq!(record.kind, EventKind::ReportIgnored);
            Expect::AlreadyEnded
        }
        Err(Refusal::WrongAttempt(record)) => {
            assert_eq!(record.kind, EventKind::ReportIgnored);
            Expect::WrongAttempt
        }
        Err(Refusal::NotApplicable) => Expect::NotApplicable,
    }
}

/// Checks the invariants of every transition.
fn check_transition(before: &Call, step: &Transition, state: State, case: Case) {
    let (call, row) = (&step.call, format!("{state:?} × {case:?}"));
    assert!(!before.status.is_terminal(), "{row}: a terminal status never changes");
    assert_eq!(call.version, before.version + 1, "{row}");
    assert_eq!(call.status == Status::Pending, call.hold.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), call.completed_ms.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), call.outcome.is_some(), "{row}");
    assert_eq!(call.status.is_terminal(), step.actions.contains(&Action::NotifyEnded), "{row}");
    assert!(call.status != Status::Running || call.started_ms.is_some(), "{row}");
    // An executor that reported the end needs no stop request.
    let by_executor = matches!(case, Case::RemoteTimedOut | Case::RemoteCanceled);
    let by_clock = matches!(case, Case::AttemptDeadlineDue | Case::AttemptDeadlineAbsent)
        && !call.has_attempt_in_flight();
    let by_server = matches!(call.status, Status::Timeout | Status::Canceled)
        || matches!(case, Case::Abort | Case::PermissionRevoked | Case::SwitchedOff);
    let stopped = by_clock || by_server && !by_executor;
    let stops = step.actions.iter().any(|action| matches!(action, Action::Stop { .. }));
    assert_eq!(
        stops,
        stopped && before.has_attempt_in_flight(),
        "{row}: cancel reaches the executor"
    );
    if call.status.is_terminal() {
        let ends = step.records.iter().filter(|record| record.kind.is_terminal()).count();
        assert_eq!(ends, 1, "{row}: one end is recorded");
    }
}

#[test]
fn an_owned_call_takes_the_same_transitions() {
    for state in State::ALL {
        for case in Case::ALL {
            let before = call_in(Executor::CLIENT, *state);
            let (event, now) = event_of(*case);
            match (step_owned(before.clone(), &event, now), step(&before, &event, now)) {
                (Ok(owned), Ok(step)) => assert_eq!(owned, step, "{state:?} × {case:?}"),
                (Err(returned), Err(refusal)) => {
                    assert_eq!(*returned, (before, refusal), "{state:?} × {case:?}");
                }
                (owned, step) => panic!("{state:?} × {case:?}: {owned:?} and {step:?}"),
            }
        }
    }
}

/// Returns a running call of a function in this process.
fn running_call(effect: Effect) -> Call {
    step(&queued_call(Executor::BUILTIN, effect), &claim_by("n1"), NOW).unwrap().call
}

#[test]
fn only_safe_failures_are_retried() {
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
        let step = step(&running_call(effect), &failure_report(None, fault), NOW).unwrap();
        let expected = if retried { Status::Pending } else { Status::Failed };
        assert_eq!(step.call.status, expected, "{name}");
        assert_eq!(step.actions.contains(&Action::Enqueue), retried, "{name}");
    }
}

#[test]
fn retries_end_with_the_attempts_or_the_deadline() {
    let mut call = running_call(Effect::Read);
    let mut now = NOW;
    for attempt in 1..=3 {
        assert_eq!(call.attempt, attempt);
        call = step(&call, &failure_report(None, Fault::runtime("broken")), now).unwrap().call;
        if attempt == 3 {
            assert_eq!(call.status, Status::Failed);
            let metrics = call.outcome.as_ref().unwrap().metrics;
            assert_eq!((metrics.attempts, metrics.retries), (3, 2));
            break;
        }
        let Some(Hold::Retry { at_ms }) = call.hold else { panic!("{:?}", call.hold) };
        assert_eq!(at_ms, now + 100 * u64::from(attempt), "100 ms, then 200 ms");
        now = at_ms;
        call = step(&call, &claim_by("n1"), now).unwrap().call;
    }
    let late = step(
        &running_call(Effect::Read),
        &failure_report(None, Fault::runtime("x")),
        DEADLINE - 50,
    );
    assert_eq!(late.unwrap().call.status, Status::Failed, "no time for another attempt");
}

#[test]
fn a_fallback_is_used_only_without_a_side_effect() {
    use Effect::{Idempotent, Irreversible, Read};
    let alternate = Target { tool: "other".into(), ..queued_call(Executor::BUILTIN, Read).target };
    for (effect, fault, used) in [
        (Read, Fault::runtime("broken"), true),
        (Irreversible, Fault::unreachable("refused"), true),
        (Irreversible, Fault::runtime("broken"), false),
        (Idempotent, Fault::runtime("broken"), false),
    ] {
        let mut call = running_call(effect);
        (call.max_retries, call.fallbacks) = (0, vec![alternate.clone()]);
        let step = step(&call, &failure_report(None, fault), NOW).unwrap();
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
fn answers_reach_the_next_attempt_and_questions_cost_no_retry() {
    let waiting = call_in(Executor::CLIENT, State::Input);
    assert_eq!((waiting.attempt, waiting.target_attempts), (2, 1));
    let some = step(&waiting, &answers(&["city", "not asked"]), NOW).unwrap();
    let elicitation = some.call.elicitation.as_ref().unwrap();
    assert_eq!(elicitation.unanswered.keys().collect::<Vec<_>>(), ["name"]);
    assert!(some.actions.is_empty());
    let all = step(&some.call, &answers(&["name"]), NOW).unwrap();
    assert_eq!(all.actions, [Action::Enqueue]);
    let next = step(&all.call, &claim_by("n1"), NOW).unwrap().call;
    let elicitation = next.elicitation.as_ref().unwrap();
    let answered: Vec<&str> = elicitation.answers.keys().map(String::as_str).collect();
    assert_eq!((answered, elicitation.source_state.as_deref()), (vec!["city", "name"], Some("n")));
    // A second elicitation starts a new round.
    let again = Event::InputRequired { attempt: next.attempt, questions: questions() };
    let again = step(&next, &again, NOW).unwrap().call;
    assert!(again.elicitation.unwrap().answers.is_empty());
    let late = step(&waiting, &Event::Deadline, NOW + INPUT_TIMEOUT).unwrap().call;
    assert!(late.outcome.unwrap().error.unwrap().message.contains("no answer"));
}

#[test]
fn a_crash_never_runs_an_irreversible_tool_twice() {
    let lost = Event::OwnerLost { node: "n2".into() };
    let ended = step(&running_call(Effect::Irreversible), &lost, NOW).unwrap().call;
    let fault = ended.outcome.unwrap().error.unwrap();
    assert_eq!((ended.status, fault.code), (Status::Failed, Code::OutcomeUnknown));
    for effect in [Effect::Read, Effect::Idempotent] {
        let again = step(&running_call(effect), &lost, NOW).unwrap().call;
        assert!(matches!(again.hold, Some(Hold::Retry { .. })), "{effect:?}");
    }
    let mut once = running_call(Effect::Read);
    once.max_retries = 0;
    assert_eq!(step(&once, &lost, NOW).unwrap().call.status, Status::Failed, "retry: 0");
}

#[test]
fn timeout_messages_say_whether_it_may_have_happened() {
    let message = |call: &Call| {
        let ended = step(call, &Event::Deadline, DEADLINE).unwrap().call;
        ended.outcome.unwrap().error.unwrap().message
    };
    assert!(message(&running_call(Effect::Irreversible)).contains("may have taken effect"));
    assert!(message(&running_call(Effect::Read)).contains("calling again is safe"));
    assert!(message(&call_in(Executor::CLIENT, State::Unacknowledged)).contains("connected?"));
    assert!(
        message(&call_in(Executor::CLIENT, State::Queue)).contains("no execution slot was free")
    );
}
