"""`eet-lab lab` without a browser: notebooks, words, the server's token, signals, and an end whatever happens."""

from __future__ import annotations

import ast
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from eet_lab import cli, paths
from eet_lab.errors import SetupError
from eet_lab.lab import notebooks, ready, serve, server

URL = re.compile(r"http://127\.0\.0\.1:(\d+)(/\S*)\?token=(\w+)")
DISPLAYED = {"output_type": "display_data", "metadata": {}, "data": {ready.VIEW: {"model_id": "1"}}}


@pytest.fixture
def shipped(tmp_path, monkeypatch) -> Path:
    """Two notebooks as an installed package would ship them."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "a.ipynb").write_text(json.dumps({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    (folder / "workbench.ipynb").write_bytes((paths.notebooks_dir() / "workbench.ipynb").read_bytes())
    monkeypatch.setattr("eet_lab.paths.notebooks_dir", lambda: folder)
    monkeypatch.setattr("eet_lab.paths.is_clone", lambda: False)
    return folder


def test_notebooks_are_copied_and_never_overwritten(shipped, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.ipynb").write_text("my work")
    assert notebooks.prepare(mine) == (mine, mine)
    assert (mine / "a.ipynb").read_text() == "my work"
    assert (mine / "workbench.ipynb").read_bytes() == (shipped / "workbench.ipynb").read_bytes()
    assert f"Kept your {mine / 'a.ipynb'}" in capsys.readouterr().out
    notebooks.prepare(mine)
    assert "Copied" not in capsys.readouterr().out


def test_a_copy_that_was_only_run_is_the_shipped_one(shipped, tmp_path, capsys):
    mine = tmp_path / "mine"
    notebooks.prepare(mine)
    run = json.loads((mine / "workbench.ipynb").read_text())
    run["cells"][0]["outputs"] = [DISPLAYED]
    (mine / "workbench.ipynb").write_text(json.dumps(run))
    capsys.readouterr()
    notebooks.prepare(mine)
    assert "Kept your" not in capsys.readouterr().out


def test_notebooks_go_into_the_current_folder(shipped, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    notebooks.prepare()
    assert (tmp_path / "here" / "workbench.ipynb").exists()


def test_a_folder_that_cannot_be_written_to(shipped, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["lab", "--dir", str(tmp_path / "file")]) == 2
    assert "--dir FOLDER" in capsys.readouterr().err


def test_a_clone_uses_its_own_notebooks(monkeypatch):
    monkeypatch.setattr("eet_lab.paths.is_clone", lambda: True)
    root, folder = notebooks.prepare()
    assert folder == paths.notebooks_dir()
    assert (root / "pyproject.toml").is_file()


def test_a_clones_notebooks_are_opened_as_copies_that_follow_them_until_they_are_edited(shipped, tmp_path, capsys):
    original = shipped / "workbench.ipynb"
    before, root = original.read_bytes(), tmp_path / "root"
    root.mkdir()
    copy = notebooks.working_copy(root, original)
    assert copy == root / "eet-lab-results" / "workbench.ipynb"
    run = json.loads(copy.read_text())
    assert notebooks.workbench_cell(run)
    run["cells"][0]["outputs"] = [DISPLAYED]
    copy.write_text(json.dumps(run))
    notebooks.working_copy(root, original)
    assert json.loads(copy.read_text())["cells"][0]["outputs"], "what was run stays while nothing newer is shipped"
    later = json.loads(before)
    later["cells"][1]["source"] = ["# A later version"]
    original.write_text(json.dumps(later))
    notebooks.working_copy(root, original)
    assert "A later version" in copy.read_text(), "running it is no edit"

    mine = json.loads(copy.read_text())
    mine["cells"].append({"cell_type": "code", "source": "print('mine')", "metadata": {}, "outputs": []})
    copy.write_text(json.dumps(mine))
    original.write_bytes(before)
    capsys.readouterr()
    notebooks.working_copy(root, original)
    assert json.loads(copy.read_text()) == mine
    assert f"Kept your {copy}" in capsys.readouterr().out
    assert original.read_bytes() == before
    assert (copy.parent / "a.ipynb").is_file(), "the page links to it"
    assert notebooks.working_copy(root, shipped / "a.ipynb") == copy.parent / "a.ipynb"
    assert notebooks.working_copy(root, tmp_path / "mine.ipynb") == tmp_path / "mine.ipynb"

    (shipped / "a.ipynb").write_text("<<<<<<< HEAD")
    assert notebooks.working_copy(root, original) == copy, "a lesson that git could not merge keeps nobody out"
    assert f"git checkout {shipped / 'a.ipynb'}" in capsys.readouterr().out
    assert notebooks.working_copy(root, shipped / "a.ipynb") == shipped / "a.ipynb"


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"cells": 3, "metadata": {}}', '{"cells": [1], "metadata": []}'])
def test_a_working_copy_that_is_no_notebook_is_made_anew_or_kept_but_is_no_crash(shipped, tmp_path, broken):
    copy = tmp_path / "eet-lab-results" / "workbench.ipynb"
    copy.parent.mkdir()
    copy.write_text(broken)
    assert notebooks.working_copy(tmp_path, shipped / "workbench.ipynb") == copy
    assert notebooks.workbench_cell(json.loads(copy.read_text()))


def test_only_the_shipped_cell_is_run_unasked(shipped):
    notebook = json.loads((shipped / "workbench.ipynb").read_text())
    assert notebooks.workbench_cell(notebook) is notebook["cells"][0]
    notebook["cells"][0]["source"].append("\nimport os; os.system('whatever')")
    assert notebooks.workbench_cell(notebook) is None


def test_a_taken_port_is_an_error_and_the_default_goes_on():
    with socket.create_server((server.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"Port {port} .* is taken"):
            server.choose_port(port)
    assert server.choose_port() >= server.FIRST_PORT


@pytest.mark.parametrize("port", ["0", "70000", "-1"])
def test_a_port_that_does_not_exist_is_told_before_anything_is_done(port, shipped, tmp_path, capsys):
    assert cli.main(["lab", "--dir", str(tmp_path / "x"), "--port", port]) == 2
    said = capsys.readouterr()
    assert f"Port {port} does not exist" in said.err and not said.out
    assert not (tmp_path / "x").exists(), "nothing was copied"


def test_a_missing_notebook_names_those_there_are(shipped, tmp_path, capsys):
    assert cli.main(["lab", "--dir", str(tmp_path / "x"), "--notebook", "workbnch"]) == 2
    error = capsys.readouterr().err
    assert "Did you mean 'workbench.ipynb'" in error and "a.ipynb, workbench.ipynb" in error
    assert not (tmp_path / "x").exists(), "nothing was copied"


def test_a_notebook_goes_by_its_name_alone(shipped, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(serve, "serve", lambda root, notebook, *rest, **options: opened.append(notebook) or 0)
    mine = tmp_path / "x"
    (mine / "sub").mkdir(parents=True)
    (mine / "sub" / "own.ipynb").write_text("{}")
    for wanted in ("a", "a.ipynb", "sub/own"):
        assert cli.main(["lab", "--dir", str(mine), "--notebook", wanted]) == 0
    assert opened == [mine / "a.ipynb", mine / "a.ipynb", mine / "sub" / "own.ipynb"]
    (tmp_path / "outside.ipynb").write_text("{}")
    with pytest.raises(SetupError, match="no ../outside.ipynb"):
        notebooks.notebook_name("../outside", mine)


def test_without_voila_the_app_says_what_to_type(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "voila", None)  # another test may have imported it
    assert cli.main(["lab", "--app", "--dir", str(tmp_path)]) == 2
    assert "-m pip install voila" in capsys.readouterr().err


def test_root_gets_allow_root_and_others_do_not(monkeypatch, tmp_path):
    for uid, expected in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        words = server.server_words(tmp_path, "lab/tree/a%20b.ipynb", 8888, "token")
        assert f"--ServerApp.allow_root={expected}" in words
    assert {"--ServerApp.ip=127.0.0.1", "--LabApp.default_url=/lab/tree/a%20b.ipynb"} <= set(words)


def test_display(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not serve.has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert serve.has_display()


def test_a_user_without_a_name_still_gets_the_address(monkeypatch):
    [monkeypatch.delenv(name, raising=False) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")]
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[f"uid not found: {uid}"])
    assert f"ssh -N -L 8888:127.0.0.1:8888 USER@{socket.gethostname()}" in serve.address("http://a", 8888, False)


# --- a lab that runs

# Each line alone would open the server, or make the printed address wrong.
HOSTILE = """
c = get_config()
c.ServerApp.token = ""
c.IdentityProvider.token = ""
c.PasswordIdentityProvider.token = ""
c.ServerApp.password = "argon2:$argon2id$v=19$m=10240,t=10,p=8$c2FsdHNhbHQ$aGFzaGhhc2g"
c.PasswordIdentityProvider.password_required = True
c.ServerApp.base_url = "/elsewhere/"
c.ServerApp.allow_origin = "*"
c.ServerApp.allow_origin_pat = ".*"
c.ServerApp.allow_remote_access = True
c.ServerApp.disable_check_xsrf = True
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.port = 1
c.ServerApp.sock = "/tmp/eet-lab-test.sock"
c.ServerApp.certfile = "/nowhere/cert.pem"
c.ServerApp.root_dir = "/"
c.ServerApp.preferred_dir = "/usr"
c.ServerApp.default_url = "/tree"
c.LabApp.default_url = "/lab"
c.ServerApp.custom_display_url = "http://example.org"
"""
CUSTOM_LOGIN = """
c = get_config()
from jupyter_server.auth.identity import IdentityProvider
from jupyter_server.auth.login import LegacyLoginHandler
class Open(IdentityProvider):
    def get_user(self, handler):
        from jupyter_server.auth.identity import User
        return User("anyone")
