// The panels: each shows one part of the status.

import { byId, bytes, count, el, milliseconds, percent, plural, rate, seconds, setText, showEach, showOr } from "./dom.js";

const POOLS = {
  prefill: { title: "Prefill pool", does: "computes prompts", nobody: "No prefill worker: decode workers compute prompts themselves." },
  decode: { title: "Decode pool", does: "generates tokens", nobody: "No decode worker: no request can be served." },
};
const REASONS = {
  disaggregated: (d) => `Prefill on ${d.prefill}, then a KV hand-off`,
  short_suffix: () => "Too few uncached prompt tokens for a hand-off to pay off",
  local_cheaper: () => "A hand-off was predicted to cost more than it saves",
  no_prefill_worker: () => "No prefill worker could take it",
  adopted: () => "Already running there, taken over from another router",
};
const AFFINITIES = {
  prefix: "no other worker has more of the prefix cached",
  cold: "no worker has any of the prefix cached",
  spread: "another worker has more of it cached, but the wait there would cost more",
  replica: "placed here to copy a hot prefix",
};
const STATES = {
  stuck: "one step is taking too long",
  draining: "takes no new requests",
  avoided: "circuit breaker open",
  probing: "circuit breaker half-open",
};
// Over which time the router computes them: rates over the last steps of the curves, the rest over a minute.
const NOW = "now";
const RATES = "last 10 s";
const LATENCIES = "last minute";

function tile(list, key, title, over) {
  list.tiles ??= new Map();
  if (!list.tiles.has(key)) {
    const parts = { value: el("span"), unit: el("span", { class: "unit" }), more: el("dd", { class: "more" }) };
    list.append(el("div", { class: "tile" }, el("dt", {}, el("span", {}, title), " ", el("span", { class: "window" }, over)), el("dd", { class: "figure" }, parts.value, parts.unit), parts.more));
    list.tiles.set(key, parts);
  }
  return (value, unit, more) => {
    const parts = list.tiles.get(key);
    setText(parts.value, value);
    setText(parts.unit, unit);
    setText(parts.more, more);
  };
}

export function showTiles(status) {
  const { recent, requests, queue } = status;
  const list = byId("tiles");
  const [ttft, ttftUnit = ""] = milliseconds(recent.ttft_p50_ms).split(" ");
  const [itl, itlUnit = ""] = milliseconds(recent.itl_p50_ms).split(" ");
  tile(list, "out", "Generation", RATES)(rate(recent.generation_tokens_per_s), "tokens/s", `${rate(recent.requests_per_s)} requests/s finished`);
  tile(list, "in", "Prompts", RATES)(rate(recent.prompt_tokens_per_s), "tokens/s", recent.cached_share === null ? "none (1\u00a0min)" : `${percent(recent.cached_share)} cached (1\u00a0min)`);
  tile(list, "running", "Requests", NOW)(count(requests.running), "running", `${count(requests.waiting)} waiting`);
  tile(list, "ttft", "Time to first token", LATENCIES)(ttft, ttftUnit && `${ttftUnit} p50`, `p95 ${milliseconds(recent.ttft_p95_ms)}`);
  tile(list, "itl", "Inter-token latency", LATENCIES)(itl, itlUnit && `${itlUnit} p50`, `p95 ${milliseconds(recent.itl_p95_ms)}`);
  const turnedAway = recent.refused_per_s + recent.failed_per_s;
  tile(list, "queue", "Router queue", NOW)(count(queue.requests), queue.requests === 1 ? "request" : "requests", turnedAway ? `${rate(recent.refused_per_s)}/s refused, ${rate(recent.failed_per_s)}/s failed (10\u00a0s)` : queue.requests ? `oldest waits ${seconds(queue.oldest_s)}` : "none refused (10\u00a0s)");
}

export function showPools(status) {
  setText(byId("queue"), status.processes > 1 ? `as ${status.processes} router processes see them` : "");
  showEach(byId("pools"), status.pools, (pool) => pool.role, makePool);
}

