"""The commands techniques, generate, compare and bench, as they are typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from contextlib import contextmanager

import pytest
from conftest import make_gpt2

from eet_lab.bench import Spread, load_result
from eet_lab.bench.peers import HuggingFace
from eet_lab.bench.results import renamed
from eet_lab.bench.rows import Row
from eet_lab.cli import main
from eet_lab.commands.bench_tables import model_table
from eet_lab.commands.terminal import ProgressLine, stoppable
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled
from eet_lab.models import load
from eet_lab.models.loading import DEMO
from eet_lab.paths import PACKAGE
from eet_lab.technique import names_in_all, registry
from eet_lab.workbench.choices import State

SHORT = ["-n", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_gpt2().save_pretrained(path)
    return str(path)


def test_techniques_lists_them_all_with_reasons(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for device in ("cpu", "cuda"):
        assert main(["techniques", "--device", device]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in registry())
        assert "no: CUDA graphs need an NVIDIA GPU" in text


@pytest.mark.parametrize("name", list(registry()))
def test_every_technique_has_a_card(name, capsys):
    assert main(["techniques", name]) == 0
    text = capsys.readouterr().out
    technique = registry()[name]()
    assert technique.title in text
    assert all(f"{name}:{knob}=" in text for knob in technique.knobs)


def test_generate_streams_one_prompt(capsys):
    assert main(["generate", "Return a list of", *SHORT]) == 0
    text, stats = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text.startswith("Return a list of >> ")
    assert "4 tokens" in stats
    assert re.search(r"first token [\d.]+ ms, then [\d.]+ ms each\]$", stats.strip())
    assert main(["generate", "Return a list of", *SHORT, "-n", "1"]) == 0
    assert re.search(r": 1 token, \d+ tokens/s, first token [\d.]+ ms\]$", capsys.readouterr().out.strip())


def test_generate_tells_prompt_from_text_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["generate", "Return a list of", *SHORT]) == 0
    assert capsys.readouterr().out.startswith("\x1b[1mReturn a list of\x1b[0m ")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (["--top-k", "5"], True),
        (["--top-p", "0.5"], True),
        ([], False),
        (["--top-k", "5", "--temperature", "1"], False),
    ],
)
def test_limits_without_a_temperature_are_said_to_do_nothing(how, said, capsys):
    assert main(["generate", "Return a list of", *SHORT, *how]) == 0
    assert ("--top-k and --top-p have no effect" in capsys.readouterr().err) == said


def test_generate_ends_a_text_where_it_ends(capsys):
    words = ["generate", "Raise an exception if", "--recipe", "baseline", "--device", "cpu"]
    assert main(words) == 0
    streamed = capsys.readouterr().out
    assert "6 tokens" in streamed and "endoftext" not in streamed
    assert main([*words, "--ignore-eos", "-n", "16"]) == 0
    assert "<|endoftext|>" in capsys.readouterr().out


def test_generate_ends_a_text_at_any_of_several_tokens(tmp_path, capsys):
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 296]}))
    model = load(folder, device="cpu")
    how = ["--model", str(folder), "--recipe", "baseline", "--device", "cpu"]
    assert main(["generate", "Return a list of", *how]) == 0
    assert f"{model.decode([1119, 14, 199, 199, 442, 533])}\n" in capsys.readouterr().out, "up to 296, and without it"
    assert State(stop_at_eos=True).settings(model).stop == (0, 296)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["-n", "0"], "--new-tokens is 0, but it must be a whole number from 1"),
        (["-n", "99999"], "with 99,999 new ones it would pass"),
        (["--recipe", "fused"], "fused"),
    ],
)
def test_generate_prints_no_prompt_that_it_cannot_continue(wrong, says, capsys):
    assert main(["generate", "Return", *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err


def test_generate_runs_a_batch(capsys):
    assert main(["generate", "Return", "If the file", "--recipe", "baseline", *SHORT, "--ignore-eos"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- prompt 1 of 2\nReturn >>")
    assert "\n--- prompt 2 of 2\nIf the file >>" in out
    assert "baseline: 8 tokens" in out


def test_compare_prints_the_notebooks_table_and_saves_it(folder, tmp_path, capsys):
    path = tmp_path / "result.json"
    words = ["--recipe", "pre_padding,mask_removal", "--repeats", "1", "--device", "cpu", "--save", str(path)]
    assert main(["compare", "--model", folder, *SHORT, *words]) == 0
    out = capsys.readouterr().out
    result = load_result(path)
    assert result.to_text() in out
    assert result.selection.recipe == "pre_padding,mask_removal"
    assert main(["compare", "--load", str(path)]) == 0
    assert result.to_text() in capsys.readouterr().out


def test_compare_writes_one_page(folder, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "result.html"
    assert main(["compare", "--model", folder, *SHORT, "--repeats", "1", "--device", "cpu", "--html", str(page)]) == 0
    assert "<html" in page.read_text()


def test_compare_writes_a_trace_and_keeps_the_timelines_beside_the_result(folder, tmp_path, capsys):
    saved, trace = tmp_path / "result.json", tmp_path / "trace.json"
    words = ["--repeats", "1", "--device", "cpu", "--save", str(saved)]
    assert main(["compare", "--model", folder, *SHORT, *words, "--trace", str(trace)]) == 0
    assert "open it at ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    assert main(["compare", "--load", str(saved), "--trace", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    assert [event["name"] for event in again] == [event["name"] for event in events]


def test_a_result_that_is_saved_again_keeps_what_stands_beside_it(tmp_path):
    [first] = (PACKAGE / "recorded").glob("h200-compare-gpt2-xl.json")
    again = tmp_path / "again.json"
    assert main(["compare", "--load", str(first), "--save", str(again)]) == 0
    before, after = (json.loads(path.read_text()) for path in (first, again))
    before["result"] = renamed(before["result"])
    for timeline in before["timeline"].values():  # it was taken before training had timelines
        timeline.setdefault("stage", "decode")
    assert before == after and {"monitor", "timeline"} < after.keys()


def test_a_comparison_is_not_lost_where_there_is_no_trace(folder, tmp_path, capsys, monkeypatch):
    def stopped(*args, **how):
        raise Cancelled("The timeline was stopped.")

    monkeypatch.setattr("eet_lab.bench.timeline_steps.timelines", stopped)
    words = ["--repeats", "1", "--device", "cpu", "--save", str(tmp_path / "result.json")]
    assert main(["compare", "--model", folder, *SHORT, *words, "--trace", str(tmp_path / "trace.json")]) == 1
    assert "There is no trace: The timeline was stopped." in capsys.readouterr().err
    assert load_result(tmp_path / "result.json")
    assert main(["compare", "--load", str(tmp_path / "result.json"), "--trace", str(tmp_path / "trace.json")]) == 2
    assert "holds no timeline" in capsys.readouterr().err


def test_compare_climbs_a_ladder(folder, capsys):
    words = ["--ladder", "--recipe", "pre_padding,mask_removal", "--repeats", "1", "--device", "cpu"]
    assert main(["compare", "--model", folder, *SHORT, *words]) == 0
    out = capsys.readouterr().out
    assert "+ Mask removal" in out
    assert "all without Pre-padding" in out


def test_bench_prints_a_line_for_each_and_appends(folder, tmp_path, capsys):
    words = ["--provider", "eet_lab", "--provider", "hf-sdpa", "--repeats", "1", "--device", "cpu"]
    assert main(["bench", f"{folder}/b2/p2-5/n3", *words, "--append", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "hf-sdpa" in out
    assert len((tmp_path / "cpu.jsonl").read_text().splitlines()) == 2


def test_bench_fails_where_nothing_could_be_timed(folder, monkeypatch, capsys):
    def prepare(self):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(HuggingFace, "prepare", prepare)
    assert main(["bench", f"{folder}/b1/p2/n2", "--provider", "hf-sdpa", "--device", "cpu"]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "Nothing could be timed. hf-sdpa failed: RuntimeError: no such kernel" in streams.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["techniques", "pre_pading"], "Did you mean 'pre_padding'"),
        (["generate", "x", "--recipe", "fused"], "no technique 'fused'"),
        (["generate", "x", "--model", "gpt3"], "no model 'gpt3'"),
        (["generate", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "x", "--recipe", "chunked_cross_entropy"], "this model: it is for training alone. Leave"),
        (["compare", "--load", "nowhere.json"], "nowhere.json cannot be read"),
        (["compare", "--load", "nowhere.json", "--recipe", "all"], "--recipe is for measuring, but --load shows"),
        (["compare", "--load", "nowhere.json", "--top-k", "3"], "--top-k is for measuring, but --load shows"),
        (["compare", "--load", "nowhere.json", "--model", "gpt2"], "--model is for measuring, but --load shows"),
        (["compare", "--load", "x.json", "-n", "8", "--top-p", "0.5"], "--new-tokens and --top-p are for measuring"),
        (["compare", "--repeats", "0"], "repeats is 0"),
        (["bench", "demo/b1/p8/n16", "--repeats", "0"], "--repeats is 0, but it must be a whole number from 1"),
        (["bench", "demo/b999999999/p8/n16"], "7,999,999,992 in all, but a workload has at most 10,000,000"),
        (["bench", "demo/b1/p8/n16", "--repeats", "-3"], "repeats is -3"),
        (["bench", "op:norm_linear/t1/n96/c64", "--repeats", "0", "--device", "cpu"], "repeats is 0"),
        (["compare", "--ladder", "--baseline", "pre_padding"], "leave out --ladder or --baseline"),
        (["bench", "gpt2-b1"], "is no workload"),
        (["bench", "choose_top_k"], "Did you mean 'op:choose_top_k'"),
        (["bench", "norm/t1/c64"], "Did you mean 'op:norm/t1/c64'"),
        (["doctor", "--html", "no/where.html"], "no/where.html cannot be written"),
        (["compare", "--html", "no/where.html"], "no/where.html cannot be written"),
        (["compare", "--save", "no/where.json"], "no/where.json cannot be written: there is no folder"),
        (["compare", "--save", "."], ". cannot be written: it is a folder"),
        (["bench", "demo/b1/p2/n2", "--append", "README.md/rows"], "README.md/rows cannot be made"),
        (["bench", "demo/b1/p2/n2", "--append", "no/rows"], "no/rows cannot be made: there is no folder /"),
        (["bench", "demo/b1/p2/n2", "--append", "README.md"], "README.md cannot be made a folder: it is a file."),
        (["bench", "demo/b1/p2/n2", "--provider", "hf-static-compile", "--device", "cpu"], "on a GPU only"),
        (
            ["bench", "demo/b1/p2/n2", "--recipe", "all", "--provider", "hf-sdpa"],
            "has recipes. Add --provider eet_lab",
        ),
        (["bench", "encode:bert-base/t2/p3", "--recipe", "all", "--provider", "hf-sdpa"], "has recipes. Add"),
        (["bench", "accuracy:demo/b1/p3/n3", "--recipe", "all", "--provider", "hf-sdpa"], "has recipes. Add"),
        (["bench", "accuracy:demo/b1/p3/n3", "--repeats", "3"], "--repeats is 3, but accuracy is not timed"),
        (["bench", "demo/b1/p0/n2"], "prompt tokens of a workload: 0, but it must be at least 1"),
        (["bench", "demo/b1/p2/n2", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
        (["compare", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
        (["compare", "--baseline", " , "], "--baseline is ' , ', which names no technique. Write baseline"),
        (["generate", "a", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
        (["train", "tiny", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
        (["serve", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
        (["simulate", "--model", "demo", "--recipe", ""], "--recipe is '', which names no technique. Write baseline"),
    ],
)
def test_bad_input_is_one_line_on_stderr(words, says, capsys):
    """One line also means that no work was begun, whose progress would be told there."""
    assert main(words) == 2
    streams = capsys.readouterr()
    assert says in streams.err
    assert streams.err.count("\n") == 1
    assert "Traceback" not in streams.err


def test_repeats_that_are_no_number_are_told(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--repeats", "abc"])
    assert "--repeats: 'abc' is neither auto nor a whole number, such as 6" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["techniques", "generate", "compare", "bench"])
def test_help_teaches_with_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.count(f"eet-lab {command}") >= 2


def test_ctrl_c_stops_a_run_cleanly(folder, capsys):
    before, given_up = signal.getsignal(signal.SIGINT), threading.Event()

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is before and not given_up.wait(0.05):
            pass
        if not given_up.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=press)
    finger.start()
    try:
        code = main(["compare", "--model", folder, "-n", "90", "--repeats", "500", "--device", "cpu"])
    finally:
        given_up.set()
        finger.join()
    assert code == 130
    assert "Stopped." in capsys.readouterr().out


def test_ctrl_c_while_kernels_are_built_is_told_too(monkeypatch, capsys):
    def prepare(self, progress=None, cancel=None):
        progress(1, 3, "attention.cu")
        raise Cancelled("Stopped while CUDA kernels were being built.")

    monkeypatch.setattr(Engine, "prepare", prepare)
    assert main(["generate", "Return", *SHORT, "--device", "cpu"]) == 130
    streams = capsys.readouterr()
    assert "Stopped." in streams.out
    assert "[1/3] attention.cu" in streams.err


def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)

    def press_twice() -> None:
        with stoppable() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(2)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(2)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_off_a_terminal_is_lines(capsys):
    line = ProgressLine()
    line(1, 3, "warming up")
    line(1, 3, "warming up")
    line(2, 3, "timing")
    line.clear()
    assert capsys.readouterr().err == "[1/3] warming up\n[2/3] timing\n"


@contextmanager
def on_a_terminal(monkeypatch):
    """Both streams are one; what it was sent until now."""
    controller, its = os.openpty()
    with open(its, "w") as stream, open(controller, "rb", buffering=0) as terminal:

        def shown() -> str:
            """A terminal gets it a while after it was written, so up to a mark."""
            print(end="\0", file=stream, flush=True)
            found = b""
            while not found.endswith(b"\0"):
                found += terminal.read(4096)
            return found[:-1].decode()

        for name in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{name}", stream)
        yield shown


@pytest.mark.parametrize("is_built", [False, True])
def test_a_terminal_keeps_the_text_and_loses_the_progress(is_built, monkeypatch):
    def prepare(self, progress=None, cancel=None):
        if is_built and progress:
            progress(1, 3, "attention.cu")

    monkeypatch.setattr(Engine, "prepare", prepare)
    with on_a_terminal(monkeypatch) as shown:
        assert main(["generate", "Return a list of", "--recipe", "baseline", "--device", "cpu", *SHORT]) == 0
        before, prompt, text = shown().partition("\x1b[1mReturn a list of\x1b[0m")
    assert prompt and "\x1b[K" not in text, "or the text is gone"
    assert before == ("\r\x1b[K[1/3] attention.cu\r\x1b[K" if is_built else "")


def test_a_server_that_is_up_has_no_progress_on_its_terminal(monkeypatch):
    def run_server(server, started):
        started()
        server.service.worker.progress(1, 3, "attention.cu")
        server._set_up()
        assert shown().endswith("[1/3] attention.cu\r\x1b[K"), "cleared once it is up"
        server._socket.close()

    monkeypatch.setattr("eet_lab.serving.handle.run_server", run_server)
    with on_a_terminal(monkeypatch) as shown:
        assert main(["serve", "--port", "0", "--device", "cpu"]) == 0


def test_a_table_names_recipes_in_the_fewest_words():
    spread = Spread(1.0, 2.0, 3.0)
    whole = ",".join(names_in_all())
    names = ("baseline", "pre_padding,mask_removal", whole, f"{whole},int8_weights")
    where = ("float16", spread, spread, spread, 1, 1.0, 1.0, 1.0, "passed", True, "abc", "a GPU", None, "2", "5", None)
    rows = [Row("gpt2/b1/p4/n4", "eet_lab", name, *where, "2025-01-02T00:00:00+00:00") for name in names]
    rows.append(Row("gpt2/b1/p4/n4", "hf-sdpa", "", *where, "2025-01-02T00:00:00+00:00"))
    lines = [line.split()[0] for line in model_table(rows).splitlines()[4:9]]
    assert lines == ["baseline", "pre_padding,mask_removal", "all", "all,int8_weights", "hf-sdpa"]
