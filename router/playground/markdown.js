// The little of Markdown that answers commonly use, as elements: paragraphs, headings, lists, code.

import { element } from "./dom.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
const TAGS = [null, "code", "strong", "em"];
const ITEM = /^\s*(?:[-*]|\d+[.)])\s+/;
const HEADING = /^#{1,6}\s+/;

function inline(parent, text) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(at, match.index));
    const kind = match.findIndex((text, i) => i > 0 && text !== undefined);
    parent.append(element(TAGS[kind], { text: match[kind] }));
    at = match.index + match[0].length;
  }
  parent.append(text.slice(at));
  return parent;
}

function list(lines) {
  const made = element(/^\s*\d/.test(lines[0]) ? "ol" : "ul");
  for (const line of lines) {
    if (ITEM.test(line)) made.append(inline(element("li"), line.replace(ITEM, "")));
    else inline(made.lastChild, `\n${line}`);
  }
  return made;
}

function paragraph(text) {
  const lines = text.split("\n");
  if (HEADING.test(lines[0])) {
    const heading = inline(element("h3"), lines[0].replace(HEADING, ""));
    return lines.length > 1 ? [heading, paragraph(lines.slice(1).join("\n"))].flat() : [heading];
  }
  if (ITEM.test(lines[0])) return [list(lines)];
  return [inline(element("p"), text)];
}

/** The elements of a text; a code fence may still be open. */
export function render(text) {
  return text.split(/^```/m).flatMap((part, i) => {
    if (i % 2) {
      const code = part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "");
      return [element("pre", {}, element("code", { text: code }))];
    }
    return part
      .split(/\n{2,}/)
      .map((block) => block.replace(/^\n+|\n+$/g, ""))
      .filter(Boolean)
      .flatMap(paragraph);
  });
}
