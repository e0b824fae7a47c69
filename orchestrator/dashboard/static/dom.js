// Elements made of data. Strings become text nodes: nothing is ever parsed as HTML.

const SHOWN = 4000;

/** An element with attributes (`on...` are listeners; false and null leave one out) and children. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

/** Replace what is in an element. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined));
  return node;
}

/** A table. `columns` are names, or {name, right}; cells are strings or nodes. */
export function table(caption, columns, rows, empty = "Nothing here.") {
  const heads = columns.map((one) => (typeof one === "string" ? { name: one } : one));
  const cell = (value, at) => el("td", { class: heads[at].right ? "text-end" : null }, value ?? "");
  const body = rows.length
    ? rows.map((row) => el("tr", {}, row.map(cell)))
    : el("tr", {}, el("td", { class: "empty-table-message", colspan: heads.length }, empty));
  return el("div", { class: "table-responsive mb-4", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { class: "table table-hover align-middle mb-0" },
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, heads.map((one) => el("th", { scope: "col", class: one.right ? "text-end" : null }, one.name)))),
      el("tbody", {}, body)));
}

/** Terms with what they are: pairs whose value is null are left out. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "sf-facts" }, shown.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))));
}

/** A text behind its summary, cut to what a page can hold. */
export function folded(summary, text, open = false) {
  const shown = text.length > SHOWN ? `${text.slice(0, SHOWN)}\n… ${text.length - SHOWN} more characters` : text;
  return el("details", { class: "sf-folded", open }, el("summary", {}, summary), el("pre", { tabindex: 0 }, shown));
}

/** A time, by the reader's clock; the whole of it as the title. */
export function time(iso) {
  if (!iso) return "";
  const at = new Date(iso);
  const today = at.toDateString() === new Date().toDateString();
  const text = today ? at.toLocaleTimeString() : at.toLocaleString();
  return el("time", { datetime: iso, title: at.toISOString() }, text);
}

/** Seconds for people. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** Memory. */
export const megabytes = (bytes) => (bytes === null || bytes === undefined ? "" : `${count(Math.round(bytes / 2 ** 20))} MB`);

/** A price; small ones keep two digits that say something. */
export function usd(value) {
  if (value === null || value === undefined) return "";
  const number = Number(value);
  if (number === 0) return "$0";
  return number >= 1 ? `$${number.toFixed(2)}` : `$${Number(number.toPrecision(2))}`;
}

/** A whole number with its thousands. */
export const count = (number) => (number === null || number === undefined ? "" : Number(number).toLocaleString("en-US"));

const COLOURS = { completed: "success", failed: "danger", stopped: "warning", cancelled: "secondary", in_progress: "primary", queued: "info", paused: "secondary" };

/** A run's status, in a colour and in words. */
export const badge = (status) => el("span", { class: `badge sf-badge text-bg-${COLOURS[status] || "secondary"}` }, status.replaceAll("_", " "));

/** A button of Flower's kind. */
export const button = (name, onclick, kind = "outline-primary") =>
  el("button", { type: "button", class: `btn btn-sm btn-${kind}`, onclick }, name);

/** A field with its label. `options` make it a choice; their first one is the default. */
export function field(label, name, value = "", { options = null, type = "text", hint = null } = {}) {
  const id = `field-${name}`;
  const input = options
    ? el("select", { id, name, class: "form-select form-select-sm" }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)))
    : el("input", { id, name, type, value, class: type === "checkbox" ? "form-check-input" : "form-control form-control-sm", placeholder: hint, autocomplete: "off" });
  return el("div", { class: "sf-field" }, el("label", { for: id, class: "form-label" }, label), input);
}

/** What went wrong, and what to do. */
export const problem = (error) => el("div", { class: "alert alert-danger", role: "alert" }, error.message || String(error));
