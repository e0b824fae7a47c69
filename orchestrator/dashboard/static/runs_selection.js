// Which runs are selected, and what is done with them: some, or all of a filter.

import { page, post } from "./api.js";
import { form, notify } from "./dialog.js";
import { action, button, count, el, fill, may } from "./dom.js";

const AT_ONCE = 500;
const LISTED = 100;
const OPEN = ["queued", "in_progress", "paused"];
const VERBS = {
  retry: { title: "Retry", done: "taken up again", statuses: ["failed", "stopped"], text: "Each continues at its failed step; completed steps are kept." },
  cancel: { title: "Cancel", done: "cancelled", statuses: OPEN, danger: true, text: "Running steps are interrupted. A cancelled run can be retried." },
  pause: { title: "Pause", done: "paused", statuses: ["queued", "in_progress"], text: "No step of them begins until they are resumed." },
  resume: { title: "Resume", done: "resumed", statuses: ["paused"], text: "They continue where they were paused." },
};

export class Selection {
  /** `filters` returns the filter of the list; `reload` reads the list again. */
  constructor(filters, reload) {
    this.bar = el("div");
    this.filters = filters;
    this.reload = reload;
    this.picked = new Set();
    this.whole = false;
    this.runs = [];
    this.isLong = false;
    this.isBusy = false;
    this.said = el("span", { role: "status" });
    this.outcome = el("div");
    this.buttons = Object.entries(VERBS).map(([verb, { title, danger }]) => {
      const made = action(title, () => this.ask(verb), danger ? "outline-danger" : "outline-primary");
      made.id = `action-${verb}`;
      return made;
    });
    this.every = button("", () => this.all(!this.whole), "link");
    this.every.id = "select-filter";
    fill(this.bar, el("div", { class: "sf-buttons", role: "group", "aria-label": "Actions on selected runs" }, this.buttons, this.said, this.every), this.outcome);
    this.tick();
  }

  /** Take the runs of the page that is shown. `isLong`: the filter has more. */
  show(runs, isLong) {
    this.runs = runs;
    this.isLong = isLong;
    this.tick();
  }

  /** Select nothing. */
  clear() {
    this.picked.clear();
    this.whole = false;
    this.tick();
  }

  /** The box that selects a page. */
  head() {
    return this.input("pick-page", "Select all runs of this page", (wanted) => {
      this.whole = false;
      for (const run of this.runs) this.picked[wanted ? "add" : "delete"](run.run_id);
    });
  }

  /** The box that selects a run. */
  box(run) {
    return this.input(`pick-${run.run_id}`, `Select run ${run.run_id}`, (wanted) => {
      if (this.whole) for (const one of this.runs) this.picked.add(one.run_id);
      this.whole = false;
      this.picked[wanted ? "add" : "delete"](run.run_id);
    });
  }

  input(id, label, change) {
    const made = el("input", { type: "checkbox", class: "form-check-input", id, "aria-label": label });
    made.checked = this.isPicked(id);
    made.addEventListener("change", () => {
      change(made.checked);
      this.tick();
    });
    return made;
  }

  isPicked(id) {
    if (id === "pick-page") return this.runs.length > 0 && this.runs.every((run) => this.whole || this.picked.has(run.run_id));
    return this.whole || this.picked.has(id.slice("pick-".length));
  }

  all(wanted) {
    this.picked.clear();
    this.whole = wanted;
    this.tick();
  }

  /** Have all controls say what is selected. */
  tick() {
    for (const box of document.querySelectorAll('input[id^="pick-"]')) box.checked = this.isPicked(box.id);
    const some = this.picked.size;
    const text = this.whole ? "All runs of this filter are selected." : some ? `${count(some)} selected.` : "None selected.";
    if (!this.isBusy && this.said.textContent !== text) this.said.textContent = text;
    for (const one of this.buttons) one.disabled = this.isBusy || !may("operator") || !(some || this.whole);
    this.every.textContent = this.whole ? "Select none" : "Select all runs of this filter";
    this.every.hidden = this.isBusy || !(this.whole || this.isLong || this.isPicked("pick-page"));
  }

