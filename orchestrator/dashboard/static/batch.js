// The page of a batch: how far it is, why runs failed, and what can be done about it.

import { address, get, named, page, post } from "./api.js";
import { action, count, duration, el, facts, fill, many as counted, problem, renew, table, time, usd } from "./dom.js";
import { attempt } from "./dialog.js";
import { follow, tryAgain } from "./live.js";
import { Pace, ended, open, outcome, redraw, state } from "./progress.js";

const id = named();
const path = `/batches/${encodeURIComponent(id)}`;
const READ = 5000; // failed runs that are read to group them
const NEXT = 20; // batches that follow this one and are named
const REGROUP = 10_000; // milliseconds between two readings of failures, where they change
const pace = new Pace();
const place = (className = "") => el("section", { class: className });
const [head, held, asks, buttons, waits, failures] = ["", "", "", "sf-buttons", "", ""].map(place);
const grouped = { bad: -1, at: 0, again: null, found: null };
let isReading = false;
let isStale = false;

const runs = (query) => page(`/runs?${new URLSearchParams({ batch: id, ...query })}`);
const batchLink = (other) => el("a", { href: page(`/batches/${encodeURIComponent(other)}`) }, other);
const many = (number) => counted(number, "run");

/** Ask, do it for the whole batch, and read anew. */
async function act(verb, title, text, body = {}, danger = false) {
  const done = (result) => `${verb}: ${many(result.runs)}`;
  await attempt({ title, text, button: title.split(" ")[0], danger }, () => post(`${path}/${verb}`, body), done);
  grouped.bad = -1;
  load();
}

function showHead(one, waiting) {
  const bad = ended(one) - one.completed;
  renew(head,
    outcome(one, true),
    facts([
      ["State", state(one)],
      ["Ended", `${count(ended(one))} of ${count(one.total)}`],
      ["Not completed", bad ? el("a", { href: "#failures" }, count(bad)) : "0"],
      ["Pace", pace.text(one, waiting)],
      ["Cost of its runs", usd(one.cost_usd, one.default_priced_usd > 0)],
      ["Answers cut at max_tokens", one.cut_answers || null], ["Answers cut by a content filter", one.filtered_answers || null],
      ["Of it at a default price", one.default_priced_usd > 0 ? usd(one.default_priced_usd) : null],
      ["With runs below them", el("a", { href: page(`/costs?${new URLSearchParams({ batch: id })}`) }, "costs of this batch")],
      ["Tokens", count(one.tokens)],
      ["Model calls", count(one.llm_calls)],
      ["Steps", count(one.steps)],
      ["Attempts lost", one.lost ? count(one.lost) : null],
      ["Agent", one.agent || null],
      ["Created", time(one.created)],
      ["Past retention", one.past_retention ? many(one.past_retention) : null],
      ["Runs", el("a", { href: runs({}) }, "all of them")],
      ["Follows batch", one.follows ? batchLink(one.follows) : null],
      ["Left out", one.left_out ? `${many(one.left_out)} of that batch without a result` : null],
      ["Is followed by", one.next.length ? one.next.slice(0, NEXT).map((next) => el("div", {}, batchLink(next))) : null],
    ]));
  fill(document.querySelector("#batch-page .page-description"), el("bdi", {}, one.name || "Batch"), ` · ${one.batch_id}`);
}

function showHeld(one) {
  const notes = [];
  if (one.held && open(one)) {
    notes.push(el("div", { class: "alert alert-danger", role: "alert" },
      el("h2", { class: "h6" }, "This batch is held"),
      el("p", { class: "sf-wrap" }, `${many(one.held.runs)} in a row failed with the same error: ${one.held.message}`),
      el("p", { class: "mb-2" }, "No more steps begin, so nothing is paid for in vain. Correct the cause (a key, a model's name, the agent's code), then resume the batch, and retry the runs that failed."),
      action("Resume the batch …", () => act("resume", "Resume this batch?", `${many(open(one))} go on.`), "danger")));
  }
  if (!one.sealed && one.submission_stalled && !one.cancel_requested) {
    notes.push(el("div", { class: "alert alert-warning" }, `Only ${count(one.submitted)} of ${count(one.total)} runs were created, and their submitter is gone. Submit the same file again, with the same agent and id: the others are created, and nothing runs twice.`));
  }
  if (one.refused) notes.push(el("div", { class: "alert alert-danger sf-wrap", role: "alert" }, `It has no runs: ${one.refused}`));
  renew(held, notes);
}

/** Calls of the batch that wait for people; `more` may wait than were looked at. */
function showAsks({ count: found, more }) {
  const number = !more ? counted(found, "call") : found ? `${count(found)} or more calls` : "Perhaps calls";
  const link = el("a", { href: page(`/approvals?${new URLSearchParams({ batch: id })}`) }, number);
  renew(asks, found || more ? el("p", { class: "alert alert-secondary" }, link, ` of this batch ${!more && found === 1 ? "waits" : "wait"} for a person.`) : null);
}

