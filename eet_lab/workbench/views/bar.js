// The bar: pickers, actions, and beside them how far a run is, or the headline of the last result.
// state: models, model, ask_path, path, dtypes, dtype, devices, device, load_again, facts, badge, actions, busy, status,
//   share, left, headline, banner, error, read_only, large, serving, against.
// sends: pick_model, type_model, load_again, pick_dtype, pick_device, run, compare, ladder, stop, larger_type,
//   show_serving, dismiss_error, and a banner's own command.

const ACTIONS = [["run", "Run", "r"], ["compare", "Compare", "c"], ["ladder", "Ladder", "l"], ["stop", "Stop", "Escape"]];
const GONE = "The kernel was restarted. Run the cell again (Shift+Enter): kept runs come back. What is shown here stays.";
const LOST = "This page has lost its kernel: the notebook has another one, or it cannot be reached. What is shown here stays. Run the cell again (Shift+Enter); if the server has ended, start eet-lab lab again: kept runs come back.";
const LOST_APP = "This page has lost its server. What is shown here stays. Reload the page; if the server has ended, start eet-lab lab --app again and open the address that it prints: kept runs come back.";

export default view((s, ui) => {
  ui.local.state = s;
  return [
    h("div", { class: "eet-bar-row", key: "row" }, 
      h("div", null, h("div", { class: "eet-logo" }, "EET ", h("b", null, "Lab")), mode(s, ui)),
      pickers(s, ui), actions(s, ui), told(s, ui), larger(s, ui)),
    banner(s, ui),
    s.error && error(s.error, ui),
  ];
}, listen);

function pickers(s, ui) {
  const off = s.read_only || s.busy;
  const pick = (name, options, value) =>
    choice(options, value, (v) => ui.send(`pick_${name}`, { value: v }), { "aria-label": name, title: name, disabled: off });
  return h("div", { class: "eet-pickers" },
    h("div", { class: "eet-line" },
      pick("model", s.models, s.model), pick("dtype", s.dtypes, s.dtype), pick("device", s.devices, s.device),
      s.load_again && button({ class: "eet-soft", key: "again", title: `Try ${s.load_again} once more`,
        onclick: () => ui.send("load_again") }, "Load again")),
    h("div", { class: "eet-under" }, s.ask_path ? h("div", { class: "eet-pathline" }, path(s, ui), s.path && s.facts && facts(s)) : facts(s)));
}

function path(s, ui) {
  const tell = (value) => ui.send("type_model", { value });
  return h("input", { key: "path", type: "text", class: "eet-path", ...typed(s.path, tell, null), disabled: s.busy,
    "aria-label": "Folder or hub name", placeholder: "./my-gpt2 or openai-community/gpt2, then Enter", spellcheck: "false" });
}

function facts({ facts, badge }) {
  return h("span", { key: "facts", title: facts },
    badge?.text && h("span", { class: `eet-tag eet-is-${badge.kind}`, title: badge.tip || null }, badge.text), facts.replaceAll(" · ", "\u00a0· "));
}

function actions(s, ui) {
  const buttons = ACTIONS.map(([name, label, key]) => {
    const { enabled, tip } = s.actions[name];
    return button({ key: name, class: `eet-do eet-do-${name}`, title: tip, enabled, "aria-keyshortcuts": key,
      onclick: () => ui.send(name) }, label);
  });
  return h("div", { class: "eet-actions-block" },
    h("div", { class: "eet-line", role: "group", "aria-label": "Measure" }, buttons),
    h("div", { class: "eet-under", title: s.against_tip || null }, s.against && ["compared with ", h("b", null, s.against)]));
}

// The same three lines in every state, so that nothing moves when a run starts or ends.
function told(s, ui) {
  const headline = !s.busy && s.headline;
  const words = headline ? headline.parts.map((p) => p.text).join(", ") : s.busy && !ui.alive ? "This run has ended with its kernel." : s.status.text;
  const remark = s.status.kind === "plain" ? headline && headline.about : s.status.text;
  return h("div", { class: `eet-told-block ${s.busy ? "eet-busy" : ""}` },
    h("div", { key: "status", role: "status", class: headline ? "eet-unseen" : `eet-status-text eet-is-${s.status.kind}`,
      title: words }, words),
    headline && h("button", { key: "headline", type: "button", class: "eet-headline", onclick: () => jump(ui),
      title: "To the details" }, headline.parts.map((p, i) => [i > 0 && " · ", h("span", { class: `eet-is-${p.kind}` }, p.text)]),
      h("span", { class: "eet-more" }, "details ↓")),
    headline && h("div", { key: "about", class: `eet-about eet-is-${s.status.kind}`, title: remark }, remark),
    h("div", { key: "left", class: "eet-left-line", hidden: !s.busy || !ui.alive }, s.left),
    h("div", { key: "progress", class: "eet-share", role: "progressbar", "aria-label": "Progress", "aria-valuemin": "0",
      "aria-valuemax": "100", "aria-valuenow": Math.round(100 * s.share), hidden: !s.busy || !ui.alive },
    h("i", { style: { transform: `translateX(${100 * s.share - 100}%)` } })));
}

