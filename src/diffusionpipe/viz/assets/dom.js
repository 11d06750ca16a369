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
  return dp.el("section", { id, class: "card", "aria-labelledby": `${id}-title` },
    dp.el("h2", { id: `${id}-title` }, title), lead && dp.el("p", { class: "lead" }, lead), children);
};
dp.absent = (reason) => dp.el("p", { class: "absent" }, dp.el("span", { class: "tag" }, "Not here"), ` ${reason}`);
dp.isAbsent = (part) => Boolean(part && part.absent);

/** A table in a frame that scrolls sideways on narrow screens. */
dp.table = function (caption, heads, rows) {
  return dp.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${caption}` },
    dp.el("table", {}, dp.el("caption", { class: "hidden" }, caption),
      dp.el("thead", {}, dp.el("tr", {}, heads.map((head) => dp.el("th", { scope: "col" }, head)))),
      dp.el("tbody", {}, rows)));
};
dp.row = (cells, attributes) => dp.el("tr", attributes || {}, cells.map((cell) => dp.el("td", {}, cell)));

/** The colour that a name of the style has in the light or the dark. */
dp.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The colours of runs, safe for colour-blind eyes. */
dp.RUNS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
dp.runColour = (place) => dp.colour(dp.RUNS[place % dp.RUNS.length]);

/** A number with few digits, for axes and readings. */
dp.short = function (value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
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
