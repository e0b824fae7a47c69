// Runs: filters that are kept in the address, pages, and actions on what is selected.

import { get, page, post } from "./api.js";
import { attempt, notify, refusals } from "./dialog.js";
import { badge, button, count, duration, el, field, fill, problem, table, time, usd } from "./dom.js";
import { follow } from "./live.js";

const STATUSES = ["", "queued", "in_progress", "paused", "completed", "failed", "stopped", "cancelled"];
const FILTERS = ["status", "stop_reason", "agent", "batch", "tenant", "error", "since"];
const LIMIT = 50;
const MOST_EXPORTED = 10000;
const AT_ONCE = 8;
const VERBS = { retry: "Retry", pause: "Pause", resume: "Resume", cancel: "Cancel" };

const query = new URLSearchParams(location.search);
const content = document.getElementById("content");
const notes = el("div");
const list = el("div");
const selected = new Set();
const before = [];
let cursor = query.get("cursor");
let found = { runs: [], next: null };

const filter = () => Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));

function filters() {
  const value = (name) => query.get(name) || "";
  const reasons = ["", "completed", "steps_limit", "token_limit", "time_limit", "retry_limit", "error", "finish_reason", "guard", "user_requested"];
  const choice = (names) => names.map((one) => [one, one ? one.replaceAll("_", " ") : "any"]);
  const known = reasons.includes(value("stop_reason")) ? reasons : [...reasons, value("stop_reason")];
  const entry = el("form", { class: "sf-filters", "aria-label": "Filter runs" },
    field("Status", "status", value("status"), { options: choice(STATUSES) }),
    field("Stop reason", "stop_reason", value("stop_reason"), { options: choice(known) }),
    field("Agent", "agent", value("agent")),
    field("Batch", "batch", value("batch")),
    field("Tenant", "tenant", value("tenant")),
    field("Error contains", "error", value("error")),
    field("Created since (UTC)", "since", value("since"), { hint: "2026-11-23T08:30Z" }),
    el("button", { type: "submit", class: "btn btn-sm btn-primary" }, "Show"),
    el("a", { class: "btn btn-sm btn-outline-secondary", href: page("/runs") }, "All runs"));
  entry.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = [...new FormData(entry)].filter(([, text]) => text.trim());
    location.search = new URLSearchParams(given.map(([name, text]) => [name, text.trim()])).toString();
  });
  return entry;
}

function row(run) {
  const box = el("input", {
    type: "checkbox", class: "form-check-input", checked: selected.has(run.run_id), "aria-label": `Select run ${run.run_id}`,
    onchange: () => {
      if (box.checked) selected.add(run.run_id);
      else selected.delete(run.run_id);
      showButtons();
    },
  });
  const name = run.line_id || run.run_id;
  const more = [run.tenant ? `tenant ${run.tenant}` : null, run.line_id ? run.run_id.slice(0, 8) : null].filter(Boolean).join(" · ");
  return [
    box,
    el("div", { class: "sf-wrap" }, el("a", { href: page(`/runs/${encodeURIComponent(run.run_id)}`) }, name), more ? el("div", { class: "sf-muted small" }, more) : null),
    run.agent,
    run.batch_id ? el("a", { href: page(`/batches/${encodeURIComponent(run.batch_id)}`) }, run.batch_id.slice(0, 8)) : "",
    [badge(run.status), run.stop_reason && run.stop_reason !== run.status ? el("div", { class: "small" }, run.stop_reason.replaceAll("_", " ")) : null],
    el("div", { class: "sf-error small" }, run.error || ""),
    count(run.steps),
    duration(run.active_seconds),
    usd(run.cost_usd),
    time(run.created),
  ];
}

function showButtons() {
  const chosen = selected.size;
  const all = found.runs.map((run) => run.run_id);
  fill(buttons,
    button(chosen === all.length && chosen ? "Select none" : "Select this page", () => {
      if (chosen === all.length) selected.clear();
      else all.forEach((one) => selected.add(one));
      show();
    }, "outline-secondary"),
    ...Object.entries(VERBS).map(([verb, name]) => {
      const made = button(`${name} ${chosen || ""}`.trim(), () => act(verb, [...selected]), verb === "cancel" ? "outline-danger" : "outline-primary");
      made.disabled = !chosen;
      return made;
    }),
    query.get("batch") && (query.get("status") || query.get("error") || query.get("stop_reason"))
      ? button("Retry all of this filter", retryAll) : null,
    button("Export JSONL", () => save("jsonl"), "outline-secondary"),
    button("Export CSV", () => save("csv"), "outline-secondary"),
    el("span", { class: "sf-muted small", role: "status" }, chosen ? `${chosen} selected` : ""));
}

