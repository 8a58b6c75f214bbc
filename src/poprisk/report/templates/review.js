// Review of single examples by buttons or keys, kept in this browser where it allows that, and exported as a file.
let shown = null;  // the row under review
const storedAs = "poprisk decisions " + data.run;

function load() {
  decisions.clear();
  try {
    for (const [i, decided] of JSON.parse(localStorage.getItem(storedAs) || "[]")) decisions.set(i, decided);
  } catch { decisions.clear(); }  // no storage here, or not ours: decisions live in memory
}
function store() {
  try { localStorage.setItem(storedAs, JSON.stringify([...decisions])); } catch { /* in memory only */ }
}
const place = () => listed.indexOf(shown);
const labelled = (row, value) => value === row[AT.given] ? "kept as " + written(value, kindOf) : "changed to " + written(value, kindOf);
const kindOf = AT.given < 0 ? "number" : data.columns[AT.given].kind;

function show(row) {
  shown = row;
  get("review").hidden = !row;
  for (const line of get("body").querySelectorAll("tr.here")) line.classList.remove("here");
  if (!row) return;
  const i = row[AT.example], line = get("body").querySelector(`tr[data-example="${i}"]`);
  if (line) line.classList.add("here");
  const big = picture(i, "big"), words = data.texts[i] || "";
  get("zoom").replaceChildren(big);
  get("zoom").hidden = !big;
  get("words").textContent = words;
  get("words").hidden = !words;
  const what = [`Example ${i}, ${place() + 1} of ${listed.length}`];
  if (AT.given >= 0) what.push("given " + written(row[AT.given], kindOf));
  if (data.reviewable) what.push("suggested " + written(row[AT.suggested], kindOf));
  if (data.reviewable) what.push(row[AT.suspect] ? "suspect" : "not a suspect");
  if (decisions.has(i)) what.push(labelled(row, decisions.get(i)));
  get("which").textContent = what.join(" · ");
  if (get("other")) get("other").value = decisions.has(i) ? String(decisions.get(i)) : "";
}
function showFirst() { show(listed.includes(shown) ? shown : listed[0] || null); }
function openExample(i) {
  show(data.rows.find(row => row[AT.example] === i));
  get("review").scrollIntoView({block: "nearest"});
  get("review").focus({preventScroll: true});
}
function move(by) {
  const next = listed[Math.min(Math.max(place() + by, 0), listed.length - 1)];
  if (next) show(next);
}
function progress() {
  if (!data.reviewable) return;
  const count = (rows, which) => rows.filter(row => state(row) === which).length;
  const suspects = data.rows.filter(row => row[AT.suspect]), left = count(suspects, "open");
  const changed = count(data.rows, "changed"), kept = count(data.rows, "kept");
  const words = !suspects.length ? "No suspects." : !left ? `All ${suspects.length} suspects are decided.` :
    `${left} of ${suspects.length} suspects left to decide.`;
  get("progress").textContent = `${changed + kept} decided: ${changed} changed, ${kept} kept. ${words}`;
}
function refresh(i) {
  const row = data.rows.find(each => each[AT.example] === i), line = get("body").querySelector(`tr[data-example="${i}"]`);
  if (chosenIn("state")) { listed = chosen(); draw(); }  // the example leaves the list, or comes back
  else if (line) line.querySelector("td.decision").textContent = decisions.has(i) ? state(row) : "";
  store();
  progress();
}
function decide(value) {
  if (!shown || value === null || !data.reviewable) return;
  const i = shown[AT.example], at = place();
  decisions.delete(i), decisions.set(i, value);  // so that the latest decision is the last one
  refresh(i);
  const next = listed[at] === shown ? at + 1 : Math.max(at, 0);
  show(listed[Math.min(next, listed.length - 1)] || null);
}
function undo() {  // the decision on the example shown, or else the latest one
  const here = shown && shown[AT.example], i = decisions.has(here) ? here : [...decisions.keys()].pop();
  if (!decisions.delete(i)) return;
  refresh(i);
  show(data.rows.find(row => row[AT.example] === i));
}
function zoom() {
  const on = get("zoom").getAttribute("aria-pressed") !== "true";
  get("zoom").setAttribute("aria-pressed", on);
}
function decided() {
  const rows = data.rows.filter(row => decisions.has(row[AT.example])).sort((a, b) => a[AT.example] - b[AT.example]);
  return rows.map(row => ({example: row[AT.example], given: row[AT.given], suggested: row[AT.suggested],
    decided: decisions.get(row[AT.example])}));
}
function save(name, type, text) {
  const link = make("a", {href: URL.createObjectURL(new Blob([text], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
function exportJson() {
  const file = {kind: "poprisk label decisions", version: 1, run: data.run, data: data.fingerprint,
    examples: data.examples, targets: data.kind, decisions: decided()};
  const text = JSON.stringify(file, null, 1).slice(0, -2);  // without the last line, which the checksum comes before
  save("decisions.json", "application/json", `${text},\n "crc32": "${crc32(text)}"\n}\n`);
}
function crc32(text) {
  let c = -1;
  for (const byte of new TextEncoder().encode(text)) {
    c ^= byte;
    for (let k = 0; k < 8; k++) c = c >>> 1 ^ 0xEDB88320 & -(c & 1);
  }
  return (~c >>> 0).toString(16).padStart(8, "0");
}
function exportCsv() {
  const head = ["version", "run", "data", "examples", "targets", "example", "given", "suggested", "decided"];
  const about = [1, data.run, data.fingerprint, data.examples, data.kind];
  const lines = decided().map(d => [...about, d.example, d.given, d.suggested, d.decided].join(","));
  save("decisions.csv", "text/csv", [head.join(","), ...lines].join("\n") + "\n");
}
function drawMatrix() {
  if (!get("matrix")) return;
  const count = new Map(), key = (a, b) => a + " " + b;
  for (const row of data.rows) if (row[AT.suspect]) {
    const pair = key(row[AT.given], row[AT.suggested]);
    count.set(pair, (count.get(pair) || 0) + 1);
  }
  const labels = data.labels.filter(a => data.labels.some(b => count.has(key(a, b)) || count.has(key(b, a)))).slice(0, 40);
  const head = make("tr", {}, make("th", {title: "rows: given label; columns: suggested label"}, "given \\ suggested"),
    ...labels.map(b => make("th", {scope: "col", title: "suggested label " + b}, String(b))));
  const most = Math.max(1, ...count.values());
  get("matrix").replaceChildren(head, ...labels.map(a => make("tr", {},
    make("th", {scope: "row", title: "given label " + a}, String(a)),
    ...labels.map(b => {
      const n = count.get(key(a, b)) || 0, cell = make("td", {});
      if (!n) return cell;
      const button = make("button", {type: "button", class: "heat" + Math.ceil(4 * n / most),
        title: `${n} suspects given ${a}, suggested ${b}`}, String(n));
      button.addEventListener("click", () => {
        get("given").value = String(a); get("suggested").value = String(b); get("suspects").checked = true;
        choose();
        get("review").scrollIntoView({block: "nearest"});
        get("review").focus({preventScroll: true});
      });
      cell.append(button);
      return cell;
    }))));
}
const suggested = () => shown && shown[AT.suggested], given = () => shown && shown[AT.given];
const KEYS = {a: () => decide(suggested()), r: () => decide(given()), u: undo, z: zoom, j: () => move(1), k: () => move(-1),
  ArrowRight: () => move(1), ArrowLeft: () => move(-1)};
document.addEventListener("keydown", event => {
  const action = KEYS[event.key] || KEYS[event.key.toLowerCase()];
  if (!action || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
  event.preventDefault();
  action();
});
const BUTTONS = {accept: KEYS.a, reject: KEYS.r, undo, zoom, previous: KEYS.k, next: KEYS.j,
  "export-json": exportJson, "export-csv": exportCsv};
for (const id in BUTTONS) if (get(id)) get(id).addEventListener("click", BUTTONS[id]);
if (get("other")) get("other").addEventListener("change", () => {
  if (get("other").value !== "") decide(Number(get("other").value)); else undo();
});
for (const each of document.querySelectorAll(".command"))  // lines break between words, not after the hyphens of an option
  each.replaceChildren(...each.textContent.split("\n").map(line => make("span", {class: "line"},  // a block of its own
    ...line.split(/(\s)/).map(word => word.trim() ? make("span", {}, word) : word))));
if (data.reviewable) load();
window.addEventListener("storage", event => {  // decided in another tab
  if (!data.reviewable || (event.key !== null && event.key !== storedAs)) return;
  load();
  if (chosenIn("state")) listed = chosen();
  draw();
  progress();
  show(shown);
});
drawMatrix();
choose();
progress();
