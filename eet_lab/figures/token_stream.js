// Streamed text. Everything goes in as text nodes.

function render({ model, el }) {
  el.classList.add("eet-stream");
  let settled = false, panes = [];

  function begin(prompts, instead) {
    el.replaceChildren();
    panes = prompts.map((prompt, row) => {
      const pane = document.createElement("div"), head = document.createElement("div"), body = document.createElement("div");
      const asked = document.createElement("span"), said = document.createElement("span"), count = document.createElement("b");
      pane.className = "eet-stream-pane"; head.className = "eet-stream-head"; body.className = "eet-stream-body";
      asked.className = "eet-stream-asked"; said.className = "eet-stream-said";
      head.append(document.createTextNode("prompt " + (row + 1)), count);
      asked.textContent = prompt;
      body.append(asked, said);
      pane.append(head, body);
      el.append(pane);
      return { said, count, body };
    });
    if (!prompts.length) el.textContent = instead || "The text of each prompt streams here while it runs.";
    el.classList.toggle("eet-stream-empty", !prompts.length);
  }
  function append(row, text, count) {
    const pane = panes[row];
    if (!pane) return;
    pane.said.append(document.createTextNode(text));
    pane.count.textContent = count + " tokens";
    // To the end in whole lines, so that none is cut under the head: an empty one below the text makes up for the rest.
    const { body } = pane, below = body.scrollHeight - body.clientHeight;
    body.scrollTop = below - (below % parseFloat(getComputedStyle(body).lineHeight));
  }
  function fromSnapshot() {
    const all = JSON.parse(model.get("snapshot") || "{}");
    begin(all.prompts || [], all.instead);
    (all.texts || []).forEach((text, row) => append(row, text, all.counts[row]));
  }
  function onMessage(message) {
    if (message.kind === "begin") begin(message.prompts, message.instead);
    if (message.kind === "append") for (const [row, text, count] of message.news) append(row, text, count);
  }
  // Text that was sent before this view listened is in the first snapshot that it hears of: messages come in order.
  function onSnapshot() { if (!settled) { settled = true; fromSnapshot(); } }
  model.on("msg:custom", onMessage);
  model.on("change:snapshot", onSnapshot);
  fromSnapshot();
  return () => { model.off("msg:custom", onMessage); model.off("change:snapshot", onSnapshot); };
}

export default { render };
