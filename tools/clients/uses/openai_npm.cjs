// openai for Node, over TCP with a key.
const assert = require("node:assert");
const OpenAI = require("openai").default;
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const env = (name) => process.env[`EDGEMOE_${name}`];
const client = new OpenAI({ baseURL: env("URL"), apiKey: env("KEY") });
const model = env("MODEL");
const messages = [{ role: "user", content: "What is the capital of France?" }];
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters: city } }];

const features = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0 });
    assert.match(answer.choices[0].message.content, /Paris/);
  },
  async streaming() {
    const pieces = [];
    const stream = await client.chat.completions.create({ model, messages, temperature: 0, stream: true });
    for await (const chunk of stream) pieces.push(chunk.choices[0]?.delta?.content || "");
    assert.match(pieces.join(""), /Paris/);
    assert.ok(pieces.length > 1);
  },
  async tools() {
    const ask = [{ role: "user", content: "What is the weather in Paris?" }];
    const answer = await client.chat.completions.create({ model, messages: ask, tools, temperature: 0 });
    const call = answer.choices[0].message.tool_calls[0];
    assert.strictEqual(call.function.name, "get_weather");
    assert.strictEqual(typeof JSON.parse(call.function.arguments).city, "string");
    const runner = client.chat.completions.runTools(
      {
        model,
        messages: ask,
        temperature: 0,
        max_tokens: 64,
        stream: true,
        tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: async () => "sunny" } }],
      },
      { maxChatCompletions: 2 },
    );
    const called = [];
    runner.on("functionToolCall", (call) => called.push(call.name));
    await runner.done();
    assert.strictEqual(called[0], "get_weather");
  },
  async structured() {
    const Place = z.object({ city: z.string().max(24), capital: z.boolean() });
    const answer = await client.chat.completions.parse({
      model,
      messages,
      temperature: 0,
      max_tokens: 128,
      response_format: zodResponseFormat(Place, "place"),
    });
    assert.strictEqual(typeof answer.choices[0].message.parsed.city, "string");
  },
  async responses() {
    const answer = await client.responses.create({ model, input: "What is the capital of France?", temperature: 0 });
    assert.match(answer.output_text, /Paris/);
  },
};

(async () => {
  for (const [feature, call] of Object.entries(features)) {
    let why = "";
    try {
      await call();
    } catch (error) {
      why = `${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ feature, why }));
  }
})();
