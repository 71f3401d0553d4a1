//! Tests that the sample exists, that results are right, and that nothing but reading is possible.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use toolcrib::domain::fault::SideEffect;
use toolcrib::ports::fn_tool::BuiltinSource;
use toolcrib::ports::source::Source;
use toolcrib::{Code, Effect, Fault, Risk, Tool};

use super::super::super::testing;
use super::super::{DatabaseSettings, tool};

struct SampleDatabase {
    folder: tempfile::TempDir,
    source: Arc<BuiltinSource>,
}

impl SampleDatabase {
    fn new() -> Self {
        Self::with(DatabaseSettings::default())
    }

    fn with(settings: DatabaseSettings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = testing::source(tool(folder.path(), settings).unwrap());
        Self { folder, source }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("sample.db")
    }

    fn hash(&self) -> Vec<u8> {
        Sha256::digest(std::fs::read(self.file()).unwrap()).to_vec()
    }

    async fn run(&self, sql: &str) -> Result<Value, Fault> {
        testing::run(&self.source, &json!({"sql": sql})).await
    }

    async fn with_params(&self, sql: &str, params: Value) -> Result<Value, Fault> {
        testing::run(&self.source, &json!({"sql": sql, "params": params})).await
    }
}

#[tokio::test]
async fn the_sample_database_can_be_queried() {
    let sample = SampleDatabase::new();
    let answer = sample.run("SELECT count(*) AS n, max(price) AS top FROM products").await.unwrap();
    assert_eq!(
        answer,
        json!({"columns": ["n", "top"], "rows": [[12, 119.0]], "row_count": 1, "truncated": false})
    );
    let answer = sample
        .run(
            "WITH totals AS (SELECT order_id, sum(quantity * unit_price) AS total FROM order_items \
             GROUP BY order_id) SELECT c.name, round(sum(total), 2) FROM orders o JOIN totals t ON \
             t.order_id = o.id JOIN customers c ON c.id = o.customer_id GROUP BY 1 ORDER BY 2 DESC \
             LIMIT 3; -- the best",
        )
        .await
        .unwrap();
    assert_eq!(answer["row_count"], json!(3));
    let counts = "SELECT (SELECT count(*) FROM customers), (SELECT count(*) FROM orders), \
                  (SELECT count(*) FROM order_items)";
    assert_eq!(sample.run(counts).await.unwrap()["rows"], json!([[12, 30, 60]]));
}

#[tokio::test]
async fn the_sample_database_is_created_once_and_deterministic() {
    let (one, two) = (SampleDatabase::new(), SampleDatabase::new());
    assert_eq!(one.hash(), two.hash());
    std::fs::write(one.file(), "mine").unwrap();
    tool(one.folder.path(), DatabaseSettings::default()).unwrap();
    assert_eq!(std::fs::read_to_string(one.file()).unwrap(), "mine");
    assert_eq!(std::fs::read_dir(one.folder.path()).unwrap().count(), 1, "no other files remain");
}

#[tokio::test]
async fn types_and_parameters_are_converted() {
    let sample = SampleDatabase::new();
    let sql = "SELECT ?1, ?2, ?3, ?4, ?5, x'00ff', 1e999, 9223372036854775807, 'a' AS a, 'b' AS a";
    let answer = sample.with_params(sql, json!([null, true, 1.5, "ü'--", -7])).await.unwrap();
    assert_eq!(
        answer["rows"],
        json!([[null, 1, 1.5, "ü'--", -7, "\\x00ff", "inf", i64::MAX, "a", "b"]])
    );
    let answer = sample
        .with_params("SELECT value FROM json_each(?1) WHERE value > ?2", json!([[1, 2, 3], 1]))
        .await
        .unwrap();
    assert_eq!(answer["rows"], json!([[2], [3]]));
    let fault = sample.with_params("SELECT ?1, ?2", json!([1])).await.unwrap_err();
    assert!(fault.message.contains("2 parameters"), "{fault}");
}

