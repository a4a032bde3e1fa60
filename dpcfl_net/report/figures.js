// Figures of a page: value under the pointer, zoom by dragging, entries of the legend, and downloads. Figures show without it.
"use strict";
const XMLNS = "http://www.w3.org/2000/svg";
const NEAR = 24, LEAST = 8; // pixels: of the pointer to a point, and of a dragged box
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";

function make(name, attributes, parent) {
  const node = document.createElementNS(XMLNS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return parent ? parent.appendChild(node) : node;
}

function short(value, format) {
  const found = /^\.(\d)([gf])$/.exec(format || "");
  if (typeof value !== "number") return String(value);
  if (!found) return String(Number(value.toPrecision(6)));
  return found[2] === "f" ? value.toFixed(found[1]) : String(Number(value.toPrecision(found[1])));
}

// Words for a point, from plotly's template: "mean, round %{x}: %{y:.3g}<extra>name</extra>".
function words(trace, index) {
  if (trace.hoverinfo === "skip") return "";
  const point = { x: trace.x[index], y: trace.y[index], text: [].concat(trace.text ?? "")[index] };
  if (!trace.hovertemplate) return trace.hoverinfo === "text" ? String(point.text) : `${short(point.x)}: ${short(point.y)}`;
  const said = trace.hovertemplate.replace(/%\{(\w+)(?::([^}]*))?\}/g, (_, key, format) => short(point[key] ?? "", format));
  const [main, extra] = said.split("<extra>");
  const name = (extra || "").replace("</extra>", "");
  return (name ? `${main}, ${name}` : main).replaceAll("<br>", " ");
}

class Axis {
  constructor(given, side) {
    Object.assign(this, given, { side, from: given.start, to: given.end });
  }
  coordinate(value) {
    if (this.categories) return this.categories.indexOf(String(value));
    return this.log ? Math.log10(value) : value;
  }
  base(value) { // pixel before any zoom
    return this.start + ((this.coordinate(value) - this.low) / (this.high - this.low)) * (this.end - this.start);
  }
  get scale() { return (this.end - this.start) / (this.to - this.from); }
  zoomed(pixel) { return this.start + (pixel - this.from) * this.scale; }
  unzoomed(pixel) { return this.from + (pixel - this.start) / this.scale; }
  value(pixel) { return this.low + ((pixel - this.start) / (this.end - this.start)) * (this.high - this.low); }
  ticks() {
    const [a, b] = [this.value(this.from), this.value(this.to)].sort((p, q) => p - q);
    if (this.ticks_) return this.ticks_.filter(([at]) => at >= a && at <= b);
    const count = Math.max(2, Math.abs(this.end - this.start) / (this.side === "x" ? 62 : 38));
    const raw = (b - a) / count, power = 10 ** Math.floor(Math.log10(raw));
    const nice = [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999) * power, step = this.whole ? Math.max(1, nice) : nice;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(a / step); k * step <= b; k++) {
      const at = k * step;
      found.push([at, this.log ? String(Number((10 ** at).toPrecision(3))) : at === 0 ? "0" : at.toFixed(Math.min(digits, 12))]);
    }
    return found;
  }
}

function columnEdges(places) { // as they are drawn: halfway between neighbours
  const inner = places.slice(1).map((place, k) => (places[k] + place) / 2), last = places.at(-1);
  return [inner.length ? 2 * places[0] - inner[0] : last - 0.5, ...inner, inner.length ? 2 * last - inner.at(-1) : last + 0.5];
}

