// The runs that were kept. Names and notes are edited in place, and nothing is deleted without a second click.
// state: rows, said, can_compare, can_measure, why_not, folder, device, warning, more, upload_mib. sends: tick,
//   pin, rename, annotate, delete, open_run, replay, export, compare_ticked, measure_ticked, upload, show_older.
// hears: file, one that is exported, packed with gzip, to be saved by the browser.

const LONGEST = { name: 80, note: 400 }; // as history.py keeps them
const FORMATS = [["json", "JSON"], ["csv", "CSV"], ["html", "page"]];
const HEAD = ["", "Name", "Recipe", "First token", "Per token", "MiB", "Same output?", ""];

const RELOADED = "If the page does not come back after a reload, run its cell again: the runs come back.";

const list = view((s, ui) => [
  h("div", { class: "eet-head", key: "head" },
    h("h2", null, "Runs"),
    h("span", { class: `eet-said ${!s.said && s.warning ? "eet-is-warn" : ""}`, role: "status", title: `${said(s, ui)}. ${inApp() ? "" : RELOADED}` }, said(s, ui)),
    h("span", { class: "eet-line" },
      button({ class: "eet-soft", enabled: s.can_compare, title: s.can_compare ? "The two that are ticked, side by side" : s.why_not,
        onclick: () => ui.send("compare_ticked") }, "Compare ticked"),
      button({ class: "eet-soft", enabled: s.can_measure, title: s.can_measure ? "Measure both recipes again, in turn" : s.why_not,
        onclick: () => ui.send("measure_ticked") }, "Measure again"),
      upload(s, ui))),
  s.rows.length ? table(s, ui) : h("p", { class: "eet-none", key: "none" }, "Each Run, Compare and Ladder is kept here as a row, and as a file."),
  s.more > 0 && h("div", { class: "eet-line", key: "older" },
    button({ class: "eet-soft", onclick: () => ui.send("show_older") }, `Show older (${s.more})`)),
]);

let saved = 0; // of files, the number of the last: a page with two views of the list saves each once

function render(context) {
  const end = list.render(context);
  const hear = (message, buffers) => {
    if (message.kind !== "file" || message.number <= saved) return;
    saved = message.number;
    save(message.name, buffers[0]);
  };
  context.model.on("msg:custom", hear);
  return () => { context.model.off("msg:custom", hear); end(); };
}

