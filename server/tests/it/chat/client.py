"""The official OpenAI client for Python, and the agent framework of the same vendor, against a crib.

Prints one line of JSON for each thing it did; the test compares them.
"""

import asyncio
import json
import sys

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from agents import function_tool, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI

BASE_URL = sys.argv[1]
MODEL = "large"
client = OpenAI(base_url=BASE_URL, api_key="unused")

SECRET = {
    "type": "function",
    "function": {
        "name": "get_secret",
        "description": "The client's own",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
FLAT = {"type": "function", **SECRET["function"]}


def tell(what, value):
    print(json.dumps({"what": what, "value": value}), flush=True)


def ask(text):
    return [{"role": "user", "content": text}]


def chat():
    tell("models", [model.id for model in client.models.list()])
    whole = client.chat.completions.create(model=MODEL, messages=ask("calculate"))
    tell("chat", whole.choices[0].message.content)
    tell("chat usage", whole.usage.total_tokens)
    narrow = client.chat.completions.create(
        model=MODEL, messages=ask("tools"), extra_body={"toolcrib": {"tools": ["calculation.*"]}}
    )
    tell("chat tools", narrow.choices[0].message.content)

    parts = client.chat.completions.create(model=MODEL, messages=ask("calculate"), stream=True)
    tell("chat stream", "".join(part.choices[0].delta.content or "" for part in parts))
    with client.chat.completions.stream(model=MODEL, messages=ask("calculate")) as events:
        final = events.get_final_completion()
    tell("chat stream whole", final.choices[0].message.content)

    # As programs do it: the message goes back as it came.
    messages = ask("mixed")
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[SECRET])
    message = answer.choices[0].message
    tell("chat calls", [call.function.name for call in message.tool_calls])
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "xyzzy"})
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[SECRET])
    tell("chat mixed", answer.choices[0].message.content)

    try:
        client.chat.completions.create(model="none", messages=ask("x"))
    except openai.NotFoundError as error:
        tell("chat error", error.code)


def responses():
    whole = client.responses.create(model=MODEL, input="calculate", instructions="Be brief.")
    tell("responses", whole.output_text)
    with client.responses.stream(model=MODEL, input="calculate") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    tell("responses stream", final.output_text)
    tell("responses last event", kinds[-1])

    conversation = ask("mixed")
    answer = client.responses.create(model=MODEL, input=conversation, tools=[FLAT])
    conversation += answer.output
    for item in answer.output:
        if item.type == "function_call":
            output = {"type": "function_call_output", "call_id": item.call_id, "output": "xyzzy"}
            conversation.append(output)
    answer = client.responses.create(model=MODEL, input=conversation, tools=[FLAT])
    tell("responses mixed", answer.output_text)

    first = client.responses.create(model=MODEL, input="calculate")
    second = client.responses.create(
        model=MODEL, input="count", previous_response_id=first.id
    )
    tell("responses before", second.output_text)


async def agents():
    set_tracing_disabled(True)
    upstream = AsyncOpenAI(base_url=BASE_URL, api_key="unused")

    @function_tool
    def get_secret(n: int) -> str:
        """The client's own."""
        return "xyzzy"

    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=upstream)
        agent = Agent(name="A", instructions="Be brief.", tools=[get_secret], model=model)
        result = await Runner.run(agent, "mixed")
        tell(f"agents {kind.__name__}", result.final_output)
        result = Runner.run_streamed(agent, "mixed")
        async for _ in result.stream_events():
            pass
        tell(f"agents streamed {kind.__name__}", result.final_output)


chat()
responses()
asyncio.run(agents())