class Plot {
  constructor(svg, figure) {
    this.svg = svg; this.figure = figure; this.marks = svg.querySelector(".marks");
    const given = svg.dataset.axes ? JSON.parse(svg.dataset.axes) : null;
    if (given) {
      for (const side of "xy") { given[side].ticks_ = given[side].ticks; delete given[side].ticks; }
      this.axes = { x: new Axis(given.x, "x"), y: new Axis(given.y, "y") };
      this.first = [...svg.querySelectorAll(".ticks")];
      svg.addEventListener("pointerdown", event => this.begin(event));
      svg.addEventListener("dblclick", () => this.reset());
    }
    svg.addEventListener("pointermove", event => this.say(event));
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    for (const entry of svg.querySelectorAll(".entry")) entry.addEventListener("click", () => this.toggle(entry));
  }
  place(event) {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    return [at.x, at.y];
  }
  say(event) {
    const said = this.mark(event.target) || this.near(...this.place(event)) || this.cell(...this.place(event));
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said;
    const wide = tip.offsetWidth, left = Math.min(event.clientX + 14, innerWidth - wide - 8);
    tip.style.left = `${Math.max(8, left)}px`; tip.style.top = `${event.clientY + 16}px`;
  }
  mark(target) {
    const index = target.dataset?.i, trace = target.closest("[data-t]");
    return index === undefined || !trace ? "" : words(this.figure.data[trace.dataset.t], Number(index));
  }
  near(px, py) {
    if (!this.axes || px < Math.min(this.axes.x.start, this.axes.x.end) || py > Math.max(this.axes.y.start, this.axes.y.end)) return "";
    let best = NEAR, said = "";
    this.figure.data.forEach((trace, number) => {
      if (trace.type !== "scatter" || !trace.x || this.marks.querySelector(`[data-t="${number}"]`)?.classList.contains("off")) return;
      trace.x.forEach((x, index) => {
        if (trace.y[index] === null || x === null) return;
        const [a, b] = [this.axes.x.zoomed(this.axes.x.base(x)), this.axes.y.zoomed(this.axes.y.base(trace.y[index]))];
        const away = Math.hypot(a - px, b - py);
        if (away < best && words(trace, index)) { best = away; said = words(trace, index); }
      });
    });
    return said;
  }
  cell(px, py) {
    const map = this.figure.data.find(trace => trace.type === "heatmap");
    const group = map && this.marks.querySelector(`[data-t="${this.figure.data.indexOf(map)}"]`);
    if (!group) return "";
    const edges = columnEdges(map.x), { x, y, width, height } = group.getBBox();
    const [across, down] = this.axes
      ? [this.axes.x.value(this.axes.x.unzoomed(px)), this.axes.y.value(this.axes.y.unzoomed(py)) + 0.5]
      : [edges[0] + ((px - x) / width) * (edges.at(-1) - edges[0]), ((py - y) / height) * map.z.length];
    return map.text?.[Math.floor(down)]?.[edges.findIndex(edge => across < edge) - 1] ?? "";
  }
  begin(event) {
    if (event.pointerType === "touch" || event.button || event.target.closest(".entry")) return;
    const start = this.place(event), box = make("rect", { class: "box" }, this.svg);
    const corner = next => {
      const end = this.place(next);
      return ["x", "y"].map((side, k) => {
        const ends = [this.axes[side].start, this.axes[side].end].sort((a, b) => a - b);
        return [start[k], end[k]].map(p => Math.min(ends[1], Math.max(ends[0], p))).sort((a, b) => a - b);
      });
    };
    const move = next => {
      const [[a, b], [c, d]] = corner(next);
      for (const [key, value] of Object.entries({ x: a, y: c, width: b - a, height: d - c })) box.setAttribute(key, value);
    };
    const stop = next => {
      removeEventListener("pointermove", move); removeEventListener("pointerup", stop);
      box.remove();
      const [across, down] = corner(next);
      if (across[1] - across[0] > LEAST && down[1] - down[0] > LEAST) this.zoom({ x: across, y: down });
    };
    event.preventDefault();
    addEventListener("pointermove", move); addEventListener("pointerup", stop);
  }
  zoom(ranges) {
    for (const side of "xy") {
      const axis = this.axes[side], [a, b] = ranges[side].map(pixel => axis.unzoomed(pixel));
      [axis.from, axis.to] = axis.start < axis.end ? [a, b] : [b, a];
    }
    this.show();
  }
  reset() {
    for (const axis of Object.values(this.axes)) [axis.from, axis.to] = [axis.start, axis.end];
    this.show();
  }
  show() {
    const { x, y } = this.axes, plain = x.scale === 1 && y.scale === 1;
    this.marks.setAttribute("transform", `matrix(${x.scale} 0 0 ${y.scale} ${x.zoomed(0)} ${y.zoomed(0)})`);
    for (const node of this.marks.querySelectorAll("[transform], text")) { // symbols and words keep their size
      node.dataset.base ??= node.getAttribute("transform") ?? "";
      const at = node.tagName === "text" ? `translate(${node.getAttribute("x")} ${node.getAttribute("y")})` : node.dataset.base;
      const back = node.tagName === "text" ? ` translate(${-node.getAttribute("x")} ${-node.getAttribute("y")})` : "";
      node.setAttribute("transform", `${at} scale(${1 / x.scale} ${1 / y.scale})${back}`);
    }
    for (const old of this.svg.querySelectorAll(".ticks")) old.remove();
    const before = this.marks.parentNode;
    if (plain) this.first.forEach(group => this.svg.insertBefore(group, before));
    else for (const axis of [x, y]) this.rule(axis, before);
    const reset = this.svg.closest("figure, section")?.querySelector(".reset"); // none in the dialog
    if (reset) reset.hidden = plain;
  }
  rule(axis, before) {
    const { x, y } = this.axes, across = axis.side === "x", old = this.first.find(group => group.classList.contains(axis.side));
    const group = this.svg.insertBefore(make("g", { class: `ticks ${axis.side}`, fill: old?.getAttribute("fill") ?? "" }), before);
    const stroke = old?.querySelector(".rules")?.getAttribute("stroke");
    const floor = Math.max(y.start, y.end), roof = Math.min(y.start, y.end), left = Math.min(x.start, x.end), right = Math.max(x.start, x.end);
    for (const [at, label] of axis.ticks()) {
      const pixel = axis.zoomed(axis.start + ((at - axis.low) / (axis.high - axis.low)) * (axis.end - axis.start));
      if (stroke) make("path", { d: across ? `M${pixel} ${roof}V${floor}` : `M${left} ${pixel}H${right}`, stroke, fill: "none" }, group);
      const lines = label.split("<br>"), up = across ? 0 : 7.5 * (lines.length - 1);
      const place = across ? { x: pixel, y: floor + 16, "text-anchor": "middle" } : { x: left - 6, y: pixel + 4 - up, "text-anchor": "end" };
      const words = make("text", { ...place, "font-size": 12 }, group);
      lines.forEach((line, k) => { make("tspan", { x: place.x, dy: k ? 15 : 0 }, words).textContent = line; });
    }
  }
  toggle(entry) {
    const off = entry.classList.toggle("off");
    for (const index of JSON.parse(entry.dataset.own)) this.marks.querySelector(`[data-t="${index}"]`)?.classList.toggle("off", off);
  }
}

