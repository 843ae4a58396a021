// The deployed models: where they are, how fast they answer, and what can be done with them.

import { html, useEffect, useMemo, useState } from "/web/vendor/preact.js";
import { Chart } from "/web/charts.js";
import { about, ago, bytes, groupBy, number, parameters, plural, seconds } from "/web/format.js";
import { call, changed, isAdmin, isMonitor, streamed, useLive } from "/web/live.js";
import { Dialog, Drawer, Empty, Field, List, Meter, Pill, Swatch, attempt, isPhone, say } from "/web/parts.js";

const path = (name) => `/hearth/models/${encodeURIComponent(name)}`;
// The most interesting replica comes first.
export const STATES = ["busy", "loading", "paused", "waiting", "pinned", "warm", "retained"];

const DAY_S = 86400;
const EXPECTED = { title: "Requests a minute", format: number, window_s: DAY_S, series: [
  { name: "came", color: "--accent", get: (one) => one.came },
  { name: "expected", color: "--model-3", get: (one) => one.mean },
  { name: "at most, 9 times in 10", color: "--quiet", get: (one) => one.high },
] };
let isForecasting = true; // until the service says that it is not

// Deployments under way go on while other pages are shown.
const deploying = [];

export function useModels() {
  const { decisions } = useLive();
  const [models, setModels] = useState(null);
  const [count, setCount] = useState(0);
  const last = decisions.findLast((one) => ["ModelDeployed", "ModelRemoved"].includes(one.event[0]))?.number;
  useEffect(() => {
    call("GET", "/hearth/models").then(setModels, (error) => say(error.message, true));
  }, [last, count]);
  return [models, () => setCount((before) => before + 1)];
}

