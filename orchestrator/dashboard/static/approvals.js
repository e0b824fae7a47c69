// The page of approvals: calls that wait for people, equal ones together, and what decides them.

import { get, page, post } from "./api.js";
import { confirm, form, notify } from "./dialog.js";
import { button, count, el, fill, folded, problem, table, time } from "./dom.js";
import { follow } from "./live.js";

const PAGES = 10; // of 200 calls each; more are decided on the command line, or as one group
const content = document.getElementById("content");
const list = el("div", { "aria-live": "off" });
let shown = 0;

const decided = (done) => notify(`${count(done.runs)} decided${done.left_alone ? `, ${count(done.left_alone)} had been before` : ""}`);

const places = (same) => (same.length === 1 ? { runs: [same[0].ask.run_id], at: same[0].ask.index, filter: { key: same[0].ask.key } } : { filter: { group: same[0].group, kind: same[0].ask.kind } });

async function approve(same) {
  const many = same.length === 1 ? "this call" : `all calls equal to this one (${count(same.length)} here)`;
  if (!(await confirm({ title: `Approve ${same[0].ask.tool}?`, text: `It is made now: ${many}.`, button: "Approve" }))) return;
  try {
    decided(await post("/approvals/approve", places(same)));
  } catch (error) {
    notify(error.message, true);
  }
  load();
}

async function deny(same) {
  const act = ({ reason }) => post("/approvals/deny", { ...places(same), message: reason });
  const fields = [{ label: "Reason, which the model reads", name: "reason" }];
  const done = await form({ title: `Deny ${same[0].ask.tool}?`, text: `${count(same.length)} here.`, fields, button: "Deny", danger: true, act });
  if (done) decided(done);
  load();
}

async function answer(same) {
  const [{ ask }] = same;
  const options = Array.isArray(ask.arguments.options) ? ask.arguments.options.map((one) => [String(one), String(one)]) : null;
  const act = ({ text }) => post("/approvals/answer", { ...places(same), message: text });
  const fields = [{ label: "Answer", name: "text", options }];
  const done = await form({ title: String(ask.arguments.question || "A question"), fields, button: "Answer", act });
  if (done) decided(done);
  load();
}

function row(same) {
  const [{ ask, is_hidden: isHidden }] = same;
  const isQuestion = ask.kind === "question";
  const about = isHidden ? "not shown here" : JSON.stringify(ask.arguments, null, 1);
  const link = el("a", { href: page(`/runs/${encodeURIComponent(ask.run_id)}`) }, ask.run_id.slice(0, 8));
  const others = same.length > 1 ? ` and ${count(same.length - 1)} more` : "";
  const words = isQuestion && !isHidden ? String(ask.arguments.question ?? "") : ask.tool;
  return [
    count(same.length),
    el("div", { class: "sf-wrap" }, el("strong", {}, words), folded(isQuestion ? "question" : "arguments", about)),
    el("div", { class: "sf-wrap" }, ask.agent, ask.tenant ? el("div", { class: "sf-muted small" }, ask.tenant) : null),
    el("div", {}, link, others),
    el("div", {}, time(ask.since), ask.until ? el("div", { class: "sf-muted small" }, "until ", time(ask.until)) : null),
    el("div", { class: "sf-buttons" },
      isQuestion ? button("Answer", () => answer(same), "primary") : button("Approve", () => approve(same), "primary"),
      button("Deny", () => deny(same), "outline-danger")),
  ];
}

async function read() {
  const found = [];
  let cursor = "";
  for (let pages = 0; pages < PAGES; pages += 1) {
    const part = await get("/approvals", { cursor });
    found.push(...part.waiting);
    if (!part.next) return { found, isAll: true };
    cursor = part.next;
  }
  return { found, isAll: false };
}

async function load() {
  const mine = ++shown;
  try {
    const { found, isAll } = await read();
    if (mine !== shown) return;
    const groups = new Map();
    for (const one of found) {
      const key = one.ask.kind === "question" ? one.ask.key : one.group;
      groups.set(key, [...(groups.get(key) || []), one]);
    }
    const columns = [{ name: "Calls", right: true }, "What", "Agent", "Run", "Waits since", "Decision"];
    const rows = [...groups.values()].map(row);
    const more = isAll ? null : el("p", { class: "sf-muted" }, "There are more; decide groups, or use stepfleet approvals.");
    fill(list, table("Calls that wait for a person", columns, rows, "Nothing waits for a person."), more);
  } catch (error) {
    if (mine === shown) fill(list, problem(error));
  }
}

content.removeAttribute("aria-live");
fill(content, list);
load();
follow(["fleet"], load);
