# The parts of the test command: the tests that belong to each, and the set-up that it needs.
#
# - `lint` has the checks that run no test.
# - Every package of the workspace is a part with the name of its directory.
# - The integration tests of the server are divided by module. A module of server/tests/it that no
#   part below names belongs to the part `server`, so a new module is never left out.
# shellcheck shell=bash disable=SC2154 # scripts/test and the other files set the variables

parts=()
# Parts that run only when they are named: run_everything skips their modules, and --quick refuses them.
standalone_parts=()
declare -A part_about part_needs part_package part_modules

# Defines a part: define_part NAME NEEDS ABOUT. `postgres` in NEEDS stands for setup_postgres.
define_part() {
  parts+=("$1")
  part_needs[$1]="$2"
  part_about[$1]="$3"
}

# Defines a part of integration tests of the server: define_modules NAME NEEDS MODULES ABOUT
define_modules() {
  define_part "$1" "$2" "$4"
  part_modules[$1]="$3"
}

# Defines the part of a package: define_package PACKAGE DIRECTORY
define_package() {
  local needs="" about
  case "$1" in
    toolcrib) about="domain, lifecycle, calls, runs; simulation; coding rules" ;;
    toolcrib-store) needs="postgres" about="SQLite and PostgreSQL behind the store port" ;;
    toolcrib-protocol) about="UTP messages, HTTP operations, OpenAPI, outbound HTTP" ;;
    toolcrib-sources) needs="postgres" about="built-in tools, HTTP, MCP and UTP sources, models" ;;
    toolcrib-transport) about="HTTP, MCP and NATS transports" ;;
    toolcrib-bench) about="baseline, load generator, scripted model" ;;
    toolcrib-server) about="unit tests of the server, integration tests of no other part" ;;
    *) about="tests of $1" ;;
  esac
  define_part "$2" "$needs" "$about"
  part_package[$2]="$1"
}

# Defines all parts. Reads the packages of the workspace from $workspace_file.
define_parts() {
  local package directory
  define_part lint "" "formatting, clippy, rustdoc, spelling, dependencies"
  while IFS=$'\t' read -r package directory; do
    define_package "$package" "$directory"
  done <"$workspace_file"
  define_modules utp "nats" "utp" "tools on NATS (UTP)"
  define_modules mcp "mcp_python mcp_node mcp_suite" "mcp upstreams" \
    "MCP in both directions, MCP conformance suite"
  define_modules integrations "mcp_python mcp_node openai_clients" "integrations" \
    "programs of docs/integrations, short form"
  define_modules postgres "postgres nats" "postgres" "the server with PostgreSQL as its store"
  define_modules rejoin "openai_clients postgres" "rejoin" "repeated requests join the earlier work"
  define_modules chat "openai_clients" "chat models" "OpenAI-compatible API, language models"
  define_modules runs "" "runs batches contexts" "runs, batches, contexts"
  define_modules clients "" "ingress" "connected programs: WebSocket, SSE, long poll"
  define_modules openapi "" "openapi" "tools from OpenAPI documents and HTTP operations"
  define_modules identity "postgres" "identity policy" "keys, tokens, rules"
  define_modules webhooks "" "webhooks tasks" "webhooks, background tasks"
  define_modules telemetry "" "telemetry" "traces, metrics, logs"
  define_modules reliability "long_tests postgres" "reliability" \
    "long forms of kills, upgrades, pauses and storms, only when named"
  define_modules frameworks "frameworks" "frameworks" \
    "all clients and frameworks of docs/integrations, long form, only when named"
  define_modules soak "soak" "soak" "load with event followers for 18 minutes, only when named"
  standalone_parts+=(reliability frameworks soak)
  define_modules crash "" "crash" "killed processes, full disks, overload"
}

list_parts() {
  local part
  for part in "${parts[@]}"; do
    printf '%-12s  %s%s\n' "$part" "${part_about[$part]}" \
      "${part_needs[$part]:+ [${part_needs[$part]// /, }]}"
  done
}

# Writes, for each package and module, its part. The integration tests of the server are found by
# module, all others by package.
write_part_map() {
  local part module
  for part in "${parts[@]}"; do
    [ -z "${part_package[$part]:-}" ] || printf 'package\t%s\t%s\n' "${part_package[$part]}" "$part"
    for module in ${part_modules[$part]:-}; do
      printf 'module\t%s\t%s\n' "$module" "$part"
    done
  done
}

# Fails if a part names a module that does not exist.
check_part_modules() {
  local part module status=0
  for part in "${parts[@]}"; do
    for module in ${part_modules[$part]:-}; do
      if ! grep -qx "mod $module;" server/tests/it/main.rs; then
        echo "scripts/lib/parts.sh: part $part names the module $module, which server/tests/it/main.rs does not declare"
        status=1
      fi
    done
  done
  return "$status"
}
