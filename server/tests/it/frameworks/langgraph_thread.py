"""A graph of LangGraph with a saved thread. Its run fails with the connection, and the thread is resumed.

    langgraph_thread.py URL invoke|stream
"""

import json
import sys

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from openai import APIConnectionError
import httpx

url, way = sys.argv[1:3]
# Without retries of the client, a broken connection fails the run of the graph.
model = ChatOpenAI(base_url=url, api_key="unused", model="large", max_retries=0, streaming=way == "stream",
                   extra_body={"toolcrib": {"tools": ["bank.pay"]}})


def answer(state: MessagesState):
    return {"messages": [model.invoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node("answer", answer)
graph = graph.add_edge(START, "answer").add_edge("answer", END).compile(checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "one"}}


def run(start):
    if way == "invoke":
        return graph.invoke(start, thread)["messages"][-1].content
    return "".join(message.content for message, _ in graph.stream(start, thread, stream_mode="messages")
                   if message.type in ("ai", "AIMessageChunk"))


resumed = False
try:
    text = run({"messages": [("user", "pay")]})
except (APIConnectionError, httpx.TransportError):
    # The thread has the user's message; no new input resumes it.
    resumed = True
    text = run(None)
print(json.dumps({"text": text, "resumed": resumed}))
