// A chat completion as a stream of server-sent events.

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

export function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function errorOf(response) {
  let document = null;
  try {
    document = await response.json();
  } catch {
    // A proxy's page, for instance: the status has to do.
  }
  return new ApiError(response.status, document?.error);
}

/** Events of a body, as the text of their data lines; comments are skipped. */
async function* dataOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}

/** Yields the response's headers first, then every chunk. Throws ApiError, also for an error in the stream. */
export async function* streamChat(body, { key, signal }) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...authorization(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  yield { headers: response.headers };
  let ended = false;
  for await (const data of dataOf(response.body)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error);
    yield { chunk };
  }
  if (!ended) throw new ApiError(response.status, { message: "The stream ended before the answer did." });
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: authorization(key) });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}
