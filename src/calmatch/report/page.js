// What makes the page live: drawing at the right width, themes, sorting, filters, galleries.
const SINGLE = DATA.runs.length === 1;
document.body.classList.toggle("single", SINGLE);
const CHARTS = SINGLE ? { reliability, histogram, smooth, risk, confusion, logits, curves, agreement } : COMPARED();

function draw(figure) {
  const place = figure.querySelector(".plot");
  const out = figure.querySelector(".readout");
  const width = Math.floor(place.clientWidth);
  if (width < 50) return;
  out.replaceChildren();
  const chart = CHARTS[figure.dataset.chart](width, out);
  place.replaceChildren(...[chart].flat());
  place.dataset.width = width;
  out.hidden = !place.querySelector("svg .spot");
}

const figures = [...document.querySelectorAll("figure[data-chart]")];
const redraw = () => figures.forEach(draw);

function fill(select, ids) {
  for (const id of ids) select.append(make("option", { value: id }, name(id)));
}

// Tables sort by the button in a column's head; numbers as numbers, empty cells last.
function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.sort ?? "";
    const rows = [...table.tBodies[0].rows];
    const numbers = rows.every((row) => value(row) === "" || !isNaN(value(row)));
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numbers ? x - y : x.localeCompare(y, "en", { numeric: true });
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}

function classFilter() {
  const [find, over] = ["find", "only-over"].map((id) => document.getElementById(id));
  const rows = [...document.getElementById("class-table").tBodies[0].rows];
  const apply = () => {
    const word = find.value.trim().toLowerCase();
    for (const row of rows) {
      const named = row.cells[0].textContent.toLowerCase().includes(word);
      row.hidden = !named || (over.checked && row.dataset.over !== "1");
    }
    const left = rows.filter((row) => !row.hidden).length;
    document.getElementById("found").textContent = `${whole(left)} of ${whole(rows.length)} classes`;
  };
  find.addEventListener("input", apply);
  over.addEventListener("change", apply);
  apply();
}

function wrongGallery() {
  const [select, list] = ["wrong-class", "wrong-gallery"].map((id) => document.getElementById(id));
  const ids = new Set(DATA.pictures.wrong.flatMap((row) => [DATA.pictures.shown[row].truth, DATA.pictures.shown[row].guess]));
  select.append(make("option", { value: "" }, "all"));
  fill(select, d3.sort(ids));
  list.classList.toggle("pixels", DATA.pictures.side <= 32);
  const apply = () => {
    const all = DATA.pictures.wrong.map((row) => DATA.pictures.shown[row]);
    const id = select.value === "" ? null : +select.value;
    const some = all.filter((picture) => id === null || picture.truth === id || picture.guess === id);
    list.replaceChildren(...some.map((picture) => {
      const says = `says ${name(picture.guess)} (${percent(picture.confidence)})`;
      const is = `is ${name(picture.truth)} (${percent(picture.truth_probability)})`;
      return make("li", {}, image(picture, `${says}, ${is}`), make("strong", {}, says), make("br"), is,
        make("span", { class: "name" }, picture.name));
    }));
    document.getElementById("wrong-found").textContent = `${some.length} of ${all.length} pictures`;
  };
  select.addEventListener("change", apply);
  apply();
}

function askedGallery() {
  const list = document.getElementById("asked-gallery");
  list.classList.toggle("pixels", DATA.pictures.side <= 32);
  list.append(...DATA.asked.shown.map((picture) => {
    const guesses = picture.guesses.map(([id, p]) => `${name(id)}: ${percent(p, 0)}`);
    return make("li", {}, image(picture, guesses.join(", ")), ...guesses.flatMap((text) => [text, make("br")]), make("span", { class: "name" }, picture.name));
  }));
}

function theme() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
}

theme();
document.querySelectorAll("table.sortable").forEach(sortable);
if (SINGLE) {
  const chosen = document.getElementById("logit-class");
  const ids = d3.range(DATA.classes.length).filter((id) => DATA.logits.classes[id].length);
  fill(chosen, ids.length ? ids : [0]);
  chosen.value = d3.greatest(ids, (id) => DATA.perClass[id].error) ?? 0; // the hardest class first
  chosen.addEventListener("change", () => draw(document.querySelector('figure[data-chart="logits"]')));
  classFilter();
  if (document.getElementById("wrong")) wrongGallery();
  if (document.getElementById("asked")) askedGallery();
} else {
  legend(redraw);
}
redraw();
new ResizeObserver(() => figures.forEach((figure) => {
  const place = figure.querySelector(".plot");
  if (Math.floor(place.clientWidth) !== +place.dataset.width) draw(figure);
})).observe(document.querySelector("main"));
