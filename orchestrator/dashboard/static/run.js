// One run: what became of it, its steps, and what can be done with it.

import { address, get, named, page, post } from "./api.js";
import { spans } from "./chart.js";
import { decisions, runLink } from "./decisions.js";
import { attempt } from "./dialog.js";
import { action, badge, button, count, duration, el, facts, fill, folded, many, problem, renew, table, time, usd } from "./dom.js";
import { follow, tryAgain } from "./live.js";

const id = named();
const path = `/runs/${encodeURIComponent(id)}`;
const STEPS = 50;
const CHILDREN = 20;
const BEFORE = 20; // runs that the API names of those that have to end first
const ENDED = ["completed", "failed", "stopped", "cancelled"];
const MEANING = {
  completed: "It has given its answer.",
  steps_limit: "It reached max_steps before its answer. Raise the limit and go on.",
  token_limit: "Its conversation is larger than token_limit. Raise the limit and go on.",
  time_limit: "Its steps took longer than time_limit. Raise the limit and go on.",
  retry_limit: "One step failed too often. A retry begins with that step.",
  error: "A step failed with a permanent error. A retry begins with that step.",
  finish_reason: "The model ended with a reason that this agent stops for.",
  guard: "A guard ended it, such as a spent budget. Raise it, then retry.",
  user_requested: "It was cancelled, or the run that started it has ended.",
};
const SHORTENED = { length: "cut at the token limit (max_tokens)", content_filter: "cut by the provider's content filter" };
const KINDS = { crash: "its worker was lost", late: "another worker had taken over", deferred: "tried again later", failed: "failed", interrupted: "interrupted", retried: "taken back by a retry" };
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
let waiting = []; // calls of this run, and of runs below it, that wait for people
let children = []; // runs that its calls have started, the newest first

const isOver = (run) => ENDED.includes(run.status);
const numbers = (given) => Object.fromEntries(Object.entries(given).filter(([name, value]) => value !== "" && LIMITS.some((one) => one.name === name)).map(([name, value]) => [name, Number(value)]));

function buttons(run) {
  const act = (verb, question, body = () => ({}), done = (one) => `The run ${one.text}.`) =>
    action(question.button, async () => {
      await attempt(question, (given) => post(`${path}/${verb}`, body(given)), done);
      await load();
    }, question.danger ? "outline-danger" : "outline-primary");
  const made = [];
  if (isOver(run) && run.status !== "completed") {
    made.push(act("retry", { title: "Retry this run?", text: "It continues with the step that failed; completed steps are kept.", button: "Retry" }));
    made.push(act("retry", { title: "Raise limits and go on?", text: "Leave empty what stays as it is.", fields: LIMITS, button: "Raise and go on" }, (given) => ({ overrides: numbers(given) })));
  }
  if (isOver(run)) made.push(act("send", { title: "Send a message", text: "The run goes on with its whole conversation.", fields: [{ label: "Message", name: "message", type: "textarea" }], button: "Send" }, (given) => ({ message: given.message }), () => "The run goes on."));
  if (run.status === "paused") made.push(act("resume", { title: "Resume this run?", button: "Resume" }));
  else if (!isOver(run)) made.push(act("pause", { title: "Pause this run?", text: "It stops before its next step or tool.", button: "Pause" }));
  if (!isOver(run)) made.push(act("cancel", { title: "Cancel this run?", text: "A running step is interrupted.", button: "Cancel", danger: true }));
  if (run.steps) made.push(action("Fork", () => fork()));
  made.forEach((one) => { one.id = `act-${one.textContent.toLowerCase().replaceAll(" ", "-")}`; });
  return el("div", { class: "sf-buttons" }, made);
}

