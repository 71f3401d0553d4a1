//! Tests against a real server. `TOOLCRIB_TEST_POSTGRES_URL` is a superuser's URL of a disposable
//! database, in which the tests create their own role and tables and remove them again.
//!
//! Without the variable the tests fail, unless `TOOLCRIB_TEST_QUICK=1` allows them to be skipped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_postgres::{Client, Config, NoTls};
use toolcrib::domain::fault::SideEffect;
use toolcrib::ports::fn_tool::BuiltinSource;
use toolcrib::ports::source::Source;
use toolcrib::{Code, Fault};

use super::super::super::testing;
use super::super::{DatabaseSettings, tool};

/// Serializes changes to the privileges of a schema: they are one row in PostgreSQL, and concurrent
/// changes to it conflict. Held until the end of the script.
const ONE_AT_A_TIME: &str = "SELECT pg_advisory_xact_lock(20261117);";

/// A role that can only read one table, and the superuser that created it.
struct TestDatabase {
    admin: Client,
    superuser: String,
    url: String,
    name: String,
}

impl TestDatabase {
    /// Returns `None` if the tests may be skipped.
    async fn new(name: &str) -> Option<Self> {
        let superuser = match std::env::var("TOOLCRIB_TEST_POSTGRES_URL") {
            Ok(url) => url,
            Err(_) if std::env::var("TOOLCRIB_TEST_QUICK").as_deref() == Ok("1") => {
                eprintln!("skipped because of --quick: TOOLCRIB_TEST_POSTGRES_URL is not set");
                return None;
            }
            Err(_) => panic!(
                "TOOLCRIB_TEST_POSTGRES_URL is not set: give a superuser's URL of a throw-away \
                 database, or TOOLCRIB_TEST_QUICK=1 to leave the PostgreSQL tests out"
            ),
        };
        let (admin, connection) = tokio_postgres::connect(&superuser, NoTls).await.unwrap();
        tokio::spawn(connection);
        let name = format!("toolcrib_{name}_{}", std::process::id());
        let script = format!(
            "{ONE_AT_A_TIME}
             CREATE TABLE {name} (id int PRIMARY KEY, body text);
             INSERT INTO {name} SELECT n, 'row ' || n FROM generate_series(1, 5000) n;
             CREATE ROLE {name} LOGIN PASSWORD 'p ss:w@rd';
             GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {name} TO {name};
             CREATE SEQUENCE {name}_seq; GRANT ALL ON {name}_seq TO {name};
             GRANT CREATE, USAGE ON SCHEMA public TO {name};"
        );
        admin.batch_execute(&script).await.unwrap();
        let url = url_for(&superuser, &name, "p%20ss%3Aw%40rd");
        Some(Self { admin, superuser, url, name })
    }

    async fn clear(self) {
        let name = &self.name;
        let script = format!(
            "{ONE_AT_A_TIME} DROP TABLE {name}; DROP SEQUENCE {name}_seq; DROP OWNED BY {name};
             DROP ROLE {name};"
        );
        self.admin.batch_execute(&script).await.unwrap();
    }

    async fn count(&self, sql: &str) -> i64 {
        self.admin.query_one(sql, &[]).await.unwrap().get(0)
    }
}

