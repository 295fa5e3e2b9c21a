// Small line charts: axes with round numbers, a legend with the latest values, a cursor for pointer and arrow keys.

import { el, setText, svg } from "./dom.js";

const MARGIN = { top: 10, right: 10, bottom: 22, left: 52 };
const HEIGHT = 172;
const ROUND = [1, 2, 2.5, 5, 10];

// The least round number, and the distance of its grid lines, that has room for `most`.
export function scaleFor(most) {
  if (!(most > 0)) return { top: 1, step: 0.5 };
  const power = 10 ** Math.floor(Math.log10(most / 3));
  const step = ROUND.map((factor) => factor * power).find((candidate) => candidate * 4 >= most);
  return { top: Math.ceil(most / step - 1e-9) * step, step };
}

export class Chart {
  // `lines`: [{key, name, hue, dashed, fill}]; `format` of a value; `nothing`: what an empty chart says.
  constructor(figure, { title, unit, lines, format, axisFormat, nothing, emptyIsZero = false }) {
    Object.assign(this, { figure, title, unit, lines, format, nothing, emptyIsZero, axisFormat: axisFormat ?? format });
    this.index = null;
    this.values = lines.map(() => []);
    this.step = 5;
    this.endAge = 0;
    this.known = false;
    this.build();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  build() {
    this.latest = this.lines.map(() => el("b", {}, "–"));
    const legend = this.lines.map((line, i) => el("li", {}, svg("svg", { "aria-hidden": "true", viewBox: "0 0 22 8" }, svg("path", { class: this.classOf(line), d: "M1 4H21" })), line.name, this.latest[i]));
    this.plot = svg("svg", { class: "plot", "aria-hidden": "true", focusable: "false" });
    this.tip = el("div", { class: "tip", "aria-hidden": "true", hidden: "" });
    this.said = el("p", { class: "hidden", "aria-live": "polite" });
    this.summary = el("p", { class: "hidden" });
    this.figure.append(el("div", { class: "chart-head" }, el("h3", {}, this.title, " ", el("span", { class: "window" }, "last 5 min")), el("ul", { class: "legend" }, legend)), this.plot, this.tip, this.summary, this.said);
    this.figure.tabIndex = 0;
    this.figure.setAttribute("aria-label", `Chart: ${this.title}, in ${this.unit}. Arrow keys read single values.`);
    this.plot.addEventListener("pointermove", (event) => this.point(this.indexAt(event)));
    this.plot.addEventListener("pointerdown", (event) => this.point(this.indexAt(event)));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.figure.addEventListener("blur", () => this.point(null));
    this.figure.addEventListener("keydown", (event) => this.onKey(event));
  }

  classOf(line) {
    return `line hue-${line.hue}${line.dashed ? " dashed" : ""}`;
  }

  show(curves) {
    this.values = this.lines.map((line) => curves[line.key] ?? []);
    this.step = curves.step_s;
    this.endAge = curves.end_age_s;
    this.known = true;
    const last = this.values.map((values) => values.findLast((value) => value !== null));
    this.latest.forEach((element, i) => setText(element, last[i] === undefined ? "–" : this.format(last[i])));
    setText(this.summary, this.isEmpty() ? this.nothing : this.lines.map((line, i) => `${line.name}: latest ${last[i] === undefined ? "none" : this.format(last[i])}, highest ${this.format(Math.max(...this.numbers(i)))}`).join(". "));
    this.draw();
  }

  numbers(i) {
    const found = this.values[i].filter((value) => value !== null);
    return found.length ? found : [0];
  }

  isEmpty() {
    return this.values.every((values) => values.every((value) => value === null || (this.emptyIsZero && value === 0)));
  }

  draw() {
    this.width = this.plot.clientWidth || 320;
    const length = this.values[0].length;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const inner = { width: this.width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const { top, step } = scaleFor(Math.max(...this.values.map((_, i) => Math.max(...this.numbers(i)))));
    this.x = (index) => MARGIN.left + (length > 1 ? (index / (length - 1)) * inner.width : 0);
    this.y = (value) => MARGIN.top + (1 - value / top) * inner.height;
    const parts = this.isEmpty() ? [] : this.levels(top, step);
    parts.push(...this.times(length));
    if (this.isEmpty()) parts.push(svg("text", { class: "nothing", x: this.width / 2, y: HEIGHT / 2 - 4, "text-anchor": "middle" }, this.known ? this.nothing : "No data yet"));
    else this.lines.forEach((line, i) => parts.push(...this.curve(line, this.values[i])));
    this.plot.replaceChildren(...parts, (this.cursor = svg("g")));
    this.point(this.index, false);
  }

  levels(top, step) {
    const parts = [];
    for (let value = 0; value <= top * 1.0001; value += step) {
      const y = Math.round(this.y(value)) + 0.5;
      parts.push(svg("line", { class: value === 0 ? "axis" : "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      parts.push(svg("text", { x: MARGIN.left - 8, y: y + 3.5, "text-anchor": "end" }, value === 0 ? "0" : this.axisFormat(value)));
    }
    return parts;
  }

  times(length) {
    const parts = [];
    const minutes = Math.round((length * this.step) / 60);
    const every = this.width < 420 ? 2 : 1;
    for (let ago = 0; ago <= minutes; ago += every) {
      const index = length - 1 - (ago * 60) / this.step;
      if (index < 0) break;
      const anchor = ago === 0 ? "end" : "middle";
      parts.push(svg("text", { x: this.x(index), y: HEIGHT - 6, "text-anchor": anchor }, ago === 0 ? "now" : `−${ago} min`));
    }
    return parts;
  }

  curve(line, values) {
    const parts = [];
    let run = [];
    const end = () => {
      if (run.length > 1) {
        const path = run.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
        const base = this.y(0).toFixed(1);
        if (line.fill) parts.push(svg("path", { class: `area hue-${line.hue}`, d: `${path}L${run.at(-1)[0].toFixed(1)} ${base}L${run[0][0].toFixed(1)} ${base}Z` }));
        parts.push(svg("path", { class: this.classOf(line), d: path }));
      } else if (run.length === 1) parts.push(svg("circle", { class: `mark hue-${line.hue}`, cx: run[0][0], cy: run[0][1], r: 3 }));
      run = [];
    };
    values.forEach((value, index) => (value === null ? end() : run.push([this.x(index), this.y(value)])));
    end();
    return parts;
  }

  indexAt(event) {
    const box = this.plot.getBoundingClientRect();
    const length = this.values[0].length;
    const share = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    return length ? Math.min(length - 1, Math.max(0, Math.round(share * (length - 1)))) : null;
  }

  onKey(event) {
    const length = this.values[0].length;
    const from = this.index ?? length;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: length - 1 }[event.key];
    if (event.key === "Escape") return this.point(null);
    if (to === undefined || !length) return;
    event.preventDefault();
    this.point(Math.min(length - 1, Math.max(0, to)));
    setText(this.said, this.words(this.index).join(", "));
  }

  words(index) {
    const ago = Math.round((this.values[0].length - 1 - index) * this.step + this.endAge);
    const when = ago < 60 ? `${ago} s ago` : `${Math.floor(ago / 60)} min ${ago % 60} s ago`;
    const parts = this.lines.flatMap((line, i) => (this.values[i][index] === null ? [] : [`${line.name} ${this.format(this.values[i][index])}`]));
    return [when, ...(parts.length ? parts : ["none"])];
  }

  point(index, moved = true) {
    if (index !== null && (this.isEmpty() || index >= this.values[0].length)) index = null;
    if (moved) this.index = index;
    this.tip.hidden = index === null;
    this.cursor.replaceChildren();
    if (index === null) return;
    const x = this.x(index);
    const marks = this.lines.flatMap((line, i) => (this.values[i][index] === null ? [] : [svg("circle", { class: `mark hue-${line.hue}`, cx: x, cy: this.y(this.values[i][index]), r: 4 })]));
    this.cursor.append(svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), ...marks);
    this.tip.replaceChildren(...this.words(index).map((line) => el("p", {}, line)));
    const left = this.plot.offsetLeft ?? 0;
    const space = this.figure.clientWidth - this.tip.offsetWidth - 8;
    const wanted = left + x + 24 + (x > this.width / 2 ? -this.tip.offsetWidth - 40 : 0);
    this.tip.style.transform = `translate(${Math.round(Math.min(space, Math.max(8, wanted)))}px, 44px)`;
  }
}
