// The table of policies: those that take a slot, newest first.

import { el, follow, part, setBadge, setText, tableRow } from "./dom.js";
import { age, count, host, NOTHING } from "./format.js";

const COLUMNS = [
  ["policy", "Policy", "wide"],
  ["state", "State", "wide"],
  ["version", "Version", "number"],
  ["step", "Step", "number"],
  ["age", "Age", "number"],
  ["leases", "In flight", "number"],
  ["replicas", "On replicas", "wide"],
];

export const TONES = { live: "good", loading: "busy", retiring: "idle", retired: "idle", failed: "bad" };

/** Whether a policy takes one of vLLM's slots. */
export function isRegistered(policy) {
  return ["loading", "live", "retiring"].includes(policy.state) || policy.held_by.length > 0;
}

/** The newest policy that rollouts may name, or undefined. */
export function currentPolicy(snapshot) {
  return snapshot.policies.filter((policy) => policy.state === "live").at(-1);
}

/** Show the policies of a snapshot. */
export function showPolicies(snapshot) {
  const shown = snapshot.policies.filter(isRegistered).reverse();
  const current = currentPolicy(snapshot);
  setText(document.getElementById("policies-note"), slotsNote(shown.length, snapshot.slots));
  document.getElementById("no-policies").hidden = shown.length > 0;
  follow(document.getElementById("policies"), shown, {
    key: (policy) => policy.upstream,
    make: newRow,
    update: (row, policy) => update(row, policy, { snapshot, isCurrent: policy === current }),
  });
}

function slotsNote(taken, slots) {
  return slots === null ? `${taken} registered` : `${taken} of ${slots} slots taken`;
}

function newRow(policy) {
  const row = tableRow(COLUMNS);
  row.firstElementChild.replaceWith(
    el(
      "th",
      { role: "rowheader", scope: "row", "data-field": "policy", class: "wide" },
      el("span", { class: "name", "data-field": "name" }, policy.name),
      el("span", { class: "tag", "data-field": "current" }, "current"),
      el("span", { class: "quiet block", "data-field": "run" }),
    ),
  );
  part(row, "state").append(
    el("span", { "data-field": "word" }),
    el("span", { class: "quiet block", "data-field": "reason" }),
  );
  part(row, "replicas").append(
    el("ul", { class: "presence", "aria-hidden": "true", "data-field": "dots" }),
    el("span", { "data-field": "held" }),
    el("span", { class: "unseen", "data-field": "shares" }),
  );
  return row;
}

function update(row, policy, { snapshot, isCurrent }) {
  row.dataset.state = policy.state;
  part(row, "current").hidden = !isCurrent;
  const also = [policy.run && `run ${policy.run}`, policy.alias && `also ${policy.alias}`];
  setText(part(row, "run"), also.filter(Boolean).join(", "));
  setBadge(part(row, "word"), policy.blocked ? "blocked" : policy.state, policy.blocked ? "bad" : TONES[policy.state]);
  setText(part(row, "reason"), policy.blocked || policy.reason || (policy.adopted ? "found on a replica" : ""));
  setText(part(row, "version"), policy.version ?? NOTHING);
  setText(part(row, "step"), policy.step ?? NOTHING);
  setText(part(row, "age"), age(snapshot.at - policy.announced));
  setText(part(row, "leases"), count(policy.leases));
  showPresence(row, policy, snapshot.replicas);
}

function showPresence(row, policy, replicas) {
  const holders = new Set(policy.held_by);
  const without = replicas.filter((replica) => !holders.has(replica.url)).map((replica) => host(replica.url));
  const held = `${replicas.length - without.length} of ${replicas.length}`;
  setText(part(row, "held"), without.length ? `${held}, not on ${without.join(", ")}` : held);
  const shares = Object.entries(policy.in_flight).map(([url, inFlight]) => `${count(inFlight)} on ${host(url)}`);
  setText(part(row, "shares"), shares.length ? `, in flight: ${shares.join(", ")}` : "");
  follow(part(row, "dots"), replicas, {
    key: (replica) => replica.url,
    make: () => el("li", {}),
    update: (dot, replica) => {
      const inFlight = policy.in_flight[replica.url] ?? 0;
      dot.dataset.held = holders.has(replica.url);
      dot.title = `${host(replica.url)} ${holders.has(replica.url) ? "holds it" : "does not hold it"}, ${inFlight} in flight`;
      setText(dot, inFlight ? count(inFlight) : "");
    },
  });
}
