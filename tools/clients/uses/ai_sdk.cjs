// Vercel's AI SDK for Node, over TCP with a key, by its providers of three APIs.
const assert = require("node:assert");
const { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");

const env = (name) => process.env[`EDGEMOE_${name}`];
const access = { baseURL: env("URL"), apiKey: env("KEY") };
const models = [
  createOpenAICompatible({ name: "edgemoe", supportsStructuredOutputs: true, ...access })(env("MODEL")),
  createOpenAI(access)(env("MODEL")),
  createAnthropic(access)(env("MODEL")),
];
const question = { prompt: "What is the capital of France?", maxOutputTokens: 128, temperature: 0 };
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = tool({
  description: "Tells the weather in a city.",
  inputSchema: jsonSchema(city),
  execute: async () => "It is sunny, 21 degrees.",
});

const features = {
  async chat(model) {
    assert.match((await generateText({ model, ...question })).text, /Paris/);
  },
  async streaming(model) {
    const pieces = [];
    for await (const piece of streamText({ model, ...question }).textStream) pieces.push(piece);
    assert.match(pieces.join(""), /Paris/);
    assert.ok(pieces.length > 1);
  },
  async tools(model) {
    const prompt = "What is the weather in Paris?";
    const stopWhen = stepCountIs(2);
    const answer = await generateText({ model, ...question, prompt, tools: { get_weather: weather }, stopWhen });
    assert.strictEqual(answer.steps.length, 2);
  },
  async structured(model) {
    const answer = await generateObject({ model, ...question, schema: jsonSchema(city) });
    assert.strictEqual(typeof answer.object.city, "string");
  },
};

(async () => {
  for (const [feature, call] of Object.entries(features)) {
    let why = "";
    try {
      for (const model of models) await call(model);
    } catch (error) {
      why = String(error).slice(-400);
    }
    console.log(JSON.stringify({ feature, why }));
  }
})();
