// The charts of a single run.
const LOOKS = { style: { fontSize: "12px", background: "none" } };
const name = (id) => DATA.classes[id];

function reliability(width, out) {
  const run = DATA.runs[0];
  const size = Math.min(width, 520);
  const bins = run.bins.map((bin, place) => ({ ...bin, place })).filter((bin) => bin.n);
  const most = d3.max(bins, (bin) => bin.n);
  const [left, right, top, bottom] = [50, 12, 12, 44];
  const plot = Plot.plot({
    ...LOOKS, width: size, height: size, marginLeft: left, marginRight: right, marginTop: top, marginBottom: bottom,
    x: { domain: [0, 100], label: "confidence, %", labelAnchor: "center", labelArrow: "none", ticks: 6 },
    y: { domain: [0, 100], label: null, ticks: 6 },
    opacity: { type: "identity" },
    marks: [
      Plot.gridX(GRID), Plot.gridY(GRID),
      Plot.rect(bins, { x1: (d) => 100 * d.left, x2: (d) => 100 * d.right, y1: 0, y2: (d) => 100 * d.accuracy, inset: 0.75,
        fill: "var(--c1)", fillOpacity: (d) => 0.18 + 0.62 * Math.sqrt(d.n / most) }),
      Plot.line([[0, 0], [100, 100]], { stroke: "currentColor", strokeDasharray: "6 5", strokeOpacity: 0.7 }),
      Plot.ruleX(bins, { x: (d) => 100 * d.confidence, y1: (d) => 100 * d.low, y2: (d) => 100 * d.high, stroke: "var(--c2)", strokeWidth: 2 }),
      Plot.dot(bins, { x: (d) => 100 * d.confidence, y: (d) => 100 * d.accuracy, r: 4.5, fill: "var(--c2)", stroke: "var(--card)" }),
      Plot.text([[14, 93, "not sure enough"], [86, 7, "too sure"]], { x: "0", y: "1", text: "2", fill: "var(--faint)", fontStyle: "italic", stroke: "var(--card)", strokeWidth: 4 }),
      sideLabel("accuracy, %"),
    ],
  });
  plot.setAttribute("aria-label", "Reliability diagram: accuracy against confidence, by bin");
  const x = plot.scale("x");
  const items = bins.map((bin) => ({
    x: x.apply(100 * bin.left), width: x.apply(100 * bin.right) - x.apply(100 * bin.left), y: top, height: size - top - bottom,
    label: `${binTitle(bin)}: ${whole(bin.n)} pictures, confidence ${percent(bin.confidence)}, accuracy ${percent(bin.accuracy)}`,
    datum: bin,
  }));
  const bars = spots(plot, items, (bin) => out.replaceChildren(...binWords(bin, run)));
  // at first the bin that adds most to the calibration error
  bars.choose(d3.maxIndex(bins, (bin) => bin.n * Math.abs(bin.confidence - bin.accuracy)));
  return plot;
}

const binTitle = (bin) => `Confidence ${(100 * bin.left).toFixed(0)} to ${(100 * bin.right).toFixed(0)} %`;

function binWords(bin, run) {
  const gap = 100 * (bin.confidence - bin.accuracy);
  const inside = bin.low <= bin.confidence && bin.confidence <= bin.high;
  const side = inside ? "could be chance" : gap > 0 ? "too sure" : "not sure enough";
  const facts = make("dl", { class: "bin" });
  const rows = [
    ["pictures", `${whole(bin.n)} (${percent(bin.n / run.n)} of all)`],
    ["confidence", `${percent(bin.confidence)} on average`],
    ["accuracy", `${percent(bin.accuracy)} (95 %: ${between(bin.low, bin.high)})`],
    ["difference", `${gap > 0 ? "+" : ""}${signed(gap)} points: ${side}`],
  ];
  for (const [term, text] of rows) facts.append(make("dt", {}, term), make("dd", {}, text));
  const words = [make("p", { class: "bin-title" }, binTitle(bin)), facts];
  if (!DATA.pictures) return words;
  const strip = make("ul", { class: `strip ${DATA.pictures.side <= 32 ? "pixels" : ""}` });
  for (const row of DATA.inBins[bin.place]) strip.append(example(DATA.pictures.shown[row]));
  if (!strip.children.length) return words;
  return [...words, make("p", { class: "fine" }, "Up to three wrong and three right ones:"), strip];
}

