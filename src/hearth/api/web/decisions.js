// What the scheduler was told and what it ordered, from the journal, in sentences.

import { html, useState } from "/web/vendor/preact.js";
import { WHY, about, bytes, clock, number, plural, seconds, words } from "/web/format.js";
import { useLive } from "/web/live.js";
import { Drawer, Empty, List, Swatch, isPhone } from "/web/parts.js";
import { Options } from "/web/options.js";

const loaded = (event) => event.rungs.map((use) => `${bytes(use.num_bytes)} from ${use.rung} in ${seconds(use.seconds)}`).join(", ") || "all of it was on the device";

// By the tags of the journal.
const EVENTS = {
  RequestArrived: (one) => `Request for ${one.model}, ${plural(one.num_prompt_tokens, "prompt token")}`,
  RequestFinished: (one) => `Request ended with ${plural(one.num_output_tokens, "token")} (${one.how})`,
  RequestCancelled: () => "Request cancelled",
  ModelDeployed: (one) => `${one.profile.model} deployed`,
  ModelRemoved: (one) => `${one.model} removed`,
  ModelStopped: (one) => `${one.model} stopped by a user${one.is_freed ? ", its memory is freed" : ""}`,
  ModelReady: (one) => `${one.model} ready on ${one.worker} after ${seconds(one.total_s)}: ${loaded(one)}`,
  ModelFailed: (one) => `${one.model} failed on ${one.worker}: ${one.reason}`,
  WorkerJoined: (one) => `Worker ${one.worker} joined with ${bytes(one.budget_bytes)}`,
  WorkerLost: (one) => `Worker ${one.worker} lost: ${one.reason}${one.culprit ? `, in a step of ${one.culprit}` : ""}`,
  WorkersExpected: (one) => `${plural(one.num_workers, "worker")} expected on ${one.node}`,
  NodeLost: (one) => `Node ${one.node} lost`,
  NodeDraining: (one) => `Node ${one.node} ${one.is_draining ? "is drained" : "is back"}`,
  LoadProgressed: (one) => `${one.model} on ${one.worker}: ${bytes(one.num_bytes)} loaded`,
  TurnBegan: (one) => `Turn of ${one.model} began on ${one.worker}`,
  TurnEnded: (one) => `Turn of ${one.model} ended on ${one.worker} (${one.why})`,
  DeviceReported: (one) => `Worker ${one.worker} reported its memory`,
  ResidencyReported: (one) => `${one.model}: stored bytes reported`,
  TimerFired: () => "A time was over",
  StagesMeasured: (one) => `Steps of ${one.model} take ${one.stage_s.map(seconds).join(" + ")} in its stages`,
  PressureReported: (one) => `${one.model} on ${one.worker} will need KV for ${number(one.demand_tokens)} tokens in a second, and can have ${number(one.room_tokens)}`,
  DemandForecast: (one) => `Forecast for ${one.model}: ${number(60 * (one.mean_per_s[0] ?? 0))} requests a minute`,
  LinkMeasured: (one) => `Link from ${one.source} to ${one.target}: ${bytes(one.bytes_per_s)}/s`,
};

const ACTIONS = {
  Dispatch: (one) => `send it to ${one.worker}: ${WHY[one.why] ?? one.why}${one.waited_s > 0.001 ? `, after ${seconds(one.waited_s)}` : ""}`,
  LoadModel: (one) => `load ${one.model} on ${one.worker}${one.pipeline ? " as a stage" : ""}`,
  Evict: (one) => `${one.is_freed ? "free" : "evict"} ${one.model} from ${one.worker}, ${seconds(one.cost_s)} to load again`,
  SetHold: (one) => `${one.model} on ${one.worker} is ${["retained", "warm", "paused", "busy", "pinned"][one.hold] ?? words(String(one.hold))} from now on`,
  RefusePin: (one) => `do not pin ${one.model}: ${one.message}`,
  Reject: (one) => `refuse it: ${one.message}`,
  CancelRun: (one) => `end its run on ${one.worker}`,
  MoveKv: (one) => one.is_moved ? `move its KV to ${one.target}, in ${seconds(one.move_s)} instead of ${seconds(one.prompt_s)}` : `compute its KV again on ${one.target}, in ${seconds(one.prompt_s)}`,
  Prewarm: (one) => `${one.is_advice ? "would load" : "load"} ${one.model} ahead into ${one.to_host ? "the host memory" : "the device"} of ${one.worker}: ${number(60 * one.expected_per_s)} requests a minute are expected in ${about(one.lead_s)}`,
  AddWorkers: (one) => `ask for one more machine, for ${one.model}`,
  ReleaseWorkers: (one) => `give ${one.node} back`,
};

