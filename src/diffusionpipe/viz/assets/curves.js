"use strict";
// Curves over steps or samples, drawn as SVG, with a reading for the pointer and for the arrow keys.

/**
 * A chart of lines. Each line: {label, key, file, points: [[x, y, step], ...], faint, colour (a name of the style),
 * dash: lengths of dashes and gaps, or ""}. `unit`: of its values.
 */
dp.Chart = class {
  constructor({ label, unit, lines, height = 190, axis = "step" }) {
    Object.assign(this, { label, unit, lines, high: height, axis });
    this.box = dp.el("div", { class: "plot" });
    this.scale = dp.el("span", { class: "small", hidden: true }, " logarithmic scale");
    this.reading = dp.el("p", { class: "reading", "aria-live": "polite" });
    this.root = dp.el("figure", { class: "chart" },
      dp.el("figcaption", {}, dp.el("strong", {}, label), unit && dp.el("span", { class: "small" }, ` ${unit}`), this.scale, this.#legend()),
      dp.el("div", { class: "hold", tabindex: 0, role: "application", "aria-roledescription": "chart",
        "aria-label": `${label}. Left and right read the values.`,
        keydown: (event) => this.#key(event), pointermove: (event) => this.#point(event),
        pointerleave: () => this.#show(null), blur: () => this.#show(null) }, this.box), this.reading);
    this.#show(null);
    dp.onResize(this.box, () => this.draw());
  }

  #legend() {
    const named = this.lines.filter((line) => !line.faint);
    if (named.length < 2) return null;
    return dp.el("ul", { class: "legend" }, named.map((line) => {
      const stroke = dp.el("line", { class: "curve", x1: 0, x2: 32, y1: 4, y2: 4, "stroke-dasharray": line.dash });
      const patch = dp.el("svg", { width: 32, height: 8, "aria-hidden": "true" }, stroke);
      patch.style.setProperty("--own", `var(${line.colour})`);
      return dp.el("li", {}, patch, line.label);
    }));
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const every = this.lines.flatMap((line) => line.points);
    if (!every.length) return;
    const xs = every.map((point) => point[0]);
    const firm = this.lines.filter((line) => !line.faint).flatMap((line) => line.points.map((point) => point[1]));
    const ys = every.map((point) => point[1]);
    const [left, right, top, bottom] = [52, 10, 8, 22];
    const reduce = (values, pick) => values.reduce((best, value) => pick(best, value), values[0]);
    let [x0, x1, y0, y1] = [reduce(xs, Math.min), reduce(xs, Math.max), reduce(ys, Math.min), reduce(ys, Math.max)];
    const log = reduce(firm, Math.min) > 0 && y0 > 0 && reduce(firm, Math.max) > 20 * reduce(firm, Math.min);
    this.scale.hidden = !log;
    const scale = log ? Math.log10 : (value) => value;
    [y0, y1] = [scale(y0), scale(y1)];
    const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 1;
    [y0, y1] = [y0 - pad, y1 + pad];
    if (x1 === x0) x1 = x0 + 1;
    this.place = { left, right: width - right, x0, x1 };
    const x = (value) => left + (value - x0) / (x1 - x0) * (width - left - right);
    const y = (value) => top + (y1 - scale(value)) / (y1 - y0) * (this.high - top - bottom);
    const svg = dp.el("svg", { width, height: this.high, viewBox: `0 0 ${width} ${this.high}`, "aria-hidden": "true" });
    const marks = [];
    const ticks = log ? dp.decades(y0, y1) : dp.ticks(y0, y1, 4);
    for (const value of ticks) {
      const place = y(log ? 10 ** value : value);
      svg.append(dp.el("line", { class: "grid", x1: left, x2: width - right, y1: place, y2: place }));
      marks.push([dp.short(log ? 10 ** value : value), 0, place - 8, left - 8, "end"]);
    }
    const stops = dp.ticks(x0, x1, Math.max(2, width / 75));
    for (const value of stops) marks.push([dp.short(value), x(value) - 40, this.high - 17, 80, "middle"]);
    for (const line of this.lines) {
      const path = line.points.map((point, at) => `${at ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
      const drawn = dp.el("path", { class: `curve${line.faint ? " faint" : ""}`, d: path, "stroke-dasharray": line.dash });
      drawn.style.setProperty("--own", `var(${line.colour})`);
      svg.append(drawn);
      if (line.points.length < 25 && !line.faint) {
        for (const point of line.points) {
          const dot = dp.el("circle", { class: "dot", cx: x(point[0]), cy: y(point[1]), r: 2.6 });
          dot.style.setProperty("--own", `var(${line.colour})`);
          svg.append(dot);
        }
      }
    }
    this.cursor = dp.el("line", { class: "cursor", y1: top, y2: this.high - bottom, x1: -9, x2: -9 });
    svg.append(this.cursor);
    const texts = marks.map(([text, markLeft, markTop, markWidth, align]) => {
      const mark = dp.el("span", { class: `mark ${align}`, "aria-hidden": "true" }, text);
      mark.style.left = `${Math.max(0, Math.min(markLeft, width - markWidth))}px`;
      mark.style.top = `${markTop}px`;
      mark.style.width = `${markWidth}px`;
      return mark;
    });
    this.box.style.height = `${this.high}px`;
    this.box.replaceChildren(svg, ...texts);
    this.x = x;
  }

  /** The nearest point of each line. */
  #near(value) {
    return this.lines.filter((line) => !line.faint && line.points.length).map((line) => {
      const point = line.points.reduce((best, one) => (Math.abs(one[0] - value) < Math.abs(best[0] - value) ? one : best));
      return { line, point };
    });
  }

  #point(event) {
    if (!this.place) return;
    const box = this.box.getBoundingClientRect();
    const { left, right, x0, x1 } = this.place;
    this.#show(x0 + (event.clientX - box.left - left) / (right - left) * (x1 - x0));
  }

  #key(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const places = [...new Set(this.lines.filter((line) => !line.faint).flatMap((line) => line.points.map((point) => point[0])))]
      .sort((one, other) => one - other);
    const at = this.at === null ? -1 : places.findIndex((place) => place >= this.at);
    const next = event.key === "ArrowRight" ? at + 1 : Math.max(0, at - 1);
    this.#show(places[Math.min(places.length - 1, next)]);
  }

  #show(value) {
    this.at = value;
    const last = value === null;
    const lines = last
      ? this.lines.filter((line) => !line.faint && line.points.length).map((line) => ({ line, point: line.points.at(-1) }))
      : this.#near(value);
    this.reading.replaceChildren(...lines.map(({ line, point }) => dp.el("span", {},
      `${lines.length > 1 || line.named ? `${line.label} ` : ""}`,
      dp.el("data", { class: "figure", value: point[1], "data-file": line.file, "data-key": `${line.key} @ step ${point[2]}` }, dp.short(point[1])),
      dp.el("span", { class: "small" }, ` at step ${point[2].toLocaleString("en-US")} `))));
    if (this.cursor) {
      const x = last || !lines.length ? -9 : this.x(lines[0].point[0]);
      this.cursor.setAttribute("x1", x);
      this.cursor.setAttribute("x2", x);
    }
  }
};

/** Round values between two others, about `count` of them. */
dp.ticks = function (from, to, count) {
  const step = dp.nice((to - from) / Math.max(1, count));
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
};

/** Powers of ten between two powers, or halves of them where there are few. */
dp.decades = function (from, to) {
  const found = [];
  for (let power = Math.ceil(from); power <= to; power += 1) found.push(power);
  return found.length > 1 ? found : dp.ticks(from, to, 3);
};
