"""A page that lives in the kernel, and that a notebook which was not saved does not show: its cell gets it back."""

from __future__ import annotations

from typing import Any

import pytest

from eet_lab.workbench import Workbench, page_recovery
from eet_lab.workbench.page_recovery import RUN_AGAIN, PageRecovery

VIEW = "application/vnd.jupyter.widget-view+json"
CODE = "eet_lab.Workbench()"
NOTEBOOK = """async ([script, shown, cells, live, LOOK, status]) => {
  const list = (of) => ({ get length() { return of.length; }, get: (i) => of[i] });
  const outputsOf = (datas) => {
    const wrap = (output) => ({ toJSON: () => output }), all = datas.map((data) => wrap({ metadata: {}, data }));
    return { ...list(all), get length() { return all.length; },
      set: (i, output) => { all[i] = wrap(output); }, add: (output) => all.push(wrap(output)) };
  };
  const models = cells.map(({ id, code, outputs }) =>
    ({ id, sharedModel: { getSource: () => code }, outputs: outputs && outputsOf(outputs) }));
  const notebook = { cells: list(models), dirty: false };
  const slots = new Set(), say = (status) => slots.forEach((slot) => slot(null, status));
  const kernel = { id: 'first',
    statusChanged: { connect: (slot) => slots.add(slot), disconnect: (slot) => slots.delete(slot) } };
  const widget_manager = { restoredStatus: true, context: { model: notebook }, kernel,
    has_model: (id) => live.includes(id), get_model: async () => ({ views: {} }) };
  const source = script.replace("LOOK_MS = 1000", "LOOK_MS = 1");
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const end = (await import(url)).default.initialize({ model: { widget_manager, get: () => shown } });
  if (status === 'changed') widget_manager.kernel = { ...kernel, id: 'second' };
  else say(status);
  await new Promise((done) => setTimeout(done, LOOK));
  end();
  if (slots.size) throw new Error("it still listens to its kernel");
  return models.map(({ outputs }) => outputs && Array.from(outputs, (_, i) => outputs.get(i).toJSON().data));
}"""
"""A notebook of such cells, opened beside a kernel with these `live` models, which then tells its `status`.

Where that is "changed", the notebook has another kernel. It gives the data of each cell's outputs.
"""


class Shell:
    """What a cell's request says to the kernel."""

    def get_parent(self) -> dict[str, Any]:
        return {"metadata": {"cellId": "second"}, "content": {"code": CODE}}


def view_of(model: str) -> dict[str, Any]:
    return {VIEW: {"model_id": model}, "text/plain": "(a page of widgets)"}


def cell(name: str, *outputs: dict[str, Any], code: str = CODE) -> dict[str, Any]:
    return {"id": name, "code": code, "outputs": list(outputs)}


def test_a_page_that_is_displayed_tells_its_cell(hf_model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("eet_lab.workbench.threads.display", lambda data, raw: displayed.append(data))
    workbench = Workbench(hf_model, "5 6", folder=tmp_path, device="cpu")
    try:
        assert workbench._recovery.shown == {}, "a page that nobody displayed belongs into no cell"
        workbench._ipython_display_()
        assert workbench._recovery.shown["cell"] == "", "plain Python knows of no cell"
        monkeypatch.setattr(page_recovery, "get_ipython", Shell)
        workbench._ipython_display_()
        shown = workbench._recovery.shown
        assert (shown["cell"], shown["code"], shown["outputs"]) == ("second", CODE, displayed[-2:])
        assert shown["page"] == displayed[-1][VIEW]["model_id"]
    finally:
        workbench.close()


OLD, NEW = view_of("old"), view_of("new")
WORDS = {"text/html": RUN_AGAIN}
PRINTED = {"text/plain": "5"}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([WORDS, OLD], [WORDS, NEW]),  # of the kernel before
        ([PRINTED, WORDS, OLD], [PRINTED, WORDS, NEW]),
        ([], [WORDS, NEW]),  # not saved since the cell ran
        ([WORDS, view_of("other")], None),  # another page, which lives
        ([OLD], None),  # a widget that is none of ours
        ([PRINTED], None),
    ],
)
def test_its_own_cell_gets_it_back_and_no_other(window: Any, before: list[Any], after: list[Any] | None) -> None:
    shown = {"page": "new", "outputs": [WORDS, NEW], "cell": "second", "code": CODE}
    cells = [cell("first", WORDS, OLD), cell("second", *before), {"id": "text", "code": CODE}]
    [first, second, text] = window.evaluate(NOTEBOOK, [PageRecovery._esm, shown, cells, ["new", "other"], 60])
    assert second == (before if after is None else after)
    assert first == [WORDS, OLD] and text is None


@pytest.mark.browser
def test_a_cell_that_says_something_else_now_stays_empty(window: Any) -> None:
    shown = {"page": "new", "outputs": [WORDS, NEW], "cell": "second", "code": CODE}
    for told, code in ((shown, "x = 1"), ({**shown, "cell": ""}, CODE), ({}, CODE)):
        assert window.evaluate(NOTEBOOK, [PageRecovery._esm, told, [cell("second", code=code)], ["new"], 60]) == [[]]


@pytest.mark.browser
@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("busy", [WORDS, NEW]),
        ("idle", [WORDS, NEW]),
        ("restarting", []),
        ("autorestarting", []),
        ("dead", []),
        ("changed", []),
    ],
)
def test_a_page_whose_kernel_is_gone_is_shown_no_more(window: Any, status: str, after: list[Any]) -> None:
    """Its cell is empty where it runs again, until the page of the next kernel stands there."""
    shown = {"page": "new", "outputs": [WORDS, NEW], "cell": "second", "code": CODE}
    assert window.evaluate(NOTEBOOK, [PageRecovery._esm, shown, [cell("second")], ["new"], 60, status]) == [after]
