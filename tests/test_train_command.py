"""`eet-lab train` with a model of one's own: what is learned of a file, kept, and gone on from."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eet_lab import files
from eet_lab.cli import main
from eet_lab.errors import ModelError, TrainingError
from eet_lab.files import check_folder
from eet_lab.models import load
from eet_lab.training import checkpoint

SMALL = ["--row-tokens", "8", "--batch-rows", "2", "--lr", "1e-3", "--device", "cpu"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"text": f"def add_{number}(a, b): return a + b"} for number in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "texts.jsonl")


def test_a_model_learns_a_file_is_saved_and_goes_on(tmp_path, data, capsys, monkeypatch):
    words = ["train", "--model", "demo", "--data", data, *SMALL, "--checkpoint", str(tmp_path / "run")]
    assert main([*words, "--steps", "3", "--save", str(tmp_path / "tuned")]) == 0
    told, line = capsys.readouterr()
    assert "3 steps in" in told and "rows, and" in told and "held out\n" in told and "tokens/s" in told
    before, after = (float(word) for word in told.split("held out ")[-1].split("\n")[0].split(" to "))
    assert after < before and "will not be kept" not in line
    assert load(tmp_path / "tuned", device="cpu").encode("def add") == load("demo", device="cpu").encode("def add")
    assert main([*words, "--steps", "5"]) == 2 and "holds a checkpoint, which this" in capsys.readouterr().err
    assert main([*words, "--steps", "3", "--resume"]) == 2 and "already has 3 steps" in capsys.readouterr().err
    stop = threading.Event()
    monkeypatch.setattr("eet_lab.commands.terminal.stoppable", lambda *_: nullcontext(stop))
    monkeypatch.setattr("eet_lab.commands.terminal.ProgressLine.__call__", lambda _, done, *__: done > 3 and stop.set())
    assert main([*words, "--steps", "9", "--resume"]) == 130 and "1 step in" in capsys.readouterr().out
    stop.clear()
    monkeypatch.setattr("eet_lab.commands.terminal.ProgressLine.__call__", lambda *_: None)
    assert main([*words, "--steps", "5", "--resume"]) == 0 and "1 step in" in capsys.readouterr().out


def test_what_a_resumed_run_has_otherwise_is_told(tmp_path, data, capsys):
    words = ["train", "--model", "demo", "--data", data, "--device", "cpu", "--checkpoint", str(tmp_path / "run")]
    assert main([*words, *SMALL, "--steps", "2"]) == 0
    other = ["--row-tokens", "16", "--batch-rows", "3", "--lr", "0.002", "--dropout", "0.1"]
    assert main([*words, *other, "--warmup-steps", "3", "--steps", "3", "--resume"]) == 0
    assert (
        "Not as in the run that this one goes on from: --lr 0.002 (was 0.001), --warmup-steps 3 (was 2), --dropout 0.1 "
        "(was 0.0), --batch-rows 3 (was 2), --row-tokens 16 (was 8).\n"
    ) in capsys.readouterr().err
    assert main([*words, *other, "--warmup-steps", "1", "--steps", "6", "--resume"]) == 0  # which is over in both
    assert "Not as in" not in capsys.readouterr().err


def test_a_resumed_run_says_that_its_data_recipe_and_type_are_others(tmp_path, data, capsys):
    """A warm-up that nobody asks for stays the first run's, however many steps there are now."""
    words = ["train", "--model", "demo", "--device", "cpu", "--checkpoint", str(tmp_path / "run"), *SMALL]
    assert main([*words, "--data", data, "--steps", "2", "--recipe", "baseline"]) == 0
    (tmp_path / "other.jsonl").write_text(Path(data).read_text())
    assert main([*words, "--data", data, "--steps", "9", "--recipe", "baseline", "--resume"]) == 0
    assert "Not as in" not in capsys.readouterr().err
    other = ["--data", str(tmp_path / "other.jsonl"), "--recipe", "pre_padding", "--dtype", "bfloat16"]
    assert main([*words, *other, "--steps", "10", "--resume"]) == 0
    says = "--data other.jsonl (was texts.jsonl), --recipe pre_padding (was baseline), --dtype bfloat16 (was float32)"
    assert f"Not as in the run that this one goes on from: {says}.\n" in capsys.readouterr().err


