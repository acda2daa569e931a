// Starts the page: asks for a key where one is needed, listens to /events, and hands what comes to the dashboard.

import { showCluster, showFigures, showModels, showRequests } from "./board.js";
import { startChat } from "./chat.js";
import { drawTimes, keepGrids, labelOf, redraw, showBox } from "./experts.js";
import { Figures } from "./figures.js";
import { showRoutes } from "./routes.js";
import { ask, eventsOf, keyFromAddress, refusal, setKey, wantsKey } from "./wire.js";

const $ = (id) => document.getElementById(id);
const AGAIN_MS = 2000;
const KINDS = { ready: "good", failed: "bad", stalled: "bad" };
let figures = new Figures();
const requests = new Map(); // by label of box and model

function view(name) {
  document.body.dataset.view = name;
  for (const one of ["board", "chat"]) $(`to-${one}`).setAttribute("aria-pressed", String(one === name));
  redraw();
}

function say(text, kind = "") {
  $("state").textContent = text;
  $("state").className = `pill ${kind}`;
}

/** Resolves once the daemon knows us. */
async function enter() {
  keyFromAddress();
  for (let tries = 0; await wantsKey(); tries++) {
    $("key-error").hidden = !tries;
    await asked();
  }
}

function asked() {
  const dialog = $("key-dialog");
  $("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(setKey($("key").value.trim())), { once: true });
  });
}

async function listen() {
  const leaving = new AbortController(); // a page that the browser keeps for "Back" would keep its connection
  addEventListener("pagehide", () => leaving.abort(), { once: true });
  const answer = await ask("/events", { signal: leaving.signal });
  if (!answer.ok) throw new Error(await refusal(answer));
  figures = new Figures();
  requests.clear();
  for await (const { name, data } of eventsOf(answer)) {
    if (name === "box") box(data);
    else if (name === "state") state(data);
    else if (name === "bye") throw new Error("the daemon is stopping");
  }
  throw new Error("the daemon closed the connection");
}

function box(data) {
  showBox(data);
  requests.set(labelOf(data), data.requests);
  showRequests(requests);
}

function state({ t, figures: changed, health }) {
  figures.take(t, changed);
  showFigures(figures);
  showRoutes($("routes"), figures);
  if (health) about(health);
}

function about({ status, model, models, loading, cannot_start, engine, cluster }) {
  say(loading ? `${loading.phase} ${Math.round(100 * loading.fraction)} %` : status, KINDS[status] ?? "warn");
  trouble(cannot_start?.reason ?? (status === "failed" ? `The engine cannot run: ${engine.last_end}` : ""));
  if (model) {
    $("model").textContent = document.title = model.id;
    const encodings = model.encodings?.join(", ") || model.dtype;
    $("facts").textContent = `${model.layers} layers of ${model.experts} experts, ${model.top_k} a token, ${encodings}`;
  }
  showCluster(cluster);
  showModels(models ?? []);
  const here = cluster ? cluster.members.filter((one) => one.state !== "gone").map((one) => one.node) : [""];
  for (const one of models ?? []) if (one.state === "ready") here.push(labelOf({ box: cluster?.node, model: one.name }));
  keepGrids(here);
  for (const name of requests.keys()) if (!here.includes(name)) requests.delete(name);
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function run() {
  for (;;) {
    try {
      await enter();
      await listen();
    } catch (error) {
      say("not connected", "bad");
      trouble(error instanceof TypeError ? "The daemon does not answer; trying again." : `${error.message}; trying again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

for (const name of ["board", "chat"]) $(`to-${name}`).addEventListener("click", () => view(name));
view("board");
startChat();
window.edgemoe = { drawTimes };
run();