function example(picture) {
  const ok = picture.truth === picture.guess;
  const words = ok ? name(picture.guess) : `${name(picture.guess)}, is ${name(picture.truth)}`;
  const few = ok ? short(name(picture.guess), 16) : `${short(name(picture.guess), 16)}, is ${short(name(picture.truth), 16)}`;
  const sign = make("span", { class: ok ? "ok" : "no" }, ok ? "✓ " : "✗ ");
  return make("li", {}, image(picture, words), sign, few);
}

function image(picture, words) {
  return make("img", { src: picture.src, alt: `${picture.name}: ${words}`, title: picture.name });
}

function histogram(width, out) {
  const run = DATA.runs[0];
  const [height, top, bottom] = [280, 14, 44];
  const bins = run.bins;
  const most = 100 * d3.max(bins, (bin) => bin.n / run.n);
  const left = (run.confidence + run.accuracy) / 2 < 0.45; // labels stand where there is room
  const marks = [["mean confidence", run.confidence, null], ["accuracy", run.accuracy, "5 4"]];
  const plot = Plot.plot({
    ...LOOKS, width, height, marginLeft: 50, marginRight: 14, marginTop: top, marginBottom: bottom,
    x: { domain: [0, 100], label: "confidence, %", labelAnchor: "center", labelArrow: "none", ticks: 6 },
    y: { domain: [0, 1.12 * most], label: null, ticks: 6 },
    marks: [
      Plot.gridY(GRID),
      Plot.rect(bins, { x1: (d) => 100 * d.left, x2: (d) => 100 * d.right, y1: 0, y2: (d) => (100 * d.n) / run.n, inset: 0.75, fill: "var(--c1)", fillOpacity: 0.75 }),
      Plot.ruleY([0], { stroke: "var(--grid)" }),
      ...marks.flatMap(([text, value, dash], k) => [
        Plot.ruleX([100 * value], { stroke: "var(--c2)", strokeWidth: 2, strokeDasharray: dash }),
        Plot.text([100 * value], { x: (d) => d, y: most * (1.08 - 0.09 * k), text: () => `${text} ${percent(value)} ${k ? "┄" : "─"}`, textAnchor: left ? "start" : "end", dx: left ? 6 : -6, fill: "currentColor" }),
      ]),
      sideLabel("share of pictures, %"),
    ],
  });
  plot.setAttribute("aria-label", "Histogram of confidence");
  const x = plot.scale("x");
  const items = bins.map((bin) => ({
    x: x.apply(100 * bin.left), width: x.apply(100 * bin.right) - x.apply(100 * bin.left), y: top, height: height - top - bottom,
    label: `${binTitle(bin)}: ${whole(bin.n)} pictures, ${percent(bin.n / run.n)}`, datum: bin,
  }));
  spots(plot, items, (bin, item) => out.replaceChildren(item.label));
  return plot;
}