function makePool({ role }) {
  const words = POOLS[role];
  const summary = el("p");
  const list = el("ul", { class: "worker-list", "aria-label": words.title });
  const body = el("div");
  const card = el("article", { class: "card pool", "data-role": role }, el("div", { class: "pool-head" }, el("h3", {}, words.title), summary), body);
  card.update = (pool) => {
    const share = pool.blocks ? pool.used_blocks / pool.blocks : 0;
    setText(summary, pool.workers.length ? `${plural(pool.workers.length, "worker")} · ${percent(share)} of KV in use` : words.does);
    showOr(body, pool.workers.length > 0, list, words.nobody);
    showEach(list, pool.workers, (worker) => worker.id, () => makeWorker(role));
    if (list.scrollHeight > list.clientHeight + 1) list.tabIndex = 0;
    else list.removeAttribute("tabindex");
  };
  return card;
}

function makeWorker(role) {
  const name = el("span", { class: "name" });
  const badge = el("span", { class: "badge" });
  const fill = el("div");
  const bar = el("div", { class: "bar", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, fill);
  const used = el("span", { class: "number" });
  const facts = el("tbody");
  const table = el("table", { class: "facts" }, facts);
  const item = el("li", { class: "worker" }, el("div", { class: "worker-head" }, name, badge), el("div", { class: "kv" }, bar, used), table);
  item.update = (worker) => {
    const share = worker.blocks ? worker.used_blocks / worker.blocks : 0;
    setText(name, worker.id);
    setText(badge, worker.state in STATES ? `${worker.state}: ${STATES[worker.state]}` : worker.state);
    badge.dataset.state = worker.state;
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    bar.setAttribute("aria-valuenow", Math.round(share * 100));
    bar.setAttribute("aria-label", `KV cache of ${worker.id} in use`);
    setText(used, `KV ${percent(share)} of ${count(worker.blocks)} blocks`);
    table.setAttribute("aria-label", `Metrics of ${worker.id}`);
    showEach(facts, pairs(factsOf(worker, role)), (row) => row.map(([label]) => label).join("\n"), makeFacts);
  };
  return item;
}

// Rows of two, so that the table is no longer than it must be.
function pairs(facts) {
  return facts.flatMap((_, i) => (i % 2 ? [] : [facts.slice(i, i + 2)]));
}

function makeFacts(row) {
  const values = row.map(() => el("td"));
  const made = el("tr", {}, row.flatMap(([label], i) => [el("th", { scope: "row" }, label), values[i]]));
  made.update = (now) => now.forEach(([, text], i) => setText(values[i], text));
  return made;
}

// The same rows for every worker, so that nothing jumps when KV moves; what is rare comes after them.
function factsOf(worker, role) {
  const speed = role === "prefill"
    ? ["Prefill", worker.prefill_tokens_per_s ? `${rate(worker.prefill_tokens_per_s)} tokens/s` : "–"]
    : ["Step", worker.decode_step_s ? milliseconds(worker.decode_step_s * 1000) : "–"];
  const rare = worker.quarantined_blocks ? [["Quarantined", plural(worker.quarantined_blocks, "block")]] : [];
  if (worker.rack) rare.push(["Rack", worker.rack]);
  return [
    ["Running", count(worker.running)],
    ["Waiting", count(worker.waiting)],
    ["Backlog", plural(worker.backlog_tokens, "token")],
    ["Cached", plural(worker.cached_blocks, "block")],
    speed,
    ["KV link", worker.kv_bytes_per_s ? `${bytes(worker.kv_bytes_per_s)}/s` : "–"],
    ["Sending", count(worker.sending)],
    ["Receiving", count(worker.receiving)],
    ...rare,
  ];
}

const handoffRows = el("ul", { class: "rows" });
export function showHandoffs(status) {
  const { handoffs, recent } = status;
  const more = handoffs.in_flight - handoffs.shown.length;
  const moved = recent.moved_bytes_per_s ? `${rate(recent.handoffs_per_s)}/s, ${bytes(recent.moved_bytes_per_s)}/s of KV (last 10 s)` : "no KV moved (last 10 s)";
  setText(byId("handoff-note"), more > 0 ? `${moved} · ${count(more)} more` : moved);
  const numbered = new Map();
  const keyed = handoffs.shown.map((handoff) => {
    const name = `${handoff.source}\n${handoff.target}\n${handoff.tokens}`;
    numbered.set(name, (numbered.get(name) ?? 0) + 1);
    return { ...handoff, key: `${name}\n${numbered.get(name)}` };
  });
  showOr(byId("handoff-list"), keyed.length > 0, handoffRows, "No hand-off is in flight.");
  showEach(handoffRows, keyed, (handoff) => handoff.key, makeHandoff);
}

function makeHandoff(handoff) {
  const age = el("span", { class: "number" });
  const way = el("span", { class: "way" }, el("span", { class: "name" }, handoff.source), el("span", { class: "arrow", "aria-hidden": "true" }, "→"), el("span", { class: "hidden" }, "to"), el("span", { class: "name" }, handoff.target));
  const item = el("li", { class: "handoff" }, way, el("span", { class: "number" }, plural(handoff.tokens, "token")), age);
  item.update = (now) => setText(age, seconds(now.age_s));
  return item;
}

const prefixRows = el("ol", { class: "rows" });
export function showPrefixes(status) {
  showOr(byId("prefix-list"), status.prefixes.length > 0, prefixRows, "No prefix of 256 tokens or more was requested twice yet.");
  showEach(prefixRows, status.prefixes, (prefix) => prefix.name, makePrefix);
}

function makePrefix(prefix) {
  const counts = el("span", { class: "number" });
  const holders = el("span", { class: "holders" });
  const item = el("li", { class: "prefix" }, el("code", { class: "name" }, prefix.name), counts, holders);
  item.update = (now) => {
    setText(counts, `${plural(now.tokens, "token")} · ${plural(now.asked, "request")}`);
    const held = now.holders.length ? `cached on ${now.holders.join(", ")}` : "no longer cached anywhere";
    setText(holders, `${held} · load ${percent(now.busy_share)}`);
  };
  return item;
}

const decisionRows = el("ol", { class: "rows" });
export function showDecisions(status) {
  showOr(byId("decision-list"), status.decisions.length > 0, decisionRows, "No request was placed yet. Send a prompt in the playground.");
  showEach(decisionRows, status.decisions, (decision) => decision.request_id, makeDecision);
}

function makeDecision(decision) {
  const age = el("span", { class: "age" });
  const what = el("span", { class: "what" });
  const why = el("span", { class: "why" });
  const item = el("li", { class: "decision" }, age, what, el("span", { class: "number" }, `${milliseconds(decision.predicted_ms)} predicted`), why, el("code", { class: "id" }, decision.request_id.slice(0, 8)));
  item.update = (now) => {
    setText(age, now.age_s < 1 ? "just now" : `${seconds(now.age_s)} ago`);
    const way = now.prefill ? `${now.prefill} → ${now.decode}` : now.decode;
    setText(what, `${plural(now.tokens, "token")} to ${way}`);
    setText(why, reasonOf(now));
  };
  return item;
}

function reasonOf(decision) {
  const cached = decision.actual_cached ?? decision.predicted_cached;
  const reasons = [REASONS[decision.reason]?.(decision) ?? decision.reason, AFFINITIES[decision.affinity] ?? decision.affinity];
  if (cached) reasons.push(`${plural(cached, "token")} cached`);
  if (decision.holder) reasons.push(`the rest of the prefix fetched from ${decision.holder}`);
  if (decision.rerouted.length) reasons.push(`after a failure, prefill on ${decision.rerouted.join(", then ")}`);
  return `${reasons.join("; ")}.`;
}
