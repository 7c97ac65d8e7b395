// The list of techniques, and under it the card of the selected one, at a place of fixed height; one that is open shows
// all it has, over what stands below. Where the page is one column, the card is there only while it is open.
// state: list, effects_of, selected, card, recipe, recipe_tip, read_only. sends: toggle, select, turn.

const CLOSES = new Set(["Escape", "r", "c", "l"]);

export default view((s, ui) => [
  h("div", { class: "eet-head", key: "head" },
    h("h2", null, "Techniques"),
    h("span", { class: "eet-recipe", title: s.recipe_tip }, s.recipe === "all" ? "all: what can run here, except serving and lossy ones" : s.recipe),
    s.effects_of && h("span", { class: "eet-effects-of", title: s.effects_of }, s.effects_of.split(",")[0]) /* of which run: its tooltip */,
    s.card && button({ class: "eet-soft eet-card-opener", key: "opener", "aria-expanded": String(!!ui.local.open),
      onclick: () => open(!ui.local.open, ui) }, `${s.card.knobs.length ? "Knobs of" : "About"} ${s.card.title}`)),
  list(s, ui),
  s.card && h("div", { class: "eet-card-place", key: "card" }, card(s, ui)),
], onBench);

function open(on, ui) {
  ui.local.open = on;
  ui.redraw();
}

function onBench(bench, ui) {
  closing(ui);
  const look = () => lookAtCard(ui.el), drawn = new MutationObserver(look), sized = new ResizeObserver(look);
  drawn.observe(ui.el, { childList: true, subtree: true, attributeFilter: ["class"] });
  sized.observe(ui.el);
  return () => { drawn.disconnect(); sized.disconnect(); };
}

// The card opens where the keyboard comes to it, since a control may stand where the closed one shows nothing; for the
// mouse a click opens it, or what is pressed would move away below it.
// The open card goes when the focus goes elsewhere, as a menu does, and when a key is pressed that starts something.
function closing(ui) {
  ui.el.addEventListener("focusout", ({ relatedTarget }) => ui.local.open && !ui.el.contains(relatedTarget) && open(false, ui));
  ui.el.addEventListener("focusin", ({ target }) => !ui.local.open && target.matches(".eet-tech-card:focus-visible, .eet-tech-card :focus-visible") && open(true, ui));
  ui.el.addEventListener("keydown", (event) => {
    if (!ui.local.open || !CLOSES.has(event.key) || event.target.closest("input")) return;
    open(false, ui);
    if (event.key !== "Escape") return;
    event.preventDefault();
    ui.el.querySelector(".eet-card-opener").focus();
  });
}

function list(s, ui) {
  const axis = effectAxis(s.list);
  const here = s.list.some((t) => t.name === s.selected) ? s.selected : s.list[0]?.name;
  return h("ul", { class: "eet-techs", key: "list", onkeydown: (event) => move(event, s, ui) },
    s.list.map((t) => row(t, t.name === here, axis, s, ui)));
}

function row(t, here, axis, s, ui) {
  const locked = s.read_only || (t.blocked && !t.on);
  const toggle = button({ class: "eet-switch-dot", role: "switch", "aria-checked": String(t.on), "aria-label": t.title,
    "data-name": t.name, tabIndex: here ? 0 : -1, enabled: !locked, title: t.blocked || `${t.title}: ${t.on ? "on" : "off"}`,
    onclick: () => ui.send("toggle", { name: t.name, on: !t.on }) });
  const title = h("button", { class: "eet-tech-title", type: "button", tabIndex: -1, title: `${t.summary}\n${t.numerics.text}: ${t.numerics.tip}`,
    "aria-current": here ? "true" : null, onclick: () => { select(t.name, ui); open(true, ui); } }, t.title);
  const numerics = h("span", { class: `eet-numerics eet-is-${t.numerics.kind}`, title: t.numerics.tip }, t.numerics.text);
  return h("li", { key: t.name, class: `eet-tech ${here ? "eet-here" : ""} ${locked && t.blocked ? "eet-blocked" : ""}` },
    toggle, title, numerics, effect(t, axis));
}

function effect(t, axis) {
  if (t.wrong) return h("span", { class: "eet-effect-words eet-is-bad", key: "words", title: t.wrong }, t.wrong.split(", ")[0]);
  const met = t.needs && ["needs", h("span", { class: "eet-needed" }, t.needs.replace(/^needs/, "")), "\u00a0✓"];
  const words = t.blocked ? t.blocked_short : t.lacks ? t.needs : met;
  if (t.blocked || !t.effect) return h("span", { class: `eet-effect-words ${t.lacks ? "eet-is-warn" : words === met && met ? "eet-met" : ""}`, key: "words", title: t.blocked || t.needs || null }, words);
  const { text, kind, share, tip, detail } = t.effect;
  const left = axis.zero + Math.min(share, 0) / axis.span, width = Math.abs(share) / axis.span;
  return h("span", { class: `eet-effect eet-is-${kind}`, key: "effect", title: tip },
    h("span", { class: "eet-effect-bar", style: { "--zero": `${100 * axis.zero}%` } },
      h("i", { style: { left: `${100 * left}%`, width: `${100 * width}%` } })),
    h("span", { class: "eet-effect-text" }, text, detail && h("span", { class: "eet-effect-detail" }, detail)));
}

