// A small virtual DOM. `h` describes an element, `patch` makes a node's children look as described and changes as little
// as it can, so that focus, caret, scroll and open folds stay. Strings become text nodes: nothing is read as HTML.

// Voila marks its pages: an app shows no cell, so nothing there can be run again or changed by hand.
const inApp = () => !!document.body.dataset.voila;
const PROPERTIES = new Set(["disabled", "readOnly", "hidden", "tabIndex"]);
const MINE_MS = 1000; // for so long a field keeps what was typed after it was left, until the kernel has answered

function h(tag, props, ...children) {
  return { tag, props: props || {}, children: children.flat(Infinity).filter((c) => c != null && c !== false) };
}

function patch(parent, wanted) {
  const free = [...parent.childNodes];
  const nodes = wanted.map((want) => take(free, want) || create(want));
  for (const node of free) node.remove(); // first, so that what stays need not move: a node that moves loses its focus
  let place = parent.firstChild;
  wanted.forEach((want, i) => {
    if (nodes[i] === place) place = place.nextSibling;
    else parent.insertBefore(nodes[i], place);
    update(nodes[i], want);
  });
}

function take(free, want) {
  const fits = typeof want === "object"
    ? (node) => node.eetProps && node.eetTag === want.tag && node.eetProps.key === want.props.key
    : (node) => node.nodeType === Node.TEXT_NODE;
  const at = free.findIndex(fits);
  return at < 0 ? null : free.splice(at, 1)[0];
}

function create(want) {
  if (typeof want !== "object") return document.createTextNode("");
  return Object.assign(document.createElement(want.tag), { eetTag: want.tag, eetProps: { key: want.props.key } });
}

function update(node, want) {
  if (typeof want !== "object") {
    if (node.data !== String(want)) node.data = String(want);
    return;
  }
  const before = node.eetProps, after = want.props;
  node.eetProps = after;
  for (const name of new Set([...Object.keys(before), ...Object.keys(after)]))
    if (before[name] !== after[name]) setProp(node, name, after[name]);
  if (want.tag !== "textarea") patch(node, want.children);
  showState(node); // last: a select takes a value only once it has the option
}

