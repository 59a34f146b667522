// What has happened: kept for the tables, listed, and the changes of state said aloud to screen readers.

import { el, follow, part, setBadge, setText } from "./dom.js";
import { clock, host } from "./format.js";

const KEPT = 500;
const SHOWN = 50;
const TONES = { info: "idle", warning: "busy", error: "bad" };
const SAID = /^(replica|pause)\.|^policy\.(live|failed|blocked|vanished)$/;

/** The events that are known, newest first. */
export const events = [];

/** Take in an event. `isNew` tells that it has happened while the page was open. */
export function happened(event, isNew) {
  if (events.length && event.id <= events[0].id) return;
  events.unshift(event);
  events.length = Math.min(events.length, KEPT);
  if (isNew && SAID.test(event.kind)) setText(document.getElementById("announcer"), sentence(event));
}

/** Forget everything: the proxy has started anew, and counts its events from 1. */
export function forget() {
  events.length = 0;
}

export function showEvents() {
  follow(document.getElementById("events"), events.slice(0, SHOWN), {
    key: (event) => `${event.id} ${event.at}`, // a proxy that has started anew counts from 1 again
    make: newItem,
    update: () => {},
  });
}

function newItem(event) {
  const item = el(
    "li",
    { "data-level": event.level },
    el("time", { class: "quiet", datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    el("span", { "data-field": "level" }),
    el("span", { class: "about", "data-field": "about" }, about(event)),
    el("span", { "data-field": "message" }, event.message),
  );
  setBadge(part(item, "level"), event.level, TONES[event.level]);
  return item;
}

function about(event) {
  return [event.policy, event.replica && host(event.replica)].filter(Boolean).join(" on ") || event.kind;
}

function sentence(event) {
  return `${about(event)}: ${event.message}`;
}
