// How numbers, times and addresses are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const NOTHING = "–";

export function count(value) {
  return value === null || value === undefined ? NOTHING : whole.format(value);
}

/** A number of few digits: 0.4, 7.3, 93, 12,345. */
export function figure(value) {
  if (value === null || value === undefined) return NOTHING;
  return value !== 0 && value < 10 ? tenths.format(value) : whole.format(value);
}

export function percent(part, all) {
  return all ? `${tenths.format((100 * part) / all)} %` : NOTHING;
}

/** How long something took: 4 ms, 1.2 s, 2 min 5 s. */
export function duration(seconds) {
  if (seconds < 0.9995) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 60) return `${tenths.format(seconds)} s`;
  return age(seconds);
}

/** How long ago something was, in whole units: 4 s, 2 min 5 s, 3 h 10 min, 2 d 4 h. */
export function age(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function host(url) {
  return url.replace(/^https?:\/\//, "");
}
