"use strict";
(() => {
// Draws a report's record. Text from the record becomes text nodes and nothing else: what a model wrote may
// be anything. Styles are set through the CSSOM, since the page's policy refuses style attributes.

const SVG = "http://www.w3.org/2000/svg";
let report = JSON.parse(document.getElementById("data").textContent);
const state = { hidden: new Set(), open: new Set() };

// -- elements -----------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;

function details(key, summary, body) {
  // The body is made when it is first opened: a table of every number of a long run is not free.
  const node = el("details", {}, el("summary", {}, summary));
  const open = () => { if (node.open && node.childElementCount === 1) node.append(body()); };
  node.addEventListener("toggle", () => { open(); node.open ? state.open.add(key) : state.open.delete(key); });
  if (state.open.has(key)) { node.open = true; open(); }
  return node;
}

// -- words --------------------------------------------------------------------------------------

const method = (index) => (index === null ? { name: "", slot: "none" } : report.methods[index]);
const percent = (value, digits = 1) => (100 * value).toFixed(digits);
const plain = (value) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  return String(+value.toPrecision(3)).replace("-", "−");
};
// Ticks have as many digits as their distance needs.
function tickText(value, step, kind) {
  const scale = kind === "share" ? 100 : 1, size = step * scale;
  if (kind === "log" || size < 1e-3 || Math.abs(value) >= 1e5) return FORMATS[kind](value);
  let digits = 0;
  while (digits < 6 && Math.abs(size * 10 ** digits - Math.round(size * 10 ** digits)) > 1e-6) digits++;
  return `${(value * scale).toFixed(digits).replace("-", "−")}${kind === "share" ? " %" : ""}`;
}
const FORMATS = { share: (v) => `${+percent(v)} %`, number: plain, log: plain, whole: (v) => String(Math.round(v)) };
const SIGNS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
// Controls and marks of direction act on the text around them; they are shown by number instead.
const visible = (text) => text.replace(SIGNS, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const verdictOf = (response) => response.is_correct === null ? "not judged" : response.is_correct ? "correct" : "wrong";
const mark = (response) => response.is_correct === null
  ? el("span", { class: "fact" }, "not judged")
  : el("span", { class: response.is_correct ? "mark-good" : "mark-bad" }, response.is_correct ? "✓ correct" : "✗ wrong");

function interval(value, format) {
  if (!value) return "–";
  const parts = [format(value.value)];
  if (value.low !== null && value.high !== null)
    parts.push(el("span", { class: "low" }, `[${format(value.low)}, ${format(value.high)}]`));
  return parts;
}
const asPercent = (value) => interval(value, (v) => percent(v));
const asNumber = (digits) => (value) => interval(value, (v) => v.toFixed(digits));

// -- charts -------------------------------------------------------------------------------------

const SHAPES = { ar: "diamond", base: "square", tracerl: "triangle", tstar: "circle", other1: "circle", other2: "diamond", other3: "square", other4: "triangle", other5: "circle", other6: "diamond" };

function dot(shape, x, y, r, full) {
  const attributes = { class: full ? "dot full" : "dot" };
  if (shape === "circle") return svg("circle", { ...attributes, cx: x, cy: y, r });
  const points = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]], diamond: [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]],
    triangle: [[0, -1.25], [1.2, 0.95], [-1.2, 0.95]],
  }[shape] || [[-1, -1], [1, -1], [1, 1], [-1, 1]];
  return svg("polygon", { ...attributes, points: points.map(([a, b]) => `${x + r * a},${y + r * b}`).join(" ") });
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = [0.5, 1, 2, 2.5, 5, 10];
  let index = steps.findIndex((m) => m * power >= raw * 0.999);
  const fits = (step) => Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  while (index > 0 && fits(steps[index] * power) < 3) index--;
  const step = steps[index] * power, found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
const wholeTicks = (low, high, count) => ticks(low, high, count).filter(Number.isInteger);

function logTicks(low, high) {
  const found = [];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((to - from) / 4));
  for (let e = from; e <= to; e++) if ((e - from) % every === 0 && 10 ** e >= low * 0.999 && 10 ** e <= high * 1.001) found.push(10 ** e);
  if (found.length < 2) return ticks(low, high, 3).filter((v) => v > 0);
  return found;
}

