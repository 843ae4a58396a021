// What the service tells: one stream of events, kept here, and calls of its routes.

import { useEffect, useState } from "/web/vendor/preact.js";

const MAX_REQUESTS = 10000;
const MAX_DECISIONS = 2000;
const MAX_SAMPLES = 360;

// Written by the stream alone. `requests` is by id, the oldest first.
export const live = {
  session: null, // null: not known yet
  needsKey: false,
  isConnected: false,
  trouble: null, // why there is no session
  health: null,
  state: null, // of workers and models; null: not told, or not to this key
  requests: new Map(),
  decisions: [],
  samples: [],
};

const listeners = new Set();
let isDrawing = false;

// However many events come, the page is drawn once a frame.
export function changed() {
  if (isDrawing) return;
  isDrawing = true;
  const draw = () => {
    isDrawing = false;
    for (const listener of listeners) listener();
  };
  if (document.hidden) setTimeout(draw, 1000);
  else requestAnimationFrame(draw);
}

export function useLive() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    listeners.add(listener);
    listener(); // what came before this effect was drawn for no listener
    return () => listeners.delete(listener);
  }, []);
  return live;
}

class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  const text = await response.text();
  let message = text;
  try {
    const found = JSON.parse(text).error;
    message = typeof found === "string" ? found : found.message;
  } catch {
    message = text.slice(0, 300) || `status ${response.status}`;
  }
  return new ApiError(message, response.status);
}

export async function call(method, path, body, headers = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: { accept: "application/json", ...(body ? { "content-type": "application/json" } : {}), ...headers },
      body: body ? JSON.stringify(body) : undefined,
    });
  } catch {
    throw new ApiError("the service does not answer; is it still running?", 0);
  }
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields the data of a stream of events. The caller ends it by `signal`.
export async function* streamed(path, body, headers, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message ?? event.error, 500);
      yield event;
    }
  }
}

export const isAdmin = () => live.session?.role === "admin";
export const isMonitor = () => isAdmin() || live.session?.role === "monitor";

let source = null;

export async function begin() {
  try {
    live.session = await call("GET", "/hearth/session");
    live.needsKey = false;
    listen();
  } catch (error) {
    live.trouble = error.message;
    if (error.status !== 401) setTimeout(begin, 2000);
    else if (live.session) location.reload(); // the next key may see other things
    else live.needsKey = true;
  }
  changed();
}

export async function logIn(key) {
  await call("POST", "/hearth/session", null, { authorization: `Bearer ${key}` });
  await begin();
}

export async function logOut() {
  await call("DELETE", "/hearth/session").catch(() => {}); // it may have ended
  location.reload();
}

function listen() {
  source?.close();
  source = new EventSource("/hearth/events");
  on("hello", (hello) => {
    live.isConnected = true;
    live.health = hello.health;
    if (isMonitor()) readHistory();
  });
  on("state", (state) => {
    live.state = state;
    live.health = state.health;
  });
  on("requests", (rows) => {
    for (const row of rows) live.requests.set(row.request_id, row);
    for (const id of live.requests.keys()) {
      if (live.requests.size <= MAX_REQUESTS) break;
      live.requests.delete(id);
    }
  });
  on("decisions", (decisions) => {
    const last = live.decisions.at(-1);
    // Another life of the service counts from 1 again.
    if (last && decisions.at(-1).number < last.number && decisions.at(-1).at_s > last.at_s) live.decisions = [];
    const known = live.decisions.at(-1)?.number ?? 0;
    live.decisions = [...live.decisions, ...decisions.filter((one) => one.number > known)].slice(-MAX_DECISIONS);
  });
  on("sample", (sample) => {
    if (live.samples.length && sample.at_s <= live.samples.at(-1).at_s) return; // the history had it
    live.samples = [...live.samples, sample].slice(-MAX_SAMPLES);
  });
  source.onerror = () => {
    live.isConnected = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(begin, 1000); // refused: a key may be missing
    changed();
  };
}

function on(name, take) {
  source.addEventListener(name, (event) => {
    take(JSON.parse(event.data));
    changed();
  });
}

async function readHistory() {
  try {
    live.samples = (await call("GET", "/hearth/history")).samples;
    changed();
  } catch {
    // The stream brings the next samples.
  }
}
