"""The language model across workers: its gradients, its corpus, and the program as it is run."""

import argparse
import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from aiorpc_torch import RRef, call, create, fetch
from aiorpc_torch.testing import world
from examples import _corpus as corpora, rnn
from examples._language import Decoder, EmbeddingTable, Model, set_training
from tests.support.embedding_tables import MICROBATCHES, Meeting
from tests.support.example_programs import ROOT, STRICT, command, run, workers_of
from tests.support.slack import SLACK

WORDS = 30
STEPS = 5


def options(*args: str, **others: Any) -> argparse.Namespace:
    """A small model's."""
    small = ["--size", "12", "--batch", "8", "--microbatches", "3", "--length", "6"]
    found = rnn.arguments([*small, "--dropout", "0", *args])
    return argparse.Namespace(**{**vars(found), **others})


@contextlib.asynccontextmanager
async def small_model(dropout: float = 0.0) -> AsyncIterator[Model]:
    async with world(["ps"]):
        yield await Model.create("ps", WORDS, size=12, dropout=dropout, device="cpu", seed=0)


def some_text(length: int = 1000) -> Tensor:
    return torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(0))


# ── what it learns is what one process would learn ──────────────────────────────────────────────


class Whole(nn.Module):
    """The same model in one process, as torch's own documentation would write it."""

    def __init__(self, words: int, size: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(words, size)
        torch.manual_seed(seed + 1)
        self.linear = nn.Linear(size, words)
        torch.manual_seed(seed + 2)
        self.lstm = nn.LSTM(size, size, batch_first=True)

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, (h, c) = self.lstm(self.table(words), state)
        return self.linear(hidden), (h.detach(), c.detach())


def trained_alone(
    rows: Tensor, optimizer: type[torch.optim.Optimizer], given: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after some steps with whole batches."""
    model = Whole(WORDS, given.size, given.seed)
    chosen: Any = optimizer
    opt = chosen(model.parameters(), lr=given.lr)
    losses, state = [], None
    for step in range(STEPS):
        start = step * given.length
        inputs = rows[:, start : start + given.length]
        targets = rows[:, start + 1 : start + given.length + 1]
        logits, state = model(inputs, state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        for group in opt.param_groups:
            group["lr"] = rnn.rate(step, STEPS, given.lr)
        opt.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


async def trained_across(
    rows: Tensor, optimizer: type[torch.optim.Optimizer], given: argparse.Namespace
) -> tuple[list[float], dict[str, Tensor]]:
    """The same on two workers, in microbatches."""
    async with world(["ps"]):
        trainer = await rnn.Trainer.create(WORDS, given, optimizer)
        batches = rnn.batches(rows, given.microbatches, given.length)
        losses = [
            await trainer.step(batch, rnn.rate(step, STEPS, given.lr), given.clip)
            for step, batch in zip(range(STEPS), batches, strict=False)
        ]
        found: dict[str, Tensor] = {}
        for prefix, part in zip(("", "lstm.", ""), trainer.model.parts, strict=True):
            state = (await call(part, nn.Module.cpu)).state_dict()
            found |= {prefix + name: value for name, value in state.items()}
        return losses, found


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("optimizer", "lr", "clip", "device"),
    [
        (torch.optim.SGD, "1.0", "1000", "cpu"),
        (torch.optim.SGD, "1.0", "0.05", "cpu"),
        (torch.optim.Adam, "0.01", "0.05", "cpu"),
        pytest.param(torch.optim.SGD, "1.0", "0.05", "cuda:0", marks=on_gpu),
    ],
    ids=["sgd", "clipped", "adam", "cuda"],
)
async def test_it_learns_as_in_one_process(
    optimizer: type[torch.optim.Optimizer], lr: str, clip: str, device: str
) -> None:
    """Microbatches of unequal size, a schedule, clipping: losses and parameters are the same."""
    given = options("--lr", lr, "--clip", clip, "--device", device)
    rows = corpora.streams(some_text(), given.batch)
    losses, expected = trained_alone(rows, optimizer, given)
    before = Whole(WORDS, given.size, given.seed).state_dict()
    found_losses, found = await trained_across(rows, optimizer, given)
    assert found_losses == pytest.approx(losses, abs=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value - before[name]).abs().max() > 1e-4, f"{name} has not moved"
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


async def test_microbatches_overlap() -> None:
    """All are on their way before the first has come back."""
    async with small_model() as model:
        table: RRef[Any] = await create("ps", Meeting, WORDS, 12, 0.0, "cpu", 0)
        cut = Model(table, model.lstm, model.decoder)
        opt = await rnn.DistributedOptimizer.create(
            torch.optim.SGD, await rnn.parameter_rrefs(table), lr=0.1
        )
        trainer = rnn.Trainer(cut, opt, MICROBATCHES)
        rows = corpora.streams(some_text(), 6)
        batch = next(rnn.batches(rows, MICROBATCHES, 6))
        assert await trainer.step(batch, 0.1, 1.0) == pytest.approx(math.log(WORDS), abs=0.5)


async def test_modes_reach_the_parameter_server() -> None:
    """Trained, each part drops out; judged, none does, and no graph is made anywhere."""
    async with small_model(dropout=0.5) as model:
        words, targets = some_text(20).view(2, 10), some_text(20).view(2, 10)

        async def twice() -> list[float]:
            return [(await model.loss((words, targets), None))[0].item() for _ in range(2)]

        first, second = await twice()
        assert first != second
        assert (await call(model.embeddings, EmbeddingTable.forward, words) == 0).any()
        await model.train(False)
        first, second = await twice()
        assert first == second
        hidden, _ = await model.read(words, None)
        assert not hidden.requires_grad
        for part in model.parts:
            assert not (await fetch(part)).training
        await call(model.decoder, set_training, True)
        assert (await fetch(model.decoder)).training


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_is_made_in_training_alone(training: bool) -> None:
    """Where a part is, too: it would be kept there for nobody."""
    words = some_text(20).view(2, 10)
    table, decoder = EmbeddingTable(WORDS, 12, 0.0, "cpu", 0), Decoder(12, WORDS, 0.0, "cpu", 0)
    table.train(training)
    decoder.train(training)
    vectors = table(words)
    found = [vectors, decoder(vectors.detach()), decoder.loss(vectors.detach(), words)]
    assert [each.requires_grad for each in found] == [training] * 3


async def test_what_is_judged_is_what_one_process_computes() -> None:
    """Perplexity, with the state carried through all chunks of a row."""
    rows = corpora.streams(some_text(90), 3)
    whole = Whole(WORDS, 12, 0)
    logits, _ = whole(rows[:, :-1], None)
    expected = nn.functional.cross_entropy(logits.reshape(-1, WORDS), rows[:, 1:].reshape(-1))
    async with small_model() as model:
        assert await model.perplexity(rows, 7) == pytest.approx(expected.exp().item(), rel=1e-5)


async def test_what_is_written_is_of_the_seed() -> None:
    """So many words, the same ones for one seed, and never the one that is ruled out."""
    async with small_model() as model:
        texts = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            texts.append(await model.write(first=3, never=5, length=40, temperature=2.0))
        assert texts[0] == texts[1] != texts[2]
        assert [len(text) for text in texts] == [40] * 3
        assert 5 not in {word for text in texts for word in text}


@given(steps=st.integers(1, 2000), peak=st.floats(1e-4, 10))
def test_the_learning_rate_rises_and_falls(steps: int, peak: float) -> None:
    """From above 0 to the peak, and never up again."""
    rates = [rnn.rate(step, steps, peak) for step in range(steps)]
    top = rates.index(max(rates))
    assert rates[top] == pytest.approx(peak)
    assert rates[0] == pytest.approx(peak / max(1, round(rnn.WARM * steps)))
    assert min(rates) > 0
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


# ── the corpus ──────────────────────────────────────────────────────────────────────────────────

TOPICS = st.dictionaries(
    st.text(max_size=3),
    st.lists(st.sampled_from(["a b", "A  b", "c.", "", "== d", "é"]) | st.text(max_size=6)).map(
        "\n\n".join
    ),
    max_size=6,
)
LONG = st.integers(0, 900).map(lambda count: [(str(number),) for number in range(count)])


@given(TOPICS)
def test_a_paragraph_is_kept_once(topics: dict[str, str]) -> None:
    """Whatever topics share; nothing that is a word or a mark is lost."""
    found = corpora.paragraphs(topics)
    assert len(set(found)) == len(found)
    assert all(found)
    marks = {mark for text in topics.values() for mark in text.lower() if not mark.isspace()}
    assert {mark for paragraph in found for word in paragraph for mark in word} == marks


@given(LONG)
def test_what_is_held_out_is_not_trained_on(text: list[corpora.Paragraph]) -> None:
    """Each paragraph is on one side, in its order, in whole passages; about a tenth is held out."""
    training, held_out = corpora.split(text)
    assert not set(training) & set(held_out)
    assert sorted(training + held_out, key=lambda one: int(one[0])) == text
    assert len(text) // 10 - corpora.PASSAGE < len(held_out) <= len(text) // 10 + corpora.PASSAGE
    numbers = [int(one[0]) for one in held_out]
    for start in range(0, len(numbers), corpora.PASSAGE):
        passage = numbers[start : start + corpora.PASSAGE]
        assert passage == [*range(passage[0], passage[0] + len(passage))]


def test_the_text_of_this_python() -> None:
    """Enough of it, in the vocabulary of what is trained on, and nothing held out is in both."""
    training, held_out = corpora.split(corpora.paragraphs(corpora.python_topics()))
    assert not set(training) & set(held_out)
    text = corpora.corpus(corpora.python_topics(), 500)
    assert len(text.words) == len(set(text.words)) == 500
    assert len(text.training) > 30_000
    assert 0.05 < len(text.held_out) / len(text.training) < 0.2
    assert set(text.words) <= {word for one in training for word in one} | {"<unk>", "<end>"}


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1).map(tuple)), st.integers(2, 12))
def test_numbers_are_words(text: list[corpora.Paragraph], size: int) -> None:
    """Numbers stand for the most frequent words, <unk> for all others, <end> ends a paragraph."""
    words = corpora.vocabulary(text, size)
    assert len(words) <= size
    counts = {word: sum(one.count(word) for one in text) for word in "abcdefgh"}
    left_out = [counts[word] for word in counts if word not in words]
    assert max(left_out, default=0) <= min((counts[word] for word in words[2:]), default=math.inf)
    expected = [word if word in words else "<unk>" for one in text for word in (*one, "<end>")]
    assert [words[number] for number in corpora.encode(text, words).tolist()] == expected


@given(st.integers(2, 300), st.integers(1, 9), st.integers(1, 40), st.integers(1, 4))
def test_batches_are_contiguous(length: int, count: int, chunk: int, microbatches: int) -> None:
    """Row by row a microbatch reads on where it stopped; a target is the word after its input."""
    text = torch.arange(length)
    if length < 2 * count:
        with pytest.raises(ValueError, match=f"{length} words are too few for {count} rows"):
            corpora.streams(text, count)
        return
    rows = corpora.streams(text, count)
    microbatches = min(microbatches, count)
    steps = [*rnn.batches(rows, microbatches, chunk)]
    assert len(steps) == math.ceil((rows.shape[1] - 1) / chunk)
    inputs, targets = [], []
    for step in steps:
        assert len(step) == microbatches
        assert all(len(each[0]) > 0 for each in step)
        inputs.append(torch.cat([each[0] for each in step]))
        targets.append(torch.cat([each[1] for each in step]))
    assert torch.equal(torch.cat(inputs, 1), rows[:, :-1])
    assert torch.equal(torch.cat(targets, 1), rows[:, :-1] + 1)
    assert torch.equal(rows.flatten(), text[: rows.numel()])


def test_the_baseline() -> None:
    """A guess from frequencies: exact for a fair coin, finite for what never occurred."""
    coin = torch.tensor([0, 1] * 50)
    assert corpora.unigram_perplexity(coin, coin, 2) == pytest.approx(2)
    assert corpora.unigram_perplexity(coin, torch.tensor([2]), 3) == pytest.approx(103)


def test_prose() -> None:
    """Marks stand where they are written."""
    words = ["<end>", "a", "(", "b", ")", ",", "c", ".", "<end>", "d"]
    assert corpora.prose(words) == "a (b), c.\n d"


# ── the program ─────────────────────────────────────────────────────────────────────────────────


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    """It beats the unigrams on text that it has not seen, writes some and draws its curves."""
    picture = tmp_path / "curves.png"
    said = run("rnn", "--quick", "--plot", str(picture))
    printed = re.search(r"held-out perplexity: ([\d.]+), unigram baseline: ([\d.]+)", said)
    assert printed is not None, said
    perplexity, unigram = map(float, printed.groups())
    assert perplexity < 0.9 * unigram
    assert "<unk>" not in said
    assert picture.read_bytes().startswith(b"\x89PNG")


LONG = ("--epochs", "10000", "--length", "200")


@contextlib.contextmanager
def training() -> Iterator[subprocess.Popen[str]]:
    """The program, for hours, once its first epoch is over."""
    with subprocess.Popen(
        command("rnn", "--quick", "--plot", os.devnull, *LONG, python=STRICT),
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


@pytest.mark.slow
def test_the_parameter_server_is_killed() -> None:
    """The trainer ends, soon, and says so with its code."""
    with training() as process:
        (ps,) = workers_of(process)
        start = time.monotonic()
        ps.kill()
        output, _ = process.communicate(timeout=15)
        assert time.monotonic() - start < 15
    assert process.returncode != 0
    # The latter from a backward that was under way.
    assert re.search("worker 'ps' is lost|RuntimeError: ", output), output


@pytest.mark.slow
def test_interrupted() -> None:
    """Ctrl-C in training: two seconds, code 130, no traceback."""
    with training() as process:
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=500)
        assert time.monotonic() - start < 2.0 + SLACK
    assert process.returncode == 130
    assert "Traceback" not in output
