// The page: keeps one stream of statuses, shows each, says when it has none, and asks for a key where one is needed.

import { Chart } from "./charts.js";
import { byId, milliseconds, rate, setText } from "./dom.js";
import { headersFor, readEvents } from "./feed.js";
import { showDecisions, showHandoffs, showPools, showPrefixes, showTiles } from "./panels.js";
import { Playground } from "./playground.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 10;
const SILENCE_MS = 6000;
const SHORTEST_MS = 3000;
const HIDDEN_MS = 30000;

// In this page's memory alone: no storage, no address, no cookie.
let apiKey = "";
let stream = null;
let waitS = FIRST_WAIT_S;
let lastMs = null;
let countdown = null;
let refused = "";

const latency = (title, name, hue) => ({
  title,
  unit: "milliseconds",
  format: milliseconds,
  axisFormat: (value) => milliseconds(value).replace(".0 ", " "),
  nothing: "No requests in the last 5 minutes",
  lines: [
    { key: `${name}_p50_ms`, name: "p50", hue },
    { key: `${name}_p95_ms`, name: "p95", hue, dashed: true },
  ],
});
const charts = [
  new Chart(byId("chart-ttft"), latency("Time to first token", "ttft", "prefill")),
  new Chart(byId("chart-itl"), latency("Inter-token latency", "itl", "decode")),
  new Chart(byId("chart-rate"), {
    title: "Throughput",
    unit: "tokens per second",
    format: (value) => `${rate(value)}/s`,
    axisFormat: rate,
    emptyIsZero: true,
    nothing: "No tokens in the last 5 minutes",
    lines: [
      { key: "generation_tokens_per_s", name: "generation", hue: "decode", fill: true },
      { key: "prompt_tokens_per_s", name: "prompt", hue: "prefill", dashed: true },
    ],
  }),
];
const playground = new Playground({ keyOf: () => apiKey, onKeyNeeded: () => askForKey("") });

function show(status) {
  lastMs = Date.now();
  waitS = FIRST_WAIT_S;
  refused = "";
  playground.model = status.model.name;
  setText(byId("model"), status.model.name);
  document.title = `Tandem · ${status.model.name}`;
  setText(byId("made"), `Last status: ${new Date(status.at_ms).toLocaleTimeString()}`);
  byId("not-ready").hidden = status.not_ready === null;
  setText(byId("not-ready"), status.not_ready === null ? "" : `Not ready: ${status.not_ready}.`);
  setLink("live", "Live");
  byId("lost").hidden = true;
  byId("figures").dataset.stale = "false";
  showTiles(status);
  for (const chart of charts) chart.show(status.curves);
  showPools(status);
  showHandoffs(status);
  showPrefixes(status);
  showDecisions(status);
}

function setLink(state, text) {
  byId("link").dataset.state = state;
  setText(byId("link-text"), text);
}

async function listen() {
  clearInterval(countdown);
  stream?.abort();
  const mine = (stream = new AbortController());
  if (lastMs === null) setLink("waiting", "Connecting");
  const startedMs = Date.now();
  let reason = "the router ended the stream";
  let wait = null;
  try {
    await readEvents("/status/events", { headers: headersFor(apiKey), signal: mine.signal }, show);
    // A stream has its end every few minutes, at which the key is shown again.
    if (mine === stream && Date.now() - startedMs > SHORTEST_MS) return listen();
  } catch (error) {
    if (mine !== stream || error.name === "AbortError") return;
    if (error.status === 401) return askForKey(apiKey ? "Unknown API key." : "");
    reason = error.status ? error.message : "no connection";
    wait = error.retryAfter ?? null;
  }
  if (mine === stream) lost(reason, wait);
}

function lost(reason, retryAfter) {
  stream?.abort();
  stream = null;
  setLink("lost", "Disconnected");
  byId("figures").dataset.stale = "true";
  const since = lastMs === null ? "" : ` Last update: ${new Date(lastMs).toLocaleTimeString()}.`;
  refused = `No status: ${reason}.${since}`;
  let left = Math.max(waitS, retryAfter ?? 0);
  waitS = Math.min(LONGEST_WAIT_S, waitS * 2);
  byId("lost").hidden = false;
  // The sentence alone is an alert: a countdown that is read out every second helps nobody.
  setText(byId("lost-text"), refused);
  clearInterval(countdown);
  setText(byId("retry"), `Retry now (${left} s)`);
  countdown = setInterval(() => {
    left -= 1;
    setText(byId("retry"), left > 0 ? `Retry now (${left} s)` : "Retrying …");
    if (left <= 0) listen();
  }, 1000);
}

function askForKey(error) {
  clearInterval(countdown);
  setLink("lost", "Needs a key");
  byId("key-button").hidden = false;
  setText(byId("key-error"), error);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = byId("key").value.trim();
  byId("key").value = "";
  byId("key-dialog").close();
  listen();
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-button").addEventListener("click", () => askForKeyAgain());
byId("retry").addEventListener("click", () => listen());

function askForKeyAgain() {
  setText(byId("key-error"), "");
  byId("key-dialog").showModal();
}

// A stream that says nothing is none: the machine slept, or a proxy holds it.
setInterval(() => {
  if (stream && lastMs !== null && Date.now() - lastMs > SILENCE_MS && !document.hidden) lost("no update for some seconds", null);
}, 1000);

// A page that nobody looks at needs no stream.
let hiding = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => (stream?.abort(), (stream = null), setLink("waiting", "Paused")), HIDDEN_MS);
  else if (!stream && !byId("key-dialog").open) listen();
});

for (const input of document.querySelectorAll("input[name=theme]")) {
  input.checked = input.value === (document.documentElement.dataset.theme ?? "auto");
  input.addEventListener("change", () => {
    if (input.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = input.value;
    try {
      localStorage.setItem("tandem-theme", input.value);
    } catch {
      // Storage is closed: the choice holds until the page is left.
    }
  });
}

listen();
