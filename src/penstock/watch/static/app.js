// The page: which view is shown, what it was told last, and a stream that says when to look again.

import { h, errorBox } from "./draw.js";
import { pipeline } from "./pipeline.js";
import { batches } from "./batches.js";
import { mixture, shuffle } from "./stretch.js";
import { rejects } from "./rejects.js";

const VIEWS = { pipeline, batches, mixture, shuffle, rejects };
const main = document.getElementById("main");

export class Refused extends Error {
  constructor(error) { super(error.what); this.error = error; }
}

export async function ask(name, query = {}, signal) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const answer = await fetch(`/api/${name}?${new URLSearchParams(given)}`, { signal });
  const found = await answer.json();
  if (found.error && !answer.ok) throw new Refused(found.error);
  return found;
}

const app = { overview: null, view: null, name: "", ask };

export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: VIEWS[path] ? path : "pipeline", query: new URLSearchParams(query || "") };
}
export function go(name, query = {}, { replace = false } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const hash = `#/${name}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  if (hash === location.hash) { show(); return; }
  if (replace) { history.replaceState(null, "", hash); show(); } else location.hash = hash;
}
app.go = go;
app.route = route;

// A path as seen from the directory that is watched.
app.near = (path) => path && app.overview && path.startsWith(`${app.overview.root}/`) ? path.slice(app.overview.root.length + 1) : path;

// Which run is looked at: that of the address, else the first that a file describes, else any.
app.run = () => {
  const asked = route().query.get("run"), runs = app.overview ? app.overview.runs : [];
  return asked || (runs.find((one) => one.about === "run") || runs[0] || {}).key || "";
};
app.pickRun = (name) => {
  const runs = app.overview ? app.overview.runs : [];
  return h("label", { class: "field" }, "Run",
    h("select", { "aria-label": "Run", onchange: (event) => go(name, { run: event.target.value }) },
      runs.map((one) => h("option", { value: one.key, selected: one.key === app.run() }, `${one.title} (${one.about.split(",")[0]})`))));
};

function show() {
  const { name, query } = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  if (!app.overview) return;
  if (app.name === name && app.view && app.view.move) { app.view.move(query); return; }
  if (app.view && app.view.close) app.view.close();
  app.name = name;
  document.title = `${name} · ${app.overview.name} · penstock`;
  try {
    app.view = VIEWS[name](app, main, query) || {};
  } catch (error) {
    main.replaceChildren(errorBox({ what: `the page failed: ${error.message}` }));
    throw error;
  }
}

let asking = false, again = false, wait = 0;
async function look() {
  if (asking) { again = true; return; }
  asking = true;
  try {
    const first = !app.overview;
    app.overview = await ask("overview");
    document.getElementById("where").textContent = app.overview.name;
    document.getElementById("where").title = app.overview.root;
    if (first) show(); else if (app.view && app.view.changed) app.view.changed();
  } catch (error) {
    if (!app.overview) main.replaceChildren(errorBox(error.error || { what: error.message }));
  } finally {
    asking = false;
    if (again) { again = false; clearTimeout(wait); wait = setTimeout(look, 700); }
  }
}

const dot = document.getElementById("dot"), live = document.getElementById("live");
function listen() {
  const stream = new EventSource("/stream");
  stream.addEventListener("open", () => { dot.className = "on"; live.textContent = "live"; });
  stream.addEventListener("changed", look);
  stream.addEventListener("error", () => { dot.className = "off"; live.textContent = "not connected"; });
}

const help = document.getElementById("help");
document.getElementById("keys").addEventListener("click", () => help.showModal());
addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  const names = Object.keys(VIEWS);
  if (event.key === "?") help.showModal();
  else if (/^[1-5]$/.test(event.key)) { go(names[event.key - 1], names[event.key - 1] === "pipeline" ? {} : { run: route().query.get("run") }); main.focus(); }
  else if (app.view && app.view.key && app.view.key(event)) event.preventDefault();
});

look();
listen();