function extent(values, kind, includeZero) {
  let low = Math.min(...values), high = Math.max(...values);
  if (kind === "log") {
    if (low === high) { low /= 2; high *= 2; }
    return [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  }
  if (includeZero) low = Math.min(0, low);
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  const bottom = includeZero && low === 0 ? 0 : low - pad;
  if (kind === "share") return [Math.max(0, bottom), Math.min(1, high + pad)];
  return [low >= 0 ? Math.max(0, bottom) : bottom, high + pad];
}

// spec: {key, label, height, kind, includeZero, xTitle, yTitle, xValues?, xNames?, series, references, stages, alarms}
// series: [{name, slot, dash, dots, segments: [[{x, y, low, high, full}]]}]
function plot(spec) {
  const host = el("div", { class: "plot" });
  const height = spec.height * rem();
  host.style.height = `${height}px`;
  const tip = el("div", { class: "tip", hidden: true });
  let drawn = 0;
  const draw = () => {
    const width = host.clientWidth;
    if (!width || width === drawn) return;
    drawn = width;
    host.replaceChildren(drawPlot(spec, width, height, host, tip), tip);
  };
  host.redraw = () => { drawn = 0; draw(); };
  new ResizeObserver(draw).observe(host);
  queue.push(draw);
  return host;
}
let queue = []; // what to draw once it stands in the page, before anything is painted

function drawPlot(spec, width, height, host, tip) {
  const unit = rem(), format = FORMATS[spec.kind];
  const series = spec.series.filter((s) => !state.hidden.has(`${spec.key}/${s.name}`));
  const points = series.flatMap((s) => s.segments.flat());
  const references = spec.references || [];
  // The mean of few seeds may have an interval beyond all that was seen: it is cut where the figure ends.
  const reach = (s) => s.segments.flat().flatMap((p) => (s.isMean ? [p.y] : [p.y, p.low ?? p.y, p.high ?? p.y]));
  const heights = [...series.flatMap(reach), ...references.map((r) => r.y)];
  const picture = svg("svg", { role: "img", "aria-label": spec.label, viewBox: `0 0 ${width} ${height}` });
  if (!heights.length) return picture;
  const [low, high] = extent(heights, spec.kind, spec.includeZero);
  const rows = spec.kind === "log" ? logTicks(low, high) : ticks(low, high, height > 200 * unit ? 5 : 3);
  const rowText = (v) => tickText(v, rows.length > 1 ? rows[1] - rows[0] : 1, spec.kind);
  const left = (Math.max(...rows.map((v) => rowText(v).length)) * 7 + 12) * unit;
  const hasMargin = references.length > 0 && width > 620 * unit; // where the references' names stand
  const right = (hasMargin ? Math.max(...references.map((r) => r.name.length)) * 6.6 + 10 : 10) * unit, top = (spec.stages ? 24 : spec.yTitle ? 20 : 8) * unit, bottom = (spec.xTitle ? 40 : 24) * unit;
  const xs = spec.xValues || spec.series.flatMap((s) => s.segments.flat().map((p) => p.x)); // hidden ones too: the axis stays
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const inset = spec.xNames ? 26 * unit : 4 * unit;
  const x = (v) => left + inset + (last === first ? 0.5 : (v - first) / (last - first)) * (width - left - right - 2 * inset);
  const place = spec.kind === "log" ? Math.log : (v) => v;
  const y = (v) => top + (1 - (place(v) - place(low)) / (place(high) - place(low))) * (height - top - bottom);
  const axes = svg("g", { "aria-hidden": "true" });
  for (const v of rows) axes.append(
    svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
    svg("text", { x: left - 8 * unit, y: y(v) + 4 * unit, "text-anchor": "end" }, rowText(v)));
  const columns = spec.xNames ? spec.xValues : wholeTicks(first, last, Math.max(2, Math.min(8, width / (80 * unit))));
  for (const v of columns) axes.append(
    svg("text", { x: x(v), y: height - bottom + 17 * unit, "text-anchor": "middle" }, spec.xNames ? spec.xNames[spec.xValues.indexOf(v)] : plain(v)));
  axes.append(svg("line", { class: "baseline", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  if (spec.xTitle) axes.append(svg("text", { class: "axis-title", x: width - right, y: height - 4 * unit, "text-anchor": "end" }, spec.xTitle));
  if (spec.yTitle) axes.append(svg("text", { class: "axis-title", x: 0, y: 10 * unit }, spec.yTitle));
  picture.append(axes);
  drawStages(picture, spec.stages || [], x, top, height - bottom, unit, width - right);
  for (const alarm of (spec.alarms || []).filter((a) => a.x >= first && a.x <= last)) picture.append(
    svg("g", {}, svg("line", { class: "alarm", x1: x(alarm.x), x2: x(alarm.x), y1: top, y2: height - bottom }),
      svg("polygon", { class: "alarm-mark", points: `${x(alarm.x) - 4 * unit},${top - 6 * unit} ${x(alarm.x) + 4 * unit},${top - 6 * unit} ${x(alarm.x)},${top + 1}` }),
      svg("title", {}, alarm.text)));
  const cut = (v) => y(Math.max(low, Math.min(high, v)));
  for (const s of series) picture.append(drawSeries(s, x, y, cut, unit));
  drawReferences(picture, references, y, left, width - right, height - bottom, unit, hasMargin);
  watchPointer(picture, spec, series, { x, format, top, bottom: height - bottom, left, width }, host, tip);
  return picture;
}

function drawSeries(s, x, y, cut, unit) {
  const group = svg("g", { class: s.faint ? `m-${s.slot} faint` : `m-${s.slot}`, "data-series": s.name });
  for (const segment of s.segments) {
    const banded = segment.filter((p) => p.low !== undefined && p.low !== null);
    if (banded.length > 1 && s.band) group.append(svg("path", { class: "band", d:
      `M${banded.map((p) => `${x(p.x)},${cut(p.high)}`).join("L")}L${banded.slice().reverse().map((p) => `${x(p.x)},${cut(p.low)}`).join("L")}Z` }));
    if (!s.band && !s.faint) for (const p of banded) group.append(svg("path", { class: "error", d: `M${x(p.x)},${y(p.low)}V${y(p.high)}M${x(p.x) - 3 * unit},${y(p.low)}h${6 * unit}M${x(p.x) - 3 * unit},${y(p.high)}h${6 * unit}` }));
    group.append(svg("path", { class: "line", "stroke-dasharray": s.dash, d: `M${segment.map((p) => `${x(p.x).toFixed(1)},${y(p.y).toFixed(1)}`).join("L")}` }));
    if (s.dots || segment.length === 1) for (const p of segment) group.append(dot(SHAPES[s.slot] || "circle", x(p.x), y(p.y), (p.full ? 4.5 : 3.25) * unit, p.full));
  }
  return group;
}

function drawStages(picture, stages, x, top, bottom, unit, limit) {
  let free = -Infinity;
  for (const stage of stages.slice().sort((a, b) => a.x - b.x)) {
    const at = x(stage.x), text = `B = ${stage.block_size}`;
    const group = svg("g", { class: `m-${stage.slot} stage-mark` });
    if (stage.isBoundary) group.append(svg("line", { class: "stage", x1: at, x2: at, y1: top - 4 * unit, y2: bottom }));
    const fits = Math.max(at + (stage.isBoundary ? 4 * unit : 0), 0) >= free && at + 44 * unit <= limit + 4 * unit;
    if (fits) { group.append(svg("text", { class: "note", x: at + (stage.isBoundary ? 4 * unit : 0), y: top - 8 * unit }, text)); free = at + 48 * unit; }
    picture.append(group);
  }
}

function drawReferences(picture, references, y, left, right, bottom, unit, hasMargin) {
  const sorted = references.slice().sort((a, b) => b.y - a.y), texts = [];
  // Labels stand neither on each other nor below the axis.
  for (const r of sorted) texts.push(Math.max(y(r.y) + (hasMargin ? 4 : -5) * unit, texts.length ? texts[texts.length - 1] + 14 * unit : -Infinity));
  for (let i = texts.length - 1, floor = bottom; i >= 0; i--, floor = texts[i + 1] - 14 * unit) texts[i] = Math.min(texts[i], floor);
  for (const [i, r] of sorted.entries()) {
    const at = y(r.y), text = texts[i];
    picture.append(svg("g", { class: `m-${r.slot} reference-mark` },
      svg("line", { class: "reference", x1: left, x2: right, y1: at, y2: at }),
      svg("text", { class: "note", x: right + (hasMargin ? 6 * unit : 0), y: text, "text-anchor": hasMargin ? "start" : "end" }, r.name)));
  }
}

function watchPointer(picture, spec, series, scale, host, tip) {
  const cursor = svg("line", { class: "cursor", y1: scale.top, y2: scale.bottom, visibility: "hidden" });
  picture.append(cursor);
  const columns = [...new Set(series.flatMap((s) => s.segments.flat().map((p) => p.x)))];
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("pointermove", (event) => {
    const at = event.clientX - picture.getBoundingClientRect().left;
    const value = columns.reduce((best, v) => (Math.abs(scale.x(v) - at) < Math.abs(scale.x(best) - at) ? v : best), columns[0]);
    if (value === undefined) return;
    const name = spec.xNames ? spec.xNames[spec.xValues.indexOf(value)] : `${spec.xWord || "update"} ${plain(value)}`;
    const rows = series.flatMap((s) => s.segments.flat().filter((p) => p.x === value).slice(-1).map((p) =>
      el("div", { class: `row m-${s.slot}` }, el("span", {}, `${titleOf(s)} `, el("b", {}, scale.format(p.y)),
        p.low !== undefined && p.low !== null ? ` [${scale.format(p.low)}, ${scale.format(p.high)}]` : ""))));
    tip.replaceChildren(el("div", {}, name), ...rows);
    tip.hidden = false;
    const px = scale.x(value);
    cursor.setAttribute("x1", px); cursor.setAttribute("x2", px); cursor.setAttribute("visibility", "visible");
    tip.style.left = `${Math.max(0, Math.min(px + 12, host.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${scale.top}px`;
  });
}

function legend(key, entries, plots) {
  if (!entries.length) return null;
  return el("ul", { class: "legend" }, entries.map((s) => {
    const swatch = svg("svg", { viewBox: "0 0 30 14", "aria-hidden": "true", class: "plot-key" },
      svg("line", { x1: 1, x2: 29, y1: 7, y2: 7, stroke: "currentColor", "stroke-width": 2, "stroke-dasharray": s.dash }));
    const box = el("span", { class: "plot" }, fill(swatch, {}, [dot(SHAPES[s.slot] || "circle", 15, 7, 3.4, true)]));
    box.style.display = "contents"; swatch.style.color = "var(--accent)";
    const id = `${key}/${s.name}`;
    const button = el("button", { type: "button", class: `m-${s.slot}`, "aria-pressed": String(!state.hidden.has(id)), title: "Show or hide" }, box, s.text || s.name);
    button.addEventListener("click", () => {
      state.hidden.has(id) ? state.hidden.delete(id) : state.hidden.add(id);
      button.setAttribute("aria-pressed", String(!state.hidden.has(id)));
      plots().forEach((p) => p.redraw());
    });
    return el("li", {}, button);
  }));
}

function numbersOf(spec) {
  const format = FORMATS[spec.kind];
  const name = (v) => (spec.xNames ? spec.xNames[spec.xValues.indexOf(v)] : plain(v));
  return el("div", { class: "scroll" }, table([spec.xTitle || "x", "", "value", "low", "high"], [spec.series.flatMap((s) =>
    s.segments.flat().map((p) => [name(p.x), titleOf(s), format(p.y), p.low !== undefined && p.low !== null ? format(p.low) : "–", p.high !== undefined && p.high !== null ? format(p.high) : "–"]))]));
}

// A table that scrolls inside itself where the page is narrow.
function captioned(name, caption, node) {
  return el("div", {}, el("p", { class: "caption" }, caption), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, node));
}

function table(head, bodies) {
  return el("table", {},
    el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))),
    bodies.map((rows) => el("tbody", {}, rows.map((row) => row instanceof Node ? row : el("tr", {}, row.map((cell, i) =>
      i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}

function figure(number, title, text, ...body) {
  const after = body.filter((node) => node instanceof HTMLDetailsElement);
  return el("figure", { id: `figure-${number}` }, body.filter((node) => !after.includes(node)), el("figcaption", {}, el("b", {}, `Figure ${number}. ${title}. `), text), after);
}
const empty = (text) => el("p", { class: "empty" }, text);
const named = (index) => [el("span", { class: `swatch m-${method(index).slot}` }), method(index).name];

// Arms of one method share its accent; the second and later ones are dashed. The runs of an arm with several
// seeds are faint behind its mean.
function armStyle(index) {
  const arm = report.arms[index], slot = method(arm.method).slot;
  const same = report.arms.slice(0, index).filter((a) => method(a.method).slot === slot).length;
  return { name: arm.name, slot, dash: ["", "7 4", "2 4", "10 3 2 3"][same % 4] || undefined };
}
function runStyle(index) {
  const run = report.runs[index], isOneOfMany = report.arms[run.arm].runs.length > 1;
  return { ...armStyle(run.arm), title: run.name, faint: isOneOfMany };
}
const armEntries = () => report.arms.map((arm, i) => ({ ...armStyle(i), text: arm.runs.length > 1 ? `${arm.name} (${arm.runs.length} seeds)` : arm.name }));
const titleOf = (s) => s.title || s.name;

// -- sections -----------------------------------------------------------------------------------

function drawHead() {
  return [
    el("h1", {}, report.title),
    report.facts.length ? el("p", { class: "facts" }, report.facts.join(" · ")) : null,
    report.verdict.length ? el("ul", { class: "verdict" }, report.verdict.map((claim) => el("li", {}, claim.numbers ? [el("strong", {}, claim.text), el("span", { class: "numbers" }, claim.numbers)] : claim.text))) : null,
    report.arms.length ? el("ul", { class: "runs", "aria-label": "Runs" }, report.arms.map(armCard)) : null,
    report.notices.length ? noticeBox() : null,
  ];
}

function armCard(arm) {
  const runs = arm.runs.map((i) => report.runs[i]);
  const sizes = (run) => (run.stages.length ? `B = ${run.stages.map((s) => s.block_size).filter((b, i, all) => b !== all[i - 1]).join(" → ")}` : "no stage yet");
  const alike = (texts) => [...new Set(texts)];
  const states = alike(runs.map((r) => r.status));
  return el("li", { class: `m-${method(arm.method).slot}` },
    el("div", { class: "name" }, arm.name, runs.length > 1 ? el("span", { class: "count" }, ` ${runs.length} seeds`) : null),
    alike(runs.map(sizes)).map((text) => el("div", { class: "path" }, text)),
    states.length === 1 ? el("div", { class: "status" }, states[0]) : runs.map((r) => el("div", { class: "status" }, `${r.name}: ${r.status}`)));
}

function noticeBox() {
  const box = el("details", { class: "notices" }, el("summary", {}, `Before you read: ${report.notices.length} ${report.notices.length === 1 ? "remark" : "remarks"} on these data`),
    el("ul", {}, report.notices.map((n) => el("li", {}, el("b", {}, n.source), ` ${n.text}`))));
  box.open = state.noticesOpen ?? report.notices.length <= 6;
  box.addEventListener("toggle", () => { state.noticesOpen = box.open; });
  return box;
}

function stageMarks() {
  return report.runs.flatMap((run, index) => run.stages.map((s, i) => ({
    x: s.update_step, block_size: s.block_size, slot: runStyle(index).slot, isBoundary: i > 0, run: run.name })))
    .filter((s, i, all) => all.findIndex((o) => o.x === s.x && o.block_size === s.block_size && o.slot === s.slot) === i)
    .filter((s) => s.isBoundary || report.runs.length === 1);
}
const alarms = () => report.runs.flatMap((run) => run.guards.map((g) => ({ x: g.update_step, text: `${run.name}, update ${g.update_step}: ${g.message} (${g.action})` })));

function drawValidation() {
  const { curves, means, policies, bases, bases_setting } = report.validation;
  if (!curves.length) return [empty(report.runs.length ? "No run has been validated yet." : "No run is in this report.")];
  const drawn = (segments, isMean) => segments.map((segment) => segment.map((p) => ({ x: p.update_step, y: p.accuracy.value, low: p.accuracy.low, high: p.accuracy.high, full: isMean || p.is_best })));
  const series = [...curves.map((c) => { const style = runStyle(c.run); return { ...style, dots: !style.faint, band: !style.faint, segments: drawn(c.segments) }; }),
    ...means.map((m) => ({ ...armStyle(m.arm), title: `${report.arms[m.arm].name}, mean`, dots: true, band: true, isMean: true, segments: drawn(m.segments, true) }))];
  const spec = { key: "validation", label: "Validation accuracy over update steps", height: 400, kind: "share", xTitle: "update steps", yTitle: null, series,
    stages: stageMarks(), alarms: alarms(), references: bases.map((b) => ({ y: b.accuracy.value, slot: "base", name: `${bases_setting ? "base" : "start"}, B = ${b.block_size}` })) };
  const host = plot(spec);
  const caption = [policies.length ? `Each at the block size of its stage, decoded with ${policies.join(", ")}. ` : "",
    means.length ? "Strong lines: the mean over seeds, while all of them go on; faint ones: each seed. " : "", "Bands are 95 % intervals",
    curves.length > means.length ? "; filled points were the best so far." : ".", " Dotted vertical lines: a new stage.",
    !bases.length ? " No base was evaluated on the runs' problems." : bases_setting ? ` Dashed horizontal lines: the bases' accuracy (${bases_setting}).`
      : " Dashed horizontal lines: what the runs began with, before their first update.",
    report.runs.some((r) => r.guards.length) ? " Red: guard events." : ""].join("");
  return [figure(1, "Validation accuracy while training", caption, legend("validation", armEntries(), () => [host]), host, details("numbers-1", "Numbers", () => numbersOf(spec)))];
}

function drawBlockSizes() {
  if (!report.scores.length) return [empty("No evaluation is in this report.")];
  const panels = report.settings.map((name, setting) => {
    const all = report.scores.filter((s) => s.setting === setting && s.accuracy), isLine = (s) => method(s.method).slot === "ar";
    const scores = all.some((s) => !isLine(s)) ? all.filter((s) => !isLine(s)) : all; // AR models have no block size: lines
    if (!scores.length) return null;
    const references = all.filter((s) => !scores.includes(s)).map((s) => ({ y: s.accuracy.value, name: method(s.method).name, slot: "ar" }));
    const sizes = [...new Set(scores.map((s) => s.block_size))].sort((a, b) => a - b);
    const series = report.methods.map((m, index) => ({ name: m.name, slot: m.slot, dots: true,
      segments: [scores.filter((s) => s.method === index).map((s) => ({ x: sizes.indexOf(s.block_size), y: s.accuracy.value, low: s.accuracy.low, high: s.accuracy.high, full: true }))].filter((s) => s.length) }))
      .filter((s) => s.segments.length);
    const spread = Math.min(0.06, 0.02 * series.length); // points of one block size stand side by side
    series.forEach((s, i) => s.segments.forEach((segment) => segment.forEach((p) => { p.x += spread * (i - (series.length - 1) / 2); })));
    const spec = { key: "blocks", label: `Accuracy by block size, ${name}`, height: 290, kind: "share", series, references,
      xValues: sizes.map((_, i) => i), xNames: sizes.map((b) => `B = ${b}`) };
    return { node: el("div", {}, el("div", { class: "panel-title" }, name), plot(spec)), spec };
  }).filter(Boolean);
  const entries = report.methods.filter((m, i) => report.scores.some((s) => s.method === i)).map((m) => ({ name: m.name, slot: m.slot }));
  const hosts = () => panels.map((p) => p.node.querySelector(".plot"));
  return [figure(2, "Accuracy and block size", "Each checkpoint is decoded with its own block size. Bars are 95 % intervals; where several seeds of a method were evaluated, their mean, with Student's interval over the seeds or that of a single evaluation, whichever is wider. AR models are lines: they have no block size.",
    legend("blocks", entries, hosts), el("div", { class: panels.length === 4 ? "panels wide" : "panels" }, panels.map((p) => p.node)))];
}

function drawTables() {
  if (!report.scores.length) return [empty("No evaluation is in this report.")];
  const pairs = report.settings.map((name, setting) => [name, [scheduleTable(name, setting), blockTable(name, setting)].filter(Boolean)]).filter(([, pair]) => pair.length);
  const draw = (pair) => el("div", { class: "tables" }, pair);
  return [pairs.slice(0, 1).map(([, pair]) => draw(pair)), pairs.slice(1).map(([name, pair]) => details(`tables-${name}`, `The same for ${name}`, () => draw(pair))), details("all", `All ${report.evaluations.length} evaluations`, allTable)].filter(Boolean);
}

function scheduleTable(name, setting) {
  const scores = report.scores.filter((s) => s.setting === setting);
  if (!scores.length) return null;
  const sizes = [...new Set(scores.map((s) => s.block_size))].sort((a, b) => (a === 1 ? -1 : b === 1 ? 1 : b - a));
  const k = scores[0].num_samples;
  const bodies = sizes.map((size) => [el("tr", { class: "group" }, el("th", { colspan: 4, scope: "rowgroup" }, size === 1 ? "One token a step" : `B = ${size}`)),
    ...scores.filter((s) => s.block_size === size).map((s) => [s.num_evaluations > 1 ? [named(s.method), el("span", { class: "low", title: `mean of ${s.num_evaluations} seeds` }, ` ×${s.num_evaluations}`)] : named(s.method),
      asNumber(3)(s.local_strict), asPercent(s.accuracy), asNumber(2)(s.tokens_per_forward)])]);
  return captioned(`LocalStrict, accuracy, tokens per forward, ${name}`, [el("b", {}, "LocalStrict, accuracy, tokens per forward. "), `${name}; ${scores[0].num_problems} problems, 95 % intervals${scores.some((s) => s.num_evaluations > 1) ? "; ×n: mean of n seeds" : ""}.`],
    table(["Method", "LocalStrict", `avg@${k} %`, "TPF"], bodies));
}

function blockTable(name, setting) {
  const scores = report.scores.filter((s) => s.setting === setting && s.accuracy);
  const sizes = [...new Set(scores.map((s) => s.block_size))].sort((a, b) => a - b);
  const methods = [...new Set(scores.map((s) => s.method))].sort((a, b) => a - b);
  if (sizes.length < 2 && methods.length < 2) return null;
  const best = sizes.map((size) => Math.max(...scores.filter((s) => s.block_size === size).map((s) => s.accuracy.value)));
  const rows = methods.map((m) => [named(m), ...sizes.map((size, i) => {
    const score = scores.find((s) => s.method === m && s.block_size === size);
    if (!score) return "–";
    return el("span", { class: score.accuracy.value === best[i] ? "top" : "" }, asPercent(score.accuracy));
  })]);
  return captioned(`Accuracy by method and block size, ${name}`, [el("b", {}, "Accuracy by method and block size. "), `${name}; avg@${scores[0].num_samples} in %, the highest of each column is set in bold.`],
    table(["Method", ...sizes.map((s) => `B = ${s}`)], [rows]));
}

function allTable() {
  const ks = [...new Set(report.evaluations.flatMap((e) => Object.keys(e.pass_at)))].sort((a, b) => a - b);
  const rows = report.evaluations.map((e) => [e.name, el("span", {}, named(e.method)), `${e.block_size}${e.offset ? ` Δ=${e.offset}` : ""}`, report.settings[e.setting], e.update_step ?? "–",
    `${e.num_problems} × ${e.num_samples}`, asPercent(e.accuracy), ...ks.map((k) => asPercent(e.pass_at[k])), asNumber(3)(e.local_strict), asNumber(2)(e.tokens_per_forward),
    e.mean_length === null ? "–" : e.mean_length.toFixed(0), e.truncated === null ? "–" : percent(e.truncated), e.tokens_per_second === null ? "–" : plain(e.tokens_per_second), e.is_selected ? "yes" : ""]);
  return el("div", { class: "scroll" }, table(["Evaluation", "Method", "B", "Setting", "Update", "Problems × samples", "avg@k %", ...ks.map((k) => `pass@${k} %`), "LocalStrict", "TPF", "Length", "Truncated %", "Tokens/s", "In the figures"], [rows]));
}

function drawHealth() {
  const panels = report.health.panels;
  if (!panels.length) return [empty(report.runs.length ? "No update has been done yet." : "No run is in this report.")];
  const entries = armEntries();
  const nodes = panels.map((panel) => {
    const drawn = (segment) => segment.map(([x, y]) => ({ x, y }));
    const series = [...panel.curves.map((c) => ({ ...runStyle(c.run), segments: c.segments.map(drawn) })),
      ...panel.means.map((m) => ({ ...armStyle(m.arm), title: `${report.arms[m.arm].name}, mean`, segments: [drawn(m.points)] }))];
    const spec = { key: "health", label: `${panel.title} over update steps`, height: 180, kind: panel.kind, series, stages: null, alarms: alarms(), includeZero: panel.kind === "share" };
    return el("div", { "data-panel": panel.name }, el("div", { class: "panel-title" }, panel.title), el("div", { class: "panel-note" }, panel.kind === "log" ? `${panel.note} Log scale.` : panel.note), plot(spec),
      details(`health-${panel.name}`, "Numbers", () => numbersOf({ ...spec, xTitle: "update" })));
  });
  const events = alarms();
  return [figure(3, "Training health", `One point for each update step.${report.arms.some((a) => a.runs.length > 1) ? " Strong lines: the mean over seeds; faint ones: each seed." : ""}${alarms().length ? " Red lines: guard events, listed below." : ""}`,
    legend("health", entries, () => nodes.map((n) => n.querySelector(".plot"))), el("div", { class: "panels" }, nodes)),
    events.length ? el("ul", { class: "alarms", "aria-label": "Guard events" }, events.map((e) => el("li", {}, e.text))) : null];
}

function options(select, entries, value) {
  select.replaceChildren(...entries.map(([key, text]) => el("option", { value: key }, text)));
  select.value = entries.some(([key]) => String(key) === String(value)) ? value : entries.length ? entries[0][0] : "";
  return select.value;
}
const field = (name, select) => el("label", {}, name, select);
const figureName = (f) => `${f.method === null ? f.name : method(f.method).name}, B = ${f.block_size}`;

function drawSchedules() {
  const figures = report.schedules;
  if (!figures.length) return [empty("No stored response could be read.")];
  const isOneToken = (s) => figures.filter((f) => f.setting === s).every((f) => f.block_size === 1);
  const settings = [...new Set(figures.map((f) => f.setting))].sort((a, b) => isOneToken(a) - isOneToken(b));
  const select = el("select", { "aria-label": "Setting of the schedule figures" });
  options(select, settings.map((s) => [s, s]), state.schedule);
  const body = el("div", { class: "case" });
  const draw = () => {
    state.schedule = select.value;
    const chosen = figures.filter((f) => f.setting === select.value);
    body.replaceChildren(...[...new Set(chosen.map((f) => f.block_size))].sort((a, b) => a - b).map((size) => scheduleRow(size, chosen.filter((f) => f.block_size === size))));
    flush();
  };
  select.addEventListener("change", draw);
  queue.push(draw);
  return [figure(4, "How blocks are decoded", "Left: tokens that came while one to their left was still masked, by place in the block. Middle: denoising steps that a block took. Right: the probability of tokens when they were unmasked, in correct responses (solid) and wrong ones (dashed). Small maps: a row for each place in the block, a column for each step; the stronger, the more of the place's tokens were unmasked at it.",
    settings.length > 1 ? el("div", { class: "fields" }, field("Decoding", select)) : null, body)];
}

function scheduleRow(size, figures) {
  const style = (f) => ({ name: f.method === null ? f.name : method(f.method).name + (f.num_files > 1 ? ` ×${f.num_files}` : ""), slot: method(f.method).slot });
  const several = figures.length > 1 && new Set(figures.map((f) => style(f).name)).size < figures.length;
  const label = (f) => (several ? `${style(f).name} (${f.name})` : style(f).name);
  const line = (f, values, from, dash) => ({ ...style(f), name: label(f) + (dash ? ", wrong" : ""), dash, dots: values.length <= 16,
    segments: [values.map((v, i) => ({ x: i + from, y: v })).filter((p) => p.y !== null)].filter((s) => s.length) });
  const panel = (title, spec) => el("div", {}, el("div", { class: "panel-title" }, title), plot({ key: `schedule-${size}`, kind: "share", height: 190, includeZero: true, label: `${title}, B = ${size}`, ...spec }));
  const entries = figures.map((f) => ({ ...style(f), name: label(f) }));
  const facts = figures.map((f) => [el("span", {}, el("span", { class: `swatch m-${style(f).slot}` }), label(f)), f.local_strict.toFixed(3), f.tokens_per_forward.toFixed(2),
    f.distinct_schedules === null ? "–" : percent(f.distinct_schedules, 0), f.mean_confidence_correct === null ? "–" : f.mean_confidence_correct.toFixed(3),
    f.mean_confidence_wrong === null ? "–" : f.mean_confidence_wrong.toFixed(3), f.num_responses.toLocaleString("en"), f.num_stored.toLocaleString("en")]);
  return el("div", {}, el("h3", {}, `B = ${size}`), legend(`schedule-${size}`, entries, () => []),
    el("div", { class: "panels" },
      panel("Out of order", { xWord: "place", xTitle: "place in the block", series: figures.map((f) => line(f, f.places.map((p) => p.non_monotone), 1)) }),
      panel("Steps per block", { xWord: "steps", xTitle: "steps", series: figures.map((f) => line(f, f.steps_per_block.slice(1), 1)) }),
      panel("Confidence when unmasked", { xTitle: "probability", xValues: [...Array(10).keys()], xNames: [...Array(10).keys()].map((i) => (i % 3 ? "" : `.${i}`)),
        series: figures.flatMap((f) => [f.confidence_correct && line(f, f.confidence_correct, 0), f.confidence_wrong && line(f, f.confidence_wrong, 0, "4 4")]).filter(Boolean) })),
    el("div", { class: "panels" }, figures.map((f) => placeMap(f, label(f)))),
    el("div", { class: "scroll" }, table(["Responses of", "LocalStrict", "TPF", "Distinct schedules %", "Confidence, correct", "wrong", "Read", "Stored"], [facts])));
}

// Where in the block, when: each row is a place, each column a step, a cell the share of the place's tokens.
function placeMap(f, name) {
  const places = f.places.length, steps = Math.max(...f.places.map((p) => p.steps.length));
  const cell = 12, map = svg("svg", { class: `heat m-${method(f.method).slot}`, role: "img", viewBox: `0 0 ${steps * cell} ${places * cell}`, "aria-label": `First unmask by place and step, ${name}, B = ${f.block_size}` });
  map.style.maxWidth = `${steps * 1.1}rem`;
  f.places.forEach((p, row) => p.steps.forEach((share, column) => {
    const box = svg("rect", { x: column * cell, y: row * cell, width: cell - 1, height: cell - 1, rx: 1.5 }, svg("title", {}, `place ${row + 1}, step ${column + 1}: ${percent(share)} %`));
    box.style.fillOpacity = 0.06 + 0.94 * share;
    map.append(box);
  }));
  return el("div", {}, el("div", { class: "panel-title" }, name), map);
}

// -- case study ---------------------------------------------------------------------------------

const sourceOf = (response) => { const f = report.schedules[response.figure]; return `${f.method === null ? f.name : method(f.method).name} · ${f.setting}`; };

function drawCase() {
  const responses = report.samples.responses;
  if (!responses.length) return [empty("No stored response could be read.")];
  const problem = el("select", {}), left = el("select", {}), right = el("select", {}), body = el("div", { class: "case" }), asked = el("div", { class: "question" });
  const chosen = () => responses.filter((r) => r.problem === +problem.value);
  const draw = () => {
    state.caseProblem = problem.value;
    const sources = [...new Set(chosen().map(sourceOf))].map((s) => [s, s]);
    const setting = (s) => s.slice(s.indexOf(" · "));
    state.caseLeft = options(left, sources, state.caseLeft ?? pick(sources, ["tracerl", "base"]));
    const partner = sources.find(([s]) => s !== state.caseLeft && setting(s) === setting(state.caseLeft) && s.startsWith("T"));
    state.caseRight = options(right, sources, state.caseRight ?? (partner || sources.find(([s]) => s !== state.caseLeft) || sources[0])[0]);
    showQuestion(asked, +problem.value);
    const sizes = [...new Set(chosen().map((r) => report.schedules[r.figure].block_size))].sort((a, b) => a - b);
    body.replaceChildren(...sizes.map((size) => caseRow(size, chosen(), [...new Set([state.caseLeft, state.caseRight])])).filter(Boolean));
  };
  const pick = (sources, slots) => {
    for (const slot of slots) { const found = sources.find(([s]) => responses.some((r) => sourceOf(r) === s && method(report.schedules[r.figure].method).slot === slot)); if (found) return found[0]; }
    return sources[0] && sources[0][0];
  };
  options(problem, problemOptions(responses), state.caseProblem);
  problem.addEventListener("change", draw);
  for (const select of [left, right]) select.addEventListener("change", () => { state.caseLeft = left.value; state.caseRight = right.value; draw(); });
  draw();
  return [el("div", { class: "fields" }, field("Problem", problem), field("Left", left), field("Right", right)), asked,
    figure(5, "When each token was first unmasked", "Each cell is a token, in reading order; gaps separate blocks; the stronger the colour, the later in its block it was decoded.", body)];
}

function problemOptions(responses, keep = () => true) {
  return report.samples.problems.map((p, i) => {
    const own = responses.filter((r) => r.problem === i);
    const right = own.filter((r) => r.is_correct).length, judged = own.filter((r) => r.is_correct !== null).length;
    return own.some(keep) ? [i, `${visible(p.id)}${judged ? ` (${right} of ${judged} correct)` : ""}`] : null;
  }).filter(Boolean);
}

function showQuestion(node, index) {
  const problem = report.samples.problems[index];
  node.replaceChildren(problem.question === null ? `Problem ${visible(problem.id)}; its text is not stored here.` : visible(problem.question),
    problem.answer === null ? "" : el("span", { class: "answer" }, `Answer: ${visible(problem.answer)}`));
}

function caseRow(size, responses, sources) {
  const pair = sources.map((source) => responses.find((r) => sourceOf(r) === source && report.schedules[r.figure].block_size === size));
  if (!pair.some(Boolean)) return null;
  const latest = Math.max(...pair.filter(Boolean).flatMap(inBlockSteps), 1);
  return el("div", { class: "case-row" }, el("h3", {}, `B = ${size}`), pair.map((response, i) => response ? heatFigure(response, sources[i], size, latest)
    : el("p", { class: "panel-note" }, `${sources[i].split(" · ")[0]}: no stored response to this problem at this block size.`)));
}

function inBlockSteps(response) {
  const found = [];
  let start = 0;
  for (const length of response.blocks) {
    const steps = response.steps.slice(start, start + length), first = Math.min(...steps);
    steps.forEach((s) => found.push(s - first));
    start += length;
  }
  return found;
}

const MAX_CELLS = 1024;
function heatFigure(response, source, size, latest) {
  const columns = size > 32 ? size : size * Math.max(1, Math.floor(32 / size)), cell = 10, gap = 3;
  const steps = inBlockSteps(response), shown = Math.min(steps.length, MAX_CELLS);
  const width = columns * cell + (Math.ceil(columns / size) - 1) * gap, rows = Math.ceil((response.first_place + shown) / columns);
  const map = svg("svg", { class: `heat m-${method(report.schedules[response.figure].method).slot}`, role: "img", viewBox: `0 0 ${width} ${rows * (cell + 2)}`,
    "aria-label": `First-unmask steps, ${source}, B = ${size}: ${verdictOf(response)}, LocalStrict ${response.local_strict.toFixed(2)}` });
  for (let i = 0; i < shown; i++) {
    const at = response.first_place + i, column = at % columns;
    const text = `${visible(report.samples.pieces[response.pieces[i]])}  step ${steps[i] + 1} of its block, confidence ${response.confidences[i]} %`;
    const box = svg("rect", { x: column * cell + Math.floor(column / size) * gap, y: Math.floor(at / columns) * (cell + 2), width: cell - 1, height: cell - 1, rx: 1.5 }, svg("title", {}, text));
    box.style.fillOpacity = 0.08 + 0.92 * (steps[i] / latest);
    map.append(box);
  }
  return el("figure", {}, el("div", { class: "heat-head" }, el("span", { class: "who" }, source.split(" · ")[0]), mark(response),
    el("span", { class: "fact" }, `LocalStrict ${response.local_strict.toFixed(2)}`), el("span", { class: "fact" }, `TPF ${(response.num_tokens / response.num_forwards).toFixed(2)}`),
    el("span", { class: "fact" }, `${response.num_tokens} tokens${shown < response.num_tokens ? `, the first ${shown} shown` : ""}`)), map,
    details(`case-${source}-${size}-${response.problem}`, "Its text", () => el("div", { class: "answer-text" }, textOf(response))));
}
const textOf = (response) => response.pieces.map((p) => visible(report.samples.pieces[p])).join("");

// -- player -------------------------------------------------------------------------------------

const SPEEDS = [["0.4", "slow"], ["1", "normal"], ["3", "fast"]];

function drawPlayer() {
  const responses = report.samples.responses;
  if (!responses.length) return [empty("No stored response could be read.")];
  const who = el("select", {}), filter = el("select", {}), problem = el("select", {}), sample = el("select", {});
  const asked = el("div", { class: "question" });
  const stat = (name) => { const out = el("output", { "aria-live": "off" }, "–"); return [out, el("div", { class: "stat" }, el("span", {}, name), out)]; };
  const [stepOut, stepBox] = stat("Step"), [tokensOut, tokensBox] = stat("Tokens"), [soFarOut, soFarBox] = stat("TPF so far"), [tpfOut, tpfBox] = stat("TPF"), [verdictOut, verdictBox] = stat("Answer");
  const screen = el("div", { class: "screen", tabindex: 0, role: "group", "aria-label": "Response" });
  const thisStep = el("div", { class: "this-step" });
  const play = el("button", { type: "button", class: "play" }, "Play");
  const back = el("button", { type: "button", class: "step-button", "aria-label": "One step back" }, "‹"), forth = el("button", { type: "button", class: "step-button", "aria-label": "One step forward" }, "›");
  const range = el("input", { type: "range", min: 0, step: 1, "aria-label": "Denoising step" });
  const speed = el("select", { "aria-label": "Speed" }), colour = el("select", { "aria-label": "Colour of tokens" });
  const box = el("div", { class: "player", role: "region", "aria-label": "Player" }, el("div", { class: "player-head" }, stepBox, tokensBox, soFarBox, tpfBox, verdictBox), screen, thisStep,
    el("div", { class: "controls" }, play, back, forth, range, el("label", {}, "Speed", speed), el("label", {}, "Colour", colour)));
  options(speed, SPEEDS, "1");
  options(colour, [["step", "step in the block"], ["doubt", "doubt (1 − confidence)"]], state.colour);
  options(filter, [["all", "all answers"], ["solved", "solved"], ["unsolved", "unsolved"]], state.filter);
  const player = { box, screen, thisStep, play, range, speed, colour, stepOut, tokensOut, soFarOut, tpfOut, verdictOut, at: 0, timer: null };
  state.player = player;

  const kept = (r) => filter.value === "all" || (filter.value === "solved") === (r.is_correct === true);
  const mine = () => responses.filter((r) => r.figure === +who.value && kept(r));
  const chooseWho = () => {
    const figures = report.schedules.map((f, i) => [i, `${figureName(f)} · ${f.setting}`]).filter(([i]) => responses.some((r) => r.figure === i && kept(r)));
    state.who = options(who, figures, state.who ?? favourite(figures));
    state.problem = options(problem, problemOptions(mine()), state.problem);
    chooseSample();
  };
  const chooseSample = () => {
    const own = mine().filter((r) => r.problem === +problem.value);
    const isOfMany = own.length > 0 && report.schedules[own[0].figure].num_files > 1;
    options(sample, own.map((r) => [responses.indexOf(r), `line ${r.number}, ${verdictOf(r)}${isOfMany ? ` (${visible(r.file)})` : ""}`]), state.sample);
    load();
  };
  const load = () => {
    state.sample = sample.value;
    const response = responses[+sample.value];
    box.className = response ? `player m-${method(report.schedules[response.figure].method).slot}` : "player";
    asked.hidden = !response;
    if (response) showQuestion(asked, response.problem);
    loadResponse(player, response);
  };
  who.addEventListener("change", () => { state.who = who.value; chooseWho(); });
  filter.addEventListener("change", () => { state.filter = filter.value; chooseWho(); });
  problem.addEventListener("change", () => { state.problem = problem.value; chooseSample(); });
  sample.addEventListener("change", load);
  colour.addEventListener("change", () => { state.colour = colour.value; paint(player); });
  speed.addEventListener("change", () => { if (player.timer) { stop(player); start(player); } });
  play.addEventListener("click", () => toggle(player));
  back.addEventListener("click", () => seek(player, player.at - 1));
  forth.addEventListener("click", () => seek(player, player.at + 1));
  range.addEventListener("input", () => seek(player, +range.value));
  box.addEventListener("keydown", (event) => pressed(player, event));
  chooseWho();
  return [el("div", { class: "fields" }, field("Responses of", who), field("Show", filter), field("Problem", problem), field("Sample", sample)), asked, box,
    el("p", { class: "hint" }, el("kbd", {}, "Space"), " plays and pauses, ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " go step by step, ", el("kbd", {}, "Home"), " ", el("kbd", {}, "End"), " to the ends. Grey boxes are masked tokens; thin lines separate blocks.")];
}

// What to begin with: the curriculum at its largest block size.
function favourite(figures) {
  const rank = ([i]) => (method(report.schedules[i].method).slot === "tstar" ? 1000 : 0) + Math.min(report.schedules[i].block_size, 999);
  return figures.length ? figures.reduce((best, f) => (rank(f) > rank(best) ? f : best))[0] : undefined;
}

function loadResponse(player, response) {
  stop(player);
  player.response = response;
  player.spans = [];
  player.screen.replaceChildren();
  player.screen.scrollTop = 0;
  if (!response) {
    player.screen.append("No such response among the samples.");
    player.thisStep.replaceChildren();
    return;
  }
  player.inBlock = inBlockSteps(response);
  player.latest = Math.max(...player.inBlock, 1);
  let start = 0;
  for (const length of response.blocks) {
    const block = el("span", { class: report.schedules[response.figure].block_size > 1 ? "b" : "" });
    for (let i = start; i < start + length; i++) {
      const text = visible(report.samples.pieces[response.pieces[i]]);
      const span = el("span", { class: "t", "aria-hidden": "true" }, text);
      const sign = text === "" ? "∅" : text.startsWith("\n") ? "↵" : null;
      if (sign) { span.classList.add("bare"); span.dataset.sign = text === "" ? sign : ""; }
      player.spans.push(span);
      block.append(span);
    }
    player.screen.append(block);
    start += length;
  }
  player.num = response.num_forwards;
  player.range.max = player.num;
  player.tpfOut.value = (response.num_tokens / response.num_forwards).toFixed(2);
  player.verdictOut.value = verdictOf(response);
  player.at = -1;
  paint(player);
  seek(player, 0);
}

function paint(player) {
  if (!player.response) return;
  player.spans.forEach((span, i) => {
    const value = player.colour.value === "step" ? player.inBlock[i] / player.latest : 1 - player.response.confidences[i] / 100;
    span.style.setProperty("--v", (10 + 45 * value).toFixed(0));
  });
}

function seek(player, step) {
  const response = player.response;
  if (!response) return;
  const target = Math.max(0, Math.min(player.num, step));
  player.at = target;
  player.range.value = target;
  let shown = 0;
  const fresh = [];
  player.spans.forEach((span, i) => {
    const on = response.steps[i] < target, now = response.steps[i] === target - 1;
    shown += on;
    if (now) fresh.push(i);
    if (span.classList.contains("on") !== on) { span.classList.toggle("on", on); on ? span.removeAttribute("aria-hidden") : span.setAttribute("aria-hidden", "true"); }
    if (span.classList.contains("now") !== now) span.classList.toggle("now", now);
  });
  const total = response.steps.length;
  player.stepOut.value = `${target} / ${player.num}`;
  player.tokensOut.value = `${shown} / ${total}`;
  player.soFarOut.value = target ? (shown / target).toFixed(2) : "–";
  player.range.setAttribute("aria-valuetext", `step ${target} of ${player.num}, ${shown} of ${total} tokens`);
  player.screen.setAttribute("aria-label", `Response after step ${target} of ${player.num}`);
  showStep(player, fresh, total);
  if (fresh.length) keepInView(player.screen, player.spans[fresh[fresh.length - 1]]);
  if (target === player.num) stop(player);
}

function showStep(player, fresh, total) {
  const { response } = player;
  const text = !player.at ? "Everything is masked." : fresh.length ? `Step ${player.at} unmasked ${fresh.length} ${fresh.length === 1 ? "token" : "tokens"}, with confidence` :
    total < response.num_tokens ? "This step was behind what is shown." : "This step only unmasked tokens behind the stop.";
  player.thisStep.replaceChildren(el("h3", {}, text), el("ul", {}, fresh.map((i) => {
    const bar = el("i", { "aria-hidden": "true" });
    bar.style.setProperty("--v", response.confidences[i]);
    return el("li", {}, el("code", {}, visible(report.samples.pieces[response.pieces[i]]).replaceAll("\n", "↵") || "∅"), bar, `${response.confidences[i]} %`);
  })));
}

function keepInView(screen, span) {
  const top = span.offsetTop, room = 48;
  if (top < screen.scrollTop + room) screen.scrollTop = Math.max(0, top - room);
  else if (top > screen.scrollTop + screen.clientHeight - room) screen.scrollTop = top - screen.clientHeight + room;
}

const delay = (player) => Math.min(600, Math.max(25, 9000 / Math.max(player.num, 1))) / +player.speed.value;
function start(player) {
  if (!player.response) return;
  if (player.at >= player.num) seek(player, 0);
  player.timer = setInterval(() => seek(player, player.at + 1), delay(player));
  player.play.textContent = "Pause";
}
function stop(player) {
  clearInterval(player.timer);
  player.timer = null;
  player.play.textContent = "Play";
}
const toggle = (player) => (player.timer ? stop(player) : start(player));

function pressed(player, event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName === "SELECT") return;
  const onButton = event.target.tagName === "BUTTON";
  const moves = { ArrowLeft: player.at - 1, ArrowRight: player.at + 1, Home: 0, End: player.num };
  if (event.key === " " && !onButton) toggle(player);
  else if (event.key in moves) { stop(player); seek(player, moves[event.key]); }
  else return;
  event.preventDefault();
}

// -- configuration ------------------------------------------------------------------------------

function drawConfig() {
  if (!report.runs.length) return [empty("No run is in this report.")];
  const differences = report.differences.length ? captioned("What the runs do not share", [el("b", {}, "What the runs do not share. "), "All other fields are equal."],
    table(["Field", ...report.arms.map((a) => a.name)], [report.differences.map((d) => [d.field, ...d.values.map((v) => visible(v))])])) : null;
  return [report.runs.length > 1 ? differences || el("p", { class: "empty" }, "The runs have the same configuration.") : null,
    ...report.runs.map((run) => details(`config-${run.name}`, `${run.name}: config.yaml`, () => el("pre", { class: "config", tabindex: 0 }, run.config_yaml)))];
}

// -- the page -----------------------------------------------------------------------------------

const SECTIONS = [
  { id: "top", input: (r) => [r.title, r.facts, r.verdict, r.arms, r.runs, r.notices, r.methods], draw: drawHead },
  { id: "validation", title: "Validation", input: (r) => [r.validation, r.arms, r.runs, r.methods], draw: drawValidation },
  { id: "block-size", title: "Block size", input: (r) => [r.scores, r.settings, r.methods], draw: drawBlockSizes },
  { id: "tables", title: "Tables", input: (r) => [r.scores, r.evaluations, r.settings, r.methods], draw: drawTables },
  { id: "health", title: "Training health", input: (r) => [r.health, r.arms, r.runs, r.methods], draw: drawHealth },
  { id: "schedules", title: "Schedules", input: (r) => [r.schedules, r.methods], draw: drawSchedules },
  { id: "case-study", title: "Case study", input: (r) => [r.samples, r.schedules, r.methods], draw: drawCase },
  { id: "player", title: "Player", input: (r) => [r.samples, r.schedules, r.methods], draw: drawPlayer },
  { id: "configuration", title: "Configuration", input: (r) => [r.arms, r.runs, r.differences], draw: drawConfig },
];

function flush() {
  while (queue.length) { const now = queue; queue = []; now.forEach((draw) => draw()); }
}

function drawPage() {
  const main = document.getElementById("main");
  for (const section of SECTIONS) {
    const input = JSON.stringify(section.input(report));
    if (section.drawn === input) continue;
    section.drawn = input;
    const node = el("section", { id: section.id, class: section.title ? null : "head", "aria-label": section.title || "Summary" }, section.title ? el("h2", {}, section.title) : null, ...section.draw());
    section.node ? section.node.replaceWith(node) : main.append(node);
    section.node = node;
    flush();
  }
}

function followTheme() {
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("tstar-theme"); } catch { /* a file may be refused a memory */ }
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.setAttribute("aria-pressed", String(theme === "dark"));
  };
  const current = () => chosen || (system.matches ? "dark" : "light");
  apply(current());
  system.addEventListener("change", () => apply(current()));
  button.addEventListener("click", () => {
    chosen = current() === "dark" ? "light" : "dark";
    try { localStorage.setItem("tstar-theme", chosen); } catch { /* as above */ }
    apply(chosen);
  });
}

// The live page asks for the record again and again; only sections whose numbers changed are drawn anew.
function follow() {
  const sign = document.getElementById("live");
  let tag = "";
  sign.hidden = false;
  sign.textContent = "live";
  const ask = async () => {
    try {
      const answer = await fetch("report.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; report = await answer.json(); drawPage(); }
      sign.className = "live";
      sign.textContent = "live";
    } catch {
      sign.className = "live lost";
      sign.textContent = "server gone";
    }
    setTimeout(ask, 1500);
  };
  setTimeout(ask, 1500);
}

// On paper, responses stand whole.
addEventListener("beforeprint", () => { if (state.player) { state.beforePrint = state.player.at; stop(state.player); seek(state.player, Infinity); } });
addEventListener("afterprint", () => { if (state.player) seek(state.player, state.beforePrint); });

followTheme();
document.getElementById("nav").append(...SECTIONS.filter((s) => s.title).map((s) => el("a", { href: `#${s.id}` }, s.title)));
drawPage();
if (document.documentElement.dataset.mode === "live") follow();
})();
