/* The main page's table, filters and matrix. The results are columns of codes (see columns.py); only rows that can be
   seen are in the document, and what is chosen stands in the address, so that a view can be sent. */
const data = JSON.parse(document.getElementById("data").textContent);
const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const TOTAL = data.ids.length / 12;
const OWN = ["standing", "verdict", "system", "release", "cause", "issue", "seen"];
const MOST_VALUES = 40;
const byId = (id) => document.getElementById(id);

function make(tag, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function decoded({ codes, width }) {
  const digit = Object.fromEntries([...ALPHABET].map((character, number) => [character, number]));
  const found = new Uint32Array(TOTAL);
  for (let row = 0; row < TOTAL; row++) {
    for (let place = width - 1; place >= 0; place--) found[row] = found[row] * 64 + digit[codes[row * width + place]];
  }
  return found;
}

const columns = new Map(data.columns.map((column) => [column.name, { ...column, codes: decoded(column) }]));
const varying = [...columns.values()].filter((column) => column.values.length > 1);
const axes = varying.filter((column) => !OWN.includes(column.name));
const unpaged = new Set(data.unpaged);
const valueOf = (name, row) => columns.get(name).values[columns.get(name).codes[row]];
const idOf = (row) => data.ids.slice(12 * row, 12 * row + 12);
const failed = (row) => valueOf("cause", row) !== "";
const shownValue = (name, value) => (name === "cause" ? data.headlines[value] || "no failure" : value || "none");
for (const column of columns.values()) {
  const say = (value) => `${column.name}=${value} ${column.name === "cause" ? data.headlines[value] || "" : ""}`;
  column.words = column.values.map((value) => say(value).toLowerCase());
}

/* ---- What is chosen, and the address that says so ---- */

const ACROSS = firstAxis("mesh");
const PLAIN = { q: "", x: ACROSS, y: firstAxis("dtype", ACROSS), colour: "standing", sort: "" };
const state = { ...PLAIN, filters: new Map() };  // filters: name of a column → the values of which a row must have one

function firstAxis(wanted, taken) {
  const fitting = [...axes, ...varying.filter((column) => OWN.includes(column.name))];
  if (axes.some((column) => column.name === wanted)) return wanted;
  const rest = fitting.filter((column) => !["mesh", "dtype", taken].includes(column.name));
  return (rest[0] || fitting[0] || columns.get("standing")).name;
}

function fragment() {
  const parts = [...state.filters].flatMap(([name, values]) => values.map((value) => [name, value]));
  for (const [name, plain] of Object.entries(PLAIN)) if (state[name] !== plain) parts.push([name, state[name]]);
  const encode = (text) => encodeURIComponent(text).replace(/%2F/g, "/").replace(/%2C/g, ",");
  return parts.map(([name, value]) => `${encode(name)}=${encode(value)}`).join("&");
}

function read(text) {
  const asked = [...new URLSearchParams(text)];
  Object.assign(state, PLAIN);
  state.filters = new Map();
  for (const [name, value] of asked) if (columns.has(name)) add(name, value);
  for (const [name, value] of asked) if (name in PLAIN && (!"xy".includes(name) || columns.has(value))) state[name] = value;
}

function changed(remember = true) {
  const hash = fragment();
  const address = hash ? `#${hash}` : location.pathname + location.search;
  if (location.hash.slice(1) !== hash) history[remember ? "pushState" : "replaceState"](null, "", address);
  show();
}

const wanted = (name) => state.filters.get(name) || [];

function filter(name, values) {
  if (values.length) state.filters.set(name, values);
  else state.filters.delete(name);
}

function add(name, value) {
  if (!wanted(name).includes(value)) filter(name, [...wanted(name), value]);
}

function choose(name, values) {
  filter(name, values);
  changed();
}

const without = (name, value) => wanted(name).filter((other) => other !== value);

/* ---- Which rows are left ---- */

function tests(words) {
  return words.toLowerCase().split(/\s+/).filter((word) => word && word !== "-").map((given) => {
    const not = given.startsWith("-");
    const word = not ? given.slice(1) : given;
    const hits = [...columns.values()]
      .map((column) => ({ codes: column.codes, hit: column.words.map((text) => text.includes(word)) }))
      .filter(({ hit }) => hit.includes(true));
    const isId = /^[0-9a-f]{2,12}$/.test(word);
    return (row) => not !== (hits.some(({ codes, hit }) => hit[codes[row]]) || (isId && data.ids.startsWith(word, 12 * row)));
  });
}

function left(...except) {
  const exact = [...state.filters].filter(([name]) => !except.includes(name));
  const chosen = exact.map(([name, values]) => {
    const column = columns.get(name);
    return [column.codes, Uint8Array.from(column.values, (value) => values.includes(value))];
  });
  const words = tests(state.q);
  const rows = [];
  for (let row = 0; row < TOTAL; row++) {
    if (chosen.every(([codes, there]) => there[codes[row]]) && words.every((test) => test(row))) rows.push(row);
  }
  return rows;
}

/* ---- The table: only rows that can be seen are in the document ---- */

const HEADS = [
  ["verdict", "Verdict", true],
  ["system", "System", columns.get("system").values.length > 1],
  ["release", "Release", columns.get("release").values.length > 1],
  ["scenario", "Scenario", true],
  ["seconds", "Seconds", true],
  ["id", "Id", true],
].filter(([, , there]) => there);
let rows = [];
let chosen = -1;
let rowHeight = 31;
const frame = byId("rows");

function scenarioOf(row) {
  const told = axes.filter((column) => column.values[column.codes[row]] !== column.default).map((column) => [column.name, column.values[column.codes[row]]]);
  const all = told.length ? told : Object.entries(data.same);
  return all.map(([name, value]) => `${name}=${value}`).join(" ") || "defaults";
}

function order() {
  const key = state.sort.replace(/^-/, "");
  if (!HEADS.some(([name]) => name === key)) return;
  const rank = (name) => (row) => columns.get(name).codes[row];
  const standing = rank("standing"), verdict = rank("verdict");
  let compare;
  if (key === "seconds") compare = (a, b) => data.seconds[a] - data.seconds[b];
  else if (key === "id") compare = (a, b) => (idOf(a) < idOf(b) ? -1 : 1);
  else if (key === "scenario") {
    const ranks = axes.map((column) => column.codes);
    compare = (a, b) => { for (const codes of ranks) if (codes[a] !== codes[b]) return codes[a] - codes[b]; return 0; };
  } else if (key === "verdict") compare = (a, b) => standing(a) - standing(b) || verdict(a) - verdict(b);
  else compare = (a, b) => rank(key)(a) - rank(key)(b);
  const sign = state.sort.startsWith("-") ? -1 : 1;
  rows.sort((a, b) => sign * compare(a, b) || a - b);
}

function heads() {
  byId("heads").replaceChildren(...HEADS.map(([name, title]) => {
    const descending = state.sort === `-${name}`;
    const sorted = state.sort === name || descending;
    const button = make("button", { type: "button", text: title });
    button.addEventListener("click", () => {
      state.sort = state.sort === name ? `-${name}` : descending ? "" : name;
      changed();
      byId("heads").children[HEADS.findIndex((head) => head[0] === name)].firstChild.focus();
    });
    return make("th", { scope: "col", class: `c-${name}`, "aria-sort": sorted ? (descending ? "descending" : "ascending") : undefined }, button);
  }));
}

function badge(row) {
  const standing = valueOf("standing", row), verdict = valueOf("verdict", row);
  if (!failed(row)) return make("span", { class: `badge ${standing}`, text: standing });
  const text = standing === verdict ? verdict : `${standing} ${verdict}`;
  return make("a", { class: `badge ${standing}`, href: `#cause-${valueOf("cause", row)}`, text });
}

function cell(name, row) {
  const attributes = { class: `c-${name}` };
  if (name === "verdict") return make("td", attributes, badge(row));
  if (name === "scenario") return make("td", { ...attributes, title: scenarioOf(row), text: scenarioOf(row) });
  if (name === "seconds") return make("td", { class: "c-seconds num", text: data.seconds[row].toFixed(2) });
  if (name === "id" && failed(row) && !unpaged.has(row)) {
    return make("td", { class: "c-id mono" }, make("a", { href: `failures/${idOf(row)}.html`, text: idOf(row) }));
  }
  if (name === "id") return make("td", { class: "c-id mono", text: idOf(row) });
  return make("td", { ...attributes, text: valueOf(name, row) });
}

function paint() {
  const first = Math.max(0, Math.floor(frame.scrollTop / rowHeight) - 8);
  const last = Math.min(rows.length, first + Math.ceil((frame.clientHeight || 600) / rowHeight) + 16);
  const space = (count) => {
    const filler = make("td", { colspan: HEADS.length });
    filler.style.height = `${count * rowHeight}px`;
    return make("tr", { class: "space", "aria-hidden": "true" }, filler);
  };
  const shown = rows.slice(first, last).map((row, n) => {
    const line = make("tr", { "aria-rowindex": first + n + 2, "data-at": first + n }, ...HEADS.map(([name]) => cell(name, row)));
    if (row === chosen) line.className = "chosen";
    return line;
  });
  byId("body").replaceChildren(...(first ? [space(first)] : []), ...shown, ...(last < rows.length ? [space(rows.length - last)] : []));
  if (shown.length && shown[0].offsetHeight) rowHeight = shown[0].offsetHeight;
}

function detail(row) {
  chosen = row;
  const box = byId("detail");
  box.hidden = row < 0;
  if (row < 0) return;
  const link = failed(row) && !unpaged.has(row);
  const told = [["system", valueOf("system", row)], ["release", valueOf("release", row)], ...Object.entries(data.same),
    ...axes.map((column) => [column.name, column.values[column.codes[row]]])];
  const list = told.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value || "–" })));
  const how = failed(row) ? [make("p", {}, make("a", { href: `#cause-${valueOf("cause", row)}`, text: data.headlines[valueOf("cause", row)] }))] : [];
  const command = `shardproof ${link ? "replay" : "explain"} ${idOf(row)}${failed(row) && !link ? " --page" : ""}${data.place}${link ? data.again : ""}`;
  box.replaceChildren(
    make("h3", {}, badge(row), " ", link ? make("a", { class: "mono", href: `failures/${idOf(row)}.html`, text: idOf(row) }) : make("span", { class: "mono", text: idOf(row) })),
    ...how, make("dl", { class: "axes" }, ...list), make("p", {}, make("code", { text: command })),
  );
}

