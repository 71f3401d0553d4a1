//! `/openapi.json`, the try-it page at `/docs`, and the page that explains the codes.

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use toolcrib::fault::Code;
use utoipa::Modify;
use utoipa::openapi::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa_swagger_ui::{Config, SwaggerUi};

/// A bearer key opens everything, where keys were made.
pub(super) struct Security;

impl Modify for Security {
    fn modify(&self, document: &mut OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("key", bearer);
        let none: [&str; 0] = [];
        document.security = Some(vec![SecurityRequirement::new("key", none)]);
    }
}

/// The pages; all of them come out of the binary.
pub(super) fn pages(document: OpenApi) -> Router {
    let ui = SwaggerUi::new("/docs")
        .url("/openapi.json", document)
        .config(Config::from("/openapi.json").try_it_out_enabled(true));
    Router::new().route("/docs/errors", get(errors)).merge(ui)
}

async fn errors() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/markdown; charset=utf-8")], errors_page())
}

/// The table of codes as a page; also committed as docs/errors.md.
pub fn errors_page() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         Made from the table in `engine/src/fault.rs`; do not edit by hand.\n\n\
         A refused request is answered with `application/problem+json`; its member `error` is the \
         same object that a failed call carries: `{code, message, detail, retryable}`.\n\n\
         | code | HTTP | UTP code | may a retry help? | what it means | what to do |\n\
         |---|---|---|---|---|---|\n",
    );
    for code in Code::all() {
        let retry = if code.retryable() { "yes" } else { "no" };
        page.push_str(&format!(
            "| <a id=\"{}\"></a>`{}` | {} | `{}` | {retry} | {} | {} |\n",
            code.as_str().to_lowercase(),
            code.as_str(),
            code.http_status(),
            code.utp(),
            code.title(),
            code.help()
        ));
    }
    page
}
