"""The command line as a user types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eet_lab import cli
from eet_lab.commands import COMMANDS
from eet_lab.doctor import Check


def test_python_m_and_the_script_are_the_same():
    words = [[sys.executable, "-m", "eet_lab"], [str(Path(sys.executable).parent / "eet-lab")]]
    outputs = [subprocess.run([*w, "--help"], capture_output=True, text=True, check=True).stdout for w in words]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_teaches(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command.name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"eet-lab {command.name}" in command.guide, "the guide shows an example"
    assert command.guide.strip() in out


def test_help_lists_every_command_and_imports_no_torch():
    code = (
        "import sys; from eet_lab import cli; text = cli.build_parser().format_help(); print(text)\n"
        "assert not {'torch', 'transformers', 'ipywidgets', 'plotly'} & set(sys.modules), 'help must be quick'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert re.search(rf"^\s+{command.name}\s", done.stdout, re.MULTILINE)


def test_without_a_command_it_shows_its_guide(capsys):
    assert cli.main([]) == 0
    assert capsys.readouterr().out == cli.build_parser().format_help()


def test_unknown_command_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["docter"])
    assert ended.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "--promt=x"], "compare: error: unrecognized arguments: --promt=x. Did you mean '--prompt'?"),
        (["doctor", "it"], "eet-lab doctor: error: unrecognized arguments: it\n"),
        (["generate", "--prompt", "a list"], "a prompt is typed without --prompt: eet-lab generate 'a list'\n"),
        (["generate", "--prompt=x", "--recipe", "all"], "without --prompt: eet-lab generate x\n"),
        (["--nothing"], "eet-lab: error: unrecognized arguments: --nothing\n"),
    ],
)
def test_an_unknown_word_is_told_by_its_command(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate hi --temperature -1", "--temperature is -1.0, but it must be"),
        ("compare --seed -1", "--seed is -1, but it must be"),
        ("simulate --rate 0", "--rate is 0.0, but it must be"),
        ("simulate --new-tokens 0", "--new-tokens: the shortest length is 0, but it must be"),
        ("train --model demo --steps 0", "--steps is 0, but it must be"),
        ("train vit-tiny --steps 0", "--steps is 0, but it must be"),
        ("techniques --device gpu9", "--device is 'gpu9', but it must be"),
    ],
)
def test_an_error_names_an_option_as_it_was_typed(words, says, capsys):
    assert cli.main(words.split()) == 2 and f"eet-lab: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("warn", 0), ("fail", 1)])
def test_doctor_exit_code(monkeypatch, capsys, tmp_path, status, code):
    monkeypatch.setattr("eet_lab.doctor.diagnose", lambda: [Check("thing", status, "found", "type this")])
    assert cli.main(["doctor", "--html", str(tmp_path / "page.html")]) == code
    assert "type this" in capsys.readouterr().out
    assert "type this" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("module", ["argparse", "typing", "dataclasses", "json"])
def test_ctrl_c_ends_the_program_while_it_starts(tmp_path, module):
    """It takes 0.2 s to import its own commands."""
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, os, signal\n"
        "inner = builtins.__import__\n"
        "def look(name, *more, **words):\n"
        f"    if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return inner(name, *more, **words)\n"
        "builtins.__import__ = look\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])}
    script = "import re, sys; from eet_lab.__main__ import main; sys.exit(main())"  # as pip writes it
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("swallow", [False, True])
def test_ctrl_c_ends_a_command_whatever_it_is_importing(tmp_path, swallow):
    """Libraries catch what their own imports raise, KeyboardInterrupt with it: torch did so in 4 of 18 tries."""
    inner = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
    slow = f"try:\n    {inner}\nexcept BaseException:\n    pass\n" if swallow else inner
    (tmp_path / "torch.py").write_text(slow)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])}
    command = [sys.executable, "-m", "eet_lab", "generate", "x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")
