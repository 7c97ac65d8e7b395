"""A trainer: what it keeps is enough to go on to the bit, and what cannot be trained is told before any work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import encoders
import families
import pytest
import seq2seqs
import torch
from test_seq2seq_training import examples as answered
from test_training import CHUNKED, RECIPES, language, language_loss, masked, parts
from torch.nn.functional import cross_entropy

from eet_lab.errors import Cancelled, OutOfMemory, PromptError, RecipeError, TrainingError
from eet_lab.models import load
from eet_lab.models.weights import state_of
from eet_lab.parts import losses
from eet_lab.parts.buffers import MASTERS
from eet_lab.parts.optimizers import tensor_by_tensor
from eet_lab.technique import Recipe
from eet_lab.techniques.flat_optimizer import Flat
from eet_lab.training import Example, Rows, Trainer, TrainSettings
from eet_lab.training.batch import TrainPass
from eet_lab.training.loss_scale import LEAST, LossScale

SETTINGS = TrainSettings(lr=3e-3, warmup_steps=2, lr_schedule="cosine", max_steps=9, dropout=0.1, seed=3)
FLAT = Flat("float32")


def run(trainer: Trainer, steps: range) -> list[float]:
    return [trainer.step(language()).loss for _ in steps]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters.values()]


@pytest.mark.parametrize(
    ("layout", "changes"), [(tensor_by_tensor, {}), (FLAT, {}), (FLAT, {"optimizer": "sgd", "lr": 0.1})]
)
def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path, layout, changes):
    settings = replace(SETTINGS, **changes)
    made = partial(Trainer, families.ours("qwen3").network, parts(RECIPES[3], optimizer=layout), settings=settings)
    whole = made()
    losses_ = run(whole, range(8))
    assert losses_[-1] < losses_[0] and whole.num_steps == 8
    first = made()
    before = run(first, range(5))
    first.save(tmp_path)
    second = made()
    run(second, range(2))
    second.resume(tmp_path)
    assert before + run(second, range(3)) == losses_
    assert all(map(torch.equal, weights(second), weights(whole)))


def test_the_next_batch_is_laid_out_while_a_step_runs_and_its_faults_come_in_turn():
    """What `steps` makes is what `step` makes, dropout among it, and other calls may come in between."""
    made = partial(Trainer, families.ours("qwen3").network, parts(RECIPES[3]), settings=SETTINGS)
    alone, ahead, events = made(), made(), list[str]()

    def batches():
        for number in range(4):
            events.append(f"asked for {number}")
            yield language() if number < 3 else [Example([1, 10**6])]

    found = []
    with pytest.raises(PromptError, match="token 1,?000,?000"):  # noqa: PT012  what comes before it is looked at, too
        for step in ahead.steps(batches()):
            events.append(f"told {step.number}")
            found.append(step.loss)
            assert ahead.evaluate(language()) > 0
    assert found == run(alone, range(3)) and all(map(torch.equal, weights(alone), weights(ahead)))
    told = [f"told {number}" for number in range(3)]
    assert events == ["asked for 0", "asked for 1", told[0], "asked for 2", told[1], "asked for 3", told[2]]
    assert ahead.step(language()).loss == alone.step(language()).loss


def test_a_pass_is_laid_out_while_the_one_before_it_runs_and_a_full_memory_is_told(monkeypatch):
    trainer = Trainer(families.ours("qwen3").network, parts(RECIPES[3]), settings=replace(SETTINGS, batch_tokens=8))
    events, lays_out, launch = list[str](), TrainPass.laid_out, trainer._launch.__call__
    close = trainer._launch.close

    def laid_out(self, *args):
        events.append("laid out")
        return lays_out(self, *args)

    class Launch:
        def __init__(self) -> None:
            self.close = close

        def __call__(self, given):
            events.append("launched")
            return launch(given)

    monkeypatch.setattr(TrainPass, "laid_out", laid_out)
    trainer._launch = Launch()
    made = trainer.step(language())
    assert made.num_passes > 1 and events == ["laid out", "launched"] * made.num_passes + ["launched"] * 2

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes.")

    monkeypatch.setattr(TrainPass, "laid_out", full)
    for work in (trainer.step, trainer.gradients, lambda found: next(trainer.steps([found]))):
        with pytest.raises(OutOfMemory, match="a training pass could not be allocated .*1.00 GiB"):
            work(language())


@pytest.mark.parametrize("name", ["step", "save", "gradients", "evaluate", "reserve", "resume"])
def test_a_step_that_was_launched_counts_even_if_the_host_is_interrupted(half, tmp_path, name):
    made = partial(Trainer, half, parts(RECIPES[3]), settings=replace(SETTINGS, init_scale=16.0, growth_interval=2))
    alone, ahead = made(), made()

    def batches():
        yield language()
        yield language()
        raise KeyboardInterrupt

    run(alone, range(2))
    alone.save(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(ahead.steps(batches()))
    assert all(map(torch.equal, weights(alone), weights(ahead)))
    given = {"step": language(), "save": tmp_path, "resume": tmp_path, "reserve": [language()]}.get(name, language())
    made_by = [getattr(trainer, name)(given) for trainer in (alone, ahead)]
    assert alone.num_steps == ahead.num_steps == alone.optimizer.num_steps == ahead.optimizer.num_steps
    assert alone.num_steps == 2 + (name == "step") and alone.loss_scale == ahead.loss_scale
    assert name != "step" or made_by[0].loss == made_by[1].loss
    assert alone.step(language()).loss == ahead.step(language()).loss
    assert all(map(torch.equal, weights(alone), weights(ahead)))


@pytest.mark.parametrize("before", MASTERS)
@pytest.mark.parametrize("after", MASTERS)
def test_a_run_is_resumed_with_another_master_copy_and_settings(tmp_path, before, after):
    """The weights are the checkpoint's, and the settings those of whoever goes on."""
    network = load(families.theirs("llama"), device="cpu", dtype="bfloat16").network
    made = [
        Trainer(network, Recipe.parse(f"{RECIPES[3]},flat_optimizer:master={master}").parts, lr=lr, weight_decay=decay)
        for master, lr, decay in ((before, 1e-2, 0.0), (after, 1e-6, 0.25))
    ]
    run(made[0], range(4))
    made[0].save(tmp_path)
    made[1].resume(tmp_path)
    made[1].step(language())
    assert made[1].evaluate(language()) == pytest.approx(made[0].evaluate(language()), rel=2e-2)
    assert [group["weight_decay"] for group in made[1].optimizer.param_groups] == [0.25, 0.0]