function smooth(width, out) {
  const curve = DATA.runs[0].smooth;
  const points = curve.at.map((at, k) => ({ x: 100 * at, y: 100 * curve.accuracy[k], low: 100 * curve.low[k], high: 100 * curve.high[k] }));
  const hills = curve.density.map((value, k) => ({ x: (100 * k) / (curve.density.length - 1), y: 16 * value }));
  return lines(width, [{ name: "accuracy", points, ...look(0) }], {
    x: "confidence, %", y: "accuracy, %", xDomain: [0, 100], yDomain: [0, 100], markers: 0,
    label: "Smoothed accuracy against confidence",
    under: [
      Plot.areaY(hills, { x: "x", y: "y", fill: "var(--grid)", fillOpacity: 0.35 }),
      Plot.line([[0, 0], [100, 100]], { stroke: "currentColor", strokeDasharray: "6 5", strokeOpacity: 0.7 }),
    ],
    xs: points.map((point) => point.x),
    say: (x) => `Confidence ${x.toFixed(0)} %`, value: (p) => `${p.y.toFixed(1)} % (95 %: ${p.low.toFixed(1)}–${p.high.toFixed(1)} %)`,
  }, out);
}

function risk(width, out) {
  const run = DATA.runs[0];
  const point = run.point;
  const points = run.risk.map((row) => ({ x: 100 * row.coverage, y: 100 * row.error, low: 100 * row.low, high: 100 * row.high, row }));
  const promised = run.risk.map((row) => ({ x: 100 * row.coverage, y: 100 * row.promised, row }));
  const mark = point && [{ x: 100 * point.coverage, y: 100 * point.error }];
  const text = point && `answer above ${percent(point.threshold)}: ${percent(point.coverage, 0)} of pictures`;
  const over = !point ? [] : [
    Plot.ruleX(mark, { x: "x", y1: 0, y2: "y", stroke: "var(--c4)", strokeDasharray: "2 3" }),
    Plot.dot(mark, { x: "x", y: "y", r: 8, symbol: "diamond", fill: "var(--c4)", stroke: "var(--card)", strokeWidth: 1.5 }),
    Plot.text(mark, { x: "x", y: "y", text: () => text, textAnchor: point.coverage > 0.45 ? "end" : "start", dx: point.coverage > 0.45 ? -14 : 14, dy: -8, fill: "currentColor", stroke: "var(--card)", strokeWidth: 4 }),
  ];
  // the interval of the first few answers is as wide as the chart and says nothing
  const most = d3.max(run.risk.filter((row) => row.coverage >= 0.1), (row) => Math.max(row.high, row.promised));
  const series = [
    { name: "error", points, ...look(0) },
    { name: "promised", points: promised, ...look(1) },
  ];
  const plot = lines(width, series, {
    x: "answered, % of pictures", y: "error among answered, %", xDomain: [0, 100], yDomain: [0, Math.min(100, 115 * most)], height: 320, markers: 0, over,
    label: "Error among answered pictures against the share that is answered",
    say: (x) => {
      const near = d3.least(points, (p) => Math.abs(p.x - x)).row;
      return `Answering above ${percent(near.threshold, 2)} confidence, ${percent(near.coverage)} of pictures (${whole(near.n)})`;
    },
    value: (p) => (p.low === undefined ? `${p.y.toFixed(2)} %` : `${p.y.toFixed(2)} % (95 %: ${p.low.toFixed(1)}–${p.high.toFixed(1)} %)`),
  }, out);
  return [key(series.map((one, k) => ({ ...one, name: ["error", "error promised by the confidence"][k] })), true), plot];
}

// A legend above a chart.
function key(series, plain) {
  const row = make("div", { class: "key" });
  for (const one of series) {
    const style = plain ? { ...one, symbol: "circle" } : one;
    row.append(make("span", {}, swatch(style), one.name));
  }
  return row;
}

