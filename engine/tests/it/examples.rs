//! Runs the examples and checks their output.

#[path = "../../examples/batch.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod batch;

#[path = "../../examples/run.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod run;

#[path = "../../examples/typed_tool.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod typed_tool;

#[path = "../../examples/background.rs"]
#[allow(dead_code, reason = "the example's main is not called here")]
mod background;

#[tokio::test]
async fn the_batch_example_prints_the_messages_for_the_model() {
    let output = batch::show().await.unwrap();
    let lines: Vec<&str> = output.lines().map(str::trim).collect();
    assert_eq!(
        lines[..4],
        ["tools for the model:", "\"notes__write\"", "\"weather__now\"", "messages for the model:"]
    );
    assert_eq!(lines[4], r#"{"role":"tool","tool_call_id":"call_0","content":"4 °C in Oslo"}"#);
    assert_eq!(lines[5], r#"{"role":"tool","tool_call_id":"call_1","content":"17 °C in Rome"}"#);
    assert!(lines[6].contains("not JSON") && lines[6].contains("line 1 column 10"), "{output}");
    assert_eq!(lines[7], r#"{"role":"tool","tool_call_id":"call_3","content":"noted Oslo"}"#);
    assert_eq!(lines[8], "3 of 4 calls succeeded");
}

#[tokio::test]
async fn the_run_example_prints_steps_and_answer() {
    let output = run::show().await.unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], "step 1: 2 calls");
    assert_eq!(lines[1], "answer: \"Go south: 4 °C in Oslo, 17 °C in Rome.\"");
    assert_eq!(lines[2], "SUCCEEDED after 2 steps: Go south: 4 °C in Oslo, 17 °C in Rome.");
}

#[tokio::test]
async fn the_typed_tool_example_prints_schema_answer_and_faults() {
    let output = typed_tool::show().await.unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[0], r#"required: ["km","litres"]"#);
    assert_eq!(lines[1], r#"answer: {"litres_per_100_km":6.25}"#);
    assert!(lines[2].starts_with("refused: VALIDATION_ERROR"), "{output}");
    assert!(lines[2].contains("/km must be a number"), "{output}");
    let failed = "failed after 3 attempts: RUNTIME_ERROR: km must be greater than 0";
    assert_eq!(lines[3..], [failed]);
}

#[tokio::test]
async fn the_background_example_prints_prompt_and_late_result() {
    let output = background::show().await.unwrap();
    for part in [
        "# Tools\nA tool marked sync returns its result before you continue.",
        "\n- calendar__days (sync): Days of a month\n- report__build (async): Builds a monthly report\n",
        "\n## Pending (1)\n- report__build (async, in the background), call_id call_0, pending for ",
        ": {\"month\": 5}\n\n## Just finished (1)\n- calendar__days, call_id call_1, ",
        " ago, ok: 31\n",
        "\nreceived: report.build (call_0): \"report of month 5: no problems\"\n",
    ] {
        assert!(output.contains(part), "{part}\n---\n{output}");
    }
}
