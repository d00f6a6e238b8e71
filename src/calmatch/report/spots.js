"use strict";
// Small things that all charts share: elements, numbers, and spots that can be pointed at or focused.
const SVG = "http://www.w3.org/2000/svg";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)"];
const DASHES = ["none", "7 4", "2 3", "10 3 2 3", "5 2", "12 5"];
const SYMBOLS = ["circle", "square", "triangle", "diamond", "star", "wye"];

// An element; children that are strings become text, so no name can become markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

function drawn(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent.append(element);
  return element;
}

const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}\u00a0%`;
const between = (low, high) => `${(100 * low).toFixed(1)}–${(100 * high).toFixed(1)}\u00a0%`;
const signed = (value) => value.toFixed(1).replace("-", "−");
const whole = (number) => number.toLocaleString("en-US");
const short = (name, length) => (name.length > length ? name.slice(0, length - 1) + "…" : name);
const look = (k) => ({
  colour: COLOURS[k % COLOURS.length],
  dash: DASHES[k % DASHES.length],
  symbol: SYMBOLS[k % SYMBOLS.length],
});

// A line with its marker, for legends: runs differ without colour too.
function swatch(style) {
  const box = make("span");
  const svg = drawn("svg", { width: 34, height: 14, "aria-hidden": "true" }, box);
  const line = { x1: 1, x2: 33, y1: 7, y2: 7, stroke: style.colour, "stroke-width": 2 };
  drawn("line", { ...line, "stroke-dasharray": style.dash }, svg);
  const path = d3.symbol(d3[`symbol${style.symbol[0].toUpperCase()}${style.symbol.slice(1)}`], 46)();
  drawn("path", { d: path, fill: style.colour, transform: "translate(17,7)" }, svg);
  return box;
}

// Places of a chart that show something: by pointer, by touch, by Tab and the arrow keys.
// `items` are {x, y, width, height, label, datum, row, column}; one of them is a tab stop.
function spots(svg, items, show) {
  svg.setAttribute("role", "group");
  const layer = drawn("g", { class: "spots" }, svg);
  const rects = items.map((item) => {
    const box = { x: item.x, y: item.y, width: Math.max(1, item.width), height: Math.max(1, item.height) };
    return drawn("rect", { ...box, class: "spot", tabindex: -1, role: "img", "aria-label": item.label }, layer);
  });
  if (rects.length) rects[0].setAttribute("tabindex", 0);
  const choose = (place) => {
    rects.forEach((rect, k) => {
      rect.classList.toggle("on", k === place);
      rect.setAttribute("tabindex", k === place ? 0 : -1);
    });
    show(items[place].datum, items[place]);
  };
  const step = (place, key) => {
    const flat = items[place].column === undefined;
    if (key === "Home") return 0;
    if (key === "End") return items.length - 1;
    if (flat) return place + { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[key];
    return beside(items, place, key);
  };
  rects.forEach((rect, place) => {
    rect.addEventListener("pointerenter", () => choose(place));
    rect.addEventListener("click", () => rect.focus());
    rect.addEventListener("focus", () => choose(place));
    rect.addEventListener("keydown", (event) => {
      if (!/^(Arrow|Home$|End$)/.test(event.key)) return;
      event.preventDefault();
      const next = step(place, event.key);
      if (rects[next]) rects[next].focus();
    });
  });
  return { choose };
}

// The nearest spot of a grid in the direction of an arrow key.
function beside(items, place, key) {
  const from = items[place];
  const [along, across, sign] = {
    ArrowLeft: ["column", "row", -1],
    ArrowRight: ["column", "row", 1],
    ArrowUp: ["row", "column", -1],
    ArrowDown: ["row", "column", 1],
  }[key];
  let best = -1;
  let least = Infinity;
  items.forEach((item, k) => {
    const ahead = sign * (item[along] - from[along]);
    const cost = ahead + 1000 * Math.abs(item[across] - from[across]);
    if (ahead > 0 && cost < least) [best, least] = [k, cost];
  });
  return best;
}

// Slots of a line chart: full-height strips around each x.
function strips(svg, plot, xs, height, describe, show) {
  const x = plot.scale("x");
  const places = xs.map((value) => x.apply(value));
  const [left, right] = [x.range[0], x.range[1]];
  const items = xs.map((value, k) => {
    const from = k ? (places[k - 1] + places[k]) / 2 : left;
    const to = k < xs.length - 1 ? (places[k] + places[k + 1]) / 2 : right;
    const box = { x: from, width: to - from, y: height[0], height: height[1] - height[0] };
    return { ...box, label: describe(value, k), datum: value };
  });
  return spots(svg, items, show);
}

// Lines over a common x: series are {name, points: [{x, y, low, high}], colour, dash, symbol}.
function lines(width, series, options, out) {
  const [top, bottom, height] = [14, 44, options.height || 280];
  const alive = series.filter((one) => one.points.length);
  const values = alive.flatMap((one) => one.points);
  const most = d3.max(values, (point) => point.high ?? point.y);
  const marks = [Plot.gridX(GRID), Plot.gridY(GRID), ...(options.under || [])];
  for (const one of alive) {
    const stroke = { x: "x", y: "y", stroke: one.colour, strokeWidth: 2, clip: true };
    if (one.points.some((point) => point.high !== undefined)) {
      marks.push(Plot.areaY(one.points, { x: "x", y1: "low", y2: "high", fill: one.colour, fillOpacity: 0.16, clip: true }));
    }
    marks.push(Plot.lineY(one.points, { ...stroke, strokeDasharray: one.dash === "none" ? null : one.dash }));
    const few = thinned(one.points, options.markers ?? 12);
    marks.push(Plot.dot(few, { x: "x", y: "y", fill: one.colour, r: 3.5, symbol: one.symbol }));
  }
  const plot = Plot.plot({
    width, height, marginLeft: 50, marginRight: 14, marginTop: top, marginBottom: bottom,
    style: { fontSize: "12px", background: "none" },
    x: { label: options.x, labelAnchor: "center", labelArrow: "none", domain: options.xDomain, ticks: width < 420 ? 4 : 8 },
    y: { label: null, domain: options.yDomain || [0, 1.08 * most || 1], ticks: options.yTicks ?? 6, nice: !options.yDomain },
    marks: [...marks, ...(options.over || []), sideLabel(options.y)],
  });
  plot.setAttribute("aria-label", options.label);
  const xs = options.xs || [...new Set(values.map((point) => point.x))].sort((a, b) => a - b);
  const at = xs.length > 120 ? d3.range(61).map((k) => xs[Math.round((k / 60) * (xs.length - 1))]) : xs;
  const reach = at.length > 1 ? (at[at.length - 1] - at[0]) / (at.length - 1) : Infinity;
  const say = (x) => {
    const parts = alive.map((one) => [one, one.points[d3.leastIndex(one.points, (p) => Math.abs(p.x - x))]]);
    const near = parts.filter(([, point]) => Math.abs(point.x - x) <= reach);
    return `${options.say(x)}: ${near.map(([one, p]) => `${one.name} ${options.value(p)}`).join("; ")}`;
  };
  strips(plot, plot, at, [top, options.height ? height - bottom : 280 - bottom], say, (x) => out.replaceChildren(say(x)));
  return plot;
}

const GRID = { stroke: "var(--grid)", strokeOpacity: 0.22 };
const sideLabel = (text) =>
  Plot.text([text], { frameAnchor: "left", rotate: -90, dx: -40, text: (d) => d, textAnchor: "middle", fill: "currentColor" });

function thinned(points, most) {
  if (points.length <= most) return points;
  return d3.range(most).map((k) => points[Math.round((k / (most - 1)) * (points.length - 1))]);
}
