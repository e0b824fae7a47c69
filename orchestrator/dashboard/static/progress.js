// How far a batch is: its bars, its rate and when it will end. What two pages share.

import { bar } from "./chart.js";
import { count, duration, el } from "./dom.js";

const WINDOW = 30_000;
const PRESSED = 50; // ms: how soon what is pressed is looked at again
const KINDS = { completed: "completed", error: "failed", user_requested: "cancelled" };
const OPEN = ["in_progress", "queued", "paused"];

const newest = new WeakMap();

/** Draw a part of the page anew; what had the focus there has it again, known by its address or its name. */
export function redraw(node, draw) {
  newest.set(node, draw);
  if (node.querySelector("a:active, button:active")) { // a button that goes while it is pressed gets no click
    setTimeout(() => newest.get(node) === draw && redraw(node, draw), PRESSED);
    return;
  }
  const key = (one) => one.href || one.textContent;
  const before = node.contains(document.activeElement) ? key(document.activeElement) : null;
  draw();
  if (before === null) return;
  const all = [...node.querySelectorAll("a, button, summary")];
  (all.find((one) => key(one) === before) || all[0])?.focus({ preventScroll: true });
}

/** How many runs of a batch have ended. */
export const ended = (one) => one.completed + one.failed + one.cancelled + one.stopped;

/** How many runs of a batch were created and have not ended. */
export const open = (one) => one.queued + one.in_progress + one.paused;

/** The runs of a batch by stop reason, and those that go on by status, as parts of a bar. */
export function parts(one) {
  const reasons = Object.entries(one.by_reason)
    .sort(([first], [second]) => (second === "completed") - (first === "completed"))
    .map(([name, value]) => ({ name: name.replaceAll("_", " "), value, kind: KINDS[name] || "stopped" }));
  const rest = OPEN.map((name) => ({ name: name.replaceAll("_", " "), value: one[name], kind: name }));
  const missing = { name: "not created yet", value: Math.max(one.total - one.submitted, 0), kind: "none" };
  return [...reasons, ...rest, one.sealed ? { ...missing, value: 0 } : missing];
}

/** A bar of a batch's runs; with a legend below it if there is room. */
export function outcome(one, withLegend = false) {
  const shown = parts(one).filter((part) => part.value > 0);
  const drawn = bar(`Runs of batch ${one.batch_id}`, shown);
  if (!withLegend) return drawn;
  const entry = (part) => el("li", {}, el("span", { class: `sf-key sf-key-${part.kind}`, "aria-hidden": "true" }), `${part.name}: ${count(part.value)}`);
  return el("div", {}, drawn, el("ul", { class: "sf-legend mt-2" }, shown.map(entry)));
}

/** In words what a batch is doing. */
export function state(one) {
  if (one.held && open(one)) return "held";
  if (one.cancel_requested) return open(one) ? "being cancelled" : "cancelled";
  if (one.refused) return "not begun";
  if (!one.sealed && one.follows) return "waits for the batch before it";
  if (!one.sealed) return one.submission_stalled ? "submission stopped" : "being submitted";
  if (!open(one)) return ended(one) === one.completed ? "completed" : "ended";
  if (one.paused === open(one)) return "paused";
  return one.in_progress ? "running" : "waiting";
}

/** How fast runs of batches end: over the last half minute, or before that is known on the whole. */
export class Pace {
  #samples = new Map();

  /** Note a batch's progress. */
  note(one) {
    const now = performance.now();
    const before = (this.#samples.get(one.batch_id) || []).filter((sample) => sample.at >= now - WINDOW);
    this.#samples.set(one.batch_id, [...before, { at: now, ended: ended(one) }]);
  }

  /**
   * Runs per second and seconds until the end, as far as they are known: {rate, left, whole}.
   * Runs that are paused, or whose calls (`asks`) wait for people, end when somebody lets them.
   */
  of(one, asks = { count: 0, more: false }) {
    const held = one.paused + Math.min(asks.count, one.in_progress);
    if (!open(one) || held === open(one)) return { rate: null, left: null };
    const samples = this.#samples.get(one.batch_id) || [];
    const [first, last] = [samples[0], samples.at(-1)];
    const seconds = first && last ? (last.at - first.at) / 1000 : 0;
    const whole = seconds < 2;
    const age = (Date.now() - Date.parse(one.created)) / 1000;
    const rate = whole ? ended(one) / Math.max(age, 1) : Math.max(last.ended - first.ended, 0) / seconds;
    const missing = Math.max(one.total - ended(one) - held, 0);
    return { rate, left: rate > 0 && !asks.more ? missing / rate : null, whole };
  }

  /** The same in words. */
  text(one, asks) {
    const { rate, left, whole } = this.of(one, asks);
    if (rate === null) return null;
    const shown = rate >= 10 ? count(Math.round(rate)) : rate.toFixed(rate >= 0.1 ? 1 : 3);
    return `${shown} runs/s${whole ? " on average" : ""}, ${left === null ? "end unknown" : `about ${duration(left)} left`}`;
  }
}
