//! Documentation pages: `/openapi.json`, the interactive page at `/docs`, and the error codes.
//! [`examples`] has the examples of requests, [`security`] the credentials that each operation
//! needs.

pub(super) mod examples;
pub(super) mod security;
use std::collections::HashMap;
use std::io::Read;
use std::sync::LazyLock;

use axum::Router;
use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use flate2::bufread::GzDecoder;
use toolcrib::domain::fault::Code;
use utoipa::openapi::path::Operation;
use utoipa::openapi::{Content, ContentBuilder, OpenApi, Ref, RefOr, ResponseBuilder};
use utoipa_swagger_ui::{Config, SwaggerUi};

/// Limit of one compressed file of the interactive page; the largest has 0.4 MB.
const MAX_COMPRESSED_FILE_BYTES: usize = 8 << 20;

/// Makes operation ids unique. They default to function names, which repeat across files, and
/// client generators need unique ids.
pub(super) fn deduplicate_operation_ids(mut document: OpenApi) -> OpenApi {
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (_, _, operation) in operations(&mut document) {
        *seen.entry(operation.operation_id.clone().unwrap_or_default()).or_default() += 1;
    }
    for (path, method, operation) in operations(&mut document) {
        let id = operation.operation_id.get_or_insert_default();
        if seen.get(id).is_some_and(|count| *count > 1) {
            let words = path.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
            *id = format!("{method}_{}", words.join("_"));
        }
    }
    document
}

/// Paths that answer without credentials.
const PUBLIC_PATHS: [&str; 4] = ["/healthz", "/livez", "/readyz", "/metrics"];

/// Documents the refusals that every operation shares, and the media type of all of them. An
/// operation declares only those that are its own.
pub(super) fn add_common_refusals(mut document: OpenApi) -> OpenApi {
    for (path, _, operation) in operations(&mut document) {
        let is_model_api = operation.tags.iter().flatten().any(|tag| tag == "models");
        let (schema, media_type) = match is_model_api {
            true => ("RefusalBody", "application/json"),
            false => ("Problem", "application/problem+json"),
        };
        let has_body = operation.request_body.is_some();
        let responses = &mut operation.responses.responses;
        if !PUBLIC_PATHS.contains(&path.as_str()) && !path.starts_with("/oauth/") {
            let codes = [
                Code::BadRequest,
                Code::Unauthenticated,
                Code::PermissionDenied,
                Code::ValidationError,
                Code::Internal,
                Code::Overloaded,
            ];
            let too_large = has_body.then_some(Code::PayloadTooLarge);
            for code in codes.into_iter().chain(too_large) {
                let schema = Ref::from_schema_name(schema);
                let content = ContentBuilder::new().schema(Some(schema)).build();
                let response = ResponseBuilder::new().description(code.title());
                let response = RefOr::T(response.content(media_type, content).build());
                responses.entry(code.http_status().to_string()).or_insert(response);
            }
        }
        for response in responses.values_mut() {
            let RefOr::T(response) = response else { continue };
            let is_problem = |content: &RefOr<Content>| match content {
                RefOr::T(Content { schema: Some(RefOr::Ref(schema)), .. }) => {
                    schema.ref_location.ends_with("/Problem")
                }
                _ => false,
            };
            if response.content.get("application/json").is_some_and(is_problem)
                && let Some(content) = response.content.shift_remove("application/json")
            {
                response.content.insert("application/problem+json".to_owned(), content);
            }
        }
    }
    document
}

fn operations(
    document: &mut OpenApi,
) -> impl Iterator<Item = (&String, &'static str, &mut Operation)> {
    document.paths.paths.iter_mut().flat_map(|(path, item)| {
        let all = [
            ("get", &mut item.get),
            ("put", &mut item.put),
            ("post", &mut item.post),
            ("delete", &mut item.delete),
            ("patch", &mut item.patch),
        ];
        all.into_iter().filter_map(move |(method, op)| Some((path, method, op.as_mut()?)))
    })
}

/// Builds the router of the documentation pages. All of them are part of the binary.
pub(super) fn docs_router() -> Router {
    let config = Config::from("/openapi.json").try_it_out_enabled(true);
    Router::new()
        .route("/docs/errors", get(serve_errors_page))
        .route("/openapi.json", get(serve_openapi))
        .merge(Router::from(SwaggerUi::new("/docs").config(config)).layer(from_fn(expand_gzip)))
}

/// Expands a compressed file for a client that does not accept gzip. The binary holds the files of
/// the interactive page only in compressed form, which keeps it 3 MB smaller.
async fn expand_gzip(request: Request, next: Next) -> Response {
    let accepts_gzip = accepted_values(request.headers(), header::ACCEPT_ENCODING)
        .any(|coding| coding.eq_ignore_ascii_case("gzip"));
    let mut response = next.run(request).await;
    if !response.headers().contains_key(header::CONTENT_ENCODING) {
        return response;
    }
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if accepts_gzip {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let mut expanded = Vec::new();
    let read = match to_bytes(body, MAX_COMPRESSED_FILE_BYTES).await {
        Ok(content) => GzDecoder::new(&content[..]).read_to_end(&mut expanded),
        Err(error) => Err(std::io::Error::other(error)),
    };
    if let Err(error) = read {
        tracing::error!(%error, "a file of the page /docs cannot be expanded");
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    parts.headers.remove(header::CONTENT_ENCODING);
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, expanded.into())
}

/// Returns the values of a list header, such as `Accept`, without their parameters.
fn accepted_values(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    lines
        .flat_map(|line| line.split(','))
        .map(|value| value.split(';').next().unwrap_or_default().trim())
}

/// Serializes the document on the first request, because it is large and rarely requested.
async fn serve_openapi() -> impl IntoResponse {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| super::openapi_json().into());
    ([(header::CONTENT_TYPE, "application/json")], TEXT.clone())
}

