// Renders a model's Markdown as nodes. No text is parsed as HTML, nothing is loaded, links lead to http and https alone.

import { copyButton, element } from "./nodes.js";

const DEEPEST = 12; // lists in quotes in lists
const LONGEST = 20_000; // characters of one paragraph: a longer one is shown as it is
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(?:[ \t]+(.*)|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SPAN = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: escaped
    /(`+)(?!`)([^]*?[^`])\2(?!`)/, // 3: code
    /\*\*(?=\S)([^]*?\S)\*\*/, // 4: bold
    /~~(?=\S)([^]*?\S)~~/, // 5: struck
    /\*(?=[^\s*])([^*]*[^\s*])\*/, // 6: emphasised
    /(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)/, // 7: emphasised
    /!?\[([^\][]*)\]\(<?([^\s()<>]*(?:\([^\s()]*\))?[^\s()<>]*)>?(?:\s+"[^"]*")?\)/, // 8, 9: link
    /(https?:\/\/[^\s<>"'`]*[\w/=&#])/, // 10: bare link
  ].map((one) => one.source).join("|"),
);

/** Returns nodes for a text. */
export function render(text) {
  const found = document.createDocumentFragment();
  blocks(found, text.replace(/\r\n?/g, "\n").split("\n"), 0);
  return found;
}

function blocks(into, lines, depth) {
  if (depth > DEEPEST) return void into.append(element("p", "", lines.join("\n")));
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    let match;
    if (!line.trim()) at++;
    else if ((match = FENCE.exec(line))) at = fence(into, lines, at, match);
    else if ((match = HEADING.exec(line))) {
      spans(into.appendChild(element(`h${Math.min(6, match[1].length + 2)}`)), match[2].replace(/[ \t]+#+[ \t]*$/, ""));
      at++;
    } else if (RULE.test(line)) {
      into.append(element("hr"));
      at++;
    } else if (QUOTE.test(line)) {
      const end = endOf(lines, at, (one) => QUOTE.test(one));
      blocks(into.appendChild(element("blockquote")), lines.slice(at, end).map((one) => one.replace(QUOTE, "")), depth + 1);
      at = end;
    } else if (ITEM.test(line)) at = list(into, lines, at, depth);
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) at = table(into, lines, at);
    else at = paragraph(into, lines, at);
  }
}

function endOf(lines, from, belongs) {
  let end = from;
  while (end < lines.length && belongs(lines[end])) end++;
  return end;
}

function fence(into, lines, at, [, mark, language]) {
  const closes = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  const end = endOf(lines, at + 1, (one) => !closes.test(one));
  const text = lines.slice(at + 1, end).join("\n");
  const block = element("div", "code"), head = element("div", "head"), pre = element("pre");
  pre.tabIndex = 0; // scrolled by keys
  pre.append(element("code", "", text));
  head.append(element("span", "", language), copyButton(() => text));
  block.append(head, pre);
  into.append(block);
  return end + 1;
}

function list(into, lines, at, depth) {
  const [, first, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark), whole = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark) !== 1) whole.start = parseInt(mark);
  for (let match; at < lines.length && (match = ITEM.exec(lines[at])) && match[1].length <= first.length + 1; ) {
    if (/\d/.test(match[2]) !== ordered) break;
    const inner = match[1].length + match[2].length + 1;
    const body = [match[3] ?? ""];
    for (at++; at < lines.length; at++) {
      const indent = lines[at].search(/\S/);
      if (indent < 0 ? (lines[at + 1] ?? "").search(/\S/) < inner : indent < Math.min(inner, match[1].length + 2)) {
        if (indent < 0 || ITEM.test(lines[at]) || starts(lines[at]) || !body.at(-1).trim()) break;
      }
      body.push(lines[at].slice(Math.min(inner, Math.max(0, indent))));
    }
    blocks(whole.appendChild(element("li")), body, depth + 1);
    const next = endOf(lines, at, (one) => !one.trim());
    if (ITEM.test(lines[next] ?? "")) at = next;
  }
  into.append(whole);
  return at;
}

function table(into, lines, at) {
  const end = endOf(lines, at + 2, (one) => one.includes("|"));
  const sides = cells(lines[at + 1]).map((one) => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : ""));
  const whole = element("table"), scroll = element("div", "scroll");
  for (const [number, line] of [lines[at], ...lines.slice(at + 2, end)].entries()) {
    const row = whole.insertRow();
    cells(line).slice(0, sides.length).forEach((text, column) => {
      const cell = row.appendChild(element(number ? "td" : "th", sides[column]));
      spans(cell, text);
    });
  }
  scroll.append(whole);
  into.append(scroll);
  return end;
}

function cells(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((one) => one.trim().replaceAll("\\|", "|"));
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function paragraph(into, lines, at) {
  const end = endOf(lines, at + 1, (one) => one.trim() && !starts(one) && !ITEM.test(one));
  spans(into.appendChild(element("p")), lines.slice(at, end).join("\n"));
  return end;
}

function spans(into, text, depth = 0) {
  while (text) {
    const match = depth > DEEPEST || text.length > LONGEST ? null : SPAN.exec(text);
    if (!match) return void into.append(text);
    into.append(text.slice(0, match.index));
    const [all, escaped, , code, bold, struck, star, line, label, address, bare] = match;
    if (escaped) into.append(escaped);
    else if (code !== undefined) into.append(element("code", "", code.replace(/^ (.*\S.*) $/s, "$1")));
    else if (bold) spans(into.appendChild(element("strong")), bold, depth + 1);
    else if (struck) spans(into.appendChild(element("s")), struck, depth + 1);
    else if (star || line) spans(into.appendChild(element("em")), star || line, depth + 1);
    else link(into, label, address ?? bare, all, depth);
    text = text.slice(match.index + all.length);
  }
}

function link(into, label, address, all, depth) {
  if (!/^https?:\/\//i.test(address)) return void into.append(all);
  const node = into.appendChild(element("a"));
  node.href = address;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  if (label) spans(node, label, depth + 1);
  else node.append(address);
}
