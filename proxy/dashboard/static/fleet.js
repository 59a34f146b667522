// The table of replicas.

import { el, follow, part, setBadge, setText, tableRow } from "./dom.js";
import { age, clock, count, host, NOTHING, percent } from "./format.js";

const COLUMNS = [
  ["replica", "Replica", "wide"],
  ["state", "State", "wide"],
  ["inflight", "In flight", "number"],
  ["load", "Load, tokens", "number"],
  ["routed", "Rollouts", "number"],
  ["policies", "Policies held", "wide"],
  ["cache", "KV and cache hits", "wide"],
  ["errors", "Last errors", "wide"],
];

const TONES = { ready: "good", joining: "busy", draining: "busy", down: "bad", quarantined: "bad" };

const SHOWN_ERRORS = 2;

/**
 * Show the replicas of a snapshot; `events` are those that are known, newest first, `own` what each replica says of
 * itself, by its index.
 */
export function showFleet(snapshot, events, own) {
  const ready = snapshot.replicas.filter((replica) => replica.state === "ready").length;
  setText(document.getElementById("fleet-note"), `${ready} of ${snapshot.replicas.length} ready`);
  const labels = new Map(snapshot.policies.map((policy) => [policy.upstream, label(policy)]));
  follow(document.getElementById("replicas"), snapshot.replicas, {
    key: (replica) => replica.url,
    make: newRow,
    update: (row, replica) => update(row, replica, { now: snapshot.at, labels, events, own: own.get(replica.index) }),
  });
}

function label(policy) {
  return policy.version === null ? policy.name : `v${policy.version}`;
}

function newRow(replica) {
  const row = tableRow(COLUMNS);
  row.firstElementChild.replaceWith(
    el(
      "th",
      { role: "rowheader", scope: "row", "data-field": "replica", class: "wide" },
      el("span", { class: "index" }, String(replica.index)),
      el("span", { class: "name", "data-field": "name" }, host(replica.url)),
    ),
  );
  part(row, "state").append(
    el("span", { "data-field": "word" }),
    el("span", { class: "quiet", "data-field": "since" }),
    el("span", { class: "quiet block", "data-field": "reason" }),
  );
  part(row, "policies").append(
    el("span", { class: "quiet", "data-field": "held" }),
    el("ul", { class: "chips", "data-field": "chips" }),
  );
  part(row, "cache").append(
    el("span", { "data-field": "hits" }),
    el("span", { class: "quiet block", "data-field": "predicted" }),
    el("span", { class: "quiet block", "data-field": "kv" }),
  );
  part(row, "errors").append(el("ul", { class: "errors", "data-field": "list" }));
  return row;
}

function update(row, replica, { now, labels, events, own }) {
  row.dataset.state = replica.state;
  setBadge(part(row, "word"), replica.state, TONES[replica.state] ?? "idle");
  setText(part(row, "since"), ` for ${age(now - replica.since)}`);
  setText(part(row, "reason"), [replica.paused ? "paused" : "", replica.reason].filter(Boolean).join(", "));
  setText(part(row, "inflight"), count(replica.inflight));
  part(row, "inflight").title = own?.waiting === undefined ? "" : `${count(own.waiting)} wait within the replica`;
  setText(part(row, "load"), count(replica.load));
  setText(part(row, "routed"), count(replica.routed));
  showPolicies(row, replica, labels);
  showCache(row, replica, own);
  showErrors(part(row, "list"), replica, events);
}

function showCache(row, replica, own) {
  const { reported, predicted } = replica.prefix_cache;
  const told = reported.prompt_tokens > 0;
  setText(part(row, "hits"), told ? `${percent(reported.cached_tokens, reported.prompt_tokens)} hits` : "hits not told");
  part(row, "hits").title = told ? "" : "vLLM tells them when it is started with --enable-prompt-tokens-details";
  setText(part(row, "predicted"), `predicted ${percent(predicted.cached_tokens, predicted.prompt_tokens)}`);
  const kv = replica.kv_cache_tokens === null ? "" : ` of ${count(replica.kv_cache_tokens)} tokens`;
  const used = own?.kvUsed === undefined ? NOTHING : percent(own.kvUsed, 1);
  setText(part(row, "kv"), `KV ${used}${kv}`);
}

function showPolicies(row, replica, labels) {
  const held = Object.keys(replica.policies).map((upstream) => ({ upstream, text: labels.get(upstream) ?? upstream }));
  const missing = Object.entries(replica.missing).map(([upstream, trial]) => ({
    upstream,
    text: `${labels.get(upstream) ?? upstream} ${trial.outcome}`,
    tone: "busy",
  }));
  const unsure = replica.unsure
    .filter((upstream) => !(upstream in replica.missing) && !(upstream in replica.policies))
    .map((upstream) => ({ upstream, text: `${labels.get(upstream) ?? upstream} unsure`, tone: "busy" }));
  const proven = held.filter((policy) => !(policy.upstream in replica.missing));
  const shown = [...baseWeights(replica), ...proven, ...missing, ...unsure];
  setText(part(row, "held"), shown.length ? "" : "none");
  follow(part(row, "chips"), shown, {
    key: (policy) => policy.upstream,
    make: () => el("li", {}),
    update: (chip, policy) => {
      setText(chip, policy.text);
      chip.dataset.tone = policy.tone ?? "idle";
      chip.title = policy.upstream;
    },
  });
}

/** The base weights, where they are not those that the server was started with. */
function baseWeights(replica) {
  if (replica.weights === null || replica.weights === "default") return [];
  const tone = replica.weights === "updating" ? "busy" : "idle";
  return [{ upstream: `base weights ${replica.weights}`, text: `base ${replica.weights}`, tone }];
}

function showErrors(list, replica, events) {
  const wrong = events.filter((event) => event.replica === replica.url && event.level !== "info");
  const shown = wrong.slice(0, SHOWN_ERRORS);
  follow(list, shown.length ? shown : [null], {
    key: (event) => event?.id ?? "none",
    make: () => el("li", {}),
    update: (item, event) => {
      setText(item, event ? `${clock(event.at)} ${event.message}` : NOTHING);
      item.title = event ? event.message : "";
    },
  });
}
