// Changes as they happen, by one stream of server-sent events per page. A page reads again what changed.

import { address } from "./api.js";

const LEAST = 1000;
const AGAIN = 3000;

/** Call `onChange(topic, data)` when one of `topics` has changed: at most once a second, and after each reconnection. */
export function follow(topics, onChange) {
  let source = null;
  let waiting = null;
  let last = 0;
  let retry = null;
  const changed = (topic, data) => {
    if (waiting) return;
    waiting = setTimeout(() => {
      waiting = null;
      last = Date.now();
      if (!document.hidden) onChange(topic, data);
    }, Math.max(0, LEAST - (Date.now() - last)));
  };
  const open = () => {
    const query = topics.map((one) => `topic=${encodeURIComponent(one)}`).join("&");
    source = new EventSource(`${address("/live")}?${query}`);
    source.addEventListener("change", (event) => changed(JSON.parse(event.data).topic, JSON.parse(event.data)));
    source.onerror = () => {
      source.close();
      clearTimeout(retry);
      retry = setTimeout(open, AGAIN * (1 + Math.random()));
    };
  };
  const close = () => {
    clearTimeout(retry);
    clearTimeout(waiting);
    source?.close();
  };
  open();
  window.addEventListener("pagehide", close, { once: true });
  document.addEventListener("visibilitychange", () => document.hidden || changed(topics[0], {}));
  return close;
}
