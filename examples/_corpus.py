"""The topics of `help()` as a corpus of numbers: a text that every Python has.

They are pages of the language reference, of which some passages are held out. A paragraph that
several topics share is kept once, so no held-out paragraph is seen in training. This module has no
code for models or workers.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Paragraph = tuple[str, ...]

UNKNOWN, END = "<unk>", "<end>"  # a word outside the vocabulary; the end of a paragraph
PASSAGE, EVERY = 20, 10  # paragraphs in a passage; every `EVERY`th passage is held out

WORD = re.compile(r"\w+|([^\w\s])\1*")  # a word, or a repeated mark: "====" is one word
BLANK = re.compile(r"\n\s*\n")


class Corpus(NamedTuple):
    """Training text and held-out text, in words of one vocabulary."""

    words: list[str]  # by number
    training: Tensor  # [N] int64
    held_out: Tensor  # [M] int64


def python_topics() -> Mapping[str, str]:
    """Return the texts of `help("while")` and the like, of this Python."""
    from pydoc_data.topics import topics

    return topics


def corpus(topics: Mapping[str, str], size: int) -> Corpus:
    """Encode the topics in the `size` most frequent training words, <unk> and <end> included."""
    training, held_out = split(paragraphs(topics))
    words = vocabulary(training, size)
    return Corpus(words, encode(training, words), encode(held_out, words))


def paragraphs(topics: Mapping[str, str]) -> list[Paragraph]:
    """Return the paragraphs in lower case, by the topics' names, each once."""
    found = (
        tuple(match.group().lower() for match in WORD.finditer(text))
        for name in sorted(topics)
        for text in BLANK.split(topics[name])
    )
    return [paragraph for paragraph in dict.fromkeys(found) if paragraph]


def split(text: Sequence[Paragraph]) -> tuple[list[Paragraph], list[Paragraph]]:
    """Split the text into passages to train on and passages held out."""
    training: list[Paragraph] = []
    held_out: list[Paragraph] = []
    for number, paragraph in enumerate(text):
        last = number // PASSAGE % EVERY == EVERY - 1
        (held_out if last else training).append(paragraph)
    return training, held_out


def vocabulary(text: Iterable[Paragraph], size: int) -> list[str]:
    """Return <unk>, <end> and the most frequent words: `size` of them, or all there are."""
    counts = Counter(word for paragraph in text for word in paragraph)
    return [UNKNOWN, END, *(word for word, _ in counts.most_common(size - 2))]


def encode(text: Iterable[Paragraph], words: Sequence[str]) -> Tensor:
    """Return the numbers of the words [N], with an <end> after each paragraph."""
    numbers = {word: number for number, word in enumerate(words)}
    unknown, end = numbers[UNKNOWN], numbers[END]
    found: list[int] = []
    for paragraph in text:
        found += [numbers.get(word, unknown) for word in paragraph]
        found.append(end)
    return torch.tensor(found, dtype=torch.int64)


def prose(words: Iterable[str]) -> str:
    """Join words into readable text."""
    text = " ".join(words).replace(f" {END}", "\n").replace(f"{END} ", "")
    return re.sub(r" ([.,:;)\]}])|([(\[{]) ", lambda found: found[1] or found[2], text)


def streams(text: Tensor, count: int) -> Tensor:
    """Cut the text [N] into rows [count, N // count] that are read side by side.

    Raises:
        ValueError: if a row would have fewer than two words.
    """
    length = len(text) // count
    if length < 2:
        raise ValueError(f"{len(text)} words are too few for {count} rows")
    return text[: count * length].view(count, length)


def chunks(rows: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [rows, length] from left to right.

    A target is the word after its input. The last chunk is shorter. Every word is an input once,
    except the last of each row.
    """
    for start in range(0, rows.shape[1] - 1, length):
        end = min(start + length, rows.shape[1] - 1)
        yield rows[:, start:end], rows[:, start + 1 : end + 1]


def unigram_perplexity(training: Tensor, targets: Tensor, size: int) -> float:
    """Return the perplexity of a guess by word counts in training (plus one), without context."""
    counts = torch.bincount(training, minlength=size) + 1.0
    return math.exp(-(counts / counts.sum()).log()[targets].mean().item())
