// One run: what became of it, its steps, and what can be done with it.

import { get, page, post } from "./api.js";
import { spans } from "./chart.js";
import { attempt } from "./dialog.js";
import { badge, button, count, duration, el, facts, fill, folded, problem, table, time, usd } from "./dom.js";
import { follow } from "./live.js";

const id = decodeURIComponent(location.pathname.replace(/\/+$/, "").split("/").pop());
const path = `/runs/${encodeURIComponent(id)}`;
const STEPS = 50;
const ENDED = ["completed", "failed", "stopped", "cancelled"];
const MEANING = {
  completed: "It has given its answer.",
  steps_limit: "It reached max_steps before its answer. Raise the limit and go on.",
  token_limit: "Its conversation is larger than token_limit. Raise the limit and go on.",
  time_limit: "Its steps took longer than time_limit. Raise the limit and go on.",
  retry_limit: "One step failed too often. A retry begins with that step.",
  error: "A step failed with an error that a repetition does not mend. A retry begins with that step.",
  finish_reason: "The model ended with a reason that this agent stops for.",
  guard: "A guard ended it, as a budget that is spent. Raise it, then retry.",
  user_requested: "Somebody has cancelled it.",
};
const LIMITS = [
  { label: "max_steps", name: "max_steps", type: "number" },
  { label: "time_limit (seconds)", name: "time_limit", type: "number" },
  { label: "token_limit", name: "token_limit", type: "number" },
];

const content = document.getElementById("content");
const head = el("div");
const text = el("div");
const steps = el("div");
let first = 1;
let found = null;

const numbers = (given) => Object.fromEntries(Object.entries(given).filter(([name, value]) => value !== "" && LIMITS.some((one) => one.name === name)).map(([name, value]) => [name, Number(value)]));

function buttons(run) {
  const act = (verb, question, body = () => ({}), done = (one) => one.detail || `The run is ${one.outcome.replaceAll("_", " ")}.`) =>
    button(question.button, async () => {
      await attempt(question, (given) => post(`${path}/${verb}`, body(given)), done);
      await load();
    }, question.danger ? "outline-danger" : "outline-primary");
  const made = [];
  const isOver = ENDED.includes(run.status);
  if (isOver && run.status !== "completed") {
    made.push(act("retry", { title: "Retry this run?", text: "It goes on with the step that failed; what went well is kept.", button: "Retry" }));
    made.push(act("retry", { title: "Raise limits and go on?", text: "Leave empty what stays as it is.", fields: LIMITS, button: "Raise and go on" }, (given) => ({ overrides: numbers(given) })));
  }
  if (isOver) made.push(act("send", { title: "Send a message", text: "The run goes on with its whole conversation.", fields: [{ label: "Message", name: "message" }], button: "Send" }, (given) => ({ message: given.message }), () => "The run goes on."));
  if (run.status === "paused") made.push(act("resume", { title: "Resume this run?", button: "Resume" }));
  else if (!isOver) made.push(act("pause", { title: "Pause this run?", text: "It stops before its next step or tool.", button: "Pause" }));
  if (!isOver) made.push(act("cancel", { title: "Cancel this run?", text: "A step under way is broken off.", button: "Cancel", danger: true }));
  if (run.steps) made.push(button("Fork", fork));
  return el("div", { class: "sf-buttons" }, made);
}

async function fork() {
  const fields = [
    { label: `Keep steps (0 to ${found.run.steps})`, name: "at", type: "number", value: String(found.run.steps - 1) },
    { label: "Message in place of what it was given there", name: "message" },
    { label: "Model", name: "model", hint: "as before" },
    ...LIMITS,
  ];
  const result = await attempt({ title: "Fork this run", text: "A new run begins with these steps; this one stays as it is.", fields, button: "Fork" }, (given) => {
    const overrides = { ...numbers(given), ...(given.model ? { model: given.model } : {}) };
    return post(`${path}/fork`, { at: given.at === "" ? null : Number(given.at), message: given.message || null, overrides });
  }, () => "A new run has begun.");
  if (result) location.href = `${page(`/runs/${encodeURIComponent(result.detail)}`)}?beside=${encodeURIComponent(id)}`;
}

