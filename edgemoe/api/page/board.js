// The dashboard: tiles, tiers, requests, boxes. Draws what main.js has been told.

import { element, swatch } from "./nodes.js";
import { bytes, percent, short, time } from "./figures.js";

const $ = (id) => document.getElementById(id);
const TIERS = { vram: "VRAM", ram: "RAM", nvme: "Disk" };
const NEXT = { vram: "ram", ram: "nvme" }; // where a tier's experts come from
const PHASES = { prefill: "reads the prompt", decode: "answers", waiting: "waits", paused: "paused" };
const TTFT = "edgemoe_time_to_first_token_seconds";
const TPOT = "edgemoe_request_time_per_output_token_seconds";
const POINTS = 60;

const tiles = new Map(); // by name

// --- tiles

/** Draws what figures say: tiles, tiers. */
export function showFigures(figures) {
  const tokens = figures.rate('edgemoe_step_tokens_total{phase="decode"}', 3);
  tile("Tokens a second", short(tokens), "", prompts(figures), tokens);
  const first = figures.quantile(TTFT, 0.5);
  tile("First token", ...time(first), within(figures, TTFT), first);
  const next = figures.quantile(TPOT, 0.5);
  tile("Each next token", ...time(next), within(figures, TPOT), next);
  const running = figures.get("edgemoe_num_requests_running"), waiting = figures.get("edgemoe_num_requests_waiting");
  tile("Requests", short(running), "", waiting ? `${waiting} waiting` : "none waiting", running + waiting);
  const hit = hitRate(figures);
  const fastest = figures.has('edgemoe_tier_hits_total{tier="vram"}') ? "VRAM" : "RAM";
  tile(`Found in ${fastest}`, percent(hit), "", "of expert calls, 10 s", hit);
  const blocks = figures.get("edgemoe_kv_blocks"), used = figures.get("edgemoe_kv_blocks_referenced");
  tile("KV cache", blocks ? percent(used / blocks) : "–", "", blocks ? `of ${short(blocks * 16)} tokens` : "", used);
  $("tiers").replaceChildren(tierTable(figures), element("p", "below", "Calls by the tier that had the expert, bytes that come into it, and the share of time that steps wait for it."));
}

function prompts(figures) {
  const prompt = figures.rate('edgemoe_step_tokens_total{phase="prefill"}', 3);
  return prompt >= 0.5 ? `${short(prompt)} of prompts` : "answered";
}

function within(figures, family) {
  const slow = figures.quantile(family, 0.95);
  return slow === null ? "none in the last minute" : `95 % in ${time(slow).join(" ")}`;
}

function hitRate(figures) {
  const of = (tier) => figures.rate(`edgemoe_tier_hits_total{tier="${tier}"}`, 10);
  const all = of("vram") + of("ram") + of("nvme");
  if (!all) return null;
  return (figures.has('edgemoe_tier_hits_total{tier="vram"}') ? of("vram") : of("ram")) / all;
}

function tile(name, value, unit, note, point) {
  let one = tiles.get(name);
  if (!one) {
    const node = element("div", "tile");
    const number = element("div", "value"), small = element("span", "unit"), below = element("div", "note");
    const line = svg("path", "spark"), under = svg("path", "under");
    const plot = svg("svg");
    plot.setAttribute("viewBox", `0 0 ${POINTS - 1} 10`);
    plot.setAttribute("preserveAspectRatio", "none");
    plot.append(under, line);
    node.append(element("div", "name", name), number, below, plot);
    one = { number, small, below, line, under, points: [] };
    tiles.set(name, one);
    $("tiles").append(node);
  }
  one.number.replaceChildren(value, one.small);
  one.small.textContent = unit;
  one.below.textContent = note;
  one.points = [...one.points, point ?? 0].slice(-POINTS);
  draw(one);
}

function draw({ points, line, under }) {
  const most = Math.max(...points, 1e-9), first = POINTS - points.length;
  const path = points.map((value, at) => `${first + at} ${(9.2 - 7.6 * (value / most)).toFixed(2)}`).join(" L");
  line.setAttribute("d", points.length > 1 ? `M${path}` : "");
  under.setAttribute("d", points.length > 1 ? `M${first} 10 L${path} L${POINTS - 1} 10 Z` : "");
}

// --- tiers

function tierTable(figures) {
  const all = ["vram", "ram", "nvme"].reduce((sum, tier) => sum + figures.rate(`edgemoe_tier_hits_total{tier="${tier}"}`, 10), 0);
  const rows = Object.keys(TIERS).filter((tier) => tier === "nvme" || figures.has(`edgemoe_tier_slots{tier="${tier}"}`));
  return table(
    ["Tier", "Experts", "Calls, 10 s", "Comes in", "Stalls"],
    rows.map((tier) => {
      const slots = figures.get(`edgemoe_tier_slots{tier="${tier}"}`);
      const share = all ? figures.rate(`edgemoe_tier_hits_total{tier="${tier}"}`, 10) / all : null;
      const from = NEXT[tier];
      return [
        [swatch(tier), TIERS[tier]],
        slots ? `${short(figures.get(`edgemoe_tier_experts{tier="${tier}"}`))} of ${short(slots)}` : "the rest",
        [bar(share ?? 0, tier), element("span", "share", percent(share))],
        from ? `${bytes(figures.rate(`edgemoe_bytes_moved_total{from="${from}",to="${tier}"}`, 5))}/s` : "",
        percent(figures.rate(`edgemoe_stall_seconds_total{tier="${tier}"}`, 10)),
      ];
    }),
  );
}

