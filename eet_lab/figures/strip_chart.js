// A strip chart on a canvas. Points arrive as float32 triples (series, x, y); nothing is fetched from anywhere.
// What it calls stands in widgets.js.

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1);
  const power = Math.pow(10, Math.floor(Math.log10(raw || 1)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || power * 10;
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) ticks.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return ticks;
}

// Decades, or 1, 2 and 5 of each, or evenly spaced values: the first of them of which three or more have room. `roomy` leaves
// those that have.
function logTicks(low, high, roomy) {
  const ticks = [], isDecade = (v) => Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6;
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const m of [1, 2, 5]) { const v = m * Math.pow(10, e); if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v); }
  const even = [3, 4, 5, 6, 7, 8].map((count) => niceTicks(low, high, count));
  const tries = [...(ticks.length > 6 ? [ticks.filter(isDecade)] : []), ticks, ...even].map(roomy);
  return tries.find((each) => each.length > 2) || tries.reduce((best, each) => (each.length > best.length ? each : best));
}

const newest = (line) => line.y.findLastIndex((y) => !isNaN(y));

function render({ model, el }) {
  el.classList.add("eet-strip");
  el.innerHTML = `<div class="eet-strip-head"><span class="eet-strip-title"></span><button class="eet-strip-scale" type="button"
    title="Switch between a linear and a logarithmic axis">log</button></div><div class="eet-strip-legend"></div>
    <canvas class="eet-strip-canvas" role="img"></canvas><div class="eet-strip-note"></div>`;
  const [titleEl, scaleEl] = el.querySelector(".eet-strip-head").children;
  const legendEl = el.querySelector(".eet-strip-legend"), noteEl = el.querySelector(".eet-strip-note");
  const canvas = el.querySelector("canvas"), pen = canvas.getContext("2d");
  let settled = false, lines = [], scale = model.get("scale"), waiting = false, values = [];

  function reset() { lines = model.get("series").map(() => ({ x: [], y: [] })); }
  function add(view) {
    const data = numbers(view), window = model.get("window");
    for (let i = 0; i + 2 < data.length; i += 3) {
      const line = lines[data[i]];
      if (line) { line.x.push(data[i + 1]); line.y.push(data[i + 2]); }
    }
    const end = Math.max(...lines.map((l) => (l.x.length ? l.x[l.x.length - 1] : -Infinity)));
    for (const line of lines) {
      let drop = Math.max(0, line.x.length - 2400);
      if (window) while (drop < line.x.length && line.x[drop] < end - window) drop++;
      if (drop) { line.x.splice(0, drop); line.y.splice(0, drop); }
    }
  }
  function fromSnapshot() {
    reset();
    const snapshot = model.get("snapshot");
    if (snapshot && snapshot.byteLength) add(snapshot);
    later();
  }
  function later() { if (!waiting) { waiting = true; requestAnimationFrame(draw); } }

  // What a name says after a colon, a point or a bracket goes first where there is little room, and so does a unit that all
  // lines share, which the title has then.
  const short = (name) => name.split(/: | · | \(/)[0];
  const told = (name) => [short(name), make("span", "eet-strip-more", name.slice(short(name).length))];

  function legend() {
    const units = model.get("series").map((s) => s.unit || model.get("unit")), shared = new Set(units).size < 2;
    const names = model.get("series").map((s) => s.name), apart = new Set(names.map(short)).size === names.length;
    titleEl.title = model.get("title");
    titleEl.replaceChildren(...told(model.get("title")), make("span", "eet-strip-less", shared && units[0] ? ", " + units[0] : ""));
    scaleEl.setAttribute("aria-pressed", String(scale === "log"));
    scaleEl.setAttribute("aria-label", "logarithmic axis of " + model.get("title"));
    noteEl.textContent = model.get("note");
    noteEl.style.display = model.get("note") ? "" : "none";
    legendEl.replaceChildren();
    values = model.get("series").map((s, i) => {
      const item = make("span"), dot = make("i"), value = make("b");
      const number = document.createTextNode(""), unit = make("span", shared ? "eet-strip-more" : "", " " + units[i]);
      dot.style.background = s.color;
      item.title = s.value_of ? `${s.name}: ${s.value_of}` : s.name;
      value.append(number, unit);
      const of = s.value_of ? [make("span", "eet-strip-more", s.value_of + " ")] : [];
      item.append(dot, ...(apart ? told(s.name) : [s.name]), " ", ...of, value);
      legendEl.append(item);
      return (last) => { number.textContent = last === undefined ? "–" : brief(last); unit.hidden = last === undefined; };
    });
  }

  function draw() {
    waiting = false;
    const style = getComputedStyle(el), { width, height } = fitCanvas(canvas, pen, style);
    if (!width || !height) return; // not in view, or between two themes: it is drawn when it has a size again
    const ink = style.getPropertyValue("--eet-dim") || "#777", grid = style.getPropertyValue("--eet-line") || "#ccc";
    const series = model.get("series");
    const shown = lines.filter((l) => l.x.length);
    lines.forEach((l, i) => { values[i](l.y[newest(l)]); });
    el.dataset.draws = (+el.dataset.draws || 0) + 1;
    el.dataset.points = shown.reduce((n, l) => n + l.x.length, 0);
    pen.font = "10px " + (style.getPropertyValue("--jp-ui-font-family") || "sans-serif");
    if (!shown.length) { pen.fillStyle = ink; pen.textAlign = "center"; pen.fillText(model.get("note") ? "no data" : "waiting for data", width / 2, height / 2); return; }
    let x0 = Math.min(...shown.map((l) => l.x[0])), x1 = Math.max(...shown.map((l) => l.x[l.x.length - 1]));
    if (model.get("window")) x0 = Math.max(x0, x1 - model.get("window"));
    if (x1 - x0 < 1e-9) x1 = x0 + 1;
    const log = scale === "log", isDrawn = (y) => isFinite(y) && (!log || y > 0); // a norm that overflowed is infinite
    let lo = Infinity, hi = -Infinity;
    for (const l of shown) for (const v of l.y) if (isDrawn(v)) { if (v < lo) lo = v; if (v > hi) hi = v; }
    if (!isFinite(lo)) { lo = 0.1; hi = 1; }
    if (log) { lo = lo / 1.25; hi = hi * 1.25; } else { lo = Math.min(0, lo); hi = hi > lo ? hi + (hi - lo) * 0.08 : lo + 1; }
    const left = 44, right = 8, top = 6, bottom = 18, W = width - left - right, H = height - top - bottom;
    const f = log ? (v) => Math.log(Math.max(v, lo)) : (v) => v;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * W, py = (y) => top + H - ((f(y) - f(lo)) / (f(hi) - f(lo))) * H;
    pen.lineWidth = 1; pen.strokeStyle = grid; pen.fillStyle = ink; pen.textBaseline = "middle"; pen.textAlign = "right";
    const at = (t) => Math.round(py(t)) + 0.5;
    const roomy = (ticks) => { // in a low chart not all labels have room
      let below = Infinity;
      return ticks.filter((t) => below - at(t) >= 11 && ((below = at(t)), true));
    };
    for (const t of log ? logTicks(lo, hi, roomy) : roomy(niceTicks(lo, hi, 4))) {
      const y = at(t);
      pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
      pen.fillText(brief(t), left - 6, y);
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    let before = ""; // of a short span, neighbours may read the same
    for (const t of niceTicks(x0, x1, Math.max(2, Math.floor(W / 55)))) {
      const text = brief(t) + " " + model.get("x_unit");
      if (text !== before) pen.fillText(text, Math.min(px(t), width - right - 12), height - 4);
      before = text;
    }
    lines.forEach((line, i) => {
      if (!line.x.length) return;
      pen.strokeStyle = pen.fillStyle = series[i].color;
      pen.lineWidth = 1.6; pen.lineJoin = "round"; pen.setLineDash(series[i].dash || []);
      pen.beginPath();
      let open = false;
      // Where nothing was told for a while there is no line: eight times as long as points are apart on average.
      const far = (8 * (line.x[line.x.length - 1] - line.x[0])) / line.x.length;
      for (let k = 0; k < line.x.length; k++) {
        if (!isDrawn(line.y[k])) { open = false; continue; } // what is no number ends a line
        if (k && line.x[k] - line.x[k - 1] > far) open = false;
        const x = px(line.x[k]), y = py(line.y[k]);
        open ? pen.lineTo(x, y) : pen.moveTo(x, y);
        open = true;
      }
      pen.stroke(); pen.setLineDash([]);
      const last = newest(line);
      if (isDrawn(line.y[last])) { pen.beginPath(); pen.arc(px(line.x[last]), py(line.y[last]), 2.4, 0, 7); pen.fill(); }
    });
    canvas.setAttribute("aria-label", titleEl.title + ": " + legendEl.innerText);
  }

  function onMessage(message, buffers) {
    if (message.kind === "points") add(buffers[0]);
    if (message.kind === "clear") reset();
    later();
  }
  // Points that were sent before this view listened are in the first snapshot that it hears of: messages come in order.
  function onSnapshot() { if (!settled) { settled = true; fromSnapshot(); } }
  function onSeries() { legend(); fromSnapshot(); }
  function onText() { legend(); later(); }
  scaleEl.addEventListener("click", () => { scale = scale === "log" ? "linear" : "log"; legend(); later(); });
  const unwatch = watchLooks(canvas, later);
  model.on("msg:custom", onMessage);
  model.on("change:snapshot", onSnapshot);
  model.on("change:series", onSeries);
  model.on("change:title change:note change:unit", onText);
  onSeries();
  return () => {
    unwatch();
    model.off("msg:custom", onMessage);
    model.off("change:snapshot", onSnapshot);
    model.off("change:series", onSeries);
    model.off("change:title change:note change:unit", onText);
  };
}

export default { render };
