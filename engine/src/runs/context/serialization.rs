//! Serialization of a saved context. The engine's own types define no JSON form.

pub(super) mod status {
    //! Serializes a status by its name.

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::domain::call::Status;

    pub(crate) fn serialize<S: Serializer>(status: &Status, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(status.as_str())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Status, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(|()| D::Error::custom(format!("\"{text}\" is not a status")))
    }
}

pub(super) mod outcome {
    //! Serializes an outcome as `{ok, data}` or
    //! `{ok, error: {code, message, detail, retryable, happened}}`.

    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use serde_json::Value;

    use crate::domain::fault::{Code, Fault, SideEffect};
    use crate::domain::json::Json;

    #[derive(Serialize, Deserialize)]
    struct SavedOutcome {
        ok: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        data: Option<Json>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<SavedFault>,
    }

    #[derive(Serialize, Deserialize)]
    struct SavedFault {
        code: String,
        message: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        detail: Option<Value>,
        retryable: bool,
        #[serde(default = "default_side_effect_possible")]
        happened: bool,
    }

    fn default_side_effect_possible() -> bool {
        true
    }

    pub(crate) fn serialize<S: Serializer>(
        outcome: &Result<Json, Fault>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        let error = outcome.as_ref().err().map(|fault| SavedFault {
            code: fault.code.as_str().to_owned(),
            message: fault.message.clone(),
            detail: fault.detail.clone(),
            retryable: fault.retryable,
            happened: fault.side_effect == SideEffect::Possible,
        });
        let data = outcome.as_ref().ok().cloned();
        SavedOutcome { ok: outcome.is_ok(), data, error }.serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Result<Json, Fault>, D::Error> {
        let saved = SavedOutcome::deserialize(from)?;
        if saved.ok {
            return Ok(Ok(saved.data.unwrap_or_else(Json::null)));
        }
        let Some(error) = saved.error else {
            return Ok(Err(Fault::runtime("the tool failed and gave no reason")));
        };
        let code = Code::parse(&error.code).unwrap_or(Code::Internal);
        let side_effect = if error.happened { SideEffect::Possible } else { SideEffect::None };
        Ok(Err(Fault {
            code,
            message: error.message,
            detail: error.detail,
            retryable: error.retryable,
            side_effect,
            raw: None,
        }))
    }
}

pub(crate) mod definitions {
    //! Serializes tool definitions as their owners wrote them.

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::domain::json::Json;
    use crate::domain::retry::ExecutionPolicyPatch;
    use crate::domain::tool::{Effect, Executor, Fallback, Risk, ToolDefinition};

    #[derive(Serialize, Deserialize)]
    struct SavedDefinition {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        project: Option<String>,
        name: String,
        description: String,
        executor: Executor,
        schema: Json,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        output_schema: Option<Json>,
        timeout_ms: u64,
        #[serde(default, rename = "async")]
        background: bool,
        #[serde(default)]
        effect: Effect,
        #[serde(default)]
        risk: Risk,
        #[serde(default)]
        policy: ExecutionPolicyPatch,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        fallback: Vec<Fallback>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metadata: Option<Json>,
    }

    pub(crate) fn serialize<S: Serializer>(
        all: &[ToolDefinition],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(all.iter().map(|tool| SavedDefinition {
            project: tool.project.clone(),
            name: tool.name.clone(),
            description: tool.description.clone(),
            executor: tool.executor,
            schema: tool.input_schema.clone(),
            output_schema: tool.output_schema.clone(),
            timeout_ms: tool.timeout_ms,
            background: tool.background,
            effect: tool.effect,
            risk: tool.risk,
            policy: tool.policy.clone(),
            fallback: tool.fallback.clone(),
            metadata: tool.metadata.clone(),
        }))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<ToolDefinition>, D::Error> {
        let saved = Vec::<SavedDefinition>::deserialize(from)?;
        let read = saved.into_iter().map(|tool| ToolDefinition {
            project: tool.project,
            name: tool.name,
            description: tool.description,
            executor: tool.executor,
            input_schema: tool.schema,
            output_schema: tool.output_schema,
            timeout_ms: tool.timeout_ms,
            background: tool.background,
            effect: tool.effect,
            risk: tool.risk,
            policy: tool.policy,
            fallback: tool.fallback,
            metadata: tool.metadata,
            binding: None,
        });
        Ok(read.collect())
    }
}
