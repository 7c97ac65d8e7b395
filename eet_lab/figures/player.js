// Lanes on one clock: play, pause, scrub, one speed for all. It stands in front of the module of a race or a film, as
// words.js does. All text goes in as text nodes.

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function clock(ms) {
  return ms < 10_000 ? Math.round(ms).toLocaleString("en") + " ms" : (ms / 1000).toFixed(1) + " s";
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
    slider.setAttribute("aria-valuetext", clock(now));
    at.textContent = `${clock(now)} of ${clock(end)}`;
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
