// Decisions of calls that wait for people: equal ones together, each with the name of Flower's user.

import { page, post } from "./api.js";
import { confirm, form, notify } from "./dialog.js";
import { button, count, el } from "./dom.js";

/** A link to a run; a run below another one has both ends of its id. */
export function runLink(run) {
  const [above, ...below] = run.split(".");
  const name = below.length ? `${above.slice(0, 8)}…${below.at(-1)}` : run.slice(0, 8);
  return el("a", { href: page(`/runs/${encodeURIComponent(run)}`), title: run, "aria-label": `Run ${run}` }, name);
}

const decided = (done) => notify(`${count(done.runs)} decided${done.left_alone ? `, ${count(done.left_alone)} had been before` : ""}`);

const places = (same) => (same.length === 1 ? { runs: [same[0].ask.run_id], at: same[0].ask.index, filter: { key: same[0].ask.key } } : { filter: { group: same[0].group, kind: same[0].ask.kind } });

async function approve(same, reload) {
  const many = same.length === 1 ? "this call" : `all calls equal to this one (${count(same.length)} here)`;
  if (!(await confirm({ title: `Approve ${same[0].ask.tool}?`, text: `It is made now: ${many}.`, button: "Approve" }))) return;
  try {
    decided(await post("/approvals/approve", places(same)));
  } catch (error) {
    notify(error.message, true);
  }
  reload();
}

async function deny(same, reload) {
  const act = ({ reason }) => post("/approvals/deny", { ...places(same), message: reason });
  const fields = [{ label: "Reason, which the model reads", name: "reason" }];
  const done = await form({ title: `Deny ${same[0].ask.tool}?`, text: `${count(same.length)} here.`, fields, button: "Deny", danger: true, act });
  if (done) decided(done);
  reload();
}

async function answer(same, reload) {
  const [{ ask }] = same;
  const options = Array.isArray(ask.arguments.options) ? ask.arguments.options.map((one) => [String(one), String(one)]) : null;
  const act = ({ text }) => post("/approvals/answer", { ...places(same), message: text });
  const fields = [{ label: "Answer", name: "text", options }];
  const done = await form({ title: String(ask.arguments.question || "A question"), fields, button: "Answer", act });
  if (done) decided(done);
  reload();
}

/** Buttons that decide equal calls, as the API has them; `reload` is called behind each. */
export function decisions(same, reload) {
  const isQuestion = same[0].ask.kind === "question";
  return el("div", { class: "sf-buttons" },
    isQuestion ? button("Answer", () => answer(same, reload), "primary") : button("Approve", () => approve(same, reload), "primary"),
    button("Deny", () => deny(same, reload), "outline-danger"));
}
