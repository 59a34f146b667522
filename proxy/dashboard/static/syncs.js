// The timeline of syncs: each announcement with how long its phases took, newest first.

import { el, follow, part, setAttribute, setBadge, setText } from "./dom.js";
import { clock, duration, host } from "./format.js";
import { TONES } from "./policies.js";

const PHASES = [
  ["check", "checking files"],
  ["name", "waiting for the name"],
  ["gate", "waiting for the store"],
  ["slot", "waiting for a slot"],
  ["load", "loading"],
  ["verify", "proving"],
  ["commit", "making it live"],
  ["rollback", "taking back"],
];

const AFTER_ANNOUNCEMENT = ["load", "verify", "commit", "rollback"]; // the others come before the replicas are told

const SHOWN = 12;

/** Show the syncs of a snapshot; `events` are those that are known, newest first. */
export function showSyncs(snapshot, events) {
  const syncs = snapshot.policies
    .filter((policy) => !policy.adopted)
    .map((policy) => describe(policy, snapshot.at))
    .reverse()
    .slice(0, SHOWN);
  const longest = Math.max(...syncs.map((sync) => sync.seconds), 0.001);
  document.getElementById("no-syncs").hidden = syncs.length > 0;
  follow(document.getElementById("phases"), PHASES, {
    key: ([phase]) => phase,
    make: ([phase, title]) => el("li", {}, el("span", { class: "swatch", "data-phase": phase }), title),
    update: () => {},
  });
  follow(document.getElementById("syncs"), syncs, {
    key: (sync) => sync.policy.upstream,
    make: newItem,
    update: (item, sync) => update(item, sync, longest, events),
  });
}

/** How long the last sync that has ended took, in seconds, or null. */
export function lastSync(snapshot) {
  const ended = snapshot.policies.filter((policy) => !policy.adopted && "load" in policy.phases);
  return ended.length ? total(ended.at(-1).phases) : null;
}

function total(phases) {
  return Object.values(phases).reduce((sum, seconds) => sum + seconds, 0);
}

function describe(policy, now) {
  const before = total(policy.phases) - AFTER_ANNOUNCEMENT.reduce((sum, phase) => sum + (policy.phases[phase] ?? 0), 0);
  const phases = { ...policy.phases };
  if (policy.state === "loading") phases.load = Math.max(0, now - policy.announced);
  return { policy, phases, began: policy.announced - before, seconds: total(phases) };
}

function newItem({ policy }) {
  return el(
    "li",
    {},
    el("span", { class: "quiet", "data-field": "began" }),
    el("span", { class: "name", "data-field": "name", title: policy.name }, policy.name),
    el("span", { "data-field": "word" }),
    el("span", { class: "number", "data-field": "seconds" }),
    el("div", { class: "track", "aria-hidden": "true" }, el("div", { class: "phases", "data-field": "bar" })),
    el("p", { class: "quiet", "data-field": "text" }),
  );
}

function update(item, sync, longest, events) {
  const { policy, phases, began, seconds } = sync;
  setText(part(item, "began"), clock(began));
  const word = policy.state === "loading" || policy.state === "failed" ? policy.state : "served";
  setBadge(part(item, "word"), word, TONES[word] ?? "good");
  setText(part(item, "seconds"), duration(seconds));
  const known = PHASES.filter(([phase]) => phase in phases);
  const bar = part(item, "bar");
  bar.style.width = `${(100 * seconds) / longest}%`;
  follow(bar, known, {
    key: ([phase]) => phase,
    make: ([phase]) => el("span", { "data-phase": phase }),
    update: (segment, [phase, title]) => {
      segment.style.flexGrow = phases[phase];
      setAttribute(segment, "title", `${title}: ${duration(phases[phase])}`);
    },
  });
  setText(part(item, "text"), tell(policy, known, phases, events, began));
}

/** Say in words what the bar shows, and what went wrong on the way. */
function tell(policy, known, phases, events, began) {
  const lasting = known.filter(([phase]) => phases[phase] >= 0.0005);
  const parts = lasting.map(([phase, title]) => `${title} ${duration(phases[phase])}`);
  if (policy.state === "failed") return [...parts, policy.reason].join(" · ");
  const { slowest } = policy;
  if (slowest && slowest.tries > 1) parts.push(`${host(slowest.replica)} was asked ${slowest.tries} times`);
  const isAbout = (event) => event.policy === policy.name && event.kind.startsWith("load.") && event.at >= began;
  const late = events.find(isAbout);
  if (late) parts.push(late.replica ? `${host(late.replica)}: ${late.message}` : late.message);
  return parts.join(" · ");
}