const told = (table, [tag, fields]) => table[tag]?.(fields) ?? words(tag);
const modelOf = ([, fields]) => fields.model ?? fields.profile?.model;

const KINDS = {
  all: () => true,
  placement: (one) => one.actions.some(([tag]) => ["Dispatch", "LoadModel", "Prewarm"].includes(tag)),
  evictions: (one) => one.actions.some(([tag]) => tag === "Evict"),
  refusals: (one) => one.actions.some(([tag]) => ["Reject", "RefusePin"].includes(tag)),
  workers: (one) => /^(Worker|Node)/.test(one.event[0]),
};

export function Decisions({ detail, go }) {
  const { decisions } = useLive();
  const [text, setText] = useState("");
  const [kind, setKind] = useState("all");
  const [frozen, setFrozen] = useState(null);
  const all = frozen ?? decisions;
  const wanted = text.trim().toLowerCase();
  const rows = all.filter((one) => KINDS[kind](one) && (!wanted || sentence(one).toLowerCase().includes(wanted))).reverse();
  const open = all.find((one) => String(one.number) === detail);
  return html`
    <div class="page is-list">
      <div class="toolbar">
        <input type="search" placeholder="Model, worker or word" aria-label="Search decisions" value=${text} onInput=${(event) => setText(event.target.value)} />
        <div class="choice" role="group" aria-label="Which decisions">${Object.keys(KINDS).map((one) => html`<button key=${one} aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}</div>
        <button aria-pressed=${frozen !== null} onClick=${() => setFrozen(frozen ? null : all)}>${frozen ? "Resume" : "Pause"}</button>
        <span class="muted end">${number(rows.length)} of ${number(all.length)}</span>
      </div>
      ${rows.length
        ? html`<${List}
            rows=${rows} rowHeight=${isPhone() ? 84 : 52} keyOf=${(row) => String(row.number)} label="Decisions" selected=${detail}
            onSelect=${(number) => go(`decisions/${number}`)}
            draw=${(row) => html`<div class="decision">
              <time>${clock(row.at_s)}</time>
              <span class="said"><span>${modelOf(row.event) && html`<${Swatch} model=${modelOf(row.event)} />`}${told(EVENTS, row.event)}</span>
                <span class="orders">${row.actions.map((action, index) => html`<span key=${index} class=${`order is-${action[0]}`}>${told(ACTIONS, action)}</span>`)}</span></span>
              <span class="muted">${weighed(row)}</span>
            </div>`}
          />`
        : html`<${Empty}>${decisions.length ? "No decision fits these filters." : "Nothing has been decided yet."}<//>`}
      ${open && html`<${Detail} key=${detail} one=${open} go=${go} />`}
    </div>`;
}

function sentence(one) {
  return [told(EVENTS, one.event), ...one.actions.map((action) => told(ACTIONS, action)), one.event[1].request_id ?? ""].join(" ");
}

function weighed(one) {
  const options = one.actions.reduce((most, [, fields]) => Math.max(most, fields.options?.length ?? 0), 0);
  return options > 1 ? `${options} workers weighed` : "";
}

function Detail({ one, go }) {
  return html`
    <${Drawer} title=${told(EVENTS, one.event)} onClose=${() => go("decisions")}>
      <p class="muted">${clock(one.at_s)} · number ${one.number}${one.event[1].request_id && html` · <a href=${`#requests/${one.event[1].request_id}`}>request ${one.event[1].request_id}</a>`}</p>
      ${!one.actions.length && html`<p>Nothing had to be done.</p>`}
      ${one.actions.map((action, index) => html`
        <div key=${index} class="ordered">
          <h3>${told(ACTIONS, action)}</h3>
          ${action[1].request_id && action[1].request_id !== one.event[1].request_id && html`<p><a href=${`#requests/${action[1].request_id}`}>request ${action[1].request_id}</a>, ${action[1].model}</p>`}
          ${action[1].options?.length > 0 && html`<${Options} options=${action[1].options} chosen=${action[1].worker} />`}
          ${action[0] === "LoadModel" && html`<p class="muted">promised ${bytes(action[1].kv_floor_bytes)} of KV, at most ${bytes(action[1].max_kv_bytes)}</p>`}
        </div>`)}
      <details><summary>As the journal has it</summary><pre>${JSON.stringify({ event: one.event, actions: one.actions }, null, 2)}</pre></details>
    <//>`;
}
