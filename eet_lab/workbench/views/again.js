// Shows a page that JupyterLab has given up although its widgets are there.
//
// After a reload an output looks for its widget for two seconds, ten times a second, and not once more at their end.
// What came since it last looked is missed, where all is restored by then: "model not found" stands there for good.
// Such an output is taken for another one and set again, which draws it anew: by what JupyterLab offers its extensions.
// Elsewhere nothing is done.

const VIEW = "application/vnd.jupyter.widget-view+json";
const LOOK_MS = 1000, LOOKS = 15;

const isGivenUp = () => [...document.querySelectorAll(".eet-run-again")].some((words) => words.offsetParent);

async function showAgain(manager) {
  const notebook = manager.context?.model, cells = notebook?.cells;
  for (let i = 0; i < cells?.length; i++) {
    const outputs = cells.get(i).outputs;
    for (let j = 0; j < outputs?.length; j++) {
      const output = outputs.get(j).toJSON(), id = output.data?.[VIEW]?.model_id;
      if (!id || !manager.has_model(id) || Object.keys((await manager.get_model(id)).views || {}).length) continue;
      const dirty = notebook.dirty;
      outputs.set(j, { ...output, data: { "text/plain": "" } });
      outputs.set(j, output);
      notebook.dirty = dirty; // the notebook is what it was
    }
  }
}

function initialize({ model }) {
  const manager = model.widget_manager;
  let looks = 0;
  const timer = setInterval(() => {
    if (++looks === LOOKS) clearInterval(timer);
    if (manager.restoredStatus && isGivenUp()) showAgain(manager);
  }, LOOK_MS);
  return () => clearInterval(timer);
}

export default { initialize };