/// Returns the URL of the same server and database for another user.
fn url_for(superuser: &str, user: &str, password: &str) -> String {
    let config: Config = superuser.parse().unwrap();
    let database = config.get_dbname().unwrap_or("postgres").to_owned();
    let host = match config.get_hosts().first().expect("a host") {
        tokio_postgres::config::Host::Tcp(name) => name.clone(),
        tokio_postgres::config::Host::Unix(path) => path.display().to_string().replace('/', "%2F"),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    format!("postgres://{user}:{password}@{host}:{port}/{database}")
}

fn source(url: &str, change: impl FnOnce(&mut DatabaseSettings)) -> Arc<BuiltinSource> {
    let mut settings =
        DatabaseSettings { url: Some(url.to_owned()), ..DatabaseSettings::default() };
    change(&mut settings);
    testing::source(tool(std::path::Path::new("/nonexistent"), settings).unwrap())
}

async fn run(source: &BuiltinSource, sql: &str) -> Result<Value, Fault> {
    testing::run(source, &json!({"sql": sql})).await
}

#[tokio::test]
async fn postgres_types_become_json() {
    let Some(database_role) = TestDatabase::new("types").await else { return };
    let source = source(&database_role.url, |_| {});
    let table = [
        ("1::int2, 2, 3::int8, 4::oid", json!([1, 2, 3, 4])),
        ("1.5::float8, 1.1::float4, 'NaN'::float8", json!([1.5, 1.1, "NaN"])),
        ("true, false, NULL, NULL::timestamptz", json!([true, false, null, null])),
        ("'ü', 'x'::varchar, 'y'::char(3), 'z'::name", json!(["ü", "x", "y  ", "z"])),
        (
            "12345678901234567890.10::numeric, sum(n) FROM generate_series(1, 3::int8) n",
            json!(["12345678901234567890.10", "6"]),
        ),
        (
            "'6ba7b810-9dad-11d1-80b4-00c04fd430c8'::uuid, '\\x00ff'::bytea",
            json!(["6ba7b810-9dad-11d1-80b4-00c04fd430c8", "\\x00ff"]),
        ),
        ("'{\"a\": [1, null]}'::jsonb, '{\"b\": 1}'::json", json!([{"a": [1, null]}, {"b": 1}])),
        (
            "'2025-02-03 04:05:06.7'::timestamp, '2025-02-03'::date, '04:05'::time",
            json!(["2025-02-03T04:05:06.7", "2025-02-03", "04:05:00"]),
        ),
        ("'2025-02-03T04:05:06Z'::timestamptz AT TIME ZONE 'UTC'", json!(["2025-02-03T04:05:06"])),
        ("'1 day 2 hours'::interval, 'infinity'::date", json!(["1 day 02:00:00", "infinity"])),
        ("ARRAY[1, 2], ARRAY[['a', NULL]], '{}'::int[]", json!([[1, 2], [["a", null]], []])),
        ("'10.0.0.1/8'::inet, '[1,3)'::int4range", json!(["10.0.0.1/8", "[1,3)"])),
        ("ROW(1, 'x'), 'a b'::tsvector", json!([{"f1": 1, "f2": "x"}, "'a' 'b'"])),
        ("point(1, 2), '12.50'::money IS NULL", json!(["(1,2)", false])),
    ];
    for (columns, expected) in table {
        for end in ["", " ;\n", " -- why"] {
            let sql = format!("SELECT {columns}{end}");
            let answer = run(&source, &sql).await.unwrap_or_else(|fault| panic!("{sql}: {fault}"));
            assert_eq!(answer["rows"], json!([expected]), "{sql}");
        }
    }
    let duplicates = run(&source, "SELECT now() AS a, 2 AS a, 3 AS \"ä b\"").await.unwrap();
    assert_eq!(duplicates["columns"], json!(["a", "a", "ä b"]));
    assert_eq!(run(&source, "VALUES (1), (2)").await.unwrap()["rows"], json!([[1], [2]]));
    assert!(run(&source, "SHOW server_version").await.is_ok());
    assert!(run(&source, "EXPLAIN SELECT 1").await.is_ok());
    let fault = run(&source, "SELECT now(); -- after").await.unwrap_err();
    assert!(fault.message.contains("now (timestamptz)"), "{fault}");
    database_role.clear().await;
}

#[tokio::test]
async fn parameters_are_values_and_never_text() {
    let Some(database_role) = TestDatabase::new("params").await else { return };
    let (source, name) = (source(&database_role.url, |_| {}), database_role.name.clone());
    let query = async |sql: String, params: Value| {
        testing::run(&source, &json!({"sql": sql, "params": params})).await
    };
    let sql = format!("SELECT body FROM {name} WHERE id = $1 AND body <> $2");
    let answer = query(sql, json!([7, "'; DROP TABLE x; --"])).await.unwrap();
    assert_eq!(answer["rows"], json!([["row 7"]]));
    let sql = format!("SELECT id FROM {name} WHERE id = ANY($1) ORDER BY 1");
    assert_eq!(query(sql, json!([[3, 1]])).await.unwrap()["rows"], json!([[1], [3]]));
    let sql = "SELECT $1::text, $2::bool, $3::jsonb, $4::timestamp, $5::text[], $6::float8";
    let values = json!([null, true, {"a": 1}, "2025-01-02", ["a\"b", null, "c\\d"], 1.5]);
    let answer = query(sql.into(), values).await.unwrap();
    let expected =
        json!([[null, true, {"a": 1}, "2025-01-02T00:00:00", ["a\"b", null, "c\\d"], 1.5]]);
    assert_eq!(answer["rows"], expected);
    for (sql, params) in [("SELECT $1::int", json!([])), ("SELECT $1::int", json!(["x"]))] {
        let fault = query(sql.into(), params).await.unwrap_err();
        assert_eq!(fault.code, Code::ValidationError, "{fault}");
    }
    database_role.clear().await;
}

#[tokio::test]
async fn statements_other_than_reads_are_refused() {
    let Some(database_role) = TestDatabase::new("writes").await else { return };
    let (source, name) = (source(&database_role.url, |_| {}), database_role.name.clone());
    let table = [
        format!("INSERT INTO {name} VALUES (0, 'x')"),
        format!("INSERT INTO {name} VALUES (0, 'x') RETURNING id"),
        format!("UPDATE {name} SET body = '' RETURNING id"),
        format!("DELETE FROM {name} RETURNING id"),
        format!("DELETE FROM {name} RETURNING now()"),
        format!("WITH gone AS (DELETE FROM {name} RETURNING id) SELECT * FROM gone"),
        format!("WITH gone AS (DELETE FROM {name} RETURNING now()) SELECT * FROM gone"),
        format!("TRUNCATE {name}"),
        format!("SELECT nextval('{name}_seq')"),
        format!("SELECT setval('{name}_seq', 99)"),
        format!("SELECT * FROM {name} FOR UPDATE"),
        format!("SELECT 1 INTO {name}_x"),
        format!("CREATE TABLE {name}_x (a int)"),
        format!("EXPLAIN ANALYZE INSERT INTO {name} VALUES (0, 'x')"),
        format!("SELECT 1; DELETE FROM {name}"),
        format!("SELECT now(); DELETE FROM {name}"),
        format!("SELECT now()) AS q (c0); DELETE FROM {name}; --"),
        format!("COMMIT; DELETE FROM {name}"),
        "SELECT 1; SELECT 2".into(),
        "COMMIT".into(),
        "ROLLBACK".into(),
        "BEGIN READ WRITE".into(),
        "SET TRANSACTION READ WRITE".into(),
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE".into(),
        "SELECT set_config('transaction_read_only', 'off', true)".into(),
        format!(
            "WITH x AS (SELECT set_config('transaction_read_only', 'off', true) AS s), \
             y AS (INSERT INTO {name} SELECT 0, s FROM x RETURNING id) SELECT * FROM y"
        ),
        "DO $$ BEGIN PERFORM 1; END $$".into(),
        format!("COPY {name} TO STDOUT"),
        format!("COPY {name} TO '/tmp/toolcrib_copy'"),
        "COPY (SELECT 1) TO PROGRAM 'touch /tmp/toolcrib_copy'".into(),
        "SELECT pg_read_file('/etc/passwd')".into(),
        "SELECT lo_import('/etc/passwd')".into(),
        "SELECT pg_ls_dir('/')".into(),
        "LISTEN x".into(),
        "".into(),
        "-- only a comment".into(),
        "SELEC 1".into(),
        "SELECT nothing".into(),
        "SELECT 1/0".into(),
        "SELECT repeat('x', 2000000000)".into(),
        "SELECT * FROM nowhere".into(),
    ];
    let before = database_role.count(&format!("SELECT sum(hashtext(body)) FROM {name}")).await;
    for sql in table {
        let Err(fault) = run(&source, &sql).await else { panic!("{sql} was run") };
        if !sql.contains("repeat") {
            assert_eq!(fault.code, Code::ValidationError, "{sql}: {fault}");
        }
        assert_eq!(fault.side_effect, SideEffect::None, "{sql}");
    }
    // Before PostgreSQL 16 "read only" does not cover a large object: the rollback does.
    let objects = "SELECT count(*) FROM pg_largeobject_metadata";
    let count = database_role.count(objects).await;
    let _ = run(&source, "SELECT lo_create(0)").await;
    assert_eq!(database_role.count(objects).await, count);
    let after = database_role.count(&format!("SELECT sum(hashtext(body)) FROM {name}")).await;
    assert_eq!(before, after);
    assert_eq!(database_role.count(&format!("SELECT last_value FROM {name}_seq")).await, 1);
    assert!(!std::path::Path::new("/tmp/toolcrib_copy").exists());
    database_role.clear().await;
}

#[tokio::test]
async fn a_role_with_extra_privileges_is_refused() {
    let Some(database_role) = TestDatabase::new("roles").await else { return };
    let name = database_role.name.clone();
    let refused = async |url: &str, part: &str| {
        let fault = run(&source(url, |_| {}), "SELECT 1").await.unwrap_err();
        assert_eq!(
            (fault.code, fault.side_effect),
            (Code::PermissionDenied, SideEffect::None),
            "{fault}"
        );
        assert!(fault.message.contains(part), "{fault}");
        assert!(!fault.message.contains("w@rd"), "{fault}");
    };
    refused(&database_role.superuser, "pg_read_server_files").await;
    let allowed = source(&database_role.superuser, |settings| settings.allow_superuser = true);
    assert_eq!(run(&allowed, "SELECT 1").await.unwrap()["rows"], json!([[1]]));
    assert!(run(&allowed, &format!("DELETE FROM {name}")).await.is_err());

    assert!(run(&source(&database_role.url, |_| {}), "SELECT 1").await.is_ok());
    for role in ["pg_read_server_files", "pg_write_server_files", "pg_execute_server_program"] {
        database_role.admin.batch_execute(&format!("GRANT {role} TO {name}")).await.unwrap();
        refused(&database_role.url, role).await;
        database_role.admin.batch_execute(&format!("REVOKE {role} FROM {name}")).await.unwrap();
    }
    let make = format!("CREATE ROLE {name}_top SUPERUSER NOLOGIN; GRANT {name}_top TO {name};");
    database_role.admin.batch_execute(&make).await.unwrap();
    refused(&database_role.url, &format!("{name}_top")).await;
    database_role.admin.batch_execute(&format!("DROP ROLE {name}_top")).await.unwrap();
    database_role.admin.batch_execute(&format!("ALTER ROLE {name} REPLICATION")).await.unwrap();
    refused(&database_role.url, &name).await;
    database_role.clear().await;
}

/// Returns the number of statements that the server still runs for this role.
async fn running_statements(database_role: &TestDatabase) -> i64 {
    let name = &database_role.name;
    let sql = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE usename = '{name}' AND state = 'active'"
    );
    database_role.count(&sql).await
}

