// What goes on: stages and their rates, shards as they come, losses.

import { ago, bytes, clock, errorBox, h, legend, percent, plot, short, whole } from "./draw.js";

const sum = (list, of) => list.reduce((total, one) => total + (of(one) || 0), 0);

export function pipeline(app, main) {
  const tiles = h("div", { class: "tiles" }), stages = h("section", { class: "grid", "aria-label": "Stages" });
  const datasets = h("section", { class: "grid", "aria-label": "Datasets" }), losses = h("section", { class: "grid", "aria-label": "Losses" });
  main.replaceChildren(h("div", { class: "bar" }, h("h1", null, "Pipeline")), tiles, stages, datasets, losses);
  const draw = () => {
    const about = app.overview, focus = document.activeElement && document.activeElement.id;
    // A mirror has the log of what it mirrors, and that dataset's id: what it holds counts once.
    const places = about.datasets, known = [...new Map(places.slice().sort((a, b) => (a.records || 0) - (b.records || 0)).map((one) => [one.id || one.key, one])).values()];
    const read = sum(known, (one) => sum(one.inputs || [], (input) => input.read));
    const refused = sum(known, (one) => sum(Object.values(one.rejects || {}), Number));
    const live = places.filter((one) => !one.sealed).length;
    const named = known.length === 1 ? "1 dataset" : `${known.length} datasets`;
    tiles.replaceChildren(
      tile(whole(sum(known, (one) => one.shards)), "train shards"), tile(short(sum(known, (one) => one.rows)), "rows"),
      tile(short(sum(known, (one) => one.tokens)), "tokens"), tile(bytes(sum(known, (one) => one.bytes)), "in shards"),
      tile(short(refused), read ? `refused, ${percent(refused / read)} of documents` : "refused"),
      tile(live ? `${live} live` : known.length ? "sealed" : "none", places.length > known.length ? `${named} in ${places.length} places` : named));
    stages.replaceChildren(...about.stages.map((one) => stage(one, about.time)));
    datasets.replaceChildren(...places.map((one) => dataset(one, about)));
    losses.replaceChildren(...about.losses.map((one) => loss(app, one)));
    for (const part of [stages, datasets, losses]) part.hidden = !part.children.length;
    if (!places.length && !about.stages.length) datasets.replaceChildren(h("p", { class: "empty" }, "No dataset so far in ", h("span", { class: "mono" }, about.root), ". This page shows one as soon as it begins: ",
      h("span", { class: "mono" }, "penstock init"), " writes a pipeline for the files of a directory, ", h("span", { class: "mono" }, "penstock run pipeline.toml"), " runs it. Data that is elsewhere: ", h("span", { class: "mono" }, "penstock watch DIR"), "."));
    datasets.hidden = false;
    if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
  };
  draw();
  return { changed: draw };
}

const tile = (value, name) => h("div", { class: "tile" }, h("b", null, value), h("span", null, name));

function stage(one, now) {
  const at = one.now || {}, rates = one.bytes_per_s, last = rates.length ? rates[rates.length - 1][1] : null;
  const done = at.size ? (one.state === "sealed" ? 1 : at.at / at.size) : null;
  const notes = [
    done === null ? null : `${percent(done)} of ${bytes(at.size)}`, last === null ? null : `${bytes(last)}/s`,
    at.read ? `${whole(at.read)} read` : null, at.refused ? `${whole(at.refused)} refused` : null,
    one.waits ? `waited ${one.waits} ${one.waits === 1 ? "time" : "times"}` : null,
  ].filter(Boolean);
  const series = [{ name: "MB/s", points: rates.map(([t, rate]) => [t, rate / 1e6]), c: 5 }];
  return h("article", { class: "card" },
    h("div", { class: "head" }, h("h2", null, one.name), h("span", { class: `pill ${one.state}` }, one.state),
      h("span", { class: "note mono" }, one.where), h("span", { class: "end" }, `${ago(now - one.last)} ago`)),
    notes.length ? h("p", { class: "note" }, notes.join(" · ")) : null,
    one.message ? h("p", null, one.message) : null,
    one.stages.length ? ran(one) : null,
    rates.length > 1 ? plot({ title: "Throughput", series, x: { time: true, title: "time" }, y: { title: "MB/s" }, height: 150 }) : null,
    one.backlog.length > 1 ? plot({ title: "Back-pressure", note: "bytes that wait before this stage", series: [{ name: "waiting", points: one.backlog, c: 1, kind: "step" }], x: { time: true, title: "time" }, y: { format: bytes, title: "bytes" }, height: 130 }) : null,
    one.ledgers.length > 1 ? trained(one) : null,
    one.notices.length ? h("details", null, h("summary", null, `${one.notices.length} notices`),
      h("table", null, one.notices.slice().reverse().map((notice) => h("tr", null, h("td", { class: "n" }, clock(notice.time)), h("td", null, notice.message))))) : null);
}