function mode(s, ui) {
  return button({ class: `eet-soft eet-mode ${s.serving ? "eet-back" : ""}`, onclick: () => ui.send("show_serving", { on: !s.serving }),
    title: s.serving ? "Back to techniques, runs and results" : "Simulate and measure how this model serves requests that arrive over time" },
    s.serving ? "← Bench" : "Serving");
}

function larger(s, ui) {
  return button({ class: "eet-soft eet-larger", "aria-pressed": String(!!s.large), "aria-label": "Larger type",
    title: "Larger type, for a projector", onclick: () => ui.send("larger_type", { on: !s.large }) }, "A", h("b", null, "A"));
}

function banner(s, ui) {
  if (!ui.alive) return h("div", { key: "gone", class: "eet-banner eet-as-bad", role: "alert" }, gone(ui));
  if (!s.banner) return null;
  const { text, kind, action } = s.banner;
  const go = () => ui.send(action.command.command, action.command);
  return h("div", { key: "banner", class: `eet-banner eet-as-${kind}` }, h("span", { title: text }, text),
    action && button({ class: "eet-soft", enabled: action.enabled, onclick: go }, action.label));
}

function gone(ui) {
  if (inApp()) return LOST_APP;
  return ui.lost ? LOST : GONE;
}

function error({ title, text, details }, ui) {
  return h("div", { key: "error", class: "eet-error-card", role: "alert" },
    button({ class: "eet-close", "aria-label": "Dismiss", title: "Dismiss (Esc)", onclick: () => ui.send("dismiss_error") }, "×"),
    h("b", null, title), h("p", null, text),
    details && h("details", { key: details }, h("summary", null, "details"), h("pre", { tabIndex: 0 }, details)));
}

function jump(ui) {
  reveal(ui.el)?.querySelector('[role="tab"][tabindex="0"]')?.focus({ preventScroll: true });
}

// Keys of the whole bench. Plain keys go no further, since JupyterLab's command mode would cut or delete the cell;
// those with Ctrl, Alt or Cmd, and Shift+Enter, stay JupyterLab's.
function listen(bench, ui) {
  const onKey = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter")) return;
    event.stopPropagation();
    if (event.defaultPrevented || event.repeat || event.target.closest("input, textarea, select, [contenteditable]")) return;
    press(event, ui.local.state, ui);
  };
  // Where the bench is all that the notebook runs, as on a page that has just been opened, the focus is on its cell:
  // there a letter would turn the cell into raw text, or cut it.
  const onPage = (event) => {
    const { target, key } = event;
    if (bench.contains(target) || (key.length > 1 && key !== "Escape") || key === " ") return;
    if (!bench.closest(".jp-Cell") || document.querySelectorAll(".jp-CodeCell").length > 1) return;
    if (target.closest("input, textarea, select, [contenteditable]")) return;
    if (target === document.body || target.closest(".jp-Notebook")) onKey(event);
  };
  // An app's page, with which its kernel ends, asks this before it is left: what runs would be lost.
  const onLeave = (event) => ui.alive && ui.local.state.busy && event.preventDefault();
  window.addEventListener("eet-leave", onLeave);
  window.addEventListener("keydown", onPage, true);
  bench.tabIndex = -1; // so that a click beside the controls leaves the focus here, and the keys with it
  bench.addEventListener("keydown", onKey);
  comeBack(bench);
  return () => {
    bench.removeEventListener("keydown", onKey);
    window.removeEventListener("keydown", onPage, true);
    window.removeEventListener("eet-leave", onLeave);
    if (!ui.alive) window.eetGoneSince = performance.now();
  };
}

// Shift+Enter, which brings the bench back after a restart, scrolls on to the next cell; the reader wants to see it.
// A page that opens, and a cell that runs for the first time, scroll nowhere.
const BACK_MS = 180_000; // what a kernel may take to start and to import torch

function comeBack(bench) {
  const back = performance.now() - window.eetGoneSince < BACK_MS;
  delete window.eetGoneSince;
  const { top } = bench.getBoundingClientRect();
  if (back && (top < 0 || top > 0.8 * window.innerHeight)) bench.scrollIntoView({ block: "start" });
}

function press(event, s, ui) {
  const found = ACTIONS.find(([, , key]) => key === (event.key.length === 1 ? event.key.toLowerCase() : event.key));
  if (!found || event.shiftKey) return;
  const [name] = found;
  if (s.actions[name].enabled) ui.send(name);
  else if (name === "stop" && s.error) ui.send("dismiss_error");
  else return;
  event.preventDefault();
}