function confusion(width, out) {
  const { order, totals, cells } = DATA.confusion;
  const many = order.length > 25;
  const longest = d3.max(order, (id) => name(id).length);
  const letters = Math.min(longest, width < 420 ? 8 : 14);
  const margin = many ? 28 : 30 + 7 * letters;
  const size = Math.min(width, 560);
  const label = (k) => short(name(order[k]), letters);
  const data = cells.map(([t, p, n]) => ({ t, p, n, share: n / totals[t] }));
  const axis = { domain: d3.range(order.length), label: null, tickFormat: label, tickSize: 0, padding: 0.04 };
  const strength = (d) => 0.12 + 0.83 * Math.sqrt(d.share);
  const plot = Plot.plot({
    ...LOOKS, width: size, height: size, marginLeft: margin, marginBottom: margin, marginTop: 8, marginRight: 8,
    x: { ...axis, tickRotate: longest > 2 ? -90 : 0, axis: many ? null : "bottom" },
    y: { ...axis, axis: many ? null : "left" },
    opacity: { type: "identity" },
    color: { type: "ordinal", domain: ["right", "wrong", "ink", "card"], range: ["var(--c1)", "var(--c2)", "var(--ink)", "var(--card)"] },
    marks: [
      Plot.frame({ stroke: "var(--grid)", strokeOpacity: 0.4 }),
      Plot.cell(data, { x: "p", y: "t", fill: (d) => (d.p === d.t ? "right" : "wrong"), fillOpacity: strength, rx: many ? 0 : 3 }),
      order.length <= 12 ? Plot.text(data, { x: "p", y: "t", text: (d) => whole(d.n), fill: (d) => (strength(d) > 0.6 ? "card" : "ink"), fontSize: size < 420 ? 10 : 12 }) : null,
      Plot.text(["guess"], { frameAnchor: "bottom", dy: margin - 4, text: (d) => d }),
      Plot.text(["truth"], { frameAnchor: "left", dx: 6 - margin, rotate: -90, text: (d) => d, textAnchor: "middle" }),
    ],
  });
  plot.setAttribute("aria-label", "Confusion matrix: truth by row, guess by column");
  const [x, y] = [plot.scale("x"), plot.scale("y")];
  const items = data.map((d) => ({
    x: x.apply(d.p), y: y.apply(d.t), width: x.bandwidth, height: y.bandwidth, row: d.t, column: d.p, datum: d, label: cellTitle(d),
  }));
  const squares = spots(plot, items, (d) => out.replaceChildren(...cellWords(d)));
  const mistakes = d3.range(data.length).filter((k) => data[k].t !== data[k].p);
  const pictured = mistakes.filter((k) => examplesOf(data[k]).length);
  if (data.length) squares.choose(d3.greatest(pictured.length ? pictured : mistakes, (k) => data[k].n) ?? 0);
  return plot;
}

function cellTitle({ t, p, n, share }) {
  const [truth, guess] = [t, p].map((k) => name(DATA.confusion.order[k]));
  if (t === p) return `${truth}: ${whole(n)} right, ${percent(share)} of its pictures`;
  return `${truth} taken for ${guess}: ${whole(n)}, ${percent(share)} of the pictures of ${truth}`;
}

function cellWords(d) {
  const words = [make("p", { class: "bin-title" }, cellTitle(d))];
  if (!DATA.pictures) return words;
  const some = examplesOf(d);
  const strip = make("ul", { class: `strip ${DATA.pictures.side <= 32 ? "pixels" : ""}` }, ...some.slice(0, 8).map(example));
  if (!some.length) return [...words, make("p", { class: "fine" }, "No picture of these was kept.")];
  return [...words, make("p", { class: "fine" }, `Pictures kept: ${some.length} of ${whole(d.n)}`), strip];
}

function examplesOf({ t, p }) {
  const [truth, guess] = [t, p].map((k) => DATA.confusion.order[k]);
  return Object.values(DATA.pictures?.shown ?? {}).filter((picture) => picture.truth === truth && picture.guess === guess);
}

