// Each change asks once. Results and errors are shown in Flower's corner for messages.

import { el, field, fill } from "./dom.js";

/** Ask; the promise has the fields' values by name, or null if the reader does not want it. */
export function form({ title, text = "", fields = [], button = "OK", danger = false }) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const id = `dialog-${Date.now()}`;
    const close = (value) => {
      made.close();
      made.remove();
      before?.focus();
      resolve(value);
    };
    const entry = el("form", { method: "dialog" },
      el("h2", { id, class: "h5" }, title),
      text ? el("p", {}, text) : null,
      fields.map((one) => field(one.label, one.name, one.value ?? "", one)),
      el("div", { class: "sf-buttons mt-3" },
        el("button", { type: "submit", class: `btn btn-${danger ? "danger" : "primary"}` }, button),
        el("button", { type: "button", class: "btn btn-outline-secondary", onclick: () => close(null) }, "Not now")));
    const made = el("dialog", { class: "sf-dialog", "aria-labelledby": id }, entry);
    entry.addEventListener("submit", (event) => {
      event.preventDefault();
      close(Object.fromEntries(new FormData(entry)));
    });
    made.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(null);
    });
    document.body.append(made);
    made.showModal();
  });
}

/** Ask for one change. */
export const confirm = async (given) => (await form(given)) !== null;

/** Show a short message. */
export function notify(text, isError = false) {
  const corner = document.getElementById("toast-container");
  const made = el("div", { class: `toast show align-items-center text-bg-${isError ? "danger" : "success"} border-0`, role: isError ? "alert" : "status" },
    el("div", { class: "d-flex" }, el("div", { class: "toast-body" }, text),
      el("button", { type: "button", class: "btn-close btn-close-white me-2 m-auto", "aria-label": "Close", onclick: () => made.remove() })));
  corner.append(made);
  setTimeout(() => made.remove(), isError ? 15000 : 6000);
}

/** Ask, act, and show how it ended. `act` gets the fields' values; `done` words its result. */
export async function attempt(question, act, done) {
  const given = await form(question);
  if (given === null) return null;
  try {
    const result = await act(given);
    notify(done(result));
    return result;
  } catch (error) {
    notify(error.message, true);
    return null;
  }
}

/** Show who was left alone, and why. */
export function refusals(result, node) {
  const left = Object.entries(result?.refused || {});
  if (left.length) fill(node, el("div", { class: "alert alert-warning", role: "status" }, `Left alone: ${left.map(([run, why]) => `${run}: ${why}`).join("; ")}`));
}
