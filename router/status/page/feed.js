// Event streams read with fetch: unlike EventSource it can send a key in a header.

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function headersFor(key, others = {}) {
  return key ? { ...others, Authorization: `Bearer ${key}` } : others;
}

async function refusal(response) {
  let message = response.statusText;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not ours: a proxy's page, perhaps. The status says enough.
  }
  return new Refused(response.status, message, Number(response.headers.get("Retry-After")) || null);
}

// Calls `onEvent` with the object of each event, and returns when the stream says that it is complete.
export async function readEvents(path, options, onEvent) {
  const response = await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) onEvent(JSON.parse(data));
    }
  }
}
