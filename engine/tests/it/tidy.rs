//! The coding rules that a test can check: sizes, headers, dependencies between parts.

use std::path::{Path, PathBuf};

const MAX_LINES: usize = 500;
const MAX_WIDTH: usize = 100;
const MAX_FUNCTION: usize = 80;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

fn sources(below: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![below.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|end| end == "rs") {
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                found.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

fn all() -> Vec<(String, String)> {
    ["engine", "store", "server", "bench"]
        .iter()
        .flat_map(|member| sources(&root().join(member)))
        .collect()
}

fn report(broken: &[String]) {
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

#[test]
fn files_are_short_narrow_and_say_what_they_are_for() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        let lines = text.lines().count();
        if lines > MAX_LINES {
            broken.push(format!("{name}: {lines} lines, at most {MAX_LINES}"));
        }
        if !text.starts_with("//!") {
            broken.push(format!("{name}: begins without //!"));
        }
        for (n, line) in text.lines().enumerate() {
            let width = line.chars().count();
            // A string that must be one line (a message, a table's row) may be longer.
            if width > MAX_WIDTH && !line.contains('"') {
                broken.push(format!("{name}:{}: {width} columns", n + 1));
            }
        }
    }
    report(&broken);
}

#[test]
fn functions_are_short() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        let mut began: Option<(usize, usize, String)> = None;
        for (n, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let words = line.trim_start().trim_start_matches("pub ");
            let is_fn = words.starts_with("fn ")
                || words.starts_with("async fn ")
                || words.starts_with("pub(") && words.contains(" fn ");
            if is_fn && began.is_none() && !line.trim_end().ends_with(';') {
                began = Some((n, indent, line.trim().to_owned()));
            }
            let closes = line.trim_end() == format!("{}}}", " ".repeat(indent));
            if let Some((first, at, head)) = &began
                && closes
                && indent == *at
            {
                let length = n - first + 1;
                if length > MAX_FUNCTION {
                    broken.push(format!("{name}:{}: {length} lines: {head}", first + 1));
                }
                began = None;
            }
        }
    }
    report(&broken);
}

#[test]
fn nothing_is_ignored_or_left_open() {
    let marks = ["#[ign".to_owned() + "ore", "TO".to_owned() + "DO", "FIX".to_owned() + "ME"];
    let mut broken = Vec::new();
    for (name, text) in all() {
        for (n, line) in text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) {
                broken.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    report(&broken);
}

/// Words that a part must not contain: (files, words, reason).
const ABSENT: [(&str, &[&str], &str); 7] = [
    (
        "engine/src/",
        &["std::net", "std::fs", "tokio::net", "tokio::fs", "axum", "rusqlite", "reqwest"],
        "the engine opens no socket and no file",
    ),
    (
        "engine/src/lifecycle.rs",
        &["async ", "SystemTime", "Instant::", "tracing", "metrics::", "crate::store", "rand"],
        "deciding is pure",
    ),
    ("engine/src/engine/", &["SystemTime", "Instant::now"], "the engine asks its clock"),
    (
        "store/src/",
        &["lifecycle::", "policy::decide", "crate::bus", "toolcrib::bus", "toolcrib::source"],
        "the store keeps; it decides nothing and wakes nobody",
    ),
    (
        "server/src/doors/",
        &["toolcrib_store::", "toolcrib::store", "toolcrib::bus", "crate::sources", "rusqlite"],
        "a door knows the engine and its own wire",
    ),
    (
        "server/src/sources/",
        &["toolcrib_store::", "toolcrib::store", "crate::doors", "toolcrib::engine"],
        "a source knows its port and its protocol",
    ),
    (
        "bench/src/",
        &["toolcrib_store::", "toolcrib_server::"],
        "the floor owes the product nothing",
    ),
];

#[test]
fn nobody_knows_what_it_must_not() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        for (part, words, why) in ABSENT {
            if !name.starts_with(part) {
                continue;
            }
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in code {
                for word in words.iter().filter(|word| line.contains(**word)) {
                    broken.push(format!("{name}: {word}: {why}: {}", line.trim()));
                }
            }
        }
    }
    report(&broken);
}

#[test]
fn dependencies_point_down() {
    let manifest =
        |member: &str| std::fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
    let engine = manifest("engine");
    for word in ["toolcrib-store", "toolcrib-server", "axum", "rusqlite", "reqwest", "hyper"] {
        assert!(!engine.contains(word), "the engine depends on {word}");
    }
    for feature in ["\"net\"", "\"fs\"", "\"full\"", "\"process\""] {
        assert!(!engine.contains(feature), "the engine's tokio has {feature}");
    }
    assert!(!manifest("store").contains("toolcrib-server"));
}

#[test]
fn names_say_what_things_are() {
    let endings = ["Manager", "Handler", "Helper", "Processor", "Service", "Impl", "Info", "Data"];
    let mut broken = Vec::new();
    for (name, text) in all() {
        for line in text.lines() {
            let words =
                line.trim_start().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
            let Some(rest) =
                ["struct ", "enum ", "trait "].iter().find_map(|k| words.strip_prefix(k))
            else {
                continue;
            };
            let ident: String = rest.chars().take_while(|c| c.is_alphanumeric()).collect();
            if endings.iter().any(|ending| ident.ends_with(ending)) {
                broken.push(format!("{name}: {ident}"));
            }
        }
    }
    report(&broken);
}

#[test]
fn every_dependency_has_its_reason() {
    let reasons = std::fs::read_to_string(root().join("docs/adr/dependencies.md")).unwrap();
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, rest) = manifest.split_once("[workspace.dependencies]").unwrap();
    let (table, _) = rest.split_once("\n[").unwrap();
    let missing: Vec<&str> = table
        .lines()
        .filter_map(|line| line.split_once(" = ").map(|(name, _)| name.trim()))
        .filter(|name| !name.starts_with("toolcrib"))
        .filter(|name| !reasons.contains(&format!("`{name}`")))
        .collect();
    assert!(missing.is_empty(), "docs/adr/dependencies.md has no line for {missing:?}");
}
