// The machine: the memory of every worker as it is now, nodes, links and pipelines.

import { html } from "/web/vendor/preact.js";
import { about, bytes, colour, groupBy, number, plural, seconds } from "/web/format.js";
import { useLive } from "/web/live.js";
import { STATES } from "/web/models.js";
import { Empty, Meter, Pill, Swatch } from "/web/parts.js";

const KINDS = {
  weights: "Weights",
  kv: "KV cache",
  tables: "Tables",
  adapters: "Adapters",
  workspace: "Workspace",
  lost: "Lost to fragments",
  free: "Free",
};

// Of a worker with more, those of least interest are left out.
const MAX_RESIDENTS = 30;

export function Machine() {
  const { state, session } = useLive();
  if (!state) {
    return session?.role === "user"
      ? html`<${Empty}>This key may not see the machine. A key with the role “monitor” may.<//>`
      : html`<${Empty}>Waiting for the service …<//>`;
  }
  const { ps, nodes } = state;
  const byNode = groupBy(ps.workers, (one) => one.node);
  return html`
    <div class="page">
      <${Figures} ps=${ps} nodes=${nodes} />
      <${Legend} />
      ${!ps.workers.length && html`<${Empty}>No worker is up yet.<//>`}
      ${[...byNode].map(
        ([node, workers]) => html`
          <section key=${node}>
            ${nodes.length > 0 && html`<${NodeHead} node=${nodes.find((one) => one.node === node || one.name === node)} name=${node} />`}
            ${workers.map((worker) => html`<${Worker} key=${worker.worker} worker=${worker} models=${ps.models} />`)}
          </section>`,
      )}
      ${nodes.filter((one) => !byNode.has(one.node)).map((one) => html`<${NodeHead} key=${one.name} node=${one} name=${one.name} />`)}
      <${Pipelines} models=${ps.models} />
      <${Links} nodes=${nodes} />
    </div>`;
}

function Figures({ ps, nodes }) {
  const used = ps.workers.reduce((sum, one) => sum + one.used_bytes, 0);
  const budget = ps.workers.reduce((sum, one) => sum + one.budget_bytes, 0);
  const loading = ps.models.filter((one) => one.state === "loading").length;
  return html`
    <div class="figures">
      <div><b>${ps.workers.filter((one) => one.state === "ready").length}<small> of ${ps.workers.length}</small></b><span>workers ready</span></div>
      ${nodes.length > 0 && html`<div><b>${nodes.filter((one) => one.state === "up").length}<small> of ${nodes.length}</small></b><span>nodes up</span></div>`}
      <div><b>${bytes(used)}</b><span>of ${bytes(budget)} device memory</span></div>
      ${ps.host && html`<div><b>${bytes(ps.host.used_bytes)}</b><span>of ${bytes(ps.host.budget_bytes)} host memory</span></div>`}
      <div><b>${ps.models.filter((one) => one.is_hosted).length}</b><span>models hosted${loading ? `, ${loading} loading` : ""}</span></div>
      <div><b>${ps.num_running}</b><span>requests running${ps.num_waiting ? `, ${ps.num_waiting} waiting` : ""}</span></div>
    </div>`;
}

const Legend = () => html`
  <ul class="legend" aria-label="How memory is drawn">
    <li><i class="part is-weights"></i>weights</li>
    <li><i class="part is-weights is-loading"></i>loading</li>
    <li><i class="part is-weights is-retained"></i>retained until others need the room</li>
    <li><i class="part is-kv"></i>KV of running requests</li>
    <li><i class="part is-kv is-retained"></i>cached prefixes</li>
    <li><i class="part is-kv is-spare"></i>KV, empty</li>
    <li><i class="part is-adapters"></i>adapters</li>
    <li><i class="part is-workspace"></i>workspace</li>
    <li><i class="part is-free"></i>free</li>
  </ul>`;

function Worker({ worker, models }) {
  const all = models.filter((one) => one.worker === worker.worker);
  const residents = all.length > MAX_RESIDENTS ? all.sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state)).slice(0, MAX_RESIDENTS) : all;
  return html`
    <article class="card worker">
      <header>
        <h3>${worker.worker}</h3>
        <span class="muted">${worker.device || worker.kind}</span>
        <${Pill} state=${worker.state} />
        ${worker.num_restarts > 0 && html`<span class="muted">${plural(worker.num_restarts, "restart")}</span>`}
        ${worker.budget_bytes > 0 && html`<span class="end"><b>${bytes(worker.used_bytes)}</b> of ${bytes(worker.budget_bytes)}</span>`}
      </header>
      ${worker.reason && html`<p class="warning">${worker.reason}</p>`}
      ${worker.budget_bytes > 0 && html`<${MemoryBar} worker=${worker} residents=${residents} />`}
      ${residents.length > 0 && html`<div class="residents">${residents.map((one) => html`<${Resident} key=${one.model} one=${one} />`)}</div>`}
      ${all.length > residents.length && html`<p class="muted">and <a href="#models">${plural(all.length - residents.length, "more model")}</a></p>`}
    </article>`;
}

function MemoryBar({ worker, residents }) {
  const budget = worker.budget_bytes;
  const loading = new Map(residents.filter((one) => one.state === "loading").map((one) => [one.model, one]));
  const parts = merged(worker.pool?.parts ?? [{ kind: "free", state: "spare", model: null, num_bytes: budget }], budget, loading);
  const promised = [...loading.values()].filter((one) => !parts.some((part) => part.model === one.model && part.kind === "weights"));
  return html`
    <div class="memory" role="img" aria-label=${`${worker.worker}: ${bytes(worker.used_bytes)} of ${bytes(worker.budget_bytes)} in use`}>
      ${promised.map((one) => html`<${Part} key=${`promise ${one.model}`} part=${{ kind: "weights", state: "active", model: one.model, num_bytes: one.total_bytes }} budget=${budget} load=${one} />`)}
      ${parts.map((part) => {
        const load = part.kind === "weights" ? loading.get(part.model) : undefined;
        return html`<${Part} key=${`${part.kind} ${part.state} ${part.model} ${part.num_models > 0}`} part=${part} budget=${budget} load=${load} />`;
      })}
    </div>`;
}

// Parts that are too small to be seen become one of each kind.
function merged(parts, budget, loading) {
  const isSmall = (part) => part.model && part.num_bytes < budget / 200 && !loading.has(part.model);
  const small = parts.filter(isSmall);
  if (small.length < MAX_RESIDENTS) return parts;
  const sums = [...groupBy(small, (part) => `${part.kind} ${part.state}`).values()].map((of) => ({ ...of[0], model: null, num_models: of.length, num_bytes: of.reduce((sum, part) => sum + part.num_bytes, 0) }));
  return [...parts.filter((part) => part.model && !isSmall(part)), ...sums, ...parts.filter((part) => !part.model)];
}

function Part({ part, budget, load }) {
  const share = part.num_bytes / budget;
  const loaded = load ? load.loaded_bytes / Math.max(1, load.total_bytes) : 1;
  const name = `${part.model ? `${part.model}: ` : part.num_models ? `${plural(part.num_models, "model")}: ` : ""}${KINDS[part.kind] ?? part.kind}${part.kind === "free" || part.kind === "lost" ? "" : `, ${part.state}`}, ${bytes(part.num_bytes)}${load ? `, ${Math.round(100 * loaded)}% loaded` : ""}`;
  const label = html`${part.model ?? (part.num_models ? plural(part.num_models, "model") : KINDS[part.kind].toLowerCase())}<small>${bytes(part.num_bytes)}${load ? ` · ${Math.round(100 * loaded)}%` : ""}</small>`;
  const isNamed = share > 0.02 && (part.kind === "weights" || part.kind === "free");
  return html`
    <div
      class=${`part is-${part.kind} is-${part.state}${load ? " is-loading" : ""}`}
      style=${{ flexGrow: share, ...(part.model ? { "--of": colour(part.model) } : {}) }}
      title=${name}
    >
      ${load && html`<i class="filled" style=${{ width: `${100 * loaded}%` }}></i>`}
      ${isNamed && html`<span>${label}</span>`}
      ${isNamed && load && html`<span class="over" style=${{ clipPath: `inset(0 ${100 - 100 * loaded}% 0 0)` }} aria-hidden="true">${label}</span>`}
    </div>`;
}

function Resident({ one }) {
  const kv = one.kv_blocks ? `KV: ${number(one.kv_used_blocks)} used, ${number(one.kv_cached_blocks)} cached of ${plural(one.kv_blocks, "block")}` : "";
  return html`
    <div class="resident">
      <span class="staged"><span class="name"><${Swatch} model=${one.model} />${one.model}</span>${one.layers && html`<span class="muted">layers ${one.layers[0]}–${one.layers[1] - 1}</span>`}</span>
      <${Pill} state=${one.state} />
      <span class="weights"><${Meter} share=${one.loaded_bytes / Math.max(1, one.total_bytes)} color=${colour(one.model)} label=${`${bytes(one.loaded_bytes)} of ${bytes(one.total_bytes)} loaded`} />
        <span class="muted">${bytes(one.loaded_bytes)} of ${bytes(one.total_bytes)}</span></span>
      <span class="muted wide">${kv}</span>
      <span class="muted">${one.num_running ? `${one.num_running}${one.max_seqs ? ` of ${one.max_seqs}` : ""} running` : one.expires_in_s !== null ? `warm for ${about(one.expires_in_s)}` : ""}${one.is_pin_refused ? "cannot be pinned" : ""}</span>
      ${one.adapters.length > 0 && html`<span class="adapters muted">+ ${one.adapters.slice(0, 8).map((adapter) => `${adapter.name} (${bytes(adapter.num_bytes)}${adapter.num_running ? `, ${adapter.num_running} running` : ""})`).join(", ")}${one.adapters.length > 8 ? ` and ${one.adapters.length - 8} more` : ""}</span>`}
    </div>`;
}

function NodeHead({ node, name }) {
  if (!node) return html`<h2 class="node">${name}</h2>`;
  const receives = Object.entries(node.receives);
  return html`
    <header class="node">
      <h2>${node.name}</h2><${Pill} state=${node.state} />
      <span class="muted">${node.host || "this machine"}${Object.entries(node.labels).map(([key, value]) => ` · ${key}=${value}`)}</span>
      ${node.host_bytes > 0 && html`<span class="end muted">host memory ${bytes(node.host_used_bytes)} of ${bytes(node.host_bytes)}</span>`}
      ${node.reason && html`<p class="warning">${node.reason}</p>`}
      ${receives.map(([model, sources]) => html`<p key=${model} class="muted">receives <${Swatch} model=${model} />${model} from ${sources.join(", ")}</p>`)}
    </header>`;
}

function Pipelines({ models }) {
  const staged = groupBy(models.filter((one) => one.layers), (one) => one.model);
  if (!staged.size) return null;
  return html`
    <section><h2>Pipelines</h2>
      ${[...staged].map(([model, stages]) => {
        const [first] = stages.sort((a, b) => a.layers[0] - b.layers[0]);
        const inOrder = groupBy(stages, (one) => `${one.layers[0]}–${one.layers[1] - 1}`);
        return html`
          <article key=${model} class="card"><h3><${Swatch} model=${model} />${model}${first.is_dropped && html` <span class="muted">replicas that gave up layers for KV</span>`}</h3>
            <div class="stages">${[...inOrder].map(([layers, of], index) => html`
              ${index > 0 && html`<span class="hop">→<small>${of[0].transport ?? ""}</small></span>`}
              <div class="stage"><b>${of.map((one) => one.worker).join(", ")}</b><span class="muted">layers ${layers}</span>
                ${first.stage_s[index] !== undefined && html`<span class="muted">${seconds(first.stage_s[index])} per step</span>`}</div>`)}</div>
            ${first.num_flights !== null && html`<p class="muted">${seconds(first.hops_s)} between stages, ${plural(first.num_flights, "step")} in flight</p>`}
          </article>`;
      })}
    </section>`;
}

function Links({ nodes }) {
  const links = nodes.flatMap((node) => node.links.map((link) => ({ ...link, target: node.name })));
  if (!links.length) return null;
  return html`
    <section><h2>Links between nodes</h2>
      <div class="scroll card"><table><thead><tr><th>from</th><th>to</th><th class="figure">measured</th></tr></thead>
        <tbody>${links.map((link) => html`<tr key=${`${link.source} ${link.target}`}><td>${link.source}</td><td>${link.target}</td><td class="figure">${bytes(link.bytes_per_s)}/s</td></tr>`)}</tbody>
      </table></div>
    </section>`;
}
