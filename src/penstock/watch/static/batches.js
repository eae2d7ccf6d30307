// The batch explorer: any batch, its rows as the model sees them, where each token comes from.

import { NOTHING, colour, command, errorBox, fill, h, isOnTheWay, percent, whole } from "./draw.js";
import { loss } from "./pipeline.js";

const ROLES = { system: 3, user: 0, assistant: 2, tool: 6, developer: 3 };
// What cannot be seen, or turns the letters around it: it is shown by its number.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;
const NAMES = { "\n": "⏎", "\t": "⇥", "\r": "␍" };

export function batches(app, main, query) {
  let counting = 0, run = app.run(), head = null, batch = null, row = null, n = 0, r = 0, active = -1, ticket = 0, byRole = true;
  const number = h("input", { type: "number", min: 0, step: 1, id: "batch-number", "aria-label": "Batch number", inputmode: "numeric", onchange: () => move(Number(number.value)) });
  const of = h("span", { class: "note", id: "batch-count" });
  const say = h("p", { class: "say" });
  const strips = h("div", { class: "strips", role: "group", "aria-label": "Rows of the batch" });
  const tokens = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the row; arrow keys move", id: "tokens" });
  const aside = h("aside", { class: "card about", "aria-live": "polite", "aria-label": "The token" });
  const keyLine = h("div", { class: "legend" });
  const rowHead = h("h2", null), mapNote = h("span", { class: "note" }), rowNote = h("span", { class: "end" });
  const box = h("div"), hits = h("div", { class: "hits" });
  const search = h("input", { type: "search", id: "search", placeholder: "file name, doc_id or text", "aria-label": "Search a document", size: 28 });
  const look = h("div", { class: "look" },
    h("div", { class: "grid" }, h("section", { class: "card" }, h("div", { class: "head" }, h("h2", null, "Rows"), mapNote), strips),
      h("section", { class: "card" }, h("div", { class: "head" }, rowHead, rowNote), keyLine, tokens)), aside);
  look.firstChild.style.gridTemplateColumns = "minmax(0, 1fr)";
  const step = (by) => h("button", { class: "plain", type: "button", id: by < 0 ? "previous" : "next", "aria-label": by < 0 ? "Previous batch" : "Next batch", onclick: () => move(n + by) }, by < 0 ? "←" : "→");
  const lossBox = h("div", { class: "grid" });
  fill(main, 
    h("div", { class: "bar" }, h("h1", null, "Batches"), app.pickRun("batches"),
      h("label", { class: "field" }, "Batch", h("span", { class: "steps" }, step(-1), " ", number, " ", step(1))), of,
      h("form", { role: "search", onsubmit: (event) => { event.preventDefault(); find(0); } }, h("label", { class: "field" }, "Search a document", h("span", null, search, " ", h("button", { class: "plain" }, "Search")))), say),
    hits, box, look, lossBox);
  drawLoss();

  function drawLoss() {
    fill(lossBox, ...app.overview.losses.map((one) => loss(app, one, { height: 150 })));
  }

  async function begin() {
    try {
      head = await app.ask("run", { run });
      tell();
    } catch (error) { fail(error); }
  }
  function tell() {
    of.textContent = head.batches ? `of ${head.exact ? "" : "about "}${whole(head.batches)}${head.exact && !head.final ? " so far" : ""}` : "";
    if (head.is_rollouts) {
      say.textContent = `${head.about}: whole groups. Colours are groups; hatched tokens were not sampled by the policy, and are not trained.`;
      return;
    }
    say.textContent = `${head.about === "run" ? "" : `${head.about}; `}${whole(head.rows)} rows of ${whole(head.seq_len)} tokens, ${head.pack}, seed ${head.seed}. ` +
      (head.sources.length > 1 ? `${head.sources.length} sources. ` : "") + "Colours are documents' sources; hatched tokens are read by the model and not trained.";
    clearTimeout(counting); // until it is counted, ask again
    if (!head.exact) counting = setTimeout(begin, head.sources.every((one) => one.sealed) ? 1000 : 4000);
  }
  function fail(error) {
    fill(box, errorBox(error.error || { what: error.message }));
    look.hidden = true;
  }

  function move(to, line = 0) {
    if (!Number.isFinite(to)) return;
    const wanted = Math.max(0, Math.floor(to));
    app.go("batches", { run, n: wanted, row: line || undefined });
  }

  async function load(to, line) {
    const mine = ++ticket;
    number.value = to;
    try {
      if (!batch || batch.batch !== to) {
        const found = await app.ask("batch", { run, n: to });
        if (mine !== ticket) return;
        batch = found;
        n = to; r = line;
        drawStrips();
      }
      n = to; r = Math.min(line, batch.rows.length - 1);
      for (const [k, strip] of [...strips.children].entries()) strip.setAttribute("aria-pressed", k === r);
      strips.children[r].scrollIntoView({ block: "nearest" });
      const found = await app.ask("row", { run, n, row: r });
      if (mine !== ticket) return;
      row = found;
      fill(box);
      look.hidden = false;
      drawRow();
    } catch (error) {
      if (mine !== ticket) return;
      n = to;
      fail(error);
      if (isOnTheWay(error)) setTimeout(() => { if (mine === ticket) load(to, line); }, 200);
    }
  }

  function drawStrips() {
    const full = batch.tokens / (batch.rows.length * batch.seq_len);
    mapNote.textContent = `${whole(batch.documents)} documents, ${percent(full)} full`;
    fill(strips, ...batch.rows.map((line, k) => {
      const used = line.reduce((total, piece) => total + piece[1], 0);
      return h("button", { class: "strip", type: "button", "aria-pressed": k === r, tabindex: k === r ? 0 : -1, title: batch.rewards ? `sequence ${k}, reward ${batch.rewards[k]}` : `row ${k}`, "aria-label": `row ${k}: ${line.length} documents, ${used} tokens`, onclick: () => move(n, k) },
        h("b", null, batch.rewards && batch.rewards[k] !== null ? batch.rewards[k].toFixed(2) : k), h("span", null,
          line.map((piece) => h("i", { class: `b${colour(piece[0])}`, style: { flex: `${piece[1]} 0 0` } })),
          used < batch.seq_len ? h("i", { class: "pad", style: { flex: `${batch.seq_len - used} 0 0` } }) : null));
    }));
  }

  function drawRow() {
    const chat = row.roles !== null, special = new Set(row.special);
    rowHead.textContent = `Row ${r}`;
    const trained = row.trained.reduce((total, one) => total + one, 0);
    rowNote.textContent = `${row.spans.length} documents · ${whole(row.fill)} of ${whole(row.seq_len)} tokens · ${whole(trained)} trained`;
    const names = chat && byRole ? [...new Set(row.roles)].filter(Boolean) : batch.sources;
    fill(keyLine, ...names.map((name, k) => h("span", null, h("i", { class: `k${chat && byRole ? ROLES[name] ?? 7 : colour(k)}` }), name)),
      h("span", null, h("i", { class: "t m" }), "not trained"),
      chat ? h("button", { class: "plain", type: "button", onclick: () => { byRole = !byRole; drawRow(); } }, byRole ? "Colour by source" : "Colour by role") : null);
    const parts = [];
    for (const [d, span] of row.spans.entries()) {
      parts.push(h("span", { class: "doc" }, h("i", { class: `b${colour(span.source)}` }), h("span", { class: "mono" }, app.near(span.file) || span.shard),
        ` ${span.parts > 1 ? `part ${span.part + 1} of ${span.parts}, ` : ""}tokens ${whole(span.tokens[0])}–${whole(span.tokens[1])}`));
      for (let k = span.first; k < span.last; k++) {
        const tint = chat && byRole ? ROLES[row.roles[k]] ?? 7 : colour(span.source);
        parts.push(h("span", { class: `t k${tint}${row.trained[k] ? "" : " m"}${special.has(k) ? " x" : ""}`, id: `t${k}`, "data-k": k, "data-d": d }, shown(row.pieces[k], special.has(k))));
      }
    }
    if (row.fill < row.seq_len) parts.push(h("span", { class: "doc" }, `${whole(row.seq_len - row.fill)} places of padding`));
    fill(tokens, ...parts);
    tokens.scrollTop = 0;
    tokens.dataset.shown = `${row.batch} ${row.row}`;
    active = -1;
    describe(row.fill ? 0 : -1, document.activeElement === tokens);
  }

  function shown(text, isSpecial) {
    if (isSpecial) return text;
    if (!UNSEEN.test(text)) return text;
    return [...text].map((letter) => !UNSEEN.test(letter) ? letter : !NAMES[letter] ? h("span", { class: "ws" }, `‹U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`) : [h("span", { class: "ws", "aria-hidden": true }, NAMES[letter]), letter === "\n" ? "\n" : ""]);
  }

  function describe(k, mark = true) {
    if (active >= 0) { const before = document.getElementById(`t${active}`); if (before) before.classList.remove("on"); }
    if (k < 0 || !row || k >= row.fill) { fill(aside, h("p", { class: "note" }, "Nothing but padding in this row.")); return; }
    const element = document.getElementById(`t${k}`);
    active = k;
    if (mark) { element.classList.add("on"); tokens.setAttribute("aria-activedescendant", element.id); }
    const span = row.spans[Number(element.dataset.d)];
    let at = 0;
    for (let j = span.first; j < k; j++) at += row.sizes[j];
    const size = row.sizes[k], text = span.text_bytes, file = span.file_bytes;
    const places = file ? `bytes ${whole(file[0] + at)}–${whole(file[0] + at + size)} of the file`
      : text && !span.is_chat ? `bytes ${whole(text[0] + at)}–${whole(text[0] + at + size)} of the text` : "";
    const line = (name, value) => value === null || value === undefined || value === "" ? [] : [h("dt", null, name), h("dd", null, value)];
    fill(aside, 
      h("h3", null, `Token ${whole(k)} of row ${r}`), h("div", { class: "token-text" }, row.pieces[k] === "" ? "(nothing)" : row.pieces[k]),
      h("dl", null, line("id", String(row.ids[k])), line("role", row.roles ? row.roles[k] : ""), line("loss", row.trained[k] ? "trained" : "not trained"), line("advantage", row.advantages ? String(row.advantages[k] ?? "not a number") : ""), line("bytes", places)),
      head && head.is_rollouts ? [h("h3", null, "Its rollout"), h("dl", null, line("rollout", span.file), line("group", span.name), line("reward", String(span.reward ?? "not a number")), line("weights", span.version === null ? "" : `version ${span.version}`))]
      : [h("h3", null, "Its document"), h("dl", null, line("file", h("span", { class: "mono" }, span.file || "not known")),
        line("bytes", file ? `${whole(span.start)}–${whole(span.end)}` : span.start === null || span.start === undefined ? "" : `${whole(span.start)}–${whole(span.end)}`),
        line("line", span.line === null || span.line === undefined ? "" : whole(span.line)), line("part", span.parts > 1 ? `${span.part + 1} of ${span.parts}` : ""), line("language", span.language),
        line("source", h("span", null, h("i", { class: `swatch b${colour(span.source)}` }), span.name)), line("shard", `${span.shard}, row ${whole(span.shard_row)}`),
        line("doc_id", h("span", { class: "mono" }, span.doc_id || "")), line("pass", span.epoch < 0 ? "repeated" : String(span.epoch + 1)), line("kept by", span.kept))],
      span.ban ? [h("h3", null, "Ban it from the next run"), command(span.ban)] : null);
  }

  tokens.addEventListener("pointermove", (event) => { const found = event.target.closest(".t"); if (found && Number(found.dataset.k) !== active) describe(Number(found.dataset.k)); });
  tokens.addEventListener("click", (event) => { const found = event.target.closest(".t"); if (found) { describe(Number(found.dataset.k)); tokens.focus({ preventScroll: true }); } });
  tokens.addEventListener("focus", () => { if (active >= 0) describe(active); });

  function key(event) {
    const inTokens = document.activeElement === tokens;
    if (event.key === "n") move(n + 1);
    else if (event.key === "p") move(n - 1);
    else if (event.key === "g") { number.focus(); number.select(); }
    else if (event.key === "/") search.focus();
    else if (event.key === "ArrowDown" && batch) { if (r + 1 < batch.rows.length) move(n, r + 1); }
    else if (event.key === "ArrowUp" && batch) { if (r > 0) move(n, r - 1); }
    else if (inTokens && row && ["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key)) {
      let to = event.key === "Home" ? 0 : event.key === "End" ? row.fill - 1 : active + (event.key === "ArrowRight" ? 1 : -1);
      if (event.shiftKey && event.key.startsWith("Arrow")) {
        const d = row.spans.findIndex((span) => active >= span.first && active < span.last) + (event.key === "ArrowRight" ? 1 : -1);
        to = row.spans[Math.max(0, Math.min(d, row.spans.length - 1))].first;
      }
      to = Math.max(0, Math.min(row.fill - 1, to));
      describe(to);
      document.getElementById(`t${to}`).scrollIntoView({ block: "nearest" });
    } else return false;
    return true;
  }

  async function find(at, before = []) {
    const text = search.value.trim();
    if (!text) { fill(hits); return; }
    if (!at) fill(hits, h("p", { class: "note" }, "Searching …"));
    try {
      const found = await app.ask("search", { run, q: text, at });
      const all = [...before, ...found.hits];
      const more = found.next === null ? null : h("button", { class: "plain", type: "button", onclick: () => find(found.next, all) }, "Search on");
      fill(hits, h("div", { class: "card" }, h("div", { class: "head" }, h("h2", null, `${all.length} ${all.length === 1 ? "document" : "documents"}`),
        h("span", { class: "end", role: "status" }, `${whole(found.looked)} of ${whole(found.shards)} shards looked at`)),
      all.map((hit) => document_(hit, text)), more, h("button", { class: "plain", type: "button", onclick: () => fill(hits) }, "Close")));
    } catch (error) { fill(hits, errorBox(error.error || { what: error.message })); }
  }

  function document_(hit, text) {
    const status = h("span", { class: "note", role: "status" });
    const where = async (at) => {
      status.textContent = at ? `looked at ${whole(at)} batches …` : "looking …";
      try {
        const found = await app.ask("where", { run, source: hit.source, shard: hit.shard_number, row: hit.shard_row, at });
        if (found.batch !== null) { status.textContent = `batch ${whole(found.batch)}`; move(found.batch, found.row); }
        else if (found.next !== null) where(found.next);
        else status.textContent = found.live ? `in none of the ${whole(found.looked)} batches so far` : "in no batch: it was left out";
      } catch (error) { status.textContent = error.message; }
    };
    const at = hit.excerpt.toLowerCase().indexOf(text.toLowerCase());
    const excerpt = at < 0 ? [hit.excerpt] : [hit.excerpt.slice(0, at), h("mark", null, hit.excerpt.slice(at, at + text.length)), hit.excerpt.slice(at + text.length)];
    return h("div", { class: "hit" }, h("div", null, h("span", { class: "mono" }, app.near(hit.file) || hit.shard), " ", h("span", { class: "note" }, `${hit.start === null || hit.start === undefined ? "" : `bytes ${whole(hit.start)}–${whole(hit.end)}, `}doc_id ${hit.doc_id || "–"}, by its ${hit.why}`)),
      h("pre", null, excerpt), h("div", null, h("button", { class: "plain", type: "button", onclick: () => where(0) }, "Go to its batch"), " ", status),
      hit.ban ? h("details", null, h("summary", null, "Ban it"), command(hit.ban)) : null);
  }

  if (!run) { fail({ error: NOTHING }); }
  else { begin(); load(Number(query.get("n")) || 0, Number(query.get("row")) || 0); }
  return {
    key,
    close: () => clearTimeout(counting),
    move: (given) => {
      const asked = given.get("run") || app.run();
      if (asked !== run) { run = asked; batch = null; head = null; fill(hits); begin(); }
      load(Number(given.get("n")) || 0, Number(given.get("row")) || 0);
    },
    changed: () => {
      drawLoss();
      if (!run && app.run()) { run = app.run(); begin(); load(0, 0); return; }
      if (head && !head.final) begin();
      if (look.hidden && run) load(n, r); // a batch that was not there may be
    },
  };
}
