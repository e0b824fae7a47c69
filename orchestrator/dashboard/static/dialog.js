// Each change asks once. Results and errors are shown in Flower's corner for messages.

import { el, field, fill } from "./dom.js";

/**
 * Ask; the promise has the fields' values by name, or null if the reader does not want it.
 * With `act` the dialog stays until that has succeeded, shows why it did not, and returns its result.
 */
export function form({ title, text = "", fields = [], button = "OK", danger = false, wide = false, act = null }) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const id = `dialog-${Date.now()}`;
    const close = (value) => {
      made.close();
      made.remove();
      before?.focus();
      resolve(value);
    };
    const refusal = el("div", { role: "alert" });
    const entry = el("form", { method: "dialog" },
      el("h2", { id, class: "h5" }, title),
      text ? el("p", {}, text) : null,
      el("div", { class: wide ? "sf-grid" : null }, fields.map((one) => field(one.label, one.name, one.value ?? "", one))),
      refusal,
      el("div", { class: "sf-buttons mt-3" },
        el("button", { type: "submit", class: `btn btn-${danger ? "danger" : "primary"}` }, button),
        el("button", { type: "button", class: "btn btn-outline-secondary", onclick: () => close(null) }, "Not now")));
    const made = el("dialog", { class: "sf-dialog", "aria-labelledby": id }, entry);
    entry.addEventListener("submit", async (event) => {
      event.preventDefault();
      // Forms send line breaks as of old; what was typed has them as \n.
      const given = Object.fromEntries([...new FormData(entry)].map(([name, value]) => [name, value.replaceAll("\r\n", "\n")]));
      if (!act) return close(given);
      const [submit] = entry.querySelectorAll("button[type=submit]");
      submit.disabled = true;
      try {
        close(await act(given));
      } catch (error) {
        submit.disabled = false;
        for (const input of entry.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
        fill(refusal, el("div", { class: "alert alert-danger py-2 my-2 sf-wrap" }, error.message));
        const wrong = entry.elements.namedItem(error.field || "");
        wrong?.setAttribute("aria-invalid", "true");
        wrong?.focus();
      }
      return null;
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

/**
 * Ask, act, and show how it ended. `act` gets the fields' values; `done` words its result. A question
 * that `stays` is open until it has succeeded.
 */
export async function attempt(question, act, done) {
  if (question.stays) {
    const result = await form({ ...question, act });
    if (result !== null) notify(done(result));
    return result;
  }
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
