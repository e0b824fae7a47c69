// The list of runs: filters in the address, pages by cursor, and what is read again when it changes.

import { address, get, page } from "./api.js";
import { badge, button, count, duration, el, field, fill, many, problem, renew, table, time, usd, visible } from "./dom.js";
import { follow } from "./live.js";
import { Selection } from "./runs_selection.js";

const ROWS = 50;
const MOST_PAGES = 10; // that are searched for enough rows before the reader is asked
const SHORT = 8;
const AGAIN = 5000;
const REST = 10; // times as long as a reading took, until the next one
const STATUSES = ["queued", "in_progress", "paused", "completed", "failed", "stopped", "cancelled"];
const REASONS = ["completed", "steps_limit", "token_limit", "time_limit", "retry_limit", "error", "finish_reason", "guard", "user_requested"];
const FILTERS = ["status", "stop_reason", "agent", "batch", "tenant", "error", "since", "where", "parent"];
// An empty tenant is a condition, too: runs without one.
const isGiven = ([name, value]) => Boolean(value) || (name === "tenant" && value === "");

const content = document.getElementById("content");
const summary = document.getElementById("summary");
const list = el("div");
const pager = el("nav", { class: "sf-buttons", "aria-label": "Pages of runs" });
const selection = new Selection(filters, () => load());
let shown = { runs: [], next: null };
let behind = []; // cursors of the pages before this one
let reading = null; // the newest reading: answers of older ones are dropped
let drawn = "";
let notBefore = 0;
let waiting = null;
let isStale = false; // something has changed since the reading under way began

function query() {
  return new URLSearchParams(window.location.search);
}

/** The filters in the address, by name. */
function filters() {
  const given = query();
  return Object.fromEntries(FILTERS.map((name) => [name, given.get(name)]).filter(isGiven));
}

/** Put filters and cursor into the address, and read. */
function go(wanted, cursor = null) {
  if (!cursor) behind = [];
  const isSame = JSON.stringify(wanted) === JSON.stringify(filters());
  const next = new URLSearchParams(Object.entries(wanted).filter(isGiven));
  if (cursor) next.set("cursor", cursor);
  const text = next.toString();
  window.history.pushState({ behind }, "", text ? `?${text}` : window.location.pathname);
  if (!isSame) {
    selection.clear();
    redrawForm();
  }
  load({ anew: true });
}

async function load({ anew = false } = {}) {
  const mine = { begun: performance.now() };
  reading = mine;
  if (anew) content.setAttribute("aria-busy", "true");
  try {
    const found = await search(filters(), query().get("cursor"), mine);
    if (reading !== mine) return;
    shown = found;
    draw();
  } catch (error) {
    if (reading !== mine) return;
    drawn = "";
    fill(list, problem(error), error.status >= 400 && error.status < 500 ? el("p", {}, "Change the filter above, or ", el("a", { href: page("/runs") }, "show all runs"), ".") : button("Try again", () => load()));
    fill(pager);
    if (!(error.status >= 400 && error.status < 500)) setTimeout(later, AGAIN);
  } finally {
    const now = performance.now();
    notBefore = now + (now - mine.begun) * REST;
    if (reading === mine) {
      content.removeAttribute("aria-busy");
      reading = null;
      if (isStale) later();
      isStale = false;
    }
  }
}

/** Read again because something has changed; a list that takes long to read, less often. */
function later() {
  waiting ??= setTimeout(() => {
    waiting = null;
    // A reading that takes long is not begun anew by each change: it would never end.
    if (reading) isStale = true;
    else load();
  }, Math.max(notBefore - performance.now(), 0));
}

/** Read until a page is full: a page of the API may be short and have a next one. */
async function search(which, cursor, mine) {
  const runs = [];
  let next = cursor;
  let looked = 0;
  for (let pages = 0; pages < MOST_PAGES; pages += 1) {
    const found = await get("/runs", { ...which, limit: ROWS - runs.length, cursor: next });
    if (reading !== mine) break;
    runs.push(...found.runs);
    next = found.next;
    looked += found.looked_at;
    if (!next || runs.length >= ROWS) break;
    if (looked > ROWS) summary.textContent = `Searching: ${count(looked)} runs looked at, ${runs.length} found …`;
  }
  return { runs, next, looked };
}

function draw() {
  const text = JSON.stringify(shown.runs.concat(shown.next, query().toString()));
  selection.show(shown.runs, Boolean(shown.next || query().get("cursor")));
  if (text !== drawn) {
    drawn = text;
    keepingPlace(() => renew(list, rows()));
    renew(pager, buttons());
  }
  const more = shown.next ? " There are more." : "";
  const said = shown.runs.length ? `${many(shown.runs.length, "run")} on this page, the newest first.${more}` : "";
  if (summary.textContent !== said) summary.textContent = said;
}

/** Replace the rows, and leave the keyboard's and the scroll bar's place as they are. */
function keepingPlace(change) {
  const focused = document.activeElement?.id;
  const left = list.querySelector(".table-responsive")?.scrollLeft ?? 0;
  change();
  const region = list.querySelector(".table-responsive");
  if (region) region.scrollLeft = left;
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
}

function rows() {
  const right = (name) => ({ name, right: true });
  const columns = [{ name: selection.head() }, "Run", "Agent", "Status", "Error", "Batch", "Tenant", right("Steps"), right("Tokens"), right("Cost"), "Created", right("Active for")];
  return table("Runs", columns, shown.runs.map(row), empty());
}

