//! HTTP v1: for agents, and for who operates the crib.

mod admin;
mod batch;
mod calls;
mod contexts;
mod deliveries;
mod events;
mod results;
mod tasks;
mod tools;

use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Door;

pub(super) fn routes() -> OpenApiRouter<Door> {
    OpenApiRouter::new()
        .routes(routes!(tools::list))
        .routes(routes!(tools::show))
        .routes(routes!(tools::invoke))
        .routes(routes!(calls::list, batch::run))
        .routes(routes!(calls::show))
        .routes(routes!(calls::cancel))
        .routes(routes!(calls::answer))
        .routes(routes!(results::read))
        .routes(routes!(deliveries::list))
        .routes(routes!(deliveries::of_call))
        .routes(routes!(deliveries::repeat))
        .routes(routes!(tasks::list))
        .routes(routes!(tasks::show))
        .routes(routes!(tasks::cancel))
        .routes(routes!(tasks::events))
        .routes(routes!(events::of_call))
        .routes(routes!(events::of_run))
        .routes(routes!(events::of_project))
        .routes(routes!(contexts::show))
        .routes(routes!(contexts::set_tools))
        .routes(routes!(contexts::record_calls))
        .routes(routes!(contexts::record_results))
        .routes(routes!(admin::list_keys, admin::create_key))
        .routes(routes!(admin::revoke_key))
        .routes(routes!(admin::list_rules, admin::put_rule, admin::drop_rule))
        .routes(routes!(admin::audit))
        .routes(routes!(admin::clients))
}
