"""EncoderEngine: texts in, what a task makes of them out. It knows Parts, and no technique.

B texts of a pass, T tokens of it, N of them asked for, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import islice
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from eet_lab.engine.base import FOR_OTHERS, BaseEngine, check_model, check_parts
from eet_lab.engine.captured_passes import CapturedPasses, pass_name
from eet_lab.engine.exclusive import exclusive
from eet_lab.engine.in_flight import Arriving, InFlight, Run
from eet_lab.engine.meta_trace import META, TELLING, NoArithmetic, are_alike
from eet_lab.engine.readable import readable
from eet_lab.engine.tasks import TextTask
from eet_lab.errors import Cancelled, RecipeError
from eet_lab.memory import Lifetime
from eet_lab.models.decoder import mapped
from eet_lab.models.encoder import Encoder
from eet_lab.models.vision import AnyEncoder, VisionEncoder
from eet_lab.ops.oom import OTHERS, memory_for
from eet_lab.parts import Ops, Parts, unread
from eet_lab.parts.passes import Batching, Group, Pass, Readable
from eet_lab.parts.staging import Staging, sent
from eet_lab.parts.trace import Trace, TracedPass, bounding
from eet_lab.progress import Cancel, Progress

REMEDY = f"Use a smaller batch_tokens, fewer texts at a time (batch_size), a smaller model, or half precision. {OTHERS}"
AHEAD = 64
"""Groups of texts whose passes are planned together, before the first of them is run."""
MOST_IN_FLIGHT = 2
"""Passes that are on the device while the host lays out and launches the next."""
SIZES: tuple[Callable[[Group], int], ...] = (
    lambda group: group.computed_tokens,
    lambda group: group.computed_tokens * group.longest,  # of masks and scores
    lambda group: len(group.texts),
    lambda group: group.num_asked,
)
"""What the buffers of a pass grow with."""


class EncoderEngine(BaseEngine[AnyEncoder]):
    """An encoder run by parts. Building one is cheap: weights are shared, nothing is compiled or allocated.

    An engine reads one list of texts at a time; meanwhile `read` and `close` raise EngineBusy. Errors: RecipeError for
    parts that do not take this model.
    """

    BUSY: ClassVar[str] = (
        "this engine is reading a list of texts, and reads one at a time. Wait until it is done, or make another "
        "EncoderEngine of the same model: the weights are shared."
    )

    def __init__(self, model: AnyEncoder, parts: Parts | None = None) -> None:
        check_model("EncoderEngine", model, (Encoder, VisionEncoder), "bert-base")
        check_parts("EncoderEngine", parts, "pre_padding")
        _check_read(parts or Parts(), model)
        super().__init__(model, parts)
        self.staging = Staging(self.model.device)
        self._captured = CapturedPasses(self, launch) if (launch := self.parts.captures_passes) else None

    def prepare(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Build the CUDA kernels that the parts need, as `BaseEngine.prepare` does; graphs of others are let go of."""
        are_new = super().prepare(progress, cancel)
        if are_new and self._captured is not None:
            self._captured.close()
        return are_new

    @exclusive
    @torch.inference_mode()
    def read(
        self,
        texts: Sequence[Readable],
        task: TextTask,
        batching: Batching | None = None,
        *,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Run:
        """What the task makes of each text: fp32 tensors on the CPU, in the order of the texts.

        `progress` is told after each pass. `cancel` ends the run between two ops. Errors: PromptError before any work;
        ModelError where the model has no head for the task; Cancelled, after which memory and graphs stay; OutOfMemory,
        after which the memory is free again.
        """
        runs = list[Run]()
        self._read_each([(texts, batching or Batching())], task, runs.append, progress, cancel)
        return runs[0]

    @exclusive
    @torch.inference_mode()
    def read_each(
        self,
        reads: Iterable[tuple[Sequence[Readable], Batching] | None],
        task: TextTask,
        on_read: Callable[[Run], object],
        *,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> None:
        """`read` for several lists of texts: one is launched while those before it are computed.

        A list is asked for when it can be launched; None is for none yet, and the next one is asked for once the oldest
        pass is there. `on_read` is told what was made of each, in their order, as soon as that is there. An error
        belongs to the list that was asked for last, and to those before it of which `on_read` was not told: whatever
        still comes is told before the error is raised, but nothing after Cancelled.
        """
        self._read_each(reads, task, on_read, progress, cancel)

    def _read_each(
        self,
        reads: Iterable[tuple[Sequence[Readable], Batching] | None],
        task: TextTask,
        on_read: Callable[[Run], object],
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> None:
        coming = InFlight(task, on_read, progress)
        self._cancel = cancel
        try:
            for read in reads:
                if read is None:
                    self._check_stop()
                    with self._freeing(coming):
                        coming.receive_one()
                    continue
                texts, batching = read
                begin = perf_counter()
                texts = self._checked(texts, task, batching.truncate)
                self.prepare(cancel=cancel)
                coming.begin(len(texts), begin)
                with self._freeing(coming):
                    self._launch(texts, batching, task, coming)
            with self._freeing(coming):
                coming.receive(most=0)
        except Cancelled:
            coming.drop()
            raise
        except BaseException:
            coming.rescue()
            raise
        finally:
            self._cancel = None

    @contextmanager
    def _freeing(self, coming: InFlight) -> Iterator[None]:
        """Memory is free after an error; what has been launched comes first."""

        def free() -> None:
            coming.rescue()
            self._free()

        try:
            with memory_for(lambda: self._allocating, free=free, remedy=REMEDY):
                yield
        except Cancelled:
            raise
        except BaseException:  # graphs may read memory that has moved
            free()
            raise

    def _launch(self, texts: Sequence[Readable], batching: Batching, task: TextTask, coming: InFlight) -> None:
        """All passes over the texts of a list, and what has come by then."""
        groups = iter(self.parts.texts(texts, batching))
        while ahead := list(islice(groups, AHEAD)):
            (self if self._captured is None else self._captured).plan(ahead, task)
            planned_bytes = self.memory.num_bytes
            for group in ahead:
                coming.add(group, self._launched(group, task), planned_bytes)
                coming.receive(most=MOST_IN_FLIGHT)

    @property
    def captures(self) -> int:
        """Passes captured so far; 0 where the launch part captures nothing."""
        return 0 if self._captured is None else self._captured.captures

    @property
    def held_bytes(self) -> int:
        """Bytes that stay allocated between passes: the arena, what passes are sent to, and what graphs hold."""
        graphs = 0 if self._captured is None else self._captured.held_bytes
        return self.memory.held_bytes + self.staging.held_bytes + graphs

    def bucket(self, texts: Sequence[Readable], task: TextTask) -> Hashable:
        """The same for texts that one graph serves, if they share a pass; None: no graph does."""
        if self._captured is None:
            return None
        whole = Batching(max(text.length for text in texts) * len(texts))
        groups = list(self.parts.texts([task.asking(text) for text in texts], whole))
        return self._captured.bucket(groups[0], task) if len(groups) == 1 else None

    @property
    def has_buckets(self) -> bool:
        """Whether a captured pass serves texts of other lengths, too."""
        return self._captured is not None and self._captured.by_bucket

    def lifetimes(
        self, texts: Sequence[Readable], task: TextTask, batching: Batching | None = None
    ) -> tuple[tuple[Lifetime, ...], ...]:
        """What each pass over the texts asks for, traced on meta tensors: nothing is computed."""
        batching = batching or Batching()
        groups = self.parts.texts(self._checked(texts, task, batching.truncate), batching)
        return tuple(self.memory.traced(self._traced_pass(group, task)) for group in groups)

    def _void(self) -> None:
        if self._captured is not None:
            self._captured.void()

    def _free(self) -> None:
        if self._captured is not None:
            self._captured.close()
        self.staging.close()
        super()._free()

    def _checked(self, texts: Sequence[Readable], task: TextTask, truncate: bool) -> list[Readable]:
        """The texts with the tokens that the task asks for; PromptError, ModelError."""
        task.check(self.model.config)
        return [task.asking(text) for text in readable(texts, self.model.config, truncate)]

    def plan(self, groups: Sequence[Group], task: TextTask, repeated: bool = False) -> None:
        """A plan for all passes in which ops ask for the same things: these grow with one of four numbers, or stay.

        `repeated`: they may be captured.
        """
        alike: dict[str, list[Group]] = {}
        for group in groups:
            alike.setdefault(pass_name(group.computed_tokens, group.num_asked), []).append(group)
        bounds = {}
        for name, same in alike.items():
            largest = {group.numbers: group for group in (max(same, key=size) for size in SIZES)}
            bound = bounding([self._traced_pass(group, task) for group in largest.values()])
            bounds[name] = bound._replace(repeated=repeated)
        self.place(bounds, reserved=False)

    def _launched(self, group: Group, task: TextTask) -> Arriving:
        """One pass, and what the task makes of it on its way to the host: one copy brings it all."""
        self._check_stop()
        batch = group.laid_out()
        if self._captured is None:
            made = self.run(pass_name(group.computed_tokens, group.num_asked), sent(batch, self.staging), task)
        else:
            made = self._captured.launched(group, batch, task)
        on_host = torch.empty(made.shape, dtype=torch.float32, pin_memory=made.is_cuda)
        on_host.copy_(made, non_blocking=True)
        if not made.is_cuda:
            return Arriving(on_host, batch.sizes, None)
        event = torch.cuda.Event()
        event.record()
        return Arriving(on_host, batch.sizes, event)

    def run(self, name: str, batch: Pass, task: TextTask) -> Tensor:
        """What the task makes of a pass that is on the device, in the memory that was planned for its `name`."""
        self.memory.enter(name)
        return self._made(self.model, self.ops, self.attend, batch, task, partial(self._empty, op="task"))

    @staticmethod
    def _made(model: AnyEncoder, ops: Ops, attend: Callable, batch: Pass, task: TextTask, empty: Callable) -> Tensor:
        hidden = model.hidden(ops, attend(batch.batch, None), batch)
        shape = len(batch.asked), hidden.shape[1]
        states = torch.index_select(hidden, 0, batch.asked, out=empty("asked", shape, hidden))
        return task.make(model, ops, states, batch, empty)

    def _traced_pass(self, group: Group, task: TextTask) -> TracedPass:
        sizes = group.computed_tokens, len(group.texts), group.longest, group.num_asked
        return self.traced((*sizes, group.is_typed, group.packed, task.name), group.laid_out, task)

    def traced(self, key: tuple, laid_out: Callable[[], Pass], task: TextTask) -> TracedPass:
        """A pass of such a layout, which can be run on meta tensors."""
        run = partial(self._trace, laid_out, task)
        return TracedPass(key, partial(run, None), partial(run, TELLING if are_alike(self.model) else None))

    @torch.inference_mode()
    def _trace(self, laid_out: Callable[[], Pass], task: TextTask, num_layers: int | None, trace: Trace) -> None:
        model = self._on_meta._replace(layers=self._on_meta.layers[:num_layers])
        ops = self.parts.ops.bind_each(lambda op: partial(trace.empty, op=op))
        attend = partial(self.parts.attend, ops, empty=partial(trace.empty, op="mask"))
        with nullcontext() if self.parts.ops.kernels else NoArithmetic():
            there = mapped(laid_out(), lambda tensor: tensor.to(META))
            self._made(model, ops, attend, there, task, partial(trace.empty, op="task"))

    @cached_property
    def _on_meta(self) -> AnyEncoder:
        return mapped(self.model, lambda tensor: tensor.to(META))


def _check_read(parts: Parts, model: AnyEncoder) -> None:
    """RecipeError for parts that would be on and do nothing."""
    names = unread(parts, FOR_OTHERS) + ["schedule"] * (parts.schedule.max_rows is not None)
    if parts.is_captured and isinstance(model, VisionEncoder):
        raise RecipeError("These parts capture passes of texts, and this encoder reads images. Leave cuda_graphs out.")
    if unread(parts, ["launch"]) and parts.captures_passes is None:
        names.append("launch")
    if names:
        raise RecipeError(
            f"These parts change {' and '.join(names)}, which an encoder does not use. Leave out what changes them."
        )
