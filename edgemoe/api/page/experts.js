// The grids of experts, one for each box: drawn as they change, told of by pointer and arrow keys.

import { short } from "./figures.js";
import { Grid, palette } from "./grid.js";
import { element, span, swatch } from "./nodes.js";

const $ = (id) => document.getElementById(id);

let colours = palette();
const grids = new Map(); // by label

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = palette();
  redraw();
});
new ResizeObserver(() => redraw()).observe($("grids"));

/** Returns the name of what a box shows: its own, and that of a further model. */
export function labelOf({ box, model }) {
  return [box, model].filter(Boolean).join(" · ");
}

/** Takes what a box shows: the grid of experts of its model, or of a further one. */
export function showBox({ box, model, layers, experts, cells }) {
  if (!cells) return;
  const label = labelOf({ box, model });
  if (!grids.has(label)) grids.set(label, new BoxGrid(label));
  $("grids").classList.toggle("several", grids.size > 1);
  grids.get(label).take(layers, experts, Uint8Array.from(atob(cells), (letter) => letter.charCodeAt(0)));
}

/** Forgets boxes and models that are not there any more. */
export function keepGrids(labels) {
  for (const [label, grid] of grids) {
    if (labels.includes(label)) continue;
    grid.node.remove();
    grids.delete(label);
  }
  $("grids").classList.toggle("several", grids.size > 1);
}

export function redraw() {
  for (const grid of grids.values()) grid.draw();
}

/** Returns how long each grid took to draw the last time, in milliseconds. */
export function drawTimes() {
  return [...grids.values()].map(({ grid }) => grid.drawMs);
}

class BoxGrid {
  constructor(box) {
    this.node = element("article", "grid");
    const canvas = element("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Experts of ${box || "this box"} by layer; arrow keys walk over them`);
    this.grid = new Grid(canvas);
    this.legend = element("span", "legend");
    this.axis = element("div", "axis");
    const top = element("div", "top");
    top.append(element("span", "title", box ? `Experts on ${box}` : "Experts"), this.legend);
    this.node.append(top, canvas, this.axis);
    this.node.dataset.box = box;
    $("grids").insertBefore(this.node, [...$("grids").children].find((one) => one.dataset.box > box) ?? null);
    canvas.addEventListener("pointermove", (event) => this.tell(event));
    canvas.addEventListener("pointerdown", (event) => this.tell(event));
    canvas.addEventListener("pointerleave", () => ($("tip").hidden = true));
    canvas.addEventListener("keydown", (event) => this.walk(event));
    canvas.addEventListener("blur", () => ($("tip").hidden = true));
    this.at = { layer: 0, expert: -1 }; // where the arrow keys are
  }

  take(layers, experts, cells) {
    this.grid.take(layers, experts, cells);
    const { vram, ram, disk, away, coming } = this.grid.counts();
    const parts = { vram: ["VRAM", vram], ram: ["RAM", ram], disk: ["disk", disk], away: ["elsewhere", away], coming: ["coming up", coming] };
    const shown = Object.entries(parts).filter(([name, [, count]]) => count || name === "ram");
    this.legend.replaceChildren(...shown.map(([name, [label, count]]) => span(swatch(name), `${short(count)} ${label}`)));
    this.axis.replaceChildren(
      element("span", "", `${layers} layers down, ${experts} experts across; brighter is used more, green has just come up`),
    );
    this.draw();
  }

  draw() {
    if (!this.node.clientWidth) return; // the other view is shown
    const style = getComputedStyle(this.node);
    this.grid.fit(this.node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
    const glows = this.grid.draw(colours);
    clearTimeout(this.later);
    if (glows) this.later = setTimeout(() => this.draw(), 300);
  }

  tell(event) {
    this.show(event.offsetX, event.offsetY);
  }

  /** Walks to the next expert by an arrow key. */
  walk(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const within = (value, most) => Math.max(0, Math.min(most - 1, value));
    this.at = { layer: within(this.at.layer + step[0], this.grid.layers), expert: within(this.at.expert + step[1], this.grid.experts) };
    const ratio = window.devicePixelRatio || 1;
    this.show(...[this.at.expert, this.at.layer].map((one) => ((one + 0.5) * this.grid.size) / ratio));
  }

  /** Shows what is under a point of the canvas, in CSS pixels. */
  show(x, y) {
    const said = this.grid.at(x, y), tip = $("tip"), from = this.grid.canvas.getBoundingClientRect();
    tip.hidden = !said;
    tip.textContent = said;
    tip.style.left = `${Math.max(8, Math.min(from.left + x + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, from.top + y - tip.offsetHeight - 10)}px`;
  }
}