export function Models({ detail, go }) {
  const { state, samples, decisions } = useLive();
  const [models, reread] = useModels();
  const [sums, setSums] = useState(null);
  const [text, setText] = useState("");
  const [asks, setAsks] = useState(null); // a dialog
  const lastLoad = decisions.findLast((one) => one.event[0] === "ModelReady")?.number;
  useEffect(() => {
    if (isMonitor()) call("GET", "/hearth/history").then((found) => setSums(found.models), () => {});
  }, [samples.at(-1)?.at_s, lastLoad]);
  const residents = useMemo(() => groupBy(state?.ps.models ?? [], (one) => one.model.split("~")[0]), [state]);
  if (!models) return html`<${Empty}>Loading …<//>`;
  const residentsOf = (one) => (one.base && !one.preset ? adaptersOf(one, residents) : (residents.get(one.base ?? one.name) ?? []));
  const wanted = text.trim().toLowerCase();
  const rows = models
    .filter((one) => !wanted || `${one.name} ${one.aliases.join(" ")} ${one.source} ${one.family ?? ""} ${one.base ?? ""} ${stateOf(residentsOf(one))}`.toLowerCase().includes(wanted))
    .map((one) => ({ ...one, residents: residentsOf(one), sums: sums?.[one.name] }))
    .sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
  const open = detail && models.find((one) => one.name === detail);
  return html`
    <div class="page is-list">
      <div class="toolbar">
        <input type="search" placeholder="Name, family, source or state" aria-label="Search models" value=${text} onInput=${(event) => setText(event.target.value)} />
        <span class="muted">${number(rows.length)} of ${plural(models.length, "model")}</span>
        ${isAdmin() && html`<button class="primary end" onClick=${() => setAsks("deploy")}>Deploy a model</button>`}
      </div>
      ${deploying.map((one) => html`<${Deploying} key=${one.id} one=${one} />`)}
      ${rows.length
        ? html`<${List}
            rows=${rows} rowHeight=${isPhone() ? 64 : 44} keyOf=${(row) => row.name} label="Models" selected=${detail}
            onSelect=${(name) => go(`models/${encodeURIComponent(name)}`)}
            head=${isMonitor()
              ? html`<div class="row head model" aria-hidden="true"><span>model</span><span>state</span><span>where</span><span class="figure">size</span><span class="figure">requests</span><span class="figure">first token p50</span><span class="figure">p95</span><span>last cold start</span></div>`
              : html`<div class="row head model is-brief" aria-hidden="true"><span>model</span><span class="figure">size</span></div>`}
            draw=${(row) => html`<${Row} row=${row} host=${state?.host_bytes[row.preset ? row.base : row.name]} />`}
          />`
        : html`<${Empty}>${models.length ? "No model fits this search." : "No models are deployed. Deploy one here, or with hearth deploy SOURCE."}<//>`}
      ${open && html`<${Detail} key=${open.name} model=${open} residents=${residentsOf(open)} sums=${sums?.[open.name]} ask=${setAsks} go=${go} />`}
      ${asks === "deploy" && html`<${Deploy} models=${models} onClose=${() => setAsks(null)} onDone=${reread} />`}
      ${asks?.remove && html`<${Remove} model=${asks.remove} onClose=${() => setAsks(null)} onDone=${() => (go("models"), reread())} />`}
    </div>`;
}

const rank = (row) => {
  const at = STATES.indexOf(stateOf(row.residents));
  return at < 0 ? STATES.length : at;
};

// Adapters are part of their base's view.
const adaptersOf = ({ name, base }, residents) =>
  (residents.get(base) ?? []).flatMap(({ worker, adapters }) => {
    const found = adapters.find((one) => one.name === name && one.num_bytes);
    return found ? [{ ...found, worker, state: found.num_running ? "busy" : found.is_pinned ? "pinned" : "retained", loaded_bytes: found.num_bytes, total_bytes: found.num_bytes }] : [];
  });

const stateOf = (residents) => STATES.find((one) => residents.some((resident) => resident.state === one)) ?? "stored";

function placeOf(row, host) {
  if (row.residents.some((one) => one.loaded_bytes)) return "device";
  if (row.base && !row.preset) return ""; // not told
  if (host) return "host memory";
  return /^[a-z0-9]+:\/\//.test(row.where) ? "object storage" : "disk";
}

function Row({ row, host }) {
  const state = stateOf(row.residents);
  const loading = row.residents.find((one) => one.state === "loading");
  const cold = row.sums?.last_load;
  const name = html`<span class="name"><${Swatch} model=${row.name} />${row.name}${row.base && html`<small class="muted">${row.preset ? "preset" : "adapter"} of ${row.base}</small>`}${row.warning && html`<small class="alert" title=${row.warning}>⚠</small>`}</span>`;
  const size = html`<span class="figure">${row.preset ? "" : bytes(row.num_bytes)}</span>`;
  if (!isMonitor()) return html`<div class="model is-brief">${name}${size}</div>`;
  return html`<div class="model">
    ${name}
    <span><${Pill} state=${state} />${loading && html` <${Meter} share=${loading.loaded_bytes / Math.max(1, loading.total_bytes)} label="loaded" />`}</span>
    <span class="muted">${placeOf(row, host)}</span>
    ${size}
    <span class="figure">${row.sums ? number(row.sums.num_requests) : ""}</span>
    <span class="figure">${row.sums?.first_token ? seconds(row.sums.first_token.p50_s) : ""}</span>
    <span class="figure">${row.sums?.first_token ? seconds(row.sums.first_token.p95_s) : ""}</span>
    <span class="muted">${cold ? `${seconds(cold.total_s)} from ${cold.tier}, ${ago(cold.at_s)}` : ""}</span>
  </div>`;
}

function Detail({ model, residents, sums, ask, go }) {
  const stop = (free) =>
    attempt(
      () => call("POST", `${path(model.name)}/unload`, { free }),
      (view) => (view.was_loaded ? `${model.name} ${view.free ? "frees" : "keeps"} ${bytes(view.device_bytes)}${view.free ? "" : " until others need the room"}.` : `${model.name} is not in device memory.`),
    );
  const load = (keepAlive, text) =>
    attempt(() => call("POST", "/api/generate", { model: model.name, stream: false, ...(keepAlive === null ? {} : { keep_alive: keepAlive }) }), text);
  const isPinned = residents.some((one) => one.state === "pinned");
  return html`
    <${Drawer} title=${model.name} onClose=${() => go("models")}>
      <div class="actions">
        <button onClick=${() => go(`chat/${encodeURIComponent(model.name)}`)}>Chat</button>
        <button onClick=${() => load(null, `${model.name} is loaded.`)}>Load</button>
        ${isAdmin() && html`
          <button disabled=${!residents.length} onClick=${() => stop(false)} title="Others may take its memory">Stop</button>
          <button disabled=${!residents.length} onClick=${() => stop(true)} title="Free its memory now">Free</button>
          ${isPinned
            ? html`<button onClick=${() => load("5m", `${model.name} is no longer pinned.`)}>Unpin</button>`
            : html`<button onClick=${() => load(-1, `${model.name} is pinned.`)} title="Never evict it">Pin</button>`}
          <button class="danger" onClick=${() => ask({ remove: model })}>Remove</button>`}
      </div>
      ${model.warning && html`<p class="warning">${model.warning}</p>`}
      ${residents.map((one) => html`<p key=${one.worker}><${Pill} state=${one.state} /> on ${one.worker}: ${bytes(one.loaded_bytes)} of ${bytes(one.total_bytes)}${one.num_running ? `, ${one.num_running} running` : ""}</p>`)}
      <dl class="facts">
        <div><dt>parameters</dt><dd>${parameters(model.num_parameters)}${model.family ? `, ${model.family}` : ""}</dd></div>
        <div><dt>size</dt><dd>${bytes(model.num_bytes)}</dd></div>
        <div><dt>type</dt><dd>${model.dtype}${model.quant !== "none" ? `, ${model.quant}` : ""}</dd></div>
        <div><dt>context</dt><dd>${number(model.max_context)} tokens</dd></div>
        <div><dt>keep alive</dt><dd>${model.keep_alive_s === null ? "for ever" : about(model.keep_alive_s)}</dd></div>
        <div><dt>deployed</dt><dd>${ago(model.created_at_s)}</dd></div>
        ${model.aliases.length > 0 && html`<div><dt>also called</dt><dd>${model.aliases.join(", ")}</dd></div>`}
        ${model.base && html`<div><dt>${model.preset ? "preset" : "adapter"} of</dt><dd>${model.base}</dd></div>`}
        ${model.labels.length > 0 && html`<div><dt>runs on</dt><dd>${model.labels.join(", ")}</dd></div>`}
        ${model.stages.length > 0 && html`<div><dt>stages</dt><dd>${model.stages.join(" + ")} layers</dd></div>`}
        <div class="whole"><dt>source</dt><dd>${model.source}</dd></div>
        <div class="whole"><dt>digest</dt><dd><code>${model.digest}</code></dd></div>
      </dl>
      ${sums && html`
        <h3>Last hour</h3>
        <dl class="facts">
          <div><dt>requests</dt><dd>${number(sums.num_requests)}${sums.num_failed ? `, ${sums.num_failed} failed` : ""}</dd></div>
          <div><dt>output</dt><dd>${number(sums.output_tokens)} tokens</dd></div>
          <div><dt>device time</dt><dd>${seconds(sums.device_s)}</dd></div>
          <div><dt>busy</dt><dd>${seconds(sums.busy_s)}</dd></div>
          ${sums.cost !== null && html`<div><dt>cost</dt><dd>${sums.cost.toFixed(4)}</dd></div>`}
          ${sums.last_load && html`<div class="whole"><dt>last cold start</dt><dd>${seconds(sums.last_load.total_s)} from ${sums.last_load.tier}, ${ago(sums.last_load.at_s)}</dd></div>`}
        </dl>`}
      <${Forecast} name=${model.name} />
    <//>`;
}

