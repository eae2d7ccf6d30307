// Elements and plots. Whatever comes from data goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(4)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (tag, attributes, ...children) => put(document.createElement(tag), attributes, children);
// Like replaceChildren, with what `h` takes: lists, and nothings that are passed over.
export const fill = (element, ...children) => { element.replaceChildren(); return put(element, null, children); };
export const s = (tag, attributes, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

export const NOTHING = { what: "there is no run and no dataset to look into", do: "penstock run pipeline.toml makes one, and penstock watch DIR shows one that is elsewhere; this page shows it as soon as it is there" };

// Numbers as people read them

const UNITS = ["", "k", "M", "G", "T"];
export function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let at = 0, left = Math.abs(value);
  if (left >= 1e15) return value.toExponential(1);
  while (left >= 999.5 && at < UNITS.length - 1) { left /= 1000; at++; }
  const text = left >= 100 || Number.isInteger(left) ? left.toFixed(0) : left.toPrecision(Math.min(digits, left < 1 ? 2 : 3));
  return (value < 0 ? "−" : "") + (text.includes(".") ? text.replace(/\.?0+$/, "") : text) + UNITS[at];
}
export const bytes = (value) => Number.isFinite(value) ? `${short(value)}B`.replace(/(\d)B$/, "$1 B").replace(/([kMGT])B$/, " $1B") : "–";
export const whole = (value) => Number.isFinite(value) ? value.toLocaleString("en-US") : "–";
export const percent = (value, digits = 1) => Number.isFinite(value) ? `${(100 * value).toFixed(digits)}%` : "–";
export const colour = (number) => number % 8;
export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}
export const dated = (seconds) => {
  const at = new Date(1000 * seconds), two = (number) => String(number).padStart(2, "0");
  return `${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
};
export const clock = (seconds) => new Date(1000 * seconds).toTimeString().slice(0, 8);

// Scales

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}
function timeTicks(low, high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((k) => (high - low) / k <= count) || steps[steps.length - 1];
  const shift = 60 * new Date(1000 * low).getTimezoneOffset();
  const found = [];
  for (let at = Math.ceil((low - shift) / step) * step + shift; at <= high; at += step) found.push(at);
  return found.length ? found : [low];
}

const tip = h("div", { class: "tip", hidden: true, role: "presentation" });
document.body.append(tip);
export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, y - height - 12)}px`;
}
export const hideTip = () => { tip.hidden = true; };

// A plot is drawn for the width that it gets, so that its text has one size everywhere.
const watched = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const width = Math.floor(contentRect.width);
    if (target.draw && width > 0 && target.drawn !== width) { target.drawn = width; target.draw(width); }
  }
});

