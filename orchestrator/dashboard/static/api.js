// The JSON API behind Flower's prefix. Errors of it are `ApiError`s, with the field that is wrong.

const PREFIX = (document.getElementById("url_prefix")?.value || "").replace(/^\/*|\/*$/g, "");
const ROOT = PREFIX ? `/${PREFIX}` : "";
// With the origin: browsers refuse to fetch where the page's address has a user and password in it.
const API = `${window.location.origin}${ROOT}/api/stepfleet`;

/** Why a request was refused: HTTP's status, the text, and the parameter's name, if it is one. */
export class ApiError extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

/** The address of a page, behind the prefix. Each part of `path` that is data must be encoded. */
export const page = (path) => `${ROOT}${path}`;

/** The address of a resource of the API, with a query of those parameters that are not null. */
export function address(path, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  return `${API}${path}${query ? `?${query}` : ""}`;
}

/** Read a resource. */
export const get = (path, params = {}) => request(address(path, params), {});

/** Send an action; `body` is JSON, or a file. */
export function post(path, body = {}, params = {}) {
  const headers = {};
  const token = document.cookie.match(/(?:^|; )_xsrf=([^;]+)/);
  if (token) headers["X-XSRFToken"] = decodeURIComponent(token[1]);
  const isFile = body instanceof Blob;
  headers["Content-Type"] = isFile ? "application/octet-stream" : "application/json";
  return request(address(path, params), { method: "POST", headers, body: isFile ? body : JSON.stringify(body) });
}

/** The last part of this page's address: an id, as it was sent where it cannot be decoded. */
export function named() {
  const last = window.location.pathname.split("/").filter(Boolean).at(-1) ?? "";
  try {
    return decodeURIComponent(last);
  } catch {
    return last;
  }
}

async function request(url, options) {
  let answer;
  try {
    answer = await fetch(url, { credentials: "same-origin", ...options });
  } catch {
    throw new ApiError(0, "Flower does not answer.");
  }
  const text = await answer.text();
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new ApiError(answer.status, `Flower answered ${answer.status} ${answer.statusText}`);
  }
  if (!answer.ok) throw new ApiError(answer.status, found.error || answer.statusText, found.field);
  return found;
}
