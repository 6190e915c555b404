// The service's OpenAPI document, made readable.

import { byId, element } from "./dom.js";
import { startTheme } from "./settings.js";
import { getJson } from "./sse.js";

const nameOf = (reference) => reference.split("/").at(-1);

function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  const union = schema.anyOf ?? schema.oneOf;
  if (union) return union.map(typeOf).filter((type) => type !== "null").join(" or ") || "null";
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return [schema.type ?? "any"].flat().join(" or ");
}

function fields(name, schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, about]) =>
    element(
      "tr",
      {},
      element("td", {}, element("code", { text: field }), required.has(field) ? " required" : ""),
      element("td", { text: typeOf(about) }),
      element("td", { text: about.description ?? "" }),
    ),
  );
  const head = ["Field", "Type", "Meaning"].map((text) => element("th", { scope: "col", text }));
  return [
    element("h3", { text: name }),
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
  ];
}

function operation(method, path, about, schemas) {
  const body = about.requestBody?.content["application/json"].schema;
  const models = body ? (body.anyOf ?? [body]).map((schema) => nameOf(schema.$ref)) : [];
  const statuses = Object.entries(about.responses).map(([status, response]) =>
    element("tr", {}, element("td", { text: status }), element("td", { text: response.description })),
  );
  return element(
    "details",
    { class: "operation" },
    element(
      "summary",
      {},
      element("span", { class: "method", text: method.toUpperCase() }),
      element("span", { class: "path", text: path }),
      element("span", { class: "what", text: about.description ?? "" }),
    ),
    element(
      "div",
      { class: "body" },
      ...models.flatMap((name) => fields(name, schemas[name])),
      element("h3", { text: "Answers" }),
      element("table", {}, element("tbody", {}, ...statuses)),
    ),
  );
}

async function start() {
  startTheme();
  const page = byId("reference");
  const document = await getJson("/openapi.json");
  const byTag = new Map();
  for (const [path, operations] of Object.entries(document.paths)) {
    for (const [method, about] of Object.entries(operations)) {
      const tag = about.tags?.[0] ?? "Other";
      if (!byTag.has(tag)) byTag.set(tag, []);
      byTag.get(tag).push(operation(method, path, about, document.components.schemas));
    }
  }
  page.append(element("p", { text: `${document.info.description} Version ${document.info.version}.` }));
  for (const [tag, operations] of byTag) page.append(element("h2", { text: tag }), ...operations);
  page.setAttribute("aria-busy", "false");
}

start();
