//! The resources and prompts of the fixtures.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use rmcp::ErrorData;
use rmcp::model::{
    CompleteRequestParams, CompleteResult, CompletionInfo, GetPromptRequestParams,
    GetPromptResponse, GetPromptResult, InputRequiredResult, Prompt, ReadResourceRequestParams,
    ReadResourceResponse, ReadResourceResult, Resource, ResourceContents, ResourceTemplate,
};
use serde_json::{Value, json};
use tokio::sync::broadcast;
use toolcrib::Caller;
use toolcrib_server::doors::mcp::{Changed, Shelf};

use super::tools::{IMAGE, form};

/// A shelf with what the suite looks for.
pub struct Fixtures {
    changes: broadcast::Sender<Changed>,
    more_prompts: AtomicUsize,
}

impl Fixtures {
    /// The shelf as it is at the start.
    pub fn new() -> Self {
        Self { changes: broadcast::channel(16).0, more_prompts: AtomicUsize::new(0) }
    }

    /// One more prompt.
    pub fn change_prompts(&self) {
        self.more_prompts.fetch_add(1, Ordering::Relaxed);
        let _ = self.changes.send(Changed::Prompts);
    }
}

fn prompt(name: &str, arguments: &[&str]) -> Result<Prompt, ErrorData> {
    let arguments: Vec<Value> =
        arguments.iter().map(|name| json!({ "name": name, "required": true })).collect();
    typed(json!({ "name": name, "description": "for the suite", "arguments": arguments }))
}

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, ErrorData> {
    serde_json::from_value(value)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

fn messages(contents: &[Value]) -> Result<GetPromptResponse, ErrorData> {
    let messages: Vec<Value> =
        contents.iter().map(|content| json!({ "role": "user", "content": content })).collect();
    let result: GetPromptResult = typed(json!({ "messages": messages }))?;
    Ok(result.into())
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

#[async_trait]
impl Shelf for Fixtures {
    async fn resources(&self, _: &Caller) -> Result<Vec<Resource>, ErrorData> {
        let named = |uri: &str, kind: &str| Resource::new(uri, uri).with_mime_type(kind);
        Ok(vec![
            named("test://static-binary", "image/png"),
            named("test://static-text", "text/plain"),
            named("test://watched-resource", "text/plain"),
        ])
    }

    async fn templates(&self, _: &Caller) -> Result<Vec<ResourceTemplate>, ErrorData> {
        Ok(vec![
            ResourceTemplate::new("test://template/{id}/data", "template")
                .with_mime_type("application/json"),
        ])
    }

    async fn read(
        &self,
        _: &Caller,
        asked: ReadResourceRequestParams,
    ) -> Result<Option<ReadResourceResponse>, ErrorData> {
        let uri = asked.uri;
        let id = uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data"));
        let contents = match (uri.as_str(), id) {
            ("test://static-text" | "test://watched-resource", _) => {
                ResourceContents::text("This is the content of the static text resource.", uri)
            }
            ("test://static-binary", _) => {
                ResourceContents::blob(IMAGE, uri).with_mime_type("image/png")
            }
            (_, Some(id)) => {
                let data =
                    json!({ "id": id, "templateTest": true, "data": format!("Data for ID: {id}") });
                ResourceContents::text(data.to_string(), uri).with_mime_type("application/json")
            }
            _ => return Ok(None),
        };
        Ok(Some(ReadResourceResult::new(vec![contents]).into()))
    }

    async fn prompts(&self, _: &Caller) -> Result<Vec<Prompt>, ErrorData> {
        let mut prompts = vec![
            prompt("test_input_required_result_prompt", &[])?,
            prompt("test_prompt_with_arguments", &["arg1", "arg2"])?,
            prompt("test_prompt_with_embedded_resource", &["resourceUri"])?,
            prompt("test_prompt_with_image", &[])?,
            prompt("test_simple_prompt", &[])?,
        ];
        for n in 0..self.more_prompts.load(Ordering::Relaxed) {
            prompts.push(prompt(&format!("test_z_dynamic_prompt_{n}"), &[])?);
        }
        Ok(prompts)
    }

    async fn prompt(
        &self,
        _: &Caller,
        asked: GetPromptRequestParams,
    ) -> Result<Option<GetPromptResponse>, ErrorData> {
        let given = |name: &str| {
            let value =
                asked.arguments.as_ref().and_then(|arguments| arguments.get(name)?.as_str());
            value.unwrap_or_default().to_owned()
        };
        let answer = match asked.name.as_str() {
            "test_simple_prompt" => messages(&[text("This is a simple prompt for testing.")])?,
            "test_prompt_with_arguments" => {
                let (one, two) = (given("arg1"), given("arg2"));
                messages(&[text(&format!("Prompt with arguments: arg1='{one}', arg2='{two}'"))])?
            }
            "test_prompt_with_embedded_resource" => messages(&[
                json!({ "type": "resource", "resource": { "uri": given("resourceUri"),
                    "mimeType": "text/plain",
                    "text": "Embedded resource content for testing." } }),
                text("Please process the embedded resource above."),
            ])?,
            "test_prompt_with_image" => messages(&[
                json!({ "type": "image", "data": IMAGE, "mimeType": "image/png" }),
                text("Please analyze the image above."),
            ])?,
            "test_input_required_result_prompt" => match asked.input_responses {
                Some(answers) if !answers.is_empty() => {
                    messages(&[text(&format!("Answered: {}", json!(answers)))])?
                }
                _ => {
                    let fields = json!({ "context": { "type": "string" } });
                    let question = form("What context should be used?", fields, &["context"]);
                    let requests = typed(json!({ "user_context": question }))?;
                    InputRequiredResult::from_input_requests(requests).into()
                }
            },
            _ => return Ok(None),
        };
        Ok(Some(answer))
    }

    async fn complete(
        &self,
        _: &Caller,
        asked: CompleteRequestParams,
    ) -> Result<CompleteResult, ErrorData> {
        let known = ["paris", "park", "party", "test", "tester"];
        let fitting = known.into_iter().filter(|word| word.starts_with(&asked.argument.value));
        let info = CompletionInfo::new(fitting.map(str::to_owned).collect());
        Ok(CompleteResult::new(info.map_err(|error| ErrorData::internal_error(error, None))?))
    }

    fn changes(&self) -> Option<broadcast::Receiver<Changed>> {
        Some(self.changes.subscribe())
    }
}
