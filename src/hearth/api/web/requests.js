// Requests as they run, the newest first; each opens its waterfall.

import { html, useEffect, useState } from "/web/vendor/preact.js";
import { clock, number, seconds, words } from "/web/format.js";
import { call, useLive } from "/web/live.js";
import { Drawer, Empty, List, Pill, Swatch, isPhone } from "/web/parts.js";
import { Explanation } from "/web/waterfall.js";

const isFailed = (row) => row.is_ended && !["stop", "length", "cancelled"].includes(row.phase);

const KINDS = {
  all: () => true,
  running: (row) => !row.is_ended,
  "cold starts": (row) => row.tier !== null && row.tier !== "device",
  failed: isFailed,
};

export function Requests({ detail, go }) {
  const { requests } = useLive();
  const [text, setText] = useState("");
  const [kind, setKind] = useState("all");
  const [frozen, setFrozen] = useState(null);
  const wanted = text.trim().toLowerCase();
  const all = frozen ?? [...requests.values()].reverse();
  const rows = all.filter(
    (row) => KINDS[kind](row) && (!wanted || `${row.model} ${row.worker} ${row.phase} ${row.request_id} ${row.client_request_id ?? ""}`.toLowerCase().includes(wanted)),
  );
  return html`
    <div class="page is-list">
      <div class="toolbar">
        <input type="search" placeholder="Model, worker or id" aria-label="Search requests" value=${text} onInput=${(event) => setText(event.target.value)} />
        <div class="choice" role="group" aria-label="Which requests">${Object.keys(KINDS).map((one) => html`<button key=${one} aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}</div>
        <button aria-pressed=${frozen !== null} onClick=${() => setFrozen(frozen ? null : all)}>${frozen ? "Resume" : "Pause"}</button>
        <span class="muted end">${number(rows.length)} of ${number(requests.size)}</span>
      </div>
      ${rows.length
        ? html`<${List}
            rows=${rows} rowHeight=${isPhone() ? 60 : 38} keyOf=${(row) => row.request_id} label="Requests"
            selected=${detail} onSelect=${(id) => go(`requests/${id}`)}
            head=${html`<div class="row head request" aria-hidden="true"><span>arrived</span><span>model</span><span>phase</span><span>worker</span><span class="figure">queue</span><span class="figure">first token</span><span class="figure">total</span><span class="figure">tokens</span><span>load</span></div>`}
            draw=${(row) => html`<div class="request">
              <time>${clock(row.arrived_at_s)}</time>
              <span class="name"><${Swatch} model=${row.model} />${row.model}</span>
              <span><${Pill} state=${isFailed(row) ? "failed" : row.phase}>${words(row.phase)}<//></span>
              <span class="muted">${row.worker ?? ""}</span>
              <span class="figure">${seconds(row.queue_s)}</span>
              <span class="figure">${seconds(row.first_token_s)}</span>
              <span class="figure">${seconds(row.total_s)}</span>
              <span class="figure">${number(row.num_prompt_tokens)} → ${number(row.num_output_tokens)}</span>
              <span class="muted">${row.tier && row.tier !== "device" ? `from ${row.tier}` : ""}</span>
            </div>`}
          />`
        : html`<${Empty}>${requests.size ? "No request fits these filters." : "No requests yet. Ask a model in the chat, or send one to this address."}<//>`}
      ${detail && html`<${Detail} key=${detail} id=${detail} row=${requests.get(detail)} onClose=${() => go("requests")} />`}
    </div>`;
}

const REREAD_MS = 500;

// Reads the explanation again while the request runs.
export function useExplanation(id, row) {
  const [explained, setExplained] = useState(null);
  const [error, setError] = useState(null);
  const [count, setCount] = useState(0);
  const isRunning = row?.is_ended === false;
  useEffect(() => {
    const timer = isRunning && setInterval(() => setCount((before) => before + 1), REREAD_MS);
    return () => clearInterval(timer);
  }, [id, isRunning]);
  useEffect(() => {
    let isWanted = true;
    if (id) {
      call("GET", `/hearth/requests/${encodeURIComponent(id)}`).then(
        (found) => isWanted && (setExplained(found), setError(null)),
        (failed) => isWanted && setError(failed.message),
      );
    }
    return () => {
      isWanted = false;
    };
  }, [id, row?.phase, count]);
  return [explained, error];
}

function Detail({ id, row, onClose }) {
  const [explained, error] = useExplanation(id, row);
  return html`
    <${Drawer} title=${explained ? explained.model : "Request"} onClose=${onClose}>
      <p class="muted"><code>${id}</code>${explained?.client_request_id ? html` · client id <code>${explained.client_request_id}</code>` : ""}</p>
      ${explained ? html`<${Explanation} explained=${explained} />` : html`<${Empty}>${error ?? "Loading …"}<//>`}
    <//>`;
}
