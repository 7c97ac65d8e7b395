"""The house's floors: a module imports only from its own floor or from below; some libraries have one home."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. A name covers its sub-modules unless they are named themselves; the longest name counts.
FLOORS = (
    (
        "eet_lab.codec",
        "eet_lab.collector",
        "eet_lab.devices",
        "eet_lab.errors",
        "eet_lab.files",
        "eet_lab.imports",
        "eet_lab.knobs",
        "eet_lab.limits",
        "eet_lab.naming",
        "eet_lab.paths",
        "eet_lab.progress",
        "eet_lab.ray_here",
        "eet_lab.threads",
        "eet_lab.words",
    ),
    ("eet_lab.ops", "eet_lab.memory", "eet_lab.scheduling", "eet_lab.monitor"),
    ("eet_lab.models",),
    ("eet_lab.parts",),
    ("eet_lab.engine",),
    (
        "eet_lab.encoding",
        "eet_lab.training",
        "eet_lab.definition",
        "eet_lab.labels",
        "eet_lab.losses",
        "eet_lab.pipelines",
        "eet_lab.technique",
        "eet_lab.texts",
    ),
    ("eet_lab.techniques",),
    ("eet_lab.bench", "eet_lab.serving"),
    ("eet_lab.figures",),
    ("eet_lab.workbench",),
    ("eet_lab.lessons", "eet_lab.cli", "eet_lab.__main__", "eet_lab.commands", "eet_lab.doctor", "eet_lab.lab"),
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

# What the package's techniques are is known one floor up; they register themselves on first use.
LIFTS = {("eet_lab.technique", "eet_lab.techniques")}

SERVING = ("eet_lab.serving",)
PAGES = ("eet_lab.figures", "eet_lab.workbench", "eet_lab.lessons")
HOMES = {
    "ipywidgets": PAGES,
    "anywidget": PAGES,
    "plotly": PAGES,
    "IPython": PAGES,
    "pynvml": ("eet_lab.monitor",),
    "fastapi": SERVING,
    "httptools": SERVING,
    "prometheus_client": SERVING,
    "pydantic": SERVING,
    "ray": ("eet_lab.ray_here", "eet_lab.serving.cluster", "eet_lab.training.launch"),
    "starlette": SERVING,
    "uvicorn": SERVING,
}
STRANGERS = {
    "eet_lab.engine": "eet_lab.technique",
    "eet_lab.technique": "eet_lab.engine",
    "eet_lab.techniques": "eet_lab.engine",
}
"""Who knows nothing of whom, not even for a type checker: engines and techniques both know Parts."""
TORCH_FREE = ("eet_lab.memory", "eet_lab.scheduling")


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def level_of(module: str) -> int | None:
    """The floor of a module; None for the package itself, whose names are looked up lazily."""
    homes = [name for name in LEVEL if within(module, name)]
    return LEVEL[max(homes, key=len)] if homes else None


def asks_for_types(test: ast.expr) -> bool:
    return any(getattr(node, "id", getattr(node, "attr", "")) == "TYPE_CHECKING" for node in ast.walk(test))


def imports_of(tree: ast.Module, module: str, is_package: bool, typing: bool = False) -> set[str]:
    """Every module that is imported anywhere in the file; with `typing` also those that only type checkers see."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if not typing and isinstance(node, ast.If) and asks_for_types(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            # `from package import name`: the name may be a module of its own.
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {name for name in names if is_module(name)} or {source}
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def violations(module: str, imported: set[str]) -> list[str]:
    """What this module must not import, with the reason."""
    level, wrong = level_of(module), []
    for name in sorted(imported):
        above = level_of(name)
        if level is not None and above is not None and above > level and (module, name) not in LIFTS:
            wrong.append(f"{module} is below {name}")
        for library, homes in HOMES.items():
            if within(name, library) and not any(within(module, home) for home in homes):
                wrong.append(f"{module} imports {library}, whose home is {', '.join(homes)}")
        if within(name, "torch") and any(within(module, free) for free in TORCH_FREE):
            wrong.append(f"{module} must not import torch")
    return wrong


def acquaintances(module: str, imported: set[str]) -> list[str]:
    """What this module imports of those whom it must not know."""
    known = [other for name, other in STRANGERS.items() if within(module, name)]
    return [name for name in sorted(imported) for other in known if within(name, other)]


def modules() -> list[tuple[str, Path]]:
    files = sorted((ROOT / "eet_lab").rglob("*.py"))
    return [(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path) for path in files]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_downwards(module, path):
    tree, is_package = ast.parse(path.read_text()), path.name == "__init__.py"
    assert not violations(module, imports_of(tree, module, is_package))
    assert not acquaintances(module, imports_of(tree, module, is_package, typing=True))
    assert module == "eet_lab" or level_of(module) is not None, f"{module} has no floor yet: add it to FLOORS"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("eet_lab.ops.cuda", "from eet_lab.parts import Parts", True),
        ("eet_lab.ops.cuda", "from eet_lab.ops import reference", False),
        ("eet_lab.ops.cuda", "def f():\n    import eet_lab.bench", True),
        ("eet_lab.parts.memory", "from eet_lab.engine import engine", True),
        ("eet_lab.parts.memory", "from ..technique import Recipe", True),
        ("eet_lab.parts.memory", "if TYPE_CHECKING:\n    from eet_lab.technique import Recipe", False),
        ("eet_lab.memory.planners", "import torch.nn", True),
        ("eet_lab.models.loading", "import torch", False),
        ("eet_lab.bench.results", "import plotly.graph_objects as go", True),
        ("eet_lab.bench.results", "import pynvml", True),
        ("eet_lab.workbench.live", "import anywidget", False),
        ("eet_lab.technique", "import eet_lab.techniques", False),
        ("eet_lab.techniques.pre_padding", "from eet_lab.bench import compare", True),
    ],
)
def test_the_check_itself(module, source, wrong):
    assert bool(violations(module, imports_of(ast.parse(source), module, is_package=False))) is wrong


def test_engines_and_techniques_do_not_know_each_other_even_for_a_type_checker():
    hidden = "if TYPE_CHECKING:\n    from eet_lab.engine.engine import Engine"
    assert acquaintances("eet_lab.techniques.own", imports_of(ast.parse(hidden), "eet_lab.techniques.own", False, True))
    assert not acquaintances(
        "eet_lab.bench.compare", imports_of(ast.parse(hidden), "eet_lab.bench.compare", False, True)
    )


def test_rounding_up_to_a_multiple_has_one_home() -> None:
    again = re.compile(r"(-\(-|ceil\().+ //? ([\w.]+)\) \* \2\b")
    assert [name for name, path in modules() if again.search(path.read_text())] == ["eet_lab.memory.lifetimes"]
