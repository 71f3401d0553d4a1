# Helpers that the other files of scripts/lib share.
# shellcheck shell=bash disable=SC2034 # sourced: other files use these variables

# Versions of the programs that the tests run against.
mcp_python_version="2.3.0"
mcp_python_v1_version="1.30.0"
mcp_node_v1_version="1.32.2"
mcp_node_v2_version="2.4.0"
mcp_suite_version="0.2.0-alpha.12"
mcp_inspector_version="2.12.0"
ai_sdk_compatible_version="3.0.90"
ai_sdk_mcp_version="2.0.97"
ai_sdk_openai_version="4.0.118"
ai_sdk_version="7.0.173"
fastmcp_version="4.1.2"
google_adk_version="2.13.0"
langchain_core_version="1.7.2"
langchain_mcp_version="0.3.2"
langchain_openai_version="1.7.3"
langchain_version="1.4.7"
langgraph_version="1.2.22"
llama_index_mcp_version="0.6.0"
llama_index_openai_version="0.8.3"
mastra_core_version="1.71.0"
mastra_mcp_version="2.0.0"
nats_python_version="2.16.0"
openai_python_version="3.49.0"
openai_agents_version="0.24.0"
openai_node_version="7.53.0"
openai_agents_node_version="0.20.0"
pydantic_ai_version="2.66.0"
typos_version="1.51.1"

# Installed packages are kept between runs. Each directory name contains the versions it holds.
cache="${XDG_CACHE_HOME:-$HOME/.cache}/toolcrib-test"

# A CI host builds each clone once, so the files for incremental builds would only take disk space.
[ -z "${CI:-}" ] || export CARGO_INCREMENTAL=0

step() { printf '\n== %s\n' "$*"; }

# Returns the current time in milliseconds.
now_ms() {
  local now=${EPOCHREALTIME//[.,]/}
  echo $((now / 1000))
}

# Installs packages of the operating system: install_packages NAME...
install_packages() {
  local sudo=()
  [ "$(id -u)" = 0 ] || sudo=(sudo)
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get)
  "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null ||
    { "${apt[@]}" update >/dev/null && "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null; }
}

# Creates a virtual environment in the cache: python_environment NAME MODULES PACKAGE...
# Does nothing if the modules (separated by commas) can be imported from it already.
python_environment() {
  local venv="$cache/$1" modules="$2"
  shift 2
  if ! "$venv/bin/python" -c "import $modules" 2>/dev/null; then
    python3 -m venv "$venv" 2>/dev/null ||
      { install_packages python3-venv && python3 -m venv "$venv"; }
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"
  fi
}

# Installs Node packages into a directory of the cache: node_packages NAME PACKAGE...
node_packages() {
  local directory="$cache/$1"
  shift
  command -v npm >/dev/null || install_packages npm
  # The mark is written last, so an installation that was interrupted is repeated.
  if [ ! -e "$directory/.complete" ]; then
    mkdir -p "$directory"
    (cd "$directory" && npm init -y >/dev/null 2>&1 && npm install --silent "$@")
    touch "$directory/.complete"
  fi
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
