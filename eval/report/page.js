"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);
const space = find("chart").namespaceURI;

// What is shown, and what the address says: a link to a point is a link to its replay.
const state = { view: "all tasks", rate: Object.keys(data.rates)[0], method: null, task: null, sample: 0, step: null, colour: "step", cell: "score", sort: "score", down: true };
for (const part of location.hash.slice(1).split("&")) {
  let key, value;
  try { [key, value] = part.split("=").map(decodeURIComponent); } catch { continue; }  // an address that was cut
  if (key in state && value !== undefined) state[key] = ["method", "sample", "step"].includes(key) ? Number(value) : value;
}
if (!(state.view in data.views)) state.view = "all tasks";
if (!(state.rate in data.rates)) state.rate = Object.keys(data.rates)[0];
if (!Object.keys(data.views[state.view].figures).length) state.view = Object.keys(data.views).find(name => Object.keys(data.views[name].figures).length);
if (!data.methods[state.method]) state.method = first();

function first() {
  const view = data.views["all tasks"], names = Object.keys(view.figures).map(Number);
  if (!names.length) return 0;
  const top = (view.figures[data.reference]?.score ?? Math.max(...names.map(name => view.figures[name].score))) - 0.01, rate = Object.keys(data.rates)[0];
  const good = names.filter(name => view.figures[name].score >= top);
  return (good.length ? good : names).reduce((a, b) => view.figures[b][rate] > view.figures[a][rate] ? b : a);
}

function remember() {
  const kept = ["view", "rate", "method", "task", "sample", "step", "colour"].filter(key => state[key] !== null);
  history.replaceState(null, "", "#" + kept.map(key => `${key}=${encodeURIComponent(state[key])}`).join("&"));
}