function setProp(node, name, value) {
  if (name === "key" || name === "value" || name === "checked") return;
  if (name === "style") for (const [key, part] of Object.entries(value || {})) node.style.setProperty(key, part);
  else if (name.startsWith("on")) node[name] = value || null;
  else if (PROPERTIES.has(name)) node[name] = value ?? false;
  else if (value == null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

// A field shows the state's value, except while somebody types in it.
function showState(node) {
  const { value, checked } = node.eetProps;
  if (performance.now() < (node.eetMineUntil || 0)) return;
  if (checked !== undefined && node.checked !== checked) node.checked = checked;
  if (value !== undefined && node.value !== String(value ?? "")) node.value = node.eetTold = value ?? "";
}

function leave(node) {
  node.eetMineUntil = performance.now() + MINE_MS;
  setTimeout(() => node.isConnected && showState(node), MINE_MS + 50); // what was refused goes back
}

// Props of a field for text: `tell` hears of it `wait` ms after the last key, and at once on Enter or when it is left.
function typed(value, tell, wait = 150) {
  const flush = (node) => {
    clearTimeout(node.eetTimer);
    if (String(node.eetTold) === node.value) return;
    node.eetTold = node.value;
    tell(node.value);
  };
  return {
    value,
    onfocus: ({ target }) => { target.eetTold = target.value; },
    oninput: ({ target }) => {
      target.eetMineUntil = Infinity;
      clearTimeout(target.eetTimer);
      if (wait !== null) target.eetTimer = setTimeout(() => flush(target), wait);
    },
    onkeydown: (event) => { if (event.key === "Enter" && event.target.tagName === "INPUT") flush(event.target); },
    onblur: ({ target }) => { flush(target); if (target.eetMineUntil === Infinity) leave(target); },
  };
}

// A field for a number tells when it is left, on Enter and on its arrows: half a number is nobody's wish. A whole one
// that a float would round is told as its digits.
function numeric(value, tell) {
  const rounds = (text) => /^-?\d+$/.test(text) && !Number.isSafeInteger(Number(text));
  const told = (text) => tell(text.trim() === "" || !isFinite(text) || rounds(text) ? text : Number(text));
  return { ...typed(value, told, null), type: "number", onchange: ({ target }) => target.onblur({ target }) };
}

function choice(options, value, tell, props) {
  const items = options.map((o) => (typeof o === "object" ? o : { value: o, label: o }));
  const onchange = ({ target }) => { leave(target); tell(items[target.selectedIndex].value); };
  const shown = items.map((o) => h("option", { key: `o${o.value}`, value: o.value }, o.label));
  return h("span", { class: "eet-select" }, h("select", { ...props, value, onchange }, shown));
}

function tickbox(checked, tell, props) {
  const onchange = ({ target }) => { leave(target); tell(target.checked); };
  return h("input", { ...props, type: "checkbox", checked, onchange });
}

// A button that cannot be pressed keeps its focus and its tooltip.
function button(props, ...children) {
  const { enabled = true, onclick, ...rest } = props;
  const off = !enabled;
  return h("button", { type: "button", ...rest, "aria-disabled": off ? "true" : null, onclick: off ? null : onclick }, ...children);
}

const CONTROLS = new Set(["button", "input", "select", "textarea"]);

function switchOff(tree) {
  if (CONTROLS.has(tree.tag)) tree.props = { ...tree.props, disabled: true };
  (tree.children || []).forEach(switchOff);
}

// A view draws all of `state` anew whenever it changes. `ui` is what a drawing may use: `send` a command, `local` for
// what only this page knows, `redraw`, an `id` for labels, and `alive`: false once the kernel is gone, which ipywidgets
// tells by a class on its boxes after a restart, and the kernel's connection (`lost`) else. `onBench(bench)` is called
// when the view has come into one; it returns what ends it.
const SHOWING = new Map([ // where what they bring begins
  ...["open_run", "replay", "compare_ticked"].map((name) => [name, ".eet-answer"]),
  ...["run", "compare", "ladder", "measure_ticked"].map((name) => [name, ".eet-live"]),
]);
const ROOM_PX = 320; // of it in view, for a page that need not move
const GONE_CLASS = "jupyter-widgets-disconnected";
const LOST_MS = 3000; // without a connection, which comes back by itself where a network failed for a moment
let numViews = 0;

// Scrolls the answer, or what else there is, into view, below the bar where that sticks; not at all while `room` px of it
// are there already.
function reveal(el, room = Infinity, name = ".eet-answer") {
  const bench = el.closest(".eet-bench"), bar = bench?.querySelector(".eet-bar");
  const shown = [...(bench?.querySelectorAll(name) || [])].find((each) => each.offsetHeight);
  if (!shown) return null;
  const sticks = getComputedStyle(bar).position === "sticky", { top } = shown.getBoundingClientRect();
  const hidden = top < (sticks ? bar.getBoundingClientRect().bottom : 0) || top + room > window.innerHeight;
  shown.style.scrollMarginTop = `${(sticks ? bar.offsetHeight : 0) + 8}px`;
  if (hidden) shown.scrollIntoView({ block: "start", behavior: "smooth" });
  return shown;
}

// Calls `tell(lost)` whenever the kernel of a widget is lost or found again; returns what ends it. A kernel that died
// does not come back, even if another has taken its place.
function watchKernel(model, tell) {
  const kernel = model.widget_manager?.kernel;
  if (!kernel) return () => {};
  let timer, died = false;
  const onConnection = (_, status) => {
    clearTimeout(timer);
    const lost = status !== "connected";
    timer = setTimeout(() => tell(lost || died), lost ? LOST_MS : 0);
  };
  const onStatus = (_, status) => {
    if (status !== "autorestarting" && status !== "dead") return;
    died = true;
    tell(true);
  };
  kernel.connectionStatusChanged.connect(onConnection);
  kernel.statusChanged.connect(onStatus);
  return () => {
    clearTimeout(timer);
    kernel.connectionStatusChanged.disconnect(onConnection);
    kernel.statusChanged.disconnect(onStatus);
  };
}

function view(tree, onBench) {
  function render({ model, el }) {
    const ui = { el, local: {}, alive: true, lost: false, redraw, id: `eet-${Date.now().toString(36)}-${numViews++}` };
    ui.send = (command, more) => {
      if (!ui.alive) return;
      model.send({ command, ...more });
      if (SHOWING.has(command)) reveal(el, ROOM_PX, SHOWING.get(command));
    };
    function redraw() {
      const state = model.get("state");
      ui.alive = !(ui.lost || el.closest(`.${GONE_CLASS}`));
      const drawn = Object.keys(state).length ? [tree(state, ui)].flat(Infinity).filter(Boolean) : [];
      if (!ui.alive) drawn.forEach(switchOff);
      patch(el, drawn);
    }
    let end;
    const unwatch = watchKernel(model, (lost) => { ui.lost = lost; redraw(); });
    const connection = new MutationObserver(redraw);
    const attached = new ResizeObserver(() => { // it is called once the view is on the page
      const bench = el.closest(".eet-bench");
      if (!bench) return;
      attached.disconnect();
      connection.observe(bench, { attributes: true, attributeFilter: ["class"] });
      end = onBench?.(bench, ui);
      redraw();
    });
    attached.observe(el);
    model.on("change:state", redraw);
    redraw();
    return () => { unwatch(); attached.disconnect(); connection.disconnect(); model.off("change:state", redraw); end?.(); };
  }
  return { render };
}