// --- requests and boxes

/** Draws the requests of all boxes' engines: `byBox` has a list for each box. */
export function showRequests(byBox) {
  const several = byBox.size > 1;
  const rows = [...byBox].flatMap(([box, requests]) => requests.map((one) => row(one, box, several)));
  const heads = ["Request", ...(several ? ["On"] : []), "Prompt", "Answer", "Since"];
  $("requests").replaceChildren(rows.length ? table(heads, rows) : element("p", "none", "Nobody asks anything just now."));
}

function row({ phase, age_s, prompt_tokens, computed, emitted }, box, several) {
  const known = phase === "decode" ? 1 : Math.min(1, computed / Math.max(1, prompt_tokens + emitted));
  return [
    [bar(known, "plain"), PHASES[phase]],
    ...(several ? [box] : []),
    `${short(prompt_tokens)}`,
    `${short(emitted)}`,
    time(age_s).join(" "),
  ];
}

const MODEL_STATES = { ready: "good", failed: "bad", unloaded: "" };

/** Draws the models that requests may name; `models` is empty where there is one. */
export function showModels(models) {
  $("models-panel").hidden = !models.length;
  const several = models.some(({ boxes }) => boxes?.length);
  const rows = models.map((model) => [
    [model.name],
    [element("span", `tag ${MODEL_STATES[model.state] ?? "warn"}`, model.state), ...(model.is_pinned ? [element("span", "tag", "pinned")] : [])],
    ...(several ? [model.boxes.join(", ")] : []),
    model.memory_bytes ? bytes(model.memory_bytes) : "–",
    model.state === "ready" ? short(model.requests) : "–",
    model.state === "ready" && model.expires_s != null ? time(model.expires_s).join(" ") : "–",
  ]);
  $("models").replaceChildren(table(["Model", "State", ...(several ? ["On"] : []), "Memory", "Requests", "Unloaded in"], rows));
}

const STATES = { here: "good", leaving: "warn", gone: "bad", refused: "bad" };

/** Draws the boxes of a cluster, who leads, the plan and what is on the way. */
export function showCluster(cluster) {
  $("boxes-panel").hidden = !cluster;
  if (!cluster) return;
  const rows = cluster.members.map((member) => [
    [member.node, ...tags(member, cluster)],
    member.engine ? `${short(member.homes)} of ${short(member.room)}` : "–",
    [member.to_come && `+${member.to_come}`, member.to_go && `−${member.to_go}`].filter(Boolean).join(" ") || "–",
    short(member.requests ?? 0),
    member.latency_s == null ? "–" : time(member.latency_s).join(" "),
    member.bytes_per_s ? `${bytes(member.bytes_per_s)}/s` : "–",
  ]);
  const layers = (cluster.stages ?? []).map((stage) => [
    [stage.node],
    `${stage.first}–${stage.last}`,
    stage.dense_bytes ? bytes(stage.dense_bytes) : "–",
    stage.state !== "here" ? stage.state : stage.answers === false ? "does not answer" : stage.answers ? "answers" : "here",
  ]);
  const plan = cluster.plan;
  const moving = cluster.members.reduce((sum, { to_come }) => sum + to_come, 0);
  const said = [
    cluster.leader ? `${cluster.leader} leads in epoch ${cluster.epoch}` : "Nobody leads: all go on with the last plan",
    plan ? `plan ${plan.version}${plan.policy ? ` (${plan.policy})` : ""}` : "no plan yet",
    moving ? `${short(moving)} experts on the way` : "nothing on the way",
    plan?.on_disk_only ? `${short(plan.on_disk_only)} experts only on disks` : "",
    cluster.trouble ? `no new plan: ${cluster.trouble}` : "",
  ];
  const shown = table(["Box", "At home", "Moving", "Requests", "Round trip", "Link"], rows);
  const divided = layers.length ? [table(["Layers of", "Layers", "Dense weights", "State"], layers)] : [];
  $("boxes").replaceChildren(shown, ...divided, element("p", "below", `${said.filter(Boolean).join("; ")}.`));
}

function tags(member, cluster) {
  const found = [[member.state, STATES[member.state] ?? ""]];
  if (member.node === cluster.node) found[0] = ["this box", ""];
  if (member.node === cluster.leader) found.push(["leads", "good"]);
  if (member.role === "witness") found.push(["witness", ""]);
  return found.map(([text, kind]) => element("span", `tag ${kind}`, text));
}

// --- nodes

function table(heads, rows) {
  const node = element("table"), head = element("tr"), body = element("tbody");
  head.append(...heads.map((text) => element("th", "", text)));
  const top = element("thead");
  top.append(head);
  for (const cells of rows) {
    const line = element("tr");
    for (const cell of cells) {
      const place = element("td");
      place.append(...[cell].flat());
      line.append(place);
    }
    body.append(line);
  }
  node.append(top, body);
  const scroll = element("div", "scroll");
  scroll.append(node);
  return scroll;
}

function bar(share, kind) {
  const node = element("span", `bar ${kind}`), inside = element("i");
  inside.style.width = `${100 * share}%`;
  node.append(inside);
  return node;
}

function svg(tag, name = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (name) node.setAttribute("class", name);
  return node;
}