async function fork(at = found.run.steps - 1, title = "Fork this run") {
  const fields = [
    { label: `Keep steps (0 to ${found.run.steps})`, name: "at", type: "number", value: String(at) },
    { label: "Message in place of the one there", name: "message", type: "textarea" },
    { label: "Model", name: "model", hint: "as before" },
    ...LIMITS,
  ];
  const result = await attempt({ title, text: "A new run begins with these steps; this one stays as it is.", fields, button: "Fork" }, (given) => {
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
    el("h2", { class: "h4 sf-wrap" }, run.line_id ? [el("bdi", {}, run.line_id), " "] : "", el("small", { class: "sf-muted" }, run.run_id)),
    el("p", {}, badge(run.status), " ", run.stop_reason && run.stop_reason !== run.status ? el("strong", {}, run.stop_reason.replaceAll("_", " ")) : null, " ", run.stop_reason ? MEANING[run.stop_reason] : ""),
    run.error ? el("div", { class: "alert alert-danger sf-wrap", role: "status" }, run.error) : null,
    facts([
      ["Agent", run.agent], ["Batch", links.batch], ["Tenant", run.tenant], ["Parent", links.parent],
      ["Steps", `${count(run.steps)}${run.max_steps ? ` of ${count(run.max_steps)}` : ""}`], ["Active", duration(run.active_seconds)],
      ["Tokens", count(run.tokens, run.usage_estimated)], ["Cost", usd(run.cost_usd, run.price_estimated || run.usage_estimated)], ["Cost of runs below", run.below_cost_usd ? usd(run.below_cost_usd) : null], ["In total", run.below_cost_usd ? usd(withBelow(run)) : null], ["Lost attempts", found.lost_attempts || null], ["Cost of lost attempts", found.lost_cost_usd ? usd(found.lost_cost_usd) : null],
      ["Created", time(run.created)], ["Ended", time(run.ended)],
      ["Celery", el("a", { href: page(`/tasks?name=${encodeURIComponent(`step args:"${run.run_id.replaceAll('"', "")}"`)}`) }, "its tasks")],
    ]),
    buttons(run),
    waiting.map(asked),
    found.fleet_paused ? el("div", { class: "alert alert-warning", role: "status" }, "The whole fleet is paused: no step begins until ", el("a", { href: page("/fleet") }, "it is resumed"), ".") : null,
    found.waits_for ? el("p", { class: "sf-wrap" }, el("strong", {}, `Step ${run.steps + 1} waits for `), found.waits_for, before()) : null,
    children.length ? below() : null,
    found.evaluations.length ? el("details", { class: "sf-folded mb-3", "data-key": "why", open: run.status !== "completed" && isOver(run) },
      el("summary", {}, `Why: ${found.reason}`),
      table("Criteria", ["Criterion", "Decision", "Reason", "Numbers"], found.evaluations.map(criterion))) : null,
    lost(),
  ];
}

/** What a run and those below it have cost. */
const withBelow = (run) => (run.cost_usd === null ? null : run.cost_usd + run.below_cost_usd);

/** The runs that calls of this one have started. */
const below = () => table("Runs below", ["Run below", "Agent", "Status", { name: "Steps", right: true }, { name: "Cost with runs below", right: true }], children.map((one) => [
  runLink(one.run_id), one.agent, [badge(one.status), " ", one.stop_reason && one.stop_reason !== one.status ? one.stop_reason.replaceAll("_", " ") : null], count(one.steps), usd(withBelow(one)),
]), "", { stacks: true });

/** The runs that have to end before this one begins, up to those that the API names. */
function before() {
  const runs = Object.entries(found.before);
  const link = ([run, status]) => [el("a", { class: "sf-id", href: page(`/runs/${encodeURIComponent(run)}`) }, run), ` (${status === "unknown" ? "not created yet" : status.replaceAll("_", " ")})`];
  return runs.length ? [": ", runs.map((one, at) => [at ? ", " : "", link(one)]), runs.length < BEFORE ? "" : ", …"] : null;
}

/** The run that a call has started, where it has ended: while that went on, this run waited. */
const startedBy = (call) => children.find((one) => one.run_id === call.run_id && one.ended);
const lasted = (run) => (new Date(run.ended) - new Date(run.created)) / 1000;

/** A call that waits for a person, with what decides it. */
function asked(one) {
  const { ask, is_hidden: isHidden } = one;
  const words = ask.kind === "question" && !isHidden ? String(ask.arguments.question ?? "") : ask.tool;
  return el("section", { class: "sf-card", "aria-label": `Waits for a person: ${ask.tool}` },
    ask.run_id === id ? null : el("p", { class: "sf-wrap" }, "Below it ", el("strong", {}, ask.agent), " waits for a person: ", runLink(ask.run_id)),
    el("p", { class: "sf-wrap" }, el("strong", {}, words), ask.until ? [" until ", time(ask.until)] : null),
    isHidden || ask.kind === "question" ? null : el("pre", { class: "sf-wrap" }, JSON.stringify(ask.arguments, null, 1)),
    decisions([one], load));
}

const criterion = (one) => [
  el(one.decisive ? "strong" : "span", { class: "sf-wrap" }, one.criterion, one.decisive ? " (decided)" : ""), one.decision.replaceAll("_", " "),
  el("span", { class: "sf-wrap" }, one.reason), el("span", { class: "sf-muted" }, Object.entries(one.numbers).map(([name, value]) => `${name}=${value}`).join(", ")),
];

function lost() {
  if (!found.lost.length) return null;
  const row = (one) => [String(one.step), KINDS[one.kind] || one.kind, one.at ? time(one.at) : "", duration(one.seconds), count(one.tokens), usd(one.cost_usd), el("span", { class: "sf-wrap" }, one.reason || "")];
  return el("details", { class: "sf-folded mb-3", "data-key": "lost" }, el("summary", {}, `${many(found.lost_attempts, "attempt")} ${found.lost_attempts === 1 ? "was" : "were"} not committed`),
    table("Lost attempts", ["Step", "What became of it", "At", "Seconds", "Tokens", "Cost", "Reason"], found.lost.map(row)));
}

const since = (step) => (step.started_at ? new Date(step.started_at).getTime() / 1000 : null);

function timeline(list) {
  const known = list.filter((one) => one.started_at);
  const attempts = found.lost.filter((one) => one.at && one.step >= first && one.step <= (list.at(-1)?.step ?? 0) + 1);
  if (!known.length) return null;
  const noted = (one) => new Date(one.at).getTime() / 1000;
  const begin = Math.min(...known.map((one) => since(one) - one.waited_seconds), ...attempts.map((one) => noted(one) - one.seconds));
  const end = Math.max(...known.map((one) => since(one) + (one.duration_ms || 0) / 1000), ...attempts.map(noted));
  const rows = known.map((one) => {
    const at = since(one) - begin;
    const tools = Math.min(one.tool_calls.reduce((sum, call) => sum + (call.duration_ms || 0), 0) / 1000, (one.duration_ms || 0) / 1000);
    const until = at + (one.duration_ms || 0) / 1000;
    return [
      { name: `step ${one.step}: waited ${duration(one.waited_seconds)} ${one.waited_for}`, from: at - one.waited_seconds, to: at, kind: "waiting" },
      { name: `step ${one.step}: model ${duration(until - tools - at)}`, from: at, to: until - tools, kind: one.errors.length ? "failed" : "model" },
      { name: `step ${one.step}: tools ${duration(tools)}`, from: until - tools, to: until, kind: "tools" },
      ...one.tool_calls.map(startedBy).filter(Boolean).map((run) => ({ name: `step ${one.step}: run of ${run.agent} ${duration(lasted(run))}`, from: new Date(run.created) / 1000 - begin, to: new Date(run.ended) / 1000 - begin, kind: "paused" })),
    ].filter((part) => part.to > part.from);
  });
  rows.push(...attempts.map((one) => [{ name: `step ${one.step}: lost attempt, ${KINDS[one.kind] || one.kind}`, from: noted(one) - one.seconds - begin, to: noted(one) - begin, kind: "lost" }]));
  const legend = [["waiting", "waiting for limits"], ["model", "model"], ["tools", "tools"], ["paused", "runs below"], ["failed", "with errors, or lost"]];
  return el("section", { "aria-label": "Timeline" }, spans(`Steps over ${duration(end - begin)}`, rows, end - begin),
    el("ul", { class: "sf-legend mt-2" }, legend.map(([kind, name]) => el("li", {}, el("span", { class: `sf-key sf-key-${kind}`, "aria-hidden": "true" }), name))));
}

/** A folded text; where it is cut, with a link to all of it. */
function whole(one, part, made) {
  if (one.cut.includes(part)) made.append(el("p", { class: "ms-3 mb-1" }, download(one.step, part, "Download the full text")));
  return made;
}

const download = (number, part, name) => el("a", { id: `text-${number}-${part}`, href: address(`${path}/text`, { step: number, part }), "aria-label": `${name}: step ${number}, ${part.replace(/:(\d+)$/, (_, at) => ` ${Number(at) + 1}`)}` }, name);

function tool(one, call, at) {
  const below = call.run_id ? startedBy(call) : null;
  const made = call.duration_ms === null ? null : call.duration_ms / 1000;
  const took = call.run_id ? below && `its run took ${duration(lasted(below))}` : duration(made);
  const name = [el("bdi", {}, call.tool), took ? ` · ${took}` : "", call.is_error ? " · failed" : ""];
  const started = call.run_id ? el("a", { class: "small", href: page(`/runs/${encodeURIComponent(call.run_id)}`) }, "the run that it started") : null;
  const decision = call.decision ? el("div", { class: "sf-muted small sf-wrap" }, call.decision) : null;
  return el("div", { class: "ms-3" }, el("div", { class: call.is_error ? "sf-error" : null }, name), started, decision, call.error ? el("div", { class: "sf-error small" }, call.error) : null,
    one.cut.includes(`error:${at}`) ? download(one.step, `error:${at}`, "Download the full error") : null,
    call.arguments === null ? null : whole(one, `arguments:${at}`, folded("arguments", call.arguments)),
    call.result === null ? null : whole(one, `result:${at}`, folded("result", call.result)));
}

function step(one) {
  if (one.too_large) return el("article", { class: "sf-card" }, el("h3", {}, `Step ${one.step}`), el("p", {}, "It is too large for this page: stepfleet show has all of it. ", one.cut.includes("step") ? download(one.step, "step", "Download it") : null));
  const about = [one.model, `${one.usage_estimated ? "~" : ""}${many(one.tokens, "token")} (${count(one.output_tokens)} written${one.cached_tokens ? `, ${count(one.cached_tokens)} cached by the provider` : ""})`, usd(one.cost_usd, one.price_estimated || one.usage_estimated), SHORTENED[one.finish_reason] || null, duration(one.duration_ms === null ? null : one.duration_ms / 1000), one.cached ? "answered from the cache" : null,
    one.waited_seconds >= 0.05 ? `waited ${duration(one.waited_seconds)}${one.waited_for ? ` for ${one.waited_for}` : ""}` : null, one.worker].filter(Boolean);
  if (!one.type) return el("article", { class: "sf-card" }, el("h3", {}, `Step ${one.step}`), el("p", { class: "sf-muted" }, "Its memory policy has removed this step from the log."));
  const again = action("Again from here", () => fork(one.step - 1, `Again from step ${one.step}`), "link");
  again.id = `again-${one.step}`;
  again.setAttribute("aria-label", `Again from step ${one.step}`);
  const made = el("article", { class: "sf-card" },
    one.given === null ? null : whole(one, "given", folded("message to the run", one.given, one.given.length < 400)),
    el("h3", {}, `Step ${one.step}`, one.agent ? [" · ", el("bdi", {}, one.agent)] : "", one.type ? ` · ${one.type.replaceAll("_", " ")}` : ""),
    el("p", { class: "sf-muted small sf-wrap" }, about.map((part, at) => [at ? " · " : "", el("bdi", {}, part)])),
    one.errors.map((error, at) => el("p", { class: "sf-error" }, error, one.cut.includes(`errors:${at}`) ? [" ", download(one.step, `errors:${at}`, "Download the full error")] : null)),
    one.text ? whole(one, "text", folded("answer", one.text, true)) : null,
    one.tool_calls.map((call, at) => tool(one, call, at)), again);
  made.querySelectorAll("details").forEach((part, at) => { part.dataset.key = `${one.step}:${at}`; });
  return made;
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
  const there = await get(`/runs/${encodeURIComponent(other)}`, { first, limit: STEPS }).catch(() => null);
  if (!there) return el("p", { class: "sf-muted sf-wrap" }, `Run ${other} is not there any more, so there is nothing to compare with.`);
  const { run } = there;
  const row = (name, read) => [name, read(found.run), read(run)];
  const heads = ["", "this run", el("a", { href: page(`/runs/${encodeURIComponent(other)}`) }, "the other")].map((name) => ({ name }));
  return [table("This run next to another", heads, [
    row("Status", (one) => badge(one.status)), row("Stop reason", (one) => one.stop_reason || ""), row("Steps", (one) => count(one.steps)),
    row("Tokens", (one) => count(one.tokens)), row("Cost", (one) => usd(one.cost_usd)), row("Active", (one) => duration(one.active_seconds)), row("Error", (one) => one.error || ""),
  ]), stepsBeside(found.steps, there.steps, heads)];
}

function stepsBeside(mine, theirs, heads) {
  const did = (one) => one && [one.type, one.text, one.errors, one.tool_calls.map((call) => [call.tool, call.arguments, call.result, call.error])];
  const differs = (at) => JSON.stringify(did(mine[at])) !== JSON.stringify(did(theirs[at]));
  const all = [...Array(Math.max(mine.length, theirs.length)).keys()];
  const from = all.find(differs);
  if (from === undefined) return all.length ? el("p", {}, "The steps of this page are alike in both.") : null;
  const cell = (one) => (one ? el("div", { class: "sf-wrap" }, [...one.tool_calls.map((call) => `${call.tool}(${call.arguments ?? ""}) → ${call.error ?? call.result ?? ""}`), one.text, ...one.errors].filter(Boolean).map((text) => el("p", { class: "mb-1" }, text.length > 400 ? `${text.slice(0, 400)}…` : text))) : "none");
  return el("details", { class: "sf-folded mb-3", "data-key": "beside", open: true }, el("summary", {}, `They differ from step ${first + from}`),
    table("Steps side by side", heads, all.slice(from).map((at) => [`Step ${first + at}${differs(at) ? "" : " (alike)"}`, cell(mine[at]), cell(theirs[at])])));
}

let turn = 0;
let shown = "";

async function asks() {
  const own = await get("/approvals", { run: id });
  const others = children.length ? await get("/approvals", { below: id }) : { waiting: [] };
  return [...own.waiting, ...others.waiting];
}

async function load() {
  const mine = ++turn;
  let read;
  let other;
  try {
    read = await get(path, { first, limit: STEPS });
    found = read;
    other = await beside();
    children = (await get("/runs", { parent: id, limit: CHILDREN })).runs;
    waiting = read.waits_for && !isOver(read.run) ? await asks() : [];
  } catch (error) {
    if (mine === turn) failed(error);
    return;
  }
  const state = JSON.stringify([first, read, waiting, children, other?.toString()]);
  // Only what has changed is drawn anew: a reader may be in the middle of it.
  if (mine !== turn || (state === shown && !other)) return;
  shown = state;
  keepingPlace(() => {
    renew(head, header(read.run), other);
    renew(steps, el("h2", { class: "h5" }, "Steps"), timeline(read.steps), pages(),
      read.content ? null : el("p", { class: "alert alert-secondary" }, "Texts of models and tools are not shown here: Flower was started without them, or without a password."),
      read.steps.length ? read.steps.map(step) : el("p", { class: "sf-muted" }, read.run.steps ? "There are no steps here." : "No step is committed yet."),
      read.given !== null && !read.next ? whole({ step: read.run.steps + 1, cut: read.given_cut ? ["given"] : [] }, "given", folded("message to the run, not answered yet", read.given, true)) : null,
      read.steps.length > 5 ? pages() : null);
  });
}

/** A run that is gone has no buttons. When Flower is away, what is known stays. */
function failed(error) {
  const isGone = error.status === 404;
  if (isGone || !shown) fill(steps);
  if (isGone) fill(text);
  const hint = isGone ? el("p", {}, "Runs are removed by stepfleet purge, and some time after their end. ", el("a", { href: page("/runs") }, "All runs")) : null;
  if (isGone || !shown) fill(head, problem(error), hint);
  else if (!head.querySelector("[role=alert]")) head.prepend(problem(error));
  shown = isGone ? "" : `${shown} `;
  tryAgain(error, load);
}

/** Leave open what is open, and the keyboard where it is. */
function keepingPlace(change) {
  const all = () => [...content.querySelectorAll("details[data-key]")];
  const before = new Map(all().map((one) => [one.dataset.key, one.open]));
  const focused = document.activeElement?.id;
  const summary = document.activeElement?.closest("summary")?.parentElement.dataset.key;
  change();
  for (const one of all()) if (before.has(one.dataset.key)) one.open = before.get(one.dataset.key);
  if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus();
  if (summary) all().find((one) => one.dataset.key === summary)?.querySelector("summary").focus();
}

function written(data) {
  const isOpen = Boolean(data?.is_open && data.text);
  fill(text, isOpen ? el("article", { class: "sf-card" }, el("h3", {}, `Step ${data.step} is being written`), data.left_out ? el("p", { class: "sf-muted" }, `${count(data.left_out)} characters before this`) : null, el("pre", { class: "sf-wrap" }, data.text)) : null);
}

content.removeAttribute("aria-live");
fill(content, head, text, steps);
await load();
follow([`run:${id}`, `text:${id}`, "fleet"], (topic, data) => {
  if (topic.startsWith("text:")) written(data);
  else if (topic !== "fleet" || isOfFleet(data)) load();
});

/** Whether the page shows what changes without this run: runs next to it, and a pause of the fleet. */
function isOfFleet({ paused }) {
  if (!found || isOver(found.run)) return children.some((one) => !isOver(one));
  return paused !== found.fleet_paused || Object.keys(found.before).length > 0 || children.some((one) => !isOver(one));
}
