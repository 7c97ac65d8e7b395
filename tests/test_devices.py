"""Which device: its name, its kind, and that what runs on a GPU runs with that one as torch's present GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import eet_lab
from eet_lab import devices
from eet_lab.bench import cost, timing
from eet_lab.bench import ops as op_race
from eet_lab.bench.op_workloads import OpWorkload
from eet_lab.bench.ops import benchmark_op
from eet_lab.cli import main
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError
from eet_lab.labels import short_form
from eet_lab.models import Model, load, weights
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import sources
from eet_lab.technique import everything
from eet_lab.workbench import jobs
from eet_lab.workbench import live as charts
from eet_lab.workbench.choices import State
from eet_lab.workbench.views import bar

UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")


class Gpus:
    """GPUs that are not there, as torch tells of them; `now` is the present one of the thread."""

    def __init__(self, monkeypatch, count: int) -> None:
        self.now = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda at=None: f"NVIDIA H{100 * (self.of(at) + 1)}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at=None: (9, 0))
        properties = lambda at=None: SimpleNamespace(uuid=UUIDS[self.of(at)])  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "device", self.within)

    def of(self, at) -> int:
        at = torch.device("cuda", at) if isinstance(at, int) else torch.device(at or "cuda")
        return self.now if at.index is None else at.index

    @contextmanager
    def within(self, at):
        before, self.now = self.now, self.of(at)
        yield
        self.now = before


@pytest.fixture
def gpus(monkeypatch) -> Gpus:
    return Gpus(monkeypatch, 2)


@pytest.fixture
def one_gpu(monkeypatch) -> Gpus:
    return Gpus(monkeypatch, 1)


def on_gpu(number: int) -> Model:
    """A model that says that it lies there."""
    decoder = SimpleNamespace(device=torch.device("cuda", number))
    return Model("m", "m", decoder, None, "live")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cuda", "cuda"),
        ("cuda:0", "cuda:0"),
        ("cuda:1", "cuda:1"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cuda"), "cuda"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
        (None, "cuda"),
    ],
)
def test_a_device_has_one_name(gpus, given, name):
    assert devices.checked_device(given) == name
    assert devices.kind_of(name) == name[:4].rstrip(":")


def test_the_only_gpu_is_cuda(one_gpu):
    assert devices.checked_device("cuda:0") == "cuda" == devices.chosen("cuda:0")
    assert devices.choices() == ["cuda", "cpu"]


def test_the_cpu_has_no_number_but_0():
    for given in ("cpu:3", torch.device("cpu", 1)):
        with pytest.raises(ModelError, match="device is 'cpu:[13]', but all cores are one device; write 'cpu'"):
            load("demo", device=given)


def test_among_several_the_present_one_is_chosen(gpus):
    assert devices.choices() == ["cuda:0", "cuda:1", "cpu"]
    assert devices.chosen("cuda") == "cuda:0" and devices.chosen("cpu") == "cpu"
    gpus.now = 1
    assert devices.chosen(None) == "cuda:1"


@pytest.mark.parametrize("given", ["gpu", "cuda:x", "cuda:-1", "cuda:", "cuda:1:1", 0, "mps", "CUDA", ["cuda"]])
def test_what_is_no_device_is_refused(gpus, given):
    with pytest.raises(ModelError, match=r"device is .*, but it must be 'cuda', 'cuda:1' \(a GPU by its number\) or"):
        load("demo", device=given)


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(gpus, monkeypatch):
    with pytest.raises(ModelError, match=r"'cuda:2', but torch sees 2 GPUs here: cuda:0 \(NVIDIA H100\), cuda:1 \(NV"):
        load("demo", device="cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match=r"'cuda:1', but torch sees 1 GPU here: cuda:0 \(NVIDIA H100\)\. Choose"):
        eet_lab.Workbench(device=torch.device("cuda:1"))


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda:0")])
@pytest.mark.parametrize("work", [lambda at: load("demo", device=at), lambda at: eet_lab.Workbench(device=at)])
def test_without_a_gpu_the_error_is_that_of_cuda(monkeypatch, device, work):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=f"device is '{device}', but torch sees no NVIDIA GPU here; use device='cpu'"):
        work(device)


def test_the_command_line_takes_the_same_names(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["generate", "a"], ["compare"], ["bench", "demo/b1/p2/n2"], ["bench", "op:norm_linear/t1/n96/c64"]):
        assert main([*words, "--device", "cuda:1"]) == 2
        assert "device is 'cuda:1', but torch sees no NVIDIA GPU here" in capsys.readouterr().err
        assert main([*words, "--device", "gpu"]) == 2
        assert "device is 'gpu', but it must be" in capsys.readouterr().err
    assert main(["techniques", "--device", "cuda"]) == 0  # what a GPU would do can be asked anywhere
    assert main(["techniques", "--device", "cuda:1"]) == 2


def test_weights_go_to_the_gpu_that_was_named(gpus, monkeypatch):
    seen = []
    monkeypatch.setattr(weights, "placed", lambda decoder, device, dtype: seen.append((device, dtype)) or decoder)
    monkeypatch.setattr("eet_lab.models.values.check_finite", lambda *args: None)
    load("demo", device=torch.device("cuda:1"))
    load("demo", device="cuda")
    assert seen == [(torch.device("cuda:1"), torch.float16), (torch.device("cuda"), torch.float16)]
    drawn = load("demo").decoder
    seen.clear()
    monkeypatch.setattr(weights, "random_decoder", lambda config, seed, device, dtype: seen.append(device) or drawn)
    load("gpt2", device="cuda:1")
    assert seen[0] == torch.device("cuda:1")


def test_a_model_tells_the_kind(gpus):
    assert on_gpu(1).device == "cuda"


def test_functions_of_a_model_run_on_its_gpu(gpus):
    assert on_its_device(lambda model: gpus.now)(on_gpu(1)) == 1
    assert gpus.now == 0


def test_an_engine_runs_on_its_models_gpu(gpus, tiny, monkeypatch):
    """A model's device cannot be faked, so the engine's own is."""
    engine, seen = Engine(tiny.decoder), []
    monkeypatch.setattr(type(tiny.decoder), "device", property(lambda self: torch.device("cuda:1")))
    for name in ("_generate", "_free"):
        monkeypatch.setattr(engine, name, lambda *args: seen.append(gpus.now))
    monkeypatch.setattr(engine, "prepare", lambda **how: seen.append(gpus.now))
    engine.generate([[1]], Settings(2))
    engine.close()
    assert seen == [1, 1, 1] and gpus.now == 0
    monkeypatch.setattr("eet_lab.ops.native.prepare", lambda *args, **options: seen.append(gpus.now))
    monkeypatch.setattr("eet_lab.ops.native.loaded", lambda name: SimpleNamespace(path=name))
    parts = SimpleNamespace(ops=SimpleNamespace(kernels=("linear",)))
    fake: Any = SimpleNamespace(model=tiny.decoder, parts=parts, libraries=())
    assert [Engine.prepare(fake), Engine.prepare(fake)] == [True, False], "the second time nothing is loaded"
    assert seen[3:] == [1, 1], "kernels are built for that GPU"


def test_an_op_is_raced_on_the_gpu_that_was_named(gpus, monkeypatch):
    seen = []

    def available(workload, names, device):
        seen.append((gpus.now, device))
        return [], ["none"]

    monkeypatch.setattr(op_race, "_available", available)
    for device in ("cuda:1", "cuda"):
        benchmark_op(OpWorkload.parse("op:norm_linear/t1/n96/c64")[0], device=device)
    assert seen == [(1, "cuda"), (0, "cuda")]


def test_the_ceiling_is_measured_once_for_each_gpu(gpus):
    asked = []
    rate = devices.once_per_device(lambda device: asked.append((device, gpus.now)) or float(len(asked)))
    assert [rate("cuda"), rate("cuda"), rate("cpu"), rate("cpu")] == [1.0, 1.0, 2.0, 2.0]
    with devices.present("cuda:1"):
        assert rate("cuda") == 3.0 == rate("cuda")
    for function in (cost.streaming_gb_per_s, cost.launch_cost):
        assert function.__closure__ and "known" in function.__code__.co_freevars


def test_counters_are_those_of_the_named_gpu(gpus, monkeypatch):
    monkeypatch.setattr("eet_lab.monitor.nvml.NvmlSource", lambda uuid: uuid)
    assert sources.open_source("cuda:1") == UUIDS[1] and sources.open_source("cuda") == UUIDS[0]
    with devices.present("cuda:1"):
        assert sources.open_source("cuda") == UUIDS[1]


def test_the_charts_watch_the_named_gpu(gpus, monkeypatch):
    opened, samplers = [], []
    source = SimpleNamespace(name="nvml", label="NVIDIA H200 (NVML)")
    monkeypatch.setattr(charts, "open_source", lambda name: opened.append(name) or source)
    for what in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, what, lambda at=None: 10 * gpus.of(at))
    sampler = SimpleNamespace(source=source, since=lambda seen=0: ([], 0), close=lambda: None)
    monkeypatch.setattr(charts, "Sampler", lambda source, hz, probes: samplers.append(probes) or sampler)
    shown = []
    live = SimpleNamespace(watch=lambda on_gpu, label, counters: shown.append((on_gpu, label)))
    charts.Device(live, {}, "cuda:1")  # type: ignore[arg-type]
    assert opened == ["cuda:1"] and shown == [(True, "NVIDIA H200 (NVML)")]
    assert {name: probe() for name, probe in samplers[0].items()} == {
        "torch_allocated_bytes": 10.0,
        "torch_reserved_bytes": 10.0,
    }


def test_the_workbench_judges_by_kind_on_the_named_gpu(gpus, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "eet_lab.workbench.choices.obstacle", lambda t, device, config: asked.append((device, gpus.now))
    )
    state = State(device="cuda:1")
    state.choose(everything("cpu"))
    state.settle()
    state.blocked("cuda_graphs")
    assert set(asked) == {("cuda", 1)}
    assert state.recipe_label() == State(device="cuda", chosen=state.chosen).recipe_label()


def test_a_recipe_is_judged_by_the_devices_kind(gpus, monkeypatch):
    monkeypatch.setattr("eet_lab.ops.native.available", lambda device: None)
    assert everything("cuda:1") == everything("cuda") != everything("cpu")
    ours = str(everything("cuda:1")), str(everything("cuda").check("cuda:1"))
    assert short_form(ours[0], "cuda:1") == "all" == short_form(ours[1], "cuda")


def test_the_bar_names_each_gpu(gpus):
    wish = SimpleNamespace(live=None, asking_path=False, failed=None, failed_name="")
    shown = bar.header(State(device="cuda:1"), devices.choices(), wish, None, False)
    assert shown["devices"] == [
        {"value": "cuda:0", "label": "GPU 0"},
        {"value": "cuda:1", "label": "GPU 1"},
        {"value": "cpu", "label": "CPU"},
    ]
    assert bar.banner("cuda:1", devices.choices(), "", False) is None
    assert "Choose the GPU above" in bar.banner("cpu", devices.choices(), "", False)["text"]
    assert "no NVIDIA GPU" in bar.banner("cpu", ["cpu"], "", False)["text"]


def test_the_engine_threads_jobs_run_on_the_models_gpu(gpus):
    work = jobs.undisturbed(on_gpu(1), lambda cancel: True, lambda feed, cancel: gpus.now)
    assert work(SimpleNamespace(progress=lambda *told: None), None) == 1 and gpus.now == 0  # type: ignore[arg-type]


def test_a_time_is_taken_by_the_clock_of_the_kind(gpus, monkeypatch):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda later: 7.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    assert timing.took_ms(lambda: None, devices.kind_of("cuda:1")) == 7.0
