// Speaks with the daemon: the key, which is kept until the tab is closed, and server-sent events read with fetch.

const KEPT = "edgemoe.key";
let key = keptKey();

function keptKey() {
  try {
    return sessionStorage.getItem(KEPT) ?? "";
  } catch {
    return ""; // this browser keeps nothing
  }
}

/** Takes the key from the address's fragment, which no server sees, and takes it out of there. */
export function keyFromAddress() {
  if (location.hash.length > 1) {
    setKey(decodeURIComponent(location.hash.slice(1)));
    history.replaceState(null, "", location.pathname);
  }
}

export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEPT, key);
  } catch {
    // it holds until the page is closed
  }
}

/** Fetches with the key, if there is one. */
export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
}

/** Returns whether the daemon wants a key that we have not given. */
export async function wantsKey() {
  const answer = await ask("/version");
  return answer.status === 401;
}

/** Returns what an answer says went wrong. */
export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the daemon answered ${answer.status}`;
  }
}

/** Yields {name, data} of an answer's server-sent events, data parsed. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = read(part);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function read(part) {
  let name = "message";
  let data = "";
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data && data !== "[DONE]" ? { name, data: JSON.parse(data) } : null;
}
