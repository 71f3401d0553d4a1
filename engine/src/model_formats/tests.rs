//! Tests with real samples of each format, parsed and answered.

use serde_json::{Value, json};

use super::*;
use crate::domain::tool::{Effect, Executor, Risk, ToolDefinition};

fn read(text: &str) -> Result<ParsedToolCall, CallParseError> {
    parse(&Json::parse(text).unwrap())
}

fn fault(text: &str) -> (CallParseError, Value) {
    let parse_error = read(text).unwrap_err();
    assert_eq!(parse_error.fault.code, Code::ValidationError);
    let detail = parse_error.fault.detail.clone().unwrap();
    (parse_error, detail)
}

fn answer_in(format: CallFormat, ok: bool) -> Value {
    let data = Json::parse(r#"{"temp": 1.10}"#).unwrap();
    let fault = Fault::runtime("no rain today");
    let failed = fault_content(&fault);
    let metrics = Some(CallMetrics { latency_ms: 12, queue_ms: 1, attempts: 1, retries: 0 });
    let answer = EntryAnswer {
        ok: Some(ok),
        content: if ok { data.text() } else { &failed },
        data: ok.then_some(&data),
        error: (!ok).then_some(&fault),
        metrics,
        pending: None,
        media: &[],
    };
    answer_message(format, Some("call_0"), &answer).to_value()
}

#[test]
fn the_chat_completions_format_is_parsed_and_answered() {
    let entry = read(
        r#"{"id": "call_abc123", "type": "function",
            "function": {"name": "get_weather", "arguments": "{\"location\": \"Paris\", \"n\": 1.10}"}}"#,
    )
    .unwrap();
    assert_eq!((entry.format, entry.id.as_deref()), (CallFormat::OpenAi, Some("call_abc123")));
    assert_eq!(entry.name, "get_weather");
    assert_eq!(entry.args.text(), r#"{"location": "Paris", "n": 1.10}"#);
    let expected = json!({"role": "tool", "tool_call_id": "call_0", "content": "{\"temp\": 1.10}"});
    assert_eq!(answer_in(CallFormat::OpenAi, true), expected);
    let failed = answer_in(CallFormat::OpenAi, false);
    let content: Value = serde_json::from_str(failed["content"].as_str().unwrap()).unwrap();
    assert_eq!(content["error"]["code"], "RUNTIME_ERROR");
    assert_eq!(content["error"]["message"], "no rain today");
}

#[test]
fn loose_chat_completions_calls_are_accepted() {
    let entry = read(r#"{"function": {"name": "a", "arguments": {"x": 1}}}"#).unwrap();
    assert_eq!(
        (entry.format, entry.id, entry.args.text()),
        (CallFormat::OpenAi, None, r#"{"x": 1}"#)
    );
    for arguments in [r#""""#, r#""  ""#, "null"] {
        let text = format!(r#"{{"function": {{"name": "a", "arguments": {arguments}}}}}"#);
        assert_eq!(read(&text).unwrap().args.text(), "{}", "{text}");
    }
    assert_eq!(read(r#"{"function": {"name": "a"}}"#).unwrap().args.text(), "{}");
}

#[test]
fn the_responses_format_is_parsed_and_answered() {
    let entry = read(
        r#"{"type": "function_call", "id": "fc_68a1", "call_id": "call_xyz", "status": "completed",
            "name": "get_weather", "arguments": "{\"location\":\"Paris\"}"}"#,
    )
    .unwrap();
    assert_eq!((entry.format, entry.id.as_deref()), (CallFormat::Responses, Some("call_xyz")));
    assert_eq!(entry.args.text(), r#"{"location":"Paris"}"#);
    let item = answer_in(CallFormat::Responses, true);
    let content = "{\"temp\": 1.10}";
    let expected = json!({"type": "function_call_output", "call_id": "call_0", "output": content});
    assert_eq!(item, expected);
}

#[test]
fn the_anthropic_format_is_parsed_and_answered() {
    let entry = read(
        r#"{"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "get_weather",
            "input": {"location": "San Francisco, CA", "unit": "celsius"}}"#,
    )
    .unwrap();
    assert_eq!(entry.format, CallFormat::Anthropic);
    assert_eq!(entry.id.as_deref(), Some("toolu_01A09q90qw90lq917835lq9"));
    assert_eq!(entry.args.to_value()["unit"], "celsius");
    let block = answer_in(CallFormat::Anthropic, true);
    let content = "{\"temp\": 1.10}";
    assert_eq!(block, json!({"type": "tool_result", "tool_use_id": "call_0", "content": content}));
    assert_eq!(answer_in(CallFormat::Anthropic, false)["is_error"], true);
    let (parse_error, detail) =
        fault(r#"{"type": "tool_use", "id": "t", "name": "a", "input": "{}"}"#);
    assert_eq!(
        (parse_error.format, detail["pointer"].as_str()),
        (CallFormat::Anthropic, Some("/input"))
    );
}

#[test]
fn the_envelope_format_is_parsed_and_answered() {
    let entry = read(
        r#"{"call_id": "c-1", "name": "calc.add", "args": {"a": 1}, "timeout_ms": 8000, "retry": 1,
            "idempotency_key": null}"#,
    )
    .unwrap();
    assert_eq!(
        (entry.format, entry.timeout_ms, entry.retry),
        (CallFormat::Envelope, Some(8_000), Some(1))
    );
    assert_eq!(entry.idempotency_key, None, "null counts as absent");
    assert_eq!(read(r#"{"name": "a"}"#).unwrap().args.text(), "{}");
    let answer = answer_in(CallFormat::Envelope, true);
    assert_eq!((&answer["ok"], &answer["data"]), (&json!(true), &json!({"temp": 1.10})));
    assert_eq!(answer["metrics"], json!({"latency_ms": 12, "retries": 0}));
    let answer = answer_in(CallFormat::Envelope, false);
    assert_eq!(
        (&answer["data"], &answer["error"]["code"]),
        (&Value::Null, &json!("RUNTIME_ERROR"))
    );
}

#[test]
fn arguments_that_are_not_json_are_reported_with_their_location() {
    let text = r#"{"id": "call_1", "type": "function",
        "function": {"name": "w", "arguments": "{\"city\":\n \"Köln\", \"days\": three}"}}"#;
    let (parse_error, detail) = fault(text);
    assert_eq!(
        (parse_error.format, parse_error.id.as_deref()),
        (CallFormat::OpenAi, Some("call_1"))
    );
    assert_eq!(parse_error.name.as_deref(), Some("w"));
    assert_eq!(detail["pointer"], "/function/arguments");
    let arguments = "{\"city\":\n \"Köln\", \"days\": three}";
    let offset = detail["offset"].as_u64().unwrap() as usize;
    assert!(arguments[offset - 1..].starts_with("th") || arguments[offset..].starts_with("th"));
    assert_eq!((&detail["line"], detail["near"].as_str()), (&json!(2), Some(arguments)));
    assert!(parse_error.fault.message.contains("line 2 column"), "{}", parse_error.fault.message);
    let long = format!("{{\"a\": \"{}\", b}}", "é".repeat(200));
    let entry = json!({"type": "function_call", "name": "w", "arguments": long});
    let (_, detail) = fault(&entry.to_string());
    let near = detail["near"].as_str().unwrap();
    assert!(near.starts_with('…') && near.ends_with("\", b}"), "{near}");
    for broken in ["{", "{\"a\":1}}", "not json", "{\"a\":1", "\u{0}", "[\n\n"] {
        let entry = json!({"type": "function_call", "name": "w", "arguments": broken});
        let (_, detail) = fault(&entry.to_string());
        assert!(detail["offset"].as_u64().unwrap() as usize <= broken.len(), "{broken:?}");
    }
}

#[test]
fn a_call_of_no_known_format_is_refused_with_a_pointer() {
    for (text, pointer) in [
        ("7", ""),
        ("\"calc.add\"", ""),
        ("[]", ""),
        ("{}", "/name"),
        (r#"{"name": 5}"#, "/name"),
        (r#"{"type": "custom", "id": "x", "custom": {}}"#, "/type"),
        (r#"{"type": 3, "name": "a"}"#, "/type"),
        (r#"{"type": "function"}"#, "/function"),
        (r#"{"type": "function", "function": "a"}"#, "/function"),
        (r#"{"type": "function", "function": {"arguments": "{}"}}"#, "/function/name"),
        (r#"{"type": "function", "id": 7, "function": {"name": "a"}}"#, "/id"),
        (r#"{"type": "function_call", "call_id": "c"}"#, "/name"),
        (r#"{"name": "a", "arguments": "{}"}"#, "/arguments"),
        (r#"{"name": "a", "input": {}}"#, "/input"),
        (r#"{"name": "a", "timeout_ms": -1}"#, "/timeout_ms"),
        (r#"{"name": "a", "retry": 1.5}"#, "/retry"),
    ] {
        let (_, detail) = fault(text);
        assert_eq!(detail["pointer"], pointer, "{text}");
    }
    let (parse_error, _) = fault(r#"{"type": "custom", "id": "x", "name": "n"}"#);
    assert_eq!((parse_error.id.as_deref(), parse_error.name.as_deref()), (Some("x"), Some("n")));
}

#[test]
fn string_results_are_passed_as_plain_text() {
    assert_eq!(data_content(&Json::parse(r#""a \"b\"\n""#).unwrap()), "a \"b\"\n");
    assert_eq!(data_content(&Json::parse("[1.10]").unwrap()), "[1.10]");
    // Characters that a tool escaped are shown as themselves, also in a text that holds JSON.
    for written in [
        r#"{"city":"\u5317\u4eac","n":1.10}"#,
        r#""{\"city\":\"\\u5317\\u4eac\",\"n\":1.10}""#,
        r#"{"content":[{"type":"text","text":"{\"city\":\"\\u5317\\u4eac\",\"n\":1.10}"}]}"#,
    ] {
        let content = data_content(&Json::parse(written).unwrap());
        assert_eq!(content, r#"{"city":"北京","n":1.10}"#);
    }
}

fn tool(schema: &str, effect: Effect) -> ToolDefinition {
    ToolDefinition {
        project: None,
        name: "calc.add".into(),
        description: "Adds".into(),
        executor: Executor::BUILTIN,
        input_schema: Json::parse(schema).unwrap(),
        output_schema: Some(Json::parse(r#"{"type":"object"}"#).unwrap()),
        timeout_ms: 1_000,
        background: false,
        effect,
        risk: Risk::Low,
        policy: Default::default(),
        fallback: Vec::new(),
        metadata: None,
        binding: None,
    }
}

#[test]
fn every_tool_format_describes_a_tool() {
    let schema = r#"{"type":"object","properties":{"a":{"type":"integer","default":1.0}}}"#;
    let tool = tool(schema, Effect::Idempotent);
    let described = |format| describe_tool(format, "calc__add", &tool).text().to_owned();
    assert_eq!(
        described(ToolFormat::OpenAi),
        format!(
            r#"{{"type":"function","function":{{"name":"calc__add","description":"Adds","parameters":{schema}}}}}"#
        )
    );
    assert_eq!(
        described(ToolFormat::OpenAiResponses),
        format!(
            r#"{{"type":"function","name":"calc__add","description":"Adds","parameters":{schema},"strict":false}}"#
        )
    );
    assert_eq!(
        described(ToolFormat::Anthropic),
        format!(r#"{{"name":"calc__add","description":"Adds","input_schema":{schema}}}"#)
    );
    let mcp: Value = serde_json::from_str(&described(ToolFormat::Mcp)).unwrap();
    assert_eq!(mcp["title"], "calc.add");
    assert_eq!(
        (&mcp["inputSchema"]["type"], &mcp["outputSchema"]["type"]),
        (&json!("object"), &json!("object"))
    );
    let hints = json!({"readOnlyHint": false, "destructiveHint": true, "idempotentHint": true});
    assert_eq!(mcp["annotations"], hints);
    for format in ToolFormat::ALL {
        assert_eq!(format.as_str().parse(), Ok(format));
    }
}

#[test]
fn a_schema_without_a_type_is_described_as_an_object() {
    for schema in ["{}", "true", r#"{"required":["a"]}"#, r#"{"type":["object","null"]}"#] {
        let tool = tool(schema, Effect::Read);
        let described = describe_tool(ToolFormat::Anthropic, "x", &tool).to_value();
        assert_eq!(described["input_schema"]["type"], "object", "{schema}");
        assert!(accepts_object(&tool), "{schema}");
    }
    for schema in [r#"{"type":"string"}"#, r#"{"type":["array","null"]}"#] {
        assert!(!accepts_object(&tool(schema, Effect::Read)), "{schema}");
    }
}