async fn wait_until_idle(database_role: &TestDatabase) {
    let started = Instant::now();
    while running_statements(database_role).await > 0 {
        assert!(started.elapsed() < Duration::from_secs(3), "the server still runs the query");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn slow_queries_are_canceled_on_the_server() {
    let Some(database_role) = TestDatabase::new("sleep").await else { return };
    let source = source(&database_role.url, |settings| settings.timeout_ms = 500);
    let forever = [
        "SELECT pg_sleep(60)",
        "SELECT count(*) FROM generate_series(1, 1000000000000)",
        "SELECT set_config('statement_timeout', '0', false), pg_sleep(60)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i % 9 FROM n) SELECT max(i) FROM n",
    ];
    for sql in forever {
        let started = Instant::now();
        let fault = run(&source, sql).await.unwrap_err();
        assert_eq!(
            (fault.code, fault.side_effect),
            (Code::Timeout, SideEffect::None),
            "{sql}: {fault}"
        );
        assert!(started.elapsed() < Duration::from_secs(2), "{sql}: {:?}", started.elapsed());
        wait_until_idle(&database_role).await;
    }
    database_role.clear().await;
}

#[tokio::test]
async fn cancellation_stops_the_query_on_the_server() {
    let Some(database_role) = TestDatabase::new("cancel").await else { return };
    let source = source(&database_role.url, |_| {});
    let attempt = testing::attempt("database.query", &json!({"sql": "SELECT pg_sleep(60)"}));
    let id = attempt.call_id.clone();
    let running_source = Arc::clone(&source);
    let task = tokio::spawn(async move { running_source.start(attempt, Arc::new(|_| {})).await });
    let started = Instant::now();
    while running_statements(&database_role).await == 0 {
        assert!(started.elapsed() < Duration::from_secs(5), "the query never started");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    source.cancel(&id, 1);
    tokio::time::timeout(Duration::from_secs(1), task).await.unwrap().unwrap();
    wait_until_idle(&database_role).await;
    database_role.clear().await;
}

#[tokio::test]
async fn large_results_are_truncated_and_not_buffered() {
    let Some(database_role) = TestDatabase::new("large").await else { return };
    let (source, name) = (source(&database_role.url, |_| {}), database_role.name.clone());
    let cut = |answer: &Value| (answer["row_count"].clone(), answer["truncated"].clone());
    let answer = run(&source, &format!("SELECT * FROM {name} ORDER BY id")).await.unwrap();
    assert_eq!(cut(&answer), (json!(1000), json!(true)));
    assert_eq!(answer["rows"][999], json!([1000, "row 1000"]));
    let sql = format!("SELECT *, now() FROM {name} ORDER BY id DESC LIMIT 1000");
    let answer = run(&source, &sql).await.unwrap();
    assert_eq!(cut(&answer), (json!(1000), json!(false)));
    assert_eq!(answer["rows"][999][0], json!(4001), "the order is preserved");
    let answer = run(&source, "SELECT generate_series(1, 1000000000000)").await.unwrap();
    assert_eq!(cut(&answer), (json!(1000), json!(true)));
    let sql = "SELECT repeat('x', 100000) FROM generate_series(1, 100000)";
    let answer = run(&source, sql).await.unwrap();
    assert_eq!(answer["truncated"], json!(true));
    assert!(answer.to_string().len() < (1 << 20) + 1000);
    // One value of 300 MB: only a few MB of it may ever be in this process.
    let before = peak_kib();
    let answer = run(&source, "SELECT repeat('x', 300000000)").await.unwrap();
    assert_eq!(cut(&answer), (json!(0), json!(true)));
    assert!(peak_kib() - before < 60_000, "{} KiB more", peak_kib() - before);
    wait_until_idle(&database_role).await;
    database_role.clear().await;
}

fn peak_kib() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn an_unreachable_server_is_an_upstream_fault() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap().port();
    let closed = {
        let probe = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        probe.local_addr().unwrap().port()
    };
    for port in [silent, closed] {
        let url = format!("postgres://u:secret@127.0.0.1:{port}/d");
        let fault = run(&source(&url, |_| {}), "SELECT 1").await.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{fault}");
        assert_eq!((fault.side_effect, fault.retryable), (SideEffect::None, true));
        assert!(!fault.message.contains("secret"), "{fault}");
    }
    let Some(database_role) = TestDatabase::new("auth").await else { return };
    let url = url_for(&database_role.superuser, &database_role.name, "wrong");
    let fault = run(&source(&url, |_| {}), "SELECT 1").await.unwrap_err();
    assert_eq!((fault.code, fault.retryable), (Code::UpstreamUnavailable, false), "{fault}");
    database_role.clear().await;
}

#[test]
fn invalid_urls_are_refused_at_startup_without_the_password() {
    for url in [
        "postgres://u:secret@h/d?sslmode=require",
        "postgres://u:secret@h:port/d",
        "postgres:///d?user=u&password=secret",
        "postgres://u:secret@h/d?nonsense=1",
    ] {
        let settings = DatabaseSettings { url: Some(url.into()), ..DatabaseSettings::default() };
        let problem = tool(std::path::Path::new("/nonexistent"), settings).err();
        let problem = problem.unwrap_or_else(|| panic!("{url} was accepted")).to_string();
        assert!(problem.contains("builtin.database.url"), "{problem}");
        assert!(!problem.contains("secret"), "{problem}");
    }
}
