// Charts as inline SVG, with a text for those who cannot see them.

import { visible } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, visible(String(value)));
  made.append(...children);
  return made;
}

const titled = (text) => svg("title", {}, visible(text));

/** A bar of parts `{name, value, kind}`, as wide as its place. */
export function bar(label, parts, height = 18) {
  const total = parts.reduce((sum, one) => sum + one.value, 0) || 1;
  let at = 0;
  const pieces = parts.filter((one) => one.value > 0).map((one) => {
    const width = (100 * one.value) / total;
    const piece = svg("rect", { x: at, y: 0, width, height, class: `sf-part sf-part-${one.kind}` }, titled(`${one.name}: ${one.value}`));
    at += width;
    return piece;
  });
  const text = parts.filter((one) => one.value > 0).map((one) => `${one.name} ${one.value}`).join(", ");
  return svg("svg", { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", class: "sf-bar", role: "img", "aria-label": `${label}: ${text || "nothing"}` }, ...pieces);
}

/** Columns `{name, value, text}`: one for each day, or step. */
export function columns(label, values, height = 120) {
  const most = Math.max(...values.map((one) => one.value), 0) || 1;
  const width = 100 / Math.max(values.length, 14);
  const pieces = values.map((one, at) => {
    const tall = (height * one.value) / most;
    return svg("rect", { x: at * width + width * 0.1, y: height - tall, width: width * 0.8, height: tall, class: "sf-part sf-part-plain" }, titled(`${one.name}: ${one.text}`));
  });
  const text = values.map((one) => `${one.name} ${one.text}`).join(", ");
  return svg("svg", { viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", class: "sf-columns", role: "img", "aria-label": `${label}: ${text || "nothing"}` }, ...pieces);
}

/** Spans of a timeline: rows of parts `{name, from, to, kind}` in seconds. */
export function spans(label, rows, seconds, height = 14) {
  const pieces = rows.flatMap((parts, row) => parts.map((one) =>
    svg("rect", { x: (100 * one.from) / (seconds || 1), y: row * (height + 2), width: Math.max((100 * (one.to - one.from)) / (seconds || 1), 0.3), height, class: `sf-part sf-part-${one.kind}` }, titled(one.name))));
  const tall = Math.max(rows.length * (height + 2), 1);
  return svg("svg", { viewBox: `0 0 100 ${tall}`, preserveAspectRatio: "none", class: "sf-spans", role: "img", "aria-label": label, height: tall }, ...pieces);
}
