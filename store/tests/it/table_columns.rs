//! Other programs read `tools` and `tool_calls` with plain SQL: both stores have the same columns,
//! words and values.

use toolcrib::domain::call::{Call, Status};
use toolcrib::domain::directory::{DirectoryChange, UnlistedTools};
use toolcrib::domain::tool::{Executor, ToolDefinition};
use toolcrib::ports::store::Store;
use toolcrib_store::{PostgresStore, SqliteStore};

use crate::suite::directory::{change, client, tool};
use crate::support::database::Database;
use crate::support::{call, database_in, json, put_with_status};

const TOOL_CALL_COLUMNS: [&str; 10] = [
    "tool_call_id",
    "run_id",
    "tool_name",
    "source",
    "status",
    "args",
    "result",
    "error",
    "created_at",
    "completed_at",
];
const TOOL_COLUMNS: [&str; 7] =
    ["name", "source", "schema", "timeout_ms", "metadata", "client_id", "created_at"];

type Rows = Vec<Vec<Option<String>>>;

/// Stores a call of every status, of which one is executed by a client, and tools of both sources.
async fn fill(store: &dyn Store) -> Vec<Call> {
    let mut calls = Vec::new();
    for status in Status::ALL {
        let mut new = call();
        if status == Status::Succeeded {
            new.target.executor = Executor::CLIENT;
        }
        calls.push(put_with_status(store, &new, status).await);
    }
    let full = ToolDefinition {
        input_schema: json(r#"{"type":"object","required":["url"]}"#),
        metadata: Some(json(r#"{"icon":"x"}"#)),
        ..tool("p", "browser.screenshot", "does it")
    };
    for client_id in ["tablet", "laptop"] {
        let tools = vec![full.clone()];
        let (client, unlisted_tools) = (client("p", client_id), UnlistedTools::Keep);
        change(store, DirectoryChange::Register { client, tools, unlisted_tools }).await;
    }
    let server = |name| ToolDefinition {
        executor: Executor::HTTP,
        timeout_ms: 5_000,
        ..tool("p", name, "does it \0")
    };
    change(store, DirectoryChange::PutTools(vec![server("weather.query")])).await;
    let (project, upstream) = ("p".to_owned(), "wiki".to_owned());
    let tools = vec![server("wiki.search")];
    change(store, DirectoryChange::SetUpstreamTools { project, upstream, tools }).await;
    calls
}

fn text(value: &str) -> Option<String> {
    Some(value.to_owned())
}

/// Checks the rows of `tool_calls`: those of [`TOOL_CALL_COLUMNS`] for each call.
fn check_calls(rows: &Rows, calls: &[Call]) {
    assert_eq!(rows.len(), calls.len());
    for (row, call) in rows.iter().zip(calls) {
        let source = if call.status == Status::Succeeded { "client" } else { "server" };
        let started = [
            text(call.id.as_str()),
            text("run"),
            text("weather.query"),
            text(source),
            text(call.status.as_str()),
            text(r#"{"city":"Oslo"}"#),
        ];
        assert_eq!(row[..6], started);
        let result = (call.status == Status::Succeeded).then(|| r#"{"sky":"clear"}"#.to_owned());
        assert_eq!(row[6], result);
        let failed = matches!(call.status, Status::Failed | Status::Timeout | Status::Canceled);
        assert_eq!(row[7].is_some(), failed);
        if let Some(error) = &row[7] {
            let error: serde_json::Value = serde_json::from_str(error).unwrap();
            assert_eq!(error["message"], "it broke");
        }
        assert_eq!(row[8], text("2026-09-21 14:13:20"));
        let ended = call.status.is_terminal();
        assert_eq!(row[9], ended.then(|| "2026-09-21 14:13:20".to_owned()));
    }
}

/// Checks the rows of `tools`: those of [`TOOL_COLUMNS`] but the last, by name.
fn check_tools(rows: &Rows) {
    let object = r#"{"type":"object"}"#;
    let expected = [
        [
            text("browser.screenshot"),
            text("client"),
            text(r#"{"type":"object","required":["url"]}"#),
            text("30000"),
            text(r#"{"icon":"x"}"#),
            text("laptop"),
        ],
        [text("weather.query"), text("server"), text(object), text("5000"), None, None],
        [text("wiki.search"), text("server"), text(object), text("5000"), None, None],
    ];
    assert_eq!(rows.len(), expected.len(), "{rows:?}");
    for (row, expected) in rows.iter().zip(expected) {
        assert_eq!(row[..6], expected);
        assert!(row[6].as_ref().is_some_and(|time| time.starts_with("20") && time.len() == 19));
    }
}

#[tokio::test]
async fn sqlite_tables_have_the_documented_columns() {
    let directory = tempfile::tempdir().unwrap();
    let path = database_in(&directory);
    let store = SqliteStore::open(&path).unwrap();
    let calls = fill(&store).await;
    let database = rusqlite::Connection::open(&path).unwrap();
    let select = |columns: &[&str], from: &str, wrap: &dyn Fn(&str) -> String| -> Rows {
        let columns: Vec<String> = columns.iter().map(|column| wrap(column)).collect();
        let sql = format!("SELECT {} FROM {from}", columns.join(", "));
        let mut select = database.prepare(&sql).unwrap();
        let rows = select.query_map([], |row| (0..columns.len()).map(|n| row.get(n)).collect());
        rows.unwrap().map(Result::unwrap).collect()
    };
    let as_text = |column: &str| format!("CAST({column} AS TEXT)");
    check_calls(&select(&TOOL_CALL_COLUMNS, "tool_calls ORDER BY place", &as_text), &calls);
    check_tools(&select(&TOOL_COLUMNS, "tools ORDER BY name", &as_text));
    let types = |column: &str| format!("group_concat(DISTINCT typeof({column}))");
    let of_calls = &select(&TOOL_CALL_COLUMNS, "tool_calls WHERE result IS NOT NULL", &types)[0];
    assert_eq!(
        of_calls.iter().flatten().filter(|kind| *kind == "text").count(),
        9,
        "all but error"
    );
    let of_tools = &select(&TOOL_COLUMNS, "tools WHERE client_id IS NOT NULL", &types)[0];
    let expected = ["text", "text", "text", "integer", "text", "text", "text"].map(text);
    assert_eq!(of_tools[..], expected);
}

#[tokio::test]
async fn postgres_tables_have_the_documented_columns() {
    let Some(database) = Database::new().await else { return };
    let store = PostgresStore::open(&database.url).await.unwrap();
    let calls = fill(&store).await;
    let client = database.client().await;
    let select = async |columns: &[&str], from: &str| -> Rows {
        let columns: Vec<String> = columns
            .iter()
            .map(|column| match column.ends_with("_at") {
                true => format!("to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')"),
                false => format!("{column}::text"),
            })
            .collect();
        let sql = format!("SELECT {} FROM toolcrib.{from}", columns.join(", "));
        let rows = client.query(&sql, &[]).await.unwrap();
        rows.iter().map(|row| (0..columns.len()).map(|n| row.get(n)).collect()).collect()
    };
    check_calls(&select(&TOOL_CALL_COLUMNS, "tool_calls ORDER BY place").await, &calls);
    check_tools(&select(&TOOL_COLUMNS, "tools ORDER BY name").await);
    let types = "SELECT data_type FROM information_schema.columns \
                 WHERE table_schema = 'toolcrib' AND table_name = $1 AND column_name = $2";
    for (table, columns) in [("tool_calls", &TOOL_CALL_COLUMNS[..]), ("tools", &TOOL_COLUMNS[..])] {
        for column in columns {
            let found = client.query_one(types, &[&table, column]).await.unwrap();
            let expected = match *column {
                "timeout_ms" => "bigint",
                "created_at" | "completed_at" => "timestamp with time zone",
                _ => "text",
            };
            assert_eq!(found.get::<_, String>(0), expected, "{table}.{column}");
        }
    }
    drop((store, client));
    database.drop().await;
}
