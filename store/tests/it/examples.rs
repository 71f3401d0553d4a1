//! Runs the example and checks its output.

#[path = "../../examples/durable.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod durable;

#[tokio::test]
async fn the_durable_example_recovers_a_call_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let output = durable::show(&crate::support::database_in(&directory)).await.unwrap();
    assert_eq!(
        output.lines().collect::<Vec<_>>(),
        [
            "before the restart: RUNNING",
            "after the restart: SUCCEEDED",
            "answer: \"Hello, Ada!\"",
            "attempts: 2",
            "the same key gives the same ticket: true",
        ]
    );
}
