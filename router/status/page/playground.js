// A prompt, its answer as it is written, and where its time went.

import { byId, count, el, milliseconds, plural, setText } from "./dom.js";
import { headersFor, readEvents } from "./feed.js";

const PHASES = [
  ["queue", "queue", "Queue"],
  ["prefill", "prefill", "Prefill"],
  ["transfer", "transfer", "KV transfer"],
  ["decode", "decode", "Decode"],
];
const LIVE = [
  ["wait", "wait", "First token"],
  ["decode", "decode", "Decode"],
];
const MOST_CHARACTERS = 200000;
const BEGINNING = "Once upon a time there was a little fox";

// Where a prompt goes, and its body: a model without a chat template completes plain text alone.
export function requestFor({ prompt, model, chats, maxTokens, temperature }) {
  const input = chats ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const body = { model, ...input, max_tokens: maxTokens, temperature, stream: true, stream_options: { include_usage: true } };
  return { path: chats ? "/v1/chat/completions" : "/v1/completions", body };
}

// What a choice of a chunk brings of thinking and of text, whichever of both routes it came from.
export function newsOf(choice) {
  const { content, reasoning_content: thought } = choice.delta ?? {};
  return { text: content || choice.text || "", thought: thought || "" };
}

export class Playground {
  // `keyOf()` gives the API key; `onKeyNeeded()` asks for one.
  constructor({ keyOf, onKeyNeeded }) {
    Object.assign(this, { keyOf, onKeyNeeded, model: null, chats: true, stopping: null });
    this.line = byId("time-line");
    byId("ask").addEventListener("submit", (event) => (event.preventDefault(), this.ask()));
    byId("stop").addEventListener("click", () => this.stopping?.abort());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.preventDefault(), byId("ask").requestSubmit();
    });
    this.showPhases(PHASES, {}, "Queue, prefill, KV transfer and decode times of the answer appear here.");
  }

  // Of the status: what is served, and by which call.
  serve(model) {
    const chats = model.has_chat_template ?? true;
    if (this.chats && !chats && byId("prompt").value === byId("prompt").defaultValue) byId("prompt").value = BEGINNING;
    Object.assign(this, { model: model.name, chats });
    byId("completes-note").hidden = chats;
  }

  say(text, state = "") {
    setText(byId("ask-state"), text);
    byId("ask-state").dataset.state = state;
  }

  async ask() {
    const prompt = byId("prompt").value;
    if (this.stopping || !prompt.trim()) return;
    this.stopping = new AbortController();
    const run = { started: performance.now(), first: null, usage: null, timing: null, reason: null, thought: null, state: "", text: byId("answer"), shown: 0 };
    this.busy(true);
    run.text.replaceChildren();
    this.say("Waiting for the first token …");
    const timer = setInterval(() => this.showLive(run), 100);
    try {
      const { path, options } = this.request(prompt);
      await readEvents(path, options, (chunk) => this.onChunk(run, chunk));
      this.finish(run);
    } catch (error) {
      this.fail(error);
      this.showLive(run);
    } finally {
      clearInterval(timer);
      this.stopping = null;
      this.busy(false);
    }
  }

  request(prompt) {
    const maxTokens = Number(byId("max-tokens").value) || undefined;
    const temperature = Number(byId("temperature").value) || 0;
    const { path, body } = requestFor({ prompt, model: this.model ?? undefined, chats: this.chats, maxTokens, temperature });
    const headers = headersFor(this.keyOf(), { "Content-Type": "application/json", "X-Tandem-Timing": "1" });
    return { path, options: { method: "POST", headers, body: JSON.stringify(body), signal: this.stopping.signal } };
  }

  onChunk(run, chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    run.usage = chunk.usage ?? run.usage;
    run.timing = chunk.timing ?? run.timing;
    for (const choice of chunk.choices) {
      run.reason = choice.finish_reason ?? run.reason;
      const { text, thought } = newsOf(choice);
      if (thought) this.grow(run, thought, (run.thought ??= this.thoughtIn(run.text)), "Thinking …");
      if (text) this.grow(run, text, run.text, "Generating …");
    }
  }

  thoughtIn(box) {
    const thought = el("p", { class: "thought" });
    box.append(thought);
    return thought;
  }

  grow(run, text, box, state) {
    run.first ??= performance.now();
    if (run.state !== state) (run.state = state), this.say(state);
    run.shown += text.length;
    if (run.shown > MOST_CHARACTERS) throw new Error("the answer is too long to show here");
    this.append(run.text, box, text);
  }

  append(scrolled, box, text) {
    const follows = scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 40;
    if (box.lastChild instanceof Text) box.lastChild.appendData(text);
    else box.append(document.createTextNode(text));
    if (follows) scrolled.scrollTop = scrolled.scrollHeight;
  }

  finish(run) {
    const total = performance.now() - run.started;
    const tokens = run.usage?.completion_tokens ?? 0;
    if (!run.shown) run.text.replaceChildren(el("p", { class: "empty" }, "The answer is empty."));
    this.say(`Done: ${plural(tokens, "token")} in ${milliseconds(total)}${run.reason === "length" ? "; max tokens reached" : ""}.`);
    if (!run.timing) return this.showLive(run);
    const times = Object.fromEntries(PHASES.map(([name]) => [name, 1000 * (run.timing[`${name}_s`] ?? 0)]));
    const cached = run.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const seen = run.first === null ? "" : `First token in this browser after ${milliseconds(run.first - run.started)}. `;
    this.showPhases(PHASES, times, `${seen}${count(cached)} of ${plural(run.usage?.prompt_tokens ?? 0, "prompt token")} were cached.`);
  }

  fail(error) {
    if (error.name === "AbortError") return this.say("Stopped.");
    if (error.status === 401) this.onKeyNeeded();
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    const message = error instanceof TypeError ? "The router cannot be reached." : `${error.message[0].toUpperCase()}${error.message.slice(1)}.`.replace(/\.\.$/, ".");
    this.say(message + wait, "failed");
  }

  showLive(run) {
    const now = performance.now();
    const times = { wait: (run.first ?? now) - run.started, decode: run.first === null ? 0 : now - run.first };
    this.showPhases(LIVE, times, "As measured in this browser.");
  }

  showPhases(phases, times, summary) {
    const bars = phases.map(([name]) => {
      const bar = el("div", { class: `phase-${name}` });
      bar.style.flexGrow = times[name] ?? 0;
      bar.hidden = !times[name];
      return bar;
    });
    const items = phases.map(([name, hue, title]) => el("li", {}, el("span", { class: `swatch phase-${hue}`, "aria-hidden": "true" }), title, el("b", {}, name in times ? milliseconds(times[name]) : "–")));
    this.line.replaceChildren(el("div", { class: "track", "aria-hidden": "true" }, bars), el("ul", { class: "phases" }, items), el("p", { class: "summary" }, summary));
  }

  busy(isBusy) {
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
    byId("answer").setAttribute("aria-busy", String(isBusy));
  }
}
