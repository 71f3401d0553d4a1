//! Undelivered requests: stored with their work, listed at a start, removed after the delivery.

use std::sync::Arc;

use toolcrib::ports::store::undelivered::{RequestKind, UndeliveredRequest};
use toolcrib::ports::store::{NewCall, Store};

use super::runs::run;
use crate::support::{NOW, call};

fn request(id: &str, kind: RequestKind) -> UndeliveredRequest {
    UndeliveredRequest {
        id: id.into(),
        digest: "d\u{1F980}".into(),
        kind,
        project: "p".into(),
        expires_ms: NOW + 10,
    }
}

async fn listed(store: &dyn Store, at_ms: u64) -> Vec<String> {
    let listed = store.undelivered().list_undelivered(at_ms).await.unwrap();
    listed.into_iter().map(|request| request.id).collect()
}

pub async fn an_undelivered_request_is_stored_with_its_call_and_run(store: &dyn Store) {
    let new = call();
    let of_call = request(new.id.as_str(), RequestKind::Call);
    let undelivered = Some(of_call.clone());
    let call = Arc::new(new);
    let new = NewCall {
        call,
        records: vec![],
        key: None,
        undelivered,
        approval: None,
        group_member: None,
    };
    store.create_call(new).await.unwrap();
    let of_run = request("run_1", RequestKind::Run);
    let created = store.runs().create_run(run("p", "run_1"), None, vec![], Some(of_run.clone()));
    created.await.unwrap();
    let mut expected = vec![of_call, of_run];
    expected.sort_by(|one, other| one.id.cmp(&other.id));
    assert_eq!(store.undelivered().list_undelivered(NOW).await.unwrap(), expected);
}

pub async fn an_undelivered_request_is_replaced_removed_and_expires(store: &dyn Store) {
    let requests = store.undelivered();
    for id in ["a", "b", "c"] {
        requests.put_undelivered(request(id, RequestKind::Run)).await.unwrap();
    }
    let longer = UndeliveredRequest { expires_ms: NOW + 20, ..request("c", RequestKind::Run) };
    requests.put_undelivered(longer.clone()).await.unwrap();
    assert_eq!(listed(store, NOW + 10).await, ["a", "b", "c"]);
    assert_eq!(requests.list_undelivered(NOW + 11).await.unwrap(), [longer]);
    requests.remove_undelivered(vec!["a".into(), "unknown".into()], 0).await.unwrap();
    assert_eq!(listed(store, NOW).await, ["b", "c"]);
    requests.remove_undelivered(vec![], NOW + 11).await.unwrap();
    assert_eq!(listed(store, 0).await, ["c"]);
}
