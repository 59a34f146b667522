// The charts: drawn by uPlot, each with its values as text beside it and a sentence for who cannot see it.

import uPlot from "./uplot/uPlot.esm.js";
import { el, part, setAttribute, setText } from "./dom.js";
import { clock, figure, NOTHING } from "./format.js";
import { CHARTS } from "./series.js";

const HEIGHT = 150;
const KEPT_S = 900;
const SHORTEST_S = 60;
const COLOURS = ["--line-1", "--line-2", "--line-3"];
const DASHES = [[], [6, 4], [2, 3]]; // told apart without colours, too

let columns = { at: [] };
let drawn = [];

/** Begin anew with the columns of a history. */
export function startCharts(history) {
  columns = history;
  draw();
}

/** Add the sample of a snapshot. */
export function addSample(sample) {
  if (sample.at <= (columns.at.at(-1) ?? 0)) return;
  for (const [name, values] of Object.entries(columns)) {
    values.push(sample[name]);
    if (sample.at - columns.at[0] > KEPT_S + 10) values.shift();
  }
  for (const chart of drawn) chart.refresh();
}

/** The last value of a chart's first line, or null. */
export function latest(title) {
  const chart = CHARTS.find((one) => one.title === title);
  return columns.at.length ? (chart.lines[0][1](columns).at(-1) ?? null) : null;
}

function draw() {
  for (const chart of drawn) chart.end();
  const place = document.getElementById("charts");
  place.replaceChildren();
  drawn = CHARTS.map((chart) => newChart(chart, place));
}

function newChart(chart, place) {
  const plot = el("div", { class: "plot", role: "img" });
  const values = chart.lines.map(([title], i) =>
    el(
      "li",
      {},
      el("span", { class: "stroke", "data-line": i + 1, "aria-hidden": "true" }),
      `${title} `,
      el("strong", { "data-field": `value-${i}` }, NOTHING),
    ),
  );
  const figureNode = el(
    "figure",
    { class: "card" },
    el("figcaption", {}, el("h3", {}, chart.title), el("span", { class: "quiet", "data-field": "moment" })),
    plot,
    el("ul", { class: "legend" }, ...values),
  );
  place.append(figureNode);

  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const options = {
    width: Math.max(plot.clientWidth, 100),
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 24, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "charts" } },
    scales: { x: { range: rangeX }, y: { range: (_, low, high) => [0, chart.top ?? roundUp(high)] } },
    axes: [
      axis(colour, { values: (_, ticks) => ticks.map(tickLabel), size: 26, space: 72 }),
      axis(colour, { size: 44, space: 36 }),
    ],
    series: [
      {},
      ...chart.lines.map(([title], i) => ({
        label: title,
        stroke: colour(COLOURS[i]),
        dash: DASHES[i],
        width: 1.75,
        fill: i === 0 && chart.lines.length === 1 ? colour("--line-fill") : undefined,
        points: { show: false },
        spanGaps: false,
      })),
    ],
    hooks: { setCursor: [(self) => showValues(self.cursor.idx ?? null)] },
  };
  let data = compute();
  const drawing = new uPlot(options, data, plot);
  const size = new ResizeObserver(() => drawing.setSize({ width: Math.max(plot.clientWidth, 100), height: HEIGHT }));
  size.observe(plot);

  function compute() {
    return [columns.at, ...chart.lines.map(([, values]) => values(columns))];
  }

  function showValues(index) {
    const last = columns.at.length - 1;
    const at = index ?? last;
    chart.lines.forEach((_, i) => setText(part(figureNode, `value-${i}`), withUnit(data[i + 1][at], chart.unit)));
    setText(part(figureNode, "moment"), index === null ? "" : clock(data[0][at]));
  }

  function refresh() {
    data = compute();
    drawing.setData(data);
    showValues(drawing.cursor.idx ?? null);
    setAttribute(plot, "aria-label", describe(chart, data));
  }

  refresh();
  return {
    refresh,
    end: () => {
      size.disconnect();
      drawing.destroy();
    },
  };
}

function axis(colour, more) {
  return {
    stroke: colour("--quiet"),
    font: `11px ${getComputedStyle(document.body).fontFamily}`,
    grid: { stroke: colour("--rule"), width: 1 },
    ticks: { show: false },
    ...more,
  };
}

function tickLabel(at) {
  const time = clock(at);
  return time.endsWith(":00") ? time.slice(0, 5) : time;
}

function withUnit(value, unit) {
  return unit && value !== null && value !== undefined ? `${figure(value)} ${unit}` : figure(value);
}

function rangeX(_, low, high) {
  const end = high ?? Date.now() / 1000;
  return [Math.min(Math.max(low ?? end, end - KEPT_S), end - SHORTEST_S), end];
}

/** The end of the y axis: 1, 2 or 5 times a power of ten above the highest value. */
function roundUp(high) {
  if (!high || high < 1) return 1;
  const power = 10 ** Math.floor(Math.log10(high));
  return [1, 2, 5, 10].map((step) => step * power).find((end) => end >= high);
}

function describe(chart, [, ...lines]) {
  const told = chart.lines.map(([title], i) => {
    const known = lines[i].filter((value) => value !== null);
    if (!known.length) return `${title}: nothing yet`;
    const [low, high] = [Math.min(...known), Math.max(...known)].map(figure);
    return `${title}: now ${figure(lines[i].at(-1))}, between ${low} and ${high}`;
  });
  return `${chart.title}${chart.unit ? ` (${chart.unit})` : ""}. ${told.join(". ")}.`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