def test_chunks_lose_nothing_in_16_bits():
    """The gradients of a head are sums over all chunks: in fp32, they are as good as those of one product."""
    torch.manual_seed(0)
    weight = torch.randn(31, 16, dtype=torch.bfloat16).requires_grad_()
    states, labels = torch.randn(4000, 16, dtype=torch.bfloat16), torch.randint(31, (4000,))
    head = losses.Head(lambda rows, linear=None: rows @ weight.t(), (weight,))
    wide = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy(states.double() @ wide.t(), labels, reduction="sum"), wide)
    errors = []
    for loss in (losses.whole, losses.Chunked(8)):
        (found,) = torch.autograd.grad(loss(states, labels, head), weight)
        errors.append(float((found.double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_an_evaluation_takes_no_gradient(monkeypatch):
    trainer = Trainer(families.ours("gpt2").network, parts("", loss=CHUNKED))
    wanted = trainer.gradients(language())[0]
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: pytest.fail("a gradient was taken"))
    assert trainer.evaluate(language()) == pytest.approx(wanted, rel=1e-6)


def test_what_is_trained_is_saved_as_transformers_reads_it(tmp_path):
    """And the model that it began with is as it was."""
    import transformers

    model = families.ours("gpt2")
    before = {path: tensor.clone() for path, tensor in state_of(model.network).items()}
    trainer = Trainer(model.network, lr=1e-2)
    run(trainer, range(3))
    replace(model, network=trainer.trained()).save(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert language_loss(saved, language()).item() == pytest.approx(trainer.evaluate(language()), rel=1e-5)
    assert all(torch.equal(tensor, before[path]) for path, tensor in state_of(model.network).items())


def test_what_the_task_does_not_read_stays_as_it_was():
    network = encoders.ours("bert-pretrained").network
    trainer = Trainer(network, task="masked", lr=1e-2, weight_decay=0.5)
    trainer.step(masked())
    now = trainer.model
    assert torch.equal(now.pooler.weight, network.pooler.weight)
    assert torch.equal(now.next_sentence.weight, network.next_sentence.weight)
    assert not torch.equal(now.mlm_transform.weight, network.mlm_transform.weight)


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were():
    trainer = Trainer(families.ours("llama").network, lr=1e-2)
    trainer.step(language())
    kept = weights(trainer)
    name = "layers.1.qkv.weight"
    parameter = trainer.parameters[name]
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter[0] = torch.inf
    examples = language()
    says = f"Step 1 has a loss of nan .* not finite is the weight {name}, in a pass over 1 example: 1"
    with pytest.raises(TrainingError, match=says):
        trainer.step(examples)
    with torch.no_grad():
        parameter.copy_(before)
    assert trainer.num_steps == 1 and all(map(torch.equal, weights(trainer), kept))
    assert trainer.step(language()).number == 1


OVERFLOWS = [
    ("gpt2", ("layers.1.fc_1", "layers.1.fc_2"), "linear_residual with layers.1.fc_2"),
    ("gpt2", ("layers.2.qkv",), "[a-z_]*attention after layers.2.qkv"),
    ("bert-mlm", ("layers.0.fc_1", "layers.0.fc_2"), "linear_residual_norm with layers.0.fc_2"),
    ("t5", ("decoder.layers.1.cross.q", "decoder.layers.1.cross.kv"), "cross_attention after decoder.layers.1.cross.q"),
]


@pytest.mark.parametrize("recipe", ["", f"{RECIPES[3]},flat_optimizer"])
@pytest.mark.parametrize(("name", "large", "says"), OVERFLOWS)
def test_an_output_that_is_not_finite_is_named_where_weights_are(name, large, says, recipe, monkeypatch):
    """By the layer and op that made it first, in a further pass that no other step makes; texts are ragged, as pads."""
    network, examples = {"gpt2": (families, language), "t5": (seq2seqs, answered)}.get(name, (encoders, masked))
    trainer = Trainer(
        network.ours(name).network, Recipe.parse(recipe).parts, dropout=0.1, attention_dropout=0.1, batch_tokens=60
    )
    again = Mock(wraps=trainer._again)
    monkeypatch.setattr(trainer, "_again", again)
    trainer.step(examples())
    assert not again.called
    with torch.no_grad():
        for path in large:
            trainer.parameters[f"{path}.weight"] *= 1e20
    kept = weights(trainer)
    with pytest.raises(TrainingError, match=f"not finite is the output of {says} .all weights are finite., in a"):
        trainer.step(examples())
    assert again.call_count == 1 and all(map(torch.equal, weights(trainer), kept))
    again.side_effect = torch.OutOfMemoryError("no memory is left")
    with pytest.raises(TrainingError, match="not finite is the loss .all weights are finite., in a pass"):
        trainer.step(examples())


def test_an_evaluation_that_is_not_finite_is_told():
    """With the pass that has no finite loss; texts that lack its words have one."""
    trainer = Trainer(families.ours("llama").network, batch_tokens=4)
    with torch.no_grad():
        trainer.parameters["token_embedding"][7] = torch.nan
    with pytest.raises(TrainingError, match="^Before any .* a loss of nan. The first pass .* over 1 example: 3. Begin"):
        trainer.evaluate([Example(list(range(first, first + 4))) for first in (1, 3, 5, 12)])


def test_the_loss_scale_is_pytorchs():
    ours, scale, tracker = LossScale(64.0, growth_interval=3), torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    for step in range(40):
        overflows = step % 7 == 5 or step in (0, 1)
        assert ours.update(not overflows)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflows)), 2.0, 0.5, 3)
        assert (ours.scale, ours.num_finite) == (scale.item(), tracker.item())


