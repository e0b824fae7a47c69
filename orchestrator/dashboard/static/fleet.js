// The fleet: what is wrong with it, its workers, limits, failures by cause, and what was done from here.

import { get, page, post } from "./api.js";
import { attempt } from "./dialog.js";
import { button, count, duration, el, facts, fill, problem, table, time, usd } from "./dom.js";
import { follow } from "./live.js";

const FIELDS = ["requests_per_minute", "tokens_per_minute", "in_flight", "usd", "usd_per_day", "tokens", "calls", "weight"];
const EVERY = 15_000;
const AGAIN = 3_000;
const content = document.getElementById("content");
const now = el("div");
const limits = el("section", { "aria-label": "Limits of the fleet" });
const failures = el("section", { "aria-label": "Failures of the fleet" });
const audit = el("section", { "aria-label": "Actions" });
let slowAt = 0;

async function change(path, question, body, done) {
  await attempt(question, (given) => post(path, body ? body(given) : {}), () => done);
  await load();
  setTimeout(load, AGAIN); // somebody may have taken it back between two looks at the fleet
}

const worker = (one) => [
  el("span", { class: "sf-wrap" }, one.name),
  one.alive ? "alive" : el("span", { class: "sf-error" }, `silent for ${duration(one.seen_seconds_ago)}`),
  `${count(one.held)} of ${count(one.slots)}`,
  el("span", { class: "sf-wrap" }, one.agents.join(", ")),
  (one.queues || []).join(", "),
];

function fleet(found) {
  const { overview, findings } = found;
  const alive = overview.workers.filter((one) => one.alive);
  const pause = overview.paused
    ? button("Resume the fleet", () => change("/fleet/resume", { title: "Resume the fleet?", button: "Resume" }, null, "The fleet goes on."))
    : button("Pause the fleet", () => change("/fleet/pause", { title: "Pause the whole fleet?", text: "Steps under way are finished; no other one begins.", button: "Pause", danger: true }, null, "The fleet is paused."), "outline-danger");
  return [
    overview.paused ? el("div", { class: "alert alert-warning", role: "status" }, "The fleet is paused: no step begins.") : null,
    el("h2", { class: "h5" }, "Findings"),
    findings.length ? el("ul", {}, findings.map((one) => el("li", { class: "sf-wrap" }, one))) : el("p", { class: "sf-muted" }, "Nothing is wrong."),
    facts([
      ["Workers", `${count(alive.length)} of ${count(overview.workers.length)} alive`], ["Steps in hand", `${count(alive.reduce((sum, one) => sum + one.held, 0))} of ${count(alive.reduce((sum, one) => sum + one.slots, 0))} slots`],
      ["Active runs", count(overview.active)], ["Messages in the queue", count(overview.queue_length)], ["Oldest overdue", duration(overview.oldest_due_seconds)],
      ["Refused messages", overview.quarantined ? el("a", { href: page("/quarantine") }, count(overview.quarantined)) : "0"], ["Redis", overview.redis_version],
    ]),
    el("div", { class: "sf-buttons" }, pause),
    el("h2", { class: "h5" }, "Workers"),
    table("Workers", ["Name", "State", "Steps", "Agents", "Queues"], overview.workers.map(worker), "No worker has reported. Start one: stepfleet worker --agents agents.py"),
  ];
}

