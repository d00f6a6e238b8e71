"use strict";

const SHOWN = 8; // classes of a card
const CARDS = 50; // answers that stay on the page
const find = (name, inside = document) => inside.querySelector(name);

function percent(share) {
  const text = (100 * share).toFixed(share > 0.9995 || share < 0.001 ? 0 : 1);
  if (share > 0.9995 && share < 1) return "> 99.9 %";
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${text} %`;
}

function explain(answer, about) {
  if (answer.sure) return "Its promise of accuracy covers this answer.";
  if (about.covered) return "Its confidence is too low for its promise of accuracy.";
  return "This model promises no accuracy, so it calls no answer sure.";
}

function describe(about) {
  const share = Math.round(100 * about.coverage);
  const sets = `Bold: its prediction set, which holds the true class of ${share} % of such pictures.`;
  const words = [`Model ${about.model}, ${about.classes} classes.`, about.promise];
  return (about.coverage === null ? words : [...words, sets]).join(" ");
}

function addBar(table, name, share, member) {
  const row = table.insertRow();
  if (member) row.className = "member";
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = name;
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.style.width = `${100 * share}%`;
  row.append(head);
  row.insertCell().append(bar);
  row.insertCell().textContent = percent(share);
}

function show(card, answer, about) {
  const chances = Object.entries(answer.probabilities).sort((a, b) => b[1] - a[1]);
  const members = new Set(answer.set);
  card.classList.add(answer.sure ? "sure" : "unsure");
  find("h2", card).textContent = `${answer.sure ? "Sure" : "Not sure, perhaps"}: ${answer.label}`;
  find(".why", card).textContent = explain(answer, about);
  const table = find("tbody", card);
  for (const [name, share] of chances.slice(0, SHOWN)) addBar(table, name, share, members.has(name));
  const rest = chances.slice(SHOWN);
  const hidden = rest.filter(([name]) => members.has(name)).length;
  if (rest.length) {
    const left = percent(rest.reduce((sum, [, share]) => sum + share, 0));
    const also = hidden ? `, ${hidden} of them in the set` : "";
    find(".rest", card).textContent = `${rest.length} more classes have ${left} together${also}.`;
  }
}

async function ask(file) {
  const card = document.importNode(find("#card").content, true).firstElementChild;
  const image = find("img", card);
  image.src = URL.createObjectURL(file);
  image.onerror = () => card.classList.add("bare"); // a format that browsers do not draw
  find(".file", card).textContent = file.name || "pasted picture";
  find("h2", card).textContent = "…";
  find("#answers").prepend(card);
  for (const old of [...find("#answers").children].slice(CARDS)) {
    URL.revokeObjectURL(find("img", old).src);
    old.remove();
  }
  try {
    const reply = await fetch("predict", { method: "POST", body: file });
    const text = await reply.text();
    if (!reply.ok) throw new Error(text.startsWith("{") ? JSON.parse(text).error : text);
    show(card, JSON.parse(text), await health);
  } catch (error) {
    card.classList.add("failed");
    find("h2", card).textContent = "No answer";
    find(".why", card).textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
  }
}

function take(files) {
  for (const file of files) ask(file);
}

const drop = find("#drop");
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
find("#file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });

find("#curl").textContent = `curl --data-binary @PICTURE ${new URL("predict", location.origin + location.pathname)}`;
if (location.search) history.replaceState(null, "", location.pathname); // the cookie has the token now
const health = fetch("health").then((reply) => reply.json());
health.then((about) => {
  find("#model").textContent = describe(about);
}).catch(() => { find("#model").textContent = "The server cannot be reached."; });