@pytest.fixture(scope="module")
def half():
    return load(families.theirs("llama"), device="cpu", dtype="float16").network


@pytest.mark.parametrize("recipe", ["", f"{RECIPES[3]},chunked_cross_entropy:chunk=5,flat_optimizer"])
def test_float16_is_trained_with_a_scaled_loss(half, tmp_path, recipe):
    """An overflow is skipped, and small gradients are there; the losses are those of fp32, and go on to the bit."""
    settings = TrainSettings(lr=3e-3, init_scale=2.0**18, growth_interval=4)
    made = partial(Trainer, half, Recipe.parse(recipe).parts, settings=settings)
    trainer = made()
    kept = weights(trainer)
    skipped = trainer.step(language())
    assert skipped.is_skipped and skipped.loss_scale == 2.0**18 and trainer.loss_scale.scale == 2.0**17
    assert all(map(torch.equal, weights(trainer), kept)) and trainer.num_steps == 1
    while trainer.step(language()).is_skipped:
        pass
    trainer.save(tmp_path)
    told = [trainer.step(language()) for _ in range(5)]
    assert told[-1].loss_scale == 2 * told[0].loss_scale and trainer.optimizer.num_steps == 6
    again = made()
    again.resume(tmp_path)
    assert [again.step(language()).loss for _ in range(5)] == [step.loss for step in told]
    wide = Trainer(families.ours("llama").network, lr=3e-3)
    assert [step.loss for step in told] == pytest.approx(run(wide, range(6))[1:], rel=1e-2)


