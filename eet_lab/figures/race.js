// A race of recorded runs: every lane is played on one clock. All text goes in as text nodes.

const SPEEDS = [0.1, 1, 10, 30];
const FEW = 4; // prompts that have five lines each; more have three
const LONGEST_S = 20; // a race that takes longer starts at a higher speed

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function clock(ms) {
  return ms < 10_000 ? Math.round(ms).toLocaleString("en") + " ms" : (ms / 1000).toFixed(1) + " s";
}

// How many of a sorted list's items, from its beginning, are so.
function countWhile(items, isSo) {
  let low = 0, high = items.length;
  while (low < high) { const middle = (low + high) >> 1; if (isSo(items[middle])) low = middle + 1; else high = middle; }
  return low;
}

function buildLane(lane, prompts) {
  const box = make("section", "eet-lane");
  box.setAttribute("aria-label", lane.name);
  const head = make("div", "eet-lane-head"), time = make("b", "eet-lane-time"), count = make("span", "eet-lane-count");
  const track = make("div", "eet-lane-track"), done = make("i");
  done.style.background = lane.color;
  track.append(done);
  head.append(make("span", "eet-lane-name", lane.name), time, count);
  const list = make("div", prompts.length > FEW ? "eet-lane-texts eet-lane-many" : "eet-lane-texts");
  const rows = prompts.map((prompt) => {
    const row = make("div", "eet-lane-text"), said = make("span", "eet-lane-said");
    row.append(make("span", "eet-lane-asked", prompt), said);
    list.append(row);
    return { row, said };
  });
  box.append(head, track, list);
  const end = lane.ends_ms[lane.ends_ms.length - 1] || 0, total = lane.tokens[lane.tokens.length - 1] || 0;
  let shown = 0; // pieces that are on the page

  function show(ms) {
    const steps = countWhile(lane.ends_ms, (end) => end <= ms);
    const wanted = countWhile(lane.pieces, ([step]) => step < steps);
    if (wanted < shown) { rows.forEach((r) => r.said.replaceChildren()); shown = 0; }
    for (; shown < wanted; shown++) {
      const [, row, text] = lane.pieces[shown];
      if (rows[row]) { rows[row].said.append(text); rows[row].row.scrollTop = rows[row].row.scrollHeight; }
    }
    const tokens = steps ? lane.tokens[steps - 1] : 0, over = ms >= end;
    time.textContent = clock(Math.min(ms, end)) + (over ? " ✓" : "");
    count.textContent = `${tokens.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`;
    done.style.width = (100 * Math.min(ms / Math.max(end, 1e-9), 1)).toFixed(2) + "%";
    box.classList.toggle("eet-lane-over", over);
  }
  return { box, end, show };
}

function render({ model, el }) {
  el.classList.add("eet-race");
  let lanes = [], now = 0, end = 0, speed = 1, playing = false, last = 0, frame = 0;

  const title = make("div", "eet-race-title"), field = make("div", "eet-race-lanes"), controls = make("div", "eet-race-controls");
  const play = make("button", "eet-race-play"), again = make("button", "", "From the start"), at = make("output", "eet-race-at");
  const slider = make("input"), speeds = make("div", "eet-race-speeds");
  play.type = again.type = "button";
  slider.type = "range"; slider.min = 0; slider.max = 1000; slider.setAttribute("aria-label", "Time in the race");
  speeds.setAttribute("role", "group"); speeds.setAttribute("aria-label", "Speed of all lanes");
  const chosen = SPEEDS.map((value) => {
    const button = make("button", "", value + " ×");
    button.type = "button";
    button.addEventListener("click", () => { speed = value; update(); });
    speeds.append(button);
    return [value, button];
  });
  controls.append(play, again, slider, at, speeds);
  el.append(title, controls, field);

  function update() {
    lanes.forEach((lane) => lane.show(now));
    slider.value = end ? Math.round((1000 * now) / end) : 0;
    slider.setAttribute("aria-valuetext", clock(now));
    at.textContent = `${clock(now)} of ${clock(end)}`;
    play.textContent = playing ? "Pause" : now >= end ? "Race again" : "Play";
    for (const [value, button] of chosen) button.setAttribute("aria-pressed", String(value === speed));
    el.dataset.now = now; el.dataset.playing = playing;
  }
  function tick(stamp) {
    frame = 0;
    if (!playing) return;
    now = Math.min(end, now + (stamp - last) * speed);
    last = stamp;
    if (now >= end) playing = false;
    update();
    if (playing) frame = requestAnimationFrame(tick);
  }
  function start() {
    if (now >= end) now = 0;
    playing = true; last = performance.now();
    if (!frame) frame = requestAnimationFrame(tick);
    update();
  }
  function open() {
    const race = model.get("race");
    playing = false; now = 0;
    lanes = (race.lanes || []).map((lane) => buildLane(lane, race.prompts));
    field.replaceChildren(...lanes.map((lane) => lane.box));
    title.textContent = title.title = race.title || "";
    end = Math.max(0, ...lanes.map((lane) => lane.end));
    speed = SPEEDS.find((value) => value >= 1 && end / 1000 / value <= LONGEST_S) || SPEEDS[SPEEDS.length - 1];
    update();
    if (lanes.length && race.begin) start();
  }
  play.addEventListener("click", () => { if (playing) { playing = false; update(); } else start(); });
  again.addEventListener("click", () => { now = 0; start(); });
  slider.addEventListener("input", () => { now = (end * slider.value) / 1000; last = performance.now(); update(); });
  model.on("change:race", open);
  open();
  return () => { playing = false; cancelAnimationFrame(frame); model.off("change:race", open); };
}

export default { render };
