// The panels: each shows one part of the status.

import { byId, bytes, count, el, milliseconds, percent, plural, rate, seconds, setText, showEach, showOr } from "./dom.js";

const POOLS = {
  prefill: { title: "Prefill pool", does: "reads prompts", nobody: "No prefill worker: decode workers read prompts themselves." },
  decode: { title: "Decode pool", does: "writes answers", nobody: "No decode worker is here, so nothing can be answered." },
};
const REASONS = {
  disaggregated: (d) => `Read by ${d.prefill}, which hands its KV over`,
  short_suffix: () => "So little of the prompt is uncached that a hand-off never pays",
  local_cheaper: () => "A hand-off would have cost more than it saves",
  no_prefill_worker: () => "No prefill worker could take it",
  adopted: () => "The worker ran it already, for a router that is gone",
};
const AFFINITIES = {
  prefix: "nobody held more of the prefix",
  cold: "nobody held any of the prefix",
  spread: "somebody held more, but waiting there cost more",
  replica: "a copy of a hot prefix was wanted here",
};
const STATES = {
  stuck: "in one step for too long",
  draining: "takes nothing new",
  avoided: "left alone after failures",
  probing: "tried again after failures",
};

function tile(list, key, title) {
  list.tiles ??= new Map();
  if (!list.tiles.has(key)) {
    const parts = { value: el("span"), unit: el("span", { class: "unit" }), more: el("dd", { class: "more" }) };
    list.append(el("div", { class: "tile" }, el("dt", {}, title), el("dd", { class: "figure" }, parts.value, parts.unit), parts.more));
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
  tile(list, "out", "Answers")(rate(recent.generation_tokens_per_s), "tokens/s", `${rate(recent.requests_per_s)} answers/s`);
  tile(list, "in", "Prompts")(rate(recent.prompt_tokens_per_s), "tokens/s", recent.cached_share === null ? "none lately" : `${percent(recent.cached_share)} from caches`);
  tile(list, "running", "Running")(count(requests.running), "", `+ ${count(requests.waiting)} waiting`);
  tile(list, "ttft", "First token")(ttft, ttftUnit, `p95 ${milliseconds(recent.ttft_p95_ms)}`);
  tile(list, "itl", "Between tokens")(itl, itlUnit, `p95 ${milliseconds(recent.itl_p95_ms)}`);
  const turnedAway = recent.refused_per_s + recent.failed_per_s;
  tile(list, "queue", "In the queue")(count(queue.requests), "", turnedAway ? `${rate(recent.refused_per_s)}/s refused, ${rate(recent.failed_per_s)}/s failed` : queue.requests ? `the first for ${seconds(queue.oldest_s)}` : "none turned away");
}

export function showPools(status) {
  setText(byId("queue"), status.processes > 1 ? `as ${status.processes} router processes see them` : "");
  showEach(byId("pools"), status.pools, (pool) => pool.role, makePool);
}

function makePool({ role }) {
  const words = POOLS[role];
  const told = el("p");
  const list = el("ul", { class: "worker-list", "aria-label": words.title });
  const body = el("div");
  const card = el("article", { class: "card pool", "data-role": role }, el("div", { class: "pool-head" }, el("h3", {}, words.title), told), body);
  card.update = (pool) => {
    const share = pool.blocks ? pool.used_blocks / pool.blocks : 0;
    setText(told, pool.workers.length ? `${plural(pool.workers.length, "worker")} · ${percent(share)} of KV in use` : words.does);
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
  const facts = el("div", { class: "facts" });
  const item = el("li", { class: "worker" }, el("div", { class: "worker-head" }, name, badge), el("div", { class: "kv" }, bar, used), facts);
  item.update = (worker) => {
    const share = worker.blocks ? worker.used_blocks / worker.blocks : 0;
    setText(name, worker.id);
    setText(badge, worker.state in STATES ? `${worker.state}: ${STATES[worker.state]}` : worker.state);
    badge.dataset.state = worker.state;
    fill.style.width = `${(share * 100).toFixed(1)}%`;
    bar.setAttribute("aria-valuenow", Math.round(share * 100));
    bar.setAttribute("aria-label", `KV cache of ${worker.id} in use`);
    setText(used, `KV ${percent(share)} of ${count(worker.blocks)} blocks`);
    showEach(facts, factsOf(worker, role), ([label]) => label, makeFact);
  };
  return item;
}

function makeFact([label]) {
  const value = el("b");
  const fact = el("span", {}, `${label} `, value);
  fact.update = ([, text]) => setText(value, text);
  return fact;
}

function factsOf(worker, role) {
  const facts = [["running", count(worker.running)], ["waiting", count(worker.waiting)]];
  if (worker.backlog_tokens) facts.push(["backlog", plural(worker.backlog_tokens, "token")]);
  if (worker.cached_blocks) facts.push(["cached", plural(worker.cached_blocks, "block")]);
  if (role === "prefill" && worker.prefill_tokens_per_s) facts.push(["reads", `${rate(worker.prefill_tokens_per_s)} tokens/s`]);
  if (role === "decode" && worker.decode_step_s) facts.push(["step", milliseconds(worker.decode_step_s * 1000)]);
  if (worker.kv_bytes_per_s) facts.push(["link", `${bytes(worker.kv_bytes_per_s)}/s`]);
  if (worker.sending) facts.push(["sending", count(worker.sending)]);
  if (worker.receiving) facts.push(["receiving", count(worker.receiving)]);
  if (worker.quarantined_blocks) facts.push(["in quarantine", plural(worker.quarantined_blocks, "block")]);
  return facts;
}

const handoffRows = el("ul", { class: "rows" });
export function showHandoffs(status) {
  const { handoffs, recent } = status;
  const more = handoffs.in_flight - handoffs.shown.length;
  const moved = recent.moved_bytes_per_s ? `${rate(recent.handoffs_per_s)}/s, ${bytes(recent.moved_bytes_per_s)}/s of KV` : "no KV moved lately";
  setText(byId("handoff-note"), more > 0 ? `${moved} · ${count(more)} more` : moved);
  const numbered = new Map();
  const keyed = handoffs.shown.map((handoff) => {
    const name = `${handoff.source}\n${handoff.target}\n${handoff.tokens}`;
    numbered.set(name, (numbered.get(name) ?? 0) + 1);
    return { ...handoff, key: `${name}\n${numbered.get(name)}` };
  });
  showOr(byId("handoff-list"), keyed.length > 0, handoffRows, "No prompt is on its way between two workers right now.");
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
  showOr(byId("prefix-list"), status.prefixes.length > 0, prefixRows, "No beginning of 256 tokens or more was asked for twice yet.");
  showEach(prefixRows, status.prefixes, (prefix) => prefix.name, makePrefix);
}

function makePrefix(prefix) {
  const told = el("span", { class: "number" });
  const holders = el("span", { class: "holders" });
  const item = el("li", { class: "prefix" }, el("code", { class: "name" }, prefix.name), told, holders);
  item.update = (now) => {
    setText(told, `${plural(now.tokens, "token")} · asked ${count(now.asked)}×`);
    const held = now.holders.length ? `held by ${now.holders.join(", ")}` : "held by nobody any more";
    setText(holders, `${held} · load ${percent(now.busy_share)}`);
  };
  return item;
}

const decisionRows = el("ol", { class: "rows" });
export function showDecisions(status) {
  showOr(byId("decision-list"), status.decisions.length > 0, decisionRows, "No request was placed yet. Ask something in the playground.");
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
  const told = [REASONS[decision.reason]?.(decision) ?? decision.reason, AFFINITIES[decision.affinity] ?? decision.affinity];
  if (cached) told.push(`${plural(cached, "token")} from caches`);
  if (decision.holder) told.push(`the rest of the prefix fetched from ${decision.holder}`);
  if (decision.rerouted.length) told.push(`after a failure read by ${decision.rerouted.join(", then ")}`);
  return `${told.join("; ")}.`;
}