frame.addEventListener("scroll", () => requestAnimationFrame(paint));
byId("body").addEventListener("click", (event) => {
  const line = event.target.closest("tr[data-at]");
  if (!line || event.target.closest("a")) return;
  detail(rows[line.dataset.at]);
  paint();
});
frame.addEventListener("keydown", (event) => {
  if (event.target !== frame) return;
  const at = rows.indexOf(chosen);
  const page = Math.max(1, Math.floor(frame.clientHeight / rowHeight) - 2);
  const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: rows.length - 1 };
  if (event.key === "Enter" && chosen >= 0 && failed(chosen) && !unpaged.has(chosen)) location.href = `failures/${idOf(chosen)}.html`;
  if (!(event.key in steps) || !rows.length) return;
  event.preventDefault();
  const next = Math.min(rows.length - 1, Math.max(0, steps[event.key]));
  detail(rows[next]);
  const top = next * rowHeight, room = frame.clientHeight - 2 * rowHeight;
  if (top < frame.scrollTop) frame.scrollTop = top;
  else if (top > frame.scrollTop + room) frame.scrollTop = top - room;
  paint();
});

/* ---- The matrix: two columns against each other ---- */

function counted() {
  const x = columns.get(state.x), y = columns.get(state.y);
  const cells = new Map();
  const totals = { x: new Map(), y: new Map() };
  for (const row of left(state.x, state.y)) {
    const key = y.codes[row] * x.values.length + x.codes[row];
    if (!cells.has(key)) cells.set(key, { standing: {}, verdict: {}, total: 0 });
    const cell = cells.get(key);
    for (const name of ["standing", "verdict"]) cell[name][valueOf(name, row)] = (cell[name][valueOf(name, row)] || 0) + 1;
    cell.total++;
    totals.x.set(x.codes[row], (totals.x.get(x.codes[row]) || 0) + 1);
    totals.y.set(y.codes[row], (totals.y.get(y.codes[row]) || 0) + 1);
  }
  const most = (found) => [...found].sort((a, b) => b[1] - a[1]).slice(0, MOST_VALUES).map(([code]) => code).sort((a, b) => a - b);
  return { x, y, cells, across: most(totals.x), down: most(totals.y), cut: Math.max(totals.x.size, totals.y.size) > MOST_VALUES };
}