async function act(verb, runs) {
  const question = { title: `${VERBS[verb]} ${runs.length} runs?`, button: `${VERBS[verb]} them`, danger: verb === "cancel" };
  const result = await attempt(question, () => each(verb, runs), (one) => `${VERBS[verb]}: ${one.runs} of ${runs.length} runs.`);
  refusals(result, fill(notes));
  selected.clear();
  await load();
}

/** Act on each of some runs, a few at a time. */
async function each(verb, runs) {
  const left = [...runs];
  const result = { runs: 0, refused: {} };
  const worker = async () => {
    for (let run = left.shift(); run !== undefined; run = left.shift()) {
      try {
        const one = await post(`/runs/${encodeURIComponent(run)}/${verb}`);
        result.runs += one.runs;
        if (!one.runs) result.refused[run] = one.detail || one.outcome;
      } catch (error) {
        result.refused[run] = error.message;
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return result;
}

async function retryAll() {
  const { batch, since, ...which } = filter();
  if (since) return notify("Leave the time out: a batch's runs are selected by the other fields.", true);
  const chosen = Object.fromEntries(Object.entries(which).filter(([, text]) => text));
  const question = { title: "Retry all runs of this filter?", text: `In batch ${batch}, on all pages.`, button: "Retry them" };
  const result = await attempt(question, async () => {
    const whole = { runs: 0, refused: {} };
    for (let next = null, first = true; first || next; first = false) {
      const one = await post(`/batches/${encodeURIComponent(batch)}/retry`, { filter: chosen, cursor: next });
      whole.runs += one.runs;
      Object.assign(whole.refused, one.refused);
      next = one.next;
    }
    return whole;
  }, (one) => `Retried ${one.runs} runs.`);
  refusals(result, fill(notes));
  return load();
}

async function save(kind) {
  const runs = [];
  try {
    for (let next = null, first = true; (first || next) && runs.length < MOST_EXPORTED; first = false) {
      const one = await get("/runs", { ...filter(), limit: 500, cursor: next });
      runs.push(...one.runs);
      next = one.next;
    }
  } catch (error) {
    return notify(error.message, true);
  }
  if (!runs.length) return notify("No run matches: there is nothing to export.", true);
  const names = Object.keys(runs[0]);
  // A cell that begins like a formula is text: spreadsheets would run it.
  const cell = (value) => {
    const text = String(value ?? "");
    return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const lines = kind === "csv" ? [names.join(","), ...runs.map((run) => names.map((name) => cell(run[name])).join(","))] : runs.map((run) => JSON.stringify(run));
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: kind === "csv" ? "text/csv" : "application/jsonl" }));
  el("a", { href: url, download: `runs.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  return notify(`${runs.length} runs saved${runs.length >= MOST_EXPORTED ? "; narrow the filter for others" : ""}.`);
}

function move(to) {
  cursor = to;
  const address = new URLSearchParams(query);
  if (to) address.set("cursor", to);
  else address.delete("cursor");
  history.replaceState(null, "", `?${address}`);
  selected.clear();
  return load();
}

function show() {
  const empty = found.next ? "None among the runs that were looked at; go on to the next page." : "No run matches this filter.";
  const newer = button("Newer", () => move(before.pop() ?? null), "outline-secondary");
  const older = button("Older", () => {
    before.push(cursor);
    move(found.next);
  }, "outline-secondary");
  newer.disabled = !cursor;
  older.disabled = !found.next;
  fill(list,
    table("Runs", ["", "Run", "Agent", "Batch", "Status", "Error", { name: "Steps", right: true }, { name: "Active", right: true }, { name: "Cost", right: true }, "Created"], found.runs.map(row), empty),
    el("nav", { class: "sf-buttons", "aria-label": "Pages of runs" }, newer, older));
  showButtons();
}

async function load() {
  try {
    found = await get("/runs", { ...filter(), limit: LIMIT, cursor });
    show();
  } catch (error) {
    fill(list, problem(error));
  }
}

const buttons = el("div", { class: "sf-buttons" });
content.removeAttribute("aria-live");
fill(content, filters(), notes, buttons, list);
await load();
follow(["fleet"], () => selected.size || cursor || load());
