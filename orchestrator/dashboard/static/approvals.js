// The page of approvals: calls that wait for people, equal ones together, and what decides them.

import { get } from "./api.js";
import { decisions, runLink } from "./decisions.js";
import { count, el, fill, folded, problem, renew, table, time } from "./dom.js";
import { follow, tryAgain } from "./live.js";

const SHORT = 300; // characters of arguments that are shown without a click
const PAGES = 10; // of 200 calls each; more are decided on the command line, or as one group
const content = document.getElementById("content");
const list = el("div", { "aria-live": "off" });
let shown = 0;
let drawn = "";

function row(same) {
  const [{ ask, is_hidden: isHidden }] = same;
  const isQuestion = ask.kind === "question";
  const about = isHidden ? "not shown here" : JSON.stringify(ask.arguments, null, 1);
  const link = runLink(ask.run_id);
  const others = same.length > 1 ? ` and ${count(same.length - 1)} more` : "";
  const words = isQuestion && !isHidden ? String(ask.arguments.question ?? "") : ask.tool;
  return [
    count(same.length),
    el("div", { class: "sf-wrap" }, el("strong", { class: "sf-clamp" }, words), folded(isQuestion ? "question" : "arguments", about, !isQuestion && about.length <= SHORT)),
    decisions(same, load),
    el("div", { class: "sf-wrap" }, ask.agent, ask.tenant ? el("div", { class: "sf-muted small" }, ask.tenant) : null),
    el("div", {}, link, others),
    el("div", {}, time(ask.since), ask.until ? el("div", { class: "sf-muted small" }, "until ", time(ask.until)) : null),
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
    const text = JSON.stringify([found, isAll]);
    if (text === drawn) return; // arguments that somebody reads stay open
    drawn = text;
    const groups = new Map();
    for (const one of found) {
      const key = one.ask.kind === "question" ? one.ask.key : one.group;
      groups.set(key, [...(groups.get(key) || []), one]);
    }
    const columns = [{ name: "Calls", right: true }, "What", "Decision", "Agent", "Run", "Waits since"];
    const rows = [...groups.values()].map(row);
    const more = isAll ? null : el("p", { class: "sf-muted" }, "There are more; decide groups, or use stepfleet approvals.");
    renew(list, table("Calls that wait for a person", columns, rows, "Nothing waits for a person."), more);
  } catch (error) {
    if (mine !== shown) return;
    drawn = "";
    renew(list, problem(error));
    tryAgain(error, load);
  }
}

content.removeAttribute("aria-live");
fill(content, list);
load();
follow(["fleet"], load);