#[tokio::test]
async fn the_schema_can_be_queried() {
    let sample = SampleDatabase::new();
    let tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1";
    assert_eq!(
        sample.run(tables).await.unwrap()["rows"],
        json!([["customers"], ["order_items"], ["orders"], ["products"]])
    );
    let columns = "SELECT name FROM pragma_table_info('orders')";
    assert_eq!(
        sample.run(columns).await.unwrap()["rows"],
        json!([["id"], ["customer_id"], ["ordered_on"], ["status"]])
    );
    assert!(sample.run("PRAGMA table_info(orders)").await.is_ok());
    assert!(sample.run("EXPLAIN QUERY PLAN SELECT * FROM orders").await.is_ok());
}

/// Asserts that each statement is refused as invalid and that the file is unchanged.
async fn assert_all_refused(sample: &SampleDatabase, table: &[String]) {
    let before = sample.hash();
    for sql in table {
        let excerpt: String = sql.chars().take(70).collect();
        let Err(fault) = sample.run(sql).await else { panic!("{excerpt} was run") };
        assert_eq!(fault.code, Code::ValidationError, "{excerpt}: {fault}");
        assert_eq!((fault.side_effect, fault.retryable), (SideEffect::None, false), "{excerpt}");
        assert!(fault.message.len() < 300, "{excerpt}: {fault}");
        assert_eq!(sample.hash(), before, "{excerpt}");
    }
}

#[tokio::test]
async fn statements_other_than_reads_are_refused() {
    let sample = SampleDatabase::new();
    let out = sample.folder.path().join("out.db");
    let out = out.display();
    let semicolons = format!("SELECT 1{}DELETE FROM orders", ";".repeat(50_000));
    let table = [
        "DELETE FROM orders".to_owned(),
        "INSERT INTO customers VALUES (99, 'x', 'x', 'x', 'x', 'x')".into(),
        "UPDATE products SET price = 0".into(),
        "UPDATE products SET price = 0 RETURNING id".into(),
        "DELETE FROM orders RETURNING id".into(),
        "REPLACE INTO products VALUES (1, 'x', 'x', 1, 1)".into(),
        "DROP TABLE orders".into(),
        "CREATE TABLE x (a)".into(),
        "CREATE TEMP TABLE x (a)".into(),
        "CREATE TEMP VIEW v AS SELECT 1".into(),
        "CREATE VIRTUAL TABLE v USING fts5(a)".into(),
        "CREATE TRIGGER t AFTER INSERT ON orders BEGIN SELECT 1; END".into(),
        "ALTER TABLE orders ADD COLUMN x".into(),
        "REINDEX".into(),
        "ANALYZE".into(),
        "VACUUM".into(),
        format!("VACUUM INTO '{out}'"),
        format!("ATTACH '{out}' AS other"),
        format!("ATTACH 'file:{out}?mode=rwc' AS other"),
        "ATTACH ':memory:' AS other".into(),
        "DETACH main".into(),
        "SELECT 1; DELETE FROM orders".into(),
        "SELECT 1; SELECT 2".into(),
        "SELECT 1;; /* x */ ; DROP TABLE orders; --".into(),
        "SELECT 1; not sql at all".into(),
        "DELETE FROM orders; SELECT 1".into(),
        semicolons,
        "WITH x AS (SELECT 1) DELETE FROM orders".into(),
        "WITH x AS (SELECT 1) INSERT INTO orders SELECT 99, 1, 'x', 'x' RETURNING id".into(),
        "WITH x AS (DELETE FROM orders RETURNING id) SELECT * FROM x".into(),
        "PRAGMA writable_schema = 1".into(),
        "PRAGMA query_only = 0".into(),
        "PRAGMA journal_mode = WAL".into(),
        "PRAGMA journal_mode".into(),
        "PRAGMA user_version = 7".into(),
        "PRAGMA temp_store_directory = '/tmp'".into(),
        "PRAGMA hard_heap_limit = 1".into(),
        "PRAGMA trusted_schema = 1".into(),
        "PRAGMA wal_checkpoint".into(),
        "PRAGMA optimize".into(),
        "PRAGMA database_list".into(),
        "SELECT * FROM pragma_journal_mode('wal')".into(),
        "SELECT load_extension('/tmp/evil.so')".into(),
        format!("SELECT writefile('{out}', 'x')"),
        "SELECT readfile('/etc/passwd')".into(),
        "SELECT edit('x')".into(),
        "SELECT fts3_tokenizer('simple')".into(),
        "SELECT fts3_tokenizer('simple', x'0000000000000000')".into(),
        "BEGIN".into(),
        "BEGIN IMMEDIATE".into(),
        "COMMIT".into(),
        "SAVEPOINT x".into(),
        "EXPLAIN DELETE FROM orders".into(),
        "/* only */ -- a comment".into(),
        "".into(),
        ";".into(),
        "SELEC 1".into(),
        "SELECT nothing FROM orders".into(),
        "SELECT * FROM nowhere".into(),
        "SELECT \"misspelled\" FROM orders".into(),
        "SELECT zeroblob(1000000000)".into(),
        "SELECT 1\0; DELETE FROM orders".into(),
        format!("SELECT {}1{}", "(".repeat(20_000), ")".repeat(20_000)),
        format!("SELECT '{}'", "x".repeat(100_000)),
    ];
    assert_all_refused(&sample, &table).await;
    let files: Vec<_> = std::fs::read_dir(sample.folder.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
}

#[tokio::test]
async fn large_results_are_truncated_and_marked() {
    let sample = SampleDatabase::new();
    let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n";
    let answer = sample.run(endless).await.unwrap();
    assert_eq!((&answer["row_count"], &answer["truncated"]), (&json!(1000), &json!(true)));
    assert!(answer["note"].as_str().unwrap().contains("LIMIT"));

    let exactly = sample.run(&format!("{endless} LIMIT 1000")).await.unwrap();
    assert_eq!((&exactly["row_count"], &exactly["truncated"]), (&json!(1000), &json!(false)));

    let wide = endless.replace("SELECT i FROM", "SELECT hex(zeroblob(50000)) FROM");
    let answer = sample.run(&wide).await.unwrap();
    assert_eq!((&answer["row_count"], &answer["truncated"]), (&json!(10), &json!(true)));
    assert!(answer.to_string().len() < (1 << 20) + 1000);

    let small = DatabaseSettings { max_bytes: 100, ..DatabaseSettings::default() };
    let answer = SampleDatabase::with(small).run("SELECT hex(zeroblob(200))").await.unwrap();
    assert_eq!((&answer["row_count"], &answer["truncated"]), (&json!(0), &json!(true)));
    assert!(answer["note"].as_str().unwrap().contains("row 1"));
}

const FOREVER: [&str; 4] = [
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "SELECT count(*) FROM order_items a, order_items b, order_items c, order_items d, \
     order_items e, order_items f, order_items g, order_items h, order_items i, order_items j",
    "SELECT * FROM order_items a, order_items b, order_items c, order_items d, order_items e, \
     order_items f, order_items g, order_items h, order_items i, order_items j \
     ORDER BY random() LIMIT 1",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n) SELECT 1 FROM n WHERE i < 0",
];

