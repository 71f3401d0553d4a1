//! Extractors for requests: the authenticated caller, the body, headers, ids in the path, and query
//! parameters. A request that cannot be parsed gets an error that names the offending field or
//! position.

mod unknown_fields;

use std::borrow::Cow;

use axum::RequestPartsExt;
use axum::body::Bytes;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use futures::StreamExt;
use percent_encoding::percent_decode_str;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::json;
use toolcrib::domain::fault::{Code, Error, Fault};
use toolcrib::domain::json::{self, JsonError};
use toolcrib::domain::trace::TraceParent;
pub(super) use toolcrib::schema::{UnknownField, refuse_unknown_fields};
use toolcrib::{CallId, Caller};

use super::HttpState;
use crate::auth::{self, RequestCredentials};
use crate::http::problem::ApiError;

/// Maximum time to receive a body. A caller that sends one byte at a time must not hold a
/// connection forever.
const BODY_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

/// The authenticated caller.
pub(super) struct AuthenticatedCaller(pub(super) Caller);

impl FromRequestParts<HttpState> for AuthenticatedCaller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, ApiError> {
        Ok(Self(RequestCredentials::from_request_parts(parts, state).await?.caller().clone()))
    }
}

impl FromRequestParts<HttpState> for RequestCredentials {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, ApiError> {
        if let Some(credentials) = parts.extensions.get::<Self>() {
            return Ok(credentials.clone());
        }
        let (engine, origins) = (&state.engine, &state.settings.origins);
        let credentials =
            auth::authenticate_request(engine, origins, &parts.headers, &parts.extensions)?;
        parts.extensions.insert(credentials.clone());
        Ok(credentials)
    }
}

/// A JSON body within `max_body_bytes`. Unknown fields are ignored; an empty body is `{}`.
pub(super) struct JsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<HttpState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.settings.max_body_bytes).await?;
        // An empty body counts as an empty object, so that every field can take its default.
        let bytes = if bytes.is_empty() { Bytes::from_static(b"{}") } else { bytes };
        Ok(Self(parse_json(&bytes)?))
    }
}

/// A JSON body whose unknown fields are refused with 422. The error names each unknown field, its
/// position and the known field that it resembles.
pub(super) struct StrictJsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<HttpState> for StrictJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.settings.max_body_bytes).await?;
        let bytes = if bytes.is_empty() { Bytes::from_static(b"{}") } else { bytes };
        Ok(Self(parse_strict_json(&bytes)?))
    }
}

/// A JSON body that carries a result, which may be larger than other bodies.
pub(super) struct ResultJsonBody<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<HttpState> for ResultJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, ApiError> {
        let (limit, drain_limit) = (state.max_result_body_bytes(), state.max_report_bytes());
        let bytes = read_body_draining(request, limit, drain_limit).await?;
        Ok(Self(parse_json(&bytes)?))
    }
}

/// Parses a JSON document as `T`; an error says where the document does not fit.
pub(super) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    json::check(bytes).map_err(unreadable_body)?;
    parse_checked_json(bytes)
}

/// Parses a JSON document of any shape, for callers that validate it themselves.
pub(super) fn parse_json_value(bytes: &[u8]) -> Result<serde_json::Value, ApiError> {
    json::check(bytes).map_err(unreadable_body)?;
    Ok(serde_json::from_slice(bytes).map_err(|error| unreadable_body(error.into()))?)
}

/// Prepares a provider's message for [`parse_checked_json`]: replaces lone surrogates, which remain
/// where a text was cut within an emoji.
pub(super) fn replace_lone_surrogates(bytes: &[u8]) -> Result<Cow<'_, [u8]>, ApiError> {
    Ok(json::replace_lone_surrogates(bytes).map_err(unreadable_body)?)
}

/// Parses as [`parse_json`] does, and refuses fields that `T` does not know.
pub(super) fn parse_strict_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    json::check(bytes).map_err(unreadable_body)?;
    require_object(bytes)?;
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let (value, unknown) = unknown_fields::parse(&mut deserializer, "");
    let value = value.and_then(|value| deserializer.end().map(|()| value));
    // Unknown fields are refused before an error in the value, so that the error names a misspelt
    // field and does not report the required field as missing.
    if value.as_ref().err().is_none_or(serde_json::Error::is_data) {
        refuse_unknown_fields(&unknown)?;
    }
    Ok(value.map_err(|error| unreadable_body(error.into()))?)
}