function logits(width, out) {
  const chosen = +document.getElementById("logit-class").value;
  const rows = DATA.logits.classes[chosen];
  if (!rows.length) return make("p", { class: "empty" }, "Fewer than two pictures of this class.");
  const title = (row) => (row.of === "rest" ? "all others" : name(row.of));
  const letters = width < 420 ? 9 : 16;
  const margin = 16 + 7 * Math.min(letters, d3.max(rows, (row) => title(row).length));
  const [step, tall, top, bottom] = [34, 52, 30, 44];
  const height = top + bottom + step * rows.length;
  const most = d3.max(rows, (row) => d3.max(row.y));
  const marks = rows.map((row, k) => {
    const points = row.y.map((y, j) => ({ x: DATA.logits.x[j], y: -k + (tall / step) * (y / most) }));
    const colour = k === 0 ? "var(--c1)" : row.of === "rest" ? "var(--grid)" : "var(--c2)";
    return [
      Plot.areaY(points, { x: "x", y1: -k, y2: "y", curve: "monotone-x", fill: colour, fillOpacity: k ? 0.3 : 0.6 }),
      Plot.lineY(points, { x: "x", y: "y", curve: "monotone-x", stroke: colour, strokeWidth: k ? 1.3 : 2 }),
    ];
  });
  const plot = Plot.plot({
    ...LOOKS, width, height, marginLeft: margin, marginRight: 14, marginTop: top, marginBottom: bottom,
    x: { label: "logit, shifted to mean zero per picture", labelAnchor: "center", labelArrow: "none", ticks: width < 420 ? 5 : 10 },
    y: { domain: [-rows.length + 1, 1], axis: null },
    marks: [
      Plot.gridX(GRID), marks,
      Plot.text(rows, { x: () => DATA.logits.x[0], y: (d, k) => -k, text: (d) => short(title(d), letters), textAnchor: "end", dx: -8, dy: -5, fontWeight: (d, k) => (k ? 400 : 700) }),
    ],
  });
  plot.setAttribute("aria-label", `Logit densities of the pictures of ${name(chosen)}`);
  const y = plot.scale("y");
  const items = rows.map((row, k) => ({
    x: margin, width: width - margin - 14, y: y.apply(-k) - step, height: step, datum: row,
    label: `${k ? "Logit of" : "Logit of the true class"} ${title(row)}: mean ${signed(row.mean)}, nine in ten between ${signed(row.low)} and ${signed(row.high)}`,
  }));
  spots(plot, items, (row, item) => out.replaceChildren(item.label));
  return plot;
}

function curves(width, out) {
  const kinds = [["error", "error"], ["ece", "ECE"]];
  const splits = [...new Set(DATA.runs[0].tested.map((line) => line.split))];
  const series = kinds.flatMap(([field, title], k) => splits.map((split, j) => ({
    name: splits.length > 1 ? `${title} (${split})` : title, ...look(k + 2 * j),
    points: DATA.runs[0].tested.filter((line) => line.split === split && line[field] !== undefined).map((line) => ({ x: line.step, y: 100 * line[field] })),
  })));
  return overSteps(width, series, { y: "error and ECE, %", label: "Error and calibration error over training steps" }, out, "This run was not measured while it was trained.");
}

function agreement(width, out) {
  const kinds = [["agree", "agreeing"], ["accepted", "in use"], ["pseudo_accuracy", "right"]];
  const series = kinds.map(([field, title], k) => ({
    name: title, ...look(k),
    points: DATA.runs[0].trained.filter((line) => line.accepted !== undefined && line[field] !== undefined).map((line) => ({ x: line.step, y: 100 * line[field] })),
  }));
  return overSteps(width, series, { y: "share, %", yDomain: [0, 100], label: "Agreement of weak and strong views over training steps" }, out, DATA.runs[0].trained.length ? "No unlabelled pictures were used." : "This run kept no record of its training.");
}

function overSteps(width, series, options, out, nothing) {
  const alive = series.filter((one) => one.points.length);
  if (!alive.length) return make("p", { class: "empty" }, nothing);
  const plot = lines(width, alive, { x: "step", say: (x) => `Step ${whole(x)}`, value: (p) => `${p.y.toFixed(1)} %`, ...options }, out);
  return [key(alive), plot];
}
