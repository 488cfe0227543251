// Pictures of the elements of differing tensors, and the bits of a chosen one.
//
// The element #elements holds one zlib stream in base64: a line of JSON and raw bytes behind it (harness/shardproof/tensor_pictures.py).
// The details of a tensor name their picture in it by number, and draw it when they are opened for the first time.
const VIEWS = ["difference", "expected", "observed", "slider"];
const GAP = 14;
const OWNERS = 8;

// --- where an element lies on the canvas ----------------------------------------------------------------

class Layout {
  constructor(picture, width) {
    const shape = picture.shape, n = picture.length;
    const whole = n === shape.reduce((a, b) => a * b, 1) && shape.length > 1;
    this.columns = whole || (shape.length > 1 && picture.first % shape.at(-1) === 0) ? shape.at(-1) : wrapped(n);
    this.rows = whole ? shape.at(-2) : Math.ceil(n / this.columns);
    this.slices = whole ? Math.ceil(n / (this.columns * this.rows)) : 1;
    this.cell = Math.max(6, Math.min(26, Math.floor(width / this.columns)));
    const span = this.columns * this.cell + GAP;
    this.across = Math.max(1, Math.min(this.slices, Math.floor((width + GAP) / span)));
    this.width = this.across * span - GAP;
    this.height = Math.ceil(this.slices / this.across) * (this.rows * this.cell + GAP) - GAP;
  }

  place(at) {
    const slice = Math.floor(at / (this.rows * this.columns)), rest = at % (this.rows * this.columns);
    const x = (slice % this.across) * (this.columns * this.cell + GAP);
    const y = Math.floor(slice / this.across) * (this.rows * this.cell + GAP);
    return [x + (rest % this.columns) * this.cell, y + Math.floor(rest / this.columns) * this.cell];
  }

  at(x, y) {
    const span = [this.columns * this.cell + GAP, this.rows * this.cell + GAP];
    const slice = Math.floor(y / span[1]) * this.across + Math.floor(x / span[0]);
    const column = Math.floor((x % span[0]) / this.cell), row = Math.floor((y % span[1]) / this.cell);
    if (column >= this.columns || row >= this.rows) return -1;
    return (slice * this.rows + row) * this.columns + column;
  }
}

function wrapped(n) {
  return n <= 16 ? Math.max(1, n) : [16, 24, 32, 48, 64].find((columns) => n <= 2 * columns * columns) ?? 64;
}

// --- drawing --------------------------------------------------------------------------------------------

class Painter {
  constructor(picture, canvas) {
    Object.assign(this, { picture, canvas, pen: canvas.getContext("2d") });
    const sizes = [picture.expected, picture.observed].flatMap((side) => side
      ? Array.from({ length: side.length }, (_, at) => Math.abs(Number(side.number(at)))).filter(Number.isFinite) : []);
    this.largest = sizes.reduce((a, b) => Math.max(a, b), 0) || 1;
    const bits = picture.wrong.map((at) => picture.distance(at)).filter(Boolean).map((d) => d.toString(2).length);
    [this.nearest, this.farthest] = [Math.min(...bits), Math.max(...bits)];
  }

