// Policies on one traffic, each a lane, played on one clock. What it calls stands in widgets.js.

const VIEW_S = 8; // seconds of the reader's time that are in view
const STRIDE = 6; // numbers of a pass: begin, end, decode tokens, prompt tokens, pads, rows
const HEIGHT = { boxes: 92, gap: 16, queue: 46, axis: 16, left: 46, right: 10 };

function percentile(sorted, share) {
  const place = share * (sorted.length - 1), low = Math.floor(place), high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

function parts(passes, k, asRows) {
  const [decodes, prompts, pads, rows] = [2, 3, 4, 5].map((i) => passes[STRIDE * k + i]);
  if (!asRows) return [decodes, prompts, pads];
  const share = (rows - decodes) / Math.max(prompts + pads, 1);
  return [decodes, share * prompts, share * pads];
}

function openLane(data) {
  const lane = { name: data.name, color: data.color, cut: data.cut, passes: numbers(data.passes) };
  for (const key of ["came", "begun", "ended", "took"]) lane[key] = numbers(data[key]);
  lane.count = lane.passes.length / STRIDE;
  lane.begins = new Float32Array(lane.count);
  lane.padsBefore = new Float64Array(lane.count + 1);
  lane.allBefore = new Float64Array(lane.count + 1);
  for (let k = 0; k < lane.count; k++) {
    const [decodes, prompts, pads] = parts(lane.passes, k, false);
    lane.begins[k] = lane.passes[STRIDE * k];
    lane.decodes ||= decodes > 0;
    lane.padsBefore[k + 1] = lane.padsBefore[k] + pads;
    lane.allBefore[k + 1] = lane.allBefore[k] + decodes + prompts + pads;
  }
  lane.end = lane.count ? lane.passes[STRIDE * (lane.count - 1) + 1] : 0;
  lane.most = [false, true].map((asRows) => { // of tokens, and of rows
    let most = 1;
    for (let k = 0; k < lane.count; k++) most = Math.max(most, parts(lane.passes, k, asRows).reduce((a, b) => a + b));
    return most;
  });
  lane.queue = (ms) => countUpTo(lane.came, ms) - countUpTo(lane.begun, ms);
  lane.mostQueue = [...lane.came].reduce((most, ms) => Math.max(most, lane.queue(ms)), 1);
  const box = make("section", "eet-film-lane"), head = make("div", "eet-film-head");
  box.setAttribute("aria-label", data.name);
  lane.stats = make("span", "eet-film-stats");
  head.append(make("span", "eet-film-name", data.name), lane.stats);
  lane.canvas = make("canvas", "eet-film-canvas");
  lane.canvas.setAttribute("role", "img");
  box.append(head, lane.canvas);
  lane.box = box;
  return lane;
}

function tell(lane, now) {
  const done = countUpTo(lane.ended, now), begun = countUpTo(lane.begins, now);
  const took = lane.took.slice(0, done).sort(), all = lane.allBefore[begun];
  const times = done ? `p50 ${clock(percentile(took, 0.5))}, p99 ${clock(percentile(took, 0.99))}` : "p50 –, p99 –";
  const pads = all ? `${Math.round((100 * lane.padsBefore[begun]) / all)} % pads` : "";
  const words = [`${lane.queue(now)} wait`, `${done.toLocaleString("en")} of ${lane.ended.length.toLocaleString("en")} done`, times, pads];
  lane.stats.textContent = words.filter(Boolean).join(" · ");
  lane.canvas.setAttribute("aria-label", `${lane.name}: ${lane.stats.textContent}`);
}

function drawLane(lane, now, span, scale, colors, style) {
  const { canvas } = lane, pen = canvas.getContext("2d"), { width, height } = fitCanvas(canvas, pen, style);
  if (!width || !height) return;
  const from = Math.max(0, now - span), W = width - HEIGHT.left - HEIGHT.right;
  const px = (ms) => HEIGHT.left + ((ms - from) / span) * W, floor = HEIGHT.boxes, low = HEIGHT.boxes + HEIGHT.gap + HEIGHT.queue;
  const ink = style.getPropertyValue("--eet-dim") || "#777", line = style.getPropertyValue("--eet-line") || "#ccc";
  pen.font = "10px " + (style.getPropertyValue("--jp-ui-font-family") || "sans-serif");
  pen.strokeStyle = line; pen.fillStyle = ink; pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const [y, word] of [[6, plain(scale.tokens, 3)], [floor, "0"], [low - HEIGHT.queue + 4, plain(scale.queue, 3)], [low, "0"]]) {
    pen.beginPath(); pen.moveTo(HEIGHT.left, y + 0.5); pen.lineTo(width - HEIGHT.right, y + 0.5); pen.stroke();
    pen.fillText(word, HEIGHT.left - 5, y);
  }
  pen.textAlign = "left"; pen.textBaseline = "alphabetic";
  pen.fillText(clock(from, from + span), HEIGHT.left, height - 3);
  pen.textAlign = "right";
  pen.fillText(clock(from + span), width - HEIGHT.right, height - 3);
  pen.textAlign = "center";
  pen.fillText("above: " + scale.what + " per pass; below: waiting requests", HEIGHT.left + W / 2, height - 3);

  pen.save();
  pen.beginPath(); pen.rect(HEIGHT.left, 0, W, height - HEIGHT.axis); pen.clip();
  const first = Math.max(0, countUpTo(lane.begins, from) - 1), last = countUpTo(lane.begins, now);
  for (let k = first; k < last; k++) {
    const x = px(lane.passes[STRIDE * k]), right = px(Math.min(lane.passes[STRIDE * k + 1], now));
    const wide = Math.max(right - x - (right - x > 3 ? 1 : 0), 0.6);
    let y = floor;
    parts(lane.passes, k, scale.asRows).forEach((value, i) => {
      const high = (value / scale.tokens) * (floor - 6);
      pen.fillStyle = colors[i];
      pen.fillRect(x, y - high, wide, high);
      y -= high;
    });
  }
  pen.strokeStyle = lane.color; pen.lineWidth = 1.6; pen.beginPath();
  const steps = Math.min(W, 600), until = Math.min(now, from + span);
  for (let i = 0; i <= steps; i++) {
    const ms = from + ((until - from) * i) / steps, y = low - (lane.queue(ms) / scale.queue) * (HEIGHT.queue - 4);
    i ? pen.lineTo(px(ms), y) : pen.moveTo(px(ms), y);
  }
  pen.stroke();
  pen.restore();
}

