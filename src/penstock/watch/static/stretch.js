// A stretch of batches: the mixture against its weights, fill, lengths and ledger; and the order.

import { NOTHING, errorBox, fill, h, isOnTheWay, legend, percent, plot, short, whole } from "./draw.js";

function controls(app, name, title, text, draw, { count, extra = [] }) {
  const first = h("input", { type: "number", min: 0, value: 0, id: "first", "aria-label": "First batch" });
  const many = h("input", { type: "number", min: 1, value: count, id: "count", "aria-label": "Number of batches" });
  let run = app.run(), ticket = 0;
  const body = h("div", { class: "grid wide" }), status = h("span", { class: "note", role: "status" });
  const ask = async (more = {}) => {
    const mine = ++ticket;
    status.textContent = "planning …";
    try {
      const found = await app.ask("stretch", { run, first: Number(first.value) || 0, count: Number(many.value) || 1, ...more });
      if (mine !== ticket) return;
      status.textContent = `batches ${whole(found.first)} to ${whole(found.first + found.count - 1)}, ${whole(found.documents)} pieces of documents`;
      fill(body, draw(found));
    } catch (error) {
      if (mine !== ticket) return;
      status.textContent = "";
      body.replaceChildren(errorBox(error.error || { what: error.message }));
      if (isOnTheWay(error)) setTimeout(() => { if (mine === ticket) ask(more); }, 200);
    }
  };
  const bar = h("div", { class: "bar" }, h("h1", null, title), app.pickRun(name),
    h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); ask(); } },
      h("label", { class: "field" }, "From batch", first), h("label", { class: "field" }, "Batches", many), extra, h("button", { class: "plain strong" }, "Show")), status, h("p", { class: "say" }, text));
  if (!run) body.replaceChildren(errorBox(NOTHING));
  else ask();
  return { bar, body, ask, move: (query) => { run = query.get("run") || app.run(); ask(); } };
}

export function mixture(app, main) {
  const { bar, body, move } = controls(app, "mixture", "Mixture", "What a stretch of batches is made of, beside what was asked for. All of it follows from the plan: no document is read.", (found) => {
    const curve = found.curve, names = found.sources, middle = (k) => curve.batch[k];
    const shares = names.map((name, k) => ({ name, c: k, fill: false, points: curve.shares[k].map((share, j) => [middle(j), share]) }));
    const asked = names.map((name, k) => ({ name: `${name}, weight`, c: k, dashed: true, points: found.weights.map(([at, weights]) => [at, weights[k]]) }));
    const total = curve.tokens.reduce((a, b) => a + b, 0), samples = curve.samples.reduce((a, b) => a + b, 0);
    const full = curve.fill.reduce((a, b) => a + b, 0) / Math.max(1, curve.fill.length);
    return [
      h("article", { class: "card" }, plot({ title: "Mixture over batches", note: `share of ${found.weigh}${curve.each > 1 ? `, ${curve.each} batches a point` : ""}`, series: [...shares, ...asked], x: { title: "batch", format: whole }, y: { min: 0, max: 1, format: (value) => percent(value, 0), title: `share of ${found.weigh}` }, height: 240 }),
        legend(names, [h("span", null, h("i", { class: "dash" }), "weight asked for")]),
        h("div", { class: "scroll" }, h("table", null, h("tr", null, h("th", null, "source"), h("th", { class: "n" }, "weight"), h("th", { class: "n" }, "samples"), h("th", { class: "n" }, "of samples"), h("th", { class: "n" }, "tokens"), h("th", { class: "n" }, "of tokens")),
          names.map((name, k) => h("tr", null, h("td", null, name), h("td", { class: "n" }, percent(found.weights[0][1][k])), h("td", { class: "n" }, whole(curve.samples[k])), h("td", { class: "n" }, percent(curve.samples[k] / Math.max(1, samples))), h("td", { class: "n" }, whole(curve.tokens[k])), h("td", { class: "n" }, percent(curve.tokens[k] / Math.max(1, total)))))))),
      h("article", { class: "card" }, plot({ title: "Packing fill", note: `${percent(full, 2)} of places hold tokens`, series: [{ name: "fill", c: 2, fill: false, points: curve.fill.map((value, j) => [middle(j), value]) }], x: { title: "batch", format: whole }, y: { min: Math.max(0, Math.min(0.9, ...curve.fill) - 0.02), max: 1, format: (value) => percent(value, 0), title: "share of places" }, height: 170 }),
        histogram("Tokens of rows", found.fills, 2, "tokens of a row", "rows")),
      h("article", { class: "card" }, h("h2", null, "Lengths of documents' pieces"), names.map((name, k) => found.lengths[k].count ? histogram(name, found.lengths[k], k, "tokens", "pieces") : null)),
      h("article", { class: "card" }, h("div", { class: "head" }, h("h2", null, "Token ledger"), h("span", { class: "end" }, `after ${whole(found.ledger_at)} batches`)),
        h("p", { class: "note" }, "What became of every token that the plan has read: read = trained + context + cropped + skipped + waiting."), found.ledger.map((line) => ledger(line))),
    ];
  }, { count: 400 });
  main.replaceChildren(bar, body);
  return { move };
}

