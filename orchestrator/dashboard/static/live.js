// Changes of what a page shows, by one stream of server-sent events.

import { address } from "./api.js";

const AT_MOST_EVERY = 1000;
const FIRST_RETRY = 2000;
const LONGEST_RETRY = 60_000;

const AGAIN = 5000;
let again = 0;

/** Read once more in a while, after an error that may pass by itself. */
export function tryAgain(error, read) {
  clearTimeout(again);
  const isRefused = error.status >= 400 && error.status < 500 && error.status !== 429;
  if (!isRefused) again = setTimeout(read, AGAIN);
}

/**
 * Calls `onChange(topic, data)` when something has changed, at most once a second per topic, and
 * once per topic after each connection: whoever reads again then misses nothing. Topics are
 * `run:ID`, `batch:ID`, `fleet` and `text:ID`, whose data is {step, text, left_out, is_open}.
 * Stops while the page is hidden. Returns a function that ends it.
 */
export function follow(topics, onChange) {
  const latest = new Map();
  const timers = new Map();
  let source = null;
  let retry = 0;
  let pause = FIRST_RETRY;

  function deliver(topic) {
    const data = latest.get(topic);
    latest.delete(topic);
    timers.set(topic, setTimeout(() => {
      timers.delete(topic);
      if (latest.has(topic)) {
        deliver(topic);
      }
    }, AT_MOST_EVERY));
    onChange(topic, data);
  }

  function changed(topic, data) {
    latest.set(topic, data);
    if (!timers.has(topic)) {
      deliver(topic);
    }
  }

  function connect() {
    clearTimeout(retry);
    if (source || document.hidden) {
      return;
    }
    const query = new URLSearchParams(topics.map((topic) => ["topic", topic]));
    source = new EventSource(`${address("/live")}?${query}`);
    source.addEventListener("open", () => {
      pause = FIRST_RETRY;
    });
    source.addEventListener("change", (event) => {
      const { topic, data } = JSON.parse(event.data);
      changed(topic, data);
    });
    source.addEventListener("error", () => {
      if (source?.readyState === EventSource.CLOSED) { // refused: browsers do not try again
        disconnect();
        retry = setTimeout(connect, pause * (0.75 + Math.random() / 2));
        pause = Math.min(pause * 2, LONGEST_RETRY);
      }
    });
  }

  function disconnect() {
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  const look = () => (document.hidden ? disconnect() : connect());
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", look);
  connect();
  return () => {
    document.removeEventListener("visibilitychange", look);
    window.removeEventListener("pagehide", disconnect);
    window.removeEventListener("pageshow", look);
    disconnect();
    timers.forEach(clearTimeout);
    latest.clear();
  };
}
