// The status page: reads the stream and hands what it says to the parts of the page.

import { addSample, latest, startCharts } from "./charts.js";
import { el, follow, part, setAttribute, setBadge, setText } from "./dom.js";
import { showFleet } from "./fleet.js";
import { count, duration, figure, NOTHING, percent } from "./format.js";
import { events, forget, happened, showEvents } from "./happenings.js";
import { ownWords } from "./own.js";
import { currentPolicy, isRegistered, showPolicies } from "./policies.js";
import { read } from "./stream.js";
import { lastSync, showSyncs } from "./syncs.js";

let began; // tells the proxy's process from the one before it
let isUpToDate = false; // what comes before the first snapshot is of the past

read(new URL("stream", import.meta.url), {
  connected(isLive) {
    setBadge(document.getElementById("connection"), isLive ? "Live" : "No connection", isLive ? "good" : "bad");
    setAttribute(document.documentElement, "data-live", isLive);
  },
  history(history) {
    if (history.began !== began) forget();
    began = history.began;
    isUpToDate = false;
    startCharts(history.columns);
  },
  happened(event) {
    happened(event, isUpToDate);
  },
  snapshot(snapshot) {
    isUpToDate = true;
    addSample(snapshot.sample);
    show(snapshot);
  },
});

function show(snapshot) {
  setText(document.getElementById("model"), snapshot.models.join(", "));
  showPause(snapshot.pause);
  showFigures(snapshot);
  showFleet(snapshot, events, ownWords());
  showPolicies(snapshot);
  showSyncs(snapshot, events);
  showEvents();
  document.documentElement.dataset.at = snapshot.at;
}

function showPause(pause) {
  const note = document.getElementById("pause");
  note.hidden = pause === null;
  if (pause === null) return;
  const effect = pause.real ? "the replicas are paused until POST /resume" : "it is on record, and nothing stops";
  setText(note, `A client has asked for ${pause.target}: ${effect}.`);
}

function showFigures(snapshot) {
  const { replicas, router } = snapshot;
  const current = currentPolicy(snapshot);
  const placed = router.affinity + router.spilled + router.unmatched;
  const ready = replicas.filter((replica) => replica.state === "ready").length;
  const sync = lastSync(snapshot);
  const figures = [
    ["ready", "Replicas ready", `${ready} of ${replicas.length}`],
    ["current", "Current policy", current ? versionOf(current) : "base model"],
    ["slots", "Slots taken", `${snapshot.policies.filter(isRegistered).length} of ${snapshot.slots ?? NOTHING}`],
    ["inflight", "In flight", count(snapshot.sample.inflight)],
    ["rollouts", "Rollouts / s", figure(latest("Rollouts per second"))],
    ["tokens", "Tokens / s", figure(latest("Generated tokens per second"))],
    ["affinity", "Affinity", percent(router.affinity, placed)],
    ["sync", "Last sync", sync === null ? NOTHING : duration(sync)],
  ];
  follow(document.getElementById("figures"), figures, {
    key: ([name]) => name,
    make: ([name, title]) => el("div", { class: "card" }, el("dt", {}, title), el("dd", { "data-field": name })),
    update: (node, [name, , value]) => setText(part(node, name), value),
  });
  const trouble = ready < replicas.length ? (ready ? "busy" : "bad") : "none";
  setAttribute(part(document.getElementById("figures"), "ready"), "data-tone", trouble);
}

function versionOf(policy) {
  if (policy.version === null) return policy.name;
  return policy.step === null ? `v${policy.version}` : `v${policy.version}, step ${policy.step}`;
}
