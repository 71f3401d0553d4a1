//! The cost of compiling schemas is bounded: per request, per project and in all.

use serde_json::{Value, json};

use crate::domain::json::Json;
use crate::schema::cache::project_bytes;
use crate::schema::{CompileBudget, Schema, compile_off_thread};

/// Returns a schema with this many patterns that take about 3 MiB each when compiled.
fn costly_schema(seed: usize, patterns: usize) -> Value {
    let pattern = |n: usize| json!({ "pattern": format!("{seed}-{n}\\PL{{60}}") });
    let fields = (0..patterns).map(|n| (format!("p{n}"), pattern(n)));
    json!({ "type": "object", "properties": fields.collect::<serde_json::Map<_, _>>() })
}

#[test]
fn costs_add_up_over_the_schemas_of_a_request() {
    let mut budget = CompileBudget::for_request();
    let accepted = (0..30).take_while(|n| {
        Schema::compile_within("cost.request", &costly_schema(*n, 1), &mut budget).is_ok()
    });
    let accepted = accepted.count();
    assert!((5..20).contains(&accepted), "{accepted} schemas of 3 MiB in 32 MiB");
    let simple = json!({ "type": "object", "properties": { "a": { "pattern": "^[a-z]+$" } } });
    let refused = Schema::compile_within("cost.request", &simple, &mut budget);
    assert!(refused.is_err(), "the budget stays used up");
}

#[test]
fn a_pattern_over_the_budget_is_refused_with_its_location() {
    let mut budget = CompileBudget::for_request();
    let error = Schema::compile_within("cost.pattern", &costly_schema(0, 12), &mut budget);
    let error = error.map(|_| ()).unwrap_err();
    assert!(error.pointer.starts_with("/properties/p"), "{error}");
    assert!(error.pointer.ends_with("/pattern"), "{error}");
    assert!(error.reason.contains("32 MiB when compiled"), "{error}");
    let names = json!({ "patternProperties": { "\\PL{60}": {}, "x\\PL{60}": {} } });
    let mut budget = CompileBudget::new(8 << 20);
    let error = Schema::compile_within("cost.pattern", &names, &mut budget);
    let error = error.map(|_| ()).unwrap_err();
    assert_eq!(error.pointer, "/patternProperties");
}

#[test]
fn many_unicode_classes_are_refused_before_they_are_expanded() {
    let pattern = "\\PL".repeat(60_000);
    let mut budget = CompileBudget::for_request();
    let schema = json!({ "pattern": pattern });
    assert!(Schema::compile_within("cost.classes", &schema, &mut budget).is_err());
}

#[test]
fn ordinary_registrations_are_far_below_the_budget() {
    let mut budget = CompileBudget::for_request();
    for n in 0..1_000 {
        let schema = json!({ "type": "object", "required": ["id"], "properties": {
            "id": { "type": "string", "pattern": format!("^[a-z0-9_-]{{1,64}}/{n}$") },
            "name": { "type": "string", "maxLength": 200 },
            "tags": { "type": "array", "items": { "type": "string", "pattern": "^\\S+$" } },
            "mail": { "type": "string", "format": "email" },
            "at": { "anyOf": [{ "type": "string", "format": "date-time" }, { "type": "null" }] }
        }});
        let compiled = Schema::compile_within("cost.ordinary", &schema, &mut budget);
        assert!(compiled.is_ok(), "schema {n}: {:?}", compiled.map(|_| ()));
    }
}

#[test]
fn compiled_schemas_of_a_project_are_bounded_and_stay_usable() {
    let other = Schema::compile_within(
        "cost.other",
        &json!({ "type": "integer" }),
        &mut CompileBudget::for_request(),
    )
    .unwrap();
    let schemas: Vec<Schema> = (0..6)
        .map(|n| {
            let schema = costly_schema(n, 5);
            Schema::compile_within("cost.bounded", &schema, &mut CompileBudget::for_request())
                .unwrap()
        })
        .collect();
    let bytes = project_bytes("cost.bounded");
    assert!((16 << 20..=64 << 20).contains(&bytes), "{bytes}");
    assert!(!schemas[0].is_ready(), "the one that was not used for the longest time is given up");
    assert!(schemas[5].is_ready());
    assert!(other.is_ready(), "another project's schema stays");
    assert!(schemas[0].problems(&json!({ "p0": "a" })).len() == 1, "it is compiled again");
    assert!(schemas[0].is_ready());
    assert!(project_bytes("cost.bounded") <= 64 << 20);
    drop(schemas);
    assert_eq!(project_bytes("cost.bounded"), 0);
}

#[tokio::test]
async fn a_stored_schema_is_compiled_at_its_first_use() {
    let schema = Schema::deferred("cost.stored", Json::from_value(&json!({ "type": "integer" })));
    assert!(!schema.is_ready());
    schema.prepare().await;
    assert!(schema.is_ready());
    assert!(schema.problems(&json!(1)).is_empty());
    let unusable = Json::from_value(&json!({ "type": "no such type" }));
    let unusable = Schema::deferred("cost.stored", unusable);
    unusable.prepare().await;
    let problems = unusable.problems(&json!(1));
    assert!(problems[0].message.contains("schema is not usable at /type"), "{problems:?}");
}

#[tokio::test]
async fn a_project_that_compiles_for_long_delays_no_other() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let long = tokio::spawn(compile_off_thread("cost.long", move || wait.recv().is_ok()));
    let second = tokio::spawn(compile_off_thread("cost.long", || true));
    tokio::task::yield_now().await;
    assert_eq!(compile_off_thread("cost.short", || 7).await.unwrap(), 7);
    assert!(!second.is_finished(), "one thread per project");
    go.send(()).unwrap();
    assert!(long.await.unwrap().unwrap() && second.await.unwrap().unwrap());
}
