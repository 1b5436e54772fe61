"""The language model across workers: its gradients, its corpus, and the program as it is run."""

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from aiorpc_torch import RRef, call, create, fetch
from aiorpc_torch.autograd import DistributedOptimizer, parameter_rrefs
from aiorpc_torch.testing import world
from examples import rnn
from examples.rnn import Model, Words, chunks, corpus, set_training
from tests.support.embedding_tables import MICROBATCHES, Meeting
from tests.support.example_programs import END, ROOT, STRICT, command, run, workers_of
from tests.support.slack import SLACK

WORDS, SIZE, LENGTH = 30, 12, 6


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are short."""
    monkeypatch.setattr(rnn, "LENGTH", LENGTH)


@contextlib.asynccontextmanager
async def small_model(
    microbatches: int = 3, dropout: float = 0.0, device: str = "cpu", kind: type[Words] = Words
) -> AsyncIterator[Model]:
    async with world(["ps"], device_maps=None if device == "cpu" else "auto"):
        words: RRef[Any] = await create("ps", kind, WORDS, SIZE, device, dropout)
        yield Model(words, SIZE, microbatches, device)


async def optimizer_of(model: Model, kind: type[torch.optim.Optimizer], lr: float) -> Any:
    params = [each for part in model.parts for each in await parameter_rrefs(part)]
    return await DistributedOptimizer.create(kind, params, lr=lr)


def some_text(length: int = 248) -> Tensor:
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(0))


# ── what it learns is what one process would learn ──────────────────────────────────────────────


class Whole(nn.Module):
    """The same model in one process, as torch's own documentation would write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, SIZE)
        self.decoder = nn.Linear(SIZE, WORDS)
        torch.manual_seed(1)
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, (h, c) = self.lstm(self.table(words), state)
        return self.decoder(hidden), (h.detach(), c.detach())