function Forecast({ name }) {
  const [view, setView] = useState(null);
  useEffect(() => {
    if (isForecasting && isMonitor()) call("GET", `/hearth/forecasts/${encodeURIComponent(name)}`).then(setView, (error) => (isForecasting = error.status !== 400));
  }, [name]);
  if (!view) return null;
  const { forecast } = view;
  if (!forecast) return html`<h3>Forecast</h3><p class="muted">None: ${view.reason}.</p>`;
  const { step_s, mean_per_s, high_per_s } = forecast;
  const recent = view.counts.slice(-DAY_S / step_s);
  const past = recent.slice(recent.findIndex((count) => count !== null));
  const samples = [
    ...past.map((count, at) => ({ at_s: view.begin_at_s + (at - past.length) * step_s, came: count === null ? null : (60 * count) / step_s, mean: null, high: null })),
    ...mean_per_s.map((mean, at) => ({ at_s: view.begin_at_s + at * step_s, came: null, mean: 60 * mean, high: 60 * high_per_s[at] })),
  ];
  return html`
    <h3>Forecast</h3>
    <${Chart} chart=${EXPECTED} samples=${samples} />
    <p class="muted">Method: ${forecast.method}${forecast.mase === null ? "" : `, whose mean error is ${forecast.mase.toFixed(2)} of that of the last value`}. ${view.last_prewarm ? `${ago(view.last_prewarm_at_s)}: ${view.last_prewarm}.` : ""}</p>`;
}