async function save(name, packed) {
  const file = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export default { render };

// What this page has to say of a file stands until the kernel says something else.
function said(s, ui) {
  if (ui.local.heard !== s.said) Object.assign(ui.local, { heard: s.said, said: "" });
  return ui.local.said || s.said || s.warning || `kept in ${s.folder}${s.device && `, measured on ${s.device}`}`;
}

function table(s, ui) {
  return h("div", { class: "eet-scroll", key: "table", tabIndex: 0, role: "region", "aria-label": "Kept runs" },
    h("table", { class: "eet-table eet-runs-table" },
      h("thead", null, h("tr", null, HEAD.map((name, i) => (name ? h("th", { scope: "col", key: name }, name)
        : h("td", { key: `blank-${i}` }, h("span", { class: "eet-unseen" }, i ? "Actions" : "Choose")))))),
      h("tbody", null, s.rows.map((run) => [row(run, ui), below(run, ui)]))));
}

// A file that cannot be read is a line of its own: there is nothing to open, tick or name.
function unread(run, ui) {
  return h("tr", { key: run.id }, h("td", { class: "eet-choose" }),
    h("th", { scope: "row", colspan: HEAD.length - 2, title: `${run.name}: ${run.problem}` },
      h("span", { class: "eet-problem" }, h("b", null, run.name), run.problem)),
    h("td", { class: "eet-row-tools" }, tools(run, ui)));
}

function row(run, ui) {
  const { id } = run;
  if (run.problem) return unread(run, ui);
  return h("tr", { key: id, class: `${run.shown ? "eet-shown" : ""}`, "aria-current": run.shown ? "true" : null },
    h("td", { class: "eet-choose" },
      tickbox(run.ticked, (on) => ui.send("tick", { id, on }), { "aria-label": `Tick ${run.label}`, title: "Tick two to compare them" }),
      button({ class: "eet-pin", "aria-pressed": String(run.pinned), "aria-label": `Compare with ${run.label}`,
        title: run.pinned ? "New runs are compared with this one" : "Compare new runs with this one",
        onclick: () => ui.send("pin", { id, on: !run.pinned }) })),
    h("th", { scope: "row" }, name(run, ui)),
    h("td", { class: "eet-text-cell" }, h("span", { class: "eet-run-recipe" }, run.recipe)),
    h("td", null, run.ttft), h("td", null, run.tpot), h("td", null, run.mib),
    h("td", { class: `eet-is-${run.same_kind || "plain"}` }, run.same),
    h("td", { class: "eet-row-tools" }, tools(run, ui)));
}

function name(run, ui) {
  const editing = ui.local.editing;
  if (editing?.id === run.id) return editor(run, editing.what, ui);
  const edit = (what) => () => { ui.local.editing = { id: run.id, what }; ui.redraw(); ui.el.querySelector(".eet-editor")?.select(); };
  return h("span", { class: "eet-name-cell", key: "name" },
    button({ class: "eet-name", key: "name", enabled: run.writable, title: `${run.origin} · click to rename`, "aria-label": `Rename ${run.label}`,
      onclick: edit("name") }, run.name),
    h("span", { class: "eet-name-more", key: "more" },
      run.short_when && h("span", { class: "eet-kind", key: "when", title: run.when }, run.short_when),
      run.about && h("span", { class: "eet-kind eet-subject", key: "about", title: run.about }, run.about)),
    (run.note || run.writable) && button({ class: `eet-note-text ${run.note ? "" : "eet-add-note"}`, key: "note", enabled: run.writable,
      title: run.note || "Add a note", "aria-label": `Note of ${run.label}: ${run.note || "none"}`, onclick: edit("note") }, run.note || "+ note"));
}

function editor(run, what, ui) {
  const end = (target, keep) => {
    if (ui.local.editing?.id !== run.id) return;
    ui.local.editing = null;
    const text = target.value.trim();
    if (keep && text !== run[what]) ui.send(what === "name" ? "rename" : "annotate", { id: run.id, text });
    ui.redraw();
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    end(event.target, event.key === "Enter");
    ui.el.querySelector(`[data-run="${CSS.escape(run.id)}"]`)?.focus();
  };
  return h("input", { key: `edit-${what}`, class: "eet-editor", type: "text", "aria-label": what === "name" ? "New name" : "Note",
    maxlength: LONGEST[what], value: run[what], oninput: ({ target }) => { target.eetMineUntil = Infinity; }, onkeydown, onblur: ({ target }) => end(target, true) });
}

// What a row has opened: "more", or the question whether to "delete"; it stands in a row of its own below, so that no column moves.
function opener(run, ui) {
  const { id } = run, about = ui.local.open?.id === id ? ui.local.open.what : null;
  const at = (label) => `[aria-label="${CSS.escape(label)}"]`, more = at(`More for ${run.label}`), del = at(`Delete ${run.label}`);
  const set = (what, focus) => {
    ui.local.open = what && { id, what };
    ui.redraw();
    if (what) ui.el.querySelector(".eet-run-more")?.scrollIntoView({ block: "nearest" });
    if (focus) ui.el.querySelector(focus)?.focus();
  };
  return { about, set, more, del };
}

function act(label, onclick, more) {
  return button({ class: "eet-soft", key: label, ...more, onclick }, label);
}

function tools(run, ui) {
  const { about, set } = opener(run, ui);
  return h("span", null, run.problem ? [
    act("Export", () => ui.send("export", { id: run.id, format: "json" }), { "aria-label": `Export ${run.label}`, title: "The file as it is" }),
    run.writable && act("Delete", () => set("delete", ".eet-ask-no"), { "aria-label": `Delete ${run.label}` })]
  : [
    act("Open", () => ui.send("open_run", { id: run.id }), { "aria-label": `Open ${run.label}`, "data-run": run.id }),
    run.kind !== "run" && act("Replay", () => ui.send("replay", { id: run.id }), { "aria-label": `Replay ${run.label}` }),
    act("…", () => set(about ? null : "more"), { "aria-label": `More for ${run.label}`, "aria-expanded": String(!!about), title: "Export, delete" })]);
}

function below(run, ui) {
  const { about, set, more, del } = opener(run, ui), back = run.problem ? del : more;
  const onkeydown = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    set(null, back);
  };
  const exports = !run.problem && h("span", { key: "export", role: "group", "aria-label": "Export as" }, "Export as", FORMATS.map(([format, label]) =>
    act(label, () => ui.send("export", { id: run.id, format }), { "aria-label": `Export ${run.label} as ${label}` })));
  const asking = () => h("span", { key: "ask" }, h("span", { class: "eet-ask" }, "Delete?"),
    act("Yes", () => { set(null); ui.send("delete", { id: run.id }); }, { "aria-label": `Yes, delete ${run.label}` }),
    act("No", () => set(null, back), { class: "eet-soft eet-ask-no" }));
  const removal = run.writable && (about === "delete" ? asking()
    : act("Delete", () => set("delete", ".eet-ask-no"), { "aria-label": `Delete ${run.label}` }));
  return about && h("tr", { key: `${run.id} below`, class: `eet-run-more ${run.shown ? "eet-shown" : ""}`, onkeydown },
    h("td", { colspan: HEAD.length }, h("div", null, exports, removal)));
}

function upload(s, ui) {
  const say = (text) => { ui.local.said = text; ui.redraw(); };
  const read = ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    if (file.size > s.upload_mib * 2 ** 20)
      return say(`${file.name} has more than ${s.upload_mib} MiB, the most that a page can send. Copy it into ${s.folder}.`);
    const reader = new FileReader();
    reader.onload = () => { say(""); ui.send("upload", { name: file.name, content: reader.result.split(",")[1] || "" }); };
    reader.onerror = () => say(`${file.name} cannot be read.`);
    reader.readAsDataURL(file);
    target.value = ""; // so that the same file can be chosen again
  };
  return h("label", { class: "eet-soft eet-upload-label" }, "Load a file…",
    h("input", { type: "file", accept: ".json", class: "eet-unseen", "aria-label": "Load a file of results", onchange: read }));
}
