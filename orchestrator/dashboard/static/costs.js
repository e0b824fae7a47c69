// Costs, from the ledger: by day as a chart, and by whatever the reader chooses.

import { get, page } from "./api.js";
import { columns } from "./chart.js";
import { notify } from "./dialog.js";
import { button, count, el, facts, field, fill, problem, table, usd } from "./dom.js";

const KEYS = ["day", "tenant", "agent", "model", "batch", "lane", "status"];
const FILTERS = ["by", "since", "until", "tenant", "batch", "agent", "model", "lane", "status"];
const STATUSES = [["", "all"], ["committed", "committed"], ["lost", "lost"], ["ambiguous", "ambiguous: may have been paid"], ["cached", "cached: not made"]];
const query = new URLSearchParams(location.search);
const content = document.getElementById("content");
const chosen = (query.get("by") || "model").split(",").filter((one) => KEYS.includes(one));

function filters() {
  const value = (name) => query.get(name) || "";
  const choices = [...KEYS, "tenant,model", "agent,model", "day,model"].map((one) => [one, one.replaceAll(",", " and ")]);
  const by = chosen.join(",") || "model";
  const made = el("form", { class: "sf-filters", "aria-label": "Filter costs" },
    field("By", "by", by, { options: choices.some(([one]) => one === by) ? choices : [...choices, [by, by.replaceAll(",", " and ")]] }),
    field("From day (UTC)", "since", value("since"), { type: "date" }), field("To day (UTC)", "until", value("until"), { type: "date" }),
    field("Tenant", "tenant", value("tenant")), field("Batch", "batch", value("batch")), field("Agent", "agent", value("agent")), field("Model", "model", value("model")), field("Lane", "lane", value("lane")),
    field("Status of calls", "status", value("status"), { options: STATUSES }),
    el("button", { type: "submit", class: "btn btn-sm btn-primary" }, "Show"));
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    location.search = new URLSearchParams([...new FormData(made)].filter(([, text]) => text)).toString();
  });
  return made;
}

/** Calls that were paid for; next to them those that may have been, and those that were not made. */
const calls = (one) => {
  const beside = [[one.ambiguous_calls, "ambiguous"], [one.cached_calls, "cached"]].filter(([many]) => many);
  return el("span", {}, count(one.calls), beside.map(([many, kind]) => el("div", { class: "small sf-muted" }, `+ ${count(many)} ${kind}`)));
};

const row = (one) => [
  ...chosen.map((key) => (key === "batch" && one.group[key] ? el("a", { href: page(`/batches/${encodeURIComponent(one.group[key])}`) }, one.group[key]) : el("span", { class: "sf-wrap" }, one.group[key] || "(none)"))),
  calls(one), count(one.input_tokens), count(one.cached_tokens), count(one.output_tokens), usd(one.usd, one.default_priced_calls > 0), usd(one.lost_usd), usd(one.ambiguous_usd), usd(one.saved_usd),
];

function save(rows) {
  if (!rows.length) return notify("There is nothing to export.", true);
  const names = Object.keys(rows[0]).filter((name) => name !== "group");
  // A cell that begins like a formula is text: spreadsheets would run it.
  const cell = (value) => `"${(/^[=+\-@\t\r]/.test(String(value ?? "")) ? `'${value}` : String(value ?? "")).replaceAll('"', '""')}"`;
  const lines = [[...chosen, ...names].join(","), ...rows.map((one) => [...chosen.map((key) => one.group[key]), ...names.map((name) => one[name])].map(cell).join(","))];
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  el("a", { href: url, download: "costs.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  return null;
}

async function load() {
  const given = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || null]));
  const [found, days] = await Promise.all([get("/costs", { ...given, by: chosen.join(",") }), get("/costs", { ...given, by: "day" })]);
  const by = days.rows.map((one) => ({ name: one.group.day, value: Number(one.usd), text: usd(one.usd) })).sort((a, b) => a.name.localeCompare(b.name));
  const { total } = found;
  fill(shown,
    facts([["Paid", usd(total.usd, total.default_priced_calls > 0)], ["Calls", calls(total)], ["Of it lost", usd(total.lost_usd)], ["May also have been paid", usd(total.ambiguous_usd)], ["Saved by caches", usd(total.saved_usd)], ["Cached tokens", `${count(total.cached_tokens)} of ${count(total.input_tokens)}`]]),
    found.unpriced_models.length ? el("div", { class: "alert alert-warning", role: "status" }, `No price is known for ${found.unpriced_models.join(", ")}: their costs are guesses until model_pricing.json names them.`) : null,
    by.length ? el("section", { "aria-label": "Costs by day" }, el("h2", { class: "h5" }, "By day"), columns("USD by day", by), el("p", { class: "sf-muted small" }, `${by[0].name} to ${by[by.length - 1].name}`)) : null,
    el("h2", { class: "h5" }, `By ${chosen.join(" and ")}`),
    el("div", { class: "sf-buttons" }, button("Export CSV", () => save(found.rows), "outline-secondary")),
    table("Costs", [...chosen, ...["Calls", "Input tokens", "Cached", "Output tokens", "USD", "Lost", "Ambiguous", "Saved"].map((name) => ({ name, right: true }))], found.rows.map(row), "No model call is in the ledger for these days."));
}

const shown = el("div");
if (!chosen.length) chosen.push("model");
fill(content, filters(), shown);
await load().catch((error) => fill(shown, problem(error)));
