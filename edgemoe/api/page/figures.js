// Keeps the daemon's figures over the last minute, and works out rates and quantiles; writes numbers for people.

const KEPT_S = 62;

export class Figures {
  constructor() {
    this.now = {};
    this.history = []; // {t, figures}
  }

  take(t, changed) {
    this.now = { ...this.now, ...changed };
    this.history.push({ t, figures: this.now });
    while (this.history.length > 2 && this.history[0].t < t - KEPT_S) this.history.shift();
  }

  /** Returns a figure by its full name; 0 where there is none. */
  get(name) {
    return this.now[name] ?? 0;
  }

  has(name) {
    return name in this.now;
  }

  /** Returns by how much a counter grows in a second, over the last `seconds`; 0 across a restart. */
  rate(name, seconds = 5) {
    const [from, to] = this.span(seconds);
    return from ? Math.max(0, (to.figures[name] ?? 0) - (from.figures[name] ?? 0)) / (to.t - from.t) : 0;
  }

  /** Returns the increase of one counter for each increase of another; null where that has not moved. */
  ratio(above, below, seconds) {
    const under = this.rate(below, seconds);
    return under > 0 ? this.rate(above, seconds) / under : null;
  }

  /** Returns a quantile of a histogram's last minute; null where nothing came. */
  quantile(family, share) {
    const [from, to] = this.span(60);
    if (!from) return null;
    const buckets = Object.keys(to.figures)
      .filter((name) => name.startsWith(`${family}_bucket{`))
      .map((name) => [Number(/le="([^"]+)"/.exec(name)[1].replace("+Inf", "Infinity")), to.figures[name] - (from.figures[name] ?? 0)])
      .sort((a, b) => a[0] - b[0]);
    const all = buckets.at(-1)?.[1] ?? 0;
    if (all <= 0) return null;
    let low = 0, below = 0;
    for (const [bound, count] of buckets) {
      if (count >= share * all) {
        return bound === Infinity ? low : low + (bound - low) * ((share * all - below) / (count - below));
      }
      [low, below] = [bound, count];
    }
    return low;
  }

  span(seconds) {
    const to = this.history.at(-1);
    const from = this.history.find((one) => one.t >= to?.t - seconds - 0.1);
    return from && from !== to ? [from, to] : [null, to];
  }
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; count >= 1000 && at < units.length - 1; at++) count /= 1000;
  return `${short(count)} ${units[at]}`;
}

/** Returns three digits that tell. */
export function short(value) {
  if (value >= 99.95 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`;
}

/** Returns a time as [number, unit]. */
export function time(seconds) {
  if (seconds === null) return ["–", ""];
  if (seconds < 0.9995) return [short(1000 * seconds), "ms"];
  return seconds < 120 ? [short(seconds), "s"] : [short(seconds / 60), "min"];
}