function row(run) {
  const reason = run.stop_reason && ![run.status, "error"].includes(run.stop_reason) ? run.stop_reason.replaceAll("_", " ") : null;
  const narrow = (name, value) => button(value, () => go({ ...filters(), [name]: value }), "link");
  return [
    selection.box(run),
    [
      el("a", { id: `run-${run.run_id}`, class: "sf-id", href: page(`/runs/${encodeURIComponent(run.run_id)}`), title: run.run_id, "aria-label": `Run ${run.run_id}` }, run.run_id.slice(0, SHORT)),
      run.line_id ? el("div", { class: "sf-muted sf-wrap sf-short" }, run.line_id) : null,
    ],
    narrowed(narrow, "agent", run.agent),
    [badge(run.status), reason ? el("div", { class: "sf-muted" }, reason) : null, run.lost_workers ? el("div", { class: "sf-muted" }, many(run.lost_workers, "lost worker")) : null],
    run.error ? el("div", { class: "sf-error" }, run.error) : "",
    run.batch_id ? el("a", { class: "sf-id", href: page(`/batches/${encodeURIComponent(run.batch_id)}`), title: run.batch_id, "aria-label": `Batch ${run.batch_id}` }, run.batch_id.slice(0, SHORT)) : "",
    run.tenant ? narrowed(narrow, "tenant", run.tenant) : "",
    run.max_steps ? `${count(run.steps)} of ${count(run.max_steps)}` : count(run.steps),
    count(run.tokens, run.usage_estimated),
    usd(run.cost_usd, run.price_estimated || run.usage_estimated),
    time(run.created),
    duration(run.active_seconds),
  ].map((cell) => (Array.isArray(cell) ? el("div", {}, cell) : cell));
}

function narrowed(narrow, name, value) {
  const made = narrow(name, value);
  made.classList.add("sf-narrow");
  made.title = visible(`Only runs of ${name} ${value}`);
  return made;
}

function empty() {
  if (shown.next) return `None among the ${count(shown.looked)} runs looked at. Press "Search on" to look at older ones.`;
  if (query().get("cursor")) return "No more runs. Go back to the newest.";
  if (Object.keys(filters()).length) return "No run matches. Remove a condition of the filter.";
  return "No runs yet. Submit one: stepfleet submit, stepfleet run, or fleet.submit() in Python.";
}

function buttons() {
  const cursor = query().get("cursor");
  const turn = (name, id, act, isOff) => {
    const made = button(name, act, "outline-secondary");
    made.id = id;
    made.disabled = isOff;
    return made;
  };
  const onward = () => {
    behind = [...behind, cursor ?? ""];
    go(filters(), shown.next);
  };
  const back = () => {
    const last = behind.at(-1);
    behind = behind.slice(0, -1);
    go(filters(), last);
  };
  return [
    turn("Newest", "page-first", () => go(filters()), !cursor),
    turn("Newer", "page-back", back, !behind.length),
    turn(shown.next && shown.runs.length < ROWS ? "Search on" : "Older", "page-next", onward, !shown.next),
  ];
}

function form() {
  const now = filters();
  const any = (names) => [["", "any"], ...names.map((name) => [name, name.replaceAll("_", " ")])];
  const without = field("Without a tenant", "without_tenant", "1", { type: "checkbox" });
  without.querySelector("input").checked = now.tenant === "";
  const made = el(
    "form",
    { class: "sf-filters", role: "search", "aria-label": "Filter of runs" },
    field("Status", "status", now.status, { options: any(STATUSES) }),
    field("Stop reason", "stop_reason", now.stop_reason, { options: any(REASONS) }),
    field("Agent", "agent", now.agent),
    field("Batch", "batch", now.batch, { hint: "id" }),
    field("Tenant", "tenant", now.tenant),
    without,
    field("Error contains", "error", now.error),
    field("Created since", "since", local(now.since), { type: "datetime-local" }),
    now.where ? field("Cause", "where", now.where) : null,
    now.parent ? field("Started by run", "parent", now.parent) : null,
    el("div", { class: "sf-buttons mb-0" }, el("button", { type: "submit", id: "filter-apply", class: "btn btn-sm btn-primary" }, "Filter"), button("Clear", () => go({}), "outline-secondary"), downloads()),
  );
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    const { without_tenant: isWithout, ...given } = Object.fromEntries([...new FormData(made)].map(([name, value]) => [name, value.trim()]));
    given.tenant = isWithout ? "" : given.tenant || null;
    if (given.since) given.since = new Date(given.since).toISOString();
    go(given);
  });
  return made;
}

/** A time as the input of the browser takes it: of the reader's clock, without a zone. */
function local(iso) {
  if (!iso) return "";
  const at = new Date(/Z|[+-]\d\d:?\d\d$|^\d{4}-\d\d-\d\d$/.test(iso) ? iso : `${iso}Z`);
  if (Number.isNaN(at.getTime())) return "";
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function downloads() {
  const link = (kind) => el("a", { class: "btn btn-sm btn-outline-secondary", href: address("/runs/export", { ...filters(), format: kind }), download: `runs.${kind}`, title: "The newest 100,000 runs of this filter" }, `Export ${kind.toUpperCase()}`);
  return [link("jsonl"), link("csv")];
}

let place = form();

function redrawForm() {
  const made = form();
  keepingPlace(() => place.replaceWith(made));
  place = made;
}

window.addEventListener("popstate", (event) => {
  behind = event.state?.behind ?? [];
  selection.clear(); // what was selected was of another filter
  redrawForm();
  load({ anew: true });
});

fill(content, place, selection.bar, list, pager);
fill(list, el("p", {}, "Loading …"));
load({ anew: true });
follow(["fleet"], later);
