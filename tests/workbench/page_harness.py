"""A page with the five views on a mock model, laid out as ipywidgets would: no kernel, no JupyterLab."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from eet_lab.figures.theme import stylesheet
from eet_lab.workbench.page import DOM, STYLE, VIEWS
from workbench.page_states import States

# JupyterLab's own themes, the variables that the page uses.
THEMES = {
    "light": {
        "layout-color0": "#fff",
        "layout-color1": "#fff",
        "ui-font-color1": "rgba(0,0,0,.87)",
        "ui-font-color2": "rgba(0,0,0,.54)",
        "border-color2": "#e0e0e0",
    },
    "dark": {
        "layout-color0": "#111",
        "layout-color1": "#212121",
        "ui-font-color1": "rgba(255,255,255,.87)",
        "ui-font-color2": "rgba(255,255,255,.54)",
        "border-color2": "#424242",
    },
}

# What ipywidgets does to its boxes, and JupyterLab to what is in them.
WIDGETS_CSS = (
    ".jupyter-widgets{margin:2px;box-sizing:border-box;overflow:visible}"
    ".widget-box{display:flex;margin:0;overflow:auto}.widget-vbox{flex-direction:column}"
    ".placeholder{flex:1;background-image:repeating-linear-gradient(45deg,#8883 0 6px,#8881 6px 12px)}"
    ".jupyter-widgets-disconnected::before{content:'broken link'}"
    ".jp-ThemedContainer button{border-radius:2px;font-family:monospace}.jp-ThemedContainer a{text-decoration:unset}"
    ".jp-ThemedContainer kbd,.jp-ThemedContainer code{font-size:20px}"
)

SCRIPT = """
const listeners = {}, sent = (window.sent = []), models = (window.models = {});
function makeSignal() {
  const slots = new Set();
  const emit = (value) => slots.forEach((f) => f(null, value));
  return { connect: (f) => slots.add(f), disconnect: (f) => slots.delete(f), emit };
}
const kernel = (window.kernel = { connectionStatusChanged: makeSignal(), statusChanged: makeSignal() });
function makeModel(name, state) {
  const on = {};
  return (models[name] = {
    widget_manager: { kernel }, get: () => state, set() {}, save_changes() {},
    on: (event, f) => (on[event] ||= new Set()).add(f), off: (event, f) => on[event]?.delete(f),
    send: (content) => sent.push(JSON.parse(JSON.stringify({ view: name, ...content }))),
    tell: (message, buffers) => (on["msg:custom"] || []).forEach((f) => f(message, buffers)),
    show: (next) => { state = next; (on["change:state"] || []).forEach((f) => f()); },
  });
}
const waiting = Object.entries(window.SOURCES).map(async ([name, source]) => {
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const el = document.querySelector(`.eet-${name}`);
  (window.modules ||= {})[name] = module.default;
  window.ends = { ...window.ends, [name]: module.default.render({ model: makeModel(name, window.STATES[name]), el }) };
});
window.show = (states) => Object.entries(states).forEach(([name, state]) => models[name].show(state));
window.gone = () => {
  for (const el of document.querySelectorAll(".widget-box")) el.classList.add("jupyter-widgets-disconnected");
};
Promise.all(waiting).then(() => { document.body.dataset.ready = "yes"; });
"""

BODY = """
<div class="jupyter-widgets widget-box eet-bench eet-page-grid %s">
 <div class="eet-view eet-bar"></div>
 <div class="jupyter-widgets widget-box widget-vbox eet-left-column">
  <div class="eet-view eet-techniques"></div><div class="eet-view eet-inputs"></div></div>
 <div class="jupyter-widgets widget-box widget-vbox eet-right-column">
  <div class="jupyter-widgets widget-box eet-live">
   <div class="placeholder"></div><div class="placeholder"></div><div class="placeholder"></div></div>
  <div class="eet-view eet-answer"></div>
  <div class="jupyter-widgets widget-box widget-vbox eet-stage"><div class="placeholder"></div></div>
 </div>
 <div class="jupyter-widgets widget-box widget-vbox eet-below-column"><div class="eet-view eet-runs"></div></div>
</div>"""


Open = Callable[..., Any]


def html(states: States, theme: str = "light", large: bool = False) -> str:
    """The whole page; in it `show(states)`, `gone()`, and `sent`, all commands so far."""
    sources = {name: DOM + script for name, script in VIEWS.items()}
    colors = "".join(f"--jp-{name}:{value};" for name, value in THEMES[theme].items())

    def as_script(value: object) -> str:
        return json.dumps(value).replace("<", "\\u003c")

    page = "margin:0;padding:8px;background:var(--jp-layout-color0);font-family:system-ui,sans-serif"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>bench</title>"
        f"<style>:root{{{colors}color-scheme:{theme}}}body{{{page}}}{WIDGETS_CSS}{STYLE}</style>"
        f"<body class=jp-ThemedContainer data-jp-theme-light={'true' if theme == 'light' else 'false'}>"
        f"<main>{BODY % ('eet-large' if large else '')}{stylesheet()}</main>"  # as on the page, behind its own style
        f"<script>window.SOURCES={as_script(sources)};window.STATES={as_script(states)};</script>"
        f"<script type=module>{SCRIPT}</script>"
    )


def sent(page: Any) -> list[dict[str, Any]]:
    """The commands since the last look."""
    return page.evaluate("window.sent.splice(0)")


def show(page: Any, states: States) -> None:
    page.evaluate("(states) => window.show(states)", states)
