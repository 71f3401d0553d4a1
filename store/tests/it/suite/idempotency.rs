//! Idempotency keys: the same key means the same request, executed once.

use toolcrib::domain::call::{Call, Status};
use toolcrib::ports::store::{CreateCallResult, Store};

use crate::support::{
    NOW, call, creating, ended, found, history, ids_of, key, of_call, of_project, on_threads, put,
    put_keyed, requested, save,
};

pub async fn the_same_key_and_request_replay_the_first_call(store: &dyn Store) {
    let (first, second) = (call(), call());
    assert!(matches!(put_keyed(store, &first, &key("ada", "k", "f")).await, CreateCallResult::New));
    let events = history(store, of_project("p")).await;
    let CreateCallResult::Replayed(existing) =
        put_keyed(store, &second, &key("ada", "k", "f")).await
    else {
        panic!("the key was used before");
    };
    assert_eq!(*existing, first);
    assert_eq!(found(store, &second).await, None);
    assert_eq!(ids_of(store, "p").await, [first.id]);
    assert_eq!(history(store, of_project("p")).await, events);
}

pub async fn a_call_is_found_by_its_idempotency_key(store: &dyn Store) {
    let first = call();
    assert!(store.find_by_idempotency_key("p", &key("ada", "k", "f")).await.unwrap().is_none());
    put_keyed(store, &first, &key("ada", "k", "f")).await;
    let used = store.find_by_idempotency_key("p", &key("ada", "k", "f")).await.unwrap();
    assert!(matches!(used, Some(CreateCallResult::Replayed(existing)) if *existing == first));
    let other = store.find_by_idempotency_key("p", &key("ada", "k", "g")).await.unwrap();
    assert!(matches!(other, Some(CreateCallResult::Mismatch(id)) if id == first.id));
    assert!(store.find_by_idempotency_key("q", &key("ada", "k", "f")).await.unwrap().is_none());
    assert!(store.find_by_idempotency_key("p", &key("bob", "k", "f")).await.unwrap().is_none());
}

pub async fn a_replay_returns_the_current_state_of_the_call(store: &dyn Store) {
    let first = call();
    put_keyed(store, &first, &key("ada", "k", "f")).await;
    let done = ended(&first, Status::Succeeded, NOW + 50);
    save(store, &done).await;
    let CreateCallResult::Replayed(existing) =
        put_keyed(store, &call(), &key("ada", "k", "f")).await
    else {
        panic!("the key was used before");
    };
    assert_eq!(*existing, done);
}

pub async fn the_same_key_for_another_request_is_a_mismatch(store: &dyn Store) {
    let (first, second) = (call(), call());
    put_keyed(store, &first, &key("ada", "k", "one")).await;
    let CreateCallResult::Mismatch(id) = put_keyed(store, &second, &key("ada", "k", "two")).await
    else {
        panic!("the key stands for another request");
    };
    assert_eq!(id, first.id);
    assert_eq!(found(store, &second).await, None);
    assert_eq!(history(store, of_call(&second)).await, []);
    // The key still refers to the first call.
    let again = put_keyed(store, &call(), &key("ada", "k", "one")).await;
    assert!(matches!(again, CreateCallResult::Replayed(existing) if existing.id == first.id));
}

pub async fn keys_of_other_agents_and_projects_are_independent(store: &dyn Store) {
    let elsewhere = |project: &str| Call { project: project.into(), ..call() };
    for (project, agent, name) in
        [("p", "ada", "k"), ("p", "bob", "k"), ("q", "ada", "k"), ("p", "ada", "K")]
    {
        let created = put_keyed(store, &elsewhere(project), &key(agent, name, "f")).await;
        assert!(matches!(created, CreateCallResult::New), "{project} {agent} {name}");
    }
    // The parts of the key are compared separately, not as one concatenated text.
    for (project, agent, name) in [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd")] {
        let created = put_keyed(store, &elsewhere(project), &key(agent, name, "f")).await;
        assert!(matches!(created, CreateCallResult::New), "{project} {agent} {name}");
    }
}

pub async fn calls_without_a_key_are_independent(store: &dyn Store) {
    let (one, two) = (call(), call());
    put(store, &one).await;
    put(store, &two).await;
    put_keyed(store, &call(), &key("ada", "", "")).await;
    assert_eq!(ids_of(store, "p").await.len(), 3);
}

pub async fn one_of_100_concurrent_creates_stores_the_call(store: &dyn Store) {
    let created = on_threads(4, async |_| {
        let calls: Vec<Call> = (0..25).map(|_| call()).collect();
        let creates = calls.iter().map(|call| {
            let key = Some(key("ada", "k", "f"));
            creating(store, call, vec![requested()], key)
        });
        let answers = futures::future::join_all(creates).await;
        let pairs = calls.into_iter().zip(answers);
        pairs.map(|(call, answer)| (call.id, answer.unwrap())).collect::<Vec<_>>()
    });
    let (mut new_ids, mut replayed_ids) = (vec![], vec![]);
    for (created_id, answer) in created.into_iter().flatten() {
        match answer {
            CreateCallResult::New => new_ids.push(created_id),
            CreateCallResult::Replayed(existing) => replayed_ids.push(existing.id),
            CreateCallResult::Mismatch(_) => panic!("the requests are the same"),
        }
    }
    assert_eq!((new_ids.len(), replayed_ids.len()), (1, 99));
    assert!(replayed_ids.iter().all(|id| *id == new_ids[0]));
    assert_eq!(ids_of(store, "p").await, new_ids);
    assert_eq!(history(store, of_project("p")).await.len(), 1);
}
