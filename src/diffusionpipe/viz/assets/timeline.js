"use strict";
// The timeline: predicted above measured, on one axis, in a canvas.
//
//   rank 0 |F0|F1|....|B0 ...     compute
//          |-- - ---              messages
//          |     ====             sums of gradients
//
// A frame draws at most MOST bars. Actions that are narrower than a bucket are merged: such a bar is as wide as the
// actions that it stands for and as high as the busy part of that time, so that idle time is never hidden. Buckets
// lie on an absolute grid, so a part that is drawn alone looks as in the whole. Moving shifts the picture and draws
// only the strip that has come into view.

dp.Timeline = class {
  static MOST = 8000;
  static ROW = 30;
  static HEAD = 24;
  static AXIS = 26;
  static LANES = [[3, 15], [20, 3], [25, 3]]; // top and height of compute, messages, sums
  static TALLEST = 520;

  constructor(data) {
    this.data = data;
    this.gutter = 84;
    this.lines = this.#lines();
    this.tall = this.lines.reduce((sum, line) => sum + line.height, 0) + dp.Timeline.AXIS;
    this.length = Math.max(...data.timelines.map((one) => one.length)) || 1;
    this.from = 0;
    this.to = this.length * 1.01;
    this.bucket = 0; // time that is merged at most into one bar
    this.stats = { bars: 0, actions: 0, merged: 0, ms: 0, part: "whole" };
    this.#build();
  }

  /** The lines from top to bottom: a heading for each timeline, then its ranks, each with its lanes sorted by start. */
  #lines() {
    const lines = [];
    let top = 0;
    const add = (line) => { line.top = top; top += line.height; lines.push(line); };
    this.data.timelines.forEach((timeline, group) => {
      add({ height: dp.Timeline.HEAD, title: timeline.source, group });
      for (const row of timeline.rows) {
        const lanes = [[], [], []];
        for (let at = 0; at < row.spans.length; at += 3) {
          const action = row.spans[at + 2];
          const lane = this.data.kinds[this.data.actions[action][1]].lane;
          lanes[lane].push({ start: row.spans[at], end: row.spans[at] + row.spans[at + 1], action });
        }
        const longest = lanes.map((lane) => lane.reduce((most, one) => Math.max(most, one.end - one.start), 0));
        add({ height: dp.Timeline.ROW, name: row.name, group, row, lanes, longest });
      }
    });
    return lines;
  }

  #build() {
    const button = (text, label, act) => dp.el("button", { type: "button", "aria-label": label, title: label, click: act }, text);
    this.canvas = dp.el("canvas", { "aria-hidden": "true" });
    this.over = dp.el("canvas", { class: "over", "aria-hidden": "true" });
    this.spacer = dp.el("div", { class: "spacer" });
    this.frame = dp.el("div", { class: "frame", tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": "Timeline of a step. Left and right go to the neighbouring action, up and down to another rank, "
        + "plus and minus zoom, 0 shows the whole step.", "aria-describedby": "timeline-reading" },
    dp.el("div", { class: "sheet" }, this.canvas, this.over), this.spacer);
    this.reading = dp.el("p", { id: "timeline-reading", class: "reading", "aria-live": "polite" },
      "Point at an action or use the arrow keys.");
    this.details = dp.el("div", { class: "details" });
    this.note = dp.el("p", { class: "small", role: "note" });
    const legend = dp.el("ul", { class: "legend" }, [...this.data.kinds].sort((one, other) => one.lane - other.lane).map((kind) => {
      const patch = dp.el("span", { class: "patch", "aria-hidden": "true" });
      dp.paint(patch, kind.colour);
      return dp.el("li", {}, patch, kind.name);
    }));
    this.root = dp.el("div", { class: "timeline" },
      dp.el("div", { class: "tools", role: "group", "aria-label": "Zoom" },
        button("+", "Zoom in", () => this.zoom(0.6)), button("\u2212", "Zoom out", () => this.zoom(1 / 0.6)),
        button("Whole step", "Show the whole step", () => this.show(0, this.length * 1.01)),
        dp.el("span", { class: "small" }, "Drag moves, Ctrl and wheel zoom, arrow keys go from action to action.")),
      this.frame, this.note, this.reading, this.details, legend);
    dp.onResize(this.frame, () => this.resize());
    this.frame.addEventListener("scroll", () => this.#scrolled());
    this.frame.addEventListener("keydown", (event) => this.#key(event));
    this.frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.002), this.#time(event.clientX - this.frame.getBoundingClientRect().left));
    }, { passive: false });
    this.#pointer();
  }

  resize() {
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    this.ratio = ratio;
    this.width = this.frame.clientWidth;
    this.height = Math.min(this.tall, dp.Timeline.TALLEST);
    this.gutter = this.width < 500 ? 58 : 84;
    for (const canvas of [this.canvas, this.over]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
    }
    this.frame.style.height = `${this.height}px`;
    this.spacer.style.height = `${Math.max(0, this.tall - this.height)}px`;
    this.offset = this.frame.scrollTop;
    this.draw();
  }

  // Places. x and y are CSS pixels of the canvas.
  get plot() { return Math.max(1, this.width - this.gutter); }
  #x(time) { return this.gutter + (time - this.from) / (this.to - this.from) * this.plot; }
  #time(x) { return this.from + (x - this.gutter) / this.plot * (this.to - this.from); }
  #y(line) { return dp.Timeline.AXIS + line.top - this.offset; }
  #visible(top, bottom) {
    return this.lines.filter((line) => this.#y(line) + line.height > top && this.#y(line) < bottom);
  }

  /** The bars of a lane between two times: actions, and buckets of those that are narrower than a bucket. */
  #bars(line, lane, from, to, bucket, bars) {
    const spans = line.lanes[lane];
    let low = 0, high = spans.length;
    const first = Math.floor((from - line.longest[lane]) / bucket) * bucket; // buckets begin on the grid
    while (low < high) { const middle = (low + high) >> 1; if (spans[middle].start < first) low = middle + 1; else high = middle; }
    let open = null;
    const close = () => { if (open && open.end >= from) bars.push(open); open = null; };
    for (let at = low; at < spans.length && spans[at].start < to; at += 1) {
      const span = spans[at];
      const time = span.end - span.start;
      if (time >= bucket) {
        close();
        if (span.end >= from) bars.push({ line, lane, start: span.start, end: span.end, action: span.action, count: 1, busy: time });
        continue;
      }
      const grid = Math.floor(span.start / bucket);
      if (!open || open.grid !== grid) {
        close();
        open = { line, lane, grid, start: span.start, end: span.end, action: span.action, count: 0, busy: 0, most: -1 };
      }
      open.count += 1;
      open.busy += time;
      open.end = Math.max(open.end, span.end);
      if (time > open.most) { open.most = time; open.action = span.action; }
      if (bars.length > dp.Timeline.MOST) return;
    }
    close();
  }

  /** All bars between two times on the lines between two heights. */
  collect(from, to, top, bottom, bucket) {
    const bars = [];
    for (const line of this.#visible(top, bottom)) {
      if (!line.lanes) continue;
      for (const lane of [0, 1, 2]) this.#bars(line, lane, from, to, bucket, bars);
      if (bars.length > dp.Timeline.MOST) return null;
    }
    return bars;
  }

  /** Draw the whole frame. */
  draw() {
    if (!this.width) return;
    const began = performance.now();
    this.bucket = 1.5 * (this.to - this.from) / this.plot;
    let bars = null;
    while (!(bars = this.collect(this.from, this.to, dp.Timeline.AXIS, this.height, this.bucket))) this.bucket *= 1.4;
    const pen = this.#pen();
    pen.clearRect(0, 0, this.width, this.height);
    this.#paint(pen, bars, this.gutter, dp.Timeline.AXIS, this.width, this.height);
    this.#margins(pen);
    this.#finish(bars, began, "whole");
  }

  #pen() {
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  /** Draw bars, and what lies behind them, into a rectangle of the plot. */
  #paint(pen, bars, left, top, right, bottom) {
    pen.save();
    pen.beginPath();
    pen.rect(left, top, right - left, bottom - top);
    pen.clip();
    pen.clearRect(left, top, right - left, bottom - top);
    const [laneTop, laneHeight] = dp.Timeline.LANES[0];
    const isDark = dp.isDark();
    pen.fillStyle = dp.colour("--idle");
    for (const line of this.#visible(top, bottom)) {
      if (!line.lanes) continue;
      const end = this.#x(this.data.timelines[line.group].length);
      const x = Math.max(left, this.#x(0));
      if (end > x) pen.fillRect(x, this.#y(line) + laneTop, Math.min(end, right) - x, laneHeight);
    }
    for (const bar of bars) {
      const [lane, height] = dp.Timeline.LANES[bar.lane];
      const x = this.#x(bar.start);
      const width = Math.max(0.75, this.#x(bar.end) - x - (this.#x(bar.end) - x > 4 ? 0.6 : 0));
      const share = bar.count > 1 ? Math.min(1, bar.busy / Math.max(bar.end - bar.start, 1e-12)) : 1;
      const high = Math.max(1.5, height * share);
      const action = this.data.actions[bar.action];
      const colour = isDark ? dp.lit(this.data.kinds[action[1]].colour) : this.data.kinds[action[1]].colour;
      pen.fillStyle = colour;
      pen.fillRect(x, this.#y(bar.line) + lane + height - high, width, high);
      if (bar.count === 1 && bar.lane === 0 && width > 30) {
        pen.fillStyle = dp.ink(colour);
        const seen = Math.max(x, this.gutter);
        const kind = this.data.kinds[action[1]].name;
        const label = kind.startsWith("frozen") ? kind.replace("frozen: ", "") : action[0];
        const text = label.length * 6.2 < Math.min(width - 6, x + width - seen - 6) ? label : "";
        if (text) pen.fillText(text, seen + 4, this.#y(bar.line) + lane + height / 2 + 0.5);
      }
    }
    pen.restore();
  }

  /** Names of ranks to the left, times above. */
  #margins(pen) {
    pen.fillStyle = dp.colour("--card");
    pen.fillRect(0, 0, this.gutter, this.height);
    pen.fillRect(0, 0, this.width, dp.Timeline.AXIS);
    pen.fillStyle = dp.colour("--soft");
    for (const line of this.#visible(dp.Timeline.AXIS, this.height)) {
      const middle = this.#y(line) + line.height / 2;
      if (middle < dp.Timeline.AXIS + 6) continue;
      pen.font = line.title ? "600 11px system-ui, sans-serif" : "11px system-ui, sans-serif";
      pen.fillText(line.title ? line.title.toUpperCase() : line.name, 2, middle, this.gutter - 6);
    }
    pen.font = "11px system-ui, sans-serif";
    const unit = this.data.timelines[0].unit;
    const step = dp.nice((this.to - this.from) / Math.max(2, this.plot / 90));
    for (let time = Math.ceil(this.from / step) * step; time <= this.to; time += step) {
      const x = this.#x(time);
      pen.fillStyle = dp.colour("--line");
      pen.fillRect(x, dp.Timeline.AXIS - 6, 1, 6);
      pen.fillStyle = dp.colour("--soft");
      const value = Math.abs(time) < step / 1e6 ? 0 : time;
      const text = unit === "ms" && step >= 1000 ? `${dp.short(value / 1000)} s` : `${dp.short(value)} ${unit}`;
      if (x + pen.measureText(text).width + 3 < this.width) pen.fillText(text, x + 3, dp.Timeline.AXIS - 15);
    }
  }

  #finish(bars, began, part) {
    const merged = bars.filter((bar) => bar.count > 1);
    const actions = bars.reduce((sum, bar) => sum + bar.count, 0);
    this.stats = { bars: bars.length, actions, merged: merged.length, ms: performance.now() - began, part };
    this.frame.dataset.bars = String(bars.length);
    this.frame.dataset.part = part;
    this.frame.dataset.ms = this.stats.ms.toFixed(2);
    if (part === "whole") {
      const hidden = merged.reduce((sum, bar) => sum + bar.count, 0);
      this.note.textContent = merged.length
        ? `${hidden.toLocaleString("en-US")} short actions are merged into ${merged.length.toLocaleString("en-US")} bars here; `
          + "the height of such a bar is the busy part of its time. Zoom in to see each."
        : "Every action in view has its own bar.";
    }
    this.#mark();
  }

  /** Move the picture by whole device pixels and draw only what has come into view. */
  move(right, down) {
    const before = this.offset;
    const most = Math.max(0, this.tall - this.height);
    const span = this.to - this.from;
    const wished = this.from - right / this.plot * span;
    const from = Math.min(Math.max(wished, -0.5 * span), this.length - 0.5 * span);
    const dx = Math.round((this.from - from) / span * this.plot * this.ratio) / this.ratio;
    const offset = Math.min(most, Math.max(0, this.offset - down));
    const dy = Math.round((before - offset) * this.ratio) / this.ratio;
    if (!dx && !dy) return;
    const began = performance.now();
    this.from -= dx / this.plot * span;
    this.to = this.from + span;
    this.offset = before - dy;
    if (Math.abs(dx) >= this.plot || Math.abs(dy) >= this.height - dp.Timeline.AXIS) { this.draw(); return; }
    const pen = this.#pen();
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.globalCompositeOperation = "copy";
    pen.drawImage(this.canvas, Math.round(dx * this.ratio), Math.round(dy * this.ratio));
    pen.globalCompositeOperation = "source-over";
    const pencil = this.#pen();
    const bars = [];
    const fill = (left, top, width, bottom) => {
      const found = this.collect(this.#time(left), this.#time(width), top, bottom, this.bucket);
      if (!found) return false;
      bars.push(...found);
      this.#paint(pencil, found, left, top, width, bottom);
      return true;
    };
    let fits = true;
    if (dx > 0) fits = fill(this.gutter, dp.Timeline.AXIS, this.gutter + dx + 1, this.height);
    if (dx < 0) fits = fill(this.width + dx - 1, dp.Timeline.AXIS, this.width, this.height);
    if (fits && dy > 0) fits = fill(this.gutter, dp.Timeline.AXIS, this.width, dp.Timeline.AXIS + dy + 1);
    if (fits && dy < 0) fits = fill(this.gutter, this.height + dy - 1, this.width, this.height);
    if (!fits || bars.length > dp.Timeline.MOST) { this.draw(); return; }
    this.#margins(pencil);
    this.#finish(bars, began, "strip");
    if (dy) { this.moving = true; this.frame.scrollTop = this.offset; }
  }

  #scrolled() {
    const down = this.offset - this.frame.scrollTop;
    if (this.moving) { this.moving = false; if (Math.abs(down) < 1) return; }
    this.move(0, down);
  }

  /** Zoom by a factor of the shown time, around a time or around the chosen action. */
  zoom(factor, around) {
    const chosen = this.chosen && this.chosen.span;
    const middle = around ?? (chosen ? (chosen.start + chosen.end) / 2 : (this.from + this.to) / 2);
    const span = Math.min(this.length * 1.2, Math.max(this.length * 1e-6, (this.to - this.from) * factor));
    const share = Math.min(1, Math.max(0, (middle - this.from) / (this.to - this.from)));
    this.show(middle - share * span, middle + (1 - share) * span);
  }

  show(from, to) {
    this.from = from;
    this.to = to;
    this.draw();
  }

  // The action under a point, and the chosen one.
  #at(x, y) {
    const line = this.lines.find((one) => one.lanes && y >= this.#y(one) && y < this.#y(one) + one.height);
    if (!line || x < this.gutter || y < dp.Timeline.AXIS) return null;
    const inside = y - this.#y(line);
    const lane = inside < 19 ? 0 : inside < 24 ? 1 : 2;
    const slack = 2 * (this.to - this.from) / this.plot;
    const time = this.#time(x);
    let best = null;
    for (const span of line.lanes[lane]) {
      if (span.start > time + slack) break;
      const away = Math.max(span.start - time, time - span.end, 0);
      if (away <= slack && (!best || away <= best.away)) best = { line, lane, span, away };
    }
    return best;
  }

  #pointer() {
    let held = null;
    let far = 0;
    this.frame.addEventListener("pointerdown", (event) => {
      if (event.button || event.offsetX > this.frame.clientWidth) return;
      held = { x: event.clientX, y: event.clientY };
      far = 0;
      this.frame.setPointerCapture(event.pointerId);
    });
    this.frame.addEventListener("pointermove", (event) => {
      const box = this.frame.getBoundingClientRect();
      if (!held) {
        const found = this.#at(event.clientX - box.left, event.clientY - box.top);
        this.frame.style.cursor = found ? "pointer" : "grab";
        this.hovered = found;
        this.#mark();
        if (found && !this.chosen) this.reading.textContent = this.describe(found);
        return;
      }
      const right = event.clientX - held.x, down = event.clientY - held.y;
      far += Math.abs(right) + Math.abs(down);
      if (far > 3) { this.move(right, down); held = { x: event.clientX, y: event.clientY }; }
    });
    const release = (event) => {
      if (held && far <= 3) {
        const box = this.frame.getBoundingClientRect();
        this.choose(this.#at(event.clientX - box.left, event.clientY - box.top));
      } else if (held) this.draw();
      held = null;
    };
    this.frame.addEventListener("pointerup", release);
    this.frame.addEventListener("pointercancel", () => { held = null; });
    this.frame.addEventListener("pointerleave", () => { this.hovered = null; this.#mark(); });
  }

  /** Outline the chosen action, the same action in the other timeline, and the one under the pointer. */
  #mark() {
    const pen = this.over.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, dp.Timeline.AXIS, this.plot, this.height);
    pen.clip();
    const outline = (line, lane, span, width) => {
      const [top, height] = dp.Timeline.LANES[lane];
      pen.lineWidth = width;
      pen.strokeRect(this.#x(span.start) - 1, this.#y(line) + top - 1, Math.max(3, this.#x(span.end) - this.#x(span.start) + 1), height + 2);
    };
    pen.strokeStyle = dp.colour("--ink");
    if (this.hovered) outline(this.hovered.line, this.hovered.lane, this.hovered.span, 1);
    if (this.chosen) {
      outline(this.chosen.line, this.chosen.lane, this.chosen.span, 2);
      pen.setLineDash([3, 2]);
      for (const twin of this.#twins()) outline(twin.line, twin.lane, twin.span, 1.5);
    }
    pen.restore();
  }

  /** The same action of the other timeline, on the ranks at the same place. */
  #twins() {
    const text = this.data.actions[this.chosen.span.action][0];
    const found = [];
    for (const line of this.lines) {
      if (!line.lanes || line.group === this.chosen.line.group) continue;
      for (const span of line.lanes[this.chosen.lane]) {
        if (this.data.actions[span.action][0] === text) { found.push({ line, lane: this.chosen.lane, span }); break; }
      }
    }
    return found;
  }

  /** An action in a sentence. */
  describe({ line, span }) {
    const [text, , words] = this.data.actions[span.action];
    const timeline = this.data.timelines[line.group];
    return `${timeline.source}, ${line.name}: ${words} (${text}), ${dp.short(span.end - span.start)} ${timeline.unit}, `
      + `from ${dp.short(span.start)} to ${dp.short(span.end)} ${timeline.unit}`;
  }

  choose(found) {
    this.chosen = found;
    this.details.replaceChildren();
    this.reading.textContent = found ? this.describe(found) : "Point at an action or use the arrow keys.";
    if (found) this.details.append(this.#facts(found));
    this.#mark();
  }

  /** What an action works on: layers of its stage or fill, tensors of its message, and its twin's time. */
  #facts({ line, span }) {
    const [, kind, , stage, slot] = this.data.actions[span.action];
    const facts = [];
    const timeline = this.data.timelines[line.group];
    for (const twin of this.#twins().slice(0, 1)) {
      const other = this.data.timelines[twin.line.group];
      facts.push(`${other.source}: ${dp.short(twin.span.end - twin.span.start)} ${other.unit}`);
    }
    let layers = [];
    if (this.data.kinds[kind].lane === 1) {
      const [source, to, samples, tensors, bytes] = this.data.messages[slot] || [];
      if (tensors) facts.push(`stage ${source} to stage ${to}, samples ${samples}: ${tensors.join(", ")}`
        + (bytes ? `, ${dp.short(bytes / 2 ** 20)} MiB` : ""));
    } else if (slot >= 0 && this.data.fills[slot]) {
      facts.push(`samples ${this.data.fills[slot].samples}`);
      layers = this.data.fills[slot].layers;
    } else if (stage >= 0 && this.data.stages[stage]) layers = this.data.stages[stage].layers;
    return dp.el("div", { class: "facts" },
      dp.el("p", {}, dp.el("data", { value: span.end - span.start, "data-file": timeline.file,
        "data-key": `${this.data.actions[span.action][0]}, ${line.name}`, title: timeline.file },
      `${dp.short(span.end - span.start)} ${timeline.unit}`), facts.map((fact) => ` \u00b7 ${fact}`)),
      layers.length > 0 && dp.el("details", { open: layers.length <= 12 },
        dp.el("summary", {}, `${layers.length} ${layers.length === 1 ? "layer" : "layers"}`),
        dp.el("ul", { class: "layers", tabindex: 0, "aria-label": "Layers" }, layers.map((name) => dp.el("li", {}, name)))));
  }

  // Keys.
  #key(event) {
    const rows = this.lines.filter((line) => line.lanes);
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    const turns = { ArrowUp: -1, ArrowDown: 1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") this.zoom(0.6);
    else if (event.key === "-") this.zoom(1 / 0.6);
    else if (event.key === "0") this.show(0, this.length * 1.01);
    else if (event.key === "Escape") this.choose(null);
    else if (event.key in moves || event.key === "Home" || event.key === "End") this.#step(rows, event.key, moves[event.key]);
    else if (event.key in turns) this.#turn(rows, turns[event.key]);
    else return;
    event.preventDefault();
  }

  /** All actions of a rank, of all its lanes, in the order of their starts. */
  #all(line) {
    line.all = line.all || line.lanes.flatMap((spans, lane) => spans.map((span) => ({ line, lane, span })))
      .sort((one, other) => one.span.start - other.span.start || one.lane - other.lane);
    return line.all;
  }

  #step(rows, key, move) {
    const line = this.chosen ? this.chosen.line : rows[0];
    const all = this.#all(line);
    const at = this.chosen ? all.findIndex((one) => one.span === this.chosen.span) : -1;
    const next = key === "Home" ? 0 : key === "End" ? all.length - 1 : at + move;
    if (all[Math.max(0, next)]) this.#reach(all[Math.min(all.length - 1, Math.max(0, next))]);
  }

  #turn(rows, move) {
    const at = this.chosen ? rows.indexOf(this.chosen.line) : -1;
    const line = rows[Math.min(rows.length - 1, Math.max(0, at + move))];
    const time = this.chosen ? this.chosen.span.start : 0;
    const all = this.#all(line);
    const near = all.reduce((best, one) =>
      (!best || Math.abs(one.span.start - time) < Math.abs(best.span.start - time) ? one : best), null);
    if (near) this.#reach(near);
  }

  /** Choose an action and bring it into view. */
  #reach(found) {
    const { span, line } = found;
    const shown = this.to - this.from;
    if (span.start < this.from || span.end > this.to) {
      const middle = (span.start + span.end) / 2;
      this.from = middle - shown / 2;
      this.to = middle + shown / 2;
    }
    const top = dp.Timeline.AXIS + line.top - this.offset;
    if (top < dp.Timeline.AXIS || top + line.height > this.height) {
      this.offset = Math.max(0, Math.min(this.tall - this.height, line.top - this.height / 2));
      this.moving = true;
      this.frame.scrollTop = this.offset;
    }
    this.draw();
    this.choose(found);
  }
};

/** Black or white, whichever can be read on a colour #rrggbb. */
dp.ink = function (colour) {
  return dp.brightness(colour) < 140 ? "#ffffff" : "#101418";
};

/** A round number of about that size: 1, 2 or 5 times a power of ten. */
dp.nice = function (size) {
  const power = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= size);
};