const levels = (one) => [
  ...Object.entries(one.limit || {}).filter(([name, value]) => FIELDS.includes(name) && value !== null && !(name === "weight" && value === 1)).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`),
  ...Object.entries(one.learned).map(([name, value]) => `learned: ${name.replaceAll("_", " ")} ${count(Math.round(value))}`),
].join(", ");

const budget = (one) => {
  const amount = one.field.startsWith("usd") ? usd : count;
  return el("div", {}, `${one.field.replaceAll("_", " ")}: ${amount(one.spent)} of ${amount(one.budget)} spent`, Number(one.reserved) ? `, ${amount(one.reserved)} reserved` : "", Number(one.over) ? el("span", { class: "sf-error" }, `, ${amount(one.over)} over`) : null);
};

function limit(one) {
  const path = `/limits/${encodeURIComponent(one.name)}`;
  return [
    el("span", { class: "sf-wrap" }, one.name), levels(one), [one.budgets.map(budget)], count(one.in_flight),
    one.waiting ? el("span", {}, `${count(one.waiting)}${one.waits_for ? ` for ${one.waits_for}` : ""}`) : "0",
    one.cool_seconds ? `${duration(one.cool_seconds)} (${count(one.refused)} refused)` : "",
    el("div", { class: "sf-buttons mb-0" },
      button("Change", () => set(one.name)),
      one.limit ? button("Remove", () => change(`${path}/clear`, { title: `Remove the limit ${one.name}?`, button: "Remove", danger: true }, null, "The limit is removed."), "outline-danger") : null),
  ];
}

function set(name) {
  const fields = [...(name ? [] : [{ label: "Name, as openai:gpt-4o-mini or tenant:acme", name: "name" }]), ...FIELDS.map((one) => ({ label: one.replaceAll("_", " "), name: one, type: "text" }))];
  const question = { title: name ? `Change the limit ${name}` : "Set a limit", text: "Leave empty what stays as it is. It holds for the next call of the whole fleet.", fields, button: "Set" };
  return attempt(question, (given) => {
    // JSON has no NaN: it would be sent as null, which takes the field, as a budget, away.
    const wrong = FIELDS.find((one) => !Number.isFinite(Number(given[one])));
    if (wrong) throw new Error(`${wrong.replaceAll("_", " ")}: "${given[wrong]}" is no number; write it as 1000 or 0.5`);
    const overrides = Object.fromEntries(FIELDS.filter((one) => given[one].trim()).map((one) => [one, Number(given[one])]));
    return post(`/limits/${encodeURIComponent(name || given.name.trim())}/set`, { overrides });
  }, () => "The limit is set.").then(load);
}

const cause = (one) => [
  el("span", { class: "sf-wrap" }, one.cause.kind.replaceAll("_", " "), " ", el("span", { class: "sf-error" }, one.example.text || one.cause.text)),
  count(one.runs),
  Object.keys(one.stop_reasons).join(", ").replaceAll("_", " "),
  el("a", { href: page(`/runs?${new URLSearchParams(search(one))}`) }, "show runs"),
];

/** The filter that finds the runs of a cause: by the part of the text that they have in common. */
function search(one) {
  const parts = one.cause.text.split(/[<>#*…]|\d+/).map((part) => part.trim());
  const longest = parts.reduce((best, part) => (part.length > best.length ? part : best), "");
  return { stop_reason: Object.keys(one.stop_reasons)[0], ...(longest.length > 3 ? { error: longest.slice(0, 80) } : {}) };
}

async function slow() {
  slowAt = Date.now();
  const [failed, done] = await Promise.all([get("/failures"), get("/audit", { limit: 20 })]);
  fill(failures, el("h2", { class: "h5" }, "Failures by cause"), el("p", { class: "sf-muted" }, `Of the newest ${count(failed.read)} runs that did not complete.`),
    table("Failures by cause", ["Cause", { name: "Runs", right: true }, "Stop reason", ""], failed.groups.slice(0, 50).map(cause), "No run has failed or stopped at a limit."));
  fill(audit, el("h2", { class: "h5" }, "Done from here"),
    table("Audit", ["When", "Who", "What", "Detail"], done.entries.map((one) => [time(one.at), one.user, el("span", { class: "sf-wrap" }, `${one.action} ${one.target}`), el("span", { class: "sf-wrap small" }, one.detail.slice(0, 300))]), "Nothing yet."));
}

async function load() {
  try {
    const found = await get("/fleet");
    fill(now, fleet(found));
    fill(limits, el("h2", { class: "h5" }, "Limits"), el("div", { class: "sf-buttons" }, button("Set a limit", () => set(null))),
      table("Limits", ["Name", "Allows", "Budgets", { name: "In flight", right: true }, "Waiting", "Pause", ""], found.limits.map(limit), "No limit is set, and none is learned."));
    if (Date.now() - slowAt > EVERY) await slow();
  } catch (error) {
    fill(now, problem(error));
  }
}

content.removeAttribute("aria-live");
fill(content, now, limits, failures, audit);
await load();
follow(["fleet"], () => document.querySelector("dialog[open]") || load());
