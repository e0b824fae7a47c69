// Submitting a file: choose it and an agent, see its lines checked, then submit.

import { get, page, post } from "./api.js";
import { action, count, el, field, fill, problem, restricted, table } from "./dom.js";
import { confirm, notify } from "./dialog.js";

const LARGEST = 128 * 1024 * 1024;
const AGAIN = 3_000; // milliseconds
const PRIORITIES = [["", "normal"], ["high", "high"], ["low", "low"]];

/** The parameters of a request about the file, from the form. */
function given(form, file) {
  const data = new FormData(form);
  const names = ["agent", "id", "tenant", "priority", "input_field", "id_field"];
  const found = Object.fromEntries(names.map((name) => [name, (data.get(name) || "").trim()]));
  return { name: file.name, ...found };
}

function report(found) {
  const columns = [{ name: "Line", right: true }, "Field", "What is wrong, and the fix"];
  const rows = found.problems.map((one) => [count(one.line), one.field || "", el("span", { class: "sf-wrap" }, one.text)]);
  const more = found.bad - found.problems.length;
  const known = found.known ? el("p", {}, "This is ", el("a", { href: page(`/batches/${encodeURIComponent(found.batch_id)}`) }, "a batch that is there already"), `, with ${count(found.known)} runs: nothing of it runs twice.`) : null;
  return el("div", {},
    el("p", { class: found.bad ? "fw-semibold" : null }, `${count(found.good)} of ${count(found.lines)} lines are good${found.bad ? `, ${count(found.bad)} cannot be used` : ""}. Agents: ${found.agents.join(", ") || "none"}.`),
    known,
    rows.length ? table("Lines that cannot be used", columns, rows) : null,
    more > 0 ? el("p", { class: "sf-muted" }, `and ${count(more)} more`) : null);
}

async function submit(form, file, found, shown) {
  const title = `Submit ${count(found.good)} runs?`;
  const left = found.bad ? ` ${count(found.bad)} bad lines are left out.` : "";
  if (!(await confirm({ title, text: `Each good line of ${file.name} becomes a run, which is paid for.${left}`, button: "Submit" }))) return;
  fill(shown, el("p", {}, "The runs are created. You may leave this page: the batch is in the list."));
  try {
    const done = await post("/batches/submit", file, { ...given(form, file), skip_invalid: found.bad ? "1" : "" });
    const words = done.cancelled ? "This batch was cancelled: nothing more of it is created; give another id to run it anew" : done.is_new ? `${count(done.runs)} runs are submitted` : "This batch was there already: nothing runs twice";
    notify(words);
    location.assign(page(`/batches/${encodeURIComponent(done.batch_id)}`));
  } catch (error) {
    fill(shown, problem(error));
  }
}

async function check(form, shown) {
  const file = form.elements.file.files[0];
  const refuse = (text) => fill(shown, problem(new Error(text)));
  if (!file) return refuse("Choose a file first.");
  if (!file.size) return refuse(`${file.name} is empty.`);
  if (file.size > LARGEST) return refuse(`${file.name} has more than 128 MiB; split it, or use stepfleet submit, which takes files of any size.`);
  fill(shown, el("p", {}, `${file.name} is checked …`));
  try {
    const found = await post("/batches/check", file, given(form, file));
    const go = found.good ? action(`Submit ${count(found.good)} runs …`, () => submit(form, file, found, shown), "primary") : null;
    return fill(shown, report(found), el("div", { class: "sf-buttons" }, go));
  } catch (error) {
    return fill(shown, problem(error));
  }
}

/** The agents that workers announce fill the choice when the form is opened. */
async function agents(choice, hint, isOpen) {
  let names = [];
  try {
    const { overview } = await get("/fleet");
    names = [...new Set(overview.workers.filter((one) => one.alive).flatMap((one) => one.agents))].sort();
    const before = choice.value;
    fill(choice, [["", "named by each line"], ...names.map((one) => [one, one])].map(([value, name]) => el("option", { value }, name)));
    choice.value = names.includes(before) ? before : names.length === 1 ? names[0] : "";
    fill(hint, names.length ? "" : "No worker is running that announces an agent: start one, or name agents in the lines.");
  } catch (error) {
    fill(hint, error.message);
  }
  if (!names.length) setTimeout(() => isOpen() && agents(choice, hint, isOpen), AGAIN);
}

/** The form, folded until somebody opens it. */
export function uploadForm() {
  const shown = el("div", { "aria-live": "polite", class: "mt-3" });
  const hint = el("p", { class: "sf-muted small mb-2", role: "status" });
  const file = el("div", { class: "sf-field" }, el("label", { for: "upload-file", class: "form-label" }, "File (JSONL, CSV, TSV or a JSON array)"),
    el("input", { id: "upload-file", name: "file", type: "file", class: "form-control form-control-sm", accept: ".jsonl,.ndjson,.json,.csv,.tsv,.txt" }));
  const agent = field("Agent", "agent", "", { options: [["", "named by each line"]] });
  const form = el("form", {},
    el("div", { class: "sf-filters" }, file, agent,
      field("Priority", "priority", "", { options: PRIORITIES }),
      field("Tenant", "tenant", "", { hint: "none" }),
      field("Id of the batch", "id", "", { hint: "by its content" }),
      field("Input column", "input_field", "", { hint: "input, or the prompt's" }),
      field("Id column", "id_field", "", { hint: "id" })),
    hint,
    el("div", { class: "sf-buttons" }, restricted(el("button", { type: "submit", class: "btn btn-sm btn-outline-primary" }, "Check the file"))));
  let isChecking = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (isChecking) return;
    isChecking = true;
    await check(form, shown);
    isChecking = false;
  });
  form.addEventListener("change", () => fill(shown)); // what was checked is no longer what is chosen
  const box = el("details", { class: "sf-card" }, el("summary", {}, el("h2", { class: "d-inline" }, "Submit a batch")), form, shown);
  box.addEventListener("toggle", () => box.open && agents(agent.querySelector("select"), hint, () => box.open));
  return box;
}
