//! Boxes show a caller only the cards that it may read, by itself or through an agent.

use toolcrib::domain::agent::CardBox;

use super::worker_rights::{plain, start, take_turn_with};
use super::*;

/// Makes a call of `ada`, and a box with its result card.
async fn box_of_ada(engine: &Engine) -> CardBox {
    let (ada, request) = (plain("ada"), CallRequest::new("note.write", "{}").unwrap());
    let ticket = engine.calls().invoke(&ada, request).await.unwrap();
    let ended = engine.calls().wait(&ada, &ticket, Until::EndedWithin(20_000)).await.unwrap();
    let card_id = format!("card_{}_result", ended.id.as_str().trim_start_matches("tc_"));
    engine.utp().boxes().create_box(&ada, vec![card_id], Vec::new()).await.unwrap()
}

async fn call_writer(engine: &Engine, caller: &Caller, box_id: &str) -> Arc<Call> {
    let args = json!({ "instruction": "x", "context_box_id": box_id });
    let request = CallRequest::of("agent.writer", Json::from_value(&args));
    let ticket = engine.calls().invoke(caller, request).await.unwrap();
    engine.calls().wait(caller, &ticket, Until::EndedWithin(20_000)).await.unwrap()
}

#[tokio::test]
async fn a_box_shows_nobody_a_card_that_it_may_not_read() {
    let engine = start(&Arc::default()).await;
    let (ada, eve) = (plain("ada"), plain("eve"));
    let CardBox { box_id, card_ids, .. } = box_of_ada(&engine).await;
    let boxes = engine.utp().boxes();
    assert_eq!(boxes.card_box(&ada, &box_id).await.unwrap().1, card_ids);
    assert_eq!(boxes.card_box(&eve, &box_id).await.unwrap_err().code(), Code::NotFound);
    let inherited = boxes.create_box(&eve, Vec::new(), vec![box_id.clone()]).await;
    let unknown = boxes.create_box(&eve, Vec::new(), vec!["none".into()]).await;
    assert_eq!(inherited.unwrap_err().code(), unknown.unwrap_err().code());
    let request = RunRequest {
        model: "scripted".into(),
        messages: vec![json!({ "role": "user", "content": "go" })],
        context_box_id: Some(box_id.clone()),
        ..RunRequest::default()
    };
    let refused = engine.runs().start_run(&eve, request).await.err().unwrap();
    assert_eq!(refused.code(), Code::NotFound);
    let of_eve = call_writer(&engine, &eve, &box_id).await;
    let fault = of_eve.outcome.as_ref().and_then(|outcome| outcome.error.clone()).unwrap();
    assert!(fault.message.contains("there is no box"), "{fault:?}");
    assert_eq!(call_writer(&engine, &ada, &box_id).await.status, Status::Succeeded);
}

#[tokio::test]
async fn a_worker_reads_the_box_that_was_handed_to_it() {
    let engine = start(&Arc::default()).await;
    let CardBox { box_id, card_ids, .. } = box_of_ada(&engine).await;
    let (boxes, worker) = (engine.utp().boxes(), plain("expert"));
    let args = json!({ "instruction": "x", "context_box_id": box_id });
    take_turn_with(&engine, &plain("eve"), args.clone()).await;
    let read = boxes.card_box(&worker, &box_id).await;
    assert_eq!(read.unwrap_err().code(), Code::NotFound, "eve may not read it either");
    take_turn_with(&engine, &plain("ada"), args).await;
    assert_eq!(boxes.card_box(&worker, &box_id).await.unwrap().1, card_ids);
}