function stripes(color) {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.strokeStyle = color; pen.lineWidth = 1.4; pen.globalAlpha = 0.9;
  pen.beginPath(); pen.moveTo(-1, 7); pen.lineTo(7, -1); pen.stroke();
  return pen.createPattern(tile, "repeat");
}

function key(color, text) {
  const item = make("span"), dot = make("i");
  dot.style.background = color;
  item.append(dot, text);
  return item;
}

function render({ model, el }) {
  const legend = make("div", "eet-film-legend"), rows = make("button", "", "Rows");
  let asRows = false, told = 0, colors = [];
  rows.type = "button";
  rows.title = "Boxes as high as the requests of a pass, or as its tokens";

  function open(film) {
    const lanes = (film.lanes || []).map(openLane), tones = film.colors || {};
    colors = [tones.decodes, tones.prompts, tones.waste ? stripes(tones.waste) : ""];
    el.classList.toggle("eet-film-empty", !lanes.length);
    const cut = lanes.some((lane) => lane.cut) ? [make("span", "", "Only the first passes are played.")] : [];
    const tile = key(`repeating-linear-gradient(135deg, transparent 0 2px, ${tones.waste} 2px 4px)`, "pads");
    const decode = lanes.some((lane) => lane.decodes) ? [key(tones.decodes, "decode")] : [];
    legend.replaceChildren(key(tones.prompts, "prompts"), ...decode, tile, ...cut);
    return lanes;
  }
  function show(lanes, now, { end, speed, playing }) {
    const span = Math.max(Math.min(end, speed * VIEW_S * 1000), 1), style = getComputedStyle(el), stamp = performance.now();
    const tokens = Math.max(1, ...lanes.map((lane) => lane.most[+asRows])), queue = Math.max(1, ...lanes.map((lane) => lane.mostQueue));
    const words = stamp - told > 150 || !playing; // people read no faster
    if (words) told = stamp;
    lanes.forEach((lane) => {
      drawLane(lane, now, span, { asRows, what: asRows ? "rows" : "tokens", tokens, queue }, colors, style);
      if (words) tell(lane, now);
    });
    rows.setAttribute("aria-pressed", String(asRows));
  }
  const { update, controls, close } = player({ model, el }, { name: "film", what: "traffic", speeds: [0.1, 1, 3, 10, 30, 100], longest: 25, open, show });
  controls.append(rows);
  el.append(legend);
  rows.addEventListener("click", () => { asRows = !asRows; update(); });
  const unwatch = watchLooks(el, () => requestAnimationFrame(update));
  return () => { close(); unwatch(); };
}

export default { render };
