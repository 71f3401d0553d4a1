//! Errors of requests to an upstream over HTTP: whether a request was sent, and whether the
//! upstream requires another access token.

use axum::http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue, WWW_AUTHENTICATE};
use reqwest::{Response, StatusCode};
use rmcp::ServiceError;
use rmcp::transport::streamable_http_client::StreamableHttpError;
use toolcrib_protocol::secrets::redaction::SecretRedactor;

use crate::mcp::oauth::AuthChallenge;

/// Error of a request over HTTP.
pub(in crate::mcp) type HttpTransportError = StreamableHttpError<reqwest::Error>;

/// Returns `true` if a request cannot have reached the upstream.
pub(in crate::mcp) fn was_never_sent(error: &ServiceError) -> bool {
    matches!(http_failure(error), Some(HttpTransportError::Client(error)) if error.is_connect())
}

/// Returns the HTTP error that caused a failed request, if there is one.
pub(in crate::mcp) fn http_failure(error: &ServiceError) -> Option<&HttpTransportError> {
    let ServiceError::TransportSend(error) = error else { return None };
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.error.as_ref());
    while let Some(inner) = cause {
        if let Some(failed) = inner.downcast_ref::<HttpTransportError>() {
            return Some(failed);
        }
        cause = inner.source();
    }
    None
}

/// Returns the innermost cause of an error, which does not contain the URL.
pub(super) fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Returns the credentials of a request, for redaction: its token, and its headers with and without
/// the word before the value (`Bearer …`).
pub(super) fn request_secrets<'a>(
    token: Option<&str>,
    headers: impl IntoIterator<Item = (&'a HeaderName, &'a HeaderValue)>,
) -> SecretRedactor {
    let mut secrets = SecretRedactor::default();
    secrets.add(token.unwrap_or_default());
    for (name, value) in headers {
        let is_protocol =
            [ACCEPT, CONTENT_TYPE].contains(name) || name.as_str().starts_with("mcp-");
        let Some(value) = value.to_str().ok().filter(|_| !is_protocol) else { continue };
        secrets.add(value);
        secrets.add(value.split_once(' ').map_or("", |(_, bare)| bare));
    }
    secrets
}

/// Redacts the credentials of a request from an error: some servers return what they received, and
/// `rmcp` logs errors. Redacted here, they reach no log, no problem text and no call.
pub(super) fn redact_error(
    error: HttpTransportError,
    secrets: &SecretRedactor,
) -> HttpTransportError {
    match error {
        StreamableHttpError::UnexpectedServerResponse(text) => {
            StreamableHttpError::UnexpectedServerResponse(secrets.redact(&text).into())
        }
        StreamableHttpError::UnexpectedContentType(Some(text)) => {
            StreamableHttpError::UnexpectedContentType(Some(secrets.redact(&text)))
        }
        StreamableHttpError::AuthRequired(mut refusal) => {
            refusal.www_authenticate_header = secrets.redact(&refusal.www_authenticate_header);
            StreamableHttpError::AuthRequired(refusal)
        }
        StreamableHttpError::InsufficientScope(mut refusal) => {
            refusal.www_authenticate_header = secrets.redact(&refusal.www_authenticate_header);
            StreamableHttpError::InsufficientScope(refusal)
        }
        other => other,
    }
}

/// Returns the authentication challenge in an error, if it is one.
pub(super) fn challenge_from_error(error: &HttpTransportError) -> Option<AuthChallenge> {
    match error {
        StreamableHttpError::AuthRequired(refusal) => Some(AuthChallenge {
            forbidden: false,
            header: Some(refusal.www_authenticate_header.clone()),
        }),
        StreamableHttpError::InsufficientScope(refusal) => Some(AuthChallenge {
            forbidden: true,
            header: Some(refusal.www_authenticate_header.clone()),
        }),
        StreamableHttpError::UnexpectedServerResponse(refusal)
            if refusal.starts_with("HTTP 401") =>
        {
            Some(AuthChallenge { forbidden: false, header: None })
        }
        _ => None,
    }
}

/// Returns the authentication challenge in a response that `rmcp` has not read.
pub(super) fn challenge_from_response(answer: &Response) -> Option<AuthChallenge> {
    let status = answer.status();
    let header = answer.headers().get(WWW_AUTHENTICATE);
    let header = header.and_then(|value| value.to_str().ok()).map(str::to_owned);
    match status {
        StatusCode::UNAUTHORIZED => Some(AuthChallenge { forbidden: false, header }),
        StatusCode::FORBIDDEN if header.is_some() => {
            Some(AuthChallenge { forbidden: true, header })
        }
        _ => None,
    }
}
