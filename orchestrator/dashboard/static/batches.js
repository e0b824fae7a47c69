// The page of batches: the newest first, page by page, and the form that submits a file.

import { get, page } from "./api.js";
import { button, count, el, fill, problem, table, time, usd } from "./dom.js";
import { follow } from "./live.js";
import { Pace, ended, outcome, redraw, state } from "./progress.js";
import { uploadForm } from "./upload.js";

const LIMIT = 25;
const content = document.getElementById("content");
const list = el("div", { "aria-live": "off" });
const pace = new Pace();
const past = []; // the cursors of the pages before this one
let cursor = new URLSearchParams(location.search).get("cursor") || "";
let following = 0;

function row(one) {
  const link = el("a", { href: page(`/batches/${encodeURIComponent(one.batch_id)}`) }, one.name || one.batch_id);
  const bad = ended(one) - one.completed;
  return [
    el("div", { class: "sf-wrap" }, link, el("div", { class: "sf-muted small" }, el("bdi", {}, one.agent || "no agent"), ` · ${one.batch_id.slice(0, 8)}`)),
    el("div", {}, outcome(one), el("div", { class: "small" }, `${count(ended(one))} of ${count(one.total)} ended${bad ? `, ${count(bad)} not completed` : ""}`), el("div", { class: "sf-muted small" }, pace.text(one) || "")),
    state(one),
    time(one.created),
    usd(one.cost_usd, one.default_priced_usd > 0),
  ];
}

function pager(next) {
  const go = (where) => () => {
    cursor = where();
    history.replaceState(null, "", cursor ? `?cursor=${encodeURIComponent(cursor)}` : location.pathname);
    load();
  };
  const back = go(() => past.pop() ?? "");
  const on = go(() => { past.push(cursor); return next; });
  return el("nav", { class: "sf-buttons", "aria-label": "Pages of batches" },
    cursor ? button("Newer", back) : null, next ? button("Older", on) : null);
}

async function load() {
  const mine = ++following;
  try {
    const found = await get("/batches", { limit: LIMIT, cursor });
    if (mine !== following) return; // another page was chosen meanwhile
    found.batches.forEach((one) => pace.note(one));
    const columns = ["Batch", "Runs by stop reason", "State", "Created", { name: "Cost", right: true }];
    const empty = cursor ? "There are no older batches." : "No batch yet: submit a file, or use stepfleet submit.";
    redraw(list, () => fill(list, table("Batches", columns, found.batches.map(row), empty, { stacks: true }), pager(found.next)));
  } catch (error) {
    if (mine === following) fill(list, problem(error), cursor ? button("To the newest", () => { cursor = ""; past.length = 0; load(); }) : null);
  }
}

content.removeAttribute("aria-live");
fill(content, uploadForm(), list);
load();
follow(["fleet"], load);
