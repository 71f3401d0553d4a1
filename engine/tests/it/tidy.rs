//! The coding rules that a test can check: sizes, headers, dependencies between parts.

use std::path::{Path, PathBuf};

const MAX_FILES: usize = 16;
const MAX_LINES: usize = 800;
const MAX_WIDTH: usize = 100;
const MAX_FUNCTION: usize = 80;

/// The crates of the workspace. Each may use those before it, with the exceptions that
/// `dependencies_point_down` lists.
const MEMBERS: [&str; 7] =
    ["engine", "store", "protocol", "sources", "transport", "server", "bench"];

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
    MEMBERS.iter().flat_map(|member| sources(&root().join(member))).collect()
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
fn folders_have_few_files() {
    let mut folders = std::collections::BTreeMap::<String, usize>::new();
    for (name, _) in MEMBERS.iter().flat_map(|member| sources(&root().join(member).join("src"))) {
        if name.ends_with("tests.rs") || name.contains("/tests/") {
            continue;
        }
        let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
        *folders.entry(folder.to_owned()).or_default() += 1;
    }
    let wide = folders.into_iter().filter(|(_, files)| *files > MAX_FILES);
    let broken: Vec<_> =
        wide.map(|(name, files)| format!("{name}: {files} files, at most {MAX_FILES}")).collect();
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
const ABSENT: [(&str, &[&str], &str); 6] = [
    (
        "engine/src/",
        &["std::net", "std::fs", "tokio::net", "tokio::fs", "axum", "rusqlite", "reqwest"],
        "the engine opens no socket and no file",
    ),
    (
        "engine/src/lifecycle.rs",
        &["async ", "SystemTime", "Instant::", "tracing", "metrics::", "crate::ports", "rand"],
        "deciding is pure",
    ),
    ("engine/src/calls/", &["SystemTime", "Instant::now"], "the engine reads its clock port"),
    (
        "store/src/",
        &["lifecycle::", "access_rules::decide", "toolcrib::ports::bus", "toolcrib::ports::source"],
        "the store persists; it decides nothing and wakes no listener",
    ),
    (
        "transport/src/",
        &["toolcrib::ports::store", "toolcrib::ports::bus", "rusqlite"],
        "a transport knows the engine and its own wire format",
    ),
    (
        "sources/src/",
        &["toolcrib::ports::store", "toolcrib::Engine", "toolcrib::engine"],
        "a source knows its port and its protocol",
    ),
];

#[test]
fn parts_do_not_contain_forbidden_words() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        for (part, words, reason) in ABSENT {
            if !name.starts_with(part) {
                continue;
            }
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for line in code {
                for word in words.iter().filter(|word| line.contains(**word)) {
                    broken.push(format!("{name}: {word}: {reason}: {}", line.trim()));
                }
            }
        }
    }
    report(&broken);
}

#[test]
fn dependencies_point_down() {
    let manifest = |member: &str| {
        let text = std::fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap();
        text.split_once("[dev-dependencies]").map_or(text.clone(), |(before, _)| before.to_owned())
    };
    let engine = manifest("engine");
    for word in ["toolcrib-", "axum", "rusqlite", "reqwest", "hyper"] {
        assert!(!engine.replace("name = \"toolcrib", "").contains(word), "the engine uses {word}");
    }
    for feature in ["\"net\"", "\"fs\"", "\"full\"", "\"process\""] {
        assert!(!engine.contains(feature), "the engine's tokio has {feature}");
    }
    let forbidden = [
        ("store", ["protocol", "sources", "transport", "server"].as_slice()),
        ("protocol", &["store", "sources", "transport", "server"]),
        ("sources", &["store", "transport", "server"]),
        ("transport", &["store", "sources", "server"]),
    ];
    for (member, others) in forbidden {
        for other in others {
            let used = manifest(member).contains(&format!("toolcrib-{other}."));
            assert!(!used, "{member} depends on {other}");
        }
    }
}

