// The Vercel AI SDK against a router: both of OpenAI's APIs and the compatible provider, texts, streams, tools.
// BASE_URL and MODEL come from the environment; any difference is an exception.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { BASE_URL: baseURL, MODEL } = process.env;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "antiphon", baseURL, includeUsage: true, supportsStructuredOutputs: true,
});

const MODELS = {
  "openai.chat": openai.chat(MODEL),
  "openai.responses": openai.responses(MODEL),
  "openai-compatible": compatible.chatModel(MODEL),
};
const HELLO = "Hello 👋 there.";

let asked = [];
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      asked.push(city);
      return "minus 5";
    },
  }),
};

async function text(model) {
  const result = await generateText({ model, prompt: "Hi", maxRetries: 0 });
  assert.equal(result.text, HELLO);
  assert.equal(result.finishReason, "stop");
  assert.ok(result.usage.outputTokens > 5);
}

async function stream(model) {
  const result = streamText({ model, prompt: "Hi", maxRetries: 0, onError: ({ error }) => { throw error; } });
  const parts = [];
  for await (const part of result.textStream) parts.push(part);
  assert.ok(parts.length > 2);
  assert.equal(parts.join(""), HELLO);
}

async function toolLoop(model) {
  asked = [];
  const result = await generateText({ model, tools, prompt: "Weather?", maxRetries: 0, stopWhen: stepCountIs(3) });
  assert.deepEqual(asked, ["Oslo"]);
  assert.equal(result.text, "It is cold in Oslo.");
  assert.equal(result.steps.length, 2);
}

async function streamedToolLoop(model) {
  asked = [];
  const result = streamText({ model, tools, prompt: "Weather?", maxRetries: 0, stopWhen: stepCountIs(3) });
  assert.equal(await result.text, "It is cold in Oslo.");
  assert.deepEqual(asked, ["Oslo"]);
}

async function conversation(model) {
  const first = await generateText({ model, prompt: "Hi", maxRetries: 0 });
  const messages = [{ role: "user", content: "Hi" }, ...first.response.messages, { role: "user", content: "More" }];
  assert.equal((await generateText({ model, messages, maxRetries: 0 })).text, HELLO);
}

const weather = z.object({ city: z.string(), degrees: z.number(), sky: z.enum(["clear", "cloudy"]) });
const OSLO = { city: "Oslo", degrees: -5, sky: "clear" };

async function object(model) {
  const result = await generateObject({ model, schema: weather, prompt: "Weather?", maxRetries: 0 });
  assert.deepEqual(result.object, OSLO);
}

async function streamedObject(model) {
  const result = streamObject({ model, schema: weather, prompt: "Weather?", maxRetries: 0 });
  let partial;
  for await (partial of result.partialObjectStream);
  assert.deepEqual(partial, OSLO);
  assert.deepEqual(await result.object, OSLO);
}

for (const [name, model] of Object.entries(MODELS)) {
  for (const check of [text, stream, toolLoop, streamedToolLoop, conversation, object, streamedObject]) {
    await check(model);
    console.log(`ok ${name} ${check.name}`);
  }
}

// The model's input to a custom tool is text, not JSON; only the Responses API of this client has them.
async function customTool(model, streamed) {
  const ran = [];
  const run_python = openai.tools.customTool({
    name: "run_python",
    description: "Runs a program.",
    execute: async (input) => {
      ran.push(input);
      return "sung";
    },
  });
  const options = { model, tools: { run_python }, prompt: "Run it.", maxRetries: 0, stopWhen: stepCountIs(3) };
  const result = streamed ? streamText(options) : await generateText(options);
  assert.equal(await result.text, "It ran.");
  assert.deepEqual(ran, ['print("sung ☃")\n']);
}

for (const streamed of [false, true]) {
  await customTool(MODELS["openai.responses"], streamed);
  console.log(`ok openai.responses ${streamed ? "streamedCustomTool" : "customTool"}`);
}