function look({ standing, verdict, total }) {
  const failures = (standing.new || 0) + (standing.known || 0) + (standing.unknown || 0);
  if (state.colour === "share") {
    const ran = total - (standing.unsupported || 0);
    return !ran ? "unsupported" : failures ? `h${Math.max(1, Math.ceil((5 * failures) / ran))}` : "h0";
  }
  if (state.colour === "standing") return columns.get("standing").values.find((name) => standing[name]);
  const found = columns.get("verdict").values.filter((name) => verdict[name]);
  const ran = found.filter((name) => name !== "unsupported");
  return ran.length ? ran[ran.length - 1] : "unsupported";
}

function matrix() {
  const { x, y, cells, across, down, cut } = counted();
  const title = `Failures by ${y.name} and ${x.name}`;
  byId("matrix-title").textContent = title;
  const head = make("tr", {}, make("th", { scope: "col", text: `${y.name} ↓ ${x.name} →` }), ...across.map((code) => make("th", { scope: "col", text: shownValue(x.name, x.values[code]) })));
  const body = down.map((below) => make("tr", {}, make("th", { scope: "row", text: shownValue(y.name, y.values[below]) }), ...across.map((beside) => {
    const cell = cells.get(below * x.values.length + beside);
    if (!cell) return make("td");
    const values = [[y.name, y.values[below]], [x.name, x.values[beside]]];
    const failures = cell.total - (cell.standing.pass || 0) - (cell.standing.unsupported || 0);
    const kinds = Object.entries(cell.standing).map(([name, count]) => `${count} ${name}`).join(", ");
    const told = `${values.map(([name, value]) => `${name} ${shownValue(name, value)}`).join(", ")}: ${kinds}`;
    const pressed = values.every(([name, value]) => wanted(name).includes(value));
    return make("td", {}, make("button", {
      type: "button", class: look(cell), tabindex: "-1", "aria-pressed": pressed, "aria-label": told,
      "data-y": values[0][1], "data-x": values[1][1], text: failures ? `${failures}/${cell.total}` : `${cell.total}`,
    }));
  })));
  const table = make("table", { class: "matrix" }, make("caption", { class: "hidden", text: `${title}: how many of the scenarios fail` }), make("thead", {}, head), make("tbody", {}, ...body));
  const focused = document.activeElement && document.activeElement.closest("#matrix button");
  byId("matrix").replaceChildren(table);
  const buttons = [...table.querySelectorAll("button")];
  const same = focused && buttons.find((button) => button.dataset.x === focused.dataset.x && button.dataset.y === focused.dataset.y);
  const entry = same || buttons.find((button) => button.getAttribute("aria-pressed") === "true") || buttons[0];
  if (entry) entry.tabIndex = 0;
  if (same) same.focus({ preventScroll: true });
  if (cut) byId("cell-told").textContent = `Only the ${MOST_VALUES} most frequent values of an axis are drawn; a filter brings the others.`;
}

