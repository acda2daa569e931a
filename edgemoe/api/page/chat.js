// The chat: one conversation, streamed from /v1/chat/completions, kept by this page alone.

import { ask, eventsOf, refusal } from "./wire.js";
import { short } from "./figures.js";

const $ = (id) => document.getElementById(id);
let messages = [];
let stopping = null; // the AbortController of the answer under way

export function startChat() {
  clear();
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    stopping ? stopping.abort() : say($("words").value.trim());
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!stopping) $("ask").requestSubmit();
    }
  });
  $("words").addEventListener("input", grow);
  $("clear").addEventListener("click", clear);
}

function clear() {
  stopping?.abort();
  messages = [];
  const empty = element("p", "empty", "Try the model here. What is written stays between this page and the daemon.");
  $("talk").replaceChildren(empty);
  $("words").focus({ preventScroll: true });
}

function grow() {
  const words = $("words");
  if (!words.offsetParent) return; // the other view is shown
  words.style.height = "auto";
  words.style.height = `${words.scrollHeight + 2}px`;
}

async function say(text) {
  if (!text) return;
  $("words").value = "";
  grow();
  if (!messages.length) $("talk").replaceChildren();
  messages.push({ role: "user", content: text });
  $("talk").append(element("div", "turn user", text));
  const turn = new Turn();
  const conversation = messages;
  stopping = new AbortController();
  $("send").textContent = "Stop";
  try {
    await answer(turn, stopping.signal);
    turn.end();
  } catch (error) {
    turn.end(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    stopping = null;
    $("send").textContent = "Send";
  }
  if (turn.content) conversation.push({ role: "assistant", content: turn.content });
  else conversation.pop();
}

async function answer(turn, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ messages, stream: true }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const { data } of eventsOf(response)) {
    if (data.error) throw new Error(data.error.message);
    turn.take(data);
  }
}

/** An answer as it arrives. */
class Turn {
  constructor() {
    this.content = "";
    this.node = element("div", "turn model busy");
    this.words = element("span", "words");
    this.node.append(this.words);
    $("talk").append(this.node);
    this.follow();
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) {
      this.content += delta.content;
      this.words.textContent = this.content;
    }
    this.timings = chunk.timings ?? this.timings;
    this.follow();
  }

  think(text) {
    if (!this.thoughts) {
      this.thoughts = element("details");
      this.thought = element("span", "", "");
      this.thoughts.append(element("summary", "", "Reasoning"), this.thought);
      this.node.prepend(this.thoughts);
    }
    this.thought.textContent += text;
  }

  end(trouble = "") {
    this.node.classList.remove("busy");
    if (trouble) this.node.append(element("span", trouble === "stopped" ? "after" : "after bad", trouble));
    else if (this.timings) this.node.append(element("span", "after", spent(this.timings)));
    this.follow();
  }

  follow() {
    const talk = $("talk");
    if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160) talk.scrollTop = talk.scrollHeight;
  }
}

function spent({ predicted_n, predicted_per_second, prompt_ms }) {
  const first = prompt_ms < 1000 ? `${short(prompt_ms)} ms` : `${short(prompt_ms / 1000)} s`;
  const speed = predicted_n > 1 ? `, ${short(predicted_per_second)} a second` : "";
  return `${predicted_n} tokens${speed}, the first after ${first}`;
}

function element(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}
