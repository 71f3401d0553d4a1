// The official OpenAI client for JavaScript against a crib. Prints one line of JSON for each thing
// it did; the test compares them.
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused" });
const model = "large";
const ask = (content) => [{ role: "user", content }];
const tell = (what, value) => console.log(JSON.stringify({ what, value }));
const secret = {
  name: "get_secret",
  description: "The client's own",
  parameters: { type: "object", properties: { n: { type: "integer" } } },
};

async function chat() {
  const names = [];
  for await (const listed of client.models.list()) names.push(listed.id);
  tell("models", names);
  const whole = await client.chat.completions.create({ model, messages: ask("calculate") });
  tell("chat", whole.choices[0].message.content);
  tell("chat usage", whole.usage.total_tokens);
  const parts = await client.chat.completions.create({
    model, messages: ask("calculate"), stream: true,
  });
  let text = "";
  for await (const part of parts) text += part.choices[0]?.delta?.content ?? "";
  tell("chat stream", text);
  // The client's own loop around its own tools, in a stream and without.
  const run = { ...secret, function: async () => "xyzzy", parse: JSON.parse };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      model, stream, messages: ask("mixed"), tools: [{ type: "function", function: run }],
    });
    tell(stream ? "chat mixed stream" : "chat mixed", await runner.finalContent());
  }
  try {
    await client.chat.completions.create({ model: "none", messages: ask("x") });
  } catch (error) {
    tell("chat error", [error instanceof OpenAI.NotFoundError, error.code]);
  }
}

async function responses() {
  const whole = await client.responses.create({ model, input: "calculate" });
  tell("responses", whole.output_text);
  const final = await client.responses.stream({ model, input: "calculate" }).finalResponse();
  tell("responses stream", final.output_text);
  const tools = [{ type: "function", strict: false, ...secret }];
  const first = await client.responses.create({ model, input: "mixed", tools });
  const call = first.output.find((item) => item.type === "function_call");
  const output = { type: "function_call_output", call_id: call.call_id, output: "xyzzy" };
  const second = await client.responses.create({
    model, input: [output], previous_response_id: first.id, tools,
  });
  tell("responses mixed", second.output_text);
}

chat().then(responses).catch((error) => {
  console.error(error);
  process.exit(1);
});
