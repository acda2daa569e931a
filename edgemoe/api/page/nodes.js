// Makes nodes, and copies text.

export function element(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

/** Returns the mark of a tier's colour. */
export function swatch(kind) {
  return element("span", `swatch ${kind}`);
}

export function span(...parts) {
  const node = element("span");
  node.append(...parts);
  return node;
}

/** Returns a button that does something. */
export function button(label, does, name = "") {
  const node = element("button", name, label);
  node.type = "button";
  node.addEventListener("click", () => does(node));
  return node;
}

/** Returns a button that copies a text, and says so for a moment. */
export function copyButton(textOf) {
  return button("Copy", async (node) => {
    node.textContent = (await copy(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
}

/** Copies a text, also where a page without TLS has no clipboard. Returns whether it did. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = element("textarea", "unseen");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
