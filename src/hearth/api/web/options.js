// The workers that were weighed for a request, with what each would have cost.

import { html } from "/web/vendor/preact.js";
import { bytes, seconds } from "/web/format.js";

export function Options({ options, chosen }) {
  const ordered = [...options].sort((a, b) => (a.obstacle !== null) - (b.obstacle !== null) || a.cost_s - b.cost_s);
  return html`
    <div class="scroll"><table class="options">
      <thead><tr><th>worker</th><th class="figure">cost</th><th class="figure">queue</th><th class="figure">load</th><th class="figure">evict</th><th class="figure">prompt</th><th class="figure">in use</th></tr></thead>
      <tbody>${ordered.map((one) => html`
        <tr key=${one.worker} class=${one.worker === chosen ? "is-chosen" : ""}>
          <td>${one.worker}${one.worker === chosen ? " ✓" : ""}</td>
          ${one.obstacle !== null
            ? html`<td colspan="6" class="muted">${one.obstacle}</td>`
            : html`<td class="figure"><b>${seconds(one.cost_s)}</b></td><td class="figure">${seconds(one.queue_s)}</td>
                <td class="figure">${seconds(one.load_s)}${one.missing_bytes ? html`<small> ${bytes(one.missing_bytes)}</small>` : ""}</td>
                <td class="figure">${seconds(one.evict_s)}</td>
                <td class="figure">${seconds(one.prompt_s)}${one.cached_tokens ? html`<small> ${one.cached_tokens} cached</small>` : ""}</td>
                <td class="figure">${Math.round(100 * one.utilisation)}%</td>`}
        </tr>`)}</tbody>
    </table></div>`;
}