class Login(LegacyLoginHandler):
    @classmethod
    def get_user(cls, handler):
        return "anyone"
c.ServerApp.identity_provider_class = Open
c.ServerApp.login_handler_class = Login
"""


@contextmanager
def running(tmp_path: Path, *words: str, config: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`eet-lab lab` with a home of its own, and where it writes."""
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c" / "jupyter_server_config.py").write_text(config)
    home = {name: str(tmp_path / name[8:9].lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    home |= {"HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "r"), "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if "DISPLAY" not in name} | home
    command, log = [sys.executable, "-m", "eet_lab", "lab", "--dir", str(tmp_path / "nb"), *words], tmp_path / "log"
    with log.open("w") as out:
        lab = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        yield lab, log
    finally:
        if lab.poll() is None:
            lab.send_signal(signal.SIGTERM)
            lab.wait(30)


def when_up(lab: subprocess.Popen[str], log: Path) -> tuple[int, str, str]:
    """(port, path, token) of the printed address."""
    deadline = time.monotonic() + 60
    while not (found := URL.search(log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        assert lab.poll() is None, log.read_text()
        time.sleep(0.1)
    return int(found[1]), found[2], found[3]


def command_line(process: psutil.Process) -> str:
    """As others see it; "" of one that has ended, such as git, which JupyterLab asks at times."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_lab_serves_the_notebook_behind_its_token_and_stops(tmp_path):
    (tmp_path / "nb").mkdir()
    (tmp_path / "nb" / "x.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    with running(tmp_path, "--notebook", "x.ipynb") as (lab, log):
        port, path, token = when_up(lab, log)
        assert path == "/lab/tree/x.ipynb"
        assert re.search(rf"ssh -N -L {port}:127\.0\.0\.1:{port} \S+@\S+", log.read_text())
        contents = f"http://127.0.0.1:{port}/api/contents/x.ipynb"
        assert status(f"{contents}?token={token}") == 200
        assert status(contents) == 403
        sessions = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/sessions?token={token}", timeout=10)
        assert json.load(sessions) == [], "only the workbench starts by itself"
        settings = "lab/api/settings/@jupyterlab/apputils-extension:kernels-settings"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{settings}?token={token}", timeout=10) as answer:
            schema = json.load(answer)["schema"]["properties"]
        # A page that is loaded again may send a click to a subshell that the one before has deleted: it is lost.
        assert schema.get("commsOverSubshells", {"default": "disabled"})["default"] == "disabled"
        family = [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(recursive=True)]
        assert len(family) > 1
        assert not [process for process in family if token in " ".join(process.cmdline())], "others can read these"
        lab.send_signal(signal.SIGTERM)
        assert lab.wait(30) == 0
    assert server._is_free(port), "the server ended with its launcher"
    assert not list((tmp_path / "r").glob("jpserver-*")), "what it wrote while it ran is gone"


def test_the_application_asks_its_own_server_alone_and_stands_in_no_other_page():
    settings = ast.literal_eval(serve.offline(8891).removeprefix("--ServerApp.tornado_settings="))
    policy = dict(part.split(" ", 1) for part in settings["headers"]["Content-Security-Policy"].split("; "))
    assert policy["connect-src"].split() == ["'self'", "data:", "blob:", "ws://127.0.0.1:8891", "ws://localhost:8891"]
    assert policy["frame-ancestors"] == "'self'"
    assert not re.search(r"\bwss?:(?!//)|\*", str(policy)), "no scheme alone, and no other host"


@pytest.mark.slow
@pytest.mark.parametrize("config", [HOSTILE, CUSTOM_LOGIN], ids=["hostile", "login"])
def test_the_users_configuration_opens_nothing_and_breaks_nothing(tmp_path, config):
    with running(tmp_path, "--notebook", "01_pre_padding", config=config) as (lab, log):
        port, path, token = when_up(lab, log)
        assert path == "/lab/tree/01_pre_padding.ipynb"
        base = f"http://127.0.0.1:{port}"
        assert status(f"{base}{path}?token={token}") == 200, "the printed address"
        for api in ("contents", "kernels", "sessions", "terminals"):
            assert status(f"{base}/api/{api}") == 403
        assert status(f"{base}/api/contents", Host="example.org") == 403, "a name that was rebound to this machine"
        asked = urllib.request.Request(f"{base}/login", headers={"Origin": "http://example.org"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert "Access-Control-Allow-Origin" not in answer.headers, "no other page may read this"
        [served] = psutil.Process(lab.pid).children()
        places = {each.laddr for each in served.net_connections() if each.status == psutil.CONN_LISTEN}
        assert {place.ip for place in places} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["python", "jupyter", "kernel"])
def test_a_signal_while_it_starts_is_no_error(tmp_path, number, stage):
    def reached() -> bool:
        words = [*filter(None, map(command_line, psutil.Process(lab.pid).children(recursive=True)))]
        return {"python": "Starting" in log.read_text(), "jupyter": bool(words)}.get(stage, "ipykernel" in str(words))

    with running(tmp_path) as (lab, log):
        while not reached():
            assert lab.poll() is None, log.read_text()
            time.sleep(0.05)
        family = psutil.Process(lab.pid).children(recursive=True)
        lab.send_signal(number)
        assert lab.wait(20) == 128 + number
        text = log.read_text()
        assert not re.search("doctor|Shift", text), "no advice"
        assert "Traceback" not in text or stage == "kernel", "Jupyter interrupts a kernel, which tells of it"
        assert "eet_lab/" not in text.partition("Traceback")[2]
        assert not psutil.wait_procs(family, 5)[1]


@pytest.mark.slow
def test_a_lab_that_is_killed_takes_its_server_and_kernels_along(tmp_path):
    with running(tmp_path) as (lab, log):
        port, path, _ = when_up(lab, log)
        assert path == "/doc/tree/workbench.ipynb"
        family = psutil.Process(lab.pid).children(recursive=True)
        assert any("ipykernel" in command_line(process) for process in family)
        lab.kill()
        lab.wait()
        assert not psutil.wait_procs(family, 5)[1]
    assert server._is_free(port)
    assert not [each.name for each in (tmp_path / "r").iterdir() if each.name.startswith(("jpserver", "kernel"))]
