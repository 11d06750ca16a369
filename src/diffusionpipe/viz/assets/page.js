"use strict";
// The page from its data: first what a reader wants to know of each run, then everything that explains it.

/** A picture in words for a part of a whole: a stacked bar with its legend. */
dp.stack = function (parts, label) {
  const bar = dp.el("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map((part) => `${part.name} ${(100 * part.part).toFixed(1)}%`).join(", ")}` });
  for (const part of parts) {
    const piece = dp.el("span", { title: `${part.name} ${(100 * part.part).toFixed(1)}%`, class: part.wait ? "wait" : "" });
    piece.style.width = `${100 * part.part}%`;
    dp.paint(piece, dp.partColour(part));
    bar.append(piece);
  }
  return bar;
};
dp.WAITS = { "other ranks' work": "--wait-work", transfers: "--wait-transfer", "sums of gradients": "--wait-sums",
  "gathers of parameters": "--wait-gathers", "the host": "--wait-host", "the slowest rank, at the end": "--wait-end" };
/** The colour of a part of a step: computations have the colours of the timeline, which come with the data. */
dp.partColour = (part) => part.colour || dp.WAITS[part.name];
dp.KINDS = ["--kind-0", "--kind-1", "--kind-2", "--kind-3", "--kind-4", "--kind-5", "--kind-6", "--kind-7", "--kind-8", "--kind-9", "--kind-10", "--kind-11"];

dp.patch = function (colour, waits) {
  const made = dp.el("span", { class: `patch${waits ? " wait" : ""}`, "aria-hidden": "true" });
  dp.paint(made, colour);
  return made;
};

/** What to do where a list has more entries than its frame shows at once. */
dp.more = (rows) => rows.length > 14 && dp.el("p", { class: "small" }, `${rows.length} entries: scroll the list to see all.`);

dp.verdict = function (question, mood, word, ...rest) {
  return dp.el("div", { class: `verdict ${mood}` }, dp.el("p", { class: "question" }, question),
    dp.el("p", { class: "word" }, dp.el("span", { class: "mood", "aria-hidden": "true" }, { good: "\u2713", warn: "!", bad: "\u2717" }[mood] || "\u00b7"), word), rest);
};

// ---- The first screen ------------------------------------------------------------------------------------------------

dp.learning = function (item, place, several) {
  if (item.kind === "plan") return null;
  if (dp.isAbsent(item.learning)) return dp.verdict("Is it learning?", "none", "Nothing yet", dp.absent(item.learning.absent));
  const loss = dp.isAbsent(item.curves) ? null : item.curves.find((curve) => curve.id === "loss");
  return dp.verdict("Is it learning?", item.learning.mood, item.learning.word, dp.el("p", {}, dp.sentence(item.learning.text)),
    loss && new dp.Chart({ label: "Loss", unit: "", lines: dp.linesOf(loss, place, several), height: 220 }).root);
};

/** The lines of a curve of one run; in one colour, each with dashes of its own, where several runs share the chart. */
dp.linesOf = function (curve, place, shared, of = (step) => step, name = "") {
  const lines = [];
  curve.lines.forEach((line, at) => {
    const colour = shared ? dp.RUNS[place % dp.RUNS.length] : dp.RUNS[at % dp.RUNS.length];
    const pairs = (flat) => { const found = []; for (let i = 0; i < flat.length; i += 2) found.push([of(flat[i]), flat[i + 1], flat[i]]); return found; };
    const own = { label: `${name}${line.label}`, key: line.key, file: line.file || curve.file, colour, named: shared, dash: shared ? dp.DASHES[at % dp.DASHES.length] : "" };
    if (line.smooth) {
      lines.push({ ...own, points: pairs(line.points), faint: true });
      lines.push({ ...own, label: `${own.label}, smoothed`, key: `smoothed(${line.key})`, points: pairs(line.smooth) });
    } else lines.push({ ...own, points: pairs(line.points) });
  });
  return lines;
};

dp.slowness = function (item) {
  const causes = dp.isAbsent(item.causes) ? [] : item.causes;
  const speed = dp.isAbsent(item.speed) || !item.speed ? {} : item.speed;
  const question = item.kind === "plan" ? "How fast would it be, and what limits it?" : "Is it slow, and because of what?";
  const word = item.kind === "plan" && item.predicted ? [dp.figure(item.predicted), " a step"] : item.slowness.word || "Not known";
  return dp.verdict(question, item.slowness.mood, word,
    dp.el("p", {}, dp.sentence(item.slowness.text)), dp.bars(item, speed),
    causes.slice(0, 1).map((cause) => [
      dp.el("p", { class: "small head" }, `Where the ${cause.source} step goes, mean of all ranks`),
      dp.stack(cause.parts, "Parts of a step"),
      dp.el("ul", { class: "parts" }, [...cause.parts].sort((one, other) => other.part - one.part).slice(0, 6).map((part) => dp.el("li", {},
        dp.patch(dp.partColour(part), part.wait), dp.el("span", { class: "grow" }, `${part.wait ? "waits: " : ""}${part.name}`), dp.figure(part.time), dp.el("span", { class: "share" }, dp.figure(part.share))))),
    ]),
    !causes.length && dp.isAbsent(item.causes) && dp.absent(item.causes.absent));
};

/** Predicted above measured, as bars of one scale. */
dp.bars = function (item, speed) {
  const rows = [["predicted", item.predicted], ["measured", speed.step]].filter((row) => row[1]);
  if (rows.length < 2) return null;
  const most = Math.max(...rows.map((row) => row[1].value));
  return dp.el("dl", { class: "bars" }, rows.map(([name, figure]) => {
    const bar = dp.el("span", { class: `bar ${name}`, "aria-hidden": "true" });
    bar.style.width = `${100 * figure.value / most}%`;
    return [dp.el("dt", {}, name), dp.el("dd", {}, dp.el("span", { class: "track" }, bar), dp.figure(figure))];
  }));
};

dp.head = function (item, place, several) {
  const progress = item.progress || {};
  const speed = dp.isAbsent(item.speed) || !item.speed ? {} : item.speed;
  const facts = [
    progress.step && ["step", [dp.figure(progress.step), progress.of && [" of ", dp.figure(progress.of)]]],
    progress.epoch && ["epochs", dp.figure(progress.epoch)],
    progress.left && ["time left", dp.figure(progress.left)],
    speed.rate && ["speed", dp.figure(speed.rate)],
    speed.step && ["median step", dp.figure(speed.step)],
    speed.idle && ["idle in an iteration", dp.figure(speed.idle)],
  ].filter(Boolean);
  const dot = several && dp.el("span", { class: "run-dot", "aria-hidden": "true" });
  if (dot) dot.style.background = `var(${dp.RUNS[place % dp.RUNS.length]})`;
  return dp.el("header", { class: "title" },
    dp.el("div", {}, dp.el(several ? "h2" : "h1", {}, dot, item.name), dp.el("p", { class: "lead" }, [item.model, item.layout].filter(Boolean).join(" \u00b7 "))),
    item.state && dp.el("span", { class: `state ${item.state === "finished" ? "good" : ""}` }, item.state),
    facts.length > 0 && dp.el("dl", { class: "facts-row" }, facts.map(([name, value]) => dp.el("div", {}, dp.el("dt", {}, name), dp.el("dd", {}, value)))),
    item.notes.map((note) => dp.el("p", { class: "notice" }, note)));
};

// ---- The sections ----------------------------------------------------------------------------------------------------

dp.differences = function (report) {
  const { of, rows } = report.recipes;
  const differing = rows.filter((row) => row.differs);
  return dp.section("differences", "What differs", "Keys of the recipes that are not the same in all runs.",
    differing.length ? dp.el("div", { class: "tall" }, dp.table("Differences of the recipes", ["key", ...of.map((place) => report.items[place].name)],
      differing.map((row) => dp.row([dp.el("code", {}, row.key), ...row.values.map((value) => (value ? dp.el("code", {}, value) : "not there"))]))))
      : dp.el("p", {}, of.length > 1 ? "The recipes are the same." : "Fewer than two of these have a recipe."));
};

/** A section of the plan that is absent. Where one reason holds for all of them, the first one gives it for all. */
dp.missing = function (item, id, title, part) {
  const parts = [item.alternatives, item.timeline, item.causes, item.memory, item.stages];
  if (!parts.every((one) => one.absent === part.absent)) return dp.section(id, title, null, dp.absent(part.absent));
  if (id !== "why") return dp.el("section", { id, hidden: true });
  return dp.section(id, "Layout, step, waits, memory and stages", null, dp.absent(part.absent));
};

dp.alternatives = function (item) {
  const part = item.alternatives;
  if (dp.isAbsent(part)) return dp.missing(item, "why", "Why this layout", part);
  const row = (one) => dp.row([
    [one.chosen && dp.el("span", { class: "tag chosen" }, "chosen"), one.near && one.fits && dp.el("span", { class: "tag" }, "near-tie"), " ", one.name], one.sizes,
    dp.figure(one.step), one.times && [dp.figure(one.times), "\u00d7"], dp.figure(one.rate), dp.figure(one.idle), dp.figure(one.memory),
    one.fits ? "fits" : dp.el("span", { class: "bad" }, "lacks ", dp.figure(one.lack)), one.found === "other" ? "another system, estimated" : one.found,
  ], { class: one.chosen ? "chosen" : one.fits ? "" : "dim" });
  return dp.section("why", "Why this layout", null, dp.el("p", { class: "why" }, part.why),
    part.remarks.map((remark) => dp.el("p", { class: "notice" }, remark)),
    dp.el("h3", {}, "What else was looked at"),
    dp.table("Layouts", ["layout", "sizes", "step", "of the chosen", "samples/s", "idle", "fullest device", "memory", "found by"], part.rows.map(row)),
    part.rows.some((one) => one.near && one.fits) && dp.el("p", { class: "small" }, "A near-tie is within the error of a prediction. Among near-ties the plan takes clearly less memory, or else fewer devices, copies or stages; a sentence above says what a faster one would have cost."),
    part.simulated.value > 0 && dp.el("p", { class: "small" }, dp.figure(part.estimated), " layouts were estimated, ", dp.figure(part.simulated), " of them simulated in full."));
};

dp.timeline = function (item) {
  const part = item.timeline;
  if (dp.isAbsent(part)) return dp.missing(item, "timeline", "One step", part);
  const both = part.timelines.length > 1;
  return dp.section("timeline", "One step", both ? "Predicted above, measured below, on one axis. Choose an action to see its layers." : `The ${part.timelines[0].source} step. Choose an action to see its layers.`,
    new dp.Timeline(part).root, part.notes.map((note) => dp.el("p", { class: "small" }, note)));
};

dp.causes = function (item) {
  const part = item.causes;
  if (dp.isAbsent(part)) return dp.missing(item, "waits", "Where the time goes", part);
  return dp.section("waits", "Where the time goes", "Computing in solid colours, waiting hatched.", part.map((cause) => [
    dp.el("h3", {}, `${cause.source[0].toUpperCase()}${cause.source.slice(1)} step: `, dp.figure(cause.step)),
    dp.el("ul", { class: "legend" }, cause.parts.map((one) => dp.el("li", {}, dp.patch(dp.partColour(one), one.wait), `${one.wait ? "waits: " : ""}${one.name}`))),
    dp.el("div", { class: "ranks", tabindex: 0, role: "region", "aria-label": `Ranks of the ${cause.source} step` }, cause.ranks.map((rank) => {
      const kinds = new Map(cause.parts.map((one) => [one.name, one]));
      return [dp.el("span", { class: "small" }, rank.name), dp.stack(rank.parts.map((one) => ({ ...kinds.get(one.name), ...one })), rank.name)];
    })), dp.more(cause.ranks),
    dp.el("details", {}, dp.el("summary", {}, "All numbers"),
      dp.table(`Parts of the ${cause.source} step`, ["rank", "part", "time"], cause.ranks.flatMap((rank) => rank.parts.map((one) => dp.row([rank.name, one.name, dp.figure(one)]))))),
    cause.longest.length > 0 && [dp.el("h4", {}, "The longest waits"),
      dp.table(`Longest waits of the ${cause.source} step`, ["rank", "before", "waits for", "time"], cause.longest.map((wait) =>
        dp.row([wait.rank, wait.before ? dp.el("code", { class: "action" }, wait.before) : "the end", wait.cause, dp.figure(wait.time)])))],
  ]));
};

dp.memory = function (item) {
  const part = item.memory;
  if (dp.isAbsent(part)) return dp.missing(item, "memory", "Memory of a step", part);
  const kinds = [...new Set(part.rows.flatMap((row) => row.items.map((one) => one.kind)))];
  const colour = (kind) => dp.KINDS[kinds.indexOf(kind) % dp.KINDS.length];
  const fullest = Math.max(...part.rows.map((row) => row.total.value));
  const room = Math.max(...part.rows.map((row) => (row.room ? row.room.value : 0)));
  const isSmall = fullest < 0.05 * room; // then the bars of kinds would be too narrow to see
  const most = isSmall ? fullest : Math.max(fullest, room);
  const bar = (row) => {
    const made = dp.el("div", { class: "stack memory", role: "img", "aria-label": `${row.name}: ${row.items.map((one) => `${one.kind} ${one.text}`).join(", ")}` });
    for (const one of row.items) {
      const piece = dp.el("span", { title: `${one.kind} ${one.text}` });
      piece.style.width = `${100 * one.value / most}%`;
      piece.style.background = `var(${colour(one.kind)})`;
      made.append(piece);
    }
    return made;
  };
  return dp.section("memory", "Memory of a step", `Predicted, each rank at its peak${part.workload ? `, with ${part.workload}` : ""}.`,
    dp.el("ul", { class: "legend" }, kinds.map((kind) => dp.el("li", {}, dp.patch(colour(kind)), kind))),
    dp.el("div", { class: "ranks wide", tabindex: 0, role: "region", "aria-label": "Memory of the ranks" }, part.rows.map((row) => [dp.el("span", { class: "small" }, row.name), bar(row),
      dp.el("span", { class: "small" }, dp.figure(row.total), row.room && [" of ", dp.figure(row.room)])])), dp.more(part.rows),
    isSmall && dp.el("p", { class: "small" }, "The bars are drawn to the scale of the fullest rank; a device has far more room."),
    dp.el("details", {}, dp.el("summary", {}, "All numbers"),
      dp.table("Memory by kind", ["rank", "kind", "bytes"], part.rows.flatMap((row) => row.items.map((one) => dp.row([row.name, one.kind, dp.figure(one)]))))));
};

dp.stages = function (item) {
  const part = item.stages;
  if (dp.isAbsent(part)) return dp.missing(item, "stages", "Stages", part);
  const times = ["forward_predicted", "forward_measured", "backward_predicted", "backward_measured"].filter((name) => part.some((row) => row[name]));
  const most = Math.max(...part.map((row) => (row.parameters ? row.parameters.value : 0)), 1);
  return dp.section("stages", "Stages", "The layers of each rank, and the mean time of one micro-batch.",
    dp.el("div", { class: "tall" }, dp.table("Stages", ["stage", "ranks", "layers", "parameters", ...times.map((name) => name.replace("_", ", "))], part.map((row) => {
      const bar = dp.el("span", { class: "mini", "aria-hidden": "true" });
      bar.style.width = `${60 * (row.parameters ? row.parameters.value : 0) / most}px`;
      return dp.row([dp.figure(row.stage), row.ranks, [dp.figure(row.layers), dp.el("div", { class: "small" }, `${row.first} \u2026 ${row.last}`)],
        row.parameters ? [dp.figure(row.parameters), bar] : "not known", ...times.map((name) => dp.figure(row[name]) || "\u2013")]);
    }))), dp.more(part));
};

/** Curves of one run or of several, over steps or over samples. */
dp.curves = function (report) {
  const items = report.items.map((item, place) => ({ item, place })).filter(({ item }) => item.kind === "run");
  const shown = items.filter(({ item }) => !dp.isAbsent(item.curves));
  if (!items.length) return null;
  const gone = items.filter(({ item }) => dp.isAbsent(item.curves)).map(({ item }) => dp.absent(`${items.length > 1 ? `${item.name}: ` : ""}${item.curves.absent}`));
  const several = shown.length > 1;
  const grid = dp.el("div", { class: "charts" });
  const ids = [...new Map(shown.flatMap(({ item }) => item.curves.map((curve) => [curve.id, curve]))).values()];
  const fill = (axis) => grid.replaceChildren(...ids.map((curve) => {
    const lines = shown.flatMap(({ item, place }) => {
      const own = item.curves.find((one) => one.id === curve.id);
      if (!own) return [];
      return dp.linesOf(own, place, several, (step) => (axis === "samples" ? step * item.batch : step), several ? `${item.name}, ` : "");
    });
    return new dp.Chart({ label: curve.label, unit: curve.unit, lines, axis }).root;
  }));
  fill("steps");
  const canCount = shown.every(({ item }) => typeof item.batch === "number");
  const choice = several && canCount && dp.el("label", {}, "Align the runs by ", dp.el("select", { change: (event) => fill(event.target.value) },
    dp.el("option", { value: "steps" }, "steps"), dp.el("option", { value: "samples" }, "samples")));
  return dp.section("curves", "Curves", shown.some(({ item }) => item.curves.some((curve) => curve.lines.some((line) => line.of > line.points.length / 2)))
    ? "Long curves have fewer points here than the file; the extremes of each part are kept." : null, choice, gone, grid);
};

dp.samples = function (report) {
  const items = report.items.filter((item) => item.kind === "run");
  if (!items.length) return null;
  const shown = items.filter((item) => !dp.isAbsent(item.samples));
  const gone = items.filter((item) => dp.isAbsent(item.samples)).map((item) => dp.absent(`${items.length > 1 ? `${item.name}: ` : ""}${item.samples.absent}`));
  if (!shown.length) return dp.section("samples", "Samples", null, gone);
  const steps = [...new Set(shown.flatMap((item) => item.samples.steps.map((one) => one.step)))].sort((one, other) => one - other);
  const grids = dp.el("div", {});
  const grid = (item, step) => {
    const near = item.samples.steps.filter((one) => one.step <= step).at(-1) || item.samples.steps[0];
    return dp.el("div", { class: "drawn" },
      dp.el("h3", {}, shown.length > 1 ? `${item.name}, ` : "", `step ${near.step.toLocaleString("en-US")}`),
      dp.el("div", { class: "pictures" }, near.pictures.map((one) => dp.el("figure", {},
        dp.el("img", { src: one.source, alt: one.caption, title: `${one.name}, ${one.size}`, "data-file": one.name, "data-key": one.size }), dp.el("figcaption", { dir: "auto" }, one.caption)))));
  };
  const slider = (label, value) => {
    const reading = dp.el("output", {}, `step ${steps[value].toLocaleString("en-US")}`);
    const input = dp.el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value, "aria-label": label, input: () => {
      reading.textContent = `step ${steps[input.value].toLocaleString("en-US")}`;
      input.setAttribute("aria-valuetext", reading.textContent);
      fill();
    } });
    input.setAttribute("aria-valuetext", reading.textContent);
    return { input, root: dp.el("label", { class: "slider" }, label, input, reading) };
  };
  const first = slider("Step", steps.length - 1), second = slider("Beside it, step", 0);
  second.root.hidden = true;
  const beside = dp.el("label", {}, dp.el("input", { type: "checkbox", change: (event) => { second.root.hidden = !event.target.checked; fill(); } }), " two steps side by side");
  const fill = () => grids.replaceChildren(...shown.map((item) => dp.el("div", { class: "pair" }, grid(item, steps[first.input.value]),
    !second.root.hidden && grid(item, steps[second.input.value]))));
  fill();
  return dp.section("samples", "Samples", null, gone, steps.length > 1 && dp.el("div", { class: "tools" }, first.root, second.root, beside), grids,
    shown.flatMap((item) => item.samples.notes.map((note) => dp.el("p", { class: "small" }, note))));
};

