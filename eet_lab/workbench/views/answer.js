// The answer: four numbers, each with how much it has changed and whether that can be told from noise; then the tabs.
// state: mode, note, tiles, tabs, tab, picks, figure, tools, tables, words. sends: tab, pick, scale, export, take_timeline.
// `figure`: the tab has one, and it stands in the stage under this view. Without one the sheet here takes that room.

const EMPTY = [
  ["R", "Run", "generates with the techniques that are on, and shows it token by token."],
  ["C", "Compare", "measures these techniques against the baseline or the pinned run: same prompts, weights and seed."],
  ["L", "Ladder", "adds the techniques one by one, and shows what each one saves."],
];
const LABELS = ["Time to first token", "Time per token", "Peak memory", "Same output?"];

export default view((s, ui) => {
  const empty = s.mode === "empty";
  const closed = empty || (!s.figure && s.mode !== "running");
  return [
    h("div", { class: `eet-numbers ${s.mode === "running" ? "eet-provisional" : ""}`, key: "tiles" }, LABELS.map((label, i) => tile(s.tiles?.[i], label))),
    h("div", { class: `eet-sheet ${closed ? "eet-closed" : ""}`, key: "sheet" },
      h("div", { class: "eet-sheet-head", key: "head" }, tabs(s, ui)),
      h("div", { class: `eet-sheet-note eet-is-${s.note?.kind || "plain"}`, key: "note" }, picks(s, ui),
        h("span", { class: "eet-sheet-told", key: "told", title: s.note?.tip || s.note?.text || null }, s.note?.text || ""), action(s.note, ui), tools(s.tools, ui)),
      empty ? h("div", { class: "eet-nothing", key: "empty" }, EMPTY.map(([key, name, does]) => h("p", null, h("kbd", null, key), h("b", null, name), does)))
        : closed && h("div", { class: "eet-sheet-body", key: `body-${s.tab}`, id: `${ui.id}-panel`, role: "tabpanel", tabIndex: 0,
          "aria-label": s.tabs.find((t) => t.name === s.tab)?.title }, s.tables.map(table), words(s.words)),
      !closed && s.words.length > 0 && h("div", { class: "eet-sheet-words", key: "words" }, words(s.words))),
  ];
});

function tile(t, label) {
  const { value = "–", unit = "", before = "", change = null, tip = null } = t || {};
  return h("div", { class: `eet-number ${t ? "" : "eet-unset"}`, title: tip, key: label },
    h("div", { class: "eet-number-label" }, t?.label || label),
    h("div", { class: "eet-number-value" }, h("b", null, value), unit && ` ${unit}`, before && h("span", { key: "before" }, before)),
    h("div", { class: `eet-number-change eet-is-${change?.kind || "dim"}` }, change?.text || ""));
}

function tabs(s, ui) {
  const choose = (name) => ui.send("tab", { name });
  const onkeydown = (event) => {
    const at = s.tabs.findIndex((t) => t.name === s.tab), last = s.tabs.length - 1;
    const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at <= 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    choose(s.tabs[to].name);
    event.currentTarget.children[to].focus();
  };
  if (!s.tabs.length) return h("span", { class: "eet-tab-row", key: "no-tabs" }, s.mode === "running" ? "What is generated"
    : ["No result yet: press a button above, or", button({ onclick: () => reveal(ui.el, Infinity, ".eet-runs")?.querySelector(".eet-scroll")?.focus({ preventScroll: true }) }, "open a run below ↓")]);
  return h("div", { class: "eet-tab-row", role: "tablist", "aria-label": "Views of the result", key: "tabs", onkeydown }, s.tabs.map((t) =>
    h("button", { type: "button", role: "tab", key: t.name, "aria-selected": String(t.name === s.tab),
      tabIndex: t.name === s.tab ? 0 : -1, onclick: () => choose(t.name) }, t.title)));
}

const SCALES = { log: "A logarithmic axis", "own width": "Each step over the whole width, instead of both on one clock" };

function tools({ scale, exports }, ui) {
  const exporting = exports.length > 0 && !!ui.local.exporting;
  return h("div", { class: "eet-sheet-tools", key: "tools" },
    scale && button({ class: "eet-soft", key: scale.name, "aria-pressed": String(scale.on), title: SCALES[scale.name],
      onclick: () => ui.send("scale", { name: scale.name, on: !scale.on }) }, scale.name),
    exporting && h("span", { key: "formats", role: "group", "aria-label": "Export as" }, exports.map((e) => button({ class: "eet-soft", key: e.name,
      "aria-label": `Export: ${e.label}`, onclick: () => ui.send("export", { id: "", format: e.name }) }, e.label))),
    exports.length > 0 && button({ class: "eet-soft", key: "export", "aria-expanded": String(exporting), title: "Save this result as a file",
      onclick: () => { ui.local.exporting = !exporting; ui.redraw(); } }, exporting ? "Export as ‹" : "Export…"));
}

// Lists that choose what a tab shows, such as whose memory.
function picks(s, ui) {
  return s.picks.map(({ name, label, options, value }) => h("label", { class: "eet-pick", key: name }, `${label} `,
    choice(options, value, (picked) => ui.send("pick", { what: name, name: picked }), { "aria-label": label })));
}

function action(note, ui) {
  return note?.action && button({ class: "eet-soft", key: "action", onclick: () => ui.send(note.action.command) }, note.action.label);
}

// A cell breaks before its brackets, and between words: a number keeps its unit, an interval its ends.
const WHOLE = /^(?=.*\d).{1,24}$/;
const pieces = (cell) => cell.split(/ (?=\()/).map((text, i) => [i > 0 && " ", h("span", { class: WHOLE.test(text) ? "eet-whole" : "" }, text)]);

function table(t, at) {
  return [
    h("table", { class: "eet-table", key: `table-${at}` },
      h("thead", null, h("tr", null, t.head.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", null, t.rows.map((row) => h("tr", null, row.map((cell, j) =>
        h(j === 0 ? "th" : "td", j === 0 && { scope: "row" }, j === 0 ? cell : pieces(cell))))))),
    t.notes?.map((note, i) => h("p", { class: "eet-note-line", key: `note-${at}-${i}` }, note)),
  ];
}

function words(list) {
  return list.map(({ heading, text, kind }, i) => h("div", { class: "eet-words", key: `words-${i}` },
    heading && h("h3", null, heading), h("p", { class: `eet-is-${kind || "plain"}` },
      marked(text, (tag, name, said) => h(tag, { class: name }, said)))));
}
