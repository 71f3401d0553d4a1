//! The guarantees under faults, by the numbers of docs/reliability.md: kills at chosen moments,
//! upgrades, pauses, failed flushes, hostile input, storms.
//!
//! Each test has a short form, which every run has, and a long form for `./scripts/test
//! reliability`, which sets `TOOLCRIB_TEST_LONG`.

mod crash_points;
mod dependencies;
mod flushes;
mod hostile_json;
mod pauses;
mod permissions;
mod poison;
mod storms;
mod upgrades;

/// Returns the first value in the short form, and the second one in the long form.
fn by_form<T>(short: T, long: T) -> T {
    match std::env::var_os("TOOLCRIB_TEST_LONG") {
        None => short,
        Some(_) => long,
    }
}