  async ask(verb) {
    const { title, text, danger } = VERBS[verb];
    const what = this.whole ? `all runs of this filter` : `${count(this.picked.size)} run${this.picked.size === 1 ? "" : "s"}`;
    const fields = verb === "retry" ? [{ label: "New limit of steps (empty: as it is)", name: "max_steps", type: "number" }] : [];
    const given = await form({ title: `${title} ${what}?`, text: this.whole ? `${this.extent(verb)} ${text}` : text, fields, button: title, danger });
    if (given === null) return;
    const overrides = given.max_steps ? { max_steps: Number(given.max_steps) } : {};
    await this.act(verb, overrides);
  }

  extent(verb) {
    const filters = this.filters();
    const conditions = Object.entries(filters).map(([name, value]) => `${value ? "" : "no "}${name.replaceAll("_", " ")} ${value}`.trim());
    const kinds = filters.status || filters.stop_reason ? [] : VERBS[verb].statuses.map((one) => one.replaceAll("_", " "));
    return `Affected are ${conditions.length ? `runs with ${conditions.join(", ")}` : "all runs of the fleet"}${kinds.length ? ` that are ${kinds.join(" or ")}` : ""}.`;
  }

  /** The requests of an action: ids in parts, or a filter for each status that it concerns. */
  parts(verb, overrides) {
    if (!this.whole) {
      const ids = [...this.picked];
      const starts = [...ids.keys()].filter((at) => at % AT_ONCE === 0);
      return starts.map((at) => ({ runs: ids.slice(at, at + AT_ONCE), overrides }));
    }
    const filter = this.filters();
    const statuses = filter.status || filter.stop_reason ? [null] : VERBS[verb].statuses;
    return statuses.map((status) => ({ filter: status ? { ...filter, status } : filter, overrides }));
  }

  async act(verb, overrides) {
    const total = { done: 0, left: 0, refused: {} };
    let isStopped = false;
    const stop = button("Stop", () => {
      isStopped = true;
    }, "outline-secondary");
    const parts = this.parts(verb, overrides);
    this.isBusy = true;
    fill(this.outcome, stop);
    this.tick();
    try {
      for (const part of parts) {
        let cursor = null;
        do {
          const result = await post(`/runs/${verb}`, cursor ? { ...part, cursor } : part);
          total.done += result.runs;
          total.left += result.left_alone;
          if (Object.keys(total.refused).length < LISTED) Object.assign(total.refused, result.refused);
          cursor = result.next;
          this.said.textContent = this.word(verb, total);
        } while (cursor && !isStopped);
        if (isStopped) break;
      }
      notify(`${this.word(verb, total)}${isStopped ? " Stopped." : ""}`);
      this.picked.clear();
      this.whole = false;
    } catch (error) {
      notify(`${error.message} ${total.done ? this.word(verb, total) : ""}`, true);
    } finally {
      this.isBusy = false;
      fill(this.outcome, this.refusals(total));
      this.tick();
      this.reload();
    }
  }

  word(verb, total) {
    const left = total.left ? ` ${count(total.left)} left alone.` : "";
    return `${count(total.done)} ${total.done === 1 ? "run" : "runs"} ${VERBS[verb].done}.${left}`;
  }

  refusals({ left, refused }) {
    const entries = Object.entries(refused);
    if (!entries.length) return null;
    const close = el("button", { type: "button", class: "btn-close float-end", "aria-label": "Close", onclick: () => fill(this.outcome) });
    const line = ([run, why]) => el("li", {}, el("a", { class: "sf-id", href: page(`/runs/${encodeURIComponent(run)}`) }, run), `: ${why}`);
    const more = left > entries.length ? el("p", { class: "mb-0" }, `and ${count(left - entries.length)} more`) : null;
    return el("div", { class: "alert alert-warning sf-wrap", role: "status" }, close, el("p", {}, `${count(left)} runs were left alone:`), el("ul", {}, entries.map(line)), more);
  }
}