// The stages of a run, with what became of each.
function ran(one) {
  const first = one.first_batch_s;
  const lost = one.stages.find((part) => part.state === "failed");
  return h("div", null,
    h("table", null, one.stages.map((part) => h("tr", null, h("td", null, part.name),
      h("td", null, h("span", { class: `pill ${PILLS[part.state] || ""}` }, part.state)),
      h("td", { class: "n" }, ["waits", "not begun"].includes(part.state) ? "" : ago(part.took_s))))),
    lost ? h("p", null, `What ${lost.name} said last is in `, h("span", { class: "mono" }, `${one.where}/${lost.name.replaceAll(" ", "-")}.log`)) : null,
    first !== null ? h("p", { class: "note" }, `first batch after ${first.toFixed(1)} s`) : null);
}
const PILLS = { runs: "running", done: "ended", failed: "failed", stopped: "stopped" };

function trained(one) {
  const names = one.ledgers[0].sources.map((line) => line.source);
  const series = names.map((name, k) => ({ name, c: k, fill: names.length === 1, points: one.ledgers.map((told) => [told.time, (told.sources[k] || {}).trained]) }));
  return h("div", null, plot({ title: "Tokens trained", series, x: { time: true, title: "time" }, y: { title: "tokens" }, height: 150 }), names.length > 1 ? legend(names) : null);
}

function dataset(one, about) {
  if (one.error && !one.records) return h("article", { class: "card" }, h("h2", null, one.key), errorBox(one.error));
  const state = one.error ? "damaged" : one.sealed ? "sealed" : "live";
  const timeline = one.timeline.filter((point) => point[0] > 0);
  const seal = one.sealed && timeline.length ? timeline[timeline.length - 1][0] : undefined;
  const each = one.bins.length && one.bins[0].count > 1 ? `each bar is ${one.bins[0].count} shards` : "";
  const refused = Object.entries(one.rejects).sort((a, b) => b[1] - a[1]);
  return h("article", { class: "card", "data-dataset": one.key },
    h("div", { class: "head" }, h("h2", null, one.key), h("span", { class: `pill ${state}` }, state),
      one.generation > 1 ? h("span", { class: "note" }, `generation ${one.generation}`) : null,
      h("span", { class: "end" }, one.sealed ? `sealed ${ago(about.time - one.last)} ago` : `last record ${ago(about.time - one.last)} ago`)),
    one.error ? errorBox(one.error) : null,
    h("p", { class: "note" }, [`${whole(one.shards)} shards`, `${whole(one.rows)} rows`, one.tokens === null ? null : `${short(one.tokens)} tokens`, bytes(one.bytes),
      one.val_rows ? `${whole(one.val_rows)} rows for validation` : null, one.chunk_tokens ? `chunks of ${whole(one.chunk_tokens)} tokens` : null,
      one.steps.length ? one.steps.join(" → ") : null].filter(Boolean).join(" · ")),
    timeline.length > 1 ? plot({ title: "Shards over time", series: [{ name: "shards", points: timeline, kind: "step", c: 0 }], x: { time: true, title: "time" }, y: { title: "shards", format: whole }, height: 150, seal }) : null,
    one.bins.length ? plot({ title: "Rows of shards", note: each, series: [{ name: "rows", kind: "bars", c: 0, width: one.bins[0].count, points: one.bins.map((bin) => [bin.first, bin.rows]), tip: (point) => { const bin = one.bins.find((other) => other.first === point[0]); return bin ? `\n${bin.count > 1 ? `${bin.count} shards from ` : ""}${bin.name}\n${bytes(bin.bytes)}` : ""; } }], x: { min: 0, max: one.shards, title: "shard", format: whole }, y: { title: "rows" }, height: 130 }) : null,
    refused.length ? h("p", null, "Refused: ", refused.slice(0, 4).map(([reason, count], k) => [k ? ", " : "", `${reason} ${whole(count)}`]), refused.length > 4 ? ", …" : "", " ",
      h("a", { id: `rejects-${one.key}`, href: `#/rejects?${new URLSearchParams({ dataset: one.key })}` }, "look at them")) : null,
    one.inputs.length ? h("details", null, h("summary", null, `${whole(one.num_inputs)} ${one.num_inputs === 1 ? "input" : "inputs"}`),
      h("div", { class: "scroll" }, h("table", null, h("tr", null, h("th", null, "input"), h("th", { class: "n" }, "read"), h("th", { class: "n" }, "kept"), h("th", { class: "n" }, "refused"), h("th", null, "end")),
        one.inputs.map((input) => h("tr", null, h("td", { class: "mono" }, input.name), h("td", { class: "n" }, whole(input.read)), h("td", { class: "n" }, whole(input.kept)), h("td", { class: "n" }, whole(input.dropped)), h("td", null, input.ended || "open")))))) : null);
}

