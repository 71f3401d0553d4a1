//! Tests of the command line as it is typed.

#![allow(clippy::unwrap_used, clippy::panic)]

mod wire;
use clap::CommandFactory;

use super::*;

pub fn context(json: bool) -> CommandContext {
    let global =
        GlobalArgs { config: None, server: None, key: None, project: None, json, no_color: true };
    CommandContext { global, output: Output::new(json, true), server_from_flag: false }
}

fn parse_line(line: &str) -> Result<ParsedCommand, i32> {
    let words = std::iter::once("toolcrib").chain(line.split_whitespace());
    parse_arguments(words.map(Into::into).collect(), false, false)
        .map_err(|error| error.exit_code())
}

#[test]
fn the_clap_definition_is_valid() {
    Cli::command().debug_assert();
}

#[test]
fn without_a_command_the_server_starts() {
    assert!(matches!(parse_line("").unwrap().command, CliCommand::Serve(_)));
    let ready = parse_line("--config x.toml").unwrap();
    assert!(matches!(ready.command, CliCommand::Serve(_)));
    assert_eq!(ready.context.global.config.unwrap().to_str(), Some("x.toml"));
}

#[test]
fn options_of_the_server_need_no_command() {
    for line in [
        "--listen 127.0.0.1:9000",
        "serve --listen 127.0.0.1:9000",
        "--listen 127.0.0.1:9000 serve",
        "--listen 127.0.0.1:1 serve --listen 127.0.0.1:9000",
    ] {
        let CliCommand::Serve(args) = parse_line(line).unwrap().command else { panic!("{line}") };
        assert_eq!(args.listen.as_deref(), Some("127.0.0.1:9000"), "{line}");
    }
    let line = "--data-dir /tmp/x --store sqlite:y --nats nats://z";
    let CliCommand::Serve(args) = parse_line(line).unwrap().command else { panic!("{line}") };
    assert_eq!(args.storage.data_dir.as_deref(), Some(std::path::Path::new("/tmp/x")));
    assert_eq!(
        (args.storage.store.as_deref(), args.nats.as_deref()),
        (Some("sqlite:y"), Some("nats://z"))
    );
    for line in ["--listen 127.0.0.1:9000 calls", "--data-dir /tmp/x keys ls"] {
        assert_eq!(parse_line(line).err(), Some(2), "{line}");
    }
}

#[test]
fn every_command_parses_and_has_examples() {
    for line in [
        "serve --listen 127.0.0.1:0 --data-dir /tmp/x",
        "tools",
        "tools ls",
        "tools weather.query --json",
        "agents",
        "agents ls",
        "agents apply a.yaml",
        "agents show a",
        "agents versions a",
        "agents rm a",
        "runs tree run_1",
        "tools import spec.yaml --prefix x --api-url https://a.b --dry-run",
        "call a.b k=v --args {} --timeout 5s --retry 2 --run r --idempotency-key k --client c",
        "calls --status failed --since 1h --limit 5",
        "calls ls --tool a.b --cursor p1",
        "calls get tc_1 --wait",
        "calls get tc_1 --wait 5s",
        "calls cancel tc_1 --reason x",
        "calls events tc_1",
        "calls answer tc_1 name=Ada --question who",
        "mcp",
        "mcp --catalogue search",
        "mcp add files --env A=b --pin -- npx -y server /srv",
        "mcp add far https://far.example/mcp --header Authorization:x",
        "mcp add --file -",
        "mcp ls --data-dir /tmp/x",
        "mcp show files",
        "mcp accept files files.read",
        "mcp rm files",
        "watch --run r",
        "run --model demo question --tools a.*,b --system s --steps 3 --data-dir /tmp/x",
        "run --continue run_1 more",
        "run --resume run_1",
        "run --follow run_1 --json",
        "run --replay run_1 --model m",
        "keys create --agent a --role provider --allow * --project p --data-dir /tmp/x",
        "keys --data-dir /tmp/x ls",
        "keys revoke key_1",
        "allow --agent a weather.* b",
        "deny --agent * file.*",
        "rules",
        "rules rm --agent a weather.*",
        "audit --limit 5",
        "doctor --network",
        "--server http://x:1 --key k --no-color tools",
    ] {
        assert!(parse_line(line).is_ok(), "{line}");
    }
    for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
        let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert!(after.contains("Examples:"), "{} has no examples", command.get_name());
    }
}

#[test]
fn invalid_command_lines_are_usage_errors() {
    for line in [
        "nonsense",
        "call",
        "calls get",
        "keys create",
        "allow weather.*",
        "allow --agent a",
        "call a --wait 5s --no-wait",
        "call a --timeout soon",
        "audit --limit 0",
        "keys create --agent a --role king",
        "--json call",
    ] {
        assert_eq!(parse_line(line).err(), Some(2), "{line}");
    }
    assert_eq!(parse_line("--help").err(), Some(0));
    assert_eq!(parse_line("--version").err(), Some(0));
}

#[test]
fn a_server_given_as_a_flag_is_detected() {
    assert!(parse_line("keys ls --server http://x").unwrap().context.server_from_flag);
    assert!(parse_line("--server http://x keys ls").unwrap().context.server_from_flag);
    assert!(!parse_line("keys ls").unwrap().context.server_from_flag);
}
