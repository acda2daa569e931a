// Draws where every expert is: layers down, experts across, a byte each (edgemoe/types/snapshot.py says what is in it).

const PLACES = ["", "elsewhere", "on disk", "in RAM", "in VRAM"];
const [ELSEWHERE, DISK, RAM, VRAM] = [1, 2, 3, 4];
const COMING = 8;
const MEAN_USE = 8, MOST_USE = 15;
const LARGEST = 30; // CSS pixels of a cell
const FADE_MS = 900; // that a cell which has moved glows

/** Returns the colour of each possible byte, as the canvas has it, and that of what has just moved. */
export function palette(style = getComputedStyle(document.documentElement)) {
  const of = (name) => hex(style.getPropertyValue(`--${name}`).trim());
  const ground = of("card");
  const full = { [ELSEWHERE]: of("away"), [DISK]: of("disk"), [RAM]: of("ram"), [VRAM]: of("vram") };
  const colours = new Uint32Array(256);
  for (let cell = 0; cell < 256; cell++) {
    const place = cell & 7, use = cell >> 4;
    if (place === 0 || place > VRAM) continue; // transparent
    const least = place >= RAM ? 0.3 : 0.55;
    const strength = place === ELSEWHERE ? 1 : least + (1 - least) * (use / MOST_USE) ** 1.3;
    const colour = mix(ground, full[place], strength);
    colours[cell] = packed(cell & COMING ? mix(colour, of("coming"), 0.65) : colour);
  }
  return { colours, moved: packed(of("coming")) };
}

function hex(text) {
  const long = text.length === 4 ? text.replace(/[^#]/g, "$&$&") : text;
  return [1, 3, 5].map((at) => parseInt(long.slice(at, at + 2), 16));
}

function mix(from, to, share) {
  return from.map((value, at) => value + (to[at] - value) * share);
}

function packed([red, green, blue]) {
  return ((255 << 24) | (Math.round(blue) << 16) | (Math.round(green) << 8) | Math.round(red)) >>> 0;
}

export class Grid {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.cells = new Uint8Array(0);
    this.movedAt = new Float64Array(0);
    this.layers = this.experts = 0;
    this.size = 1; // device pixels of a cell
    this.drawMs = 0;
  }

  /** Takes new cells; what has changed its place since the last ones glows for a moment. */
  take(layers, experts, cells) {
    const same = layers === this.layers && experts === this.experts;
    const now = performance.now();
    if (!same) {
      [this.layers, this.experts] = [layers, experts];
      this.movedAt = new Float64Array(cells.length).fill(-FADE_MS);
    } else {
      for (let at = 0; at < cells.length; at++) {
        if ((cells[at] & 7) > (this.cells[at] & 7)) this.movedAt[at] = now;
      }
    }
    this.cells = cells;
  }

  /** Fits the canvas into a width, in CSS pixels; whole device pixels a cell. */
  fit(width) {
    const ratio = window.devicePixelRatio || 1;
    const largest = Math.round(LARGEST * ratio);
    const size = Math.max(1, Math.min(largest, Math.floor((width * ratio) / Math.max(1, this.experts))));
    const [wide, high] = [this.experts * size, this.layers * size];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      [this.canvas.width, this.canvas.height] = [wide, high];
      this.image = this.context.createImageData(Math.max(1, wide), Math.max(1, high));
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.canvas.style.width = `${wide / ratio}px`;
    this.canvas.style.height = `${high / ratio}px`;
    this.size = size;
  }

  /** Draws all cells. Returns whether some still glow. */
  draw({ colours, moved }) {
    const began = performance.now();
    const { size, experts, layers, pixels, cells, movedAt } = this;
    const gap = size >= 4 ? Math.max(1, Math.round(size / 9)) : 0;
    const wide = experts * size, filled = size - gap;
    let glows = false;
    for (let layer = 0, at = 0; layer < layers; layer++) {
      const first = layer * size * wide;
      for (let expert = 0; expert < experts; expert++, at++) {
        const recent = began - movedAt[at] < FADE_MS;
        glows ||= recent;
        const from = first + expert * size;
        pixels.fill(recent ? moved : colours[cells[at]], from, from + filled);
      }
      for (let row = 1; row < filled; row++) pixels.copyWithin(first + row * wide, first, first + wide);
    }
    this.context.putImageData(this.image, 0, 0);
    this.drawMs = performance.now() - began;
    return glows;
  }

  /** Returns how many experts are in each place, and how many are on their way. */
  counts() {
    const found = { away: 0, disk: 0, ram: 0, vram: 0, coming: 0 };
    const names = ["", "away", "disk", "ram", "vram"];
    for (const cell of this.cells) {
      if (cell & 7) found[names[cell & 7]]++;
      if (cell & COMING) found.coming++;
    }
    return found;
  }

  /** Returns in words what is under a point of the canvas, in CSS pixels; "" where nothing is. */
  at(x, y) {
    const ratio = window.devicePixelRatio || 1;
    const [expert, layer] = [Math.floor((x * ratio) / this.size), Math.floor((y * ratio) / this.size)];
    if (expert < 0 || layer < 0 || expert >= this.experts || layer >= this.layers) return "";
    const cell = this.cells[layer * this.experts + expert];
    if (!(cell & 7)) return "";
    const use = cell >> 4;
    const often = use ? `used ${Math.pow(2, (use - MEAN_USE) / 2).toPrecision(2)} times the layer's mean` : "not used of late";
    return `Layer ${layer}, expert ${expert}: ${PLACES[cell & 7]}${cell & COMING ? ", on its way up" : ""}; ${often}`;
  }
}