// The run whose description lies nearest to the losses.
export function runOf(app, one) {
  const runs = app.overview.runs.filter((run) => run.about === "run");
  const folder = (key) => key.split("/").slice(0, -1).join("/");
  return (runs.find((run) => folder(run.key) === one.where) || runs.find((run) => one.where.startsWith(folder(run.key))) || runs[0] || app.overview.runs[0] || {}).key;
}

// A scale for losses on which one that ran away does not press all others onto a line.
function scaleOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const low = sorted[0] ?? 0, usual = sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 1;
  const shown = sorted.filter((value) => value - low <= 20 * (usual - low || Infinity));
  const high = shown[shown.length - 1] ?? 1, pad = 0.06 * (high - low || 1);
  return { min: low - pad, max: high + pad, above: sorted.length - shown.length };
}

export function loss(app, one, { height = 190 } = {}) {
  const points = one.step.map((step, k) => [step, one.loss[k]]).filter((point) => point[1] !== null);
  const at = new Map(points), run = runOf(app, one);
  const pick = (step) => app.go("batches", { run, n: Math.max(0, step - 1) });
  const waited = one.step.map((step, k) => [step, one.waited[k]]).filter((point) => point[1] !== null);
  const { min, max, above } = scaleOf(points.map((point) => point[1]));
  const notes = [run ? "a click leads to the batch" : "", above ? `${whole(above)} above the scale, at the upper edge` : ""];
  return h("article", { class: "card" },
    h("div", { class: "head" }, h("h2", null, "Loss"), h("span", { class: "note mono" }, one.key), h("span", { class: "end" }, `${whole(one.steps)} steps`)),
    plot({ title: "Loss by step", note: notes.filter(Boolean).join("; "), series: [{ name: "loss", points, c: 0, fill: false }], x: { title: "step", format: whole, tip: (step) => `step ${step}, batch ${step - 1}` }, y: { title: "loss", min, max }, height, onpick: run ? pick : undefined,
      marks: one.spikes.filter((step) => at.has(step)).map((step) => ({ x: step, y: at.get(step), label: `spike at step ${step}: batch ${step - 1}` })) }),
    one.spikes.length && run ? h("p", null, "Spikes: ", one.spikes.map((step, k) => [k ? ", " : "", h("a", { href: `#/batches?${new URLSearchParams({ run, n: Math.max(0, step - 1) })}` }, `step ${step}`), at.has(step) ? ` (${at.get(step).toFixed(2)})` : " (not finite)"])) : null,
    waited.length ? plot({ title: "Time that steps wait for data", series: [{ name: "waiting", points: waited, c: 1 }], x: { title: "step", format: whole }, y: { format: (value) => percent(value, 0), min: 0, title: "share of a step" }, height: 120 }) : null);
}