/// Finds the fields that `T` does not know in a JSON document.
pub(super) fn find_unknown_fields_in_json<T: DeserializeOwned>(bytes: &[u8]) -> Vec<UnknownField> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let (_, unknown): (serde_json::Result<T>, _) = unknown_fields::parse(&mut deserializer, "");
    unknown
}

/// Finds the fields that `T` does not know in a value of a body, which is at `pointer`.
pub(super) fn find_unknown_fields<T: DeserializeOwned>(
    value: &serde_json::Value,
    pointer: &str,
) -> Vec<UnknownField> {
    let (_, unknown) = unknown_fields::parse::<T, _>(value, pointer);
    unknown
}

/// Parses as [`parse_json`] does, from bytes that were checked before.
pub(super) fn parse_checked_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    require_object(bytes)?;
    Ok(serde_json::from_slice(bytes).map_err(|error| unreadable_body(error.into()))?)
}

/// Accepts only an object: serde would read an array by position, which is never intended.
fn require_object(bytes: &[u8]) -> Result<(), ApiError> {
    let begin = bytes.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
    if bytes.get(begin) != Some(&b'{') {
        serde_json::from_slice::<IgnoredAny>(bytes)
            .map_err(|error| unreadable_body(error.into()))?;
        let reason = "the body must be a JSON object; another value starts";
        let message = JsonError::at_offset(bytes, begin, reason).to_string();
        return Err(Error::refused(Code::BadRequest, message).into());
    }
    Ok(())
}

fn unreadable_body(error: JsonError) -> Error {
    Error::refused(Code::BadRequest, format!("the body cannot be read: {error}"))
}

/// Reads the whole body. Refuses with 413 before more than `limit` bytes are buffered.
pub(super) async fn read_body(request: Request, limit: usize) -> Result<Bytes, ApiError> {
    read_body_draining(request, limit, limit).await
}

/// Reads the whole body as [`read_body`] does, but drains an oversized body as [`read_body_prefix`]
/// does before it refuses.
async fn read_body_draining(
    request: Request,
    limit: usize,
    drain_limit: usize,
) -> Result<Bytes, ApiError> {
    let is_oversized = content_length(&request).is_some_and(|length| length > drain_limit);
    let body = if is_oversized {
        None
    } else {
        Some(read_body_prefix(request, limit, drain_limit).await?)
    };
    body.filter(|body| body.len() <= limit).ok_or_else(|| {
        let message = format!("the body is over the limit of {limit} bytes");
        Error::refused(Code::PayloadTooLarge, message).into()
    })
}

/// Returns the declared length of the body, if any.
fn content_length(request: &Request) -> Option<usize> {
    request.headers().get(axum::http::header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Reads the whole body, or only a prefix longer than `limit` if the body is over the limit.
/// Discards the rest, up to `drain_limit` bytes in all, because a caller that is still sending does
/// not read the response.
pub(super) async fn read_body_prefix(
    request: Request,
    limit: usize,
    drain_limit: usize,
) -> Result<Bytes, ApiError> {
    let mut body = Vec::with_capacity(content_length(&request).unwrap_or(0).min(limit));
    let (mut chunks, mut received) = (request.into_body().into_data_stream(), 0);
    let until = tokio::time::Instant::now() + BODY_TIMEOUT;
    let slow = |_| {
        let seconds = BODY_TIMEOUT.as_secs();
        Error::refused(Code::BadRequest, format!("the body did not arrive within {seconds} s"))
    };
    while let Some(chunk) = tokio::time::timeout_at(until, chunks.next()).await.map_err(slow)? {
        let chunk = chunk.map_err(|_| Error::refused(Code::BadRequest, "the body ended early"))?;
        received += chunk.len();
        if body.len() <= limit {
            body.extend_from_slice(&chunk);
        }
        if received > drain_limit {
            break;
        }
    }
    Ok(body.into())
}

/// The headers of a request that concern the call it makes. Picks single headers, because
/// extracting the whole map would copy it for every call.
pub(super) struct CallHeaders {
    idempotency_key: Option<HeaderValue>,
    pub(super) traceparent: Option<String>,
}

impl FromRequestParts<HttpState> for CallHeaders {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &HttpState) -> Result<Self, ApiError> {
        Ok(Self {
            idempotency_key: parts.headers.get("idempotency-key").cloned(),
            traceparent: traceparent(&parts.headers).map(|trace| trace.to_string()),
        })
    }
}

impl CallHeaders {
    /// Returns the key from the header or the body; if both are given they must be equal.
    pub(super) fn idempotency_key(&self, body: Option<String>) -> Result<Option<String>, ApiError> {
        let Some(header) = &self.idempotency_key else { return Ok(body) };
        let invalid = |message: &str| Error::refused(Code::BadRequest, message);
        let key = header.to_str().map_err(|_| invalid("Idempotency-Key must be visible ASCII"))?;
        if key.is_empty() || key.len() > 255 {
            return Err(invalid("Idempotency-Key must be 1 to 255 characters").into());
        }
        if body.as_ref().is_some_and(|body| body != key) {
            let message = "Idempotency-Key and idempotency_key are different";
            return Err(invalid(message).into());
        }
        Ok(Some(key.to_owned()))
    }
}

pub(super) const TRACEPARENT: &str = "traceparent";

/// Returns the W3C trace context of a request. As W3C requires, a header that cannot be parsed
/// counts as absent, and so does one that occurs twice. `tracestate` is not stored: it belongs to
/// the tracing systems along the way, and calls outlive requests.
pub(super) fn traceparent(headers: &HeaderMap) -> Option<TraceParent> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (first, second) = (values.next()?, values.next());
    let parsed = first.to_str().ok()?.trim().parse().ok()?;
    second.is_none().then_some(parsed)
}

