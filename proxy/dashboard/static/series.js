// What each chart shows, made from the columns of the history: counts become rates and shares.

const WINDOW_S = 10; // a rate is that of so many seconds, so that one group of rollouts is not a spike

/** The charts. `lines` are [title, values(columns) -> one number or null a sample]. */
export const CHARTS = [
  {
    title: "Rollouts per second",
    lines: [["started", (c) => rate(c, rollouts(c))]],
  },
  {
    title: "Generated tokens per second",
    lines: [["in answers that have ended", (c) => rate(c, c.generated_tokens)]],
  },
  {
    title: "Rollouts in flight",
    lines: [
      ["all", (c) => c.inflight],
      ["busiest replica", (c) => c.busiest],
      ["idlest ready replica", (c) => c.idlest],
    ],
  },
  {
    title: "Where rollouts went",
    unit: "%",
    top: 100,
    lines: [
      ["affinity", (c) => share(c, c.affinity, rollouts(c))],
      ["spilled", (c) => share(c, c.spilled, rollouts(c))],
      ["unmatched", (c) => share(c, c.unmatched, rollouts(c))],
    ],
  },
  {
    title: "Prompt tokens found in a cache",
    unit: "%",
    top: 100,
    lines: [
      ["predicted", (c) => share(c, c.predicted_cached_tokens, c.predicted_prompt_tokens)],
      ["reported", (c) => share(c, c.reported_cached_tokens, c.reported_prompt_tokens)],
    ],
  },
  {
    title: "Staleness of rollouts in flight",
    lines: [
      ["versions behind, mean", (c) => c.lag_mean],
      ["highest", (c) => c.lag_max],
    ],
  },
];

function rollouts(columns) {
  return columns.affinity.map((count, i) => count + columns.spilled[i] + columns.unmatched[i]);
}

function rate(columns, counts) {
  return over(columns.at, (now, before) => difference(counts, now, before) / (columns.at[now] - columns.at[before]));
}

function share(columns, parts, all) {
  return over(columns.at, (now, before) => {
    const whole = difference(all, now, before);
    return whole > 0 ? (100 * difference(parts, now, before)) / whole : null;
  });
}

function difference(counts, now, before) {
  return counts[now] - counts[before];
}

/** Compare each sample with that of WINDOW_S before. What is not a number, or fell, is a gap. */
function over(times, compare) {
  let before = 0;
  return times.map((at, now) => {
    while (times[before] < at - WINDOW_S) before += 1;
    const value = before < now ? compare(now, before) : null;
    return value === null || !(value >= 0) ? null : value;
  });
}
