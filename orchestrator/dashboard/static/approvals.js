// The page of approvals: calls that wait for people, equal ones together, and what decides them.

import { get } from "./api.js";
import { decisions, runLink } from "./decisions.js";
import { button, count, el, facts, field, fill, folded, problem, renew, table, time } from "./dom.js";
import { follow, tryAgain } from "./live.js";

const SHORT = 300; // characters of arguments that are shown without a click
const PAGE = 200;
const PAGES = 10; // that are read, and
const ROWS = 20; // rows that are drawn, until the reader wants more
const TENANTS = 3;
const FILTERS = ["agent", "tool", "batch", "tenant", "kind"];
const KINDS = [["", "both"], ["approval", "approvals"], ["question", "questions"]];
const query = new URLSearchParams(location.search);
const filter = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]).filter(([, value]) => value));
const isFiltered = Object.keys(filter).length > 0;
const content = document.getElementById("content");
const list = el("div", { "aria-live": "off" });
let [pages, rows] = [PAGES, ROWS];
let isReading = false;
let isStale = false;
let drawn = "";

function filters() {
  const made = el("form", { class: "sf-filters", role: "search", "aria-label": "Filter of calls" },
    field("Agent", "agent", filter.agent || ""), field("Tool", "tool", filter.tool || ""), field("Batch", "batch", filter.batch || "", { hint: "id" }),
    field("Tenant", "tenant", filter.tenant || ""), field("Kind", "kind", filter.kind || "", { options: KINDS }),
    el("div", { class: "sf-buttons mb-0" }, el("button", { type: "submit", class: "btn btn-sm btn-primary" }, "Filter"), button("Clear", () => { location.search = ""; }, "outline-secondary")));
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    location.search = new URLSearchParams([...new FormData(made)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value)).toString();
  });
  return made;
}

function tenants(same) {
  const all = [...new Set(same.map((one) => one.ask.tenant).filter(Boolean))];
  const more = all.length > TENANTS ? ` and ${count(all.length - TENANTS)} more` : "";
  return all.length ? el("div", { class: "sf-muted small" }, `${all.slice(0, TENANTS).join(", ")}${more}`) : null;
}

function row(same, isAll) {
  const [{ ask, is_hidden: isHidden }] = same;
  const isQuestion = ask.kind === "question";
  const about = isHidden ? "not shown here" : JSON.stringify(ask.arguments, null, 1);
  const others = same.length > 1 ? ` and ${isAll ? "" : "at least "}${count(same.length - 1)} more` : "";
  const words = isQuestion && !isHidden ? String(ask.arguments.question ?? "") : ask.tool;
  return [
    isAll || isQuestion ? count(same.length) : `at least ${count(same.length)}`,
    el("div", { class: "sf-wrap" }, el("strong", { class: "sf-clamp" }, words), folded(isQuestion ? "question" : "arguments", about, !isQuestion && about.length <= SHORT)),
    decisions(same, load, { isAll, filter }),
    el("div", { class: "sf-wrap" }, ask.agent, tenants(same)),
    el("div", {}, runLink(ask.run_id), others),
    el("div", {}, time(ask.since), ask.until ? el("div", { class: "sf-muted small" }, "until ", time(ask.until)) : null),
  ];
}

async function read() {
  const found = [];
  let part = { next: "" };
  for (let at = 0; at < pages && part.next !== null; at += 1) {
    part = await get("/approvals", { ...filter, cursor: part.next });
    found.push(...part.waiting);
  }
  return { found, isAll: part.next === null, total: part.total };
}

/** Equal calls together; each question alone, as it has an answer of its own. */
function grouped(found) {
  const groups = new Map();
  for (const one of found) {
    const key = one.ask.kind === "question" ? one.ask.key : one.group;
    groups.set(key, [...(groups.get(key) || []), one]);
  }
  return [...groups.values()];
}

function more(hidden, isAll) {
  const show = () => {
    if (hidden > 0) rows += ROWS;
    else pages += PAGES;
    load();
  };
  const text = hidden > 0 ? `${count(hidden)} more rows are not shown.` : "Calls that began to wait later are not shown.";
  return hidden > 0 || !isAll ? el("div", { class: "sf-buttons" }, el("span", { class: "sf-muted" }, text), button("Show more", show)) : null;
}

function empty(isAll) {
  if (!isAll) return `None of this filter is among the ${count(pages * PAGE)} that have waited longest. Press "Show more" to look at later ones.`;
  return isFiltered ? "No call of this filter waits for a person." : "Nothing waits for a person.";
}

function draw({ found, isAll, total }) {
  const text = JSON.stringify([found, isAll, total, rows]);
  if (text === drawn) return; // arguments that somebody reads stay open
  drawn = text;
  const groups = grouped(found);
  const columns = [{ name: "Calls", right: true }, "What", "Decision", "Agent", "Run", "Waits since"];
  renew(list,
    facts([
      ["Waiting in the fleet", count(total)],
      ["Of this filter", isFiltered && found.length ? `${isAll ? "" : "at least "}${count(found.length)}` : null],
      ["Looked at", isAll ? null : `the ${count(pages * PAGE)} that have waited longest`],
    ]),
    table("Calls that wait for a person", columns, groups.slice(0, rows).map((same) => row(same, isAll)), empty(isAll), { stacks: true }),
    more(groups.length - rows, isAll));
}

async function load() {
  isStale = isReading; // a reading that takes long is not begun anew by each change
  if (isReading) return;
  isReading = true;
  try {
    draw(await read());
  } catch (error) {
    drawn = "";
    renew(list, problem(error));
    tryAgain(error, load);
  }
  isReading = false;
  if (isStale) setTimeout(load, 500);
}

content.removeAttribute("aria-live");
fill(content, filters(), list);
load();
follow(["fleet"], load);
