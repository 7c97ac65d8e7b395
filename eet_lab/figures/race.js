// A race of recorded runs: every lane is played on one clock. player.js stands in front of this module.

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
  box.append(head, track, list);
  const end = lane.ends_ms[lane.ends_ms.length - 1] || 0, total = lane.tokens[lane.tokens.length - 1] || 0;
  const steps = lane.pieces.map(([step]) => step);
  let shown = 0; // pieces that are on the page

  function show(ms) {
    const done = countUpTo(lane.ends_ms, ms), wanted = countUpTo(steps, done - 1);
    if (wanted < shown) { rows.forEach((r) => r.said.replaceChildren()); shown = 0; }
    for (; shown < wanted; shown++) {
      const [, row, text] = lane.pieces[shown];
      if (rows[row]) { rows[row].said.append(text); rows[row].row.scrollTop = rows[row].row.scrollHeight; }
    }
    const tokens = done ? lane.tokens[done - 1] : 0, over = ms >= end;
    time.textContent = clock(Math.min(ms, end)) + (over ? " ✓" : "");
    count.textContent = `${tokens.toLocaleString("en")} of ${total.toLocaleString("en")} tokens`;
    bar.style.width = (100 * Math.min(ms / Math.max(end, 1e-9), 1)).toFixed(2) + "%";
    box.classList.toggle("eet-lane-over", over);
  }
  return { box, end, show };
}

function render(view) {
  return player(view, {
    name: "race", what: "race", speeds: [0.1, 1, 10, 30], longest: 20,
    open: (race) => (race.lanes || []).map((lane) => buildLane(lane, race.prompts)),
    show: (lanes, now) => lanes.forEach((lane) => lane.show(now)),
  }).close;
}

export default { render };
