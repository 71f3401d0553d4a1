//! The examples do what they say.

#[path = "../../examples/batch.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod batch;

#[tokio::test]
async fn a_turn_of_an_agent() {
    let shown = batch::turn().await.unwrap();
    let lines: Vec<&str> = shown.lines().map(str::trim).collect();
    assert_eq!(
        lines[..4],
        ["tools for the model:", "\"notes__write\"", "\"weather__now\"", "messages for the model:"]
    );
    assert_eq!(lines[4], r#"{"role":"tool","tool_call_id":"call_0","content":"4 °C in Oslo"}"#);
    assert_eq!(lines[5], r#"{"role":"tool","tool_call_id":"call_1","content":"17 °C in Rome"}"#);
    assert!(lines[6].contains("not JSON") && lines[6].contains("line 1 column 10"), "{shown}");
    assert_eq!(lines[7], r#"{"role":"tool","tool_call_id":"call_3","content":"noted Oslo"}"#);
    assert_eq!(lines[8], "3 of 4 went well");
}