// One scale for all rows: what saves goes to the left of the zero line, what costs to the right.
function effectAxis(list) {
  const shares = list.map((t) => t.effect?.share || 0);
  const low = Math.min(0, ...shares), high = Math.max(0, ...shares), span = high - low || 1;
  return { zero: -low / span, span };
}

function select(name, ui) {
  ui.send("select", { name });
  ui.el.querySelector(`[data-name="${CSS.escape(name)}"]`)?.focus();
}

function move(event, s, ui) {
  const step = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return;
  event.preventDefault();
  const row = event.target.closest("li");
  const at = [...row.parentNode.children].indexOf(row);
  const to = Math.min(Math.max(at + step, 0), s.list.length - 1);
  if (to !== at) select(s.list[to].name, ui);
}

function card(s, ui) {
  const c = s.card, t = s.list.find((each) => each.name === s.selected);
  return h("section", { class: `eet-tech-card ${ui.local.open ? "eet-open" : ""}`, key: `card-${s.selected}`, tabIndex: 0,
    onclick: () => ui.local.open || setTimeout(() => open(true, ui)), // a tick box tells its change after the click
    "aria-label": `${c.title}, explained` },
    h("div", { class: "eet-card-head" }, h("h3", null, c.title), t && t.needs && h("span", null, t.needs),
      c.lesson && !inApp() && h("a", { href: address(c.lesson.href), target: "_blank", rel: "noopener" }, c.lesson.label)),
    h("p", null, c.summary),
    c.lesson && inApp() && h("p", { key: "lesson" }, c.lesson.elsewhere),
    c.why && h("p", { class: "eet-why-not eet-is-warn", key: "why" }, c.why),
    c.knobs.map((k) => knob(k, s, ui)),
    (c.paragraphs.length > 0 || c.source) && h("details", { key: "how", ontoggle: bringUp }, h("summary", null, "How it works"),
      c.paragraphs.map((p) => h("p", null, p.map((part) => (part.code ? h("code", null, part.text) : part.text)))),
      c.source && h("pre", { class: "eet-source", key: "source" }, c.source)),
    h("span", { class: "eet-card-more", key: "more", "aria-hidden": "true" },
      c.knobs.length > 0 && h("span", { class: "eet-card-knobs" }, "knobs and "), "more ▾"));
}

// What of a closed card is out of sight, so that it promises no knobs that are in view.
function lookAtCard(el) {
  const card = el.querySelector(".eet-tech-card:not(.eet-open)"), edge = card?.getBoundingClientRect();
  if (!edge?.width) return;
  const hidden = [...card.children].filter((part) => !part.classList.contains("eet-card-more") && part.getBoundingClientRect().right > edge.right + 1);
  card.dataset.hides = !hidden.length ? "nothing" : hidden.some((part) => part.classList.contains("eet-knob-row")) ? "knobs" : "rest";
}

// What a fold opens stands below the card's edge: the fold goes to its top, once the card is open too.
function bringUp({ target }) {
  if (target.open) setTimeout(() => { target.parentNode.scrollTop = target.offsetTop - 8; });
}

// A page to go to, never a script to run.
function address(href) {
  return /^(https?:|[^:]*$)/i.test(href) ? href : null;
}

function knob(k, s, ui) {
  const id = `${ui.id}-${k.name}`, help = `${id}-help`;
  const tell = (value) => ui.send("turn", { name: s.selected, knob: k.name, value });
  const props = { id, "aria-describedby": help, "aria-invalid": k.wrong ? "true" : null, disabled: s.read_only || !k.enabled };
  return h("div", { class: "eet-knob-row", key: `knob-${k.name}` },
    h("label", { for: id }, k.label), h("span", { class: "eet-knob-field" }, control(k, tell, props), k.unit && h("span", { class: "eet-unit" }, k.unit)),
    h("small", { id: help, class: k.wrong ? "eet-is-bad" : null }, k.wrong || k.help));
}

function control(k, tell, props) {
  if (k.kind === "choice") return choice(k.options, k.value, tell, props);
  if (k.kind === "check") return tickbox(k.value, tell, props);
  if (k.kind === "number") return h("input", { ...props, ...numeric(k.value, tell), min: k.low, max: k.high, step: k.step || "any" });
  return h("input", { ...props, type: "text", ...typed(k.value, tell, null) });
}
