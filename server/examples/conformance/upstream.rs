//! The upstream MCP server: tools, resources and prompts that the suite expects.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CompleteRequestParams, CompleteResult,
    CompletionInfo, GetPromptRequestParams, GetPromptResponse, GetPromptResult, Implementation,
    InputRequiredResult, InputResponses, ListPromptsResult, ListResourceTemplatesResult,
    ListResourcesResult, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam,
    Prompt, PromptListChangedNotification, ReadResourceRequestParams, ReadResourceResponse,
    ReadResourceResult, Resource, ResourceContents, ResourceTemplate, ServerCapabilities,
    ServerConfig, ServerNotification, SubscriptionFilter, Tool, ToolListChangedNotification,
};
use rmcp::service::{RequestContext, SubscriptionContext};
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::tools::{self, IMAGE, SOUND, form_question};

#[derive(Debug, Clone, Copy)]
enum Changed {
    Tools,
    Prompts,
}

#[derive(Clone)]
struct Upstream {
    more_tools: Arc<AtomicUsize>,
    more_prompts: Arc<AtomicUsize>,
    changes: broadcast::Sender<Changed>,
}

/// Serves on standard input and output until they are closed.
pub async fn serve() -> anyhow::Result<()> {
    let (more_tools, more_prompts) = Default::default();
    let upstream = Upstream { more_tools, more_prompts, changes: broadcast::channel(16).0 };
    let (input, output) = (tokio::io::stdin(), tokio::io::stdout());
    let running = rmcp::serve_server(upstream, (input, output)).await?;
    running.waiting().await?;
    Ok(())
}

