"""What requests get that have an engine to themselves, beside what they got in company."""

from __future__ import annotations

from eet_lab.engine.engine import Engine


class Alone:
    """What a request gets that has the engine to itself, and no technique."""

    def __init__(self, decoder):
        self._engine, self._known = Engine(decoder), {}

    def __call__(self, prompt, settings):
        key = tuple(prompt), settings
        if key not in self._known:
            self._known[key] = self._engine.generate([prompt], settings).tokens[0]
        return self._known[key]

    def each(self, asked):
        """The same of many, as the rows of one batch: in a fraction of the time. `test_continuous` compares the two."""
        prompts, settings = zip(*asked, strict=True)
        return self._engine.generate(prompts, settings).tokens


def num_alike(requests, wanted):
    """How many requests have all of the tokens that are wanted; of the others, which were cancelled, the first ones."""
    for request, want in zip(requests, wanted, strict=True):
        got = tuple(request.generated)
        assert got == want or (request.finish_reason == "cancelled" and got == want[: len(got)])
    return sum(request.finish_reason != "cancelled" for request in requests)