#[tokio::test]
async fn endless_queries_are_stopped_at_the_time_limit() {
    let settings = DatabaseSettings { timeout_ms: 300, ..DatabaseSettings::default() };
    let sample = SampleDatabase::with(settings);
    for sql in FOREVER {
        let started = Instant::now();
        let fault = sample.run(sql).await.unwrap_err();
        assert_eq!(
            (fault.code, fault.side_effect),
            (Code::Timeout, SideEffect::None),
            "{sql}: {fault}"
        );
        assert!(started.elapsed() < Duration::from_secs(2), "{sql}: {:?}", started.elapsed());
    }
}

/// Runs more queries than there are permits: if threads were not freed, the last one would hang.
#[tokio::test]
async fn cancellation_frees_the_thread() {
    let sample = SampleDatabase::new();
    for _ in 0..2 {
        for sql in FOREVER {
            let attempt = testing::attempt("database.query", &json!({"sql": sql}));
            let id = attempt.call_id.clone();
            let source = Arc::clone(&sample.source);
            let task = tokio::spawn(async move { source.start(attempt, Arc::new(|_| {})).await });
            tokio::time::sleep(Duration::from_millis(50)).await;
            sample.source.cancel(&id, 1);
            tokio::time::timeout(Duration::from_secs(1), task).await.unwrap().unwrap();
        }
    }
    let started = Instant::now();
    assert_eq!(sample.run("SELECT 1").await.unwrap()["rows"], json!([[1]]));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_missing_or_invalid_file_is_an_upstream_fault() {
    let folder = tempfile::tempdir().unwrap();
    let garbage = folder.path().join("garbage.db");
    std::fs::write(&garbage, "this is not a database, however long it is. ".repeat(100)).unwrap();
    let missing = folder.path().join("missing.db");
    for path in [&missing, &garbage, &folder.path().to_path_buf()] {
        let url = Some(format!("sqlite:{}", path.display()));
        let settings = DatabaseSettings { url, ..DatabaseSettings::default() };
        let source = testing::source(tool(folder.path(), settings).unwrap());
        let fault = testing::run(&source, &json!({"sql": "SELECT 1"})).await.unwrap_err();
        assert_eq!(fault.code, Code::UpstreamUnavailable, "{fault}");
        assert_eq!((fault.side_effect, fault.retryable), (SideEffect::None, true));
    }
    assert!(!missing.exists());
    assert!(!folder.path().join("sample.db").exists(), "a configured database needs no sample");
}

#[tokio::test]
async fn full_text_tables_can_be_queried() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.db");
    let connection = rusqlite::Connection::open(&path).unwrap();
    let script = "CREATE VIRTUAL TABLE notes USING fts5(body);
                  INSERT INTO notes VALUES ('a red hammer'), ('a blue saw');
                  CREATE VIEW red AS SELECT * FROM notes WHERE body LIKE '%red%';";
    connection.execute_batch(script).unwrap();
    drop(connection);
    let url = Some(path.display().to_string());
    let settings = DatabaseSettings { url, ..DatabaseSettings::default() };
    let source = testing::source(tool(folder.path(), settings).unwrap());
    for sql in ["SELECT body FROM notes WHERE notes MATCH 'hammer'", "SELECT * FROM red"] {
        let answer = testing::run(&source, &json!({"sql": sql})).await.unwrap();
        assert_eq!(answer["rows"], json!([["a red hammer"]]), "{sql}");
    }
    let optimize = json!({"sql": "INSERT INTO notes(notes) VALUES ('optimize')"});
    assert!(testing::run(&source, &optimize).await.is_err());
}

