// What this browser keeps: conversations and settings of the chat. Nothing of it leaves the browser but by a request.

const CHAT = "edgemoe.chat.", SETTINGS = "edgemoe.settings";
const MOST = 100; // conversations: the oldest go first
const LONGEST_TITLE = 80;

function stored(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // none is kept here, or it was written by something else
  }
}

function ids() {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(CHAT)).map((key) => key.slice(CHAT.length));
  } catch {
    return [];
  }
}

function isChat(one) {
  return Number.isFinite(one?.at) && Array.isArray(one.messages) && one.messages.every(isMessage);
}

function isMessage(one) {
  return ["user", "assistant"].includes(one?.role) && typeof one.content === "string" && (!one.files || one.files.every(isFile));
}

function isFile(one) {
  return typeof one?.name === "string" && typeof one.text === "string";
}

/** Returns the conversations that are kept, the latest first: {id, at, title, messages}. */
export function conversations() {
  const all = ids().map((id) => ({ id, ...stored(CHAT + id) })).filter(isChat);
  return all.sort((one, other) => other.at - one.at).map((one) => ({ ...one, title: titleOf(one.messages) }));
}

function titleOf(messages) {
  const first = messages[0];
  return (first?.content || first?.files?.[0]?.name || "empty").slice(0, LONGEST_TITLE);
}

/** Keeps a conversation. The oldest ones go where there is no room. Returns whether it is kept. */
export function keep(id, messages) {
  const text = JSON.stringify({ at: Date.now(), messages });
  const others = conversations().filter((one) => one.id !== id);
  for (const old of others.splice(MOST - 1)) forget(old.id);
  for (;;) {
    try {
      localStorage.setItem(CHAT + id, text);
      return true;
    } catch {
      const oldest = others.pop();
      if (!oldest) return false;
      forget(oldest.id);
    }
  }
}

export function forget(id) {
  try {
    localStorage.removeItem(CHAT + id);
  } catch {
    // nothing is kept here
  }
}

export function forgetAll() {
  for (const id of ids()) forget(id);
}

/** Returns the settings of the chat: {system, temperature, top_p, max_tokens, seed, model}, those that are set. */
export function settings() {
  const found = stored(SETTINGS);
  return found && typeof found === "object" ? found : {};
}

export function keepSettings(chosen) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(chosen));
  } catch {
    // they hold until the page is closed
  }
}
