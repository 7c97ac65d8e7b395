"""The tests' kernels answer as any kernel in which ipywidgets was imported."""

from __future__ import annotations

from typing import Any

import pytest

CONTROL = "jupyter.widget.control"


@pytest.mark.timeout(60)
def test_a_page_that_is_reloaded_gets_all_widgets_in_one_answer(
    kernels: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Without that answer JupyterLab asks for each widget by itself, which takes five times as long."""
    from jupyter_client.manager import run_kernel

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name, value in kernels.items():
        monkeypatch.setenv(name, value)
    with run_kernel() as client:
        client.execute_interactive("import ipywidgets; ipywidgets.IntSlider()", timeout=30)
        opened = {"comm_id": "asking", "target_name": CONTROL, "data": {}}
        asked = {"comm_id": "asking", "data": {"method": "request_states"}}
        for kind, content in (("comm_open", opened), ("comm_msg", asked)):
            client.shell_channel.send(client.session.msg(kind, content, metadata={"version": "1.0.0"}))
        while not (answer := client.get_iopub_msg(timeout=20))["msg_type"].startswith("comm_"):
            pass
    assert answer["msg_type"] == "comm_msg"
    names = [state["model_name"] for state in answer["content"]["data"]["states"].values()]
    assert "IntSliderModel" in names
