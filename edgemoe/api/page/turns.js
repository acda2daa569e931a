// Draws one turn of a conversation, with what can be done with it.

import { short } from "./figures.js";
import { render } from "./markdown.js";
import { button, copyButton, element } from "./nodes.js";

const DRAW_MS = 80; // between two drawings of an answer that is coming, at least

/** A message of the user's. */
export class Question {
  constructor(message, edit) {
    this.node = element("article", "turn user");
    this.node.setAttribute("aria-label", "You");
    this.node.append(element("div", "words", message.content));
    for (const { name, text } of message.files ?? []) {
      const file = element("details", "file"), pre = element("pre", "", text);
      pre.tabIndex = 0;
      file.append(element("summary", "", name), pre);
      this.node.append(file);
    }
    const tools = element("div", "tools");
    tools.append(copyButton(() => message.content), button("Edit", edit));
    this.node.append(tools);
  }
}

/** An answer of the model's, as it arrives or as it was kept. */
export class Answer {
  constructor(message, again) {
    this.message = message; // {role, content, reasoning}
    this.node = element("article", "turn model");
    this.node.setAttribute("aria-label", "The model");
    this.words = element("div", "words");
    this.node.append(this.words);
    this.again = again;
    if (message.reasoning) this.showThoughts();
    if (message.content) this.draw();
  }

  begin() {
    this.node.classList.add("busy");
    this.node.setAttribute("aria-busy", "true");
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) {
      this.message.reasoning = (this.message.reasoning ?? "") + delta.reasoning_content;
      this.showThoughts();
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.later ??= setTimeout(() => this.draw(), Math.max(DRAW_MS, 4 * (this.drawMs ?? 0)));
    }
    if (chunk.choices?.[0]?.finish_reason === "length") this.cut = true;
    this.timings = chunk.timings ?? this.timings;
  }

  showThoughts() {
    if (!this.thoughts) {
      const block = element("details");
      this.thoughts = element("div", "thoughts");
      block.append(element("summary", "", "Reasoning"), this.thoughts);
      this.node.prepend(block);
    }
    this.thoughts.textContent = this.message.reasoning;
  }

  draw() {
    const began = performance.now();
    clearTimeout(this.later);
    this.later = undefined;
    this.words.replaceChildren(render(this.message.content));
    this.drawMs = performance.now() - began;
    this.onDrawn?.();
  }

  /** Ends the answer: `trouble` says why it is not whole. */
  end(trouble = "", isFault = false) {
    this.draw();
    this.node.classList.remove("busy");
    this.node.removeAttribute("aria-busy");
    const said = trouble || (this.cut ? "cut off at the limit of tokens" : "");
    const speed = this.timings ? spent(this.timings) : "";
    if (said || speed) this.node.append(element("span", isFault ? "after bad" : "after", [said, speed].filter(Boolean).join("; ")));
    this.addTools();
  }

  addTools() {
    const tools = element("div", "tools");
    if (this.message.content) tools.append(copyButton(() => this.message.content));
    tools.append(button(this.message.content ? "Regenerate" : "Try again", this.again));
    this.node.append(tools);
  }
}

function spent({ predicted_n, predicted_per_second, prompt_ms }) {
  const first = prompt_ms < 1000 ? `${short(prompt_ms)} ms` : `${short(prompt_ms / 1000)} s`;
  const speed = predicted_n > 1 ? `, ${short(predicted_per_second)} a second` : "";
  return `${predicted_n} tokens${speed}, the first after ${first}`;
}
