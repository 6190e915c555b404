// The playground: a conversation, and the keys and buttons that drive it.

import { Answer } from "./answer.js";
import { byId, element } from "./dom.js";
import { apiKey, instructions, requestFields, startSettings, startTheme } from "./settings.js";
import { ApiError, getJson, streamChat } from "./sse.js";

const STATUS_EVERY_MS = 5000;
const SUGGESTIONS = ["Who are you?", "Explain prefill and decode to a musician.", "What is 17 × 23?"];

let history = [];
let model = null;
let running = null; // the AbortController of the answer that is being written

const conversation = byId("conversation");
const prompt = byId("prompt");

function nearEnd() {
  return conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 80;
}

function toEnd() {
  conversation.scrollTop = conversation.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
}

async function loadModel() {
  const { data } = await getJson("/v1/models", apiKey());
  model = data[0].id;
  byId("model").textContent = model;
  document.title = `${model} · Antiphon playground`;
}

async function watchStatus() {
  const status = byId("status");
  try {
    const response = await fetch("/ready");
    status.dataset.state = response.ok ? "ready" : "down";
    status.textContent = response.ok ? "ready" : "not ready";
    if (response.ok && !model) await loadModel();
  } catch (error) {
    status.dataset.state = "down";
    status.textContent = error instanceof ApiError ? error.message : "unreachable";
  }
  setTimeout(watchStatus, STATUS_EVERY_MS);
}

/** Adds messages to the history, and an answer to them to the page. */
async function run(messages) {
  byId("welcome")?.remove();
  const answer = new Answer();
  conversation.append(answer.root);
  toEnd();
  const controller = new AbortController();
  setRunning(controller);
  let failure = null;
  try {
    if (!model) await loadModel();
    const system = instructions();
    const body = {
      model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...history, ...messages],
      ...requestFields(),
    };
    for await (const { headers, chunk } of streamChat(body, { key: apiKey(), signal: controller.signal })) {
      const follow = nearEnd();
      if (headers) answer.takeHeaders(headers);
      else answer.take(chunk);
      if (follow) toEnd();
    }
  } catch (error) {
    failure = controller.signal.aborted ? new Error("Stopped.") : error;
  }
  answer.end(failure);
  if (running === controller) setRunning(null);
  // A conversation that was begun anew meanwhile does not get this answer.
  if (!answer.root.isConnected) return;
  if (!failure || answer.content) history.push(...messages, answer.message());
  if (!failure && answer.finishReason === "tool_calls") answer.askForResults(run);
  else prompt.focus();
  toEnd();
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  prompt.value = "";
  fit();
  conversation.append(element("div", { class: "user" }, element("p", { text })));
  run([...unanswered(), { role: "user", content: text }]);
}

/** Calls that the user passes over get an empty result: a history without one is not valid. */
function unanswered() {
  const calls = history.at(-1)?.tool_calls ?? [];
  document.querySelectorAll(".results").forEach((box) => box.remove());
  return calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "" }));
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  history = [];
  conversation.replaceChildren();
  prompt.focus();
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function toggleSettings() {
  const panel = byId("settings");
  panel.hidden = !panel.hidden;
  byId("toggle-settings").setAttribute("aria-expanded", String(!panel.hidden));
}

function onKey(event) {
  const typing = event.target.matches("input, textarea");
  if (event.key === "Escape" && running) stop();
  else if (event.key === "/" && !typing) {
    event.preventDefault();
    prompt.focus();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    clear();
  }
}

function start() {
  startTheme();
  startSettings();
  if (matchMedia("(max-width: 860px)").matches) toggleSettings();
  for (const text of SUGGESTIONS) {
    const onclick = () => {
      prompt.value = text;
      send();
    };
    byId("suggestions").append(element("button", { type: "button", class: "quiet", text, onclick }));
  }
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", fit);
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  byId("toggle-settings").addEventListener("click", toggleSettings);
  byId("key").addEventListener("change", () => loadModel().catch(() => {}));
  document.addEventListener("keydown", onKey);
  watchStatus();
  prompt.focus();
}

start();