/// The layers of the engine. A module uses only those before it.
const LAYERS: [&str; 15] = [
    "domain",
    "schema",
    "lifecycle",
    "results",
    "model_formats",
    "ports",
    "registry",
    "clients",
    "calls",
    "approvals",
    "utp",
    "webhooks",
    "runs",
    "maintenance",
    "engine",
];

#[test]
fn the_engines_layers_have_no_circles() {
    let mut broken = Vec::new();
    for (name, text) in sources(&root().join("engine/src")) {
        let module = name.trim_start_matches("engine/src/").trim_end_matches(".rs");
        let module = module.split('/').next().unwrap_or_default();
        let Some(layer) = LAYERS.iter().position(|layer| *layer == module) else { continue };
        let product = text.split("#[cfg(test)]").next().unwrap_or_default();
        let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
        for line in product.lines().filter(|line| !is_test && !line.trim_start().starts_with("//"))
        {
            for above in &LAYERS[layer + 1..] {
                let used = line.split(&format!("crate::{above}")).nth(1);
                if used.is_some_and(|rest| {
                    !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                }) {
                    broken.push(format!("{name}: {module} uses {above}: {}", line.trim()));
                }
            }
        }
    }
    report(&broken);
}

/// Collects the paths at the beginning of `rest`, below `prefix`: `a::{b, c::d}` has two. Returns
/// the text after them.
fn collect_paths<'a>(rest: &'a str, prefix: &[&'a str], found: &mut Vec<Vec<&'a str>>) -> &'a str {
    let rest = rest.trim_start();
    if let Some(mut rest) = rest.strip_prefix('{') {
        while !rest.is_empty() && !rest.starts_with('}') {
            let after = collect_paths(rest, prefix, found).trim_start();
            // A rename ends its path; the next one begins after the comma.
            let end = after.find([',', '}']).unwrap_or(after.len());
            rest = after[end..].strip_prefix(',').unwrap_or(&after[end..]).trim_start();
        }
        return rest.strip_prefix('}').unwrap_or(rest);
    }
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    let path: Vec<&str> = prefix.iter().copied().chain([&rest[..end]]).collect();
    match rest[end..].strip_prefix("::") {
        Some(below) => collect_paths(below, &path, found),
        None => {
            found.push(path);
            &rest[end..]
        }
    }
}

/// Returns the modules of a crate that a module names by a path from `crate`, `super` or `self`.
fn used_modules(
    module: &[String],
    text: &str,
    modules: &std::collections::BTreeMap<Vec<String>, String>,
) -> Vec<Vec<String>> {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut used = Vec::new();
    for root in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(root) {
            let is_inside = code[..at].ends_with(|c: char| c.is_alphanumeric() || "_:".contains(c));
            let mut paths = Vec::new();
            if !is_inside {
                collect_paths(&code[at..], &[], &mut paths);
            }
            for path in paths {
                let supers = path.iter().take_while(|word| **word == "super").count();
                let base = match path[0] {
                    "crate" => &[][..],
                    _ => &module[..module.len().saturating_sub(supers)],
                };
                let below = path.iter().skip(supers.max(1)).map(|word| (*word).to_owned());
                let mut target: Vec<String> = base.iter().cloned().chain(below).collect();
                while !modules.contains_key(&target) && target.pop().is_some() {}
                used.push(target);
            }
        }
    }
    used
}

