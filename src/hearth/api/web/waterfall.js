// Where the time of one request went: as `hearth explain` draws it.

import { html } from "/web/vendor/preact.js";
import { WHY, bytes, clock, number, seconds, words } from "/web/format.js";
import { Options } from "/web/options.js";

export function Waterfall({ explained }) {
  const end_s = Math.max(...explained.spans.map((span) => span.end_s), 1e-6);
  return html`
    <div class="waterfall" role="img" aria-label="Phases of the request">
      ${explained.spans.map(
        (span, index) => html`
          <div key=${index} class="span" title=${span.detail}>
            <span class="what">${words(span.what)}</span>
            <span class="track"><i class=${`is-${span.what}`} style=${{ left: `${(100 * span.begin_s) / end_s}%`, width: `${Math.max(0.4, (100 * (span.end_s - span.begin_s)) / end_s)}%` }}></i></span>
            <span class="took">${seconds(span.end_s - span.begin_s)}</span>
            <span class="detail muted">${span.detail}</span>
          </div>`,
      )}
      <div class="axis"><span>0</span><span>${seconds(end_s)}</span></div>
    </div>`;
}

export function Explanation({ explained: one }) {
  return html`
    <dl class="facts">
      <div><dt>outcome</dt><dd>${words(one.outcome)}</dd></div>
      <div><dt>arrived</dt><dd>${clock(one.arrived_at_s)}</dd></div>
      <div><dt>first token</dt><dd>${seconds(one.first_token_s)}</dd></div>
      <div><dt>whole answer</dt><dd>${seconds(one.total_s)}</dd></div>
      <div><dt>prompt</dt><dd>${number(one.num_prompt_tokens)} tokens, ${number(one.num_cached_tokens)} cached</dd></div>
      <div><dt>output</dt><dd>${number(one.num_output_tokens)} tokens${one.tokens_per_s ? `, ${one.tokens_per_s.toFixed(1)}/s` : ""}</dd></div>
      ${one.worker && html`<div class="whole"><dt>on ${one.worker}</dt><dd>${WHY[one.why] ?? one.why}</dd></div>`}
      ${one.base && html`<div><dt>adapter of</dt><dd>${one.base}</dd></div>`}
      ${one.num_pauses > 0 && html`<div><dt>paused</dt><dd>${one.num_pauses} times, ${seconds(one.paused_s)}</dd></div>`}
      ${one.num_preemptions > 0 && html`<div><dt>preempted</dt><dd>${one.num_preemptions} times</dd></div>`}
      ${one.num_resumes > 0 && html`<div><dt>resumed</dt><dd>${one.num_resumes} times on another worker</dd></div>`}
      ${one.num_late_tokens > 0 && html`<div><dt>late tokens</dt><dd>${number(one.num_late_tokens)}</dd></div>`}
    </dl>
    ${one.error && html`<p class="warning">${one.error}</p>`}
    <h3>Phases</h3>
    <${Waterfall} explained=${one} />
    <${Bytes} one=${one} />
    ${one.options.length > 0 && html`<h3>What each worker would have cost</h3><${Options} options=${one.options} chosen=${one.worker} />`}
    <h3>What happened</h3>
    <ol class="marks">${one.marks.map((mark, index) => html`<li key=${index}><time>${seconds(mark.at_s)}</time><b>${words(mark.what)}</b><span class="muted">${mark.detail}</span></li>`)}</ol>
    <p class="muted">In a terminal: <code>hearth explain ${one.request_id}</code></p>`;
}

function Bytes({ one }) {
  if (!one.rungs.length && !one.reused_bytes && !one.shared_bytes) return null;
  return html`
    <h3>Bytes loaded</h3>
    <table><tbody>
      ${one.reused_bytes > 0 && html`<tr><td>device</td><td class="figure">${bytes(one.reused_bytes)}</td><td class="muted">already there</td></tr>`}
      ${one.rungs.map((rung, index) => html`<tr key=${index}><td>${rung.rung} ${rung.source}${rung.transport ? ` by ${rung.transport}` : ""}</td><td class="figure">${bytes(rung.num_bytes)}</td>
        <td class="muted">in ${seconds(rung.seconds)}${rung.seconds > 0 ? `, ${(rung.num_bytes / rung.seconds / 1e9).toFixed(2)} GB/s` : ""}</td></tr>`)}
      ${one.shared_bytes > 0 && html`<tr><td>shared</td><td class="figure">${bytes(one.shared_bytes)}</td><td class="muted">read by another load</td></tr>`}
    </tbody></table>`;
}
