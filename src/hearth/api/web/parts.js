// Small parts of all pages: pills, lists that draw only what is seen, dialogs, short messages.

import { html, useEffect, useRef, useState } from "/web/vendor/preact.js";
import { colour } from "/web/format.js";
import { changed } from "/web/live.js";

export const Pill = ({ state, children }) => html`<span class=${`pill is-${state}`}>${children ?? state}</span>`;

export const Swatch = ({ model }) => html`<i class="swatch" style=${{ background: colour(model) }} aria-hidden="true"></i>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Meter = ({ share, color, label }) => html`
  <div class="meter" role="img" aria-label=${label}>
    <i style=${{ width: `${100 * Math.min(1, share || 0)}%`, background: color }}></i>
  </div>`;

// Rows of one height: those outside the view are not in the document. Arrow keys move, Enter opens.
export function List({ rows, rowHeight, keyOf, draw, selected, onSelect, label, head }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  useEffect(() => {
    const measure = () => setView({ top: box.current.scrollTop, height: box.current.clientHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    box.current.addEventListener("scroll", measure, { passive: true });
    return () => observer.disconnect();
  }, []);
  const first = Math.max(0, Math.floor(view.top / rowHeight) - 5);
  const shown = rows.slice(first, Math.ceil((view.top + view.height) / rowHeight) + 5);
  const press = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -rows.length, End: rows.length }[event.key];
    if (step === undefined || !rows.length) return;
    event.preventDefault();
    const at = rows.findIndex((row) => keyOf(row) === selected);
    const next = Math.min(rows.length - 1, Math.max(0, at + step));
    onSelect(keyOf(rows[next]));
    const top = next * rowHeight;
    if (top < box.current.scrollTop) box.current.scrollTop = top;
    else if (top + 2 * rowHeight > box.current.scrollTop + box.current.clientHeight)
      box.current.scrollTop = top + 2 * rowHeight - box.current.clientHeight;
  };
  return html`
    <div class="list" ref=${box} tabindex="0" role="listbox" aria-label=${label} onKeyDown=${press}>
      ${head}
      <div class="rows" style=${{ height: `${rows.length * rowHeight}px` }}>
        ${shown.map((row, index) => {
          const key = keyOf(row);
          return html`
            <div
              key=${key}
              role="option"
              aria-selected=${key === selected}
              class=${`row${key === selected ? " is-selected" : ""}`}
              style=${{ top: `${(first + index) * rowHeight}px`, height: `${rowHeight}px` }}
              onClick=${() => onSelect(key)}
            >${draw(row)}</div>`;
        })}
      </div>
    </div>`;
}

export const isPhone = () => matchMedia("(max-width: 760px)").matches;

export function Drawer({ title, onClose, children }) {
  useEffect(() => {
    const press = (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && onClose();
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [onClose]);
  // The list goes on by keyboard when the element that had the focus is gone.
  useEffect(() => () => queueMicrotask(() => document.activeElement === document.body && document.querySelector(".list")?.focus()), []);
  return html`
    <aside class="drawer" aria-label=${title}>
      <header><h2>${title}</h2><button class="plain" onClick=${onClose} aria-label="Close">✕</button></header>
      <div class="drawer-body">${children}</div>
    </aside>`;
}

export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.showModal();
  }, []);
  return html`
    <dialog ref=${box} onClose=${onClose} aria-label=${title}>
      <header><h2>${title}</h2><button class="plain" onClick=${onClose} aria-label="Close">✕</button></header>
      ${children}
    </dialog>`;
}

export const Field = ({ label, hint, children }) => html`
  <div class="field"><label><span>${label}</span>${children}</label>${hint && html`<small>${hint}</small>`}</div>`;

// Short messages at the foot of the page; errors stay until they are closed.
const messages = [];
let count = 0;

export function say(text, isError = false) {
  const message = { id: (count += 1), text, isError };
  messages.push(message);
  if (!isError) setTimeout(() => unsay(message), 5000);
  changed();
}

function unsay(message) {
  const at = messages.indexOf(message);
  if (at >= 0) messages.splice(at, 1);
  changed();
}

export const Messages = () => html`
  <div class="messages" role="status" aria-live="polite">
    ${messages.map(
      (one) => html`<div key=${one.id} class=${one.isError ? "is-error" : ""}>
        <span>${one.text}</span><button class="plain" onClick=${() => unsay(one)} aria-label="Dismiss">✕</button>
      </div>`,
    )}
  </div>`;

// Runs a change and says what went wrong.
export async function attempt(work, done) {
  try {
    const result = await work();
    if (done) say(typeof done === "function" ? done(result) : done);
    return result;
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
    return undefined;
  }
}

export async function copy(text) {
  await attempt(() => navigator.clipboard.writeText(text), "Copied.");
}
