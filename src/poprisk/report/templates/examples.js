// The table of examples: sort, search, filter. review.js adds the decisions.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id), PAGE = 12;
const column = name => data.columns.findIndex(c => c.name === name);
const either = (a, b) => column(a) < 0 ? column(b) : column(a);
const AT = {example: column("example"), given: either("given_label", "given_target"),
  suggested: either("suggested_label", "suggested_target"), suspect: column("is_suspect")};
const isClass = column("given_label") >= 0;
const labelOf = new Map(isClass ? data.rows.map(row => [row[AT.example], row[AT.given]]) : []);
const hasPictures = Object.keys(data.pictures).length > 0, hasTexts = Object.keys(data.texts).length > 0;
const hasNeighbours = Object.keys(data.neighbours).length > 0;
const decisions = new Map();  // the decided label or value of each reviewed example
let sortBy = -1, downwards = true, limit = PAGE, listed = [];  // unsorted: suspects first, as the rows come

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  node.append(...children);
  return node;
}
function picture(i, kind) {
  const found = data.pictures[i];
  return found ? make("img", {src: "data:image/png;base64," + found, class: kind, alt: "example " + i}) : "";
}
function written(value, kind) {
  if (value === null) return "–";
  if (kind === "flag") return value ? "suspect" : "";
  if (kind === "group") return value < 0 ? "tail" : "direction " + (value + 1);
  if (kind !== "number") return String(value);
  const small = value !== 0 && Math.abs(value) < 1e-3;
  return small || Math.abs(value) >= 1e5 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}
function state(row) {
  const i = row[AT.example];
  return !decisions.has(i) ? "open" : decisions.get(i) === row[AT.given] ? "kept" : "changed";
}
function chips(i) {
  const near = data.neighbours[i], cell = make("td", {class: "near"});
  if (!near) return cell;
  for (const [sign, list, words] of [["+", near.supports, "higher"], ["−", near.opposes, "lower"]]) {
    if (list.length) cell.append(make("span", {class: "sign"}, sign));
    for (const [j, change] of list) {
      const label = labelOf.has(j) ? ", given label " + labelOf.get(j) : "";
      const words_ = `without example ${j}${label}, this loss would be ${words} by ${Math.abs(change)}`;
      cell.append(make("span", {class: "chip", title: words_}, picture(j, "small") || String(j)));
    }
  }
  return cell;
}
function rowOf(row) {
  const i = row[AT.example], line = make("tr", {"data-example": i});
  if (AT.suspect >= 0 && row[AT.suspect]) line.classList.add("suspect");
  if (hasPictures) line.append(make("td", {}, picture(i, "thumb")));
  if (hasTexts) line.append(make("td", {class: "text"}, make("div", {class: "clip"}, data.texts[i] || "")));
  data.columns.forEach((c, j) => {
    if (j === AT.example) {
      const open = make("button", {type: "button", title: "open example " + i + " above"}, String(i));
      open.addEventListener("click", () => openExample(i));
      return line.append(make("td", {}, open));
    }
    line.append(make("td", {class: c.kind}, written(row[j], c.kind)));
    if (j === AT.suspect) {
      if (data.reviewable) line.append(make("td", {class: "decision"}, decisions.has(i) ? state(row) : ""));
      if (hasNeighbours) line.append(chips(i));
    }
  });
  return line;
}
const chosenIn = id => get(id) ? get(id).value : "";
function chosen() {
  const words = get("find").value.trim().toLowerCase(), only = get("suspects").checked;
  const given = chosenIn("given"), suggested = chosenIn("suggested"), decided = chosenIn("state");
  const kept = data.rows.filter(row =>
    (!only || row[AT.suspect]) && (given === "" || String(row[AT.given]) === given) &&
    (suggested === "" || String(row[AT.suggested]) === suggested) && (decided === "" || state(row) === decided) &&
    (words === "" || String(row[AT.example]) === words || (data.texts[row[AT.example]] || "").toLowerCase().includes(words)));
  const size = value => value === null ? -Infinity : Number(value), sign = downwards ? 1 : -1;
  return sortBy < 0 ? kept : kept.sort((a, b) => sign * (size(b[sortBy]) - size(a[sortBy])));  // equal ones stay in order
}
function draw() {
  get("body").replaceChildren(...listed.slice(0, limit).map(rowOf));
  get("count").textContent = `${listed.length} of ${data.rows.length} examples, ${Math.min(limit, listed.length)} shown.`;
  get("more").hidden = listed.length <= limit;
  for (const head of get("head").querySelectorAll("[data-column]")) {
    const here = Number(head.dataset.column) === sortBy;
    head.setAttribute("aria-sort", here ? (downwards ? "descending" : "ascending") : "none");
    head.querySelector("span").textContent = here ? (downwards ? " ▼" : " ▲") : "";
  }
}
function choose() {
  listed = chosen();
  limit = PAGE;
  draw();
  showFirst();
}
function heading(words, help, name = "") {
  return make("th", {scope: "col", title: help, class: name}, words);
}
if (hasPictures) get("head").append(heading("picture", "what the example looks like"));
if (hasTexts) get("head").append(heading("text", "the beginning of the example's text; all of it is above", "text"));
data.columns.forEach((c, j) => {
  const button = make("button", {type: "button", title: c.help}, c.title, make("span", {}));
  button.addEventListener("click", () => { downwards = sortBy === j ? !downwards : true; sortBy = j; choose(); });
  get("head").append(make("th", {"data-column": j, scope: "col", title: c.help}, button));
  if (j === AT.suspect) {
    if (data.reviewable) get("head").append(heading("decision", "what you decided: the label is changed, or kept"));
    const help = "training examples whose removal would raise (+) or lower (−) this loss";
    if (hasNeighbours) get("head").append(heading("neighbours", help, "near"));
  }
});
for (const id of ["find", "given", "suggested", "state", "suspects"]) if (get(id)) get(id).addEventListener("input", choose);
get("more").addEventListener("click", () => { limit += 100; draw(); });
