// Shows a page that JupyterLab does not show although its widgets are there.
//
// After a reload an output looks for its widget for two seconds, ten times a second, and not once more at their end.
// What came since it last looked is missed, where all is restored by then: "model not found" stands there for good.
// The page's output is then taken for another one and set again, which draws it anew. A notebook that was not saved
// since its cell ran comes back with the output of a run before, or with none: the cell is given the page's own.
// A page whose kernel is gone is shown no more: its cell may just run again, and stand empty for another page.
// All this by what JupyterLab offers its extensions. Elsewhere nothing is done, and no other output is touched.

const VIEW = "application/vnd.jupyter.widget-view+json";
const LOOK_MS = 1000, TRIES = 3;
const GONE = new Set(["restarting", "autorestarting", "dead"]);

const isGivenUp = () => [...document.querySelectorAll(".eet-run-again")].some((words) => words.offsetParent);

const isShown = async (manager, page) => Object.keys((await manager.get_model(page)).views || {}).length > 0;

const widgetOf = (output) => output.toJSON().data?.[VIEW]?.model_id;

function* each(list) {
  for (let i = 0; i < list?.length; i++) yield [list.get(i), i];
}

function setAgain(outputs, place, output) {
  outputs.set(place, { ...output, data: { "text/plain": "" } });
  outputs.set(place, output);
}

// Whether there was anything to do.
function show(manager, { page, outputs: [words, view], cell: id, code }) {
  const cells = [...each(manager.context?.model?.cells)].map(([cell]) => cell);
  const own = cells.flatMap(({ outputs }) => [...each(outputs)].map(([output, place]) => ({ outputs, output, place })))
    .filter(({ output }) => widgetOf(output) === page);
  if (own.length) {
    const givenUp = isGivenUp();
    if (givenUp) own.forEach(({ outputs, output, place }) => setAgain(outputs, place, output.toJSON()));
    return givenUp;
  }
  const cell = cells.find((one) => id && one.id === id && one.outputs);
  if (!cell) return false;
  const isWords = (output) => String(output?.toJSON().data?.["text/html"]).includes("eet-run-again");
  const old = [...each(cell.outputs)].find(([output, place]) =>
    widgetOf(output) && !manager.has_model(widgetOf(output)) && place && isWords(cell.outputs.get(place - 1)));
  if (old) setAgain(cell.outputs, old[1], { ...old[0].toJSON(), data: view });
  else if (!cell.outputs.length && cell.sharedModel.getSource() === code) {
    cell.trusted = true; // as JupyterLab has it of a cell that was run
    for (const data of [words, view]) cell.outputs.add({ output_type: "display_data", metadata: {}, data });
  } else return false;
  return true;
}

function initialize({ model }) {
  const manager = model.widget_manager, kernel = manager.kernel;
  let tries = 0, timer = setTimeout(look, LOOK_MS);
  const onStatus = (_, status) => { if (GONE.has(status)) end(); };
  kernel?.statusChanged?.connect(onStatus);

  // Until the page is shown: in a tab behind another one it is not, and its words are not to be seen either.
  async function look() {
    if (kernel && manager.kernel?.id !== kernel.id) return end(); // the notebook has another kernel, without this page
    const shown = model.get("shown"), notebook = manager.context?.model, dirty = notebook?.dirty;
    try {
      if (manager.restoredStatus && manager.has_model(shown.page)) {
        if (await isShown(manager, shown.page)) return end();
        if (timer && show(manager, shown)) {
          tries++;
          notebook.dirty = dirty; // the notebook is what it was
        }
      }
    } catch (problem) {
      console.warn("EET Lab could not show a page again", problem);
      tries++;
    }
    if (tries >= TRIES) end();
    else if (timer) timer = setTimeout(look, LOOK_MS);
  }

  function end() {
    clearTimeout(timer);
    timer = null;
    kernel?.statusChanged?.disconnect(onStatus);
  }

  return end;
}

export default { initialize };
