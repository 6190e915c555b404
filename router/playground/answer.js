// One answer on the page: it grows with every chunk, and knows what it cost.

import { element } from "./dom.js";
import { render } from "./markdown.js";

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still incomplete, or the model's own idea of JSON
  }
}

export class Answer {
  reasoning = "";
  content = "";
  calls = [];
  finishReason = null;
  #began = performance.now();
  #firstAt = null;
  #lastAt = null;
  #events = 0;
  #usage = null;
  #workers = "";
  #drawn = false;

  constructor() {
    this.root = element("article", { class: "answer", "aria-busy": "true", "aria-label": "Answer" });
    this.reasoningText = element("p");
    this.reasoningBox = element(
      "details",
      { class: "reasoning", open: true, hidden: true },
      element("summary", { text: "Reasoning" }),
      this.reasoningText,
    );
    this.text = element("div", { class: "text" });
    this.callBox = element("div", { class: "calls" });
    this.figures = element("div", { class: "figures", hidden: true });
    this.root.append(this.reasoningBox, this.text, this.callBox, this.figures);
  }

  takeHeaders(headers) {
    this.#workers = headers.get("x-antiphon-workers") ?? "";
  }

  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { delta } = choice;
    if (delta.reasoning || delta.content || delta.tool_calls) {
      this.#lastAt = performance.now();
      this.#firstAt ??= this.#lastAt;
      this.#events += 1;
    }
    this.reasoning += delta.reasoning ?? "";
    this.content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: part.id, name: part.function.name, arguments: "" });
      call.arguments += part.function.arguments ?? "";
    }
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    this.#drawSoon();
  }

  /** The answer as a message of the conversation's history. */
  message() {
    const message = { role: "assistant", content: this.content || null };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }

  end(error) {
    this.root.setAttribute("aria-busy", "false");
    if (this.content || this.calls.length) this.reasoningBox.open = false;
    this.#draw();
    if (error) {
      const code = error.code ? ` (${error.code})` : "";
      this.root.append(element("p", { class: "error", role: "alert", text: `${error.message}${code}` }));
    } else if (this.finishReason === "length") {
      this.root.append(element("p", { class: "error", text: "Cut short: the limit of output tokens was reached." }));
    }
  }

  /** Lets the user answer the calls; `send` gets a tool message for each. */
  askForResults(send) {
    const fields = this.calls.map((call, i) => {
      const field = element("textarea", { rows: 2, spellcheck: "false" });
      this.callBox.children[i].append(element("label", {}, `Result of ${call.name}`, field));
      return field;
    });
    const button = element("button", { type: "button", text: fields.length > 1 ? "Send results" : "Send result" });
    button.addEventListener("click", () => {
      button.remove();
      for (const field of fields) field.readOnly = true;
      send(this.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: fields[i].value })));
    });
    this.figures.before(element("div", { class: "results" }, button));
    fields[0].focus();
  }

  #drawSoon() {
    if (this.#drawn) return;
    this.#drawn = true;
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#drawn = false;
    this.reasoningBox.hidden = !this.reasoning;
    this.reasoningText.textContent = this.reasoning;
    this.text.replaceChildren(...render(this.content));
    this.calls.forEach((call, i) => {
      if (!this.callBox.children[i]) {
        const body = element("pre");
        this.callBox.append(element("div", { class: "call" }, element("h3", { text: call.name }), body));
      }
      this.callBox.children[i].querySelector("pre").textContent = pretty(call.arguments);
    });
    this.#drawFigures();
  }

  #drawFigures() {
    if (this.#firstAt === null) return;
    const first = this.#firstAt - this.#began;
    const rest = this.#lastAt - this.#firstAt;
    const usage = this.#usage;
    // Until the usage arrives, an event counts as a token.
    const tokens = usage?.completion_tokens ?? this.#events;
    const speed = rest > 0 && tokens > 1 ? `${((1000 * (tokens - 1)) / rest).toFixed(1)} tokens/s` : null;
    const rows = [
      ["first-token", "First token", seconds(first)],
      ["speed", "Speed", speed],
      ["output", "Output", usage && `${tokens} tokens, ${usage.completion_tokens_details.reasoning_tokens} reasoning`],
      ["input", "Prompt", usage && `${usage.prompt_tokens} tokens, ${usage.prompt_tokens_details.cached_tokens} cached`],
      ["workers", "Served by", this.#workers.split(", ").join(" · ")],
    ];
    const bar = element(
      "div",
      { class: "bar", "aria-hidden": "true" },
      element("span", { class: "first" }),
      element("span", { class: "rest" }),
    );
    bar.children[0].style.flexGrow = first;
    bar.children[1].style.flexGrow = rest;
    const list = element("dl");
    for (const [name, label, value] of rows) {
      if (value) list.append(element("div", { class: name }, element("dt", { text: label }), element("dd", { text: value })));
    }
    this.figures.replaceChildren(bar, list);
    this.figures.hidden = false;
  }
}