function showButtons(one) {
  const left = many(open(one));
  const bad = one.failed + one.stopped;
  const link = (name, params) => el("a", { class: "btn btn-sm btn-outline-secondary", href: address(`${path}/results`, params) }, name);
  renew(buttons,
    open(one) && one.paused < open(one) ? action("Pause …", () => act("pause", "Pause this batch?", `No step of its ${left} begins until it is resumed.`)) : null,
    one.paused || one.held ? action("Resume …", () => act("resume", "Resume this batch?", `${many(one.paused)} go on.`)) : null,
    open(one) ? action("Cancel …", () => act("cancel", "Cancel this batch?", `${left} end now, also those under way; what they have cost stays.`, {}, true), "outline-danger") : null,
    bad && !isGone() ? action("Retry …", () => act("retry", "Retry this batch's runs?", `${many(bad)} that failed or stopped at a limit are retried; their completed steps are kept. Cancelled runs stay as they are.`)) : null,
    ended(one) ? [link("Results as JSONL", {}), link("Results as CSV", { format: "csv" })] : null);
}

function showWaits(found) {
  if (!found.length) return renew(waits);
  const rows = found.map((one) => [one.waits_for || "limits of the fleet", many(one.runs), duration(one.seconds)]);
  return renew(waits, el("div", { class: "sf-card" }, el("h2", {}, "Waiting for limits"),
    table("Limits that runs wait for", ["Limit", { name: "Of up to 500 runs looked at", right: true }, { name: "Longest so far", right: true }], rows),
    el("p", { class: "mb-0" }, el("a", { href: page("/fleet") }, "Limits of the fleet"))));
}

function group(one, isWhole) {
  const where = `cause=${one.cause.key}`;
  const number = isWhole ? many(one.runs) : `at least ${many(one.runs)}`;
  const place = one.cause.tool ? `tool ${one.cause.tool}` : [one.cause.kind, one.cause.code].filter(Boolean).join(" ");
  const raised = Object.keys(one.limits).length ? ` At their limits they would end at once again: raised to ${Object.entries(one.limits).map(([name, value]) => `${name} ${value}`).join(", ")}.` : "";
  const retry = () => act("retry", `Retry ${number}?`, `All with this cause: ${one.cause.text || place}.${raised} Completed steps are kept.`, { where, overrides: one.limits });
  return [
    el("a", { href: runs({ where }), "aria-label": `The ${number} with this cause` }, count(one.runs)),
    el("div", { class: "sf-wrap" }, el("strong", {}, place), el("div", { class: "sf-error" }, one.example.text || "without an error"),
      el("div", { class: "sf-muted small" }, Object.entries(one.stop_reasons).map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", "), ", as in ", el("a", { href: page(`/runs/${encodeURIComponent(one.example.run_id)}`) }, one.example.line_id || "this run"))),
    action("Retry these …", retry),
  ];
}

function showFailures(found) {
  if (!found) return renew(failures);
  const gone = found.read < READ ? found.not_completed - found.read : 0;
  const isWhole = gone > 0 || found.read >= found.not_completed;
  const rows = found.groups.map((one) => group(one, isWhole));
  const said = gone > 0 ? `Of ${many(found.not_completed)}, ${count(gone)} ${gone === 1 ? "is" : "are"} not there any more: purged, past retention, or taken up again just now.` : `The first ${count(found.read)} of ${many(found.not_completed)} were read.`;
  const rest = gone > 0 || !isWhole ? el("p", { class: "sf-muted" }, said) : null;
  const more = found.ungrouped ? el("p", { class: "sf-muted" }, `${many(found.ungrouped)} more have other causes.`) : null;
  return renew(failures, el("h2", { class: "h5", id: "failures" }, "Why runs did not complete"),
    rows.length ? table("Causes", [{ name: "Runs", right: true }, "Cause", ""], rows) : null, rest, more);
}

/** Whether no run that did not complete is there any more: none can be retried. */
const isGone = () => grouped.found !== null && !grouped.found.read;

/** Whether it is time to group failures anew: they cost a look at every run of the batch. */
function isDue(bad) {
  const left = grouped.at + REGROUP - Date.now();
  if (bad === grouped.bad) return false;
  if (grouped.bad >= 0 && left > 0) {
    grouped.again ??= setTimeout(load, left);
    return false;
  }
  return true;
}

async function groupFailures(one) {
  const bad = ended(one) - one.completed;
  if (!isDue(bad)) return;
  clearTimeout(grouped.again);
  Object.assign(grouped, { bad, at: Date.now(), again: null });
  grouped.found = bad ? (await get(path, { failures: READ })).failures : null;
  redraw(failures, () => showFailures(grouped.found));
  redraw(buttons, () => showButtons(one));
}

async function load() {
  if (isReading) {
    isStale = true;
    return;
  }
  isReading = true;
  try {
    const found = await get(path, { failures: 0 });
    const one = found.progress;
    pace.note(one);
    redraw(head, () => showHead(one, found.asks));
    redraw(held, () => showHeld(one));
    redraw(buttons, () => showButtons(one));
    showAsks(found.asks);
    showWaits(found.waits);
    await groupFailures(one);
  } catch (error) {
    renew(held, problem(error));
    tryAgain(error, load);
  }
  isReading = false;
  if (isStale) {
    isStale = false;
    setTimeout(load, 500);
  }
}

const content = document.getElementById("content");
content.removeAttribute("aria-live"); // whole pages of numbers are not read aloud each second
fill(content, held, head, asks, buttons, waits, failures);
load();
follow([`batch:${id}`], load);
