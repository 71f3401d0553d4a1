//! T48: the check of the dependencies finds denied versions, advisories and advisories that are too
//! old, and writes the bill of materials.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Runs the check. Returns whether it succeeded, and its output.
fn check(arguments: &[&str]) -> (bool, String) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new("python3");
    command.arg("scripts/check-dependencies").arg("--builtin").args(arguments).current_dir(root);
    let ran = command.output().unwrap();
    let output = [ran.stdout, ran.stderr].concat();
    (ran.status.success(), String::from_utf8(output).unwrap())
}

/// Writes a database of one advisory.
fn write_advisory(directory: &Path, package: &str, date: &str, patched: &str) {
    let folder = directory.join("crates").join(package);
    std::fs::create_dir_all(&folder).unwrap();
    let text = format!(
        "```toml\n[advisory]\nid = \"RUSTSEC-2026-9999\"\npackage = \"{package}\"\ndate = \"{date}\"\n\
         [versions]\npatched = [\"{patched}\"]\n```\n\n# A fault\n"
    );
    std::fs::write(folder.join("RUSTSEC-2026-9999.md"), text).unwrap();
}

/// Returns today's date, as the check sees it.
fn today() -> String {
    let shown = Command::new("date").arg("+%F").output().unwrap();
    String::from_utf8(shown.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_denied_version_fails_the_check() {
    let directory = tempfile::tempdir().unwrap();
    let rules = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../deny.toml"));
    let rules = rules.unwrap();
    assert!(rules.contains("rmcp@<1.4.0"), "{rules}");
    let config = directory.path().join("deny.toml");
    std::fs::write(&config, rules.replace("rmcp@<1.4.0", "rmcp@<1000.0.0")).unwrap();
    let (succeeded, output) = check(&["--config", config.to_str().unwrap()]);
    assert!(!succeeded && output.contains("deny.toml denies it"), "{output}");
    let (succeeded, output) = check(&[]);
    assert!(succeeded, "{output}");
}

#[test]
fn an_advisory_and_an_old_database_fail_the_check() {
    let directory = tempfile::tempdir().unwrap();
    let database = directory.path().to_str().unwrap().to_owned();
    write_advisory(directory.path(), "tokio", &today(), ">= 1000.0.0");
    let (succeeded, output) = check(&["--advisories", &database]);
    assert!(!succeeded && output.contains("RUSTSEC-2026-9999"), "{output}");
    write_advisory(directory.path(), "tokio", &today(), ">= 1.0.0");
    let (succeeded, output) = check(&["--advisories", &database]);
    assert!(succeeded && output.contains("1 advisories"), "{output}");
    write_advisory(directory.path(), "tokio", "2020-01-01", ">= 1.0.0");
    let (succeeded, output) = check(&["--advisories", &database]);
    assert!(!succeeded && output.contains("days old, more than 90"), "{output}");
    let (succeeded, output) = check(&["--advisories", &database, "--max-age", "100000"]);
    assert!(succeeded, "{output}");
}

#[test]
fn the_bill_of_materials_names_every_dependency_with_its_checksum() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("sbom.json");
    let (succeeded, output) = check(&["--sbom", file.to_str().unwrap()]);
    assert!(succeeded, "{output}");
    let bill: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(bill["bomFormat"], "CycloneDX");
    let components = bill["components"].as_array().unwrap();
    let find = |name: &str| components.iter().find(|component| component["name"] == name);
    let rusqlite = find("rusqlite").unwrap();
    assert!(rusqlite["hashes"][0]["content"].as_str().is_some_and(|hash| hash.len() == 64));
    assert!(find("toolcrib").is_some() && components.len() > 200, "{}", components.len());
}
