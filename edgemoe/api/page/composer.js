// The field that messages are written in, and the text files that go with a message.

import { button, element } from "./nodes.js";

const MOST_FILES = 16, MOST_BYTES = 512 << 10; // of one file
const $ = (id) => document.getElementById(id);
let files = [];

/** Starts the composer: `send` gets each message, `stop` ends an answer or an edit; `isBusy` says whether one comes. */
export function startComposer({ send, stop, isBusy }) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (isBusy()) return stop();
    const content = $("words").value.trim();
    if (!content && !files.length) return;
    const message = { role: "user", content, ...(files.length ? { files } : {}) };
    fill("");
    send(message);
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!isBusy()) $("ask").requestSubmit();
    }
  });
  $("chat").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) stop();
  });
  $("words").addEventListener("input", grow);
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    attach([...$("files").files]);
    $("files").value = "";
  });
  $("chat").addEventListener("dragover", (event) => event.preventDefault());
  $("chat").addEventListener("drop", (event) => {
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  });
}

/** Puts a message into the field, to be changed or sent again. */
export function fill(content, attached = []) {
  $("words").value = content;
  files = attached;
  showFiles();
  grow();
  if (content) $("words").focus({ preventScroll: true });
}

export function isEmpty() {
  return !$("words").value && !files.length;
}

/** Shows a line above the field; "" for none. */
export function note(text) {
  $("note").textContent = text;
  $("note").hidden = !text;
}

function grow() {
  const words = $("words");
  if (!words.offsetParent) return; // the other view is shown
  words.style.height = "auto";
  words.style.height = `${words.scrollHeight + 2}px`;
}

async function attach(given) {
  const refused = [];
  for (const file of given) {
    const text = file.size <= MOST_BYTES && files.length < MOST_FILES ? await readText(file) : null;
    if (text === null) refused.push(file.name);
    else files = [...files, { name: file.name, text }];
  }
  note(refused.length ? `Not attached: ${refused.join(", ")}. Text files of up to 512 kB can be, ${MOST_FILES} at a time.` : "");
  showFiles();
}

/** Returns a file's text; null where it is none. */
async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function showFiles() {
  $("attached").replaceChildren(
    ...files.map((file) => {
      const chip = element("span", "chip", file.name);
      const away = button("×", () => {
        files = files.filter((one) => one !== file);
        showFiles();
      });
      away.setAttribute("aria-label", `Leave ${file.name} out`);
      chip.append(away);
      return chip;
    }),
  );
}

/** Returns what the model gets of a message: its words, and each file as a block of code. */
export function contentOf({ content, files: attached = [] }) {
  const parts = attached.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
    const mark = "`".repeat(longest + 1);
    return `${name}:\n${mark}\n${text}\n${mark}`;
  });
  return [content, ...parts].filter(Boolean).join("\n\n");
}
