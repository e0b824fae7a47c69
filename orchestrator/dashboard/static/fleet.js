// The fleet: what is wrong with it, its workers, limits, failures by cause, and what was changed.

import { get, page, post } from "./api.js";
import { attempt } from "./dialog.js";
import { action, count, duration, el, facts, fill, megabytes, problem, table, time } from "./dom.js";
import { limitsTable, setLimit } from "./fleet_limits.js";
import { follow } from "./live.js";
import { redraw } from "./progress.js";

const EVERY = 15_000;
const AGAIN = 3_000;
const content = document.getElementById("content");
const now = el("div");
const limits = el("section", { "aria-label": "Limits of the fleet" });
const failures = el("section", { "aria-label": "Failures of the fleet" });
const audit = el("section", { "aria-label": "Actions" });
let slowAt = 0;
let isOpen = false;

async function change(path, question, done) {
  await attempt(question, () => post(path, {}), () => done);
  await load();
  setTimeout(load, AGAIN); // somebody may have taken it back between two looks at the fleet
}

const STATES = { fail: ["danger", "failed"], warn: ["warning", "warning"] };

const finding = (one) => {
  const [colour, word] = STATES[one.state];
  return el("li", { class: "sf-finding" },
    el("span", { class: `badge sf-badge text-bg-${colour}` }, word), el("strong", { class: "sf-wrap" }, one.check),
    el("span", { class: "sf-wrap" }, one.found), el("span", { class: "sf-wrap sf-fix" }, "Fix: ", one.fix));
};

function findings(checks) {
  const wrong = checks.filter((one) => one.state === "fail").concat(checks.filter((one) => one.state === "warn"));
  const fine = checks.filter((one) => one.state === "ok");
  const passed = el("details", { class: "sf-folded", open: isOpen }, el("summary", {}, `${count(fine.length)} checks have passed`),
    el("ul", { class: "small" }, fine.map((one) => el("li", { class: "sf-wrap" }, `${one.check}: ${one.found}`))));
  passed.addEventListener("toggle", () => { isOpen = passed.open; });
  return [
    el("h2", { class: "h5" }, "Findings"),
    wrong.length ? el("ul", { class: "sf-findings" }, wrong.map(finding)) : el("p", { class: "sf-muted" }, "Nothing is wrong."),
    passed,
  ];
}

function state(one) {
  if (!one.alive) return el("span", { class: "sf-error" }, `silent for ${duration(one.seen_seconds_ago)}`);
  return one.stopping ? el("span", { class: "sf-error" }, "stopping") : "alive";
}

/** A worker's or keeper's version and commit, as the command line shows them, and its release. */
const build = (one) => [one.commit ? `${one.version}+${one.commit.slice(0, 8)}` : one.version, one.release].filter(Boolean).join(", ").slice(0, 150);

const worker = (one) => [
  el("span", { class: "sf-cell" }, one.name), el("span", { class: "sf-cell sf-small" }, state(one)), el("span", { class: "text-nowrap" }, `${count(one.held)} of ${count(one.slots)}`),
  megabytes(one.rss_bytes), el("span", { class: "sf-cell sf-small" }, build(one)), time(one.started_at),
  el("span", { class: "sf-cell" }, one.agents.join(", ")), el("span", { class: "sf-cell sf-small" }, (one.queues || []).join(", ")),
];

const keeper = (one) => `${one.name} (${one.alive ? "alive" : `silent for ${duration(one.seen_seconds_ago)}`}${one.rss_bytes ? `, ${megabytes(one.rss_bytes)}` : ""}${build(one) ? `, ${build(one)}` : ""})`;

