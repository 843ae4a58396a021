// The last hour, in samples of ten seconds.

import { html, useEffect, useRef, useState } from "/web/vendor/preact.js";
import { bytes, number, plural, seconds } from "/web/format.js";
import { call, useLive } from "/web/live.js";
import { Empty, Swatch } from "/web/parts.js";

const STEP_S = 10;
const TIERS = ["device", "host", "disk", "peer", "object"];
const line = (name, color, get, style) => ({ name, color, get, style });
const POWERS = Array.from({ length: 45 }, (_, power) => 2 ** power); // steps of axes in bytes
const perMinute = (count) => (count * 60) / STEP_S;

const CHARTS = [
  { title: "Requests a minute", format: number, stacked: true, series: [
    line("answered", "--good", (one) => perMinute(one.num_answered)),
    line("cancelled", "--quiet", (one) => perMinute(one.num_cancelled)),
    line("failed", "--bad", (one) => perMinute(one.num_failed)),
  ] },
  { title: "Tokens a second", format: number, series: [
    line("output", "--accent", (one) => one.output_tokens / STEP_S),
    line("prompt", "--model-1", (one) => one.prompt_tokens / STEP_S),
  ] },
  { title: "Time to the first token", format: seconds, series: [
    line("p50", "--accent", (one) => one.first_token?.p50_s ?? null),
    line("p95", "--model-3", (one) => one.first_token?.p95_s ?? null),
  ] },
  { title: "Time between tokens", format: seconds, series: [
    line("p50", "--accent", (one) => one.inter_token?.p50_s ?? null),
    line("p95", "--model-3", (one) => one.inter_token?.p95_s ?? null),
  ] },
  { title: "Loads a minute, by the slowest tier", format: number, stacked: true, series: TIERS.map((tier, index) =>
    line(tier, ["--quiet", "--good", "--model-1", "--accent", "--bad"][index], (one) => perMinute(one.loads[tier] ?? 0))) },
  { title: "Bytes loaded a second", format: bytes, stacked: true, series: TIERS.slice(1).map((tier, index) =>
    line(tier, ["--good", "--model-1", "--accent", "--bad"][index], (one) => (one.loaded_bytes[tier] ?? 0) / STEP_S)) },
  { title: "Devices", format: (share) => `${Math.round(100 * share)}%`, most: 1, series: [
    line("computing", "--accent", (one) => one.busy_share),
    line("memory in use", "--model-1", (one) => (one.budget_bytes ? one.used_bytes / one.budget_bytes : null)),
  ] },
  { title: "Requests in the service", format: number, series: [
    line("running", "--good", (one) => one.num_running),
    line("waiting", "--bad", (one) => one.num_waiting),
  ] },
];