def trained_alone(
    rows: Tensor, optimizer: type[torch.optim.Optimizer], lr: float
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after a text in whole batches."""
    model = Whole()
    chosen: Any = optimizer
    opt = chosen(model.parameters(), lr=lr)
    losses, state = [], None
    for start in range(0, rows.shape[1] - LENGTH, LENGTH):
        inputs = rows[:, start : start + LENGTH]
        targets = rows[:, start + 1 : start + LENGTH + 1]
        logits, state = model(inputs, state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


async def trained_across(
    text: Tensor, rows: int, optimizer: type[torch.optim.Optimizer], lr: float, device: str
) -> tuple[list[float], dict[str, Tensor]]:
    """The same on two workers, in microbatches."""
    async with small_model(device=device) as model:
        losses = await model.run(text, rows, await optimizer_of(model, optimizer, lr))
        found: dict[str, Tensor] = {}
        states = [(await call(part, nn.Module.cpu)).state_dict() for part in model.parts]
        for prefix, state in zip(("", "lstm."), states, strict=True):
            found |= {prefix + name: value for name, value in state.items()}
        return losses.tolist(), found


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("optimizer", "lr", "device"),
    [
        (torch.optim.SGD, 1.0, "cpu"),
        (torch.optim.Adam, 0.01, "cpu"),
        pytest.param(torch.optim.SGD, 1.0, "cuda:0", marks=on_gpu),
    ],
    ids=["sgd", "adam", "cuda"],
)
async def test_it_learns_as_in_one_process(
    optimizer: type[torch.optim.Optimizer], lr: float, device: str
) -> None:
    """Microbatches of unequal size, over several steps: losses and parameters are the same."""
    text = some_text()
    losses, expected = trained_alone(text.view(8, -1), optimizer, lr)
    before = Whole().state_dict()
    found_losses, found = await trained_across(text, 8, optimizer, lr, device)
    assert len(losses) == 5
    assert found_losses == pytest.approx(losses, abs=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value - before[name]).abs().max() > 1e-4, f"{name} has not moved"
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


async def test_microbatches_overlap() -> None:
    """All are on their way before the first has come back."""
    async with small_model(MICROBATCHES, kind=Meeting) as model:
        opt = await optimizer_of(model, torch.optim.SGD, 0.1)
        losses = await model.run(some_text(6 * (LENGTH + 1)), 6, opt)
        assert losses.tolist() == [pytest.approx(math.log(WORDS), abs=0.5)]


async def test_modes_reach_the_parameter_server() -> None:
    """Trained, each part drops out; judged, none does, and no graph is made anywhere."""
    async with small_model(dropout=0.5) as model:
        text = some_text()

        async def twice() -> list[list[float]]:
            return [(await model.run(text, 8)).tolist() for _ in range(2)]

        first, second = await twice()
        assert first == second
        for part in model.parts:
            assert not (await fetch(part)).training
        vectors = await call(model.words, Words.vectors, text.view(8, -1))
        assert not vectors.requires_grad
        await call(model.parts, set_training, True)
        for part in model.parts:
            assert (await fetch(part)).training
        assert (await call(model.words, Words.vectors, text.view(8, -1)) == 0).any()


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_is_made_in_training_alone(training: bool) -> None:
    """Where a part is, too: it would be kept there for nobody."""
    text = some_text(20).view(2, 10)
    words = Words(WORDS, SIZE, "cpu", 0.0)
    set_training(words, training)
    vectors = words.vectors(text)
    found = [vectors, words.loss(vectors.detach(), text)]
    assert [each.requires_grad for each in found] == [training] * 2
    assert words.training == training


async def test_what_is_judged_is_what_one_process_computes() -> None:
    """The loss, with the state carried through all chunks of a row."""
    text = some_text(3 * (5 * LENGTH + 1))
    rows, whole = text.view(3, -1), Whole()
    logits, _ = whole(rows[:, :-1], None)
    expected = nn.functional.cross_entropy(logits.reshape(-1, WORDS), rows[:, 1:].reshape(-1))
    async with small_model() as model:
        assert (await model.run(text, 3)).mean().item() == pytest.approx(expected.item(), rel=1e-5)


# ── the corpus ──────────────────────────────────────────────────────────────────────────────────

LONG_TEXTS = st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1), max_size=900)


def topic(number: int, text: list[str]) -> str:
    return " ".join([f"w{number}", *text])  # no paragraph is another one's


@given(LONG_TEXTS)
def test_what_is_held_out_is_not_trained_on(texts: list[list[str]]) -> None:
    """Each paragraph is on one side, in whole passages, in order, and ends with a mark."""
    paragraphs = [topic(number, text) for number, text in enumerate(texts)]
    training, held_out = corpus({"a": "\n\n".join([*paragraphs, *paragraphs[:5]])}, 10_000)
    kept = [n for n in range(len(texts)) if n // 20 % 10 != 9]
    expected = [word for n in kept for word in (f"w{n}", *texts[n], "<end>")]
    if texts:
        assert len(training) == len(expected)
        assert [a == b for a in training[:50] for b in training[:50]] == [
            a == b for a in expected[:50] for b in expected[:50]
        ]
    assert len(held_out) == sum(2 + len(texts[n]) for n in range(len(texts)) if n // 20 % 10 == 9)


def test_the_text_of_this_python() -> None:
    """Enough of it, in the vocabulary of what is trained on."""
    training, held_out = corpus(topics, 500)
    assert len(training) > 30_000
    assert 0.05 < len(held_out) / len(training) < 0.2
    assert training.unique().tolist() == [*range(500)]
    assert held_out.max() < 500


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.integers(2, 12))
def test_numbers_are_words(text: list[str], size: int) -> None:
    """Numbers stand for the most frequent words, 0 for all others."""
    training, _ = corpus({"a": " ".join(text)}, size)
    words = [*text, "<end>"]
    numbers = dict(zip(words, training.tolist(), strict=True))
    assert [numbers[word] for word in words] == training.tolist()
    known = {word for word in words if numbers[word]}
    assert len(known) == len({numbers[word] for word in known}) == min(size - 1, len({*words}))
    counts = Counter(words)
    left_out = [counts[word] for word in words if word not in known]
    assert max(left_out, default=0) <= min(counts[word] for word in known)


@given(st.integers(1, 9), st.integers(7, 60), st.integers(0, 8), st.integers(1, 4))
def test_batches_are_contiguous(count: int, width: int, more: int, microbatches: int) -> None:
    """Row by row a microbatch reads on where it stopped; a target is the word after its input."""
    microbatches, more = min(microbatches, count), min(more, count - 1)
    rows = torch.arange(count * width + more)[: count * width].view(count, width)
    steps = [*chunks(torch.arange(count * width + more), count, microbatches)]
    assert len(steps) == (width - 1) // rnn.LENGTH
    assert all(len(step) == microbatches for step in steps)
    inputs = [torch.cat([each[0] for each in step]) for step in steps]
    targets = [torch.cat([each[1] for each in step]) for step in steps]
    if steps:
        end = len(steps) * rnn.LENGTH
        assert torch.equal(torch.cat(inputs, 1), rows[:, :end])
        assert torch.equal(torch.cat(targets, 1), rows[:, 1 : end + 1])


# ── the program ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_as_a_user_runs_it() -> None:
    """It beats the unigrams on text that it has not seen."""
    said = run("rnn", "--quick")
    printed = re.search(r"held-out perplexity: ([\d.]+), unigram baseline: ([\d.]+)", said)
    assert printed is not None, said
    perplexity, unigram = map(float, printed.groups())
    assert perplexity < 0.9 * unigram


LONG = ("--epochs", "10000", "--words", "200", "--size", "8")


@contextlib.contextmanager
def training() -> Iterator[subprocess.Popen[str]]:
    """The program, for hours, once its first epoch is over."""
    with subprocess.Popen(
        command("rnn", *LONG, python=STRICT),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("epoch 1:"):
                    break
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.exhaustive
def test_the_parameter_server_is_killed() -> None:
    """The trainer ends, soon, and says so with its code."""
    with training() as process:
        (ps,) = workers_of(process)
        start = time.monotonic()
        ps.kill()
        output, _ = process.communicate(timeout=500)
        assert time.monotonic() - start < END
    assert process.returncode != 0
    # The latter from a backward that was under way.
    assert re.search("worker 'ps' is lost|RuntimeError: ", output), output


@pytest.mark.exhaustive
def test_interrupted() -> None:
    """Ctrl-C in training: two seconds, no traceback; a shell shows code 130."""
    with training() as process:
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=500)
        assert time.monotonic() - start < 2.0 + SLACK
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in output
