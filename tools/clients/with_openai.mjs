// The official client for node: plain and streamed, chat and text, models, errors. Called like the Python scripts,
// from the folder that has openai in its node_modules.
import { readFileSync } from "node:fs";
import OpenAI, { NotFoundError } from "openai";

const [url, model] = process.argv.slice(2);
const manifest = new URL("node_modules/openai/package.json", import.meta.url);
const version = JSON.parse(readFileSync(manifest, "utf8")).version;

const QUESTION = "What is the capital of France?";
const BEGINNING = "The capital of France is";

function say(fields) {
  console.log(JSON.stringify(fields));
}

function fail(message) {
  console.error(`failed: ${message}`);
  process.exit(1);
}

function checkAnswer(what, asked, text, finish, usage) {
  if (!text?.includes("Paris")) fail(`${what}: the text is ${JSON.stringify(text)}`);
  if (!["stop", "length"].includes(finish)) fail(`${what}: the finish reason is ${finish}`);
  if (!(usage?.prompt_tokens > 0 && usage.completion_tokens > 0)) fail(`${what}: usage is ${JSON.stringify(usage)}`);
  if (usage.total_tokens !== usage.prompt_tokens + usage.completion_tokens) fail(`${what}: the sum of usage`);
  say({ ran: what, asked, text: text.trim() });
}

async function gathered(stream, textOf) {
  let [text, finish, usage] = ["", null, null];
  for await (const chunk of stream) {
    const choice = chunk.choices[0];
    if (choice) text += textOf(choice) ?? "";
    finish = choice?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  return [text, finish, usage];
}

say({ version: `openai ${version} (node ${process.versions.node})` });
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0, timeout: 60_000 });
const streamed = { stream: true, stream_options: { include_usage: true } };

const chat = { model, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 32 };
const answer = await client.chat.completions.create(chat);
checkAnswer("chat", QUESTION, answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage);
const chunks = await client.chat.completions.create({ ...chat, ...streamed });
checkAnswer("chat, streamed", QUESTION, ...(await gathered(chunks, (choice) => choice.delta.content)));

const text = { model, prompt: BEGINNING, temperature: 0, max_tokens: 8 };
const whole = await client.completions.create(text);
checkAnswer("completions", BEGINNING, whole.choices[0].text, whole.choices[0].finish_reason, whole.usage);
const pieces = await client.completions.create({ ...text, ...streamed });
checkAnswer("completions, streamed", BEGINNING, ...(await gathered(pieces, (choice) => choice.text)));

const names = [];
for await (const found of client.models.list()) names.push(found.id);
if (names.join() !== model) fail(`models: ${names}`);
if ((await client.models.retrieve(model)).id !== model) fail("one model");
say({ ran: "models" });

try {
  await client.chat.completions.create({ ...chat, model: "another" });
  fail("an unknown model is an error");
} catch (error) {
  if (!(error instanceof NotFoundError) || error.code !== "model_not_found") fail(`the error is ${error}`);
}
say({ ran: "error classes" });
