// Says where this box's requests went and why, and what waits for the leader's word.

import { short } from "./figures.js";

const ROUTED = "edgemoe_routed_requests_total{";

/** Draws what figures say of routing, below the boxes. */
export function showRoutes(place, figures) {
  const get = (name) => short(figures.get(name));
  const ways = Object.entries(figures.now)
    .filter(([name, count]) => name.startsWith(ROUTED) && count)
    .sort((a, b) => b[1] - a[1])
    .map(([name, count]) => `${short(count)} ${label(name, "to")} (${label(name, "why")})`);
  const offers = [
    `${get("edgemoe_offered_requests")} wait for the leader's word`,
    `${get("edgemoe_granted_requests_total")} of ${get("edgemoe_offered_requests_total")} got it`,
    `${get("edgemoe_leader_queue_requests")} of all boxes wait here`,
  ];
  place.textContent = `Requests went: ${ways.join(", ") || "none yet"}. Offers: ${offers.join(", ")}.`;
}

function label(name, key) {
  return new RegExp(`${key}="([^"]*)"`).exec(name)?.[1] ?? "";
}
