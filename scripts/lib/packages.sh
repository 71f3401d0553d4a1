# Programs and client libraries that the tests run against.
# shellcheck shell=bash disable=SC2154 # scripts/test and the other files set the variables

# The tests start NATS servers on free ports with their own directories, and a tool service in Python.
setup_nats() {
  step "nats-server, nats-py $nats_python_version"
  # The system package also starts a NATS server for the machine. The tests do not use it.
  command -v nats-server >/dev/null || install_packages nats-server
  nats-server --version
  python_environment "python-nats-$nats_python_version" nats "nats-py==$nats_python_version"
  export TOOLCRIB_TEST_PYTHON="$cache/python-nats-$nats_python_version/bin/python"
}

setup_mcp_python() {
  step "MCP SDK for Python $mcp_python_version"
  python_environment "python-mcp-$mcp_python_version" mcp "mcp==$mcp_python_version"
  export TOOLCRIB_TEST_MCP_PYTHON="$cache/python-mcp-$mcp_python_version/bin/python"
}

# The official clients of OpenAI's API, and OpenAI's agent framework.
setup_openai_clients() {
  step "openai for Python $openai_python_version and Node $openai_node_version, openai-agents $openai_agents_version"
  local python="python-openai-$openai_python_version-agents-$openai_agents_version"
  python_environment "$python" agents,openai \
    "openai==$openai_python_version" "openai-agents==$openai_agents_version"
  export TOOLCRIB_TEST_OPENAI_PYTHON="$cache/$python/bin/python"
  node_packages "node-openai-$openai_node_version" node@22 "openai@$openai_node_version"
  export TOOLCRIB_TEST_OPENAI_NODE="$cache/node-openai-$openai_node_version"
}

# Prints the path of `typos`, the installed one or one from the cache. Fails if there is neither and
# it cannot be installed.
find_typos() {
  local environment="python-typos-$typos_version"
  command -v typos && return
  [ -x "$cache/$environment/bin/typos" ] ||
    python_environment "$environment" typos "typos==$typos_version" >&2 || return 1
  echo "$cache/$environment/bin/typos"
}
