// What the panel at the side says, as fields of a request. Kept in this browser, the key in this tab only.

import { byId } from "./dom.js";

const KEPT = ["instructions", "temperature", "top_p", "max_tokens", "seed", "tools"];
const STORE = "antiphon.playground";

export const SAMPLE_TOOL = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const effort = () => document.querySelector("input[name=effort]:checked").value;

function load() {
  const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const id of KEPT) byId(id).value = kept[id] ?? "";
  const radio = document.querySelector(`input[name=effort][value="${kept.effort ?? "medium"}"]`);
  if (radio) radio.checked = true;
  byId("key").value = sessionStorage.getItem(STORE) ?? "";
}

function save() {
  const kept = Object.fromEntries(KEPT.map((id) => [id, byId(id).value]));
  localStorage.setItem(STORE, JSON.stringify({ ...kept, effort: effort() }));
  sessionStorage.setItem(STORE, byId("key").value);
}

export function startSettings() {
  load();
  byId("fields").addEventListener("input", save);
  byId("fields").addEventListener("submit", (event) => event.preventDefault());
  byId("sample-tool").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(SAMPLE_TOOL, null, 2);
    save();
  });
}

export const apiKey = () => byId("key").value.trim();

export const instructions = () => byId("instructions").value.trim();

/** Request fields; throws Error with a message for the user when the tools are no JSON list. */
export function requestFields() {
  const fields = { reasoning_effort: effort() };
  for (const id of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (byId(id).value !== "") fields[id] = Number(byId(id).value);
  }
  const text = byId("tools").value.trim();
  if (text) {
    let tools;
    try {
      tools = JSON.parse(text);
    } catch (error) {
      throw new Error(`The tools are not valid JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) throw new Error("The tools are not a JSON list.");
    if (tools.length) fields.tools = tools;
  }
  return fields;
}

export function startTheme() {
  const wanted = localStorage.getItem("antiphon.theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
  };
  apply(wanted ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => {
    if (!localStorage.getItem("antiphon.theme")) apply(dark.matches ? "dark" : "light");
  });
  byId("theme").addEventListener("click", () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("antiphon.theme", other);
    apply(other);
  });
}
