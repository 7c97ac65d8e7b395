"""Streams of requests: their names, what they are served with, and the line that tells of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eet_lab.bench import streams
from eet_lab.bench.rows import Row, markdown
from eet_lab.bench.streams import run_stream
from eet_lab.bench.workloads import Stream
from eet_lab.codec import decode, encode
from eet_lab.errors import PromptError

STREAM = Stream("tiny", 6, 1, 40, 5)


def test_names_and_streams_are_inverse():
    assert str(STREAM) == "tiny/r6/p1-40/n5"
    assert Stream.parse(str(STREAM)) == STREAM


@pytest.mark.parametrize("text", ["tiny/r6/p1/n5", "tiny/r6/p9-1/n5", "tiny/r0/p1-9/n5", "tiny"])
def test_what_is_no_stream_is_refused(text):
    with pytest.raises(PromptError):
        Stream.parse(text)


def test_prompts_are_of_the_lengths_that_were_asked_for_and_repeat():
    prompts = STREAM.prompts(97)
    assert prompts == STREAM.prompts(97)
    assert prompts != STREAM.prompts(97, seed=1)
    assert {1 <= len(prompt) <= 40 for prompt in prompts} == {True}
    assert len({len(prompt) for prompt in prompts}) > 1


def test_after_a_reservation_nothing_is_allocated(tiny, monkeypatch):
    monkeypatch.setattr(streams, "WARM_UP", 1)
    recipe = "pre_padding,mask_removal,memory_reuse"
    reserved, grown = run_stream(tiny, STREAM, recipe), run_stream(tiny, STREAM, recipe, reserved=False)
    assert (reserved.driver_allocations, grown.driver_allocations > 0) == (0, True)
    assert [row.tok_s * row.total_ms.p50 / 1e3 for row in (reserved, grown)] == pytest.approx([6 * 5] * 2, rel=1e-3)
    assert reserved.lower_bound_bytes == grown.lower_bound_bytes > 0


def test_its_line_can_be_read_again(tiny):
    line = run_stream(tiny, STREAM, "memory_reuse")
    assert decode(Row, json.loads(json.dumps(encode(line))), "row") == line
    assert (line.recipe, line.equality) == ("memory_reuse (reserved)", "passed")
    assert "tiny/r6/p1-40/n5" in markdown([line])


def test_a_prompt_beyond_the_model_is_refused_before_any_work(tiny):
    with pytest.raises(PromptError):
        run_stream(tiny, Stream("tiny", 2, 1, 100_000, 4), "baseline")


def test_the_program_says_in_one_line_that_there_is_no_gpu():
    command, hidden = [sys.executable, "-m", "eet_lab.bench.streams"], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("eet-lab: torch sees no NVIDIA GPU here") and done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(streams, "allocator_here", streams.recorded_allocator)
    assert streams.main([str(tmp_path / "no" / "where.json")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "No such file or directory" in told.err and told.err.count("\n") == 1
    assert streams.main([str(tmp_path / "here.json")]) == 0
    assert decode(streams.AllocatorTrace, json.loads((tmp_path / "here.json").read_text()))