function Remove({ model, onClose, onDone }) {
  const [withAdapters, setWithAdapters] = useState(false);
  const remove = async () => {
    const done = await attempt(
      () => call("DELETE", `${path(model.name)}${withAdapters ? "?with_adapters=true" : ""}`),
      `${model.name} is removed.`,
    );
    if (done) onDone();
    onClose();
  };
  return html`
    <${Dialog} title=${`Remove ${model.name}?`} onClose=${onClose}>
      <p>Its name and its converted files are deleted. Running requests for it fail. What it was deployed from stays: ${model.source}</p>
      ${!model.base && html`<label class="check"><input type="checkbox" checked=${withAdapters} onChange=${(event) => setWithAdapters(event.target.checked)} /> with its adapters</label>`}
      <footer><button onClick=${onClose}>Cancel</button><button class="danger" onClick=${remove}>Remove</button></footer>
    <//>`;
}

function Deploy({ models, onClose, onDone }) {
  const [order, setOrder] = useState({ source: "", name: "", quant: "auto", base: "", overwrite: false });
  const set = (name) => (event) => setOrder({ ...order, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const deploy = (event) => {
    event.preventDefault();
    begin({ source: order.source.trim(), quant: order.quant, overwrite: order.overwrite, ...(order.name.trim() ? { name: order.name.trim() } : {}), ...(order.base ? { base: order.base } : {}) }, onDone);
    onClose();
  };
  return html`
    <${Dialog} title="Deploy a model" onClose=${onClose}>
      <form onSubmit=${deploy}>
        <${Field} label="Source" hint="A directory or GGUF file on the service's machine, hf:ORG/NAME, or the URL of a converted model, such as s3://bucket/model."><input required value=${order.source} onInput=${set("source")} autofocus /><//>
        <${Field} label="Name" hint="Left empty, it follows from the source."><input value=${order.name} onInput=${set("name")} /><//>
        <${Field} label="Weights" hint="auto: as the source has them. int8 and fp8 take half of the memory of 16-bit weights, int4 a quarter; none dequantises."><select value=${order.quant} onChange=${set("quant")}>${["auto", "int8", "fp8", "int4", "none"].map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select><//>
        <${Field} label="Adapter of"><select value=${order.base} onChange=${set("base")}><option value="">– a model of its own –</option>${models.filter((one) => !one.base).map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`)}</select><//>
        <label class="check"><input type="checkbox" checked=${order.overwrite} onChange=${set("overwrite")} /> replace a model of that name</label>
        <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${!order.source.trim()}>Deploy</button></footer>
      </form>
    <//>`;
}

async function begin(order, onDone) {
  const one = { id: `${order.source} ${Date.now()}`, name: order.name || order.source, phase: "starting", share: 0, text: "", ending: new AbortController() };
  deploying.push(one);
  changed();
  await attempt(
    async () => {
      for await (const event of streamed("/hearth/models", order, { accept: "text/event-stream" }, one.ending.signal)) {
        if (event.event === "done") one.name = event.model.name;
        else {
          one.phase = event.phase;
          one.share = event.done_bytes / Math.max(1, event.total_bytes);
          one.text = event.total_bytes ? `${bytes(event.done_bytes)} of ${bytes(event.total_bytes)}` : "";
        }
        changed();
      }
    },
    () => `${one.name} is deployed.`,
  );
  deploying.splice(deploying.indexOf(one), 1);
  onDone();
  changed();
}

const Deploying = ({ one }) => html`
  <div class="card deploying">
    <b>${one.name}</b><span class="muted">${one.phase}</span>
    <${Meter} share=${one.share} label=${`${Math.round(100 * one.share)}% of ${one.phase}`} />
    <span class="muted">${one.text}</span>
    <button onClick=${() => one.ending.abort()}>Cancel</button>
  </div>`;
