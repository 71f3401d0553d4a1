//! Validates the answers to a tool's elicitation against the schema that the tool supplied, for
//! every transport.

use serde_json::{Map, Value};
use toolcrib::domain::call::Call;
use toolcrib::domain::fault::{Code, Error};
use toolcrib::schema::{self, CompileBudget, FORM_BYTES, Schema};

/// Refuses answers that do not match the schemas of a call's unanswered questions.
pub(super) async fn check_answers(call: &Call, answers: &Map<String, Value>) -> Result<(), Error> {
    let open = call.elicitation.as_ref().map(|elicitation| &elicitation.unanswered);
    for (key, question) in open.into_iter().flatten() {
        if let Some(answer) = answers.get(key) {
            check_answer(&call.project, key, question, answer).await?;
        }
    }
    Ok(())
}

/// Refuses an accepted answer that does not match the `requestedSchema` of its question. Fields
/// that have a default may be omitted.
async fn check_answer(
    project: &str,
    key: &str,
    question: &Value,
    answer: &Value,
) -> Result<(), Error> {
    let schema_json = question.pointer("/params/requestedSchema");
    let Some(schema_json) = schema_json.filter(|_| answer["action"] == "accept") else {
        return Ok(());
    };
    let (owner, form) = (project.to_owned(), schema_json.clone());
    let compiling = schema::compile_off_thread(project, move || {
        Schema::compile_within(&owner, &form, &mut CompileBudget::new(FORM_BYTES))
    });
    // A schema that does not compile, or is too costly, is no reason to refuse an answer.
    let Ok(Ok(schema)) = compiling.await else { return Ok(()) };
    let mut content = answer.get("content").cloned().unwrap_or_else(|| Value::Object(Map::new()));
    let fields = schema_json.get("properties").and_then(Value::as_object);
    if let Value::Object(content) = &mut content {
        for (name, field) in fields.into_iter().flatten() {
            if let Some(default) = field.get("default") {
                content.entry(name.clone()).or_insert_with(|| default.clone());
            }
        }
    }
    match schema.problems(&content).first() {
        None => Ok(()),
        Some(problem) => {
            let message = format!("the answer to {key} does not fit: {}", problem.message);
            Err(Error::refused(Code::ValidationError, message))
        }
    }
}
