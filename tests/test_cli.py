"""The command line as a user types it, and the JupyterLab that it starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from eet_lab import cli, lab_server
from eet_lab.commands import COMMANDS
from eet_lab.doctor import Check
from eet_lab.errors import SetupError
from eet_lab.paths import notebooks_dir


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


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("warn", 0), ("fail", 1)])
def test_doctor_exit_code(monkeypatch, capsys, tmp_path, status, code):
    monkeypatch.setattr("eet_lab.doctor.diagnose", lambda: [Check("thing", status, "found", "type this")])
    assert cli.main(["doctor", "--html", str(tmp_path / "page.html")]) == code
    assert "type this" in capsys.readouterr().out
    assert "type this" in (tmp_path / "page.html").read_text()


# --- lab


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """Two notebooks as an installed package would ship them."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "a.ipynb").write_text("shipped a")
    (folder / "workbench.ipynb").write_text("shipped workbench")
    monkeypatch.setattr("eet_lab.paths.notebooks_dir", lambda: folder)
    monkeypatch.setattr("eet_lab.paths.is_clone", lambda: False)
    return folder


def test_notebooks_are_copied_and_never_overwritten(shipped, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.ipynb").write_text("my work")
    assert lab_server.prepare(mine) == (mine, mine)
    assert (mine / "a.ipynb").read_text() == "my work"
    assert (mine / "workbench.ipynb").read_text() == "shipped workbench"
    assert f"Kept your {mine / 'a.ipynb'}" in capsys.readouterr().out
    lab_server.prepare(mine)
    assert "Copied" not in capsys.readouterr().out


def test_notebooks_go_into_the_current_folder(shipped, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lab_server.prepare()
    assert (tmp_path / "here" / "workbench.ipynb").exists()


def test_a_folder_that_cannot_be_written_to(shipped, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["lab", "--dir", str(tmp_path / "file")]) == 2
    assert "--dir FOLDER" in capsys.readouterr().err


def test_a_clone_uses_its_own_notebooks(monkeypatch):
    monkeypatch.setattr("eet_lab.paths.is_clone", lambda: True)
    root, notebooks = lab_server.prepare()
    assert notebooks == notebooks_dir()
    assert (root / "pyproject.toml").is_file()


def test_a_taken_port_is_an_error_and_the_default_goes_on():
    with socket.socket() as taken:
        taken.bind((lab_server.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"Port {port} .* is taken"):
            lab_server.choose_port(port)
    assert lab_server.choose_port() >= lab_server.FIRST_PORT
    with pytest.raises(SetupError, match="does not exist"):
        lab_server.choose_port(70000)


def test_a_missing_notebook_names_those_there_are(shipped, tmp_path, capsys):
    assert cli.main(["lab", "--dir", str(tmp_path / "x"), "--notebook", "workbnch"]) == 2
    error = capsys.readouterr().err
    assert "Did you mean 'workbench.ipynb'" in error
    assert "a.ipynb, workbench.ipynb" in error
    assert not (tmp_path / "x").exists(), "nothing was copied"


def test_a_notebook_goes_by_its_name_alone(shipped, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(lab_server, "serve", lambda root, notebook, *rest, **options: opened.append(notebook) or 0)
    mine = tmp_path / "x"
    (mine / "sub").mkdir(parents=True)
    (mine / "sub" / "own.ipynb").write_text("{}")
    for wanted in ("a", "a.ipynb", "sub/own"):
        assert cli.main(["lab", "--dir", str(mine), "--notebook", wanted]) == 0
    assert opened == [mine / "a.ipynb", mine / "a.ipynb", mine / "sub" / "own.ipynb"]
    (tmp_path / "outside.ipynb").write_text("{}")
    with pytest.raises(SetupError, match="no ../outside.ipynb"):
        lab_server.notebook_name("../outside", mine)


def test_root_gets_allow_root_and_others_do_not(monkeypatch, tmp_path):
    for uid, expected in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        words = lab_server.server_command(tmp_path, tmp_path / "a b.ipynb", 8888, browser=False)
        assert ("--allow-root" in words) is expected
    assert "--ServerApp.ip=127.0.0.1" in words
    assert "--LabApp.default_url=/lab/tree/a%20b.ipynb" in words
    assert "--no-browser" in words


def test_display(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not lab_server.has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert lab_server.has_display()


def test_an_error_on_our_side_leaves_no_server_behind():
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(BrokenPipeError), lab_server._signals_go_to(server):
        raise BrokenPipeError
    assert server.poll() is not None
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.slow
def test_lab_serves_the_notebook_behind_its_token_and_stops(tmp_path):
    (tmp_path / "nb").mkdir()
    (tmp_path / "nb" / "x.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    home = {
        "HOME": str(tmp_path),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "c"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "r"),
    }
    env = {name: value for name, value in os.environ.items() if "DISPLAY" not in name} | home
    words = [sys.executable, "-m", "eet_lab", "lab", "--dir", str(tmp_path / "nb"), "--notebook", "x.ipynb"]
    log = tmp_path / "log"
    with log.open("w") as out:
        lab = subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)(\S+)\?token=(\w+)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            assert lab.poll() is None, log.read_text()
            time.sleep(0.1)
        port, path, token = found.groups()
        assert path == "/lab/tree/x.ipynb"
        assert re.search(rf"ssh -N -L {port}:127\.0\.0\.1:{port} \S+@\S+", log.read_text())
        contents = f"http://127.0.0.1:{port}/api/contents/x.ipynb"
        with urllib.request.urlopen(f"{contents}?token={token}", timeout=10) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(contents, timeout=10)
        assert refused.value.code == 403
        family = [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(recursive=True)]
        assert len(family) > 1
        assert not [process for process in family if token in " ".join(process.cmdline())], "others can read these"
    finally:
        lab.send_signal(signal.SIGTERM)
        lab.wait(30)
    assert lab_server._is_free(int(port)), "the server ended with its launcher"