const grid = byId("matrix");
const tell = (event) => {
  const button = event.target.closest("button");
  if (button) byId("cell-told").textContent = button.getAttribute("aria-label");
};
grid.addEventListener("pointerover", tell);
grid.addEventListener("focusin", tell);
grid.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const pressed = button.getAttribute("aria-pressed") === "true", more = event.shiftKey || event.ctrlKey || event.metaKey;
  for (const [name, value] of [[state.y, button.dataset.y], [state.x, button.dataset.x]]) {
    if (more) add(name, value);
    else filter(name, pressed ? [] : [value]);
  }
  changed();
});
grid.addEventListener("keydown", (event) => {
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const button = event.target.closest("button");
  if (!button || !(event.key in moves)) return;
  event.preventDefault();
  const [down, across] = moves[event.key];
  const lines = [...grid.querySelectorAll("tbody tr")];
  let line = lines.indexOf(button.closest("tr")) + down, place = button.parentElement.cellIndex + across;
  for (; lines[line] && lines[line].cells[place] && place > 0; line += down, place += across) {
    const next = lines[line].cells[place].querySelector("button");
    if (!next) continue;
    button.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    return;
  }
});

/* ---- The controls ---- */

function select(id, label, options, pick) {
  const box = make("select", { id }, ...options.map(([value, text]) => make("option", { value, text })));
  box.addEventListener("change", () => pick(box.value));
  return make("p", { class: "field" }, make("label", { for: id, text: label }), box);
}

