// A place to try a model. Its request's cold start is drawn while it happens.

import { html, useEffect, useRef, useState } from "/web/vendor/preact.js";
import { live, streamed, useLive } from "/web/live.js";
import { Empty, Field, copy } from "/web/parts.js";
import { Waterfall } from "/web/waterfall.js";
import { useExplanation } from "/web/requests.js";
import { useModels } from "/web/models.js";
import { bytes, plural, seconds, words } from "/web/format.js";

// Kept while other pages are shown.
const kept = { model: "", turns: [], settings: { system: "", temperature: "", top_p: "", top_k: "", min_p: "", max_tokens: "512", seed: "", repetition_penalty: "" } };
const NUMBERS = { temperature: "Temperature", top_p: "Top p", top_k: "Top k", min_p: "Min p", repetition_penalty: "Repetition penalty", max_tokens: "Max tokens", seed: "Seed" };

function bodyOf(model, turns, settings) {
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { model, messages };
  for (const name of Object.keys(NUMBERS)) {
    if (settings[name] !== "" && !Number.isNaN(Number(settings[name]))) body[name] = Number(settings[name]);
  }
  return body;
}

export function Chat({ detail, go }) {
  useLive();
  const [models] = useModels();
  const [turns, setTurns] = useState(kept.turns);
  const [settings, setSettings] = useState(kept.settings);
  const [text, setText] = useState("");
  const [ending, setEnding] = useState(null);
  const end = useRef(null);
  const isAtEnd = useRef(true);
  const names = (models ?? []).filter((one) => one.has_chat_template || one.base);
  const model = names.some((one) => one.name === (detail || kept.model)) ? detail || kept.model : (names[0]?.name ?? "");
  kept.model = model;
  kept.turns = turns;
  kept.settings = settings;
  useEffect(() => {
    if (isAtEnd.current) end.current?.scrollIntoView({ block: "end" });
  }, [turns]);

  const send = async (event) => {
    event?.preventDefault();
    if (!text.trim() || ending) return;
    const asked = [...turns, { role: "user", content: text.trim() }];
    const answer = { role: "assistant", content: "", reasoning: "", id: `page-${crypto.getRandomValues(new Uint32Array(3)).join("")}`, model, isOver: false, error: null };
    const draw = () => setTurns([...asked, { ...answer }]);
    const controller = new AbortController();
    isAtEnd.current = true;
    setText("");
    setEnding(controller);
    draw();
    try {
      const body = { ...bodyOf(model, asked, settings), stream: true };
      for await (const chunk of streamed("/v1/chat/completions", body, { "x-request-id": answer.id }, controller.signal)) {
        const choice = chunk.choices[0];
        answer.content += choice?.delta.content ?? "";
        answer.reasoning += choice?.delta.reasoning ?? choice?.delta.reasoning_content ?? "";
        answer.finish = choice?.finish_reason ?? answer.finish;
        draw();
      }
    } catch (error) {
      if (error.name !== "AbortError") answer.error = error.message;
      else answer.finish = "cancelled";
    }
    answer.isOver = true;
    draw();
    setEnding(null);
  };

  if (models && !names.length) return html`<${Empty}>No deployed model has a chat template. Deploy one on the models page.<//>`;
  return html`
    <div class="page chat">
      <div class="talk">
        <div class="toolbar">
          <label>Model<select aria-label="Model" value=${model} onChange=${(event) => go(`chat/${encodeURIComponent(event.target.value)}`)}>
            ${names.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}${one.base ? ` (${one.preset ? "preset" : "adapter"} of ${one.base})` : ""}</option>`)}</select></label>
          <span class="end"></span>
          <button disabled=${!turns.length && !text.trim()} onClick=${() => copy(curl(model, turns, settings, text))}>Copy as curl</button>
          <button disabled=${!turns.length && !text.trim()} onClick=${() => copy(python(model, turns, settings, text))}>Copy as Python</button>
          <button disabled=${!turns.length || ending} onClick=${() => setTurns([])}>New</button>
        </div>
        <div class="turns" onScroll=${(event) => { const box = event.target; isAtEnd.current = box.scrollTop + box.clientHeight > box.scrollHeight - 40; }}>
          ${!turns.length && html`<${Empty}>Ask ${model || "a model"} something. If it is not loaded, you see it load.<//>`}
          ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} />`)}
          <div ref=${end}></div>
        </div>
        <form class="ask" onSubmit=${send}>
          <textarea rows="3" placeholder="Message" aria-label="Message" value=${text} onInput=${(event) => setText(event.target.value)}
            onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event)}></textarea>
          ${ending ? html`<button type="button" onClick=${() => ending.abort()}>Stop</button>` : html`<button class="primary" disabled=${!text.trim() || !model}>Send</button>`}
        </form>
      </div>
      <details class="settings card" open=${!matchMedia("(max-width: 1100px)").matches}>
        <summary>Settings</summary>
        <${Field} label="System prompt"><textarea rows="4" value=${settings.system} onInput=${(event) => setSettings({ ...settings, system: event.target.value })}></textarea><//>
        <div class="numbers">${Object.entries(NUMBERS).map(([name, label]) => html`<${Field} key=${name} label=${label}><input inputmode="decimal" placeholder="default" value=${settings[name]} onInput=${(event) => setSettings({ ...settings, [name]: event.target.value })} /><//>`)}</div>
        <button onClick=${() => setSettings({ ...settings, ...Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, ""])) })}>Model's defaults</button>
      </details>
    </div>`;
}

function Turn({ turn }) {
  if (turn.role === "user") return html`<div class="turn is-user"><div class="text">${turn.content}</div></div>`;
  return html`
    <div class="turn is-assistant">
      <small class="muted">${turn.model}</small>
      <${Journey} turn=${turn} />
      ${turn.reasoning && html`<details class="thinking"><summary>${turn.content ? "Thought" : "Thinking …"}</summary><div class="text muted">${turn.reasoning}</div></details>`}
      ${turn.content ? html`<${Text} text=${turn.content} />` : !turn.isOver && !turn.reasoning && html`<p class="muted">Waiting for the first token …</p>`}
      ${turn.error && html`<p class="warning" role="alert">${turn.error}</p>`}
      ${turn.finish === "length" && html`<small class="muted">stopped at the limit of tokens</small>`}
      ${turn.finish === "cancelled" && html`<small class="muted">stopped</small>`}
    </div>`;
}

// Ids of requests by those that this page gave them: there may be thousands to look through.
const found = new Map();

function rowOf(id) {
  const row = found.has(id) ? live.requests.get(found.get(id)) : [...live.requests.values()].findLast((one) => one.client_request_id === id);
  if (row) found.set(id, row.request_id);
  return row;
}

// The waterfall of a turn's request: open until the first token, then folded.
function Journey({ turn }) {
  const row = rowOf(turn.id);
  const [explained] = useExplanation(row?.request_id, row);
  if (!explained) return null;
  const isWaiting = explained.first_token_s === null && !turn.isOver;
  const loads = explained.rungs.length > 0 || explained.spans.some((span) => span.what === "load");
  const loading = live.state?.ps.models.find((one) => one.model === (explained.base ?? explained.model) && one.state === "loading");
  return html`
    <details class="journey" open=${isWaiting && loads}>
      <summary>${explained.first_token_s === null
        ? `${words(row.phase)} …${loading ? ` ${bytes(loading.loaded_bytes)} of ${bytes(loading.total_bytes)}` : ""}`
        : `first token after ${seconds(explained.first_token_s)}${loads ? ", cold" : ""}${explained.tokens_per_s ? `, ${explained.tokens_per_s.toFixed(1)} tokens/s` : ""}, ${plural(explained.num_output_tokens, "token")}`}</summary>
      <${Waterfall} explained=${explained} />
      <a href=${`#requests/${explained.request_id}`}>All about this request</a>
    </details>`;
}

// Fenced code in a box of its own, all else as it is.
function Text({ text }) {
  const parts = text.split(/```[^\n]*\n?/);
  return html`<div class="text">${parts.map((part, index) => (index % 2 ? html`<pre key=${index}>${part}</pre>` : part.replace(/^\n+|\n+$/g, "")))}</div>`;
}

