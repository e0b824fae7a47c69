// Limits of the fleet: what is used of them, and the form that sets, raises and removes them.

import { post } from "./api.js";
import { attempt } from "./dialog.js";
import { action, count, duration, el, table, usd } from "./dom.js";

const RATES = ["requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "starts_per_minute"];
const BUDGETS = ["usd", "usd_per_day", "tokens", "tokens_per_day", "calls", "calls_per_day", "active_seconds", "active_seconds_per_day"];
const FIELDS = [...RATES, "in_flight", "burst", "weight", ...BUDGETS, "on_budget", "learn"];
const CHOICES = [["", "as by default: stop"], ["stop", "stop: runs end"], ["hold", "hold: runs wait until it is raised"]];
const LEARNS = [["", "as by default: from refusals and headers"], ["false", "nothing: only refused calls wait"]];
const OPTIONS = { on_budget: CHOICES, learn: LEARNS };
const words = (name) => name.replaceAll("_", " ");
const number = (value) => Number(value).toLocaleString("en-US", { maximumFractionDigits: 3 });

/** All limits and what is used of them; `changed` is called after each change. */
export const limitsTable = (limits, changed) =>
  table("Limits", ["Name", "Allows", "Budgets", { name: "In flight", right: true }, "Waiting", "Pause", ""], limits.map((one) => row(one, limits, changed)), "No limit is set, and none is learned.");

function row(one, limits, changed) {
  return [
    el("span", { class: "sf-cell" }, one.name), el("div", { class: "sf-cell sf-large" }, allowed(one)), one.budgets.map((each) => budget(one.name, each, changed)), count(one.in_flight),
    waiting(one, limits, changed),
    one.cool_seconds ? `${duration(one.cool_seconds)} (${count(one.refused)} refused)` : "",
    el("div", { class: "sf-buttons mb-0" },
      action("Change", () => setLimit(one).then(changed)),
      one.limit ? action("Remove", () => clear(one.name).then(changed), "outline-danger") : null),
  ];
}

function allowed(one) {
  const set = Object.entries(one.limit || {}).filter(([name, value]) => !RATES.includes(name) && !BUDGETS.includes(name) && value !== null && !(["weight", "burst"].includes(name) && value === 1) && (name !== "on_budget" || one.limit.on_budget === "hold") && (name !== "learn" || value === false));
  const rates = RATES.filter((name) => name in one.rooms).map((name) => {
    const learned = name in one.learned ? `, learned: ${number(one.learned[name])}` : "";
    const given = one.limit?.[name] ? number(one.limit[name]) : "as learned";
    const free = [Math.max(one.levels[name], 0), one.rooms[name]].map((each) => number(each >= 100 ? Math.round(each) : each));
    return `${words(name)} ${given}${learned} (${free.join(" of ")} free now)`;
  });
  return [...rates, ...set.map(([name, value]) => `${words(name)} ${typeof value === "number" ? number(value) : value}`)].map((text) => el("div", { class: "sf-wrap" }, text));
}

function budget(name, one, changed) {
  const amount = one.field.startsWith("usd") ? usd : number;
  const isSpent = Number(one.left) <= 0;
  return el("div", { class: "sf-cell" }, `${words(one.field)}: ${amount(one.spent)} of ${amount(one.budget)} spent`,
    Number(one.reserved) ? `, ${amount(one.reserved)} reserved` : "",
    Number(one.over) ? el("span", { class: "sf-error" }, `, ${amount(one.over)} over`) : null,
    isSpent ? [" ", action("Raise", () => raise(name, one.field, one.budget).then(changed))] : null);
}

function waiting(one, limits, changed) {
  if (!one.waiting) return "0";
  const text = `${count(one.waiting)}${one.waits_for ? ` for ${one.waits_for}` : ""}`;
  if (!one.fix) return el("span", { class: "sf-wrap" }, text);
  const [field, ...rest] = one.waits_for.split(" of ");
  const name = rest.join(" of ");
  const given = field.replaceAll(" ", "_");
  const before = limits.find((other) => other.name === name)?.budgets.find((each) => each.field === given)?.budget;
  return el("div", { class: "sf-cell" }, text, el("div", { class: "sf-fix" }, "Fix: ", el("code", {}, one.fix), " ", action("Raise", () => raise(name, given, before).then(changed))));
}

const path = (name) => `/limits/${encodeURIComponent(name)}`;

function clear(name) {
  return attempt({ title: `Remove the limit ${name}?`, button: "Remove", danger: true }, () => post(`${path(name)}/clear`), () => "The limit is removed.");
}

function raise(name, field, before) {
  const question = { title: `Raise ${words(field)} of ${name}`, text: "It takes effect at once for the whole fleet.", fields: [{ label: words(field), name: field, value: before ?? "" }], button: "Raise", stays: true };
  const act = (given) => {
    if (!given[field].trim()) throw refused(field, "write the new budget");
    return send(name, given, {});
  };
  return attempt(question, act, () => "The budget is raised.");
}

/** Ask for a limit's fields, and set those that have changed; an emptied one is taken away. */
export function setLimit(one) {
  const before = Object.fromEntries(FIELDS.map((name) => [name, one?.limit?.[name] === null || !(one?.limit && isSet(one.limit, name)) ? "" : String(one.limit[name])]));
  const fields = FIELDS.map((name) => ({ label: words(name), name, value: before[name], ...(name in OPTIONS ? { options: OPTIONS[name] } : {}) }));
  const named = one ? [] : [{ label: "Name, as openai:gpt-4o-mini or tenant:acme", name: "name" }];
  const question = {
    title: one ? `Change the limit ${one.name}` : "Set a limit", button: "Set", stays: true, wide: true, fields: [...named, ...fields],
    text: "Rates are per minute, burst in seconds, budgets in all or per day (UTC). An empty field limits nothing. It holds for the next call of the whole fleet.",
  };
  return attempt(question, (given) => send(one ? one.name : given.name.trim(), given, before), () => "The limit is set.");
}

/** Whether a field says something: burst and weight have defaults. */
const isSet = (limit, name) => !(["burst", "weight"].includes(name) && limit[name] === 1) && (name !== "on_budget" || limit[name] === "hold") && (name !== "learn" || limit[name] === false);

function send(name, given, before) {
  if (!name) throw refused("name", "write the limit's name, as openai:gpt-4o-mini or tenant:acme");
  const overrides = {};
  for (const field of FIELDS.filter((one) => one in given)) {
    const text = given[field].trim();
    if (text === (before[field] ?? "")) continue;
    if (!(field in OPTIONS) && !Number.isFinite(Number(text))) throw refused(field, `"${text}" is not a number; write it as 1000 or 0.5`);
    overrides[field] = text === "" || field === "on_budget" ? text : field === "learn" ? text === "true" : Number(text);
  }
  return post(`${path(name)}/set`, { overrides });
}

const refused = (field, text) => Object.assign(new Error(`${words(field)}: ${text}`), { field });