/* series: [{name, points: [[x, y]…], c: colour number, kind: "line" | "step" | "area" | "dots" | "bars", dashed}] */
export function plot({ title, note, series, height = 180, x = {}, y = {}, onpick, marks = [], seal }) {
  const label = `${title}. ${series.map((one) => `${one.name}: ${one.points.length} points`).join("; ")}`;
  const holder = h("div");
  const figure = h("figure", { role: "group", "aria-label": label },
    h("figcaption", null, h("b", null, title), note ? h("span", null, note) : null), holder);
  holder.draw = (width) => holder.replaceChildren(drawn(width));
  watched.observe(holder);
  return figure;

  function drawn(width) {
    const all = series.flatMap((one) => one.points);
    const xs = all.map((point) => point[0]);
    const ys = all.map((point) => point[1]).filter(Number.isFinite);
    let x0 = x.min ?? Math.min(...xs), x1 = x.max ?? Math.max(...xs);
    let y0 = y.min ?? Math.min(0, ...ys), y1 = y.max ?? Math.max(...ys);
    if (!all.length) [x0, x1, y0, y1] = [0, 1, 0, 1];
    if (x1 <= x0) x1 = x0 + 1;
    if (y1 <= y0) y1 = y0 + 1;
    if (y.max === undefined) y1 += (y1 - y0) * 0.06;
    if (y.min === undefined && y0 !== 0) y0 -= (y1 - y0) * 0.04;
    const spansDays = x.time && x1 - x0 > 72000;
    const yFormat = y.format || short, xFormat = x.format || (spansDays ? dated : x.time ? clock : short);
    const yTicks = ticks(y0, y1, Math.max(2, Math.floor(height / 46))).filter((at) => y.format !== whole || Number.isInteger(at));
    const left = Math.max(30, 8 + 6.2 * Math.max(...yTicks.map((at) => yFormat(at).length)));
    const right = 8, top = y.title ? 18 : 8, bottom = x.title ? 34 : 20;
    const inner = width - left - right, tall = height - top - bottom;
    const px = (value) => left + (inner * (value - x0)) / (x1 - x0);
    const py = (value) => top + tall - (tall * (Math.min(y1, Math.max(y0, value)) - y0)) / (y1 - y0);
    const count = Math.max(2, Math.floor(inner / 84));
    const xTicks = x.time ? timeTicks(x0, x1, count) : ticks(x0, x1, count).filter((at) => x.format !== whole || Number.isInteger(at));
    const svg = s("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const at of yTicks) {
      svg.append(s("line", { class: "grid-line", x1: left, x2: width - right, y1: py(at), y2: py(at) }),
        s("text", { x: left - 6, y: py(at) + 4, "text-anchor": "end" }, yFormat(at)));
    }
    svg.append(s("line", { class: "axis", x1: left, x2: width - right, y1: top + tall, y2: top + tall }));
    for (const at of xTicks) {
      const place = px(at), anchor = place < left + 20 ? "start" : place > width - 28 ? "end" : "middle";
      svg.append(s("text", { x: place, y: top + tall + 15, "text-anchor": anchor }, xFormat(at)));
    }
    if (x.title) svg.append(s("text", { x: left + inner / 2, y: height - 2, "text-anchor": "middle" }, x.title));
    if (y.title) svg.append(s("text", { x: 0, y: 10 }, y.title));
    if (Number.isFinite(seal)) {
      svg.append(s("line", { class: "cross", x1: px(seal), x2: px(seal), y1: top, y2: top + tall }),
        s("text", { x: px(seal) - 4, y: top + 10, "text-anchor": "end" }, "sealed"));
    }
    for (const one of series) {
      const c = colour(one.c ?? 0);
      const points = one.points.filter((point) => Number.isFinite(point[1]));
      if (one.kind === "dots") {
        for (const [a, b] of points) svg.append(s("circle", { class: `f${c}`, cx: px(a), cy: py(b), r: one.r || 1.6, "fill-opacity": one.opacity || 0.55 }));
        continue;
      }
      if (one.kind === "bars") {
        const each = one.width || 1;
        for (const [a, b] of points) {
          const from = px(a), to = px(a + each);
          svg.append(s("rect", { class: `f${c}`, x: from + Math.min(1, (to - from) * 0.1), width: Math.max(0.75, (to - from) * 0.8), y: py(b), height: Math.max(0, py(y0) - py(b)), "fill-opacity": one.opacity || 0.85 }));
        }
        continue;
      }
      let path = "";
      points.forEach(([a, b], k) => {
        if (one.kind === "step" && k) path += `H${px(a).toFixed(1)}`;
        path += `${k ? "L" : "M"}${px(a).toFixed(1)},${py(b).toFixed(1)}`;
      });
      if (one.kind !== "line-only" && !one.dashed && points.length > 1 && one.fill !== false) {
        const base = `L${px(points[points.length - 1][0]).toFixed(1)},${py(y0)}L${px(points[0][0]).toFixed(1)},${py(y0)}Z`;
        svg.append(s("path", { class: `area f${c}`, d: path + base }));
      }
      svg.append(s("path", { class: `line l${c}${one.dashed ? " dashed" : ""}`, d: path }));
      if (points.length === 1) svg.append(s("circle", { class: `f${c}`, cx: px(points[0][0]), cy: py(points[0][1]), r: 3 }));
    }
    for (const mark of marks) {
      const dot = s("circle", { class: mark.class || "bad-f", cx: px(mark.x), cy: py(mark.y), r: 5, tabindex: onpick ? 0 : undefined, role: onpick ? "button" : undefined, "aria-label": mark.label });
      if (onpick) {
        dot.style.cursor = "pointer";
        dot.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onpick(mark.x); } });
      }
      svg.append(dot);
    }
    const cross = s("line", { class: "cross", y1: top, y2: top + tall, visibility: "hidden" });
    svg.append(cross);
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const at = x0 + ((event.clientX - box.left - left) / inner) * (x1 - x0);
      return Math.min(x1, Math.max(x0, at));
    };
    svg.addEventListener("pointermove", (event) => {
      const at = nearest(event), lines = [];
      let place = null;
      for (const one of series) {
        if (one.kind === "dots" || !one.points.length) continue;
        let best = one.points[0];
        if (one.kind === "bars") best = one.points.filter((point) => point[0] <= at).pop() || best;
        else for (const point of one.points) if (Math.abs(point[0] - at) < Math.abs(best[0] - at)) best = point;
        place = place ?? best[0];
        lines.push(`${one.name}: ${yFormat(best[1])}${one.tip ? one.tip(best) : ""}`);
      }
      if (place === null) return;
      cross.setAttribute("x1", px(place)); cross.setAttribute("x2", px(place)); cross.setAttribute("visibility", "visible");
      showTip(`${(x.tip || xFormat)(place)}\n${lines.join("\n")}`, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
    if (onpick) {
      svg.style.cursor = "crosshair";
      svg.addEventListener("click", (event) => {
        const at = nearest(event);
        let best = null;
        for (const point of series[0].points) if (best === null || Math.abs(point[0] - at) < Math.abs(best - at)) best = point[0];
        if (best !== null) { hideTip(); onpick(best); }
      });
    }
    return svg;
  }
}

export const legend = (names, more = []) => h("div", { class: "legend" },
  names.map((name, k) => h("span", null, h("i", { class: `b${colour(k)}` }), name)), more);

// Whether the server has not come to a batch yet: whoever asks again gets there.
export const isOnTheWay = (error) => (error.message || "").startsWith("still planning");

export function errorBox(error) {
  return h("div", { class: "error", role: "alert" }, h("b", null, error.what),
    error.where ? h("span", { class: "mono" }, error.where) : null,
    error.why ? h("span", null, error.why) : null,
    error.do ? h("span", { class: "note" }, error.do) : null);
}

export function command(text) {
  const button = h("button", { class: "plain", type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
  } }, "Copy");
  const code = h("code", null, text);
  return h("div", { class: "command" }, code, button);
}
