/* The filters of the main page; index.js, which follows in the same script, has the state that they change. */

/* A filter is a fold with a box for each value, so that a row may have any of several. The boxes are made when it is
   opened first. */
function choice(column) {
  const { name } = column, id = `by-${name}`;
  const said = make("span", { id: `${id}-said` });
  const list = make("div", { class: "values", role: "group", "aria-label": name });
  const fold = make("details", { id, class: "choice" }, make("summary", { "aria-labelledby": `${id}-name ${id}-said` }, said), list);
  const filled = () => {
    if (list.hasChildNodes()) return;
    list.append(...boxes(column), anything(name));
    mark(column);
  };
  fold.addEventListener("toggle", () => {
    if (!fold.open) return;
    filled();
    list.classList.remove("leftwards");
    if (list.getBoundingClientRect().right > document.documentElement.clientWidth) list.classList.add("leftwards");
  });
  list.addEventListener("change", (event) => {
    const { value, checked } = event.target;
    choose(name, checked ? [...wanted(name), value] : without(name, value));
  });
  fold.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && fold.open) close(fold);
    if (fold.open) filled();  // a key can come before the event that says that it was opened
    const all = [...list.querySelectorAll("input")], at = all.indexOf(event.target);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
    if (!fold.open || !(event.key in steps)) return;
    event.preventDefault();
    (all[steps[event.key]] || fold.firstElementChild).focus();
  });
  return make("div", { class: "field" }, make("span", { class: "name", id: `${id}-name`, text: name }), fold);
}

function boxes(column) {
  const counts = new Uint32Array(column.values.length);
  for (const code of column.codes) counts[code]++;
  const brief = (text) => (text.length > 70 ? `${text.slice(0, 69)}…` : text);
  return column.values.map((value, code) => {
    const box = make("input", { type: "checkbox", value });
    return make("label", {}, box, ` ${brief(shownValue(column.name, value))} (${counts[code]})`);
  });
}

function anything(name) {
  const button = make("button", { type: "button", text: "any" });
  button.addEventListener("click", () => { choose(name, []); close(byId(`by-${name}`)); });
  return button;
}

function close(fold) {
  fold.open = false;
  fold.firstElementChild.focus();
}

function mark(column) {
  const values = wanted(column.name), fold = byId(`by-${column.name}`);
  const several = `${values.length} of ${column.values.length}`;
  byId(`by-${column.name}-said`).textContent = values.length > 1 ? several : values.length ? shownValue(column.name, values[0]) : "any";
  fold.classList.toggle("in-force", values.length > 0);
  for (const box of fold.querySelectorAll("input")) box.checked = values.includes(box.value);
}

for (const kind of ["pointerdown", "focusin"]) {
  document.addEventListener(kind, (event) => {
    for (const fold of document.querySelectorAll(".choice[open]")) if (!fold.contains(event.target)) fold.open = false;
  });
}
