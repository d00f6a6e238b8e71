// The labelling page. The server holds the truth: every change says what it changes, and the next
// picture appears when the answer is on disk. Names and labels are only ever text, never markup.
"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, text = "", more = {}) => Object.assign(document.createElement(tag), { textContent: text }, more);
const draw = (tag, settings, text = "") => {
  const part = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(settings)) part.setAttribute(key, value);
  part.textContent = text;
  return part;
};
const OTHER = { none: "none of these", unsure: "cannot tell" };
const words = (answer) => (answer ? OTHER[answer[0]] || answer[1] : "");
const percent = (share) => `${Math.round(100 * share)} %`;

let state = null; // as the server said last
let current = null; // the picture in view: row, name, answer
let view = "one";
let trail = []; // rows seen before, the latest last
let ahead = []; // rows one has come back from
let waiting = false; // for an answer of the server
let timer = 0;

async function ask(path, body) {
  const settings = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  let answer;
  try {
    answer = await fetch(path, settings);
  } catch {
    throw new Error("The server does not answer. Is it still running? Nothing that was saved is lost.");
  }
  const content = await answer.json().catch(() => ({ error: "The server refuses; open the address that it printed." }));
  if (answer.status === 409) {
    state = content;
    await open(state.question);
    throw new Error(content.error);
  }
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// one thing at a time: a key that is pressed twice must not answer for the next picture
async function once(act) {
  if (waiting) return;
  waiting = true;
  $("trouble").hidden = true;
  try {
    await act();
  } catch (error) {
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
  }
  waiting = false;
  render();
  watch();
}

const source = (row, small) => `picture/${row}?v=${state.key}${small ? "&small" : ""}`;

async function open(item) {
  current = item;
  $("hint").hidden = true;
  $("broken").hidden = true;
  const picture = $("picture");
  picture.hidden = !item;
  $("name").textContent = item ? item.name : "";
  if (!item) {
    $("asks").textContent = "Every picture has an answer.";
    return;
  }
  picture.alt = `Picture to label: ${item.name}`;
  const place = new URL(source(item.row), location.href).href;
  if (picture.src !== place) {
    picture.classList.remove("tiny");
    picture.src = place;
    await picture.decode().catch(() => {});
    picture.classList.toggle("tiny", picture.naturalWidth > 0 && Math.max(picture.naturalWidth, picture.naturalHeight) <= 128);
  }
  if (view === "group") await group();
}

$("picture").addEventListener("error", () => { $("picture").hidden = true; $("broken").hidden = false; });

async function forward() {
  while (ahead.length) {
    const item = await ask(`see/one/${ahead.pop()}`);
    return open(item);
  }
  return open(state.question);
}

async function answer(after) {
  if (view === "group") return answerGroup(after);
  if (!current) return;
  const { row, name } = current;
  state = await ask("do/answer", { changes: [{ row, before: current.answer, after }] });
  say(`${name}: ${words(after)}.`);
  trail.push(row);
  await forward();
}

async function answerGroup(after) {
  const chosen = tiles().filter((tile) => tile.getAttribute("aria-pressed") === "true");
  if (!chosen.length) throw new Error("No picture is picked: choose some, or press A for all.");
  const changes = chosen.map((tile) => ({ row: Number(tile.dataset.row), before: null, after }));
  state = await ask("do/answer", { changes });
  say(`${changes.length} pictures: ${words(after)}.`);
  trail.push(...changes.map((each) => each.row));
  await open(state.question);
}

async function back() {
  while (trail.length) {
    const row = trail.pop();
    if (current && row === current.row) continue;
    const item = await ask(`see/one/${row}`);
    if (current) ahead.push(current.row);
    if (view !== "one") show("one");
    say(`Back to ${item.name}${item.answer ? `, which you called ${words(item.answer)}` : ""}.`);
    return open(item);
  }
  throw new Error("There is no earlier picture.");
}

async function undo() {
  state = await ask("do/undo", { version: state.version });
  if (!state.undone.length && !state.undoable) return say("Nothing is left to undo.");
  const [first] = state.undone;
  if (!first) return say("Undone.");
  trail = trail.filter((row) => !state.undone.some((item) => item.row === row));
  ahead = [];
  say(state.undone.length > 1 ? `Undone: ${state.undone.length} pictures.` : `Undone: ${first.name} is ${words(first.answer) || "without an answer"} again.`);
  await open(first);
}

async function skip() {
  if (!current) return;
  state = await ask("do/skip", { row: current.row });
  say(`Skipped ${current.name}.`);
  trail.push(current.row);
  await forward();
}

async function hint() {
  if (!current || view !== "one") return;
  const guesses = await ask(`see/guess/${current.row}`);
  $("hint").hidden = false;
  $("hint").textContent = guesses.length
    ? `The model's guess: ${guesses.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}.`
    : "There is no model yet.";
}

async function name(text) {
  const wanted = text.normalize("NFC").trim();
  if (!wanted) return;
  if (view === "list") state = await ask("do/class", { name: wanted });
  else await answer(["label", wanted]);
  $("new").value = "";
  $("new").blur();
}

const tiles = () => [...$("tiles").children];

async function group() {
  const items = current ? await ask(`see/group/${current.row}`) : [];
  $("tiles").replaceChildren(...items.map((item) => {
    const tile = make("button", "", { type: "button" });
    tile.dataset.row = item.row;
    tile.setAttribute("aria-pressed", "true");
    tile.append(make("img", "", { src: source(item.row, true), alt: item.name, loading: "lazy" }));
    tile.addEventListener("click", () => press(tile));
    return tile;
  }));
  if (tiles().length) tiles()[0].focus();
}

function press(tile, on = tile.getAttribute("aria-pressed") !== "true") {
  tile.setAttribute("aria-pressed", String(on));
}

function move(key) {
  const all = tiles(), place = all.indexOf(document.activeElement);
  const across = Math.max(1, all.filter((tile) => tile.offsetTop === all[0].offsetTop).length);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across }[key];
  const next = all[place < 0 ? 0 : place + step];
  if (next) next.focus();
}