#[test]
fn modules_beside_each_other_have_no_circles() {
    let mut broken = Vec::new();
    for member in MEMBERS {
        let folder = root().join(member).join("src");
        let files = sources(&folder)
            .into_iter()
            .filter(|(name, _)| !name.ends_with("tests.rs") && !name.contains("/tests/"));
        let modules: std::collections::BTreeMap<Vec<String>, String> = files
            .map(|(name, text)| {
                let inner = name.split_once("/src/").map_or("", |(_, inner)| inner);
                let inner = inner.trim_end_matches(".rs");
                let product = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
                let path = inner.split('/').filter(|part| !["lib", "main"].contains(part));
                (path.map(str::to_owned).collect(), product.to_owned())
            })
            .collect();
        // Each edge is between two children of one module.
        let mut edges = std::collections::BTreeSet::new();
        for (module, text) in &modules {
            for used in used_modules(module, text, &modules) {
                let common = module.iter().zip(&used).take_while(|(a, b)| a == b).count();
                if let (Some(a), Some(b)) = (module.get(common), used.get(common)) {
                    edges.insert((module[..common].to_vec(), a.clone(), b.clone()));
                }
            }
        }
        for (parent, from, to) in &edges {
            let mut reached = vec![to];
            let mut next = 0;
            while let Some(at) = reached.get(next).copied() {
                let siblings = edges.iter().filter(|(p, a, _)| p == parent && a == at);
                for (_, _, b) in siblings {
                    if !reached.contains(&b) {
                        reached.push(b);
                    }
                }
                next += 1;
            }
            if reached.contains(&from) {
                broken.push(format!("{member}/src/{}: {from} uses {to}", parent.join("/")));
            }
        }
    }
    report(&broken);
}

/// Returns the names of the types that a file defines outside its tests.
fn type_names(text: &str) -> Vec<String> {
    let product = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let defined = product.lines().filter_map(|line| {
        let words = line.trim_start();
        let words = words.strip_prefix("pub(crate) ").unwrap_or(words);
        let words = words.strip_prefix("pub(super) ").unwrap_or(words);
        let words = words.strip_prefix("pub ").unwrap_or(words);
        let rest = ["struct ", "enum ", "trait "].iter().find_map(|k| words.strip_prefix(k))?;
        Some(rest.chars().take_while(|c| c.is_alphanumeric()).collect::<String>())
    });
    defined.filter(|name| name.starts_with(char::is_uppercase)).collect()
}

/// Types that share a name because their module makes it plain: the same part of both stores.
const SHARED_NAMES: [(&str, &str); 4] = [
    ("store", "CallInsert"),
    ("store", "Change"),
    ("store", "FunctionChange"),
    ("store", "WriterConnection"),
];

#[test]
fn type_names_are_unique_within_a_crate() {
    let mut broken = Vec::new();
    for member in MEMBERS {
        let mut seen = std::collections::HashMap::new();
        for (name, text) in sources(&root().join(member).join("src")) {
            if name.ends_with("tests.rs") || name.contains("/tests/") {
                continue;
            }
            for ident in type_names(&text) {
                if SHARED_NAMES.contains(&(member, ident.as_str())) {
                    continue;
                }
                if let Some(other) = seen.insert(ident.clone(), name.clone()) {
                    broken.push(format!("{ident}: {other} and {name}"));
                }
            }
        }
    }
    report(&broken);
}

/// Words of an earlier private vocabulary. `docs/GLOSSARY.md` has the term for each.
const RETIRED_TYPES: [&str; 40] = [
    "Among", "Surely", "Ahead", "Behind", "Beside", "Told", "Said", "Asked", "Shown", "Taken",
    "Handed", "Kept", "Held", "Noted", "Happened", "Awaited", "Seen", "Spent", "Saved", "Coming",
    "Together", "Silence", "Keeper", "Clerk", "Teller", "Leash", "Errand", "Ledger", "Desk",
    "Wallet", "Room", "Place", "Talk", "Terms", "Wanted", "Ears", "Shelf", "Letter", "News",
    "Door",
];

/// Subjects that name no actor.
const VAGUE: [&str; 5] = ["nobody", "somebody", "whoever", "anybody", "the crib"];

