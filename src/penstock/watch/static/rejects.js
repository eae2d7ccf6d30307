// What was refused: reasons, samples, and duplicates beside what they repeat.

import { errorBox, h, percent, whole } from "./draw.js";

export function rejects(app, main, query) {
  const known = app.overview.datasets;
  let key = query.get("dataset") || (known.find((one) => Object.keys(one.rejects || {}).length) || known[0] || {}).key || "";
  let reason = query.get("reason") || "", ticket = 0;
  const reasons = h("div", { class: "reasons", role: "group", "aria-label": "Reasons" }), list = h("div", { class: "hits" });
  const picker = h("select", { "aria-label": "Dataset", onchange: (event) => app.go("rejects", { dataset: event.target.value }) }, known.map((one) => h("option", { value: one.key, selected: one.key === key }, one.key)));
  const status = h("span", { class: "note" });
  main.replaceChildren(h("div", { class: "bar" }, h("h1", null, "Rejects"), h("label", { class: "field" }, "Dataset", picker), status, h("p", { class: "say" }, "Every document is in a shard or here, with the reason.")),
    h("section", { class: "card" }, h("h2", null, "Reasons"), reasons), h("section", { class: "card" }, h("h2", null, "Documents"), list));
  if (!key) { list.replaceChildren(h("p", { class: "note" }, "There is no dataset.")); return {}; }

  async function begin() {
    try {
      const found = await app.ask("reasons", { dataset: key });
      const most = Math.max(1, ...found.reasons.map((one) => one[1])), gone = found.read - found.kept;
      status.textContent = `${whole(found.read)} read = ${whole(found.kept)} kept + ${whole(gone)} refused (${percent(gone / Math.max(1, found.read))})`;
      reasons.replaceChildren(...found.reasons.map(([name, count]) => h("button", { class: "reason", type: "button", "aria-pressed": name === reason, onclick: () => app.go("rejects", { dataset: key, reason: name === reason ? "" : name }) },
        h("span", null, name), h("i", { style: { width: `${Math.max(1, (100 * count) / most)}%` } }), h("span", null, whole(count)))));
      if (!found.reasons.length) reasons.replaceChildren(h("p", { class: "note" }, "Nothing was refused."));
    } catch (error) { reasons.replaceChildren(errorBox(error.error || { what: error.message })); }
  }
  async function page(file = 0, byte = 0, before = []) {
    const mine = ++ticket;
    try {
      const found = await app.ask("rejects", { dataset: key, reason, file, byte });
      if (mine !== ticket) return;
      const all = [...before, ...found.rejects.map(reject)];
      list.replaceChildren(...all, all.length ? "" : h("p", { class: "note" }, found.next ? "None so far." : "None."),
        found.next ? h("button", { class: "plain", type: "button", onclick: () => page(found.next[0], found.next[1], all) }, "More") : "");
    } catch (error) { if (mine === ticket) list.replaceChildren(errorBox(error.error || { what: error.message })); }
  }

  function reject(one) {
    const more = h("div"), isText = !one.repeats;
    const open = async (event) => {
      const button = event.currentTarget;
      if (more.firstChild) { more.replaceChildren(); button.setAttribute("aria-expanded", "false"); return; }
      try {
        const found = await app.ask("pair", { dataset: key, file: one.file_number, byte: one.byte });
        more.replaceChildren(pair(app, found));
        button.setAttribute("aria-expanded", "true");
      } catch (error) { more.replaceChildren(errorBox(error.error || { what: error.message })); }
    };
    return h("div", { class: "hit" }, h("div", null, h("span", { class: "pill silent" }, one.reason), " ", h("span", { class: "mono" }, app.near(one.source || one.input)), " ", h("span", { class: "note" }, `${whole(one.start)}–${whole(one.end)}`)),
      h("p", { class: "sample" }, one.sample), Object.entries(one.more).length ? h("p", { class: "note" }, Object.entries(one.more).map(([name, value]) => `${name}: ${value}`).join(" · ")) : null,
      h("div", null, h("button", { class: "plain", type: "button", "aria-expanded": "false", onclick: open }, isText ? "Show its text" : "Compare with what it repeats")), more);
  }

  begin();
  page();
  return {
    move: (given) => {
      const asked = given.get("dataset") || key;
      if (asked !== key) { key = asked; picker.value = key; }
      reason = given.get("reason") || "";
      list.replaceChildren(h("p", { class: "note" }, "Reading …"));
      begin();
      page();
    },
    changed: begin,
  };
}

function pair(app, found) {
  const a = (found.text || "").split("\n"), b = found.kept ? found.kept.text.split("\n") : [];
  const ours = new Set(a), theirs = new Set(b);
  const lines = (list, others, kind) => h("pre", null, list.map((line) => h("span", { class: others.size && !others.has(line) ? kind : "" }, line)));
  return h("div", { class: "pair" },
    h("div", null, h("h3", null, "Refused"), found.text === null ? h("p", { class: "note" }, found.text_missing) : lines(a, theirs, "gone")),
    found.kept ? h("div", null, h("h3", null, "Kept"), h("p", { class: "mono" }, `${app.near(found.kept.file)} ${found.kept.start}–${found.kept.end}, ${found.kept.shard}`), lines(b, ours, "new"))
      : found.reject && found.reject.repeats ? h("div", null, h("h3", null, "Kept"), h("p", { class: "note" }, "What it repeats cannot be found any more.")) : null);
}