export function Charts() {
  const { samples } = useLive();
  const [history, setHistory] = useState(null);
  useEffect(() => {
    call("GET", "/hearth/history").then(setHistory, () => {});
  }, [samples.at(-1)?.at_s]);
  if (!samples.length) return html`<${Empty}>The first sample comes after ten seconds.<//>`;
  return html`
    <div class="page">
      <div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} samples=${samples} />`)}</div>
      ${history && html`<${ByModel} history=${history} />`}
    </div>`;
}

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Chart({ chart, samples }) {
  const box = useRef(null);
  const plot = useRef(null);
  const values = chart.series.map((one) => samples.map(one.get));
  const isUsed = chart.stacked ? values.map((of) => of.some(Boolean)) : values.map(() => true);
  const shown = chart.series.filter((_, index) => isUsed[index] || (index === 0 && !isUsed.some(Boolean)));
  const key = shown.map((one) => one.name).join();
  const data = () => {
    const times = samples.map((one) => one.at_s);
    const rows = shown.map((one) => samples.map(one.get));
    // Stacked: the sums first, so that the smaller ones are drawn over them.
    const drawn = chart.stacked ? rows.map((_, index) => times.map((_, at) => rows.slice(0, index + 1).reduce((sum, row) => sum + row[at], 0))).reverse() : rows;
    return [times, ...drawn];
  };
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const series = shown.map((one) => {
        const color = colourOf(one.color);
        return { stroke: color, width: chart.stacked ? 0 : 1.75, fill: chart.stacked ? color : undefined, points: chart.stacked ? { show: false } : { filter: (plotted, index) => lonely(plotted.data[index]) }, spanGaps: false,
          paths: chart.stacked ? uPlot.paths.bars({ size: [1, 40] }) : undefined };
      });
      if (chart.stacked) series.reverse();
      const axis = { stroke: colourOf("--muted"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
      plot.current = new uPlot({
        width: box.current.clientWidth, height: 150, padding: [6, 8, 0, 0], legend: { show: false }, cursor: { y: false, points: { show: !chart.stacked } },
        scales: { x: { range: (_, first, last) => [Math.max(last - (chart.window_s ?? 3600), Math.min(first, last - 600)), last] }, y: { range: (_, low, high) => [0, chart.most ?? Math.max(high * 1.1 || 0, 1e-3)] } },
        axes: [{ ...axis, space: 70, size: 22, values: (_, splits) => splits.map((at) => new Date(at * 1000).toTimeString().slice(0, 5)) }, { ...axis, size: 64, ...(chart.format === bytes ? { incrs: POWERS } : {}), values: (_, splits) => splits.map((value) => chart.format(value).replace(/\.0+ /, " ")) }],
        series: [{}, ...series],
        hooks: { setCursor: [(u) => setAt(u.cursor.idx ?? null)] },
      }, data(), box.current);
    };
    draw();
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: 150 }));
    observer.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", draw);
    scheme.addEventListener("change", draw);
    return () => {
      observer.disconnect();
      removeEventListener("themechange", draw);
      scheme.removeEventListener("change", draw);
      plot.current.destroy();
    };
  }, [key]);
  useEffect(() => {
    plot.current.setData(data());
  }, [samples]);
  const [at, setAt] = useState(null);
  const sample = samples[at] ?? samples.at(-1);
  const label = `${chart.title}: ${shown.map((one) => `${one.name} ${chart.format(one.get(sample))}`).join(", ")}`;
  return html`
    <figure class="card chart">
      <figcaption><b>${chart.title}</b>
        <span class="keys">${shown.map((one) => html`<span key=${one.name}><i style=${{ background: `var(${one.color})` }}></i>${one.name} <b>${one.get(sample) === null ? "–" : chart.format(one.get(sample))}</b></span>`)}</span></figcaption>
      <div ref=${box} role="img" aria-label=${label}></div>
    </figure>`;
}

// A value between two gaps is no line, so it is drawn as a point.
const lonely = (values) => values.flatMap((value, at) => (value !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));

function ByModel({ history }) {
  const rows = Object.entries(history.models).sort(([, a], [, b]) => b.device_s - a.device_s);
  if (!rows.length) return null;
  const hasCost = rows.some(([, one]) => one.cost !== null);
  return html`
    <section>
      <h2>By model, since ${new Date(history.since_s * 1000).toTimeString().slice(0, 5)}</h2>
      <div class="scroll card"><table>
        <thead><tr><th>model</th><th class="figure">requests</th><th class="figure">output tokens</th><th class="figure">first token p50 · p95</th><th class="figure">device time</th><th class="figure">busy</th>${hasCost && html`<th class="figure">cost</th>`}</tr></thead>
        <tbody>${rows.slice(0, 50).map(([name, one]) => html`<tr key=${name}>
          <td><${Swatch} model=${name} />${name}</td><td class="figure">${number(one.num_requests)}</td><td class="figure">${number(one.output_tokens)}</td>
          <td class="figure">${one.first_token ? `${seconds(one.first_token.p50_s)} · ${seconds(one.first_token.p95_s)}` : "–"}</td>
          <td class="figure">${seconds(one.device_s)}</td><td class="figure">${seconds(one.busy_s)}</td>${hasCost && html`<td class="figure">${one.cost.toFixed(4)}</td>`}</tr>`)}</tbody>
      </table></div>
      ${rows.length > 50 && html`<p class="muted">and ${plural(rows.length - 50, "model")} more</p>`}
    </section>`;
}