/// Returns the string literals of Rust code, each on one line, and the code without literals and
/// comments.
fn split_literals(code: &str) -> (Vec<String>, String) {
    let (mut literals, mut bare) = (Vec::new(), String::new());
    let (mut rest, mut is_in_word) = (code, false);
    while let Some(next) = rest.chars().next() {
        let raw = rest.strip_prefix('r').filter(|_| !is_in_word).map(|s| s.trim_start_matches('#'));
        let is_escaped_char = rest.starts_with("'\\");
        is_in_word = next.is_alphanumeric() || next == '_';
        let length = if rest.starts_with("//") {
            bare.push(' ');
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(body) = raw.and_then(|s| s.strip_prefix('"')) {
            let hashes = rest.len() - body.len() - 2;
            let end = format!("\"{}", "#".repeat(hashes));
            let length = body.find(&end).unwrap_or(body.len());
            literals.push(body[..length].to_owned());
            bare.push(' ');
            (hashes + 2 + length + end.len()).min(rest.len())
        } else if let Some(body) = rest.strip_prefix('"') {
            let mut is_escaped = false;
            let end = body.find(|c| {
                let ends = c == '"' && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                ends
            });
            let length = end.unwrap_or(body.len());
            literals.push(body[..length].replace("\\\n", " "));
            bare.push(' ');
            (length + 2).min(rest.len())
        } else if is_escaped_char {
            3 + rest[3..].find('\'').unwrap_or(0) + 1
        } else if rest.starts_with("'\"'") {
            3
        } else {
            bare.push(next);
            next.len_utf8()
        };
        rest = &rest[length..];
    }
    let words = |literal: String| literal.split_whitespace().collect::<Vec<_>>().join(" ");
    (literals.into_iter().map(words).collect(), bare)
}

#[test]
fn string_literals_are_found() {
    let code = r##"let a = "one \
        two"; // "no"
        f(b"three", '"', '\'', '\u{22}', r#"four "4""#, "five \"5\"");"##;
    let expected = ["one two", "three", "four \"4\"", "five \\\"5\\\""];
    let (literals, bare) = split_literals(code);
    assert_eq!(literals, expected);
    assert_eq!(bare.split_whitespace().collect::<String>(), "leta=;f(b,,,,,);");
}

/// Words of an earlier private vocabulary that name no variable, parameter, field or function.
/// `docs/GLOSSARY.md` has the term for each.
const RETIRED_NAMES: [&str; 33] = [
    "asked",
    "asker",
    "asking",
    "awaited",
    "beside",
    "clerk",
    "crib",
    "desk",
    "dialing",
    "dialled",
    "discreet",
    "ear",
    "ears",
    "errand",
    "happening",
    "judged",
    "keeper",
    "ledger",
    "lent",
    "minter",
    "notice",
    "patience",
    "recognise",
    "rung",
    "shelf",
    "silence",
    "talk",
    "tap",
    "tape",
    "teller",
    "terms",
    "told",
    "trouble",
];

#[test]
fn retired_names_stay_out() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        let (_, bare) = split_literals(&text);
        for word in bare.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if RETIRED_NAMES.contains(&word.trim_start_matches('_')) {
                broken.push(format!("{name}: {word}"));
            }
        }
    }
    broken.dedup();
    report(&broken);
}

