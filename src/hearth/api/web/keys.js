// API keys and their use, for admins.

import { html, useEffect, useState } from "/web/vendor/preact.js";
import { ago, number } from "/web/format.js";
import { call, live, useLive } from "/web/live.js";
import { Dialog, Empty, Field, attempt, copy } from "/web/parts.js";

export function Keys() {
  const { samples } = useLive();
  const [keys, setKeys] = useState(null);
  const [count, setCount] = useState(0);
  const [asks, setAsks] = useState(null);
  const [made, setMade] = useState(null);
  const reread = () => setCount((before) => before + 1);
  useEffect(() => {
    attempt(() => call("GET", "/hearth/keys").then(setKeys));
  }, [count, samples.at(-1)?.at_s]);
  if (!keys) return html`<${Empty}>Loading …<//>`;
  const remove = async (key) => {
    await attempt(() => call("DELETE", `/hearth/keys/${encodeURIComponent(key.name)}`), `${key.name} is removed.`);
    setAsks(null);
    reread();
  };
  return html`
    <div class="page">
      <div class="toolbar"><span class="muted">Counts are since a key was made.</span>
        ${live.session.has_keys && html`<button class="primary end" onClick=${() => setAsks("add")}>Make a key</button>`}</div>
      ${keys.length === 0 && html`<${Empty}>There are no keys, so every user of this machine may do everything. Make the first with <code>hearth keys add NAME --admin</code>.<//>`}
      ${keys.length > 0 && html`
        <div class="scroll card"><table>
          <thead><tr><th>name</th><th>role</th><th>group</th><th class="figure">requests</th><th class="figure">prompt tokens</th><th class="figure">output tokens</th><th>limits</th><th>last used</th><th></th></tr></thead>
          <tbody>${keys.map((key) => html`<tr key=${key.name}>
            <td>${key.name}</td><td>${key.role}</td><td>${key.group ?? "–"}</td>
            <td class="figure">${number(key.num_requests)}</td><td class="figure">${number(key.prompt_tokens)}</td><td class="figure">${number(key.output_tokens)}</td>
            <td class="muted">${limits(key)}</td><td class="muted when">${key.last_used_at_s ? ago(key.last_used_at_s) : "never"}</td>
            <td><button class="plain" disabled=${key.name === live.session.name} onClick=${() => setAsks(key)}>Remove</button></td></tr>`)}</tbody>
        </table></div>`}
      ${asks === "add" && html`<${Add} onClose=${() => setAsks(null)} onMade=${(key) => (setAsks(null), setMade(key), reread())} />`}
      ${asks?.name && html`<${Dialog} title=${`Remove the key ${asks.name}?`} onClose=${() => setAsks(null)}>
        <p>It is rejected from now on, and its sessions end.</p>
        <footer><button onClick=${() => setAsks(null)}>Cancel</button><button class="danger" onClick=${() => remove(asks)}>Remove</button></footer><//>`}
      ${made && html`<${Dialog} title=${`The key ${made.name}`} onClose=${() => setMade(null)}>
        <p>It is shown only now; the service keeps its hash alone.</p><pre>${made.key}</pre>
        <footer><button onClick=${() => copy(made.key)}>Copy</button><button class="primary" onClick=${() => setMade(null)}>Done</button></footer><//>`}
    </div>`;
}

const limits = (key) =>
  [
    key.requests_per_min && `${number(key.requests_per_min)} requests/min`,
    key.tokens_per_min && `${number(key.tokens_per_min)} tokens/min`,
    key.concurrent && `${key.concurrent} at once`,
    key.models && `only ${key.models.join(", ")}`,
    key.service_class === "batch" && "batch",
  ]
    .filter(Boolean)
    .join(", ") || "none";

function Add({ onClose, onMade }) {
  const [key, setKey] = useState({ name: "", role: "user", group: "", requests_per_min: "", tokens_per_min: "", concurrent: "" });
  const set = (name) => (event) => setKey({ ...key, [name]: event.target.value });
  const add = async (event) => {
    event.preventDefault();
    const body = Object.fromEntries(Object.entries(key).filter(([, value]) => value !== ""));
    for (const name of ["requests_per_min", "tokens_per_min", "concurrent"]) if (body[name]) body[name] = Number(body[name]);
    const made = await attempt(() => call("POST", "/hearth/keys", body));
    if (made) onMade(made);
  };
  return html`
    <${Dialog} title="Make a key" onClose=${onClose}>
      <form onSubmit=${add}>
        <${Field} label="Name"><input required value=${key.name} onInput=${set("name")} autofocus /><//>
        <${Field} label="Role" hint="A user sends requests, a monitor also sees the whole service, an admin also changes it."><select value=${key.role} onChange=${set("role")}>${["user", "monitor", "admin"].map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select><//>
        <${Field} label="Group" hint="Keys of one group share cached prompts and see each other's requests."><input value=${key.group} onInput=${set("group")} /><//>
        <div class="numbers">
          <${Field} label="Requests a minute"><input inputmode="numeric" pattern="[0-9]+" title="a whole number" placeholder="no limit" value=${key.requests_per_min} onInput=${set("requests_per_min")} /><//>
          <${Field} label="Tokens a minute"><input inputmode="numeric" pattern="[0-9]+" title="a whole number" placeholder="no limit" value=${key.tokens_per_min} onInput=${set("tokens_per_min")} /><//>
          <${Field} label="Requests at once"><input inputmode="numeric" pattern="[0-9]+" title="a whole number" placeholder="no limit" value=${key.concurrent} onInput=${set("concurrent")} /><//>
        </div>
        <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${!key.name.trim()}>Make</button></footer>
      </form>
    <//>`;
}