function header(run) {
  const links = {
    batch: run.batch_id ? el("a", { href: page(`/batches/${encodeURIComponent(run.batch_id)}`) }, run.batch_id) : null,
    parent: run.parent ? el("a", { href: page(`/runs/${encodeURIComponent(run.parent)}`) }, run.parent) : null,
  };
  return [
    el("h2", { class: "h4 sf-wrap" }, run.line_id ? `${run.line_id} ` : "", el("small", { class: "sf-muted" }, run.run_id)),
    el("p", {}, badge(run.status), " ", run.stop_reason && run.stop_reason !== run.status ? el("strong", {}, run.stop_reason.replaceAll("_", " ")) : null, " ", run.stop_reason ? MEANING[run.stop_reason] : ""),
    run.error ? el("div", { class: "alert alert-danger sf-wrap", role: "status" }, run.error) : null,
    facts([
      ["Agent", run.agent], ["Batch", links.batch], ["Tenant", run.tenant], ["Parent", links.parent],
      ["Steps", `${count(run.steps)}${run.max_steps ? ` of ${count(run.max_steps)}` : ""}`], ["Active", duration(run.active_seconds)],
      ["Tokens", count(run.tokens)], ["Cost", usd(run.cost_usd)], ["Lost attempts", found.lost_attempts || null],
      ["Created", time(run.created)], ["Ended", time(run.ended)],
    ]),
    buttons(run),
    found.evaluations.length ? el("details", { class: "sf-folded mb-3", open: run.status !== "completed" && ENDED.includes(run.status) },
      el("summary", {}, `Why: ${found.reason}`),
      table("Criteria", ["Criterion", "Decision", "Reason"], found.evaluations.map((one) => [one.criterion, one.decision.replaceAll("_", " "), el("span", { class: "sf-wrap" }, one.reason)]))) : null,
  ];
}

const since = (step) => (step.started_at ? new Date(step.started_at).getTime() / 1000 : null);

function timeline(list) {
  const known = list.filter((one) => one.started_at);
  if (!known.length) return null;
  const begin = Math.min(...known.map((one) => since(one) - one.waited_seconds));
  const end = Math.max(...known.map((one) => since(one) + (one.duration_ms || 0) / 1000));
  const rows = known.map((one) => {
    const at = since(one) - begin;
    const tools = Math.min(one.tool_calls.reduce((sum, call) => sum + (call.duration_ms || 0), 0) / 1000, (one.duration_ms || 0) / 1000);
    const until = at + (one.duration_ms || 0) / 1000;
    return [
      { name: `step ${one.step}: waited ${duration(one.waited_seconds)} ${one.waited_for}`, from: at - one.waited_seconds, to: at, kind: "waiting" },
      { name: `step ${one.step}: model ${duration(until - tools - at)}`, from: at, to: until - tools, kind: one.errors.length ? "failed" : "model" },
      { name: `step ${one.step}: tools ${duration(tools)}`, from: until - tools, to: until, kind: "tools" },
    ].filter((part) => part.to > part.from);
  });
  const legend = [["waiting", "waiting for limits"], ["model", "model"], ["tools", "tools"], ["failed", "with errors"]];
  return el("section", { "aria-label": "Timeline" }, spans(`Steps over ${duration(end - begin)}`, rows, end - begin),
    el("ul", { class: "sf-legend mt-2" }, legend.map(([kind, name]) => el("li", {}, el("span", { class: `sf-key sf-key-${kind}`, "aria-hidden": "true" }), name))));
}

function tool(call) {
  const name = `${call.tool} · ${duration(call.duration_ms === null ? null : call.duration_ms / 1000)}${call.is_error ? " · failed" : ""}`;
  return el("div", { class: "ms-3" }, el("div", { class: call.is_error ? "sf-error" : null }, name), call.error ? el("div", { class: "sf-error small" }, call.error) : null,
    call.arguments === null ? null : folded("arguments", call.arguments), call.result === null ? null : folded("result", call.result));
}