async function list(start = 0) {
  const items = await ask(`see/labelled/${start}`);
  if (!start) $("answers").replaceChildren();
  for (const item of items) {
    const line = make("li"), choice = make("select");
    choice.setAttribute("aria-label", `Answer for ${item.name}`);
    const options = [...state.classes.map((each) => ["label", each.name]), ["none", ""], ["unsure", ""], null];
    for (const each of options) choice.add(new Option(words(each) || "no answer", JSON.stringify(each)));
    choice.value = JSON.stringify(item.answer);
    choice.addEventListener("change", () => once(async () => {
      const after = JSON.parse(choice.value);
      try {
        state = await ask("do/answer", { changes: [{ row: item.row, before: item.answer, after }] });
      } catch (error) {
        choice.value = JSON.stringify(item.answer);
        await list(); // another page may have answered it
        throw error;
      }
      item.answer = after;
      if (current && current.row === item.row) current.answer = after;
      say(`${item.name}: ${words(after) || "no answer"}.`);
    }));
    line.append(make("img", "", { src: source(item.row, true), alt: "", loading: "lazy" }), make("span", item.name, { title: item.name }), choice);
    $("answers").append(line);
  }
  $("more").hidden = items.length < 60;
  $("list-lede").textContent = $("answers").children.length ? "The newest first. Choose another class to correct one." : "Nothing yet.";
}

function show(which) {
  view = which;
  for (const part of ["one", "group", "list"]) $(part).hidden = part !== which;
  for (const button of document.querySelectorAll("[data-view]")) {
    if (button.dataset.view === which) button.setAttribute("aria-current", "page");
    else button.removeAttribute("aria-current");
  }
  $("classes").hidden = $("tools").hidden = which === "list";
  for (const what of ["skip", "hint"]) document.querySelector(`[data-do="${what}"]`).hidden = which === "group"; // of one picture
  $("hint").hidden = true;
}

async function turn(which) {
  show(which);
  if (which === "list") return list();
  if (which === "group") {
    if (!current || current.answer) await open(state.question);
    else await group();
  }
}

const say = (text) => { $("said").textContent = text; };

