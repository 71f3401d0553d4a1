//! Maximum time a request waits for an outcome: `wait_ms`, `wait`, or RFC 7240's `Prefer: wait`.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use serde::Deserialize;
use toolcrib_protocol::duration;
use utoipa::IntoParams;

use super::HttpState;
use crate::http::extract::{QueryParams, invalid_parameter};
use crate::http::problem::ApiError;
use crate::http::stream_limiter::{LongPollAdmission, StreamPermit};

const PREFER: &str = "prefer";

/// The wait parameter in all its spellings.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WaitParam {
    /// Wait up to this long for the outcome, then return the current state. The header `Prefer:
    /// wait=30` means the same, in seconds.
    wait_ms: Option<u64>,
    /// The same with a unit: `500ms`, `30s`, `2m`.
    wait: Option<String>,
    #[serde(skip)]
    #[param(ignore)]
    preferred_ms: Option<u64>,
    /// Held while a GET request waits.
    #[serde(skip)]
    #[param(ignore)]
    _permit: Option<StreamPermit>,
}

impl WaitParam {
    /// Resolves the wait. The query wins over the body, and the body over the `Prefer` header,
    /// which is only a preference.
    pub(super) fn resolve_ms(&self, in_body: Option<u64>) -> Option<u64> {
        self.wait_ms.or(in_body).or(self.preferred_ms)
    }
}

impl FromRequestParts<HttpState> for WaitParam {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &HttpState) -> Result<Self, ApiError> {
        let QueryParams(mut params) = QueryParams::<Self>::from_request_parts(parts, state).await?;
        if let (None, Some(text)) = (params.wait_ms, &params.wait) {
            let time = duration::parse_duration(text)
                .map_err(|reason| invalid_parameter("wait", format!("wait: {reason}")))?;
            params.wait_ms = u64::try_from(time.as_millis()).ok();
        }
        params.preferred_ms = prefer_wait_ms(&parts.headers);
        params._permit = admit_long_poll(parts, params.resolve_ms(None).unwrap_or_default())?;
        Ok(params)
    }
}

/// Returns the permit of a GET request that waits this long, which counts as an open stream. Other
/// methods start work; the limit on open calls applies to them.
pub(super) fn admit_long_poll(
    parts: &Parts,
    wait_ms: u64,
) -> Result<Option<StreamPermit>, ApiError> {
    let admission = parts.extensions.get::<LongPollAdmission>().filter(|_| wait_ms > 0);
    Ok(admission.map(LongPollAdmission::admit).transpose()?)
}

/// Parses the `Prefer` header. A preference that cannot be parsed is ignored, as the RFC requires.
fn prefer_wait_ms(headers: &HeaderMap) -> Option<u64> {
    let values = headers.get_all(PREFER).iter().filter_map(|value| value.to_str().ok());
    let mut all = values.flat_map(|value| value.split(','));
    all.find_map(|preference| {
        let (name, value) = preference.split(';').next()?.split_once('=')?;
        let seconds: u64 = value.trim().trim_matches('"').parse().ok()?;
        name.trim().eq_ignore_ascii_case("wait").then(|| seconds.saturating_mul(1_000))
    })
}

/// Sets `Retry-After`, a hint for callers that poll without waiting.
pub(super) fn set_retry_after(answer: &mut Response) {
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn prefer_wait_is_parsed_in_seconds_among_other_preferences() {
        for (header, expected) in [
            ("wait=30", Some(30_000)),
            ("respond-async, wait=10", Some(10_000)),
            ("Wait = \"5\"; foo=bar", Some(5_000)),
            ("respond-async", None),
            ("wait", None),
            ("wait=soon", None),
            ("wait=-1", None),
            ("waiting=4", None),
            ("wait=18446744073709551615", Some(u64::MAX)),
        ] {
            let headers = HeaderMap::from_iter([(
                header::HeaderName::from_static(PREFER),
                header.parse().unwrap(),
            )]);
            assert_eq!(prefer_wait_ms(&headers), expected, "{header}");
        }
        assert_eq!(prefer_wait_ms(&HeaderMap::new()), None);
    }
}
