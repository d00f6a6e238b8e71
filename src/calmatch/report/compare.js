// The charts of several runs: the same axes, one line each; the legend chooses which are shown.
const hidden = new Set();
const shownRuns = () => DATA.runs.map((run, k) => ({ run, ...look(k) })).filter(({ run }) => !hidden.has(run));

function overlay(pointsOf, options) {
  return (width, out) => {
    const series = shownRuns().map(({ run, ...style }) => ({ name: run.title, points: pointsOf(run), ...style }));
    if (!series.some((one) => one.points.length)) return make("p", { class: "empty" }, "Nothing to show.");
    return lines(width, series, { value: (p) => `${p.y.toFixed(1)} %`, ...options }, out);
  };
}

const diagonal = () => Plot.line([[0, 0], [100, 100]], { stroke: "currentColor", strokeDasharray: "6 5", strokeOpacity: 0.7 });
const filled = (run) => run.bins.filter((bin) => bin.n >= 5);
const confidenceAxis = { x: "confidence, %", xDomain: [0, 100], say: (x) => `Confidence ${x.toFixed(0)} %` };
const bySteps = { x: "step", say: (x) => `Step ${whole(x)}` };
const overTime = (field) => (run) => {
  const split = run.tested.some((line) => line.split === "test") ? "test" : "validation"; // a fit has no test set
  return run.tested.filter((line) => line.split === split && line[field] !== undefined).map((line) => ({ x: line.step, y: 100 * line[field] }));
};

const COMPARED = () => ({
  reliability: overlay(
    (run) => filled(run).map((bin) => ({ x: 100 * bin.confidence, y: 100 * bin.accuracy, n: bin.n })),
    { ...confidenceAxis, y: "accuracy, %", yDomain: [0, 100], height: 420, markers: 15, under: [diagonal()],
      xs: DATA.runs[0].bins.map((bin) => 50 * (bin.left + bin.right)), label: "Reliability diagrams of all runs",
      value: (p) => `${p.y.toFixed(1)} % of ${whole(p.n)}` },
  ),
  histogram: overlay(
    (run) => run.bins.map((bin) => ({ x: 50 * (bin.left + bin.right), y: (100 * bin.n) / run.n })),
    { ...confidenceAxis, y: "share of pictures, %", markers: 15, label: "Confidence of all runs" },
  ),
  smooth: overlay(
    (run) => run.smooth.at.map((at, k) => ({ x: 100 * at, y: 100 * run.smooth.accuracy[k] })),
    { ...confidenceAxis, y: "accuracy, %", yDomain: [0, 100], markers: 8, under: [diagonal()], label: "Smooth calibration curves of all runs" },
  ),
  risk: overlay(
    (run) => run.risk.map((row) => ({ x: 100 * row.coverage, y: 100 * row.error })),
    { x: "answered, % of pictures", y: "error among answered, %", xDomain: [0, 100], height: 320, markers: 8, xs: d3.range(2, 101, 2),
      label: "Error against share answered, of all runs", say: (x) => `Answering ${x.toFixed(0)} % of pictures`, value: (p) => `${p.y.toFixed(2)} %` },
  ),
  gaps: overlay(
    (run) => run.gaps.map((y, k) => ({ x: DATA.gapGrid[k], y })),
    { x: "largest logit minus smallest", y: "density", yTicks: [], markers: 8, height: 320, label: "Largest logit distance of all runs",
      say: (x) => `Distance ${x.toFixed(1)}`, value: (p) => p.y.toFixed(3) },
  ),
  curves: overlay(overTime("error"), { ...bySteps, y: "error, %", label: "Error over training steps" }),
  "ece-curves": overlay(overTime("ece"), { ...bySteps, y: "ECE, percentage points", label: "Calibration error over training steps" }),
  agreement: overlay(
    (run) => run.trained.filter((line) => line.agree !== undefined).map((line) => ({ x: line.step, y: 100 * line.agree })),
    { ...bySteps, y: "agreeing, % of those in use", yDomain: [0, 100], label: "Agreement of weak and strong views over training steps" },
  ),
});

function legend(redraw) {
  const box = document.getElementById("legend");
  DATA.runs.forEach((run, k) => {
    const check = make("input", { type: "checkbox" });
    check.checked = true;
    check.addEventListener("change", () => {
      hidden[check.checked ? "delete" : "add"](run);
      redraw();
    });
    box.append(make("label", {}, check, swatch(look(k)), run.title));
  });
}