fn typed<T: DeserializeOwned>(value: Value) -> Result<T, ErrorData> {
    serde_json::from_value(value)
        .map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn image() -> Value {
    json!({ "type": "image", "data": IMAGE, "mimeType": "image/png" })
}

fn embedded(uri: &str, kind: &str, text: &str) -> Value {
    json!({ "type": "resource", "resource": { "uri": uri, "mimeType": kind, "text": text } })
}

fn result(content: &[Value], is_error: bool) -> Result<CallToolResponse, ErrorData> {
    let result: CallToolResult = typed(json!({ "content": content, "isError": is_error }))?;
    Ok(result.into())
}

/// Requests input, with the state to resume from.
fn input_required(questions: Value, state: &str) -> Result<InputRequiredResult, ErrorData> {
    Ok(InputRequiredResult::new(Some(typed(questions)?), Some(state.to_owned())))
}

/// Returns the input requests that a tool makes before it can continue, with its state.
fn asks(params: &CallToolRequestParams, args: &Value) -> Result<Option<Value>, ErrorData> {
    let Some(first) = tools::questions(&params.name, args) else { return Ok(None) };
    let state = params.request_state.as_deref();
    if params.name == "test_input_required_result_multi_round" && state == Some("first") {
        let fields = json!({ "color": { "type": "string" } });
        let step = form_question("Step 2: What is your favorite color?", fields, &["color"]);
        return Ok(Some(json!({ "questions": { "step2": step }, "state": "second" })));
    }
    let is_answered =
        |key: &String| params.input_responses.as_ref().is_some_and(|a| a.contains_key(key));
    if state == Some("second") || first.keys().all(is_answered) {
        return Ok(None);
    }
    Ok(Some(json!({ "questions": first, "state": "first" })))
}

impl Upstream {
    fn tools(&self) -> Vec<Tool> {
        let mut tools = tools::offered();
        for n in 0..self.more_tools.load(Ordering::SeqCst) {
            let name = format!("test_dynamic_tool_{n}");
            tools.push(tools::described(&name, json!({ "type": "object" })));
        }
        tools
    }

    fn change(&self, change: Changed) {
        match change {
            Changed::Tools => self.more_tools.fetch_add(1, Ordering::SeqCst),
            Changed::Prompts => self.more_prompts.fetch_add(1, Ordering::SeqCst),
        };
        let _ = self.changes.send(change);
    }

    async fn progress(&self, context: &RequestContext<RoleServer>) {
        let Some(token) = context.meta.get_progress_token() else { return };
        for percent in [0.0, 50.0, 100.0] {
            let progress = ProgressNotificationParam::new(token.clone(), percent).with_total(100.0);
            let _ = context.peer.notify_progress(progress).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn run(
        &self,
        params: CallToolRequestParams,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let args = Value::Object(params.arguments.clone().unwrap_or_default());
        if let Some(asks) = asks(&params, &args)? {
            let state = asks["state"].as_str().unwrap_or_default().to_owned();
            return Ok(input_required(asks["questions"].clone(), &state)?.into());
        }
        match &*params.name {
            "test_simple_text" => {
                result(&[text("This is a simple text response for testing.")], false)
            }
            "test_image_content" => result(&[image()], false),
            "test_audio_content" => {
                let sound = json!({ "type": "audio", "data": SOUND, "mimeType": "audio/wav" });
                result(&[sound], false)
            }
            "test_embedded_resource" => {
                let words = "This is an embedded resource content.";
                result(&[embedded("test://embedded-resource", "text/plain", words)], false)
            }
            "test_multiple_content_types" => {
                let data = r#"{"test":"data","value":123}"#;
                let uri = "test://mixed-content-resource";
                let first = text("Multiple content types test:");
                result(&[first, image(), embedded(uri, "application/json", data)], false)
            }
            "test_tool_with_progress" => {
                self.progress(context).await;
                result(&[text("Progress was reported")], false)
            }
            "test_error_handling" => {
                result(&[text("This tool intentionally returns an error for testing")], true)
            }
            "greet" => {
                let name = args["name"].as_str().unwrap_or_default();
                result(&[text(&format!("Hello, {name}!"))], false)
            }
            "test_trigger_tool_change" => {
                self.change(Changed::Tools);
                result(&[text("Changed")], false)
            }
            "test_trigger_prompt_change" => {
                self.change(Changed::Prompts);
                result(&[text("Changed")], false)
            }
            _ => answered(params.request_state.as_deref(), params.input_responses),
        }
    }
}

/// Returns the result of a tool once its requests are answered.
fn answered(
    state: Option<&str>,
    answers: Option<InputResponses>,
) -> Result<CallToolResponse, ErrorData> {
    let state = state.map_or("no state", |_| "state-ok");
    result(&[text(&format!("Answered ({state}): {}", json!(answers)))], false)
}

fn prompt(name: &str, arguments: &[&str]) -> Result<Prompt, ErrorData> {
    let arguments: Vec<Value> =
        arguments.iter().map(|name| json!({ "name": name, "required": true })).collect();
    typed(json!({ "name": name, "description": "for the suite", "arguments": arguments }))
}

fn messages(contents: &[Value]) -> Result<GetPromptResponse, ErrorData> {
    let messages: Vec<Value> =
        contents.iter().map(|content| json!({ "role": "user", "content": content })).collect();
    let result: GetPromptResult = typed(json!({ "messages": messages }))?;
    Ok(result.into())
}

impl ServerHandler for Upstream {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_prompts()
            .enable_prompts_list_changed()
            .enable_resources()
            .enable_completions()
            .build();
        let mut config = ServerConfig::new(capabilities);
        config.server_info = Implementation::new("fixture", "1.0");
        config
    }

    async fn list_tools(
        &self,
        _params: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools()))
    }

    async fn call_tool(
        &self,
        params: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.run(params, &context).await
    }

    async fn list_resources(
        &self,
        _params: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let resource = |uri: &str, kind: &str| Resource::new(uri, uri).with_mime_type(kind);
        Ok(ListResourcesResult::with_all_items(vec![
            resource("test://static-binary", "image/png"),
            resource("test://static-text", "text/plain"),
            resource("test://watched-resource", "text/plain"),
        ]))
    }

    async fn list_resource_templates(
        &self,
        _params: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        let template = ResourceTemplate::new("test://template/{id}/data", "template")
            .with_mime_type("application/json");
        Ok(ListResourceTemplatesResult::with_all_items(vec![template]))
    }

    async fn read_resource(
        &self,
        params: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let uri = params.uri;
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
            _ => return Err(ErrorData::resource_not_found("there is no such resource", None)),
        };
        Ok(ReadResourceResult::new(vec![contents]).into())
    }

    async fn list_prompts(
        &self,
        _params: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListPromptsResult, ErrorData> {
        let mut prompts = vec![
            prompt("test_input_required_result_prompt", &[])?,
            prompt("test_prompt_with_arguments", &["arg1", "arg2"])?,
            prompt("test_prompt_with_embedded_resource", &["resourceUri"])?,
            prompt("test_prompt_with_image", &[])?,
            prompt("test_simple_prompt", &[])?,
        ];
        for n in 0..self.more_prompts.load(Ordering::SeqCst) {
            prompts.push(prompt(&format!("test_z_dynamic_prompt_{n}"), &[])?);
        }
        Ok(ListPromptsResult::with_all_items(prompts))
    }

    async fn get_prompt(
        &self,
        params: GetPromptRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        let argument = |name: &str| {
            let value =
                params.arguments.as_ref().and_then(|arguments| arguments.get(name)?.as_str());
            value.unwrap_or_default().to_owned()
        };
        match params.name.as_str() {
            "test_simple_prompt" => messages(&[text("This is a simple prompt for testing.")]),
            "test_prompt_with_arguments" => {
                let (one, two) = (argument("arg1"), argument("arg2"));
                messages(&[text(&format!("Prompt with arguments: arg1='{one}', arg2='{two}'"))])
            }
            "test_prompt_with_embedded_resource" => {
                let words = "Embedded resource content for testing.";
                let resource = embedded(&argument("resourceUri"), "text/plain", words);
                messages(&[resource, text("Please process the embedded resource above.")])
            }
            "test_prompt_with_image" => {
                messages(&[image(), text("Please analyze the image above.")])
            }
            "test_input_required_result_prompt" => match params.input_responses {
                Some(answers) if !answers.is_empty() => {
                    messages(&[text(&format!("Answered: {}", json!(answers)))])
                }
                _ => {
                    let fields = json!({ "context": { "type": "string" } });
                    let question =
                        form_question("What context should be used?", fields, &["context"]);
                    let requests = typed(json!({ "user_context": question }))?;
                    Ok(InputRequiredResult::from_input_requests(requests).into())
                }
            },
            name => Err(ErrorData::invalid_params(format!("there is no prompt {name}"), None)),
        }
    }

    async fn complete(
        &self,
        params: CompleteRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CompleteResult, ErrorData> {
        let words = ["paris", "park", "party", "test", "tester"];
        let fitting = words.into_iter().filter(|word| word.starts_with(&params.argument.value));
        let info = CompletionInfo::new(fitting.map(str::to_owned).collect());
        Ok(CompleteResult::new(info.map_err(|error| ErrorData::internal_error(error, None))?))
    }

    fn accepted_subscription_filter(
        &self,
        params: &SubscriptionFilter,
    ) -> Option<SubscriptionFilter> {
        Some(params.clone())
    }

    async fn listen(&self, subscription: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.changes.subscribe();
        loop {
            let changed = tokio::select! {
                () = subscription.cancelled() => return Ok(()),
                changed = changes.recv() => changed,
            };
            let notification: ServerNotification = match changed {
                Ok(Changed::Prompts) => PromptListChangedNotification::default().into(),
                _ => ToolListChangedNotification::default().into(),
            };
            let _ = subscription.sink().send(notification).await;
        }
    }
}