const PARTS = ["trained", "context", "cropped", "skipped", "waiting"];
function ledger(line) {
  const all = Math.max(1, line.read);
  return h("div", null, h("h3", null, line.source), h("div", { class: "meter", role: "img", "aria-label": PARTS.map((name) => `${name} ${percent(line[name] / all)}`).join(", ") },
    PARTS.map((name) => line[name] ? h("i", { class: name, style: { flex: `${line[name]} 0 0` } }) : null)),
  h("p", { class: "note" }, [`${short(line.documents)} documents`, `${short(line.read)} tokens read`, ...PARTS.filter((name) => line[name]).map((name) => `${short(line[name])} ${name}`), line.padded ? `${short(line.padded)} places padded` : ""].filter(Boolean).join(" · ")));
}

function histogram(title, found, c, x, y) {
  return plot({ title, note: `mean ${whole(found.mean)}, longest ${whole(found.most)}`, series: [{ name: y, kind: "bars", c, width: found.width, points: found.counts.map((count, k) => [k * found.width, count]) }], x: { title: x, min: 0, max: found.width * found.counts.length, format: whole, tip: (at) => `${whole(at)} to ${whole(at + found.width - 1)} ${x}` }, y: { title: y }, height: 140 });
}

export function shuffle(app, main) {
  let by = "shards";
  const order = h("select", { id: "by", "aria-label": "Position by", onchange: (event) => { by = event.target.value; made.ask({ by }); } }, h("option", { value: "shards" }, "shards"), h("option", { value: "files" }, "files"));
  const made = controls(app, "shuffle", "Order", "Where in the data the documents of a stretch of batches lie. A mixed order is an even cloud; stripes or a diagonal mean that batches hold neighbours.", (found) => {
    const [xs, sources, ys] = found.points;
    const cards = found.sources.map((name, k) => {
      const points = xs.map((at, j) => [at, ys[j], sources[j]]).filter((point) => point[2] === k);
      if (!points.length) return null;
      return h("article", { class: "card" }, plot({ title: name, note: `${whole(points.length)} documents drawn`, series: [{ name, kind: "dots", c: k, points }], x: { title: "batch", format: whole, min: found.first, max: found.first + found.count }, y: { min: 0, max: 1, format: (value) => percent(value, 0), title: found.by === "files" ? "position in the files, by name" : "position in the shards, in their order" }, height: 320 }), spread(points, found));
    }).filter(Boolean);
    if (by === "files" && found.by !== "files") cards.unshift(h("p", { class: "note" }, "These documents lie in too many shards to read where each stands in its file: positions are those of shards."));
    return cards;
  }, { count: 200, extra: [h("label", { class: "field" }, "Position by", order)] });
  main.replaceChildren(made.bar, made.body);
  return { move: made.move };
}

// How far a batch reaches: of an even cloud the middle half of a batch spans half of the data.
function spread(points, found) {
  const of = new Map();
  for (const [at, y] of points) { const key = Math.floor((20 * (at - found.first)) / Math.max(1, found.count)); if (!of.has(key)) of.set(key, []); of.get(key).push(y); }
  const spans = [...of.values()].filter((list) => list.length >= 8).map((list) => { list.sort((a, b) => a - b); return list[Math.floor(0.75 * list.length)] - list[Math.floor(0.25 * list.length)]; });
  if (!spans.length) return null;
  const mean = spans.reduce((a, b) => a + b, 0) / spans.length;
  return h("p", null, `The middle half of the documents of a twentieth of this stretch spans ${percent(mean, 0)} of the data; 50% is an even mix. `, h("b", null, mean > 0.4 ? "Well mixed." : mean > 0.2 ? "Partly in blocks." : "In blocks."));
}
