// What is asked of the model: prompts, the settings of a generation, and whether all of it fits.
// state: prompts, generation, fits, read_only. sends: edit_prompt, add_prompts, remove_prompt, setting.

export default view((s, ui) => [
  fold("prompts", "Prompts", s.prompts.summary, s.prompts.kind, prompts(s, ui)),
  fold("generation", "Generation", s.generation.summary, s.generation.kind, generation(s, ui)),
  fold("fits", "Memory", s.fits.summary, s.fits.kind, fits(s.fits), s.fits.stale),
]);

function fold(key, title, summary, kind, body, stale) {
  return h("details", { key, class: "eet-fold-box" },
    h("summary", null, h("b", null, title),
      h("span", { class: `eet-fold-line eet-is-${kind || "plain"} ${stale ? "eet-stale" : ""}`, title: summary }, summary)),
    h("div", { class: "eet-fold-body" }, body));
}

function prompts(s, ui) {
  const { rows, sum, over, share, most } = s.prompts;
  return [
    h("div", { class: "eet-prompt-list", key: "list" }, rows.map((row, i) => prompt(row, i, rows.length, s, ui))),
    h("div", { class: "eet-meter-line", key: "meter", role: "img", "aria-label": sum },
      h("i", { class: over ? "eet-over" : "", style: { width: `${100 * share}%` } })),
    h("div", { class: "eet-note-line", key: "sum" }, sum),
    !s.read_only && h("div", { class: "eet-line", key: "tools" },
      button({ class: "eet-soft", enabled: rows.length < most, onclick: () => ui.send("add_prompts", { lines: [""] }) }, "Add a prompt"),
      button({ class: "eet-soft", enabled: rows.length < most, "aria-expanded": String(!!ui.local.pasting),
        onclick: () => { ui.local.pasting = !ui.local.pasting; ui.redraw(); } }, "Paste several…")),
    ui.local.pasting && !s.read_only && paste(ui),
  ];
}

function prompt({ text, tokens, over }, index, count, s, ui) {
  const name = `Prompt ${index + 1}`;
  return h("div", { class: "eet-prompt-row", key: `prompt-${index}` },
    h("textarea", { "aria-label": name, rows: 1, readOnly: s.read_only, spellcheck: "false", placeholder: "(empty: starts from BOS)",
      ...typed(text, (now) => ui.send("edit_prompt", { index, text: now })) }),
    h("span", { class: `eet-tokens ${over ? "eet-is-bad" : ""}`, title: over ? "too long for the context" : "tokens" }, tokens ?? ""),
    !s.read_only && button({ class: "eet-close", "aria-label": `Remove prompt ${index + 1}`, title: "Remove", enabled: count > 1,
      onclick: () => ui.send("remove_prompt", { index }) }, "×"));
}

function paste(ui) {
  const add = () => {
    const lines = (ui.local.pasted || "").split(/\r?\n/).filter((line) => line.trim());
    if (lines.length) ui.send("add_prompts", { lines });
    Object.assign(ui.local, { pasted: "", pasting: false });
    ui.redraw();
  };
  return h("div", { class: "eet-paste", key: "paste" },
    h("textarea", { rows: 4, "aria-label": "Several prompts, one per line", placeholder: "One prompt per line", value: ui.local.pasted || "",
      oninput: ({ target }) => { ui.local.pasted = target.value; } }),
    button({ class: "eet-soft", onclick: add }, "Add each line"));
}

function generation(s, ui) {
  const { fields, stop } = s.generation;
  const id = (name) => `${ui.id}-${name}`;
  return [
    h("div", { class: "eet-fields", key: "fields" }, fields.map((f) => h("div", { class: "eet-field-box", key: f.name },
      h("label", { for: id(f.name) }, f.label),
      h("input", { id: id(f.name), "aria-describedby": id(`${f.name}-help`), step: f.step || "any", disabled: s.read_only,
        "aria-invalid": f.wrong ? "true" : null, ...numeric(f.value, (value) => ui.send("setting", { name: f.name, value })) }),
      h("small", { id: id(`${f.name}-help`), class: f.wrong ? "eet-is-bad" : null }, f.wrong || f.help)))),
    stop && h("label", { class: "eet-check", key: "stop" },
      tickbox(stop.value, (value) => ui.send("setting", { name: "stop_at_eos", value }), { disabled: s.read_only }),
      h("span", null, stop.label, h("small", null, stop.help))),
  ];
}

function fits({ words, parts, limit_share, held = [] }) {
  return [
    ...stack({ parts, limit_share }, "fits"),
    words.map((text, i) => h("p", { class: "eet-note-line", key: `words-${i}` }, text)),
    held.map((each) => [h("h3", { key: `title-${each.title}` }, each.title), ...stack(each, each.title)]),
  ];
}

// Memory as a bar of named parts, and their sizes below it.
function stack({ parts, limit_share }, key) {
  return [
    parts.length > 0 && h("div", { class: "eet-parts", key: `parts-${key}`, "aria-hidden": "true" },
      parts.map((p) => h("i", { key: p.name, title: `${p.name}: ${p.size}`, style: { width: `${100 * p.share}%`, background: p.color } })),
      limit_share != null && h("u", { key: "limit", title: "free memory ends here", style: { left: `${100 * limit_share}%` } })),
    h("dl", { class: "eet-part-list", key: `list-${key}` }, parts.map((p) => h("div", { key: p.name, title: p.tip || null },
      h("dt", null, h("i", { style: { background: p.color } }), p.name), h("dd", null, p.size)))),
  ];
}
