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

# The official SDKs for JavaScript, and the AI SDK.
setup_mcp_node() {
  step "MCP SDK for TypeScript $mcp_node_v1_version and $mcp_node_v2_version, @ai-sdk/mcp $ai_sdk_mcp_version"
  local node="node-mcp-$mcp_node_v1_version-$mcp_node_v2_version-$ai_sdk_mcp_version"
  node_packages "$node" node@22 "@modelcontextprotocol/sdk@$mcp_node_v1_version" \
    "@modelcontextprotocol/client@$mcp_node_v2_version" "@ai-sdk/mcp@$ai_sdk_mcp_version"
  export TOOLCRIB_TEST_MCP_NODE="$cache/$node"
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

# All clients and agent frameworks of docs/integrations, in directories whose names the tests know. Frameworks
# that need other versions of the same packages have an environment of their own.
setup_frameworks() {
  step "clients and agent frameworks of docs/integrations"
  local python="frameworks-python-$mcp_python_version-$fastmcp_version-$pydantic_ai_version"
  python+="-$google_adk_version-$openai_agents_version-$openai_python_version"
  python_environment "$python" agents,fastmcp,google.adk.tools.mcp_tool,mcp,openai,pydantic_ai.mcp \
    "mcp==$mcp_python_version" "fastmcp==$fastmcp_version" \
    "pydantic-ai-slim[mcp,openai]==$pydantic_ai_version" "google-adk[mcp]==$google_adk_version" \
    "openai-agents==$openai_agents_version" "openai==$openai_python_version"
  local langchain="frameworks-langchain-$langchain_version-$langchain_core_version"
  langchain+="-$langchain_openai_version-$langchain_mcp_version-$langgraph_version-$mcp_python_v1_version"
  python_environment "$langchain" langchain.agents,langchain_mcp_adapters.client,langchain_openai,langgraph.graph \
    "langchain==$langchain_version" "langchain-core==$langchain_core_version" \
    "langchain-openai==$langchain_openai_version" "langchain-mcp-adapters==$langchain_mcp_version" \
    "langgraph==$langgraph_version" "mcp==$mcp_python_v1_version"
  local llamaindex="frameworks-llamaindex-$llama_index_mcp_version-$llama_index_openai_version"
  python_environment "$llamaindex" llama_index.tools.mcp,llama_index.llms.openai \
    "llama-index-tools-mcp==$llama_index_mcp_version" "llama-index-llms-openai==$llama_index_openai_version"
  local node="frameworks-node-$mcp_node_v1_version-$mcp_node_v2_version-$ai_sdk_version-$ai_sdk_mcp_version"
  node+="-$ai_sdk_openai_version-$ai_sdk_compatible_version-$mastra_core_version-$mastra_mcp_version"
  node+="-$openai_agents_node_version-$openai_node_version-$mcp_inspector_version"
  node_packages "$node" node@22 \
    "@modelcontextprotocol/sdk@$mcp_node_v1_version" "@modelcontextprotocol/client@$mcp_node_v2_version" \
    "ai@$ai_sdk_version" "@ai-sdk/mcp@$ai_sdk_mcp_version" "@ai-sdk/openai@$ai_sdk_openai_version" \
    "@ai-sdk/openai-compatible@$ai_sdk_compatible_version" "@mastra/core@$mastra_core_version" \
    "@mastra/mcp@$mastra_mcp_version" "@openai/agents@$openai_agents_node_version" \
    "openai@$openai_node_version" "@modelcontextprotocol/inspector@$mcp_inspector_version"
  local directory="$scratch/frameworks"
  mkdir -p "$directory"
  ln -sfn "$cache/$python" "$directory/python"
  ln -sfn "$cache/$langchain" "$directory/python-langchain"
  ln -sfn "$cache/$llamaindex" "$directory/python-llamaindex"
  ln -sfn "$cache/$node" "$directory/node"
  export TOOLCRIB_TEST_FRAMEWORKS="$directory"
}

# The long forms of the tests of reliability, and their duration for the soak.
setup_long_tests() {
  step "long forms of the tests"
  command -v strace >/dev/null || install_packages strace
  export TOOLCRIB_TEST_LONG=1
}

setup_soak() {
  step "duration of the soak"
  export TOOLCRIB_TEST_SOAK=1
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
