"use strict";

// Everything shown comes from /server_info and /server_info/history, asked for once a second. Text from
// the server is only ever set as text, never as HTML.

const PERIOD_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const WIDE = 900;
const NARROW = 420;

let key = sessionStorage.getItem("key") || "";
let timer = 0;
let replica = ""; // behind a shared address: the one that answered first, until it is gone

const byId = (id) => document.getElementById(id);

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function number(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  return value.toFixed(digits);
}

function percent(value) {
  return value === null || value === undefined ? "-" : `${number(100 * value, 0)} %`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// A colour per draft length, and one per position, that reads on light and dark paper.
function hue(index) {
  return `hsl(${(205 + 47 * index) % 360} 62% 50%)`;
}

function candidateColour(k) {
  return k ? hue(k - 1) : "var(--plain)";
}

// What of the history the tiles and the sentence speak of: the last seconds in which anything ran.
function recent(points, seconds) {
  const last = points.slice(-seconds);
  const rounds = sum(last.map((p) => p.rounds));
  const plain = sum(last.map((p) => p.plain_rounds));
  const accepted = sum(last.map((p) => sum(p.accepted_by_position)));
  const proposed = sum(last.map((p) => sum(p.proposed_by_position)));
  return {
    rate: last.length ? sum(last.map((p) => p.tokens_per_second)) / last.length : 0,
    rounds,
    plainShare: rounds ? plain / rounds : null,
    acceptance: proposed ? accepted / proposed : null,
    length: rounds ? 1 + accepted / rounds : null,
  };
}

function sentence(info, now) {
  const speculation = info.speculation;
  if (!now.rounds) return ["Idle: no request is being decoded.", true];
  if (now.plainShare === 1) {
    return ["Speculation is off: every token takes all " + info.model.full_loops + " loops, one by one.", true];
  }
  const k = speculation.num_speculative_tokens;
  const d = speculation.draft_loops;
  const how = k
    ? `Each round drafts ${k} token${k === 1 ? "" : "s"} with ${d} of ${info.model.full_loops} loops`
    : "This round ran without drafts";
  const saved = now.length === null ? "" : `, and ${number(now.length, 2)} tokens come of a round instead of 1`;
  const off = now.plainShare > 0.005 ? ` ${percent(now.plainShare)} of rounds run without drafts.` : "";
  return [`${how}; ${percent(now.acceptance)} of the drafts are accepted${saved}.${off}`, false];
}

function showTiles(info, now) {
  const engine = info.engine;
  byId("tokens-per-second").textContent = number(now.rate, now.rate < 100 ? 1 : 0);
  byId("accepted-length").textContent = number(now.length, 2);
  byId("acceptance").textContent = percent(now.acceptance);
  byId("running").textContent = engine.num_running;
  byId("waiting").textContent = engine.num_waiting;
  byId("cache").textContent = percent(1 - engine.num_free_blocks / engine.num_blocks);
}

// A chart of values over the points of the history; `lines` are {values, className, colour}.
function chart(holder, points, lines, top, format, strip) {
  const width = holder.clientWidth < 600 ? NARROW : WIDE;
  const height = strip ? 190 : 170;
  const left = 46;
  const bottom = height - (strip ? 44 : 24);
  const span = Math.max(points.length - 1, 1);
  const x = (index) => left + ((width - left - 8) * index) / span;
  const y = (value) => bottom - ((bottom - 10) * value) / top;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    svg.append(draw("line", { class: "axis", x1: left, x2: width - 8, y1: at, y2: at }));
    svg.append(draw("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, format(share * top)));
  }
  for (const line of lines) {
    let path = "";
    let pen = "M";
    line.values.forEach((value, index) => {
      if (value === null) {
        pen = "M";
      } else {
        path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      }
    });
    if (!path) continue;
    const attributes = { class: `stroke ${line.className || ""}`, d: path };
    if (line.colour) attributes.stroke = line.colour;
    svg.append(draw("path", attributes));
    if (line.isFilled) {
      const area = `${path}L${x(line.values.length - 1)} ${bottom}L${left} ${bottom}Z`;
      svg.prepend(draw("path", { class: "area", d: area }));
    }
  }
  if (strip) {
    const step = (width - left - 8) / Math.max(points.length, 1);
    points.forEach((point, index) => {
      if (!point.rounds) return;
      const plain = point.plain_rounds / point.rounds;
      const at = { x: left + step * index, width: step + 0.5, y: bottom + 8, height: 12 };
      const k = point.plain_rounds === point.rounds ? 0 : point.num_speculative_tokens;
      svg.append(draw("rect", { ...at, fill: candidateColour(k), opacity: k ? 1 - 0.7 * plain : 1 }));
    });
  }
  const seconds = points.length ? points[points.length - 1].time - points[0].time : 0;
  if (seconds >= 1) {
    svg.append(draw("text", { x: left, y: height - 4 }, `${number(seconds, 0)} s ago`));
    svg.append(draw("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, "now"));
  }
  svg.setAttribute("aria-label", holder.parentElement.querySelector("h2").textContent);
  holder.replaceChildren(svg);
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((n) => n * unit).find((n) => n >= value);
}

function legend(holder, entries) {
  holder.replaceChildren(
    ...entries.map(([text, colour]) => {
      const item = make("span");
      const mark = make("i");
      mark.style.background = colour;
      item.append(mark, text);
      return item;
    }),
  );
}

function showCharts(points) {
  const rates = points.map((p) => p.tokens_per_second);
  const top = niceTop(Math.max(0, ...rates));
  const speed = { values: rates, className: "speed", isFilled: true };
  chart(byId("speed-chart"), points, [speed], top, (v) => number(v, top < 10 ? 1 : 0), true);
  const lengths = new Set();
  for (const p of points) {
    if (p.rounds > p.plain_rounds && p.num_speculative_tokens) lengths.add(p.num_speculative_tokens);
    if (p.plain_rounds) lengths.add(0);
  }
  const sorted = [...lengths].sort((a, b) => a - b);
  legend(byId("candidate-legend"), sorted.map((k) => [k ? `K = ${k}` : "plain", candidateColour(k)]));

  const positions = Math.max(0, ...points.map((p) => p.proposed_by_position.length));
  const lines = [];
  for (let position = 0; position < positions; position += 1) {
    const values = points.map((p) => {
      const proposed = p.proposed_by_position[position] || 0;
      return proposed ? (p.accepted_by_position[position] || 0) / proposed : null;
    });
    if (values.some((value) => value !== null)) lines.push({ values, colour: hue(position), position });
  }
  chart(byId("acceptance-chart"), points, lines, 1, (v) => `${number(100 * v, 0)} %`, false);
  legend(byId("position-legend"), lines.map((line) => [`draft ${line.position + 1}`, line.colour]));
}

// What a score is, by policy.
const SCORES = {
  goodput: "The score is tokens per request and ms; the largest runs, unless it gains too little to move.",
  ema: "The score is the share of drafts accepted; it moves the choice up or down the list.",
  static: "The choice is fixed.",
};

function kd(candidate) {
  const k = candidate.num_speculative_tokens;
  return k ? `K = ${k}, d = ${candidate.draft_loops}` : "plain";
}

function same(a, b) {
  return a.num_speculative_tokens === b.num_speculative_tokens && a.draft_loops === b.draft_loops;
}

function bucketTable(bucket) {
  const table = make("table");
  const caption = make("caption");
  const sizes = bucket.min_batch_size === bucket.max_batch_size
    ? `Batch of ${bucket.min_batch_size}`
    : `Batch of ${bucket.min_batch_size} to ${bucket.max_batch_size}`;
  caption.append(make("b", sizes, bucket.is_active ? "active" : ""));
  if (bucket.is_active) caption.append(" (now)");
  caption.append(`: ${kd(bucket.current)}`);
  caption.append(make("span", `because: ${bucket.reason}`));
  table.append(caption);
  const head = make("tr");
  for (const title of ["candidate", "tokens", "ms", "score", ""]) head.append(make("th", title));
  table.append(head);
  const best = Math.max(...bucket.scores.map((s) => s.score || 0));
  for (const score of bucket.scores) {
    const row = make("tr", undefined, same(score.candidate, bucket.current) ? "current" : "");
    row.append(make("td", kd(score.candidate)));
    row.append(make("td", number(score.expected_tokens, 2)));
    row.append(make("td", number(score.cost_ms, 3)));
    row.append(make("td", number(score.score, 3)));
    const cell = make("td");
    const meter = make("meter");
    meter.max = best > 0 ? best : 1;
    meter.value = Math.max(0, score.score || 0);
    cell.append(meter);
    row.append(cell);
    table.append(row);
  }
  const holder = make("div", undefined, "table");
  holder.append(table);
  return holder;
}

function showBuckets(explanation) {
  const active = explanation.buckets.filter((b) => b.is_active);
  const others = explanation.buckets.filter((b) => !b.is_active);
  const holder = byId("buckets");
  const wasOpen = holder.querySelector("details")?.open ?? !active.length;
  const shown = active.map(bucketTable);
  if (others.length) {
    const details = make("details");
    details.open = wasOpen;
    details.append(make("summary", `${active.length ? "Other batch sizes" : "Batch sizes"} (${others.length})`));
    details.append(...others.map(bucketTable));
    shown.push(details);
  }
  holder.replaceChildren(...shown);
  byId("score-note").textContent = `K drafts of d loops each. ${SCORES[explanation.policy] || ""}`;
  byId("notes").replaceChildren(...explanation.notes.map((note) => make("li", note)));
}

function showCounts(speculation, explanation) {
  const controller = speculation.controller;
  const entries = [["policy", speculation.policy], ["rounds of requests", speculation.num_rounds]];
  if (controller) {
    const share = controller.plans ? controller.off_rounds / controller.plans : null;
    entries.push(["off", `${percent(share)} of rounds`]);
    entries.push(["probes", controller.probe_rounds], ["switches", controller.num_switches]);
  }
  byId("counts").replaceChildren(
    ...entries.map(([name, value]) => {
      const item = make("div");
      item.append(make("dt", name), make("dd", value));
      return item;
    }),
  );
  const holder = byId("switches");
  if (!controller || !controller.switches.length) {
    holder.replaceChildren(make("p", controller ? "None yet." : "The same K and d always run.", "note"));
    return;
  }
  const table = make("table");
  const head = make("tr");
  for (const [title, kind] of [["round", ""], ["batch", ""], ["from", ""], ["to", ""], ["why", "text"]]) {
    head.append(make("th", title, kind));
  }
  table.append(head);
  for (const one of controller.switches.slice(-12).reverse()) {
    const bucket = explanation.buckets[one.bucket];
    const row = make("tr");
    const pair = ([k, d]) => (k ? `K = ${k}, d = ${d}` : "plain");
    row.append(make("td", one.plan_id));
    row.append(make("td", bucket ? `${bucket.min_batch_size}-${bucket.max_batch_size}` : one.bucket));
    row.append(make("td", pair(one.previous)), make("td", pair(one.candidate)));
    row.append(make("td", one.reason, "text"));
    table.append(row);
  }
  const scroll = make("div", undefined, "table");
  scroll.append(table);
  holder.replaceChildren(scroll);
}

function show(info, history) {
  byId("model").textContent = info.models[0];
  document.title = `${info.models[0]} - looped-spec`;
  if (!info.engine) {
    state(info.stage, info.stage !== "loading");
    return;
  }
  const place = `${info.model.device}, ${info.model.dtype}, ${info.model.full_loops} loops`;
  const which = info.replica ? ` - replica ${info.replica}` : "";
  state(`${info.stage} - ${place}${which} - up ${number(info.uptime_seconds / 60, 0)} min`, info.stage !== "ready");
  byId("content").hidden = false;
  const now = recent(history.points, 5);
  const [text, isOff] = sentence(info, now);
  byId("sentence").textContent = text;
  document.querySelector(".headline").classList.toggle("off", isOff);
  showTiles(info, now);
  showCharts(history.points);
  showBuckets(info.speculation.explanation);
  showCounts(info.speculation, info.speculation.explanation);
}

function state(text, isBad) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", Boolean(isBad));
}

async function ask(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Error("key");
  if (answer.status === 404) replica = "";
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

function query() {
  return replica ? `?replica=${encodeURIComponent(replica)}` : "";
}

async function poll() {
  try {
    const info = await ask(`server_info${query()}`);
    replica = info.replica || "";
    const history = await ask(`server_info/history${query()}`);
    byId("key").hidden = true;
    show(info, history);
  } catch (error) {
    if (error.message === "key") {
      byId("key").hidden = false;
      byId("content").hidden = true;
      state(key ? "that key is not valid" : "a key is needed", Boolean(key));
      return;
    }
    state(`no answer from the server (${error.message})`, true);
  }
  timer = setTimeout(poll, PERIOD_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = event.target.querySelector("input").value;
  sessionStorage.setItem("key", key);
  clearTimeout(timer);
  poll();
});

poll();
