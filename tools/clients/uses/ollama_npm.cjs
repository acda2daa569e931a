// ollama for Node, at the port for it, without a key.
const assert = require("node:assert");
const { Ollama } = require("ollama");

const env = (name) => process.env[`EDGEMOE_${name}`];
const client = new Ollama({ host: env("OLLAMA") });
const model = env("MODEL");
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = [{ role: "user", content: "What is the weather in Paris?" }];
const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Tells the weather.", parameters: city } }];
const options = { temperature: 0, num_predict: 128 };

const refused = async (call, words) => {
  await assert.rejects(call, (error) => error.message.includes(words));
};

const features = {
  async chat() {
    const answer = await client.chat({ model, messages, options });
    assert.match(answer.message.content, /Paris/);
    assert.ok(answer.done && answer.eval_count > 0 && answer.total_duration > 0);
    assert.match((await client.generate({ model, prompt: messages[0].content, options })).response, /Paris/);
  },
  async streaming() {
    const pieces = [];
    for await (const part of await client.chat({ model, messages, options, stream: true })) pieces.push(part.message.content);
    assert.match(pieces.join(""), /Paris/);
    assert.ok(pieces.length > 2);
  },
  async tools() {
    const answer = await client.chat({ model, messages: ask, tools, options });
    const called = answer.message.tool_calls[0].function;
    assert.strictEqual(called.name, "get_weather");
    assert.strictEqual(typeof called.arguments.city, "string");
    const calls = [];
    for await (const part of await client.chat({ model, messages: ask, tools, options, stream: true })) {
      calls.push(...(part.message.tool_calls ?? []));
    }
    assert.strictEqual(calls[0].function.name, "get_weather");
  },
  async structured() {
    const format = { ...city, additionalProperties: false };
    const answer = await client.chat({ model, messages, format, options });
    assert.strictEqual(typeof JSON.parse(answer.message.content).city, "string");
  },
  async second_turn() {
    const { message } = await client.chat({ model, messages: ask, tools, options });
    const result = { role: "tool", tool_name: "get_weather", content: "It is sunny, 21 degrees." };
    const after = await client.chat({ model, messages: [...ask, message, result], tools, options });
    assert.ok(after.message.content || after.message.tool_calls);
  },
  async thinking() {
    for (const think of [true, false, "high"]) {
      const { message } = await client.chat({ model, messages, think, options });
      assert.ok(message.content || message.thinking);
      assert.ok(think || !message.thinking);
    }
  },
  async models() {
    const listed = (await client.list()).models[0];
    const loaded = (await client.ps()).models[0];
    assert.strictEqual(listed.name, `${model}:latest`);
    assert.strictEqual(loaded.name, listed.name);
    assert.ok((await client.show({ model })).capabilities.includes("completion"));
    assert.strictEqual((await client.pull({ model })).status, "success");
    assert.ok((await client.version()).version);
  },
  async refusals() {
    await refused(() => client.chat({ model: "nothing", messages }), "model 'nothing' not found");
    await refused(() => client.chat({ model, messages: [{ ...ask[0], images: ["iVBORw0KGgo="] }] }), "no images");
    await refused(() => client.embed({ model, input: "x" }), "no embeddings");
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
