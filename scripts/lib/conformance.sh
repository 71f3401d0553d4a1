# The public MCP conformance suite, for each revision of the protocol that Toolcrib speaks.
# shellcheck shell=bash disable=SC2154 # scripts/test and the other files set the variables

mcp_revisions=(2026-07-28 2025-11-25)
conformance_server_pid=""
conformance_url=""

setup_mcp_suite() {
  step "MCP conformance suite $mcp_suite_version"
  node_packages "mcp-suite-$mcp_suite_version" node@22 \
    "@modelcontextprotocol/conformance@$mcp_suite_version"
}

# Runs the suite: mcp_suite REPORT SUMMARY-PATTERN ARGUMENTS... Prints the lines of the report that
# match the pattern, and after a failure its end.
mcp_suite() {
  local report="$1" pattern="$2" status=0
  shift 2
  PATH="$cache/mcp-suite-$mcp_suite_version/node_modules/.bin:$PATH" conformance "$@" \
    >"$report" 2>&1 || status=$?
  grep -E "$pattern" "$report" || true
  [ "$status" = 0 ] || tail -40 "$report"
  return "$status"
}

# Starts Toolcrib with a test MCP server behind it.
start_conformance_server() {
  local port log="$scratch/conformance-server.log"
  port=$(free_port)
  "$target_dir/debug/examples/conformance" "127.0.0.1:$port" >"$log" 2>&1 &
  conformance_server_pid=$!
  conformance_url="http://127.0.0.1:$port/mcp/suite"
  for _ in $(seq 100); do
    grep -q "listening on" "$log" && return
    sleep 0.1
  done
}

stop_conformance_server() {
  if [ -n "$conformance_server_pid" ]; then
    kill "$conformance_server_pid" 2>/dev/null && wait "$conformance_server_pid" 2>/dev/null || true
    conformance_server_pid=""
  fi
}

# Runs the suite against Toolcrib as an MCP server and as an MCP client: run_conformance CARGO-SCOPE...
# The scope is the same as that of the tests, so cargo does not build the dependencies again.
run_conformance() {
  check mcp "MCP conformance suite: build" \
    cargo build "$@" --example conformance --example conformance_client --quiet || return 0
  local revision
  start_conformance_server
  for revision in "${mcp_revisions[@]}"; do
    check mcp "MCP conformance suite: server, $revision" \
      mcp_suite "$scratch/conformance-server-$revision.txt" '✗|^Total' \
      server --url "$conformance_url" --requirements "$revision" \
      --expected-failures server/examples/conformance/expected-failures.yml || true
  done
  stop_conformance_server
  for revision in "${mcp_revisions[@]}"; do
    check mcp "MCP conformance suite: client, $revision" \
      mcp_suite "$scratch/conformance-client-$revision.txt" '^✓|Unexpected|Stale|Baseline|^Total' \
      client --command "$target_dir/debug/examples/conformance_client" --requirements "$revision" \
      --timeout 90000 \
      --expected-failures server/examples/conformance_client-expected-failures.yml || true
  done
}
