// Elements made of data. Strings become text nodes: nothing is ever parsed as HTML.

const SHOWN = 4000;
const UNSEEN = /[^\P{C}\r\n\t]|\r(?!\n)|[\p{Zl}\p{Zp}]/gu;
const READ = new Set(["title", "aria-label", "placeholder"]); // attributes that people read

/** A text whose characters can all be seen: others could hide words, or turn around those next to them. */
export const visible = (text) => text.replace(UNSEEN, "\ufffd");

const nodes = (children) => children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false).map((one) => (typeof one === "string" ? visible(one) : one));

/** An element with attributes (`on...` are listeners; false and null leave one out) and children. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) listen(made, name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : READ.has(name) ? visible(String(value)) : String(value));
  }
  made.append(...nodes(children));
  return made;
}

const acts = new WeakMap();

/** Have an element do `act` on events of a type; `renew` may give it another one later. */
function listen(node, type, act) {
  if (!acts.has(node)) acts.set(node, {});
  acts.get(node)[type] = act;
  node.addEventListener(type, (event) => acts.get(node)[type](event));
}

const IS_ROOM = new Set(["DIV", "SECTION", "TABLE", "TBODY", "DL"]);

/**
 * Replace what has changed in an element. What looks the same stays: a reader may be about to press
 * it, or have the keyboard there, and it then does what the new one would.
 */
export function renew(node, ...children) {
  const wanted = nodes(children);
  let at = node.firstChild;
  for (const one of wanted) {
    const made = typeof one === "string" ? document.createTextNode(one) : one;
    let same = at;
    while (same && !same.isEqualNode(made)) same = same.nextSibling;
    if (same) {
      while (at !== same) at = removed(at);
      adopt(same, made);
      at = same.nextSibling;
    } else if (at && IS_ROOM.has(at.nodeName) && at.cloneNode().isEqualNode(made.cloneNode())) {
      renew(at, [...made.childNodes]);
      at = at.nextSibling;
    } else node.insertBefore(made, at);
  }
  while (at) at = removed(at);
}

function removed(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function adopt(node, made) {
  if (acts.has(made)) Object.assign(acts.get(node), acts.get(made));
  [...made.childNodes].forEach((one, at) => adopt(node.childNodes[at], one));
}

/** Replace what is in an element. */
export function fill(node, ...children) {
  node.replaceChildren(...nodes(children));
  return node;
}

/**
 * A table. `columns` are names, or {name, right}; cells are strings or nodes. Where a page is narrow,
 * each row of a table that `stacks` is a list of its cells with their columns' names.
 */
export function table(caption, columns, rows, empty = "Nothing here.", { stacks = false } = {}) {
  const heads = columns.map((one) => (typeof one === "string" ? { name: one } : one));
  const cell = (value, at) => el("td", { class: heads[at].right ? "text-end" : null, "data-name": stacks ? heads[at].name : null }, value ?? "");
  const body = rows.length
    ? rows.map((row) => el("tr", {}, row.map(cell)))
    : el("tr", {}, el("td", { class: "empty-table-message", colspan: heads.length }, empty));
  return el("div", { class: "table-responsive mb-4", tabindex: 0, role: "region", "aria-label": caption },
    el("table", { class: `table table-hover align-middle mb-0${stacks ? " sf-stacks" : ""}` },
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
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Memory. */
export const megabytes = (bytes) => (bytes === null || bytes === undefined ? "" : `${count(Math.round(bytes / 2 ** 20))} MB`);

/** A price; small ones keep two digits that say something. `guessed` marks an estimate. */
export function usd(value, guessed = false) {
  if (value === null || value === undefined) return "";
  if (guessed) return `~${usd(value)}`;
  const number = Number(value);
  if (number === 0) return "$0";
  if (number < 1e-6) return `$${number.toFixed(Math.min(1 - Math.floor(Math.log10(number)), 20))}`; // never 1.5e-7
  return number >= 0.995 ? `$${number.toFixed(2)}` : `$${Number(number.toPrecision(2))}`;
}

/** A whole number with its thousands. */
export const count = (number, guessed = false) => (number === null || number === undefined ? "" : `${guessed ? "~" : ""}${Number(number).toLocaleString("en-US")}`);

/** So many runs, steps, ...: with an s where they are several. */
export const many = (number, noun) => `${count(number)} ${noun}${Number(number) === 1 ? "" : "s"}`;

const COLOURS = { completed: "success", failed: "danger", stopped: "warning", cancelled: "secondary", in_progress: "primary", queued: "info", paused: "secondary" };

/** A run's status, in a colour and in words. */
export const badge = (status) => el("span", { class: `badge sf-badge text-bg-${COLOURS[status] || "secondary"}` }, status.replaceAll("_", " "));

/** A button of Flower's kind. */
export const button = (name, onclick, kind = "outline-primary") =>
  el("button", { type: "button", class: `btn btn-sm btn-${kind}`, onclick }, name);

const ROLES = ["viewer", "approver", "operator"];
const mine = document.body.dataset.role || "operator";

/** Whether the reader's role allows what needs another one. The server decides; this is what a page offers. */
export const may = (needed) => ROLES.indexOf(mine) >= ROLES.indexOf(needed);

/** A control that changes something: off, with the reason, for whom may not. */
export function restricted(made, needed = "operator") {
  if (may(needed)) return made;
  made.disabled = true;
  made.title = `This needs the role ${needed}; yours is ${mine}`;
  return made;
}

/** A button that changes something. */
export const action = (name, onclick, kind = "outline-primary", needed = "operator") => restricted(button(name, onclick, kind), needed);

/** A field with its label. `options` make it a choice, their first one is the default; a `textarea` takes lines. */
export function field(label, name, value = "", { options = null, type = "text", hint = null } = {}) {
  const id = `field-${name}`;
  const input = options
    ? el("select", { id, name, class: "form-select form-select-sm" }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)))
    : type === "textarea" ? el("textarea", { id, name, rows: 4, class: "form-control form-control-sm", placeholder: hint }, value)
    : el("input", { id, name, type, value, class: type === "checkbox" ? "form-check-input" : "form-control form-control-sm", placeholder: hint, autocomplete: "off" });
  return el("div", { class: "sf-field" }, el("label", { for: id, class: "form-label" }, label), input);
}

/** What went wrong, and what to do. */
export const problem = (error) => el("div", { class: "alert alert-danger", role: "alert" }, error.message || String(error));
