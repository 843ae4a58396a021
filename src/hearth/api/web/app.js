// The frame of all pages: navigation, login, notes. The page is the part of the address behind `#`.

import { html, render, useEffect, useState } from "/web/vendor/preact.js";
import { Charts } from "/web/charts.js";
import { Chat } from "/web/chat.js";
import { Decisions } from "/web/decisions.js";
import { Keys } from "/web/keys.js";
import { begin, isAdmin, isMonitor, logIn, logOut, useLive } from "/web/live.js";
import { Machine } from "/web/machine.js";
import { Models } from "/web/models.js";
import { Messages, Pill } from "/web/parts.js";
import { Requests } from "/web/requests.js";

const PAGES = [
  { name: "machine", title: "Machine", draw: Machine, isFor: isMonitor },
  { name: "models", title: "Models", draw: Models, isFor: () => true },
  { name: "requests", title: "Requests", draw: Requests, isFor: () => true },
  { name: "decisions", title: "Decisions", draw: Decisions, isFor: isMonitor },
  { name: "charts", title: "Charts", draw: Charts, isFor: isMonitor },
  { name: "chat", title: "Chat", draw: Chat, isFor: () => true },
  { name: "keys", title: "Keys", draw: Keys, isFor: isAdmin },
];

const go = (place) => {
  location.hash = place;
};

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand
  }
}

function usePlace() {
  const [place, setPlace] = useState(location.hash.slice(1));
  useEffect(() => {
    const move = () => setPlace(location.hash.slice(1));
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  const [name, ...rest] = place.split("/");
  return [name, decoded(rest.join("/"))];
}

function App() {
  const { session, needsKey, trouble, isConnected, health, state } = useLive();
  const [name, detail] = usePlace();
  const pages = PAGES.filter((page) => page.isFor());
  const page = pages.find((one) => one.name === name) ?? pages[0];
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("input, textarea, select, dialog")) return;
      const wanted = pages[Number(event.key) - 1];
      if (wanted) go(wanted.name);
      if (event.key === "/") {
        event.preventDefault();
        document.querySelector("input[type=search]")?.focus();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
  useEffect(() => {
    document.title = session ? `${page.title} – Hearth` : "Hearth";
    document.querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone
  }, [page, session]);
  if (needsKey) return html`<${Login} />`;
  if (!session) return html`<p class="empty">${trouble ?? "Connecting …"}</p>`;
  return html`
    <nav aria-label="Pages">
      <a class="brand" href="#machine"><img src="/web/icon.svg" alt="" width="24" height="24" />Hearth</a>
      ${pages.map(
        (one, index) => html`<a key=${one.name} href=${`#${one.name}`} aria-current=${one === page ? "page" : undefined} title=${`Key ${index + 1}`}>${one.title}</a>`,
      )}
      <div class="foot">
        <${Status} isConnected=${isConnected} health=${health} />
        ${session.has_keys && html`<span class="muted">${session.name}, ${session.role}</span><button class="plain" onClick=${logOut}>Log out</button>`}
        <${Theme} />
        <span class="muted version">${health?.version}</span>
      </div>
    </nav>
    <main>
      <${Notes} state=${state} />
      <h1>${page.title}</h1>
      <${page.draw} detail=${detail} go=${go} />
    </main>
    <${Messages} />`;
}

const Status = ({ isConnected, health }) => html`
  <span class="status" role="status">${isConnected ? html`<${Pill} state=${health?.status ?? "starting"} />` : html`<${Pill} state="failing">no connection<//>`}</span>`;

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("theme") ?? "auto");
  const next = { auto: "light", light: "dark", dark: "auto" }[theme];
  const choose = () => {
    localStorage.setItem("theme", next);
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    setTheme(next);
    dispatchEvent(new Event("themechange"));
  };
  return html`<button class="plain" onClick=${choose} title=${`Change to ${next}`}>Theme: ${theme}</button>`;
}

// What the service has to do without, as `hearth doctor` says it.
function Notes({ state }) {
  const [hidden, setHidden] = useState([]);
  const kind = (note) => note.replace(/\d+/g, ""); // a hidden note stays so when it has counted on
  const shown = [...(state?.ps.notes ?? []), ...(state?.fallbacks ?? [])].filter((note) => !hidden.includes(kind(note)));
  if (!shown.length) return null;
  return html`
    <div class="notes" role="note">
      ${shown.map((note) => html`<p key=${note}><span>${note}</span><button class="plain" aria-label="Hide" onClick=${() => setHidden([...hidden, kind(note)])}>✕</button></p>`)}
    </div>`;
}

function Login() {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const enter = async (event) => {
    event.preventDefault();
    setError(null);
    try {
      await logIn(key.trim());
    } catch (failed) {
      setError(failed.status === 401 ? "the API key is wrong" : failed.message);
    }
  };
  return html`
    <div class="login">
      <form class="card" onSubmit=${enter}>
        <img src="/web/icon.svg" alt="" width="48" height="48" />
        <h1>Hearth</h1>
        <p class="muted">This service needs an API key. The browser keeps a session for 12 hours, not the key.</p>
        <input type="password" autocomplete="off" placeholder="hearth-…" aria-label="API key" value=${key} onInput=${(event) => setKey(event.target.value)} autofocus />
        <button class="primary" disabled=${!key.trim()}>Log in</button>
        ${error && html`<p class="warning" role="alert">${error}</p>`}
        <p class="muted">Make a key with <code>hearth keys add NAME --admin</code>.</p>
      </form>
    </div>`;
}

render(html`<${App} />`, document.getElementById("app"));
begin();
