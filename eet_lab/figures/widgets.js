// Scripts of widgets, a section for each; script.py gives each widget what it needs, and says which function renders it.

/* Words: */
// Numbers as eet_lab/words.py writes them.

function plain(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  const shown = Number(value.toPrecision(digits));
  const [digit, power] = shown.toExponential().split("e");
  const whole = shown ? Number(power) + 1 : 1;
  if (whole < -3) return `${digit} × 10⁻${Math.abs(power).toString().replace(/\d/g, (each) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[each])}`;
  return shown.toLocaleString("en", { maximumFractionDigits: Math.min(Math.max(digits - whole, 0), 20) }).replace(/^-0$/, "0");
}

function brief(value, digits = 3) {
  if (Number.isFinite(value) && Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString("en");
  const text = plain(value, digits), missing = digits - text.replace(/[.,]/g, "").replace(/^[-0]+/, "").length;
  if (missing <= 0 || /[×–]/.test(text) || Math.abs(value - Number(value.toPrecision(digits))) <= 1e-9 * Math.abs(value)) return text;
  return text + (text.includes(".") ? "" : ".") + "0".repeat(missing);
}

/* Shared: */
// A widget that shares a script. It is short, since it stands in all of them.

let drawing;

function unzip(model) {
  return new Response(new Blob([model.get("source")]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function load(model) {
  const base = await model.widget_manager.get_model(model.get("base").replace("IPY_MODEL_", ""));
  const parts = await Promise.all([base, model].map(unzip));
  const url = URL.createObjectURL(new Blob(parts, { type: "text/javascript" }));
  return import(url).finally(() => URL.revokeObjectURL(url));
}

const renderShared = async (context) => (await (drawing ||= load(context.model))).default.render(context);

/* FigureKeeper: */
// Stands unseen in a FigureBox and fires the window's resize event when the box gets another size, or is shown again.

const SETTLE_MS = 60;

function renderFigureKeeper({ el }) {
  el.style.display = "none";
  let size = "", timer = 0, frame = 0;
  const watch = new ResizeObserver((entries) => {
    const { width, height } = entries[entries.length - 1].contentRect, now = [width, height].map(Math.round).join();
    if (now === size) return;
    size = now;
    clearTimeout(timer);
    if (width) timer = setTimeout(() => window.dispatchEvent(new Event("resize")), SETTLE_MS);
  });
  function find() { // a view is rendered before it stands in the page
    const box = el.closest(".eet-figure-box");
    if (box) watch.observe(box);
    else frame = requestAnimationFrame(find);
  }
  find();
  return () => { watch.disconnect(); clearTimeout(timer); cancelAnimationFrame(frame); };
}

/* Canvas: */
// What is packed as float32, as it comes from the kernel.
function numbers(view) {
  return new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// The pixels that each side of a canvas should have: as many as the screen shows.
const pixels = (canvas) => [["width", canvas.clientWidth], ["height", canvas.clientHeight]]
  .map(([side, length]) => [side, Math.round(length * (window.devicePixelRatio || 1))]);

// Clears a canvas that has as many pixels as the screen shows, and gives its width and height in the units of what is drawn:
// CSS pixels at the page's own type size, so that numbers on an axis and all around them grow with the words (--eet-scale).
// It gives neither while the canvas is hidden.
function fitCanvas(canvas, pen, style) {
  const ratio = window.devicePixelRatio || 1, unit = +style.getPropertyValue("--eet-scale") || 1;
  const width = canvas.clientWidth / unit, height = canvas.clientHeight / unit;
  if (!width || !height) return {};
  for (const [side, count] of pixels(canvas)) if (canvas[side] !== count) canvas[side] = count;
  pen.setTransform(ratio * unit, 0, 0, ratio * unit, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { width, height };
}

// Calls `redraw` when what is drawn on a canvas no longer suits the page: `sized`, a canvas or what holds some, has another
// size, or JupyterLab, which names its theme in attributes of the body, another theme. It looks after the pixels besides: not
// every browser tells of a screen of another density, and none of a size that lasted for one frame, between the sheets of two
// themes, if something was drawn just then. Returns what ends it.
function watchLooks(sized, redraw) {
  const sizes = new ResizeObserver(redraw), themes = new MutationObserver(redraw);
  const canvases = () => (sized.matches("canvas") ? [sized] : [...sized.querySelectorAll("canvas")]);
  const misfit = (canvas) => canvas.clientWidth && canvas.clientHeight && pixels(canvas).some(([side, count]) => canvas[side] !== count);
  const looking = setInterval(() => { if (canvases().some(misfit)) redraw(); }, 500);
  sizes.observe(sized);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  return () => { sizes.disconnect(); themes.disconnect(); clearInterval(looking); };
}

/* Make: */
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/* Counted: */
// As eet_lab/words.py counts them: `1 token`, `1,024 tokens`.
const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/* Ends: */
// A text in parts: `mark` makes what stands on the page for the token that ends one, where what follows is another.
const marked = (text, mark) => text.split(/<\|(?:endoftext|end_of_text|eot_id|im_end)\|>/).flatMap((part, i) => (i
  ? [mark("small", "eet-dim", " [end of text] "), part] : [part]));

/* TokenStream: */
// Streamed text. Everything goes in as text nodes.

function renderTokenStream({ model, el }) {
  el.classList.add("eet-stream");
  let settled = false, panes = [];

  function begin({ prompts = [], instead, by }) {
    el.replaceChildren();
    panes = prompts.map((prompt, row) => {
      const pane = make("div", "eet-stream-pane"), head = make("div", "eet-stream-head"), body = make("div", "eet-stream-body");
      const said = make("span", "eet-stream-said"), count = make("b");
      head.append(make("span", "", "prompt " + (row + 1) + (by ? " · " + by : "")), count);
      body.append(make("span", "eet-stream-asked", prompt), said);
      pane.append(head, body);
      el.append(pane);
      return { said, count, body };
    });
    if (!prompts.length) el.textContent = instead || "The text of each prompt streams here while it runs.";
    el.classList.toggle("eet-stream-empty", !prompts.length);
  }
  function append(row, text, count) {
    const pane = panes[row];
    if (!pane) return;
    pane.said.append(...marked(text, make));
    pane.count.textContent = counted(count, "token");
    // To the end in whole lines, so that none is cut under the head: an empty one below the text makes up for the rest.
    const { body } = pane, below = body.scrollHeight - body.clientHeight;
    body.scrollTop = below - (below % parseFloat(getComputedStyle(body).lineHeight));
  }
  function fromSnapshot() {
    const all = JSON.parse(model.get("snapshot") || "{}");
    begin(all);
    (all.texts || []).forEach((text, row) => append(row, text, all.counts[row]));
  }
  function onMessage(message) {
    if (message.kind === "begin") begin(message);
    if (message.kind === "append") for (const [row, text, count] of message.news) append(row, text, count);
  }
  // Text that was sent before this view listened is in the first snapshot that it hears of: messages come in order.
  function onSnapshot() { if (!settled) { settled = true; fromSnapshot(); } }
  model.on("msg:custom", onMessage);
  model.on("change:snapshot", onSnapshot);
  fromSnapshot();
  return () => { model.off("msg:custom", onMessage); model.off("change:snapshot", onSnapshot); };
}

/* Player: */
// Lanes on one clock: play, pause, scrub, one speed for all. A race or a film stands behind it. All text goes
// in as text nodes.

// `most`: the longest time that it stands beside, which chooses the unit of both.
function clock(ms, most = ms) {
  return most < 10_000 ? Math.round(ms).toLocaleString("en") + " ms" : (ms / 1000).toFixed(1) + " s";
}

// How many of a sorted list's items, from its beginning, are at most so much.
function countUpTo(items, most) {
  let low = 0, high = items.length;
  while (low < high) { const middle = (low + high) >> 1; if (items[middle] <= most) low = middle + 1; else high = middle; }
  return low;
}

// Draws what the model holds under `name`: {title, lanes, begin}. `open` makes lanes of it, each with a `box` for the page and
// its `end` in ms; `show` brings them to a moment. Runs longer than `longest` seconds start at a higher one of `speeds`.
// Gives `update`, which shows the present moment, the row of controls, and what to do when the view goes.
function player({ model, el }, { name, what, speeds, longest, open, show }) {
  let lanes = [], now = 0, end = 0, speed = 1, playing = false, last = 0, frame = 0;
  const title = make("div", "eet-player-title"), field = make("div", "eet-player-lanes"), controls = make("div", "eet-player-controls");
  const play = make("button", "eet-player-play"), again = make("button", "", "From the start"), at = make("output", "eet-player-at");
  const slider = make("input"), choices = make("div", "eet-player-speeds");
  el.classList.add("eet-player", "eet-" + name);
  play.type = again.type = "button";
  slider.type = "range"; slider.min = 0; slider.max = 1000; slider.setAttribute("aria-label", `Time in the ${what}`);
  choices.setAttribute("role", "group"); choices.setAttribute("aria-label", "Speed of all lanes");
  const chosen = speeds.map((value) => {
    const button = make("button", "", value + " ×");
    button.type = "button";
    button.addEventListener("click", () => { speed = value; update(); });
    choices.append(button);
    return [value, button];
  });
  controls.append(play, again, slider, at, choices);
  el.append(title, controls, field);

  function update() {
    show(lanes, now, { end, speed, playing });
    slider.value = end ? Math.round((1000 * now) / end) : 0;
    slider.setAttribute("aria-valuetext", clock(now, end));
    at.textContent = `${clock(now, end)} of ${clock(end)}`;
    play.textContent = playing ? "Pause" : now >= end ? "Play again" : "Play";
    for (const [value, button] of chosen) button.setAttribute("aria-pressed", String(value === speed));
    el.dataset.now = now; el.dataset.playing = playing;
  }
  function tick(stamp) {
    frame = 0;
    if (!playing) return;
    now = Math.min(end, now + Math.max(0, stamp - last) * speed);
    last = stamp;
    playing = now < end;
    update();
    if (playing) frame = requestAnimationFrame(tick);
  }
  function start() {
    if (now >= end) now = 0;
    playing = true; last = performance.now();
    frame ||= requestAnimationFrame(tick);
    update();
  }
  function load() {
    const data = model.get(name);
    playing = false; now = 0;
    lanes = open(data);
    field.replaceChildren(...lanes.map((lane) => lane.box));
    title.textContent = title.title = data.title || "";
    end = Math.max(0, ...lanes.map((lane) => lane.end));
    speed = speeds.find((value) => value >= 1 && end / 1000 / value <= longest) || speeds[speeds.length - 1];
    update();
    if (lanes.length && data.begin) start();
  }
  play.addEventListener("click", () => { if (playing) { playing = false; update(); } else start(); });
  again.addEventListener("click", () => { now = 0; start(); });
  slider.addEventListener("input", () => { now = (end * slider.value) / 1000; last = performance.now(); update(); });
  model.on("change:" + name, load);
  load();
  return { update, controls, close: () => { playing = false; cancelAnimationFrame(frame); model.off("change:" + name, load); } };
}

/* Race: */
// A race of recorded runs: every lane is played on one clock.

const FEW = 4; // prompts that have five lines each; more have three

function buildLane(lane, prompts) {
  const box = make("section", "eet-lane");
  box.setAttribute("aria-label", lane.name);
  const head = make("div", "eet-lane-head"), time = make("b", "eet-lane-time"), count = make("span", "eet-lane-count");
  const track = make("div", "eet-lane-track"), bar = make("i");
  bar.style.background = lane.color;
  track.append(bar);
  head.append(make("span", "eet-lane-name", lane.name), time, count);
  const list = make("div", prompts.length > FEW ? "eet-lane-texts eet-lane-many" : "eet-lane-texts");
  const rows = prompts.map((prompt) => {
    const row = make("div", "eet-lane-text"), said = make("span", "eet-lane-said");
    row.append(make("span", "eet-lane-asked", prompt), said);
    list.append(row);
    return { row, said };
  });
  const toEnd = ({ row }) => { row.scrollTop = row.scrollHeight; };
  new ResizeObserver(() => rows.forEach(toEnd)).observe(list); // what was written unseen, or was hidden, is at its beginning
  box.append(head, track, list);
  const end = lane.ends_ms[lane.ends_ms.length - 1] || 0, total = lane.tokens[lane.tokens.length - 1] || 0;
  const steps = lane.pieces.map(([step]) => step);
  let shown = 0; // pieces that are on the page

  function show(ms) {
    const done = countUpTo(lane.ends_ms, ms), wanted = countUpTo(steps, done - 1);
    if (wanted < shown) { rows.forEach((r) => r.said.replaceChildren()); shown = 0; }
    for (; shown < wanted; shown++) {
      const [, row, text] = lane.pieces[shown];
      if (rows[row]) { rows[row].said.append(...marked(text, make)); toEnd(rows[row]); }
    }
    const tokens = done ? lane.tokens[done - 1] : 0, over = ms >= end;
    time.textContent = clock(Math.min(ms, end), end) + (over ? " ✓" : "");
    count.textContent = `${tokens.toLocaleString("en")} of ${counted(total, "token")}`;
    bar.style.width = (100 * Math.min(ms / Math.max(end, 1e-9), 1)).toFixed(2) + "%";
    box.classList.toggle("eet-lane-over", over);
  }
  return { box, end, show };
}

function renderRace(view) {
  return player(view, {
    name: "race", what: "race", speeds: [0.1, 1, 10, 30], longest: 20,
    open: (race) => (race.lanes || []).map((lane) => buildLane(lane, race.prompts)),
    show: (lanes, now) => lanes.forEach((lane) => lane.show(now)),
  }).close;
}