def test_what_has_no_room_is_refused_before_anything_is_read(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20, total=1 << 30))
    words = ["train", "--model", "demo", "--data", data, *SMALL, "--steps", "2"]
    for option, what in (("--save", "The model"), ("--checkpoint", "The training")):
        assert main([*words, option, str(tmp_path / "new")]) == 2
        told = capsys.readouterr().err
        says = r": it takes [\d.]+ MiB, and 1 MiB are free there. Choose another folder, or make room there.\n"
        assert re.fullmatch(rf"eet-lab: {what} cannot be saved in {tmp_path}/new{says}", told)
        assert "held out" not in told and not (tmp_path / "new").exists()


def test_room_that_a_killed_run_took_counts_as_free(tmp_path, monkeypatch):
    """And a file system that does not tell its size is not taken for a full one."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=50, total=1000))
    with pytest.raises(TrainingError, match="it takes 130 bytes, and 50 bytes are free there"):
        checkpoint.check(tmp_path, 130)
    (tmp_path / f"{checkpoint.NAME}.part").write_bytes(bytes(80))
    assert checkpoint.check(tmp_path, 130) == tmp_path
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0, total=0))
    assert checkpoint.check(tmp_path, 1 << 40) == tmp_path


def test_a_batch_of_more_rows_than_there_are_is_told(data, capsys):
    assert main(["train", "--model", "demo", "--data", data, *SMALL, "--steps", "1", "--batch-rows", "500"]) == 0
    assert "A step reads 500 rows, and there are " in capsys.readouterr().err


def test_a_checkpoint_that_does_not_know_its_settings_is_gone_on_from(tmp_path, data, capsys):
    words = ["train", "--model", "demo", "--data", data, "--device", "cpu", "--checkpoint", str(tmp_path / "run")]
    assert main([*words, *SMALL, "--steps", "2"]) == 0
    state = torch.load(tmp_path / "run" / checkpoint.NAME)
    for settings in (None, 3, {"lr": "much", "row_tokens": torch.ones(2), 5: 5}):
        torch.save(state | {"settings": settings}, tmp_path / "run" / checkpoint.NAME)
        assert main([*words, *SMALL, "--lr", "2e-3", "--steps", "4", "--resume"]) == 0
        assert "Not as in" not in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_leaves_what_was_learned(tmp_path, data, capsys, monkeypatch):
    """The model is saved elsewhere, on a disk that may have room."""
    write, written = checkpoint.write, []

    def full(folder, state):
        written.append(folder)
        if len(written) == 2:
            raise TrainingError("The training cannot be saved: No space left on device.")
        return write(folder, state)

    monkeypatch.setattr(checkpoint, "write", full)
    words = ["train", "--model", "demo", "--data", data, *SMALL, "--checkpoint", str(tmp_path / "run")]
    assert main([*words, "--steps", "9", "--save", str(tmp_path / "tuned")]) == 2
    told = capsys.readouterr().err
    assert "No space left on device" in told and f"saved in {tmp_path / 'tuned'}, after 2 steps" in told
    assert load(tmp_path / "tuned", device="cpu").config


def test_a_model_that_cannot_be_saved_after_an_error_is_told_beside_it(tmp_path, data, capsys, monkeypatch):
    def full(*_):
        raise TrainingError("The training cannot be saved: No space left on device.")

    monkeypatch.setattr(checkpoint, "write", full)
    monkeypatch.setattr("eet_lab.models.weights.saved", lambda *_: (_ for _ in ()).throw(ModelError("Nor the model.")))
    words = ["train", "--model", "demo", "--data", data, *SMALL, "--checkpoint", str(tmp_path / "run")]
    assert main([*words, "--steps", "3", "--save", str(tmp_path / "tuned")]) == 2
    told = capsys.readouterr().err
    assert "\nNor the model.\neet-lab: The training cannot be saved: No space left" in told and "saved in" not in told


def test_sigterm_keeps_what_was_learned(tmp_path, data, capsys, monkeypatch):
    """As Slurm and Kubernetes end a job; the handler is called as the signal would."""
    before = signal.getsignal(signal.SIGTERM)

    def tells(_: object, done: int, *__: object) -> None:
        if done == 3:
            signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)

    monkeypatch.setattr("eet_lab.commands.terminal.ProgressLine.__call__", tells)
    words = ["train", "--model", "demo", "--data", data, *SMALL, "--checkpoint", str(tmp_path / "run")]
    assert main([*words, "--steps", "9", "--save", str(tmp_path / "tuned")]) == 130
    assert "3 steps in" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "run" / "trainer.pt").is_file() and load(tmp_path / "tuned", device="cpu").config


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Which model? Give the NAME of a small one"),
        (["vit-tiny", "--model", "demo"], "vit-tiny is trained from nothing, and --model demo is another"),
        (["vit-tiny", "--row-tokens", "8"], "--row-tokens is for a model of your own. Give that as --model"),
        (["vit-tiny", "--resume"], "--resume is for a model of your own"),
        (["--model", "demo", "--resume"], "There is no checkpoint to --resume from without --checkpoint"),
        (["--model", "demo", "--resume", "--checkpoint", "nowhere"], "--resume from in nowhere. Give the folder"),
        (["--model", "demo", "--task", "tokens"], "--task is 'tokens', but it must be one of"),
        (["--model", "demo", "--task", "classes"], "a decoder, which is trained on other tasks: language"),
        (["--model", "demo", "--recipe", "none"], "no technique 'none'. A recipe without any is called baseline."),
        (["--model", "demo", "--steps", "0"], "--steps is 0, but it must be a whole number from 1"),
        (["--model", "demo", "--lr", "-1"], "--lr is -1.0, but it must be a number from 0"),
        (["--model", "demo", "--data", "none.txt"], "none.txt cannot be read: No such file or directory"),
        (["--model", "demo", "--recipe", "memory_reuse"], "memory_reuse cannot run on this model: it is for inference"),
    ],
)
def test_what_cannot_be_trained_is_told_before_any_step(words, says, capsys, monkeypatch):
    monkeypatch.setattr("eet_lab.training.trainer.Trainer._step", lambda *_: pytest.fail("it trained"))
    assert main(["train", *words, "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert says in told and "will not be kept" not in told


def test_a_folder_that_another_process_takes_away_is_made_again(tmp_path, monkeypatch):
    """Two look at once whether the same new folder can be written to, and each takes away what it made."""
    folder, looks = tmp_path / "new" / "model", []

    def look(dir):
        looks.append(dir)
        if len(looks) == 1:
            folder.rmdir()
        return tempfile.TemporaryFile(dir=dir)

    monkeypatch.setattr(files, "TemporaryFile", look)
    check_folder(folder, "The model", ModelError)
    assert len(looks) == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("given", ["new/../other", "a/b/" + "x" * 300])
def test_each_folder_that_was_made_to_find_out_is_taken_away(tmp_path, given):
    with suppress(ModelError):  # of a name that is too long
        check_folder(tmp_path / given, "The model", ModelError)
    assert not any(tmp_path.iterdir())


def test_a_training_that_is_refused_leaves_no_folders(tmp_path, data, capsys):
    words = ["train", "--model", "demo", "--device", "cpu", "--save", str(tmp_path / "new" / "tuned")]
    assert main([*words, "--data", str(tmp_path / "none.txt")]) == 2
    assert main(["train", "vit-tiny", "--save", str(tmp_path / "new"), "--recipe", "nonsense"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
    (tmp_path / "there").mkdir()
    assert main([*words[:-1], str(tmp_path / "there"), "--data", "none.txt"]) == 2
    assert (tmp_path / "there").is_dir()