#[test]
fn retired_words_stay_out() {
    let mut broken = Vec::new();
    for (name, text) in all() {
        if name.ends_with("tidy.rs") {
            continue;
        }
        for ident in type_names(&text) {
            if RETIRED_TYPES.contains(&ident.as_str()) {
                broken.push(format!("{name}: type {ident}"));
            }
        }
        let comments = text.lines().map(str::trim_start).filter(|line| line.starts_with("//"));
        let comments = comments.filter(|_| name.contains("/src/")).map(str::to_owned);
        // The data of tests may contain any word.
        let is_test = name.ends_with("tests.rs") || name.contains("/tests/");
        let product = text.split("\nmod tests {").next().filter(|_| !is_test).unwrap_or_default();
        for passage in comments.chain(split_literals(product).0) {
            let lower = passage.to_lowercase();
            for word in VAGUE.iter().filter(|word| lower.contains(**word)) {
                broken.push(format!("{name}: \"{word}\": {passage}"));
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

/// Names on the page of the architecture that the code does not have: those of an example source,
/// and the prefix of names in MCP's `_meta`.
const EXAMPLE_NAMES: [&str; 3] = ["GrpcSettings", "sources/src/grpc.rs", "toolcrib/"];

/// Returns the files and folders of the repository. A folder ends with `/`.
fn repository_paths() -> Vec<String> {
    let (mut found, mut folders) = (Vec::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            if name.starts_with('.') || path.ends_with("target") || path.ends_with("node_modules") {
                continue;
            }
            if path.is_dir() {
                found.push(format!("{name}/"));
                folders.push(path);
            } else {
                found.push(name);
            }
        }
    }
    found
}

/// Returns the paths that a pattern stands for: `{a,b}.rs` is two files, `…/` any folder.
fn expand_pattern(pattern: &str) -> Vec<String> {
    let pattern = pattern.trim_start_matches("…/");
    let Some((before, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let (choices, after) = rest.split_once('}').unwrap_or((rest, ""));
    choices.split(',').map(|choice| format!("{before}{choice}{after}")).collect()
}

fn is_path(span: &str) -> bool {
    let ends = [".rs", ".md", ".json", ".toml", "/"];
    !span.starts_with('/') && !span.contains(' ') && ends.iter().any(|end| span.ends_with(end))
}

/// Returns the identifiers of a span: `Catalog::authorize` and `attempt.command` have two.
fn identifiers(span: &str) -> Vec<&str> {
    let span = span.strip_suffix("()").unwrap_or(span);
    let words: Vec<&str> = span.split("::").flat_map(|part| part.split('.')).collect();
    let is_word = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if words.iter().all(is_word) { words } else { Vec::new() }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Returns the files and names that stand beside each other on a page, whose text and spans in
/// backticks take turns: `a.rs` `name`, `name` in `a.rs`, `name` (`a.rs`).
fn names_beside_files<'a>(pieces: &[&'a str]) -> Vec<(&'a str, &'a str)> {
    let pairs = (1..pieces.len().saturating_sub(2)).step_by(2).filter_map(|index| {
        let (span, next) = (pieces[index], pieces[index + 2]);
        match pieces[index + 1].trim() {
            "" if span.ends_with(".rs") => Some((span, next)),
            "in" | "of" | "(" if next.ends_with(".rs") => Some((next, span)),
            _ => None,
        }
    });
    pairs.filter(|(file, name)| !is_path(name) && !EXAMPLE_NAMES.contains(file)).collect()
}

#[test]
fn the_architecture_page_names_what_exists() {
    let page = std::fs::read_to_string(root().join("docs/ARCHITECTURE.md")).unwrap();
    let prose: String = page.split("```").step_by(2).collect();
    let pieces: Vec<&str> = prose.split('`').collect();
    let (paths, code) = (repository_paths(), all());
    let is_at = |name: &str, path: &str| name == path || name.ends_with(&format!("/{path}"));
    let product = code.iter().filter(|(name, _)| !name.ends_with("tidy.rs"));
    let known: std::collections::HashSet<&str> =
        product.flat_map(|(_, text)| words(text)).collect();
    let mut broken = Vec::new();
    for span in pieces.iter().skip(1).step_by(2).filter(|span| !EXAMPLE_NAMES.contains(*span)) {
        if is_path(span) {
            let expanded = expand_pattern(span).into_iter();
            let missing = expanded.filter(|path| !paths.iter().any(|name| is_at(name, path)));
            broken.extend(missing.map(|path| format!("{path} does not exist")));
        } else {
            let unknown = identifiers(span).into_iter().filter(|word| !known.contains(word));
            broken.extend(unknown.map(|word| format!("{word} is not in the code: {span}")));
        }
    }
    for (path, span) in names_beside_files(&pieces) {
        let Some(word) = identifiers(span).pop() else { continue };
        let mut files = code.iter().filter(|(name, _)| is_at(name, path));
        if !files.any(|(_, text)| words(text).any(|other| other == word)) {
            broken.push(format!("{span} is not in {path}"));
        }
    }
    report(&broken);
}
