//! Digests and slices as a model uses them: facts of large results that a short digest must state,
//! and questions that few reads must answer.

use serde_json::{Value, json};
use toolcrib::registry::RESULT_READ;
use toolcrib::results::digest::{DigestSource, digest};
use toolcrib::results::slice::{RowQuery, SliceContent, SliceQuery, read_slice};
use toolcrib::{CallId, Json};

/// A question about a result, with the texts that answer it: one of each group must be shown.
struct Question {
    text: &'static str,
    facts: &'static [&'static [&'static str]],
    /// Text of the answer that the reads return.
    answer: &'static str,
    /// Reads that answer it without a digest.
    reads: &'static [Read],
}

/// One use of `result.read`.
#[derive(Clone, Copy)]
struct Read {
    pointer: &'static str,
    grep: &'static str,
    conditions: &'static str,
    select: &'static str,
    aggregate: &'static str,
    group_by: &'static str,
}

const READ: Read =
    Read { pointer: "", grep: "", conditions: "", select: "", aggregate: "", group_by: "" };

struct Case {
    name: &'static str,
    data: Value,
    questions: [Question; 3],
}

fn mcp_text(text: String) -> Value {
    json!({ "content": [{ "type": "text", "text": text }], "isError": false })
}

fn orders() -> Case {
    let row = |n: usize| {
        let city = ["Lyon", "Turin", "Graz"][n % 3];
        let status = match n {
            _ if n % 97 == 5 => "past_due",
            _ if n.is_multiple_of(3) => "shipped",
            _ => "paid",
        };
        let customer = format!("Customer {:04}", n * 7 % 1_200);
        json!({ "id": 40_000 + n, "customer": customer, "status": status,
            "amount": (n as f64 * 13.7 % 950.0 * 100.0).round() / 100.0, "city": city,
            "created_at": format!("2025-{:02}-{:02}T08:00:00Z", n % 12 + 1, n % 28 + 1) })
    };
    let rows: Vec<Value> = (0..1_200).map(row).collect();
    Case {
        name: "orders",
        data: json!({ "orders": rows, "next_page": null }),
        questions: [
            Question {
                text: "How many orders are past_due?",
                facts: &[&["past_due 13"]],
                answer: r#""count":13"#,
                reads: &[Read {
                    conditions: r#"{"status":"past_due"}"#,
                    aggregate: "count",
                    ..READ
                }],
            },
            Question {
                text: "Which status does order 40877 have?",
                facts: &[&[r#""Customer 0139",40877,"paid"]"#]],
                answer: r#""status":"paid""#,
                reads: &[Read { conditions: r#"{"id":40877}"#, ..READ }],
            },
            Question {
                text: "When was the first and the last order created_at?",
                facts: &[&["2025-01-01T08:00:00Z to 2025-12-28T08:00:00Z"]],
                answer: "2025-12-28T08:00:00Z",
                reads: &[Read { aggregate: "min:created_at,max:created_at", ..READ }],
            },
        ],
    }
}

fn sensors() -> Case {
    let row = |n: usize| {
        let temperature = if n == 1_733 { 88.25 } else { 20.0 + (n * 7 % 40) as f64 / 10.0 };
        json!([
            format!("2026-02-{:02} {:02}:00", n / 24 % 28 + 1, n % 24),
            format!("S{:02}", n % 24),
            temperature,
            if n % 250 == 9 { "fault" } else { "ok" }
        ])
    };
    let rows: Vec<Value> = (0..2_000).map(row).collect();
    Case {
        name: "sensors",
        data: json!({ "columns": ["time", "sensor", "temperature", "state"], "rows": rows,
            "row_count": 2_000 }),
        questions: [
            Question {
                text: "What is the highest temperature?",
                facts: &[&["88.25"]],
                answer: "88.25",
                reads: &[Read { aggregate: "max:temperature", ..READ }],
            },
            Question {
                text: "How many readings have the state fault?",
                facts: &[&["fault 8"]],
                answer: r#""state":"fault","count":8"#,
                reads: &[Read { aggregate: "count", group_by: "state", ..READ }],
            },
            Question {
                text: "At which row is the temperature 88.25 and which sensor is it?",
                facts: &[&["1733: ["], &["\"S05\""]],
                answer: "S05",
                reads: &[Read { conditions: r#"{"temperature":{"gt":80}}"#, ..READ }],
            },
        ],
    }
}

fn employees() -> Case {
    let mut text = "id,name,department,salary,email\n".to_owned();
    for n in 0..900 {
        let name = if n == 512 { "Okafor, Ines".to_owned() } else { format!("Person {n}") };
        let department = ["Sales", "Support", "Research", "Legal"][n % 4];
        let salary = 31_000 + n * 37 % 20_000;
        let line = format!("{n},\"{name}\",{department},{salary}.50,user{n}@example.org\n");
        text.push_str(&line);
    }
    Case {
        name: "employees",
        data: mcp_text(text),
        questions: [
            Question {
                text: "What is the email of Ines Okafor?",
                facts: &[&["user512@example.org"]],
                answer: "user512@example.org",
                reads: &[Read { grep: "Okafor", ..READ }],
            },
            Question {
                text: "How many people are in the department Legal?",
                facts: &[&["Legal 225"]],
                answer: r#""count""#,
                reads: &[Read {
                    conditions: r#"{"department":"Legal"}"#,
                    aggregate: "count",
                    ..READ
                }],
            },
            Question {
                text: "What is the range of the salary?",
                facts: &[&["31000.50 to 509"]],
                answer: "31000.50",
                reads: &[Read { aggregate: "min:salary,max:salary", ..READ }],
            },
        ],
    }
}

fn server_log() -> Case {
    let mut text = String::new();
    for n in 0..8_000 {
        let time = format!("2026-03-01T{:02}:{:02}:{:02}.000Z", 6 + n / 3_600, n / 60 % 60, n % 60);
        let line = match n {
            3_217 => "ERROR payment of invoice INV-90871 declined by bank: card expired".to_owned(),
            _ if n % 400 == 7 => {
                format!("ERROR upstream inventory timed out after {} ms", 5_000 + n)
            }
            _ if n % 90 == 4 => format!("WARN slow query took {n} ms"),
            _ => format!("INFO request {n} served in {} ms", n % 50),
        };
        text.push_str(&format!("{time} {line}\n"));
    }
    Case {
        name: "server log",
        data: Value::from(text),
        questions: [
            Question {
                text: "Why did the payment of invoice INV-90871 fail?",
                facts: &[&["card expired"]],
                answer: "card expired",
                reads: &[Read { grep: "INV-90871", ..READ }],
            },
            Question {
                text: "How many errors are there?",
                facts: &[&["ERROR 21"]],
                answer: "21:",
                reads: &[Read { grep: "ERROR", ..READ }],
            },
            Question {
                text: "Which error is repeated most?",
                facts: &[&["upstream inventory timed out"]],
                answer: "upstream inventory timed out",
                reads: &[Read { grep: "ERROR", ..READ }],
            },
        ],
    }
}

fn crash() -> Case {
    let mut text: String = (0..600).map(|n| format!("starting worker {n}\n")).collect();
    text.push_str(
        "Exception in thread \"main\" java.lang.IllegalStateException: cannot load plan\n",
    );
    for n in 0..60 {
        text.push_str(&format!("\tat org.shop.plan.Loader{n}.load(Loader.java:{})\n", 100 + n));
    }
    text.push_str("Caused by: java.net.ConnectException: ledger-db:5432 refused\n");
    for n in 0..60 {
        text.push_str(&format!("\tat org.shop.db.Pool{n}.open(Pool.java:{})\n", 300 + n));
    }
    text.push_str("\t... 12 more\n");
    Case {
        name: "crash",
        data: json!({ "stdout": "", "stderr": text, "exit_code": 137 }),
        questions: [
            Question {
                text: "What is the root cause of the crash?",
                facts: &[&["ledger-db:5432 refused"]],
                answer: "ledger-db:5432 refused",
                reads: &[Read { grep: "Caused by", ..READ }],
            },
            Question {
                text: "Which exit_code did it have?",
                facts: &[&["\"exit_code\":137"]],
                answer: "137",
                reads: &[Read { pointer: "/exit_code", ..READ }],
            },
            Question {
                text: "In which line of Pool.java did it fail?",
                facts: &[&["Pool.java:300"]],
                answer: "Pool.java:300",
                reads: &[Read { grep: "Pool.java", ..READ }],
            },
        ],
    }
}

fn patch() -> Case {
    let mut text = String::new();
    for n in 0..30 {
        let name = if n == 17 {
            "src/billing/tax.rs".to_owned()
        } else {
            format!("src/module_{n}/lib.rs")
        };
        text.push_str(&format!(
            "diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1,20 +1,24 @@\n"
        ));
        for line in 0..20 {
            text.push_str(&format!(" context line {line} of {name}\n"));
        }
        match n {
            17 => text.push_str("-const VAT_RATE: f64 = 0.19;\n+const VAT_RATE: f64 = 0.21;\n"),
            _ => text.push_str(&format!(
                "-let old_{n} = {n};\n+let new_{n} = {n};\n+let more_{n} = {n};\n"
            )),
        }
    }
    Case {
        name: "patch",
        data: Value::from(text),
        questions: [
            Question {
                text: "How many files does the patch change?",
                facts: &[&["30 files changed"]],
                answer: "30:",
                reads: &[Read { grep: "^diff --git", ..READ }],
            },
            Question {
                text: "What is the new VAT_RATE?",
                facts: &[&["+const VAT_RATE: f64 = 0.21;"]],
                answer: "0.21",
                reads: &[Read { grep: "VAT_RATE", ..READ }],
            },
            Question {
                text: "How many lines are added and removed in total?",
                facts: &[&["+59 -30"]],
                answer: "89:",
                reads: &[Read { grep: "^[+-][^+-]", ..READ }],
            },
        ],
    }
}

fn web_page() -> Case {
    let mut html =
        "<!DOCTYPE html>\n<html><head><title>Pricing – Nordwind Cloud</title><style>".to_owned();
    html.push_str(&".a{color:red}\n".repeat(300));
    html.push_str("</style><script>var data = [1,2,3];\n</script></head><body>\n");
    for n in 0..200 {
        html.push_str(&format!("<div class=\"nav item-{n}\"><span>Menu entry {n}</span></div>\n"));
    }
    html.push_str("<h1>Plans</h1>\n<p>The Team plan costs <b>49 €</b> per month.</p>\n");
    html.push_str("<p>See our <a href=\"https://status.nordwind.example\">status page</a>.</p>\n");
    for n in 0..200 {
        html.push_str(&format!(
            "<p class=\"footer\">Legal notice number {n} &amp; more words.</p>\n"
        ));
    }
    html.push_str("</body></html>");
    Case {
        name: "web page",
        data: json!({ "status": 200, "url": "https://nordwind.example/pricing", "body": html }),
        questions: [
            Question {
                text: "What does the Team plan cost?",
                facts: &[&["The Team plan costs 49 €"]],
                answer: "49 €",
                reads: &[Read { grep: "Team plan", ..READ }],
            },
            Question {
                text: "What is the title of the page?",
                facts: &[&["Pricing – Nordwind Cloud"]],
                answer: "Pricing – Nordwind Cloud",
                reads: &[Read { grep: "<title>", ..READ }],
            },
            Question {
                text: "What is the address of the status page?",
                facts: &[&["https://status.nordwind.example"]],
                answer: "https://status.nordwind.example",
                reads: &[Read { grep: "status page", ..READ }],
            },
        ],
    }
}

fn handbook() -> Case {
    let mut text = "# Relay handbook\n\nHow to run Relay.\n\n".to_owned();
    for (n, title) in
        ["Installation", "Configuration", "Backups", "Upgrades", "Monitoring", "Limits"]
            .iter()
            .enumerate()
    {
        text.push_str(&format!("## {title}\n\n"));
        for line in 0..60 {
            text.push_str(&format!(
                "Paragraph {line} of chapter {n} explains another detail of it.\n\n"
            ));
        }
        match *title {
            "Configuration" => {
                text.push_str("The default port is 7443, set with `relay.port`.\n\n")
            }
            "Backups" => text.push_str("```sh\nrelay backup --to s3://bucket --keep 14\n```\n\n"),
            _ => {}
        }
    }
    Case {
        name: "handbook",
        data: mcp_text(text),
        questions: [
            Question {
                text: "Which port does Relay use by default?",
                facts: &[&["default port is 7443"]],
                answer: "7443",
                reads: &[Read { grep: "(?i)port", ..READ }],
            },
            Question {
                text: "Which chapters does the handbook have?",
                facts: &[&["## Installation"], &["## Upgrades"], &["## Limits"]],
                answer: "## Limits",
                reads: &[Read { grep: "^#", ..READ }],
            },
            Question {
                text: "Which command makes a backup?",
                facts: &[&["relay backup --to s3://bucket --keep 14"]],
                answer: "--keep 14",
                reads: &[Read { grep: "relay backup", ..READ }],
            },
        ],
    }
}

fn accounts() -> Case {
    let row = |n: usize| {
        let state = if n == 431 { "已冻结" } else { "正常" };
        json!({ "账号": format!("A{n:04}"), "姓名": format!("用户{n}"), "状态": state, "余额": n * 3 })
    };
    let rows: Vec<Value> = (0..700).map(row).collect();
    // As Python writes it: escaped, with spaces.
    let text = serde_json::to_string(&json!({ "账户": rows })).unwrap();
    let escaped: String = text
        .chars()
        .map(|c| if c.is_ascii() { c.to_string() } else { format!("\\u{:04x}", c as u32) })
        .collect();
    Case {
        name: "accounts",
        data: mcp_text(escaped.replace("\":", "\": ").replace(",\"", ", \"")),
        questions: [
            Question {
                text: "哪个账户已冻结？",
                facts: &[&["A0431"]],
                answer: "A0431",
                reads: &[Read { grep: "已冻结", ..READ }],
            },
            Question {
                text: "余额合计是多少？",
                facts: &[&["733950"]],
                answer: "733950",
                reads: &[Read { aggregate: "sum:余额", ..READ }],
            },
            Question {
                text: "一共有多少个账户？",
                facts: &[&["700 rows", "of 700"]],
                answer: r#""count":700"#,
                reads: &[Read { aggregate: "count", ..READ }],
            },
        ],
    }
}

fn api_description() -> Case {
    let mut paths = serde_json::Map::new();
    for n in 0..150 {
        let (path, summary) = match n {
            97 => ("/v2/payments/{id}/refund".to_owned(), "Refunds a payment".to_owned()),
            _ => (format!("/v2/resource{n}/{{id}}"), format!("Reads resource {n}")),
        };
        let parameters = json!([{ "name": "page_size", "in": "query",
            "schema": { "type": "integer", "maximum": if n == 97 { 30 } else { 200 } } }]);
        paths.insert(
            path,
            json!({ "post": { "summary": summary, "operationId": format!("op{n}"),
            "parameters": parameters, "responses": { "200": { "description": "ok" } } } }),
        );
    }
    let schema = |n: usize| json!({ "type": "object", "title": format!("T{n}") });
    let schemas: Vec<Value> = (0..60).map(schema).collect();
    Case {
        name: "API description",
        data: json!({ "openapi": "3.1.0", "info": { "title": "Ledger API", "version": "2.7.1" },
            "servers": [{ "url": "https://ledger.example/api" }], "paths": paths,
            "components": { "schemas": schemas } }),
        questions: [
            Question {
                text: "Which path refunds a payment?",
                facts: &[&["payments/{id}/refund", "payments~1{id}~1refund"]],
                answer: "payments~1{id}~1refund",
                reads: &[Read { grep: "Refunds a payment", ..READ }],
            },
            Question {
                text: "What is the base url of the servers?",
                facts: &[&["https://ledger.example/api"]],
                answer: "https://ledger.example/api",
                reads: &[Read { pointer: "/servers", ..READ }],
            },
            Question {
                text: "Which version does the API have?",
                facts: &[&["2.7.1"]],
                answer: "2.7.1",
                reads: &[Read { pointer: "/info/version", ..READ }],
            },
        ],
    }
}

fn picture() -> Case {
    let header = "iVBORw0KGgoAAAANSUhEUgAAAoAAAAHgCAYAAAA10dzkAAAABHNCSVQICAgIfAhkiAAAAAlwSFlz";
    Case {
        name: "picture",
        data: json!({ "file": "dock-camera-7.png", "taken_at": "2026-04-02T06:11:00Z",
            "data": format!("{header}{}", "AbC3dEf9".repeat(4_000)) }),
        questions: [
            Question {
                text: "What type is the data?",
                facts: &[&["PNG image"]],
                answer: ".png",
                reads: &[Read { pointer: "/file", ..READ }],
            },
            Question {
                text: "How large is the picture?",
                facts: &[&["640 × 480"]],
                answer: "iVBORw0KGgo",
                reads: &[Read { ..READ }],
            },
            Question {
                text: "When was it taken_at?",
                facts: &[&["2026-04-02T06:11:00Z"]],
                answer: "2026-04-02T06:11:00Z",
                reads: &[Read { pointer: "/taken_at", ..READ }],
            },
        ],
    }
}

fn pods() -> Case {
    let mut text = String::new();
    for n in 0..400 {
        let (phase, restarts) =
            if n == 263 { ("CrashLoopBackOff", 57) } else { ("Running", n % 3) };
        let name = format!("worker-{n:03}-x{}", n * 31 % 97);
        let pod = json!({ "metadata": { "name": name, "namespace": "batch" },
            "status": { "phase": phase, "restarts": restarts, "node": format!("node-{}", n % 5) } });
        text.push_str(&format!("{pod}\n"));
    }
    Case {
        name: "pods",
        data: json!({ "stdout": text, "exit_code": 0 }),
        questions: [
            Question {
                text: "Which pod is in CrashLoopBackOff?",
                facts: &[&["worker-263"]],
                answer: "worker-263",
                reads: &[Read { conditions: r#"{"status.phase":"CrashLoopBackOff"}"#, ..READ }],
            },
            Question {
                text: "How many pods are there?",
                facts: &[&["400 rows"]],
                answer: r#""count":400"#,
                reads: &[Read { aggregate: "count", ..READ }],
            },
            Question {
                text: "How many restarts does worker-263 have?",
                facts: &[&["\"restarts\":57"]],
                answer: r#""restarts":57"#,
                reads: &[Read { grep: "worker-263", ..READ }],
            },
        ],
    }
}

fn cases() -> Vec<Case> {
    vec![
        orders(),
        sensors(),
        employees(),
        server_log(),
        crash(),
        patch(),
        web_page(),
        handbook(),
        accounts(),
        api_description(),
        picture(),
        pods(),
    ]
}

fn states_facts(text: &str, question: &Question) -> bool {
    question.facts.iter().all(|group| group.iter().any(|fact| text.contains(fact)))
}

/// Counts the questions that digests of this size answer, and lists the others.
fn count_answered(budget: usize) -> (usize, Vec<String>) {
    let call_id: CallId = "tc_01JD0ABCDEFGHJKMNPQRSTVWXY".parse().unwrap();
    let (mut answered, mut missing) = (0, Vec::new());
    for Case { name, data, questions } in cases() {
        let data = Json::from_value(&data);
        for question in &questions {
            let hint = Some(question.text);
            let source =
                DigestSource { call_id: &call_id, tool: "some.tool", hint, reader: RESULT_READ };
            let digest = digest(&data, budget, &source).unwrap();
            assert!(digest.tokens <= budget, "{name}");
            match states_facts(&digest.text, question) {
                true => answered += 1,
                false => missing.push(format!("{name}: {}\n{}", question.text, digest.text)),
            }
        }
    }
    (answered, missing)
}

#[test]
fn digests_of_any_size_state_the_facts_that_the_next_step_needs() {
    for (budget, least) in [(200, 24), (500, 30), (2_000, 34)] {
        let (answered, missing) = count_answered(budget);
        assert!(
            answered >= least,
            "{answered} of 36 at {budget} tokens:\n{}",
            missing.join("\n====\n")
        );
        println!("{answered} of 36 facts in digests of {budget} tokens");
    }
}

#[test]
fn every_question_about_a_large_result_is_answered_in_two_reads() {
    let mut missing = Vec::new();
    for Case { name, data, questions } in cases() {
        let data = Json::from_value(&data);
        for question in &questions {
            assert!(question.reads.len() <= 2);
            let answers: Vec<String> =
                question.reads.iter().map(|read| answer(&data, read, name)).collect();
            let text = answers.join("\n");
            assert!(text.len() <= 32_000, "{name}: {} bytes", text.len());
            if !text.contains(question.answer) {
                missing.push(format!("{name}: {}\n{text}", question.text));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n====\n"));
}

fn answer(data: &Json, read: &Read, name: &str) -> String {
    let rows = RowQuery::parse_texts(
        Some(read.conditions),
        Some(read.select),
        Some(read.aggregate),
        Some(read.group_by),
    );
    let query = SliceQuery {
        pointer: read.pointer.to_owned(),
        grep: (!read.grep.is_empty()).then(|| read.grep.to_owned()),
        rows: rows.unwrap(),
        ..SliceQuery::default()
    };
    let slice = read_slice(data, &query, 16_000).unwrap_or_else(|fault| panic!("{name}: {fault}"));
    match slice.content {
        SliceContent::Value(value) => value.text().to_owned(),
        SliceContent::Matches { matches, matched } => {
            let shown = |value: &Json| match value.to_value() {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let found =
                matches.iter().map(|found| format!("{} {}", found.pointer, shown(&found.value)));
            format!("{matched}: {}", found.collect::<Vec<_>>().join("\n"))
        }
        SliceContent::Rows { value, matched, .. } => format!("{matched}: {}", value.text()),
        SliceContent::Prefix { text, .. } => text,
    }
}