/** The training data of each run: the sizes at which samples are trained, and the facts that its command has printed. */
dp.data = function (report) {
  const items = report.items.filter((item) => item.data);
  if (!items.length) return null;
  const several = items.length > 1;
  const part = (item) => {
    const { sizes, lines, absent } = item.data;
    if (absent) return [several && dp.el("h3", {}, item.name), dp.absent(absent)];
    const most = Math.max(...sizes.map((one) => (one.share ? one.share.value : 0)));
    const bar = (one) => {
      const made = dp.el("span", { class: "bar predicted", "aria-hidden": "true" });
      made.style.width = `${100 * (one.share ? one.share.value / most : 0)}%`;
      return [dp.figure(one.share), dp.el("span", { class: "track", "aria-hidden": "true" }, made)];
    };
    return [several && dp.el("h3", {}, item.name),
      dp.table(`Sizes of training${several ? ` of ${item.name}` : ""}`, ["size in pixels", "samples", "share of the training", "cut away, mean", "enlarged by at most"],
        sizes.map((one) => dp.row([one.size, dp.figure(one.samples), bar(one), dp.figure(one.cut) || "not known", !one.enlarged ? "not known" : one.enlarged.value > 1 ? [dp.figure(one.enlarged), "\u00d7"] : "not enlarged"]))),
      dp.table(`Facts about the data${several ? ` of ${item.name}` : ""}`, ["about", "found"], lines.map((line) => dp.row([line.name, [line.warns && dp.el("span", { class: "tag" }, "look"), line.warns && " ", dp.el("span", { class: "found", dir: "auto" }, line.text)]])))];
  };
  return dp.section("training-data", "Data", items.some((item) => !item.data.absent) ? "As the run has found its training data before the first step." : null, items.map(part));
};