function element(name, attributes, text, parent) {
  const made = parent && parent.namespaceURI === space ? document.createElementNS(space, name) : document.createElement(name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined && text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function options(id, choices, chosen, change) {
  const select = find(id);
  select.replaceChildren();
  for (const [value, text] of choices) element("option", { value }, text, select).selected = String(value) === String(chosen);
  select.onchange = () => change(select.value);
}

const percent = value => (100 * value).toFixed(1);
function say(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}

// Charts: x on a log scale, the score in %.
function frame(svg, width, height, xs, title, least = 0) {
  svg.replaceChildren();
  const left = 52, right = 24, top = 14, bottom = 44, known = xs.filter(x => x > 0);
  const low = Math.log2(Math.min(...known)) - 0.4, high = Math.log2(Math.max(...known)) + 0.6;
  const place = (x, y) => [left + (width - left - right) * (Math.log2(x) - low) / (high - low), height - bottom - (height - top - bottom) * (Math.max(y, least) - least) / (1 - least)];
  for (let y = 100 * least; y <= 100; y += least > 0.4 ? 10 : 20) {
    const [, at] = place(known[0], y / 100);
    element("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }, null, svg);
    element("text", { x: left - 8, y: at + 4, "text-anchor": "end", class: "dim" }, y, svg);
  }
  for (let x = Math.ceil(low); x <= high; x++) {
    const [at] = place(2 ** x, 0);
    element("line", { x1: at, x2: at, y1: top, y2: height - bottom, class: "grid" }, null, svg);
    element("text", { x: at, y: height - bottom + 18, "text-anchor": "middle", class: "dim" }, say(2 ** x), svg);
  }
  element("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, title, svg);
  element("text", { x: 14, y: height / 2, transform: `rotate(-90 14 ${height / 2})`, "text-anchor": "middle" }, "score, %", svg);
  return place;
}

function lines(svg, place, figures, rate, kind) {
  const families = {};
  for (const [name, one] of Object.entries(figures)) (families[data.methods[name].family] ??= []).push([one[rate], one.score]);
  for (const [family, points] of Object.entries(families)) {
    if (points.length < 2) continue;
    const path = points.sort((a, b) => a[0] - b[0]).map(point => place(...point).join(" ")).join(" L");
    element("title", {}, family, element("path", { d: "M" + path, class: "join " + kind }, null, svg));
  }
}

function dot(svg, place, name, one, rate, kind) {
  const [x, y] = place(one[rate], one.score);
  const made = element("circle", { cx: x, cy: y, r: 5, class: kind, tabindex: 0 }, null, svg);
  if (Number(name) === state.method) made.classList.add("chosen");
  if (place(one[rate], one.score)[1] === place(one[rate], 0)[1] && one.score > 0) made.classList.add("under");
  element("title", {}, `${data.methods[name].label}: ${percent(one.score)} % [${percent(one.score_low)}, ${percent(one.score_high)}], n = ${one.samples}, ${say(one[rate])} ${data.rates[rate]}`, made);
  made.onclick = () => choose(Number(name));
  made.onkeydown = event => { if (event.key === "Enter") choose(Number(name)); };
  return [x, y];
}

function label(svg, x, y, text, kind, taken) {
  const width = 6.6 * text.length;
  const spots = [[9, 4], [-9 - width, 4], [-width / 2, -10], [-width / 2, 20], [9, -12], [9, 20], [-9 - width, -12], [-9 - width, 20], [9, 36], [9, 52], [-9 - width, 36], [-9 - width, 52], [9, 68], [-9 - width, 68]];
  const free = spots.find(([dx, dy]) => x + dx > 52 && x + dx + width < 955 && y + dy > 12 && !taken.some(box => x + dx < box[2] && x + dx + width > box[0] && y + dy - 11 < box[3] && y + dy + 3 > box[1]));
  if (!free) return;
  const [dx, dy] = free;
  taken.push([x + dx, y + dy - 11, x + dx + width, y + dy + 3]);
  element("text", { x: x + dx, y: y + dy, class: "halo " + kind }, text, svg);
}

function chart() {
  const svg = find("chart"), view = data.views[state.view], rate = state.rate;
  const figures = view.figures, names = Object.keys(figures), edge = new Set(view.front[rate].map(String));
  svg.replaceChildren();
  if (!names.length) { element("text", { x: 40, y: 40 }, "no configuration was run on all of these tasks", svg); return; }
  const star = rate === "answer_tokens_per_forward" ? view.oracle : null;
  // What is much worse than the front lies on the lower edge, so that the front has room.
  const least = Math.max(0, Math.floor(5 * (Math.min(...[...edge].map(name => figures[name].score)) - 0.1)) / 5);
  const place = frame(svg, 960, 470, [...names.map(name => figures[name][rate]), ...(star ? [star[0]] : [])], data.rates[rate], least);
  lines(svg, place, figures, rate, "");
  const front = [...edge].sort((a, b) => figures[a][rate] - figures[b][rate]);
  let path = "", before = null;
  for (const name of front) {
    const [x, y] = place(figures[name][rate], figures[name].score);
    path += before === null ? `M${x} ${y}` : ` V${y} H${x}`;
    before = name;
    const [, high] = place(figures[name][rate], figures[name].score_high), [, low] = place(figures[name][rate], figures[name].score_low);
    element("line", { x1: x, x2: x, y1: high, y2: low, class: "bar" }, null, svg);
  }
  element("path", { d: path, class: "front" }, null, svg);
  const taken = [], spots = {};
  for (const name of names.filter(name => !edge.has(name)).concat(front)) {
    const [x, y] = spots[name] = dot(svg, place, name, figures[name], rate, edge.has(name) ? "best" : "plain");
    taken.push([x - 5, y - 5, x + 5, y + 5]);
  }
  if (star) {
    const [x, y] = place(...star);
    element("text", { x: x, y: y + 8, "text-anchor": "middle", class: "bound" }, "★", svg);
    taken.push([x - 10, y - 10, x + 10, y + 10]);
    label(svg, x, y, "oracle", "", taken);
  }
  for (const name of front) label(svg, ...spots[name], data.methods[name].label, "best", taken);
  if (figures[state.method] && !edge.has(String(state.method))) label(svg, ...spots[state.method], data.methods[state.method].label, "", taken);
}

function groups() {
  const low = data.views["low dependency"], high = data.views["high dependency"];
  const none = !low || !high || !Object.keys(low.figures).length || !Object.keys(high.figures).length;
  find("dependency").hidden = none;
  if (none) return;
  const rate = "canvas_tokens_per_forward", svg = find("groups");
  const all = [...Object.values(low.figures), ...Object.values(high.figures)];
  const place = frame(svg, 960, 420, all.map(one => one[rate]), data.rates[rate]);
  for (const [view, kind, dots] of [[low, "low", "low"], [high, "high", "best"]]) {
    lines(svg, place, view.figures, rate, kind);
    for (const name in view.figures) dot(svg, place, name, view.figures[name], rate, dots);
  }
  element("text", { x: 64, y: 350, class: "low" }, "● low: " + low.tasks.join(", "), svg);
  element("text", { x: 64, y: 368, class: "best" }, "● high: " + high.tasks.join(", "), svg);
}

// One configuration and its replays.
function choose(name) {
  state.method = name;
  state.sample = 0;
  state.step = null;
  draw();
  find("one").scrollIntoView({ behavior: "smooth", block: "nearest" });
}

let timer = null;
function pause() { clearInterval(timer); timer = null; find("play").textContent = "▶ play"; }

function one() {
  const method = data.methods[state.method], tasks = data.tasks.filter(task => task in method.runs);
  if (!(state.task in method.runs)) state.task = tasks.find(task => method.runs[task].replays.some(replay => replay.score < 1)) ?? tasks[0];
  const run = method.runs[state.task];
  find("name").textContent = method.label;
  find("config").textContent = method.config + "\n\n" + run.name;
  options("task", tasks.map(task => [task, task]), state.task, task => { Object.assign(state, { task, sample: 0, step: null }); one(); remember(); });
  options("sample", run.replays.map((replay, at) => [at, `${replay.index}: ${replay.score >= 1 ? "right" : "score " + say(replay.score)}`]), state.sample, at => { Object.assign(state, { sample: Number(at), step: null }); one(); remember(); });
  find("colour").value = state.colour;
  find("colour").onchange = () => { state.colour = find("colour").value; canvas(); remember(); };
  pause();
  if (!run.replays[state.sample]) state.sample = 0;
  const replay = run.replays[state.sample];
  for (const id of ["play", "step"]) find(id).disabled = !replay;
  if (!replay) { find("canvas").textContent = "no sample of this run was kept"; find("prompt").textContent = find("verdict").textContent = ""; return; }
  const last = Math.max(replay.nfe, ...replay.steps.map(step => step + 1), ...replay.revisions.map(event => event[0] + 1));
  if (state.step === null || state.step > last) state.step = last;
  const slider = find("step");
  slider.max = last;
  slider.oninput = () => { pause(); state.step = Number(slider.value); canvas(); remember(); };
  find("play").onclick = () => {
    if (timer) return pause();
    if (state.step >= last) state.step = 0;
    find("play").textContent = "❚❚ pause";
    timer = setInterval(() => {
      if (state.step >= last) { pause(); remember(); return; }
      state.step++;
      canvas();
    }, Math.min(600, 6000 / last));
    canvas();
  };
  canvas();
}

// The canvas after so many forwards: what stands was committed before, unless something else stood there in between.
function after(replay, step) {
  const shown = replay.steps.map((at, place) => at >= 0 && at < step ? { piece: replay.pieces[place], at } : null);
  const events = replay.revisions.filter(event => event[0] < step).sort((a, b) => a[0] - b[0]);
  for (const [at, place, piece] of events) if (!(replay.steps[place] >= 0 && replay.steps[place] < step)) shown[place] = piece === null ? null : { piece, at };
  return shown;
}

function canvas() {
  const replay = data.methods[state.method].runs[state.task].replays[state.sample], box = find("canvas"), last = Number(find("step").max);
  if (!replay) return;
  box.replaceChildren();
  after(replay, state.step).forEach((token, place) => {
    const made = element("span", {}, token ? token.piece.replaceAll("\n", "⏎\n") : "░░", box);
    if (place >= replay.answer) made.classList.add("behind");
    if (!token) { made.className = "noise"; made.title = `position ${place}: noise`; return; }
    const sure = replay.confidence[place], stands = token.at === replay.steps[place];
    const part = state.colour === "step" ? token.at / Math.max(1, last - 1) : stands ? sure : 0.5;
    const hue = state.colour === "step" ? 250 - 220 * part : 10 + 130 * part;
    made.style.background = `hsl(${hue} 70% var(--hue-light))`;
    if (token.at === state.step - 1) made.classList.add("now");
    made.title = `position ${place}, forward ${token.at + 1}` + (!stands ? ", taken back later" : sure === null ? "" : `, confidence ${sure}`);
  });
  find("step").value = state.step;
  find("at").textContent = `forward ${state.step} of ${last}`;
  find("prompt").textContent = replay.prompt;
  find("verdict").textContent = `Sample ${replay.index}: score ${say(replay.score)}, ${replay.nfe} forwards` + (replay.oracle === null ? "" : `, ${replay.oracle} with perfect knowledge of this answer`) + (replay.text === null ? "" : `. Answer: ${replay.text}`);
}

// Tables.
function rows(table, head, body) {
  table.replaceChildren();
  const top = element("tr", {}, null, element("thead", {}, null, table));
  for (const [text, title, click] of head) {
    const cell = element("th", { scope: "col", title: title || "" }, text, top);
    if (click) { cell.onclick = click; cell.tabIndex = 0; cell.onkeydown = event => { if (event.key === "Enter") click(); }; }
  }
  const bottom = element("tbody", {}, null, table);
  for (const [cells, name, kind] of body) {
    const row = element("tr", { class: (kind || "") + (name === state.method ? " chosen" : "") }, null, bottom);
    if (name !== null) row.onclick = () => choose(name);
    for (const cell of cells) row.append(cell instanceof Node ? cell : element("td", {}, say(cell)));
  }
}

function heat() {
  const shown = ["score", "oracle_share", "answer_tokens_per_forward"], titles = { score: "score, %", oracle_share: "share of the oracle, %", answer_tokens_per_forward: "tokens per forward" };
  options("cell", shown.map(name => [name, titles[name]]), state.cell, name => { state.cell = name; heat(); });
  const order = data.methods.map((_, name) => name).sort((a, b) => (data.views["all tasks"].figures[b]?.score ?? -1) - (data.views["all tasks"].figures[a]?.score ?? -1));
  const figure = (name, task) => (data.views[task] ?? data.views["all tasks"]).figures[name]?.[state.cell];
  const most = state.cell === "answer_tokens_per_forward" ? Math.max(...order.flatMap(name => data.tasks.map(task => figure(name, task) ?? 0))) : 1;
  rows(find("heat"), [["configuration"], ...data.tasks.map(task => [task])], order.map(name => [[data.methods[name].label, ...data.tasks.map(task => {
    const value = figure(name, task), cell = element("td", { class: "cell" });
    if (value === undefined || value === null) return cell;
    cell.textContent = most === 1 ? (100 * value).toFixed(0) : say(value);
    cell.style.background = `hsl(${10 + 120 * Math.min(1, value / most)} 65% 68%)`;
    cell.onclick = event => { event.stopPropagation(); state.task = task; choose(name); };
    return cell;
  })], name]));
}

function table() {
  const view = data.views[state.view], edge = new Set(view.front[state.rate]);
  const columns = [{ name: "label", title: "configuration", about: "" }, { name: "samples", title: "n", about: "samples" }, { name: "score", title: "score, %", about: "mean over tasks" }, { name: "interval", title: "95 %", about: "interval of the score" }, ...data.measures];
  const value = (name, column) => column === "label" ? data.methods[name].label : column === "interval" ? view.figures[name].score_high - view.figures[name].score_low : view.figures[name][column];
  const names = Object.keys(view.figures).map(Number).sort((a, b) => {
    const [x, y] = [value(a, state.sort), value(b, state.sort)], sign = state.down ? -1 : 1;
    if (x === null || y === null) return (x === null) - (y === null);
    return x < y ? -sign : x > y ? sign : a - b;
  });
  const head = columns.map(({ name, title, about }) => [title + (state.sort === name ? (state.down ? " ▾" : " ▴") : ""), about, () => { state.down = state.sort === name ? !state.down : name !== "label"; state.sort = name; table(); }]);
  find("csv").href = "data:text/csv;charset=utf-8," + encodeURIComponent(csv(names, view.figures));
  rows(find("table"), head, names.map(name => {
    const one = view.figures[name];
    return [columns.map(({ name: column, range }) => column === "score" ? percent(one.score) : column === "interval" ? `${percent(one.score_low)} to ${percent(one.score_high)}` : range && one[column] !== null ? `${say(one[column])} [${say(one[`${column}_low`])}, ${say(one[`${column}_high`])}]` : value(name, column)), name, edge.has(name) ? "best" : ""];
  }));
}

// The same figures as a CSV file, in full precision of the page, in the order of the table.
function csv(names, figures) {
  const columns = [...new Set(["samples", "score", "score_low", "score_high", ...data.measures.flatMap(({ name, range }) => range ? [name, `${name}_low`, `${name}_high`] : [name])])];
  const cell = value => value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
  const lines = names.map(name => [data.methods[name].label, ...columns.map(column => figures[name][column])]);
  return [["configuration", ...columns], ...lines].map(line => line.map(cell).join(",") + "\n").join("");
}

function families() {
  find("families").hidden = !data.families.length;
  if (!data.families.length) return;
  const keys = [...new Set(data.families.flatMap(row => Object.keys(row)))];
  rows(find("curves"), keys.map(key => [key]), data.families.map(row => [keys.map(key => row[key] ?? ""), null]));
}

function draw() {
  options("view", Object.keys(data.views).map(name => [name, name]), state.view, view => { state.view = view; draw(); });
  options("rate", Object.entries(data.rates), state.rate, rate => { state.rate = rate; draw(); });
  chart(); one(); groups(); heat(); table(); families(); remember();
}

find("theme").onclick = () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
};
draw();
document.body.dataset.ready = "yes";