/// Serves HTML to a browser and Markdown to every other client.
async fn serve_errors_page(headers: HeaderMap) -> impl IntoResponse {
    let wants_html = accepted_values(&headers, header::ACCEPT)
        .any(|media_type| media_type.eq_ignore_ascii_case("text/html"));
    let (content_type, page) = if wants_html {
        ("text/html; charset=utf-8", errors_html())
    } else {
        ("text/markdown; charset=utf-8", errors_page())
    };
    ([(header::CONTENT_TYPE, content_type), (header::VARY, "accept")], page)
}

/// Renders the table of error codes as Markdown; also committed as docs/errors.md.
pub fn errors_page() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         With this page you can look up an error code and find its cause and remedy.\n\n\
         A refused request gets a response of the type `application/problem+json`. Its member \
         `error` is the same object that a failed call has: \
         `{code, message, detail, retryable}`.\n\n\
         This page is generated from the table in `engine/src/domain/fault.rs`; do not edit it.\n\n\
         | Code | HTTP | UTP code | Retryable | Meaning | Remedy |\n\
         |---|---|---|---|---|---|\n",
    );
    for code in Code::all() {
        let retry = if code.is_retryable() { "yes" } else { "no" };
        page.push_str(&format!(
            "| <a id=\"{}\"></a>`{}` | {} | `{}` | {retry} | {} | {} |\n",
            code.as_str().to_lowercase(),
            code.as_str(),
            code.http_status(),
            code.utp_code(),
            code.title(),
            code.help()
        ));
    }
    page.push_str(WAITING_CALL_CAUSES);
    page
}

/// The end of the errors page: the causes for which a waiting call ends with
/// `PERMISSION_DENIED`.
const WAITING_CALL_CAUSES: &str = "\n\
    A call that was accepted and waits (queued, for a retry, an approval, an answer, a predecessor \
    or a client) ends with `PERMISSION_DENIED` (`OUTCOME_UNKNOWN` if its tool is irreversible and \
    had begun when it asked) for one of six causes:\n\n\
    - an access rule denies the call, after a change of the rules or for a fallback: `detail` has \
    `rule_id` and `reason`\n\
    - the key of its caller was revoked or has expired: the message names the key\n\
    - the session token of its caller was revoked: the message names the token\n\
    - a person rejected its approval: the message has the reason\n\
    - its approval expired without a decision: the message begins with \"approval expired\"\n\
    - a kill switch covers its tool, agent, source or project: the message names the switch and \
    its reason\n";

/// Styles of the errors page. They are part of it, so that it needs no other request.
const ERRORS_STYLE: &str = "\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; }
nav a { display: inline-block; margin-right: 1rem; }
section { border-top: 1px solid #8884; padding: 0 1rem; }
section:target { background: #fd03; border-left: 4px solid #fb0; }
h2 { font-size: 1.1rem; }
h2 a { color: inherit; text-decoration: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1rem; }
dd { margin: 0; }";

/// Converts the Markdown code spans of a text to HTML.
fn code_spans(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts
        .map(|(n, part)| if n % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() })
        .collect()
}

/// Renders the table of error codes as HTML, with a section per code that the `type` of a problem
/// links to.
fn errors_html() -> String {
    let mut links = String::new();
    let mut sections = String::new();
    for code in Code::all() {
        let (name, anchor) = (code.as_str(), code.as_str().to_lowercase());
        links.push_str(&format!("<a href=\"#{anchor}\"><code>{name}</code></a>\n"));
        let retry = if code.is_retryable() { "yes" } else { "no" };
        sections.push_str(&format!(
            "<section id=\"{anchor}\">\n\
             <h2><a href=\"#{anchor}\"><code>{name}</code></a> {title}</h2>\n\
             <dl>\n\
             <dt>Remedy</dt><dd>{help}</dd>\n\
             <dt>Retryable</dt><dd>{retry}</dd>\n\
             <dt>HTTP status</dt><dd>{status}</dd>\n\
             <dt>UTP code</dt><dd><code>{utp}</code></dd>\n\
             </dl>\n\
             </section>\n",
            title = escape_html(code.title()),
            help = code_spans(&escape_html(code.help())),
            status = code.http_status(),
            utp = code.utp_code(),
        ));
    }
    format!(
        "<!doctype html>\n\
         <html lang=\"en\">\n\
         <head>\n\
         <meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>Errors - Toolcrib</title>\n\
         <style>\n{ERRORS_STYLE}\n</style>\n\
         </head>\n\
         <body>\n\
         <h1>Errors</h1>\n\
         <p>With this page you can look up an error code and find its cause and remedy. A refused \
         request gets a response of the type <code>application/problem+json</code>. Its member \
         <code>error</code> is the same object that a failed call has: \
         <code>{{code, message, detail, retryable}}</code>. The <code>hint</code> of a response is \
         about its specific cause.</p>\n\
         <nav>\n{links}</nav>\n\
         {sections}\
         <p><a href=\"/docs\">The API</a></p>\n\
         </body>\n\
         </html>\n"
    )
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