dp.recipe = function (report) {
  const { of, rows } = report.recipes;
  const gone = report.items.filter((item) => item.recipe && item.recipe.absent).map((item) => dp.absent(item.recipe.absent));
  const made = report.items.filter((item) => item.made_with && item.made_with.length);
  const planned = made.map((item) => [dp.el("h3", {}, `${item.name} was planned with`), dp.el("ul", { class: "layers", tabindex: 0 }, item.made_with.map((word) => dp.el("li", {}, word)))]);
  if (!rows.length && !gone.length && !planned.length) return null;
  const body = dp.el("div", {});
  const search = dp.el("input", { type: "search", placeholder: "Filter keys", "aria-label": "Filter keys", input: () => fill() });
  const fill = () => body.replaceChildren(dp.table("Recipe", ["key", ...of.map((place) => (of.length > 1 ? report.items[place].name : "value"))],
    rows.filter((row) => row.key.includes(search.value.trim())).map((row) => dp.row([dp.el("code", {}, row.key), ...row.values.map((value) => dp.el("code", { dir: "auto" }, value))], { class: row.differs ? "differs" : "" }))));
  if (rows.length) fill();
  return dp.section("recipe", "Recipe", rows.length ? "As the run resolved it: every key with its value." : null, gone, rows.length > 0 && [dp.el("div", { class: "tools" }, search), dp.el("div", { class: "tall" }, body)], planned);
};

