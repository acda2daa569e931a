// The chat: conversations streamed from /v1/chat/completions. This browser keeps them, and nobody else.

import { contentOf, fill, isEmpty, note, startComposer } from "./composer.js";
import { conversations, forget, forgetAll, keep, keepSettings, settings } from "./memory.js";
import { button, element } from "./nodes.js";
import { Answer, Question } from "./turns.js";
import { ask, eventsOf, refusal } from "./wire.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let id = "";
let messages = [];
let editing = -1; // the message that is being changed
let stopping = null; // the AbortController of the answer under way

export function startChat() {
  startComposer({ send, stop, isBusy: () => Boolean(stopping) });
  $("clear").addEventListener("click", () => open());
  $("to-history").addEventListener("click", showHistory);
  $("to-settings").addEventListener("click", showSettings);
  $("settings-form").addEventListener("submit", takeSettings);
  $("forget-all").addEventListener("click", () => {
    forgetAll();
    open();
    $("history").close();
  });
  addEventListener("pagehide", () => stopping?.abort());
  open();
}

/** Opens a conversation, or begins one. */
function open(chosen = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] }) {
  stopping?.abort();
  [id, messages] = [chosen.id, chosen.messages];
  editing = -1;
  note("");
  draw();
  $("talk").scrollTop = $("talk").scrollHeight;
  $("words").focus({ preventScroll: true });
}

function draw() {
  const turns = messages.map((message, at) => (message.role === "user" ? question(message, at) : answered(message, at)));
  const empty = element("p", "empty", "Try the model here. What is written stays between this browser and the daemon.");
  $("talk").replaceChildren(...(turns.length ? turns : [empty]));
}

function question(message, at) {
  return new Question(message, () => {
    if (stopping) return;
    editing = at;
    fill(message.content, message.files);
    note("You change an earlier message; what came after it is dropped. Escape leaves it as it was.");
  }).node;
}

function answered(message, at) {
  const turn = new Answer(message, () => repeat(at));
  turn.addTools();
  return turn.node;
}

/** Answers again from a place of the conversation on. */
function repeat(at) {
  if (stopping) return;
  messages = messages.slice(0, at);
  draw();
  answer();
}

function send(message) {
  const unanswered = messages.at(-1)?.role === "user" ? messages.length - 1 : messages.length; // its answer failed
  messages = [...messages.slice(0, editing >= 0 ? editing : unanswered), message];
  editing = -1;
  note("");
  draw();
  answer();
}

function stop() {
  stopping?.abort();
  if (editing < 0) return;
  editing = -1;
  fill("");
  note("");
}

async function answer() {
  const at = messages.length, conversation = messages, mine = id, message = { role: "assistant", content: "" };
  const turn = new Answer(message, () => repeat(at));
  turn.onDrawn = follow;
  turn.begin();
  $("talk").append(turn.node);
  $("talk").scrollTop = $("talk").scrollHeight;
  stopping = new AbortController();
  $("send").textContent = "Stop";
  try {
    await stream(turn, conversation, stopping.signal);
    turn.end();
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (stopped && !message.content && mine === id) return takeBack(turn, conversation);
    const broken = error instanceof TypeError; // as fetch and its reader say it, in words of the browser's
    turn.end(stopped ? "stopped" : broken ? "The daemon does not answer." : error.message, !stopped);
  } finally {
    stopping = null;
    $("send").textContent = "Send";
  }
  if (message.content) conversation.push(message);
  if (!keep(mine, conversation)) note("This browser has no room for the conversation: it is gone with the page.");
  follow();
}

/** Takes back a question that was stopped before its answer began; its words can be changed. */
function takeBack(turn, conversation) {
  if (!isEmpty()) return turn.end("stopped", true); // the field has other words: the question stays
  const { content, files } = conversation.pop();
  draw();
  fill(content, files);
}

async function stream(turn, conversation, signal) {
  const { system, model, ...sampling } = settings();
  const first = system ? [{ role: "system", content: system }] : [];
  const said = conversation.map((one) => ({ role: one.role, content: contentOf(one) }));
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...sampling, ...(model ? { model } : {}), messages: [...first, ...said], stream: true }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const { data } of eventsOf(response)) {
    if (data.error) throw new Error(data.error.message);
    turn.take(data);
  }
}

function follow() {
  const talk = $("talk");
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 240) talk.scrollTop = talk.scrollHeight;
}

// --- history

function showHistory() {
  const rows = conversations().map((one) => {
    const row = element("li");
    const opens = button(one.title, () => {
      open(one);
      $("history").close();
    }, "title");
    opens.append(element("span", "dim", new Date(one.at).toLocaleString()));
    const away = button("Delete", () => {
      forget(one.id);
      if (one.id === id) open();
      showHistory();
    });
    away.setAttribute("aria-label", `Delete ${one.title}`);
    row.append(opens, away);
    return row;
  });
  $("kept").replaceChildren(...(rows.length ? rows : [element("li", "dim", "None is kept yet.")]));
  $("forget-all").hidden = !rows.length;
  if (!$("history").open) $("history").showModal();
}

// --- settings

async function showSettings() {
  const chosen = settings();
  for (const name of ["system", ...NUMBERS]) $(name).value = chosen[name] ?? "";
  $("settings").showModal();
  const models = await servedModels();
  $("model-choice").hidden = models.length < 2;
  $("which").replaceChildren(
    ...models.map(({ id, state }) => {
      const label = state === "loaded" ? id : `${id} (${state.replace("-", " ")})`;
      return new Option(label, id, false, id === chosen.model);
    }),
  );
}

async function servedModels() {
  try {
    return (await (await ask("/v1/models")).json()).data;
  } catch {
    return [];
  }
}

function takeSettings() {
  const chosen = {};
  if ($("system").value.trim()) chosen.system = $("system").value.trim();
  for (const name of NUMBERS) if ($(name).value !== "") chosen[name] = Number($(name).value);
  if ($("which").value && $("which").selectedIndex > 0) chosen.model = $("which").value;
  keepSettings(chosen);
}
