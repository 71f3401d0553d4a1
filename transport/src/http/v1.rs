//! HTTP v1: the API for agents and for operators.
//!
//! Every route under `/v1` is listed in `routes`, or in `approval_routes`, `limit_routes`,
//! `rule_routes`, `run_routes` and `utp_routes`, which it merges. One file per
//! resource holds its handlers and bodies. To add a route, write the handler in the file of its
//! resource and add it to the list; the header of `http.rs` has the remaining steps. Handlers of
//! one path with different methods share one `routes!`.

mod admin;
mod agents;
pub(super) mod approvals;
mod batch;
mod calls;
mod cards;
mod contexts;
mod deliveries;
mod events;
mod keys;
mod results;
mod rules;
mod runs;
mod sources;
mod tasks;
mod tools;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::HttpState;

pub use admin::audit::{AuditBody, AuditVerificationBody};
pub use agents::definition::AgentBody;
pub use keys::session_tokens::SessionTokenBody;
pub use keys::{KeyBody, NewKeyBody};
pub use sources::{
    OauthCallback, SkippedToolBody, SourceAdmin, SourceBody, SourceOauth, SourceToolChange,
};

/// Returns every route under `/v1`.
pub(super) fn routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(tools::list))
        .routes(routes!(tools::show))
        .routes(routes!(tools::invoke))
        .routes(routes!(calls::list, batch::run_batch))
        .routes(routes!(calls::show))
        .routes(routes!(calls::cancel))
        .routes(routes!(calls::answer))
        .routes(routes!(results::read_result))
        .routes(routes!(deliveries::list))
        .routes(routes!(deliveries::call_deliveries))
        .routes(routes!(deliveries::repeat))
        .routes(routes!(tasks::list))
        .routes(routes!(tasks::show))
        .routes(routes!(tasks::cancel))
        .routes(routes!(tasks::events))
        .routes(routes!(events::call_events))
        .routes(routes!(events::project_events))
        .routes(routes!(contexts::show))
        .routes(routes!(contexts::set_tools))
        .routes(routes!(contexts::record_calls))
        .routes(routes!(contexts::record_results))
        .routes(routes!(keys::list_keys, keys::create_key))
        .routes(routes!(keys::revoke_key))
        .routes(routes!(keys::rotate_key))
        .routes(routes!(keys::session_tokens::list, keys::session_tokens::create))
        .routes(routes!(keys::session_tokens::revoke))
        .merge(rule_routes())
        .routes(routes!(admin::audit::audit))
        .routes(routes!(admin::audit::verify_audit))
        .routes(routes!(admin::audit::export_audit))
        .routes(routes!(admin::clients))
        .merge(limit_routes())
        .merge(approval_routes())
        .merge(run_routes())
        .routes(routes!(sources::list, sources::add))
        .routes(routes!(sources::show, sources::remove))
        .routes(routes!(sources::accept))
        .routes(routes!(sources::refresh))
        .routes(routes!(sources::sign_in, sources::sign_out))
        .merge(utp_routes())
}

/// Routes of usage limits and kill switches.
fn limit_routes() -> OpenApiRouter<HttpState> {
    use admin::{limits, switches};
    OpenApiRouter::new()
        .routes(routes!(limits::list_limits))
        .routes(routes!(limits::show_limit, limits::put_limit, limits::drop_limit))
        .routes(routes!(switches::list_switches))
        .routes(routes!(switches::show_switch, switches::put_switch, switches::drop_switch))
}

/// Routes of approvals: calls that wait for a person.
fn approval_routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(approvals::list))
        .routes(routes!(approvals::decide))
        .routes(routes!(approvals::list_standing))
        .routes(routes!(approvals::revoke_standing))
        .routes(routes!(approvals::show))
}

/// Routes of access rules.
fn rule_routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(rules::list, rules::put_all, rules::drop_short))
        .routes(routes!(rules::explain))
        .routes(routes!(rules::lint))
        .routes(routes!(rules::rehearse))
        .routes(routes!(rules::versions))
        .routes(routes!(rules::rollback))
        .routes(routes!(rules::show, rules::put, rules::drop_rule))
}

/// Routes of runs: agent loops that Toolcrib stores and drives.
fn run_routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(runs::list, runs::start))
        .routes(routes!(runs::show))
        .routes(routes!(runs::cancel))
        .routes(routes!(runs::add_messages))
        .routes(routes!(runs::resume))
        .routes(routes!(runs::stream::run_events))
        .routes(routes!(runs::replay::replay))
        .routes(routes!(runs::tree::show_tree))
}

/// Routes of UTP: cards, reports, agents, turns and inboxes.
fn utp_routes() -> OpenApiRouter<HttpState> {
    OpenApiRouter::new()
        .routes(routes!(cards::show))
        .routes(routes!(cards::put))
        .routes(routes!(cards::call_cards))
        .routes(routes!(cards::report))
        .routes(routes!(cards::dead_letters))
        .routes(routes!(cards::redrive))
        .routes(routes!(cards::boxes::create_box))
        .routes(routes!(cards::boxes::show_box))
        .routes(routes!(agents::list))
        .routes(routes!(agents::show, agents::definition::put, agents::drop_agent))
        .routes(routes!(agents::definition::versions))
        .routes(routes!(agents::inbox))
        .routes(routes!(agents::ack))
        .routes(routes!(agents::lease))
        .routes(routes!(agents::show_turn))
        .routes(routes!(agents::dispatch))
        .routes(routes!(agents::renew))
        .routes(routes!(agents::suspend))
        .routes(routes!(agents::resume))
        .routes(routes!(agents::finish))
        .routes(routes!(agents::stop))
}