// ---- The page --------------------------------------------------------------------------------------------------------

dp.theme = function () {
  const names = { "": "System colours", light: "Light", dark: "Dark" };
  return dp.el("label", { class: "theme" }, dp.el("span", { class: "hidden" }, "Colours"), dp.el("select", { change: (event) => {
    document.documentElement.dataset.theme = event.target.value;
    dp.redraw();
  } }, Object.entries(names).map(([value, name]) => dp.el("option", { value }, name))));
};

dp.hero = (report, item, place) => dp.withSources(dp.el("div", { class: "hero" }, dp.head(item, place, report.items.length > 1),
  dp.el("div", { class: `verdicts${item.kind === "plan" ? " one" : ""}` }, dp.learning(item, place, report.items.length > 1), dp.slowness(item))));

// ---- A run that goes on ----------------------------------------------------------------------------------------------

/** Buttons of a watched run, and what its server has said last. Only this page knows the token of its address. */
dp.Controls = class {
  constructor(refusals) {
    this.said = dp.el("span", { class: "small", role: "status" });
    this.why = dp.el("span", { class: "small", id: "refusals" });
    this.buttons = [["Save now", "/save", "asking to save"], ["Draw now", "/draw", "asking for pictures"], ["Save and stop", "/stop", "asking to stop"]]
      .map(([name, path, words]) => ({ name, path, button: dp.el("button", { type: "button", "aria-describedby": "refusals", click: () => this.#ask(path, words) }, name) }));
    this.root = dp.el("div", { class: "tools controls", role: "group", "aria-label": "The run" }, this.buttons.map((one) => one.button), this.said, this.why);
    this.show(refusals);
  }

  async #ask(path, words) {
    this.said.textContent = words;
    try {
      const answer = await fetch(path, { method: "POST", headers: { "X-DiffusionPipe-Token": dp.token() } });
      this.said.textContent = await answer.text();
    } catch { this.said.textContent = "the server of this page has ended"; }
  }

  /** Disable the buttons that would do nothing, by their paths, and show the reasons. */
  show(refusals) {
    const reasons = new Map();
    for (const { name, path, button } of this.buttons) {
      button.disabled = Boolean(refusals[path]);
      if (refusals[path]) reasons.set(refusals[path], [...(reasons.get(refusals[path]) || []), name]);
    }
    const every = [...reasons].map(([reason, names]) => (names.length === this.buttons.length ? reason : `${names.join(", ")}: ${reason}`));
    this.why.textContent = every.join("; ");
  }
};
dp.token = () => new URLSearchParams(location.search).get("token") || "";

/** The sections of a run: the data that each shows, and the function that makes it. */
dp.SECTIONS = [
  [".hero", ({ curves, samples, timeline, memory, stages, data, ...rest }) => rest, (now) => dp.hero(now, now.items[0], 0)],
  ["#curves", (item) => item.curves, (now) => dp.curves(now)],
  ["#samples", (item) => item.samples, (now) => dp.samples(now)],
  ["#why", (item) => item.alternatives, (now) => dp.alternatives(now.items[0])],
  ["#timeline", (item) => item.timeline, (now) => dp.timeline(now.items[0])],
  ["#waits", (item) => item.causes, (now) => dp.causes(now.items[0])],
  ["#memory", (item) => item.memory, (now) => dp.memory(now.items[0])],
  ["#stages", (item) => item.stages, (now) => dp.stages(now.items[0])],
  ["#training-data", (item) => item.data, (now) => dp.data(now)],
  ["#recipe", (item, now) => [now.recipes, item.recipe], (now) => dp.recipe(now)],
];

/** Put a new section in the place of an old one: what was open stays open, and the focus stays where it was. */
dp.replace = function (old, made) {
  const inside = (root) => [...root.querySelectorAll("a, button, summary, [tabindex]")];
  const at = inside(old).indexOf(document.activeElement);
  const open = [...old.querySelectorAll("details")].map((one) => one.open);
  [...made.querySelectorAll("details")].forEach((one, place) => { one.open = Boolean(open[place]); });
  old.replaceWith(made);
  if (at >= 0) inside(made)[at]?.focus({ preventScroll: true });
};
dp.isRead = (section) => section.contains(document.activeElement) && document.activeElement.matches("input, select, [role=application]");

/** The data after a change, as `workflows/report/changes.py` describes it. Parts that stay are the same objects. */
dp.changed = function (old, change) {
  if (change.kept) {
    const [first, last] = change.kept;
    const items = change.items ? change.items.map((one, place) => ("old" in one ? old[one.old] : dp.changed(old[first + place], one))) : change.new;
    return [...old.slice(0, first), ...items, ...old.slice(old.length - last)];
  }
  if (!change.keys) return change.new;
  const made = { ...old };
  for (const key of change.gone) delete made[key];
  for (const [key, one] of Object.entries(change.keys)) made[key] = dp.changed(old[key], one);
  return made;
};

/**
 * Ask for newer data two seconds after each answer, and make the sections anew whose data have changed and that nobody
 * uses. Where no answer comes, say since when.
 */
dp.follow = function (report, controls) {
  const [PAUSE, PATIENCE, LIMIT] = [2000, 8000, 60000];
  const silence = document.getElementById("silence");
  const parts = (now) => dp.SECTIONS.map(([, part]) => JSON.stringify(part(now.items[0], now)));
  let texts = report.items.length ? parts(report) : [], { state, ...now } = report, heard = new Date(), asked = null;
  const answer = (missing) => {
    if (!missing) heard = new Date();
    silence.hidden = !missing;
    silence.textContent = missing ? `No answer since ${heard.toLocaleTimeString("en-GB")}; the numbers below are old.` : "";
    controls?.root.classList.toggle("old", Boolean(missing));
  };
  const show = () => {
    if (Boolean(now.items.length) !== Boolean(report.items.length) || now.preparing !== report.preparing) { location.reload(); return; }
    if (!now.items.length) return;
    controls.show(now.refusals);
    const newer = parts(now);
    dp.SECTIONS.forEach(([name, , make], place) => {
      const old = document.querySelector(name);
      if (!old || texts[place] === newer[place] || dp.isRead(old)) return;
      texts[place] = newer[place];
      dp.replace(old, make(now));
    });
    dp.showLinks();
  };
  const ask = async () => {
    asked = Date.now();
    const found = await fetch(`/data?token=${encodeURIComponent(dp.token())}`, { headers: { "If-None-Match": state }, signal: AbortSignal.timeout(LIMIT) });
    if (found.status === 304) return;
    if (!found.ok) throw new Error(found.statusText);
    const newer = await found.json();
    now = dp.changed(now, newer.change);
    state = newer.state;
    show();
  };
  const look = async () => {
    if (!document.hidden) {
      try { await ask(); answer(false); } catch { answer(true); }
      asked = null;
    }
    setTimeout(look, PAUSE);
  };
  setInterval(() => { if (asked !== null && Date.now() - asked > PATIENCE) answer(true); }, 1000);
  setTimeout(look, PAUSE);
};

/** Show the links whose sections have something to show. */
dp.showLinks = () => document.querySelectorAll(".links a").forEach((link) => { link.hidden = document.querySelector(link.hash).hidden; });

dp.waiting = (report) => [dp.el("h1", {}, `${report.waiting} ${report.preparing ? "is being prepared" : "has not begun"}`),
  dp.el("p", { class: "lead" }, report.preparing ? "Its job loads the model, measures layers and links, and plans. This page shows the run as soon as it has its plan."
    : "This page shows the run as soon as its job has begun.")];

dp.start = function (report) {
  const several = report.items.length > 1;
  const detail = dp.el("div", {});
  const sections = (item) => [dp.alternatives(item), dp.timeline(item), dp.causes(item), dp.memory(item), dp.stages(item)];
  const heroes = report.items.map((item, place) => dp.hero(report, item, place));
  const controls = report.watched && !report.waiting ? new dp.Controls(report.refusals) : null;
  const links = { ...(several ? { differences: "Differences" } : {}), curves: "Curves", samples: "Samples", why: "Layout", timeline: "Step", waits: "Waits", memory: "Memory", stages: "Stages", "training-data": "Data", recipe: "Recipe" };
  const main = dp.el("main", { id: "main" }, several && dp.el("h1", {}, `${report.items.length} compared`), several && dp.differences(report),
    report.waiting && dp.waiting(report), controls?.root, heroes);
  const curves = dp.curves(report), samples = dp.samples(report);
  main.append(...[curves, samples].filter(Boolean));
  if (several) {
    const choose = dp.el("select", { change: (event) => detail.replaceChildren(...sections(report.items[event.target.value])) },
      report.items.map((item, place) => dp.el("option", { value: place }, item.name)));
    main.append(dp.el("div", { class: "chooser" }, dp.el("label", {}, "Layout and step of ", choose)));
  }
  if (report.items.length) {
    detail.append(...sections(report.items[0]));
    main.append(...[detail, dp.data(report), dp.recipe(report)].filter(Boolean));
  }
  const there = Object.entries(links).filter(([id]) => main.querySelector(`#${id}`));
  const bar = dp.el("div", { class: "links" }, there.map(([id, name]) => dp.el("a", { href: `#${id}` }, name)));
  document.getElementById("page").replaceChildren(
    dp.el("nav", { class: "bar", "aria-label": "Sections" }, dp.el("span", { class: "brand" }, "DiffusionPipe"),
      bar, dp.theme(),
      dp.el("p", { id: "silence", class: "notice", role: "alert", hidden: true })),
    main,
    dp.el("footer", {}, `${report.made_by}. Point at a number to see its file and key, or open "Files and keys" below a part.`, report.shared && " Paths, host and user names are left out."));
  dp.showLinks();
  if (report.watched) dp.follow(report, controls);
  document.documentElement.dataset.ready = "yes";
};

/** In a frame of a notebook the address of a link to a section is the notebook's, so the page goes there by itself. */
if (location.protocol === "about:") document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]'), section = link && document.getElementById(link.getAttribute("href").slice(1));
  if (!section) return;
  event.preventDefault();
  section.tabIndex = -1;
  section.focus({ preventScroll: true });
  section.scrollIntoView();
});

document.addEventListener("DOMContentLoaded", () => dp.start(JSON.parse(document.getElementById("data").textContent)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dp.redraw());