// Downloads.

function save(blob, name) {
  const url = URL.createObjectURL(blob), link = document.createElement("a");
  link.setAttribute("href", url); link.setAttribute("download", name);
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function shown(plot) { return [...plot.querySelectorAll("svg")].find(svg => svg.getBoundingClientRect().width); }

function fixed(svg) { // with the colours of the theme written out
  const style = getComputedStyle(document.documentElement), copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
  copy.removeAttribute("data-axes");
  copy.prepend(make("rect", { width: box.width, height: box.height, fill: "var(--surface)" }));
  copy.querySelectorAll(".off").forEach(node => node.classList.contains("entry") || node.remove());
  return new XMLSerializer().serializeToString(copy).replace(/var\(--([a-z0-9]+)\)/g, (_, name) => style.getPropertyValue(`--${name}`).trim());
}

function picture(svg, name) {
  const box = svg.viewBox.baseVal, canvas = document.createElement("canvas"), image = new Image();
  canvas.width = 2 * box.width; canvas.height = 2 * box.height;
  image.onload = () => {
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => save(blob, name));
  };
  image.setAttribute("src", `data:image/svg+xml;charset=utf-8,${encodeURIComponent(fixed(svg))}`);
}

function table(figure) {
  const quoted = value => { // a quote before what a spreadsheet would take for a formula, as in core/csv_text.py
    const text = String(value ?? ""), safe = isNaN(text) ? text.replace(/^[=+\-@\t\r\n']/, "'$&") : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const rows = [["series", "x", "y", "value"]];
  for (const trace of figure.data) {
    const name = (trace.name ?? "").replaceAll("<br>", " ");
    if (trace.type === "heatmap") trace.z.forEach((row, y) => row.forEach((value, k) => rows.push([name, trace.x[k], y, value])));
    else if (trace.x) trace.x.forEach((x, k) => rows.push([name, x, trace.y[k], ""]));
  }
  return rows.map(row => row.map(quoted).join(",")).join("\n") + "\n";
}

const widest = new Map(); // drawings before any zoom, by figure
const dialog = document.body.appendChild(document.createElement("dialog"));
dialog.addEventListener("click", event => { if (event.target === dialog || event.target.closest("button")) dialog.close(); });

function enlarge(key, title) {
  const room = document.createElement("div"), close = document.createElement("button");
  room.className = "scroll"; room.innerHTML = widest.get(key);
  const svg = room.firstElementChild;
  for (const part of svg.querySelectorAll("[id]")) part.id += "-large";
  for (const part of svg.querySelectorAll("[clip-path]")) part.setAttribute("clip-path", `url(#${svg.querySelector("clipPath").id})`);
  const heading = document.createElement("h2");
  heading.textContent = title; close.textContent = "Close";
  dialog.replaceChildren(heading, room, close);
  new Plot(svg, figures[key]);
  dialog.showModal();
}

const drawn = new Map(); // its plots, by figure

function prepare(plot) { // again after its drawings were replaced
  widest.set(plot.id, plot.querySelector("svg:last-child").outerHTML);
  drawn.set(plot.id, [...plot.querySelectorAll("svg")].map(svg => new Plot(svg, figures[plot.id])));
  if (!plot.parentNode.querySelector(".tools")) addTools(plot);
}

function addTools(plot) {
  const key = plot.id, title = plot.getAttribute("aria-label");
  const actions = {
    Reset: () => drawn.get(key).forEach(one => one.axes && one.reset()),
    Enlarge: () => enlarge(key, title),
    CSV: () => save(new Blob([table(figures[key])], { type: "text/csv" }), `${key}.csv`),
    SVG: () => save(new Blob([fixed(shown(plot))], { type: "image/svg+xml" }), `${key}.svg`),
    PNG: () => picture(shown(plot), `${key}.png`),
  };
  const tools = document.createElement("div");
  tools.className = "tools";
  if (figures[key].data.every(trace => trace.type === "image")) delete actions.CSV;
  for (const [label, act] of Object.entries(actions)) {
    const button = tools.appendChild(document.createElement("button"));
    button.textContent = label; button.title = { Reset: "Leave the zoom", Enlarge: "Show in the whole window" }[label] ?? `Download as ${label}`;
    button.setAttribute("aria-label", `${button.title}: ${title}`);
    if (label === "Reset") { button.className = "reset"; button.hidden = true; }
    button.addEventListener("click", act);
  }
  const head = plot.previousElementSibling;
  if (head?.classList.contains("head")) head.append(tools);
  else plot.before(tools);
}

document.querySelectorAll(".plot").forEach(prepare);