  draw(view, split, chosen, width) {
    const layout = (this.layout = new Layout(this.picture, width)), dense = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: (layout.width + 2) * dense, height: (layout.height + 2) * dense });
    Object.assign(this.canvas.style, { width: `${layout.width + 2}px`, height: `${layout.height + 2}px` });
    this.colours = colours(this.canvas);
    this.pen.setTransform(dense, 0, 0, dense, dense, dense);
    const border = (split / 100) * layout.width;
    for (let at = 0; at < this.picture.length; at++) {
      const [x, y] = layout.place(at);
      this.band(at, x, y);
      const shown = view === "slider" ? (x + layout.cell / 2 < border ? "expected" : "observed") : view;
      if (shown === "difference") this.difference(at, x, y);
      else this.value(this.picture[shown], at, x, y, view !== "expected" && shown === "observed");
    }
    if (view === "slider") this.line(border, layout.height);
    if (chosen >= 0) this.frame(...layout.place(chosen), this.colours.ink, 2.5);
  }

  band(at, x, y) {
    const band = this.picture.bands.of[at], { cell } = this.layout;
    this.pen.fillStyle = band < 0 || this.picture.bands.names.length < 2 ? this.colours.line : this.colours.owners[band % OWNERS];
    this.pen.fillRect(x, y, cell, cell);
  }

  fill(x, y, colour) {
    const { cell } = this.layout, inset = cell > 20 ? 3 : cell > 12 ? 2 : 1;
    this.pen.fillStyle = colour;
    this.pen.fillRect(x + inset, y + inset, cell - 2 * inset, cell - 2 * inset);
  }

  value(side, at, x, y, marks) {
    if (!side?.has(at)) return this.absent(x, y);
    const number = Number(side.number(at)), { colours: c } = this;
    if (Number.isNaN(number)) {
      this.fill(x, y, c.nan);
      this.letter("N", x, y, c.card);
    } else if (!Number.isFinite(number)) {
      this.fill(x, y, number > 0 ? c.plus : c.minus);
      this.letter("∞", x, y, c.card);
    } else {
      const share = Math.sqrt(Math.abs(number) / this.largest);
      this.fill(x, y, number ? mixed(c.card, number > 0 ? c.plus : c.minus, 0.12 + 0.88 * share) : c.card);
      if (!number) this.letter(Object.is(number, -0) ? "−0" : "0", x, y, c.soft);
    }
    if (marks && this.picture.expected && this.picture.differs(at)) this.frame(x, y, c.wrong, 1.5);
  }

  difference(at, x, y) {
    const { picture, colours: c } = this, distance = picture.distance(at);
    if (!picture.differs(at)) return this.fill(x, y, c.card);
    if (!picture.expected?.has(at) || !picture.observed?.has(at)) {
      this.fill(x, y, picture.observed?.has(at) ? c.extra : c.missing);
      return this.letter(picture.observed?.has(at) ? "+" : "–", x, y, c.card);
    }
    if (distance === null) {
      const nan = picture.expected.isNaN(at) || picture.observed.isNaN(at);
      this.fill(x, y, nan ? c.nan : c.wrong);
      return this.letter(nan ? "N" : "≠", x, y, c.card);
    }
    if (distance === 0n) {
      this.fill(x, y, mixed(c.card, c.wrong, 0.15));
      return this.letter("±", x, y, c.ink);
    }
    const far = (distance.toString(2).length - this.nearest) / (this.farthest - this.nearest || 1);
    this.fill(x, y, mixed(c.card, c.wrong, this.farthest > this.nearest ? 0.3 + 0.7 * far : 0.8));
  }

  absent(x, y) {
    const { cell } = this.layout;
    this.fill(x, y, this.colours.code);
    this.pen.strokeStyle = this.colours.soft;
    this.pen.lineWidth = 1;
    this.pen.beginPath();
    this.pen.moveTo(x + 2, y + cell - 2);
    this.pen.lineTo(x + cell - 2, y + 2);
    this.pen.stroke();
  }

  letter(text, x, y, colour) {
    const { cell } = this.layout;
    if (cell < 11) return;
    Object.assign(this.pen, { fillStyle: colour, textAlign: "center", textBaseline: "middle" });
    this.pen.font = `600 ${Math.round(cell * 0.55)}px system-ui, sans-serif`;
    this.pen.fillText(text, x + cell / 2, y + cell / 2 + 0.5);
  }

  frame(x, y, colour, width) {
    const { cell } = this.layout;
    Object.assign(this.pen, { strokeStyle: colour, lineWidth: width });
    this.pen.strokeRect(x + width / 2, y + width / 2, cell - width, cell - width);
  }

  line(x, height) {
    this.pen.fillStyle = this.colours.accent;
    this.pen.fillRect(x - 1, 0, 2, height);
  }
}

function colours(element) {
  const style = getComputedStyle(element), name = (key) => style.getPropertyValue(`--${key}`).trim();
  const found = { owners: Array.from({ length: OWNERS }, (_, n) => name(`own-${n}`)) };
  for (const key of ["card", "ink", "soft", "line", "code", "accent"]) found[key] = name(key);
  for (const key of ["plus", "minus", "nan", "wrong", "extra", "missing"]) found[key] = name(`el-${key}`);
  return found;
}

function mixed(from, to, share) {
  const [a, b] = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return `rgb(${a.map((n, i) => Math.round(n + (b[i] - n) * Math.min(1, share))).join(" ")})`;
}

// --- the page -------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