function render() {
  if (!state) return;
  $("classes").replaceChildren(...state.classes.map((each, place) => {
    const button = make("button", "", { type: "button" });
    if (place < 10) button.append(make("kbd", String((place + 1) % 10)), " ");
    button.append(each.name, make("small", String(each.count)));
    button.setAttribute("aria-pressed", String(view === "one" && words(current && current.answer) === each.name));
    button.addEventListener("click", () => once(() => answer(["label", each.name])));
    return button;
  }));
  $("known").replaceChildren(...state.classes.map((each) => make("option", "", { value: each.name })));
  $("was").textContent = current && current.answer ? `you said: ${words(current.answer)}` : "";
  if (current) $("asks").textContent = state.classes.length ? "What is this?" : "What is this? Type the name of its class.";
  $("new-label").textContent = state.classes.length ? "Another class" : "Its class";
  $("labels").textContent = state.labels;
  $("class-count").textContent = state.classes.length;
  $("fit").disabled = state.classes.filter((each) => each.count).length < 2 || Boolean(state.fit && state.fit.code === null);
  const sample = state.pictures < state.whole ? ` They are a random sample of ${state.whole.toLocaleString("en")}.` : "";
  $("where").textContent = `${state.answered} of ${state.pictures.toLocaleString("en")} pictures have an answer.${sample} Answers are in ${state.file}.`;
  const broken = $("unreadable");
  broken.hidden = !state.unreadable_count;
  broken.querySelector("summary").textContent = `${state.unreadable_count} files cannot be read`;
  broken.querySelector("ul").replaceChildren(...state.unreadable.map(([file, why]) => make("li", `${file}: ${why}`)));
  renderModel(state.model);
  renderFit(state.fit);
  for (const row of state.ahead) new Image().src = source(row);
}

function renderModel(model) {
  $("charts").hidden = !model;
  $("error").textContent = model ? Math.round(100 * model.error[0]) : "–";
  if (!model) {
    $("sentence").textContent = "A model learns as you label. It needs two classes and a label more.";
    return;
  }
  const [value, low, high] = model.error.map((share) => Math.round(100 * share));
  $("sentence").textContent = `Of 100 new pictures it would get about ${value} wrong (95 % interval ${low} to ${high}).${state.busy ? " Learning …" : ""}`;
  const [gain, least, most] = model.ten_more.map((share) => 100 * share);
  $("ten-more").textContent = most < 0.05
    ? "Ten more labels would change hardly anything."
    : `Ten more labels would bring about ${gain.toFixed(1)} fewer wrong of 100 (95 % interval ${least.toFixed(1)} to ${most.toFixed(1)}).`;
  curve(model.curve);
  reliability(bins(model.random));
  $("reliability-note").textContent = `By ${model.random.length} pictures drawn at random, each answered by a model that had not seen its label.`;
  const counts = Object.fromEntries(state.classes.map((each) => [each.name, each.count]));
  $("each").replaceChildren(...model.classes.map((each) => {
    const line = make("tr");
    const right = each.right === null ? "–" : percent(each.right);
    line.append(make("td", each.name), make("td", String(counts[each.name] ?? 0)), make("td", String(each.guessed)), make("td", right));
    return line;
  }));
}

function axes(title, wide = 300, high = 150) {
  const chart = draw("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": title });
  chart.append(draw("line", { class: "axis", x1: 30, y1: high - 20, x2: wide - 5, y2: high - 20 }));
  chart.append(draw("line", { class: "axis", x1: 30, y1: 5, x2: 30, y2: high - 20 }));
  return chart;
}

function curve(points) {
  const last = points.at(-1), most = Math.max(10, last[0]), highest = Math.max(...points.map((p) => p[3]));
  const top = Math.min(50, Math.max(1, Math.ceil(52 * highest))) / 50; // an even number of percent
  const x = (count) => 30 + (265 * count) / most, y = (share) => 130 - (125 * share) / top;
  const text = (p) => `with ${p[0]} labels ${percent(p[1])} (${percent(p[2])} to ${percent(p[3])})`;
  const chart = axes(`Estimated error over labels: ${[points[0], last].map(text).join(", ")}`);
  const band = [...points.map((p) => [x(p[0]), y(p[3])]), ...points.toReversed().map((p) => [x(p[0]), y(p[2])])];
  chart.append(draw("polygon", { class: "band", points: band.join(" ") }));
  if (points.length === 1) chart.append(draw("line", { class: "line", x1: x(last[0]), x2: x(last[0]), y1: y(last[2]), y2: y(last[3]) }));
  chart.append(draw("polyline", { class: "line", points: points.map((p) => [x(p[0]), y(p[1])]).join(" ") }));
  chart.append(draw("circle", { class: "dot", r: 3.5, cx: x(last[0]), cy: y(last[1]) }));
  for (const share of [0, top / 2, top]) chart.append(draw("text", { x: 26, y: y(share) + 4, "text-anchor": "end" }, Math.round(100 * share)));
  for (const count of [0, Math.round(most / 2), most]) chart.append(draw("text", { x: x(count), y: 146, "text-anchor": "middle" }, count));
  $("curve").replaceChildren(chart);
}

