"""What is shipped, what is pinned, and that the files which say the same thing agree."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from eet_lab.doctor.software import DISTRIBUTIONS

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def load_tool(name: str):
    """A script of tools/, imported under its own name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def requirements(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for x in extras for line in PROJECT["optional-dependencies"][x])]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines) if r.name != PROJECT["name"]}


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(r.name): r for r in (Requirement(line) for line in lines if line and line[0] != "#")}


# --- versions agree


def test_every_dependency_is_pinned_within_its_range():
    pinned = pins()
    assert str(pinned["torch"]) == "torch==2.13.0"
    # This one comes at the version that torch itself asks for.
    free = {"nvidia-cuda-runtime"}
    wanted = requirements(*PROJECT["optional-dependencies"])
    assert set(wanted) - free <= set(pinned), f"not in constraints.txt: {set(wanted) - free - set(pinned)}"
    for name, pin in pinned.items():
        [spec] = pin.specifier
        assert spec.operator == "==", pin
        if name in wanted:
            assert wanted[name].specifier.contains(spec.version, prereleases=True), f"{pin} against {wanted[name]}"


def test_all_that_setup_installed_is_pinned():
    """What tools/pins.py would write is what is there: every distribution is listed, with its version."""
    if not (Path(sys.prefix) / "eet-lab-stamp.json").exists():
        pytest.skip("this environment was not made by tools/setup_env.py")
    if list(Path(sys.prefix).glob("lib/*/site-packages/kept-torch.pth")):
        pytest.skip("a kept torch brings versions of its own")
    tool = load_tool("pins")
    here, pinned = tool.installed(), {name: next(iter(pin.specifier)).version for name, pin in pins().items()}
    free = {name for name in here if name.startswith(tool.FROM_TORCH)} | {"pip", "eet-lab"}
    assert {name: version for name, version in here.items() if name not in {*free, *pinned}} == {}, "not pinned"
    others = {name: (version, pinned[name]) for name, version in here.items() if pinned.get(name, version) != version}
    assert others == {}, "installed in another version than the pinned one"


def test_renewing_the_pins_keeps_their_order_and_comments():
    tool = load_tool("pins")
    text = "# why\nnumpy==1\nnvidia-nvvm==13\nA_b==2\n\n# what these bring along\ngone==1\nold==2\n"
    here = {"numpy": "2", "old": "3", "a-b": "3", "new": "1", "nvidia-cublas": "13", "triton": "3", "pip": "1"}
    expected = "# why\nnumpy==2\nnvidia-nvvm==13\na-b==3\n\n# what these bring along\nnew==1\nold==3\n"
    assert tool.renewed(text, here) == expected
    assert tool.renewed(expected, here) == expected
    text = (ROOT / "constraints.txt").read_text()
    assert tool.renewed(text, {name: next(iter(pin.specifier)).version for name, pin in pins().items()}) == text


