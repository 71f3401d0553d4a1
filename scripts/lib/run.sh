# Runs checks and tests and records their results for the report at the end.
# shellcheck shell=bash disable=SC2154 # scripts/test and the other files set the variables

# Records a result: record PART PASSED FAILED MILLISECONDS
record() { printf '%s\t%s\t%s\t%s\n' "$@" >>"$results_file"; }

# Runs one check and returns its status: check PART TITLE COMMAND...
# The command runs without errexit: a function must return its status itself.
check() {
  local part="$1" title="$2" began status=0 output
  shift 2
  step "$title"
  output=$(mktemp -p "$scratch")
  began=$(now_ms)
  "$@" 2>&1 | tee "$output" || status=$?
  if [ "$status" = 0 ]; then
    record "$part" 1 0 $(($(now_ms) - began))
  else
    record "$part" 0 1 $(($(now_ms) - began))
    { printf -- '---- %s (%s) ----\n' "$title" "$part"; tail -60 "$output"; echo; } >>"$failures_file"
  fi
  return "$status"
}

# Builds test targets and writes cargo's messages to $build_file: build_tests CARGO-ARGUMENTS...
build_tests() { check build "build: cargo test $*" cargo_test_no_run "$@"; }

cargo_test_no_run() {
  cargo test "$@" --no-run --message-format=json-render-diagnostics >"$build_file"
}

# Runs tests that are built: run_tests TITLE RESULT-OPTIONS... :: CARGO-ARGUMENTS...
# The options tell scripts/lib/results.py which part each test belongs to.
run_tests() {
  local title="$1" options=() status=0 before
  shift
  while [ "$1" != "::" ]; do options+=("$1"); shift; done
  shift
  step "$title"
  before=$(failures)
  cargo test --no-fail-fast "$@" 2>&1 | results record "${options[@]}" || status=$?
  # Without a failed test, cargo itself failed: a doc test that does not compile, for example.
  if [ "$status" != 0 ] && [ "$(failures)" = "$before" ]; then
    record "${title%%:*}" 0 1 0
    echo "cargo test failed without a failed test: $title" >>"$failures_file"
  fi
}

results() {
  python3 scripts/lib/results.py "$1" --results "$results_file" --failures "$failures_file" "${@:2}"
}

# Returns the number of failures so far.
failures() { awk -F'\t' '{n += $3} END {print n + 0}' "$results_file"; }

run_lint() {
  local package documented=() typos
  check lint "formatting" cargo fmt --all --check || true
  check lint "clippy, warnings denied" \
    cargo clippy --workspace --all-targets --quiet -- -D warnings || true
  # The crates that other programs embed. The server's documentation is docs/.
  for package in "${part_package[@]}"; do
    case "$package" in
      toolcrib-server | toolcrib-bench) ;;
      *) documented+=(-p "$package") ;;
    esac
  done
  check lint "rustdoc, warnings denied" \
    env RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet "${documented[@]}" || true
  check lint "dependencies: licenses, sources, versions" python3 scripts/check-dependencies || true
  if typos=$(find_typos); then
    check lint "spelling" "$typos" --format brief || true
  else
    step "spelling: skipped, typos $typos_version cannot be installed"
  fi
  check lint "test parts" check_part_modules || true
}

# Runs all tests of all packages with one build, without the parts that run only when they are named.
run_everything() {
  local part module skipped=()
  build_tests --workspace || return 0
  write_part_map >"$scratch/part-map"
  for part in "${standalone_parts[@]}"; do
    for module in ${part_modules[$part]}; do skipped+=(--skip "$module::"); done
  done
  run_tests "tests: all packages" --map "$scratch/part-map" --build "$build_file" \
    :: --workspace -- "${skipped[@]}"
}

# Runs the tests of a package, doc tests included: run_package PART
run_package() {
  local package="${part_package[$1]}"
  build_tests -p "$package" || return 0
  run_tests "$1: $package" --part "$1" :: -p "$package"
}

# Runs the server's tests outside the integration tests, then the modules of no other part.
run_server() {
  local others=() name
  while read -r name; do
    [ "$name" = it ] || others+=(--test "$name")
  done < <(results targets --package toolcrib-server --kind test --metadata "$metadata_file")
  if build_tests -p toolcrib-server --lib --bins "${others[@]}"; then
    run_tests "server: unit tests" --part server :: -p toolcrib-server --lib --bins "${others[@]}"
    run_tests "server: doc tests" --part server :: -p toolcrib-server --doc
  fi
  run_modules server
}

# Runs the integration tests of the server that belong to a part: run_modules PART
#
# A filter of the test harness matches anywhere in a name: `utp::` is also in `postgres::utp::…`. So
# the tests are selected from the list by their first module and passed by their full names.
run_modules() {
  local part="$1" tests=() binary
  build_tests -p toolcrib-server --test it || return 0
  binary=$(results executable --build "$build_file" --target it)
  write_part_map >"$scratch/part-map"
  "$binary" --list --format terse >"$scratch/tests"
  mapfile -t tests < <(results select --map "$scratch/part-map" --part "$part" <"$scratch/tests")
  if [ "${#tests[@]}" = 0 ]; then
    record "$part" 0 1 0
    echo "the part $part has no integration tests: see scripts/lib/parts.sh" >>"$failures_file"
    return
  fi
  run_tests "$part: ${#tests[@]} integration tests" --part "$part" --expect "${#tests[@]}" \
    :: -p toolcrib-server --test it -- --exact "${tests[@]}"
}

run_part() {
  case "$1" in
    lint) run_lint ;;
    server) run_server ;;
    *)
      if [ -n "${part_package[$1]:-}" ]; then
        run_package "$1"
      else
        run_modules "$1"
      fi
      if [ "$1" = mcp ] && [ "$quick" = 0 ]; then
        run_conformance -p toolcrib-server
      fi
      ;;
  esac
}