// random answers as [confidence, right], in up to five bins of equally many
function bins(pairs) {
  const sorted = pairs.toSorted((a, b) => a[0] - b[0]), parts = Math.min(5, Math.ceil(pairs.length / 5));
  const mean = (some, part) => some.reduce((sum, pair) => sum + Number(pair[part]), 0) / some.length;
  return Array.from({ length: parts }, (_, k) => sorted.slice((k * pairs.length) / parts, ((k + 1) * pairs.length) / parts))
    .map((some) => [mean(some, 0), mean(some, 1), some.length]);
}

function reliability(bins) {
  const x = (share) => 30 + 265 * share, y = (share) => 130 - 125 * share;
  const text = bins.map(([sure, right, number]) => `${percent(sure)} confident, ${percent(right)} right (${number})`).join("; ");
  const chart = axes(`Confidence against truth: ${text || "no random answers yet"}`);
  chart.append(draw("line", { class: "even", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
  for (const [sure, right, number] of bins) chart.append(draw("circle", { class: "dot", r: 2 + Math.sqrt(number), cx: x(sure), cy: y(right) }));
  for (const share of [0, 0.5, 1]) {
    chart.append(draw("text", { x: 26, y: y(share) + 4, "text-anchor": "end" }, 100 * share));
    chart.append(draw("text", { x: x(share), y: 146, "text-anchor": "middle" }, 100 * share));
  }
  $("reliability").replaceChildren(chart);
}

function renderFit(fit) {
  $("fitting").hidden = !fit;
  if (!fit) return;
  const ended = fit.code !== null, stages = fit.lines.filter((line) => /^\d\/5 /.test(line));
  $("stage").value = ended && fit.code === 0 ? 5 : Math.max(0, Number((stages.at(-1) || "0")[0]) - 0.5);
  $("fit-said").textContent = !ended ? `${stages.at(-1) || "starting"} …` : fit.code === 0 ? `Done: ${fit.out}` : `It failed: ${fit.lines.at(-1) || ""}`;
  $("fit-lines").textContent = fit.lines.join("\n");
  $("report").hidden = !fit.report;
}

// ask again while something goes on: the model learns, or a fit runs
function watch() {
  clearTimeout(timer);
  if (!state || !(state.busy || (state.fit && (state.fit.code === null || (state.fit.code === 0 && !state.fit.report))))) return;
  timer = setTimeout(async () => {
    if (!waiting) {
      const fresh = await ask("see/state/0").catch(() => null);
      if (fresh && !waiting && fresh.version >= state.version) state = fresh;
      if (!waiting) render();
    }
    watch();
  }, 600);
}

async function makeModel() {
  state = await ask("do/fit", {});
  say("The model is being made; you can go on labelling.");
}

const KEYS = {
  n: () => answer(["none", ""]), c: () => answer(["unsure", ""]), s: skip, b: back, f: forward, u: undo, h: hint,
  g: () => turn("group"), l: () => turn("list"), o: () => turn("one"), m: makeModel,
};
const DO = { none: KEYS.n, unsure: KEYS.c, skip, back, undo, hint };

function allOrNone() {
  const on = !tiles().every((tile) => tile.getAttribute("aria-pressed") === "true");
  tiles().forEach((tile) => press(tile, on));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !state) return;
  const typing = event.target.closest("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (view === "group" && key.startsWith("Arrow")) move(key);
  else if (view === "group" && key === "a") allOrNone();
  else if (/^[0-9]$/.test(key) && view !== "list") {
    const each = state.classes[(Number(key) + 9) % 10];
    if (each) once(() => answer(["label", each.name]));
    else say(`No class has the number ${key}.`);
  } else if (view === "list" && !["/", "Enter", ..."?lomgu"].includes(key)) return; // what they act on is not shown
  else if (key === "/" || (key === "Enter" && !event.target.closest("button, a, summary"))) $("new").focus();
  else if (key === "?") $("help").showModal();
  else if (KEYS[key]) once(KEYS[key]);
  else return;
  event.preventDefault();
});
$("type").addEventListener("submit", (event) => { event.preventDefault(); once(() => name($("new").value)); });
for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => once(DO[button.dataset.do]));
for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => once(() => turn(button.dataset.view)));
$("flip").addEventListener("click", allOrNone);
$("another").addEventListener("click", () => once(skip));
$("more").addEventListener("click", () => once(() => list($("answers").children.length)));
$("fit").addEventListener("click", () => once(makeModel));
$("help-button").addEventListener("click", () => $("help").showModal());

once(async () => {
  history.replaceState(null, "", location.pathname); // the token is in a cookie now
  state = await ask("see/state/0");
  trail = (await ask("see/labelled/0")).map((item) => item.row).reverse();
  await open(state.question);
  if (!state.classes.length) $("new").focus();
});
