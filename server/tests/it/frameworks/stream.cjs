// A streamed request with the official OpenAI client for JavaScript. A stream that breaks is requested again.
//
//   stream.cjs URL chat|responses
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused" });
const extra = { model: "large", stream: true, toolcrib: { tools: ["bank.pay"] } };

async function once() {
  let text = "", request;
  if (process.argv[3] === "chat") {
    const messages = [{ role: "user", content: "pay" }];
    request = client.chat.completions.create({ ...extra, messages });
  } else {
    request = client.responses.create({ ...extra, input: "pay" });
  }
  const { data, response } = await request.withResponse();
  for await (const event of data) {
    if (event.choices) text += event.choices[0]?.delta?.content ?? "";
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  if (!text) throw new Error("the stream ended without a text");
  return { text, joined: response.headers.has("toolcrib-joined") };
}

async function main() {
  for (let attempt = 1; attempt <= 4; attempt += 1) {
    try {
      console.log(JSON.stringify(await once()));
      return;
    } catch (error) {
      console.error(`attempt ${attempt}: ${error}`);
    }
  }
}

main();