#[tokio::test]
async fn arguments_are_checked_and_the_definition_is_complete() {
    let sample = SampleDatabase::new();
    let fault =
        testing::run(&sample.source, &json!({"sql": "SELECT 1", "x": 1})).await.unwrap_err();
    assert!(fault.message.contains("`x`"), "{fault}");
    let definition = tool(sample.folder.path(), DatabaseSettings::default()).unwrap().definition();
    assert_eq!((definition.effect, definition.risk), (Effect::Read, Risk::Medium));
    assert_eq!(definition.timeout_ms, 10_000);
    for part in ["SAMPLE", "customers(id, name", "TOOLCRIB_BUILTIN__DATABASE__URL"] {
        assert!(definition.description.contains(part), "{part}");
    }
    assert_eq!(definition.input_schema.to_value()["required"], json!(["sql"]));
}

/// One step of SQLite cannot be interrupted: the caller does not wait for it, and the cost of such
/// steps is bounded.
#[tokio::test]
async fn uninterruptible_steps_do_not_block_the_caller() {
    let sample =
        SampleDatabase::with(DatabaseSettings { timeout_ms: 200, ..DatabaseSettings::default() });
    let slow = "instr(zeroblob(200000), zeroblob(100000 + a.order_id) || x'01')";
    let started = Instant::now();
    let sql = format!("SELECT {slow} FROM order_items a, order_items b, order_items c");
    let fault = sample.run(&sql).await.unwrap_err();
    assert_eq!(fault.code, Code::Timeout, "{fault}");
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    let many = format!("SELECT {} FROM order_items a", vec![slow; 17].join(", "));
    let fault = sample.run(&many).await.unwrap_err();
    assert_eq!(fault.code, Code::ValidationError, "{fault}");
    assert!(fault.message.contains("at most 16 uses of instr"), "{fault}");
    let few = format!("SELECT {}", vec!["replace('a', 'a', 'b')"; 16].join(" || "));
    assert!(sample.run(&few).await.is_ok());
}
