"""What the command line prints, and where it cannot: other encodings, full disks, closed pipes, deleted folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eet_lab import cli
from eet_lab.commands.command import Command

DOCTOR = r"""
import sys
import eet_lab.doctor as doctor
doctor.diagnose = lambda: [doctor.Check("x", "ok", "24.1 \u00d7 sooner \u2013 5 \u00b5s \u6f22 \ud800")]
from eet_lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str, shell: str = "", encoding: str = "utf-8", **env: str) -> subprocess.CompletedProcess[str]:
    """`eet-lab WORDS` in a process of its own, where the doctor finds one thing with characters of all kinds."""
    command = [sys.executable, "-c", DOCTOR, *words]
    if shell:  # "$@" is the command
        command = ["bash", "-c", shell, "bash", *command]
    env = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, encoding=encoding, env=env, timeout=60)


@pytest.mark.parametrize(
    "encoding, shown",
    [
        ("ascii", r"24.1 x sooner - 5 us \u6f22 \ud800"),
        ("latin-1", r"24.1 × sooner - 5 µs \u6f22 \ud800"),
        ("utf-8", r"24.1 × sooner – 5 µs 漢 \ud800"),
    ],
)
def test_every_character_is_printed_somehow(encoding, shown):
    done = run("doctor", encoding=encoding, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_a_plain_c_locale_will_do():
    assert run("doctor", LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("doctor",), ("doctor", "--help"), ()])
def test_a_full_disk_is_told_in_one_line(words, unbuffered):
    done = run(*words, shell='"$@" > /dev/full', PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "Make room or choose another place" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("doctor",), ("--help",)])
def test_a_reader_that_leaves_is_no_error(words, unbuffered):
    done = run(*words, shell='("$@"; echo "code $?" >&2) | sleep 0', PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == "code 0\n"


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closing):
    done = run("doctor", shell=f'"$@" {closing}')
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_are_told_even_where_nobody_reads_them():
    assert run("doctor", "--html", "/no/such/folder/page.html", shell='"$@" 2> /dev/full').returncode == 2


def test_a_deleted_folder_is_told_with_what_to_type(tmp_path):
    (tmp_path / "gone").mkdir()
    done = run("doctor", shell=f'cd {tmp_path}/gone && rmdir {tmp_path}/gone && "$@"')
    assert done.returncode == 2
    assert done.stderr == "eet-lab: The folder that this shell is in has been deleted. Type: cd\n"


def command_that(monkeypatch, error: BaseException) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "COMMANDS", (Command("doctor", "help", "guide", lambda parser: None, fail),))


@pytest.mark.parametrize(
    "error, says",
    [
        (ModuleNotFoundError("No module named 'pynvml'", name="pynvml"), '-m pip install "nvidia-ml-py"'),
        (ModuleNotFoundError("No module named 'plotly.x'", name="plotly.x"), '-m pip install "plotly"'),
        (ImportError("libcudart.so.13: cannot open", name=None), "-m pip install -c"),
        (OSError("libtorch.so: cannot open shared object file"), "See what `eet-lab doctor` says"),
        (PermissionError(13, "Permission denied", "/etc/x"), "Permission denied: '/etc/x'"),
    ],
)
def test_what_a_machine_lacks_is_told_without_a_traceback(monkeypatch, capsys, error, says):
    command_that(monkeypatch, error)
    assert cli.main(["doctor"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("eet-lab: ")
    assert says in told


def test_our_own_faults_are_shown_whole(monkeypatch):
    for error in (ImportError("cannot import name 'x'", name="eet_lab.words"), KeyError("x")):
        command_that(monkeypatch, error)
        with pytest.raises(type(error)):
            cli.main(["doctor"])


def test_nothing_is_imported_for_it():
    code = "import sys, eet_lab.cli; assert not {'torch', 'packaging', 'psutil'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
