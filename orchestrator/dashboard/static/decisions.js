// Decisions of calls that wait for people: equal ones together, each with the name of Flower's user.

import { page, post } from "./api.js";
import { confirm, form, notify } from "./dialog.js";
import { action, count, el } from "./dom.js";

/** A link to a run; a run below another one has both ends of its id. */
export function runLink(run) {
  const [above, ...below] = run.split(".");
  const name = below.length ? `${above.slice(0, 8)}…${below.at(-1)}` : run.slice(0, 8);
  return el("a", { href: page(`/runs/${encodeURIComponent(run)}`), title: run, "aria-label": `Run ${run}` }, name);
}

const decided = (done) => notify(`${count(done.runs)} decided${done.left_alone ? `, ${count(done.left_alone)} had been before` : ""}`);

/** The calls that are decided, as the API takes them. The tool and the agent are for the audit. */
function places(same, { filter = {} }) {
  const [{ ask, group }] = same;
  const named = { tool: ask.tool, agent: ask.agent };
  return same.length === 1 ? { runs: [ask.run_id], at: ask.index, filter: { ...named, key: ask.key } } : { filter: { ...filter, ...named, group, kind: ask.kind } };
}

/** The same in words: also calls are decided that nobody has read here. */
function words(same, { isAll = true, filter = {} }) {
  if (same.length === 1) return "This call alone";
  const narrowed = Object.keys(filter).length ? " and match the filter" : "";
  return `All calls equal to this one that wait${narrowed}: ${isAll ? "" : "at least "}${count(same.length)} when this page was read`;
}

const asked = (verb, { ask }) => [`${verb} `, el("bdi", {}, ask.tool), "?"];

async function approve(same, reload, scope) {
  if (!(await confirm({ title: asked("Approve", same[0]), text: `${words(same, scope)}. Approved calls are made now.`, button: "Approve" }))) return;
  try {
    decided(await post("/approvals/approve", places(same, scope)));
  } catch (error) {
    notify(error.message, true);
  }
  reload();
}

async function deny(same, reload, scope) {
  const act = ({ reason }) => post("/approvals/deny", { ...places(same, scope), message: reason });
  const fields = [{ label: "Reason, which the model reads", name: "reason" }];
  const done = await form({ title: asked("Deny", same[0]), text: `${words(same, scope)}.`, fields, button: "Deny", danger: true, act });
  if (done) decided(done);
  reload();
}

async function answer(same, reload, scope) {
  const [{ ask }] = same;
  const options = Array.isArray(ask.arguments.options) ? ask.arguments.options.map((one) => [String(one), String(one)]) : null;
  const act = ({ text }) => post("/approvals/answer", { ...places(same, scope), message: text });
  const fields = [{ label: "Answer", name: "text", options }];
  const done = await form({ title: String(ask.arguments.question || "A question"), fields, button: "Answer", act });
  if (done) decided(done);
  reload();
}

/**
 * Buttons that decide equal calls, as the API has them; `reload` is called after each. The scope is
 * the `filter` of the calls, and whether the page `isAll`, so that it has all of them.
 */
export function decisions(same, reload, scope = {}) {
  const isQuestion = same[0].ask.kind === "question";
  return el("div", { class: "sf-buttons" },
    isQuestion ? action("Answer", () => answer(same, reload, scope), "primary", "approver") : action("Approve", () => approve(same, reload, scope), "primary", "approver"),
    action("Deny", () => deny(same, reload, scope), "outline-danger", "approver"));
}