function fleet(found) {
  const { overview, checks } = found;
  const alive = overview.workers.filter((one) => one.alive);
  const pause = overview.paused
    ? action("Resume the fleet", () => change("/fleet/resume", { title: "Resume the fleet?", button: "Resume" }, "The fleet goes on."))
    : action("Pause the fleet", () => change("/fleet/pause", { title: "Pause the whole fleet?", text: "Running steps finish; no others begin.", button: "Pause", danger: true }, "The fleet is paused."), "outline-danger");
  return [
    overview.paused ? el("div", { class: "alert alert-warning", role: "status" }, "The fleet is paused: no step begins.") : null,
    findings(checks),
    facts([
      ["Workers", `${count(alive.length)} of ${count(overview.workers.length)} alive`], ["Steps in hand", `${count(alive.reduce((sum, one) => sum + one.held, 0))} of ${count(alive.reduce((sum, one) => sum + one.slots, 0))} slots`],
      ["Memory of workers", megabytes(alive.reduce((sum, one) => sum + (one.rss_bytes || 0), 0) || null)],
      ["Active runs", count(overview.active)], ["Messages in the queue", count(overview.queue_length)], ["Oldest overdue", duration(overview.oldest_due_seconds)],
      ["Refused messages", overview.quarantined ? el("a", { href: page("/quarantine") }, count(overview.quarantined)) : "0"], ["Redis", overview.redis_version],
    ]),
    el("div", { class: "sf-buttons" }, pause),
    el("h2", { class: "h5" }, "Workers"),
    table("Workers", ["Name", "State", "Steps", { name: "Memory", right: true }, "Version", "Started", "Agents", "Queues"], overview.workers.map(worker), "No worker has reported. Start one: stepfleet worker --agents agents.py", { stacks: true }),
    overview.keepers.length ? el("p", { class: "sf-muted" }, `Keepers: ${overview.keepers.map(keeper).join(", ")}`) : null,
  ];
}

/** The filter that finds exactly the runs of a cause. */
const runsOf = (one) => {
  const reasons = Object.keys(one.stop_reasons);
  return new URLSearchParams({ ...(reasons.length === 1 ? { stop_reason: reasons[0] } : {}), where: `cause=${one.cause.key}` });
};

const cause = (one) => [
  el("span", { class: "sf-wrap" }, one.cause.kind.replaceAll("_", " "), " ", el("span", { class: "sf-error" }, one.example.text || one.cause.text), el("div", { class: "small sf-muted" }, Object.keys(one.models).join(", "))),
  count(one.runs),
  Object.keys(one.stop_reasons).join(", ").replaceAll("_", " "),
  el("a", { href: page(`/runs?${runsOf(one)}`) }, "show runs"),
];

async function causes() {
  const failed = await get("/failures");
  return [
    el("p", { class: "sf-muted" }, `Of the newest ${count(failed.read)} runs that did not complete.`),
    table("Failures by cause", ["Cause", { name: "Runs", right: true }, "Stop reason", ""], failed.groups.slice(0, 50).map(cause), "No run has failed or stopped at a limit."),
  ];
}

async function actions() {
  const done = await get("/audit", { limit: 20 });
  const row = (one) => [time(one.at), el("span", { class: "sf-cell sf-small" }, one.host ? `${one.user}@${one.host}` : one.user), el("span", { class: "sf-cell sf-small" }, one.source), el("span", { class: "sf-cell" }, `${one.action} ${one.target}`), el("span", { class: "sf-cell small" }, one.detail.slice(0, 300))];
  return table("Audit", ["When", "Who", "By", "What", "Detail"], done.entries.map(row), "Nothing yet.");
}

/** Fill a part of the page; what goes wrong stands there, and leaves the others alone. */
async function part(node, title, read) {
  let shown;
  try {
    shown = await read();
  } catch (error) {
    shown = problem(error);
  }
  redraw(node, () => fill(node, el("h2", { class: "h5" }, title), shown));
}

async function current() {
  try {
    const found = await get("/fleet");
    if (document.querySelector("dialog[open]")) return; // it gives the focus back to a button of this part
    redraw(now, () => fill(now, fleet(found)));
    redraw(limits, () => fill(limits, el("h2", { class: "h5" }, "Limits"), el("div", { class: "sf-buttons" }, action("Set a limit", () => setLimit(null).then(load))),
      found.limits_problem ? problem(new Error(found.limits_problem)) : limitsTable(found.limits, load)));
  } catch (error) {
    fill(now, problem(error));
  }
}

async function load() {
  const parts = [current()];
  if (Date.now() - slowAt > EVERY) {
    slowAt = Date.now();
    parts.push(part(failures, "Failures by cause", causes), part(audit, "What was changed", actions));
  }
  await Promise.all(parts);
}

content.removeAttribute("aria-live");
fill(content, now, limits, failures, audit);
await load();
follow(["fleet"], () => document.querySelector("dialog[open]") || load());