const asked = (turns, text) => {
  const all = text.trim() ? [...turns, { role: "user", content: text.trim() }] : turns;
  return all.slice(0, all.findLastIndex((turn) => turn.role === "user") + 1);
};

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(model, turns, settings, text) {
  const body = JSON.stringify(bodyOf(model, asked(turns, text), settings), null, 2);
  const key = live.session.has_keys ? ` \\\n  -H "authorization: Bearer $HEARTH_API_KEY"` : "";
  return `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json'${key} \\\n  -d ${quoted(body)}`;
}

function python(model, turns, settings, text) {
  const { messages, top_k, min_p, repetition_penalty, ...rest } = bodyOf(model, asked(turns, text), settings);
  const extra = JSON.parse(JSON.stringify({ top_k, min_p, repetition_penalty }));
  const fields = Object.entries(rest).map(([name, value]) => `    ${name}=${JSON.stringify(value)},`);
  if (Object.keys(extra).length) fields.push(`    extra_body=${JSON.stringify(extra)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${live.session.has_keys ? 'os.environ["HEARTH_API_KEY"]' : '"none"'})
answer = client.chat.completions.create(
${fields.join("\n")}
    messages=${JSON.stringify(messages, null, 4).replaceAll("\n", "\n    ")},
)
print(answer.choices[0].message.content)
`;
}