/// A call id from the path. Text that is not a call id is reported as an unknown call.
pub(super) struct CallPath(pub(super) CallId);

impl FromRequestParts<HttpState> for CallPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &HttpState) -> Result<Self, ApiError> {
        let path: Result<Path<String>, PathRejection> = parts.extract().await;
        let text = path.map(|Path(text)| text).unwrap_or_default();
        let excerpt: String = text.chars().take(80).collect();
        let unknown = |_| Error::refused(Code::NotFound, format!("there is no call \"{excerpt}\""));
        Ok(Self(text.parse().map_err(unknown)?))
    }
}

/// A name from the path.
pub(super) struct NamePath(pub(super) String);

impl FromRequestParts<HttpState> for NamePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &HttpState) -> Result<Self, ApiError> {
        let path: Result<Path<String>, PathRejection> = parts.extract().await;
        let unreadable = |_| Error::refused(Code::BadRequest, "the path is not UTF-8");
        Ok(Self(path.map_err(unreadable)?.0))
    }
}

/// A kind and a name from the path.
#[derive(serde::Deserialize)]
pub(super) struct KindAndNamePath {
    pub(super) kind: String,
    pub(super) name: String,
}

impl FromRequestParts<HttpState> for KindAndNamePath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &HttpState) -> Result<Self, ApiError> {
        let path: Result<Path<Self>, PathRejection> = parts.extract().await;
        let unreadable = |_| Error::refused(Code::BadRequest, "the path is not UTF-8");
        Ok(path.map_err(unreadable)?.0)
    }
}

/// Query parameters. An invalid value is refused as problem details that name the parameter.
pub(super) struct QueryParams<T>(pub(super) T);

impl<T: DeserializeOwned + 'static> FromRequestParts<HttpState> for QueryParams<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &HttpState) -> Result<Self, ApiError> {
        let query = percent_decode_str(parts.uri.query().unwrap_or_default());
        if query.decode_utf8().is_err() {
            return Err(Error::refused(Code::BadRequest, "the query is not UTF-8").into());
        }
        let error = match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(params)) => return Ok(Self(params)),
            Err(error) => error,
        };
        let Some((field, reason)) = invalid_field(&error) else {
            let message = format!("a query parameter: {}", error.body_text());
            return Err(Error::refused(Code::BadRequest, message).into());
        };
        let all = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
        let mut all = all.map(|Query(all)| all).unwrap_or_default().into_iter();
        let value = all.find(|(name, _)| *name == field).map(|(_, value)| value);
        let value: String = value.unwrap_or_default().chars().take(40).collect();
        let message = format!("{field} cannot be \"{value}\": {reason}");
        Err(invalid_parameter(&field, message).into())
    }
}

/// Builds the error for a query parameter with an invalid value; the detail names the parameter.
pub(super) fn invalid_parameter(name: &str, message: impl Into<String>) -> Error {
    let fault = Fault::new(Code::ValidationError, message).without_side_effect();
    fault.with_detail(json!({ "field": name })).into()
}

/// Returns the field with an invalid value and the reason, or `None` if the error is not about a
/// single value.
fn invalid_field(error: &QueryRejection) -> Option<(String, String)> {
    type Placed = serde_path_to_error::Error<serde::de::value::Error>;
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(placed) = error.downcast_ref::<Placed>() {
            let field = placed.path().to_string();
            return (field != ".").then(|| (field, placed.inner().to_string()));
        }
        cause = error.source();
    }
    None
}