function bitsTable(picture, at) {
  const [a, b] = [picture.expected, picture.observed];
  const both = picture.comparable && a.has(at) && b.has(at);
  const rows = [["expected", a, b], ["observed", b, a]].map(([name, side, other]) => {
    const row = element("tr", { class: name }, element("th", { scope: "row" }, name));
    if (!side?.has(at)) {
      row.append(element("td", { class: "pattern" }), element("td", { class: "number" }, "nothing"), element("td"));
      return row;
    }
    const cell = element("td", { class: "pattern" });
    let bit = 0;
    const against = both ? other.digits(at).map(([, digits]) => digits).join("") : "";
    for (const [part, digits] of side.digits(at)) {
      const span = element("span", { class: part });
      for (const digit of digits) {
        const same = !both || against[bit++] === digit;
        span.append(same ? digit : element("b", {}, digit));
      }
      cell.append(span);
    }
    row.append(cell, element("td", { class: "number" }, side.text(at)));
    row.append(element("td", { class: "soft" }, `${side.hexadecimal(at)} ${side.meaning(at)}`));
    return row;
  });
  return element("table", { class: "bits", "aria-label": `Bits of element ${picture.index(at)}` }, element("tbody", {}, ...rows));
}

// How many elements are how far apart, by power of two; for a tensor whose histogram is not on the page yet.
function histogram(picture) {
  const counts = new Map();
  for (const at of picture.wrong) {
    const distance = picture.distance(at), bits = distance === null ? "other" : distance ? distance.toString(2).length : 0;
    counts.set(bits, (counts.get(bits) ?? 0) + 1);
  }
  const most = Math.max(...counts.values());
  const rows = [...counts].sort(([a], [b]) => (a === "other") - (b === "other") || a - b).map(([bits, n]) => {
    const low = bits === "other" || bits < 2 ? String(bits) : String(2n ** BigInt(bits - 1));
    const label = low.length > 5 && bits > 1 ? `from 2^${bits - 1}` : bits > 1 ? `${low}-${2n ** BigInt(bits) - 1n}` : low;
    const bar = element("div", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(2, (120 * n) / most)}px`;
    return element("tr", {}, element("th", { scope: "row" }, label), element("td", {}, bar), element("td", { class: "num" }, n));
  });
  const table = element("table", { class: "ulps", "aria-label": "Distances in units in the last place" });
  table.append(element("caption", {}, "ULP apart"), element("tbody", {}, ...rows));
  return table;
}

function told(picture, at) {
  const parts = [picture.shape.length ? `Element ${picture.index(at)}` : "One number"];
  const distance = picture.distance(at), held = picture.bands.names[picture.bands.of[at]];
  if (!picture.differs(at)) parts.push("equal");
  else if (distance !== null) {
    const patterns = picture.expected.pattern(at) ^ picture.observed.pattern(at);
    const bits = patterns.toString(2).replaceAll("0", "").length;
    parts.push(`${distance} ${picture.lead.kind.exponent ? "ULP" : ""} apart`.replace("  ", " "), `${bits} bit${bits > 1 ? "s" : ""} differ${bits > 1 ? "" : "s"}`);
  }
  if (held !== undefined) parts.push(`held in memory by rank${held.includes(",") ? "s" : ""} ${held}`);
  if (picture.copies.length && picture.differs(at)) parts.push(`as the copy of rank ${picture.copies.join(", ")} has it`);
  return `${parts.join("; ")}.`;
}

// What the colours of a view mean, the ranks first.
function legend(list, picture, view) {
  list.replaceChildren();
  const add = (name, text) => {
    const chip = element("span", { class: "chip", "aria-hidden": "true" });
    chip.style.background = `var(--${name})`;
    list.append(element("li", {}, chip, text));
  };
  if (picture.bands.names.length > 1) {
    picture.bands.names.forEach((ranks, n) => add(`own-${n % OWNERS}`, `rank${ranks.includes(",") ? "s" : ""} ${ranks}`));
  } else if (picture.bands.names.length) {
    list.append(element("li", {}, `held whole in memory by rank${picture.bands.names[0].includes(",") ? "s" : ""} ${picture.bands.names[0]}`));
  }
  const every = Array.from({ length: picture.length }, (_, at) => at), sides = [picture.expected, picture.observed];
  if (view === "difference") {
    if (picture.comparable) add("el-wrong", "differs, stronger is farther");
    if (every.some((at) => sides[1]?.has(at) && !sides[0]?.has(at))) add("el-extra", "only observed");
    if (every.some((at) => sides[0]?.has(at) && !sides[1]?.has(at))) add("el-missing", "only expected");
  } else {
    add("el-plus", "positive");
    add("el-minus", "negative");
    if (view !== "expected" && sides[0]) add("el-wrong", "outlined: not as expected");
  }
  if (every.some((at) => sides.some((side) => side?.has(at) && side.isNaN(at)))) add("el-nan", "NaN");
}

let pictures = 0;

function show(details, picture) {
  const key = `picture-${pictures++}`, place = details.querySelector(".canvas-place"), bits = details.querySelector(".bits-place");
  const views = VIEWS.filter((view) => view === "difference" || (view === "slider" ? picture.comparable : picture[view]));
  let view = picture.comparable ? "difference" : picture.observed ? "observed" : "expected", split = 50;
  let chosen = picture.wrong[0] ?? 0;
  const name = details.querySelector(".name").textContent;
  const choice = element("fieldset", { class: "views" }, element("legend", { class: "unseen" }, `View of ${name}`));
  for (const one of views) {
    const radio = element("input", { type: "radio", name: key, id: `${key}-${one}`, value: one });
    radio.checked = one === view;
    radio.addEventListener("change", () => { view = one; slider.hidden = view !== "slider"; legend(colours, picture, view); paint(); });
    choice.append(radio, element("label", { for: radio.id }, one));
  }
  const slider = element("input", { type: "range", min: "0", max: "100", value: "50", class: "split", "aria-label": "Expected left of here, observed right of it" });
  slider.hidden = true;
  slider.addEventListener("input", () => { split = Number(slider.value); paint(); });
  const canvas = element("canvas", { "aria-hidden": "true" });
  const grid = element("div", {
    class: "grid", tabindex: "0", role: "application", "aria-roledescription": "picture of elements",
    "aria-label": `Elements of ${name}: ${picture.wrong.length} of ${picture.length} differ. Arrow keys choose one.`,
  }, canvas);
  const shape = `${picture.lead.dtype} ${picture.shape.length ? `of shape [${picture.shape.join(", ")}]` : "scalar"}`;
  const total = picture.shape.reduce((a, b) => a * b, 1);
  const cut = picture.length < total ? `; shown are ${picture.length} of ${total} elements, from ${picture.index(0)} on` : "";
  place.append(element("p", { class: "soft small" }, `${shape}${cut}`));
  const colours = element("ul", { class: "legend", "aria-label": "Colours" });
  if (picture.length > 1) place.append(choice, slider, grid, colours);
  const painter = new Painter(picture, canvas);
  const paint = () => painter.draw(view, split, chosen, Math.max(60, Math.min(720, place.clientWidth - 4)));
  const choose = (at) => {
    if (at < 0 || at >= picture.length) return;
    chosen = at;
    bits.replaceChildren(bitsTable(picture, at), element("p", { class: "soft apart", "aria-live": "polite" }, told(picture, at)));
    paint();
  };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    choose(painter.layout.at(event.clientX - box.left - 1, event.clientY - box.top - 1));
  });
  grid.addEventListener("keydown", (event) => {
    const rows = painter.layout.columns, next = picture.wrong.find((at) => at > chosen), before = picture.wrong.findLast((at) => at < chosen);
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, ArrowUp: chosen - rows, ArrowDown: chosen + rows,
      Home: 0, End: picture.length - 1, n: next ?? chosen, p: before ?? chosen }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(to);
  });
  place.hidden = false;
  legend(colours, picture, view);
  choose(chosen);
  const distances = details.querySelector(".ulps-place");
  if (!distances.firstElementChild && picture.comparable && picture.lead.dtype !== "bool") distances.append(histogram(picture));
  new ResizeObserver(paint).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), end = bytes.indexOf(10);
  return [JSON.parse(new TextDecoder().decode(bytes.subarray(0, end))).pictures, bytes.subarray(end + 1)];
}

async function start() {
  const data = document.getElementById("elements");
  if (!data || !("DecompressionStream" in window)) return;
  const [described, body] = await unpacked(data.value);
  const drawn = new Set();
  const draw = (details) => {
    if (!details.open || drawn.has(details) || !details.offsetParent) return;
    drawn.add(details);
    show(details, new Picture(described[Number(details.dataset.picture)], body));
  };
  const all = [...document.querySelectorAll("details[data-picture]")];
  for (const details of document.querySelectorAll("#differences details")) {
    details.addEventListener("toggle", () => all.filter((one) => details.contains(one)).forEach(draw));
  }
  all.forEach(draw);
  for (const line of document.querySelectorAll(".script-only")) line.hidden = false;
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
}

for (const text of document.querySelectorAll(".from-the-end")) text.scrollTop = text.scrollHeight;
addEventListener("hashchange", openTarget);
openTarget();
start();