function controls() {
  for (const column of varying) {
    byId(OWN.includes(column.name) ? "filters" : "axes").append(choice(column));
  }
  byId("more").hidden = axes.length === 0;
  const names = (varying.length ? varying : [columns.get("standing")]).map((column) => [column.name, column.name]);
  const views = [["y", "Rows", names], ["x", "Columns", names], ["colour", "Coloured by", [["standing", "worst standing"], ["verdict", "worst verdict"], ["share", "share of failures"]]]];
  for (const [key, label, choices] of views) {
    byId("views").append(select(`view-${key}`, label, choices, (value) => { state[key] = value; changed(); }));
  }
  let waiting;
  byId("q").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { state.q = byId("q").value.trim(); changed(false); }, 120);
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
}

function chips() {
  const words = state.q ? [["words", state.q, () => { state.q = ""; changed(); }]] : [];
  const chip = (name, value) => [name, shownValue(name, value), () => choose(name, without(name, value))];
  const all = [...[...state.filters].flatMap(([name, values]) => values.map((value) => chip(name, value))), ...words];
  const drawn = all.map(([name, value, drop]) => {
    const button = make("button", { type: "button", text: `${name}: ${value}`, "aria-label": `Remove the filter ${name}: ${value}` });
    button.addEventListener("click", drop);
    return make("li", {}, button);
  });
  if (all.length > 1) {
    const clear = make("button", { type: "button", class: "clear", text: "Clear all" });
    clear.addEventListener("click", () => { state.q = ""; state.filters.clear(); changed(); });
    drawn.push(make("li", {}, clear));
  }
  byId("chips").replaceChildren(...drawn);
}

function show() {
  rows = left();
  order();
  if (!rows.includes(chosen)) detail(-1);
  varying.forEach(mark);
  for (const key of ["x", "y", "colour"]) byId(`view-${key}`).value = state[key];
  if (byId("q").value.trim() !== state.q) byId("q").value = state.q;
  if (axes.some((column) => state.filters.has(column.name))) byId("more").open = true;
  chips();
  heads();
  frame.scrollTop = 0;
  frame.firstElementChild.setAttribute("aria-rowcount", rows.length + 1);
  byId("shown").textContent = `${rows.length.toLocaleString("en")} of ${TOTAL.toLocaleString("en")} results`;
  byId("matrix-card").hidden = TOTAL < 2;
  if (TOTAL > 1) matrix();
  paint();
}

/* An address says either a view (it has an `=`) or a place on the page, which leaves the view as it is. */
function follow() {
  const hash = location.hash.slice(1);
  const place = hash && !hash.includes("=") ? byId(decodeURIComponent(hash)) : null;
  const line = place && place.closest(".known-causes tr");
  if (line) line.querySelector("details").open = true;
  if (hash && !hash.includes("=")) return;
  read(hash);
  show();
  if (hash) byId("explore").scrollIntoView();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-filter]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const { x, y, colour, sort } = state;
  read(link.hash.slice(1));
  Object.assign(state, { x, y, colour, sort });
  changed();
  byId("explore").scrollIntoView();
});
window.addEventListener("popstate", follow);
if (TOTAL) {
  byId("explorer").hidden = false;
  controls();
  if (location.hash.includes("=")) follow();
  else { show(); follow(); }
}