function step(one) {
  if (one.too_large) return el("article", { class: "sf-card" }, el("h3", {}, `Step ${one.step}`), el("p", {}, "It is too large for this page: stepfleet show has all of it."));
  const about = [one.model, `${count(one.tokens)} tokens`, usd(one.cost_usd), duration(one.duration_ms === null ? null : one.duration_ms / 1000), one.cached ? "answered from the cache" : null,
    one.waited_seconds >= 0.05 ? `waited ${duration(one.waited_seconds)}${one.waited_for ? ` for ${one.waited_for}` : ""}` : null, one.worker].filter(Boolean);
  return el("article", { class: "sf-card" },
    el("h3", {}, `Step ${one.step}`, one.type ? ` · ${one.type.replaceAll("_", " ")}` : ""),
    el("p", { class: "sf-muted small sf-wrap" }, about.join(" · ")),
    one.errors.map((error) => el("p", { class: "sf-error" }, error)),
    one.text ? folded("answer", one.text, true) : null,
    one.tool_calls.map(tool));
}

function pages() {
  const last = found.run.steps;
  if (last <= STEPS && first === 1) return null;
  const move = (to) => () => {
    first = to;
    return load();
  };
  const before = button("Earlier steps", move(Math.max(1, first - STEPS)), "outline-secondary");
  const after = button("Later steps", move(found.next), "outline-secondary");
  before.disabled = first === 1;
  after.disabled = !found.next;
  return el("nav", { class: "sf-buttons", "aria-label": "Pages of steps" }, before, after, el("span", { class: "sf-muted" }, `from step ${first} of ${last}`));
}

async function beside() {
  const other = new URLSearchParams(location.search).get("beside");
  if (!other) return null;
  const run = await get(`/runs/${encodeURIComponent(other)}`, { limit: 1 }).then((one) => one.run, () => null);
  if (!run) return null;
  const row = (name, read) => [name, read(found.run), read(run)];
  return table("This run beside the one that it was forked from", ["", "this run", el("a", { href: page(`/runs/${encodeURIComponent(other)}`) }, "the other")].map((name) => ({ name })), [
    row("Status", (one) => badge(one.status)), row("Stop reason", (one) => one.stop_reason || ""), row("Steps", (one) => count(one.steps)),
    row("Tokens", (one) => count(one.tokens)), row("Cost", (one) => usd(one.cost_usd)), row("Active", (one) => duration(one.active_seconds)), row("Error", (one) => one.error || ""),
  ]);
}

async function load() {
  try {
    found = await get(path, { first, limit: STEPS });
  } catch (error) {
    return fill(head, problem(error));
  }
  const hidden = found.steps.length && found.steps.every((one) => one.text === null && one.tool_calls.every((call) => call.arguments === null)) && found.steps.some((one) => one.tool_calls.length);
  const opened = new Set([...steps.querySelectorAll("details[open]")].map((one) => one.dataset.key));
  fill(head, header(found.run), await beside());
  fill(steps, el("h2", { class: "h5" }, "Steps"), timeline(found.steps), pages(),
    hidden ? el("p", { class: "sf-muted" }, "Texts of models and tools are not shown here.") : null,
    found.steps.length ? found.steps.map(step) : el("p", { class: "sf-muted" }, "No step is committed yet."), found.steps.length > 5 ? pages() : null);
  [...steps.querySelectorAll("details")].forEach((one, at) => {
    one.dataset.key = String(at);
    if (opened.has(one.dataset.key)) one.open = true;
  });
  return null;
}

function written(data) {
  const isOpen = Boolean(data?.is_open && data.text);
  fill(text, isOpen ? el("article", { class: "sf-card" }, el("h3", {}, `Step ${data.step} is being written`), el("pre", { class: "sf-wrap" }, data.text)) : null);
}

content.removeAttribute("aria-live");
fill(content, head, text, steps);
await load();
if (found) follow([`run:${id}`, `text:${id}`], (topic, data) => (topic.startsWith("text:") ? written(data) : load()));
