//! The pages of `docs/integrations`: the table of their behavior is complete, and the programs of
//! some of them run in the short form of every cell. The part `frameworks` runs all of them in the
//! long form.
//!
//! `frameworks/matrix.py` extracts the programs from the pages and compares what it sees with the
//! table. Without the variables that `scripts/test` sets, the programs are skipped.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::mcp::clients::directory;
use crate::support::process::TOOLCRIB;

const CELLS: [&str; 9] =
    ["list", "call", "structure", "invalid", "slow", "question", "kill", "big", "names"];

/// Maximum duration of all cells of a page.
const PATIENCE: Duration = Duration::from_secs(600);

/// The pages, each with the directory of the packages that its program needs.
pub const PAGES: [(&str, &str); 15] = [
    ("fastmcp", "python"),
    ("google-adk", "python"),
    ("langchain", "python-langchain"),
    ("llamaindex", "python-llamaindex"),
    ("mastra", "node"),
    ("mcp-inspector", "node"),
    ("mcp-python", "python"),
    ("mcp-typescript-v1", "node"),
    ("mcp-typescript-v2", "node"),
    ("openai-agents-javascript", "node"),
    ("openai-agents-python", "python"),
    ("openai-javascript", "node"),
    ("openai-python", "python"),
    ("pydantic-ai", "python"),
    ("vercel-ai-sdk", "node"),
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn page_text(name: &str) -> String {
    let file = repository().join("docs/integrations").join(format!("{name}.md"));
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Returns the rows of the table, each with the name of its page and the words of its cells.
fn table_rows() -> Vec<(String, Vec<String>)> {
    let table = page_text("README");
    let rows = table.lines().filter_map(|line| {
        let cells = line.strip_prefix("| [")?.strip_suffix('|')?;
        let mut cells = cells.split('|').map(|cell| cell.trim().to_owned());
        let page = cells.next()?.rsplit_once('(')?.1.split_once(".md")?.0.to_owned();
        Some((page, cells.collect()))
    });
    rows.collect()
}

/// Returns the number of programs of a page.
fn count_programs(page: &str) -> usize {
    let is_program = |line: &&str| matches!(*line, "```python" | "```javascript" | "```sh");
    page_text(page).lines().filter(is_program).count()
}

#[test]
fn every_client_has_a_page_a_test_and_an_expected_result_in_every_cell() {
    let rows = table_rows();
    for (page, words) in &rows {
        assert_eq!(words.len(), CELLS.len(), "{page}: {words:?}");
        for (cell, word) in CELLS.iter().zip(words) {
            let known: &[&str] = match *cell {
                "structure" => &["structure"],
                "invalid" => &["message", "own-check"],
                "slow" => &["result", "ticket"],
                "question" => &["asked", "person", "ticket"],
                "kill" => &["result", "repeat"],
                "big" => &["digest"],
                _ => &["yes"],
            };
            assert!(known.contains(&word.as_str()), "{page}, {cell}: {word:?}");
        }
    }
    let files = std::fs::read_dir(repository().join("docs/integrations")).unwrap();
    let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let pages: BTreeSet<String> = files
        .filter_map(|file| file.strip_suffix(".md").map(str::to_owned))
        .filter(|page| page != "README")
        .collect();
    let tested: BTreeSet<String> = PAGES.iter().map(|(page, _)| (*page).to_owned()).collect();
    assert_eq!(pages, tested, "the files of docs/integrations, and the tested pages");
    for page in &pages {
        let listed = rows.iter().filter(|(row, _)| row == page).count();
        assert_eq!(listed, count_programs(page), "{page}: rows of the table, and programs");
    }
    assert_eq!(rows.len(), pages.iter().map(|page| count_programs(page)).sum::<usize>());
}

#[test]
fn pages_name_the_versions_that_the_tests_install() {
    let versions = std::fs::read_to_string(repository().join("scripts/lib/common.sh")).unwrap();
    let pinned: BTreeSet<&str> = versions
        .lines()
        .filter_map(|line| line.split_once("_version=\"")?.1.strip_suffix('"'))
        .collect();
    for (page, _) in PAGES {
        let text = page_text(page);
        let install = text.lines().find(|line| line.contains(" install ")).unwrap_or_default();
        let named = install.split([' ', '\'']).filter_map(|word| {
            let (_, version) = word.rsplit_once("==").or_else(|| word.rsplit_once('@'))?;
            version.starts_with(|c: char| c.is_ascii_digit()).then_some(version)
        });
        let named: Vec<&str> = named.collect();
        assert!(!named.is_empty(), "{page}: {install}");
        assert!(named.iter().all(|version| pinned.contains(version)), "{page}: {named:?}");
    }
}

/// The duration of the slow calls.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A few seconds.
    Short,
    /// A call of 60 seconds, and a kill during a call of ten.
    Long,
}

/// Runs the programs of a page in all cells, and compares what is seen with the table.
pub async fn check_page(page: &str, runtime: &Path, form: Form) {
    let mut command = Command::new("python3");
    command.arg(repository().join("server/tests/it/frameworks/matrix.py")).arg(page);
    let docs = repository().join("docs");
    let options: [(&str, OsString); 3] =
        [("--toolcrib", TOOLCRIB.into()), ("--runtime", runtime.into()), ("--docs", docs.into())];
    for (option, value) in options {
        command.arg(option).arg(value);
    }
    if form == Form::Short {
        command.arg("--short");
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1").kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{page}: no end")).unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{page}: {out}\n{err}");
    let lines: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect();
    let wrong: Vec<&Value> = lines.iter().filter(|line| line["seen"] != line["expected"]).collect();
    assert!(wrong.is_empty(), "{page}: {wrong:#?}\n{err}");
    for program in 0..count_programs(page) {
        for cell in CELLS {
            let is_it = |line: &&Value| line["program"] == program && line["cell"] == cell;
            assert_eq!(lines.iter().filter(is_it).count(), 1, "{page}, program {program}: {cell}");
        }
    }
}

async fn check_short(page: &str, variable: &str) {
    let Some(runtime) = directory(variable) else { return };
    check_page(page, &runtime, Form::Short).await;
}

#[tokio::test]
async fn the_mcp_sdk_for_python_works_as_its_page_says() {
    check_short("mcp-python", "TOOLCRIB_TEST_MCP_PYTHON").await;
}

#[tokio::test]
async fn the_mcp_sdks_for_typescript_work_as_their_pages_say() {
    check_short("mcp-typescript-v1", "TOOLCRIB_TEST_MCP_NODE").await;
    check_short("mcp-typescript-v2", "TOOLCRIB_TEST_MCP_NODE").await;
}

#[tokio::test]
async fn the_openai_sdk_for_python_works_as_its_page_says() {
    check_short("openai-python", "TOOLCRIB_TEST_OPENAI_PYTHON").await;
}

#[tokio::test]
async fn the_openai_sdk_for_javascript_works_as_its_page_says() {
    check_short("openai-javascript", "TOOLCRIB_TEST_OPENAI_NODE").await;
}

#[tokio::test]
async fn openai_agents_for_python_works_as_its_page_says() {
    check_short("openai-agents-python", "TOOLCRIB_TEST_OPENAI_PYTHON").await;
}
