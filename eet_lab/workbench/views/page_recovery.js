// Shows a page that JupyterLab has given up although its widgets are there.
//
// After a reload an output looks for its widget for two seconds, ten times a second, and not once more at their end.
// What came since it last looked is missed, where all is restored by then: "model not found" stands there for good.
// The page's output is then taken for another one and set again, which draws it anew: by what JupyterLab offers its
// extensions. Elsewhere nothing is done, and no other output is touched.

const VIEW = "application/vnd.jupyter.widget-view+json";
const LOOK_MS = 1000, TRIES = 3;

const isGivenUp = () => [...document.querySelectorAll(".eet-run-again")].some((words) => words.offsetParent);

const isShown = async (manager, page) => Object.keys((await manager.get_model(page)).views || {}).length > 0;

function* outputsOf(notebook, page) {
  const cells = notebook?.cells;
  for (let i = 0; i < cells?.length; i++) {
    const outputs = cells.get(i).outputs;
    for (let j = 0; j < outputs?.length; j++) {
      if (outputs.get(j).toJSON().data?.[VIEW]?.model_id === page) yield [outputs, j];
    }
  }
}

function setAgain(manager, page) {
  const notebook = manager.context?.model, dirty = notebook?.dirty;
  for (const [outputs, place] of outputsOf(notebook, page)) {
    const output = outputs.get(place).toJSON();
    outputs.set(place, { ...output, data: { "text/plain": "" } });
    outputs.set(place, output);
    notebook.dirty = dirty; // the notebook is what it was
  }
}

function initialize({ model }) {
  const manager = model.widget_manager, page = model.get("page");
  let tries = 0, timer = setTimeout(look, LOOK_MS);

  // Until the page is shown: in a tab behind another one it is not, and its words are not to be seen either.
  async function look() {
    try {
      if (manager.restoredStatus && manager.has_model(page)) {
        if (await isShown(manager, page)) return;
        if (isGivenUp() && tries++ < TRIES) setAgain(manager, page);
      }
    } catch (problem) {
      console.warn("EET Lab could not show a page again", problem);
      tries++;
    }
    if (timer && tries < TRIES) timer = setTimeout(look, LOOK_MS);
  }

  return () => {
    clearTimeout(timer);
    timer = null;
  };
}

export default { initialize };