def test_gradients_that_are_too_small_for_float16_are_kept_by_the_scale(half):
    """What underflows is as large as what fp32 says, within the digits of float16."""
    wide = Trainer(families.ours("llama").network).gradients(language())[1]["layers.0.qkv.weight"]
    errors = []
    for scale in (2.0**-12, 2.0**12):
        grad = Trainer(half, init_scale=scale).gradients(language())[1]["layers.0.qkv.weight"]
        errors.append(float((grad - wide).norm() / wide.norm()))
    assert errors[1] < 1e-2 < errors[0]


def test_float16_that_is_not_a_number_is_no_overflow(half):
    trainer = Trainer(half)
    parameter = trainer.parameters["norm.weight"]
    with torch.no_grad():
        parameter.fill_(torch.nan)
    with pytest.raises(TrainingError, match="loss of nan .* not finite is the weight norm.weight"):
        trainer.step(language())
    trainer.loss_scale = LossScale(LEAST, growth_interval=9)
    with torch.no_grad():
        parameter.fill_(1.0)
    trainer.parameters["layers.0.qkv.weight"].register_hook(lambda grad: grad * torch.inf)
    with pytest.raises(TrainingError, match="gradient norm of nan, .* not finite is the gradient of layers.0.qkv"):
        trainer.step(language())
    with torch.no_grad():
        parameter.fill_(60_000.0)  # a number, but logits beyond float16's
    with pytest.raises(TrainingError, match="output of norm_linear with head .all weights are finite., in"):
        trainer.step(language())
    assert trainer.num_steps == 0


def test_stop_leaves_the_weights_as_they_were():
    from threading import Event

    trainer, stop = Trainer(families.ours("gpt2").network), Event()
    stop.set()
    kept = weights(trainer)
    with pytest.raises(Cancelled):
        trainer.step(language(), cancel=stop)
    assert all(map(torch.equal, weights(trainer), kept)) and trainer.step(language()).number == 0


def test_the_demo_model_learns_a_text_that_it_did_not_know():
    model = load("demo", device="cpu")
    text = "The queue of the night train to Vienna is a tuple of seven blue lanterns. " * 6
    rows = Rows.of_texts(model, [text], 32)
    trainer = Trainer(model.network, parts(RECIPES[3], loss=CHUNKED, optimizer=FLAT), lr=1e-3)
    before = trainer.evaluate(rows.batch(0, 2))
    for step in range(6):
        told = trainer.step(rows.batch(step, 2))
    assert trainer.evaluate(rows.batch(0, 2)) < before / 2 and told.computed_tokens == told.num_tokens == 64


def test_all_for_training_is_what_trains_and_its_gradients_are_the_baselines():
    config = families.ours("qwen2").config
    recipe = Recipe.parse("all", "cpu", config.in_training)
    assert recipe.names == (*RECIPES[3].split(","), "chunked_cross_entropy", "flat_optimizer")
    assert not {"chunked_cross_entropy", "flat_optimizer"} & {*Recipe.parse("all", "cpu", config).names}
    with pytest.raises(RecipeError, match="flat_optimizer cannot run on this model: it is for training"):
        Recipe.parse("flat_optimizer").check("cpu", config)
    chunked = Recipe.parse("all,chunked_cross_entropy:chunk=3", "cpu", config.in_training).parts
    losses_ = [
        run(Trainer(families.ours("qwen2").network, each, settings=SETTINGS), range(6)) for each in (None, chunked)
    ]
    assert losses_[1] == pytest.approx(losses_[0], rel=1e-4)
