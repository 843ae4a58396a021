// Figures and times for people, and a colour for each model.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) { // 1023 MiB would stand beside 1.00 GiB
    count /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  return `${count.toFixed(digits)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `-${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

const THOUSANDS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // making one takes long

export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? THOUSANDS.format(value) : String(Math.round(value * 10) / 10);
}

export function plural(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

export function parameters(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  return `${Math.round(count / 1e6)} M`;
}

const two = (value) => String(value).padStart(2, "0");

export function clock(at_s) {
  const at = new Date(at_s * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

// A time in whole units, for what passes while it is read.
export function about(value_s) {
  if (value_s < 90) return `${Math.round(Math.max(0, value_s))} s`;
  if (value_s < 5400) return `${Math.round(value_s / 60)} min`;
  if (value_s < 129600) return `${Math.round(value_s / 3600)} h`;
  return `${Math.round(value_s / 86400)} days`;
}

export function ago(at_s) {
  const since_s = Date.now() / 1000 - at_s;
  return since_s < 5 ? "now" : `${about(since_s)} ago`;
}

export const words = (name) => name.replaceAll("_", " ");

export function groupBy(values, keyOf) {
  const groups = new Map();
  for (const value of values) {
    const key = keyOf(value);
    if (groups.has(key)) groups.get(key).push(value);
    else groups.set(key, [value]);
  }
  return groups;
}

// Colours go around in the order in which models are first seen, so that neighbours differ.
const NUM_COLOURS = 10;
const numbers = new Map();

export function colour(model) {
  const name = model.split("~")[0];
  if (!numbers.has(name)) numbers.set(name, numbers.size % NUM_COLOURS);
  return `var(--model-${numbers.get(name)})`;
}

export const WHY = {
  resident: "the model was loaded and had a free slot",
  loading: "the model was being loaded there",
  free_room: "loaded into free memory",
  evicted: "loaded after evicting other models",
  turns: "busy models fill the memory, so they take turns",
  waited: "a slot or memory became free",
  demand: "loaded once more, because all slots elsewhere were in use",
  staged: "workers that load the model run it together meanwhile",
  switched: "moved to a worker that has the whole model",
  dropped: "replicas gave up layers for KV, and run it together",
  restored: "moved to a replica that has all of its layers again",
};