def imported(*folders: str) -> dict[str, set[str]]:
    """The modules of others that are imported anywhere in `folders`, with the files that do."""
    found: dict[str, set[str]] = {}
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    known = {"eet_lab", *(path.stem for path in paths), *(path.parent.name for path in paths), *sys.stdlib_module_names}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.partition(".")[0] for name in names} - known:
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_every_import_is_declared():
    optional = {"ortools": "optimal", "ray": "ray", "voila": "app"}
    optional |= dict.fromkeys(
        ("fastapi", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn"), "serve"
    )
    for module, files in imported("eet_lab").items():
        declared = requirements(optional[module]) if module in optional else requirements()
        name = canonicalize_name(DISTRIBUTIONS.get(module, module))
        assert name in declared, f"{module} is imported by {files}, and no dependency of pyproject.toml"


def test_every_import_of_a_script_is_declared():
    declared = requirements(*PROJECT["optional-dependencies"])
    for module, files in imported("tools", "benchmarks").items():
        name = canonicalize_name({**DISTRIBUTIONS, "PIL": "pillow"}.get(module, module))
        assert name in declared, f"{module} is imported by {files}, and in no extra of pyproject.toml"


def test_environment_yml_is_in_step_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    [pip] = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    python = SpecifierSet(next(entry for entry in conda if entry.startswith("python ")).removeprefix("python "))
    tried = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert [v for v in (f"3.{minor}" for minor in range(8, 30)) if v in python] == tried
    assert SpecifierSet(PROJECT["requires-python"]).contains(tried[0])
    surplus = {entry.split()[0] for entry in conda} - {"python", "pip"} - set(requirements())
    assert not surplus, f"in environment.yml but no dependency of pyproject.toml: {surplus}"
    assert pip[0] == "-c constraints.txt"
    [installed] = pip[1:]
    extras = re.fullmatch(r"-e \.\[([\w,]+)\]", installed)
    assert extras, installed
    unknown = set(extras[1].split(",")) - set(PROJECT["optional-dependencies"])
    assert not unknown, f"extras that pyproject.toml lacks: {unknown}"


def test_python_versions_are_the_same_everywhere():
    from eet_lab.doctor.software import TRIED

    tried = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert (".".join(map(str, TRIED[0])), ".".join(map(str, TRIED[1]))) == (tried[0], tried[-1])
    script = (ROOT / "tools" / "find_python.sh").read_text()
    assert f"newest={TRIED[1][1]}" in script
    assert f"3.{TRIED[0][1]} to 3.{TRIED[1][1]}" in script


def test_version_is_stated_once_in_effect():
    init = ast.parse((ROOT / "eet_lab" / "__init__.py").read_text())
    versions = [
        ast.literal_eval(node.value)
        for node in init.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    ]
    assert all(version == PROJECT["version"] for version in versions)


def test_licence_is_apache_in_full():
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert PROJECT["license"] == "Apache-2.0"


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """Names of the files in a wheel that is built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(words, check=True, env={**os.environ, "PIP_NO_INDEX": "1"}, timeout=110)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert archive.read("eet_lab/constraints.txt") == (ROOT / "constraints.txt").read_bytes(), (
            "as the root links to"
        )
        [metadata] = [name for name in names if name.endswith("/METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    return names


@pytest.mark.slow
def test_wheel_has_sources_notebooks_and_data(wheel):
    for top, inside in (("csrc", "_csrc"), ("notebooks", "_notebooks")):
        files = [path for path in (ROOT / top).rglob("*") if path.is_file() and ".ipynb_checkpoints" not in path.parts]
        missing = {f"eet_lab/{inside}/{path.relative_to(ROOT / top)}" for path in files} - wheel
        assert not missing
    assert "eet_lab/_benchmarks/h200.jsonl" in wheel, "lesson 4 shows its rows"
    assert "eet_lab/_benchmarks/h100-policies-bert-base.json" in wheel, "lesson 7 shows what it found"
    assert "eet_lab/_benchmarks/h100-fusion-gpt2.json" in wheel, "and lesson 8 this"
    hidden = {"__pycache__", ".ipynb_checkpoints"}
    files = [path for path in (ROOT / "eet_lab").rglob("*") if path.is_file() and not hidden & set(path.parts)]
    missing = {str(path.relative_to(ROOT)) for path in files} - wheel
    assert not missing, "code and bundled data (models/demo, recorded) must all be in"


@pytest.mark.slow
def test_wheel_has_nothing_else(wheel):
    strange = [name for name in wheel if not re.match(r"eet_lab(-[^/]*\.dist-info)?/", name)]
    assert not strange
    assert not [name for name in wheel if "__pycache__" in name or ".ipynb_checkpoints" in name]


@pytest.mark.parametrize("installed", [False, True])
def test_paths_are_found_in_a_clone_and_in_an_installed_package(tmp_path, installed):
    package = tmp_path / "eet_lab"
    package.mkdir()
    for name in ("__init__.py", "collector.py", "imports.py", "paths.py", "errors.py"):
        (package / name).write_bytes((ROOT / "eet_lab" / name).read_bytes())
    (tmp_path / "pyproject.toml").write_text("")
    for name in ("csrc", "notebooks", "benchmarks"):
        (package / f"_{name}" if installed else tmp_path / name).mkdir()
    code = "from eet_lab.paths import *; print(csrc_dir(), notebooks_dir(), benchmarks_dir(), is_clone())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    names = ("csrc", "notebooks", "benchmarks")
    expected = [package / f"_{name}" if installed else tmp_path / name for name in names]
    assert done.stdout.split() == [*map(str, expected), str(not installed)]


# --- the set-up script


@pytest.fixture
def setup_env():
    return load_tool("setup_env")


def test_a_kept_torch_takes_the_place_of_the_pin(setup_env):
    text = "# torch==1 in a comment\nnumpy==2.4.6\ntorch==2.13.0\ntorchtitan==1.0\n"
    torch = setup_env.Torch("2.7.1+cu126", "/site", "2.7.1+cu126")
    assert setup_env.constrain(text, torch) == text.replace("torch==2.13.0", "torch==2.7.1+cu126")
    assert setup_env.constrain(text, None) == text


def test_a_kept_torch_keeps_the_versions_that_it_requires(setup_env):
    text = "torch==2.13.0\nsympy==1.14.0\ntyping-extensions==4.16.0\nnumpy==2.4.6\n"
    torch = setup_env.Torch("2.6.0+cu124", "/site", "2.6.0", ("sympy", "typing-extensions"))
    assert setup_env.constrain(text, torch) == "torch==2.6.0\nnumpy==2.4.6\n"


@pytest.mark.parametrize(
    ("version", "cuda", "kept"),
    [
        ("2.7.1+cu126", "12.6", True),
        ("2.6.0", "12.4", True),
        ("2.13.0+cpu", None, False),
        ("2.5.1+cu124", "12.4", False),
        ("2.10.0a0+git1", "13.0", True),
    ],
)
def test_only_a_cuda_torch_in_range_is_kept(setup_env, tmp_path, version, cuda, kept):
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    torch.joinpath("__init__.py").write_text(
        f"from types import SimpleNamespace\n__version__ = {version!r}\nversion = SimpleNamespace(cuda={cuda!r})\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    pip = version.partition("+")[0]  # an index may serve it under a shorter version than it has itself
    about = tmp_path / "site" / f"torch-{pip}.dist-info"
    about.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in ("Sympy==1.13.1", "typing_extensions>=4", "x; extra == 'x'"))
    about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {pip}\n{needs}")
    site = str(tmp_path / "site")
    expected = setup_env.Torch(version, site, pip, ("sympy", "typing-extensions")) if kept else None
    assert setup_env.find_torch(python) == expected


def test_a_stamp_makes_the_second_time_quick(setup_env, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "find_torch", lambda python: None)
    monkeypatch.setattr(setup_env, "create_venv", lambda torch: (tmp_path / ".venv").mkdir(exist_ok=True))
    monkeypatch.setattr(setup_env, "runs", lambda python: (tmp_path / ".venv").exists())
    monkeypatch.setattr(setup_env, "install", lambda extras, torch: steps.append(extras))
    monkeypatch.setattr(setup_env, "check", lambda torch: None)
    setup_env.set_up([])
    setup_env.set_up([])
    assert steps == [[]]
    setup_env.set_up(["test"])
    setup_env.set_up([])
    assert steps == [[], ["test"]], "fewer extras need no new installation"
    stamp = json.loads((tmp_path / ".venv" / "eet-lab-stamp.json").read_text())
    monkeypatch.setattr(setup_env, "fingerprint", lambda files: "pyproject.toml changed")
    setup_env.set_up([])
    assert steps[-1] == []
    assert len(steps) == 3
    assert stamp["extras"] == ["test"]


@pytest.mark.parametrize(
    ("log", "hint"),
    [
        ("ERROR: [Errno 28] No space left on device", "pip cache purge"),
        ("NewConnectionError: Failed to establish a new connection", "index cannot be reached"),
        ("ERROR: ResolutionImpossible", "Fix what it names"),
    ],
)
def test_a_failed_installation_says_what_to_do(setup_env, log, hint):
    message = setup_env.explain(f"Collecting x\n{log}\n", Path("install.log"))
    assert hint in message
    assert log in message


GB = 10**9


@pytest.fixture
def disk(setup_env, tmp_path, monkeypatch):
    """`disk(free, torch=...)` is what `check_room` says where so many GB are free and pip would install that torch."""

    def disk(free: float, kept: object = None, torch: str | None = None, says: str | None = None) -> int:
        report = {"install": [{"metadata": {"version": torch}}] if torch else []}
        answer = subprocess.CompletedProcess([], 0, says or json.dumps(report), "")
        monkeypatch.setattr(setup_env, "VENV", tmp_path)
        monkeypatch.setattr(setup_env.subprocess, "run", lambda *words, **options: answer)
        monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: type("Usage", (), {"free": int(free * GB)})())
        return setup_env.check_room(kept, ["pip"])

    return disk


def test_too_little_disk_is_told_before_downloading(disk, setup_env):
    assert disk(9, torch="2.13.0") == 9
    with pytest.raises(setup_env.SetupFailed, match=r"8\.5 GB are free .* 9 GB are needed.*CUDA.* 3 GB will do"):
        disk(8.5, torch="2.13.0")
    assert disk(3, torch="2.13.0+cpu") == 3
    with pytest.raises(setup_env.SetupFailed, match=r"2\.5 GB are free .* 3 GB are needed\. Make room"):
        disk(2.5, torch="2.13.0+cpu")
    assert disk(2) == 2, "torch is installed already"
    assert disk(2, kept=setup_env.Torch("2.7.1", "/site", "2.7.1")) == 2
    with pytest.raises(setup_env.SetupFailed, match=r"1\.9 GB are free .* 2 GB are needed\. Make room"):
        disk(1.9, kept=setup_env.Torch("2.7.1", "/site", "2.7.1"))
    with pytest.raises(setup_env.SetupFailed, match="9 GB are needed"):
        disk(5, says="no network")


def test_a_python_that_is_too_old_is_told_what_to_install(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2"\nexit 1\n')
    old.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(old)}
    done = subprocess.run(["sh", ROOT / "tools" / "find_python.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.9.2" in done.stderr
    assert "apt-get install -y python3.12 python3.12-venv" in done.stderr


def test_chromium_is_skipped_with_a_reason(monkeypatch, capsys):
    chromium = load_tool("chromium")
    monkeypatch.delenv("EET_CHROMIUM", raising=False)
    monkeypatch.setattr(chromium.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(chromium.os, "geteuid", lambda: 1000)
    chromium.main()
    assert "will be skipped: this is not root" in capsys.readouterr().out


def test_the_oldest_versions_are_those_of_the_bounds(monkeypatch):
    """With one number, pip would read "6.*" as the newest 6."""
    setup_env, oldest = load_tool("setup_env"), load_tool("oldest")
    assert oldest.minima()["torch"] == "torch==2.6.*"
    assert all(re.search(r"==\d+(\.\d+)+\.\*$", line) for line in oldest.minima().values()), oldest.minima()
    seen = []
    monkeypatch.setattr(setup_env, "find_torch", lambda python: setup_env.Torch("2.13.0+cu130", "/site", "2.13.0"))
    monkeypatch.setattr(setup_env, "set_up", lambda extras: seen.append(setup_env.find_torch(Path(sys.executable))))
    monkeypatch.setattr(oldest.subprocess, "run", lambda *words, **how: subprocess.CompletedProcess(words, 0))
    assert oldest.test_all([]) == 0
    assert seen == [None], "a newer torch from outside would be tested in place of the oldest"


# --- importing


def test_import_is_quick_and_starts_nothing():
    code = """
import sys, time
start = time.perf_counter()
import eet_lab
seconds = time.perf_counter() - start
loaded = {"ipywidgets", "anywidget", "plotly", "IPython", "pynvml", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
assert seconds < 1.5, seconds
"""
    # The best of three: another test may have the cores.
    tries = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert any(done.returncode == 0 for done in tries), tries[0].stderr
