"use strict";
// Elements of the page. Every text goes through textContent, so markup in captions and names is shown, never run.

const dp = {};

/** An element with attributes (functions become listeners) and children: elements, texts, or nothing. */
dp.el = function (name, attributes, ...children) {
  const svg = dp.SVG.has(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
};
dp.SVG = new Set(["svg", "path", "line", "g", "rect", "circle"]);

/** A number as it is shown, with its file and key for readers and for tests. */
dp.figure = function (figure, words) {
  if (!figure) return null;
  return dp.el("data", {
    class: "figure", value: figure.value, "data-file": figure.file, "data-key": figure.key,
    title: `${figure.file}: ${figure.key}`,
  }, figure.text, words && ` ${words}`);
};

/** A sentence whose parts are texts and numbers. */
dp.sentence = (parts) => (parts || []).map((part) => (typeof part === "string" ? part : dp.figure(part)));

/** A section with a heading; `absent` names what is missing and why. */
dp.section = function (id, title, lead, ...children) {
  return dp.withSources(dp.el("section", { id, class: "card", "aria-labelledby": `${id}-title` },
    dp.el("h2", { id: `${id}-title` }, title), lead && dp.el("p", { class: "lead" }, lead), children));
};

/** The part with a table of the files and keys of its numbers, for readers who cannot point at them. */
dp.withSources = function (root) {
  const figures = () => [...root.querySelectorAll("[data-file]")];
  if (!figures().length) return root;
  const body = dp.el("div", { class: "tall" }), name = `Files and keys of ${root.querySelector("h1, h2").textContent}`;
  const rows = () => new Map(figures().map((one) => [`${one.dataset.file}: ${one.dataset.key}`, [one.textContent || one.alt, one.dataset.file, one.dataset.key]]));
  const fill = () => body.replaceChildren(dp.table(name, ["shown", "file", "key"], [...rows().values()].map((row) => dp.row(row))));
  const made = dp.el("details", { class: "sources", toggle: () => { if (made.open) fill(); } }, dp.el("summary", {}, "Files and keys"), body);
  root.append(made);
  return root;
};
dp.absent = (reason) => dp.el("p", { class: "absent" }, dp.el("span", { class: "tag" }, "Not here"), ` ${reason}`);
dp.isAbsent = (part) => Boolean(part && part.absent);

/** A table in a frame that scrolls sideways on narrow screens, and says so there. */
dp.table = function (caption, heads, rows) {
  return dp.scrolling(dp.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${caption}` },
    dp.el("table", {}, dp.el("caption", { class: "hidden" }, caption),
      dp.el("thead", {}, dp.el("tr", {}, heads.map((head) => dp.el("th", { scope: "col" }, head)))),
      dp.el("tbody", {}, rows))));
};

/** A frame with a line above it and shadows at its sides while it has more columns than it shows. */
dp.scrolling = function (frame) {
  const more = dp.el("p", { class: "small more", hidden: true }, "More columns: scroll the table sideways \u2192");
  const look = () => {
    const hidden = frame.scrollWidth - frame.clientWidth;
    more.hidden = hidden <= 1;
    frame.classList.toggle("more-left", frame.scrollLeft > 1);
    frame.classList.toggle("more-right", hidden - frame.scrollLeft > 1);
  };
  frame.addEventListener("scroll", look, { passive: true });
  dp.onResize(frame, look);
  return dp.el("div", { class: "held" }, more, frame);
};
dp.row = (cells, attributes) => dp.el("tr", attributes || {}, cells.map((cell) => dp.el("td", {}, cell)));

/** The colour that a name of the style has in the light or the dark. */
dp.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * Fill an element with a colour, #rrggbb or the name of one of the style. In the dark a dark colour is lighter, as it is
 * in the timeline; browsers without light-dark() keep it as it is.
 */
dp.paint = function (element, colour) {
  if (colour.startsWith("--")) { element.style.background = `var(${colour})`; return; }
  element.style.background = colour;
  element.style.background = `light-dark(${colour}, ${dp.lit(colour)})`;
};
dp.channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
dp.brightness = function (colour) {
  const [red, green, blue] = dp.channels(colour);
  return 0.299 * red + 0.587 * green + 0.114 * blue;
};
/** A colour that can be seen on a dark page: a very dark one is mixed with white. */
dp.lit = (colour) => (dp.brightness(colour) > 60 ? colour : `#${dp.channels(colour).map((value) => Math.round(value + 0.45 * (255 - value)).toString(16).padStart(2, "0")).join("")}`);
dp.isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

/** The colours of runs, safe for colour-blind eyes. */
dp.RUNS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
dp.DASHES = ["", "6 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2 1 2"];
dp.runColour = (place) => dp.colour(dp.RUNS[place % dp.RUNS.length]);

/** A number with few digits, for axes and readings. */
dp.short = function (value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e\+?/, "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1e4 ? 7 : 4 });
};

/** Call `draw` when the width of an element or the colours change. */
let redraws = [];
dp.redraw = () => redraws.forEach(({ draw }) => draw());
dp.onResize = function (element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) { width = element.clientWidth; draw(); }
  }).observe(element);
  redraws = [...redraws.filter((one) => one.element.isConnected || !one.wasThere), { element, draw }];
  requestAnimationFrame(() => redraws.forEach((one) => { one.wasThere = one.wasThere || one.element.isConnected; }));
};
