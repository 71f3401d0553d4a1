// One request with the official OpenAI client for JavaScript, which repeats it after a broken
// connection.
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused" });
const extra = { model: "large", toolcrib: { tools: ["bank.pay"] } };

async function main() {
  let answer, text;
  if (process.argv[3] === "chat") {
    const messages = [{ role: "user", content: "pay" }];
    answer = await client.chat.completions.create({ ...extra, messages });
    text = answer.choices[0].message.content;
  } else {
    answer = await client.responses.create({ ...extra, input: "pay" });
    text = answer.output_text;
  }
  console.log(JSON.stringify({ text, joined: answer.toolcrib.joined ?? false }));
}

main();
