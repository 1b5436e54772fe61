"""Answers to the question where calls stand: from this worker, and from those that it waits for."""

import asyncio
import contextvars
import functools
import logging
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._aio.loops import call_soon, run_on_loop
from .._client.pool import Outgoing
from .._server.session import Session
from .._server.standing import MOST_HOLDERS, Subject, View
from .._wire.frames import WHERE
from .._wire.standing import (
    CALL,
    MAX_DEPTH,
    CallNode,
    Key,
    Limits,
    Question,
    dump_answer,
    read_question,
)

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger("aiorpc_torch")

MAX_ANSWERING = 16  # questions that are answered at a time


class Answers:
    """The answers of one worker. On the loop that serves.

    Args:
        worker: the worker.
    """

    def __init__(self, worker: "Node") -> None:
        self._worker = worker
        self._answering: set[asyncio.Task[None]] = set()

    def on_question(self, session: Session, data: bytes) -> None:
        """Answer a question of a peer where its calls stand."""
        question = read_question(data)
        if len(self._answering) >= MAX_ANSWERING:
            return
        answering = asyncio.get_running_loop().create_task(
            self._answer(session, question), name="aiorpc-where", context=contextvars.Context()
        )
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _answer(self, session: Session, question: Question) -> None:
        try:
            server, pool = self._worker.server, self._worker.pool
            found = Tracing(server.view(), pool.outgoing(), server.name)
            nodes = await found.of_session(session, question)
        except Exception as exc:  # frames are read while other threads run them
            log.debug("it is not known where calls stand: %r", exc)
            return
        if session.is_open:
            session.send(WHERE, dump_answer(question.id, nodes))


class Tracing:
    """The calls of one answer, and those that they wait for, over workers.

    Args:
        view: the calls that run here.
        outgoing: the pending calls of this process.
        worker: name of this worker.
    """

    def __init__(self, view: View, outgoing: Sequence[Outgoing], worker: str) -> None:
        self._view, self._worker = view, worker
        self._by_future = {id(each.future): each for each in outgoing}
        self._made_by = defaultdict[Any, list[Outgoing]](list)
        for each in outgoing:
            if (key := each.made_by) is not None:
                self._made_by[key].append(each)

    async def of_session(self, session: Session, question: Question) -> list[CallNode]:
        """Return where calls of a session stand."""
        limits = question.limits.part(len(question.numbers))
        subjects = [self._view.of_number(session, each) for each in question.numbers]
        return await _joined(
            self._of_subject(each, 0, "", True, (*question.path,), limits) for each in subjects
        )

    async def _of_subject(
        self,
        subject: Subject,
        depth: int,
        reason: str,
        is_certain: bool,
        path: Sequence[Key],
        limits: Limits,
    ) -> list[CallNode]:
        node = subject.node(self._worker, depth, reason, is_certain=is_certain)
        if subject.key in path:
            return [node._replace(is_again=True)]
        path = (*path, subject.key)
        if len(path) > MAX_DEPTH or limits.most <= 1:
            return [node]
        calls, are_certain = self._calls_of(subject)
        by_connection = defaultdict[Any, list[Outgoing]](list)
        for each in calls:
            by_connection[each.loop, each.connection].append(each)
        holders = subject.holders[:MOST_HOLDERS]
        part = limits.part(len(by_connection) + len(holders))
        below = (
            *(
                self._of_subject(each, depth + 1, what, is_sure, path, part)
                for what, is_sure, each in holders
            ),
            *(
                _asked(each, path, part, depth + 1, is_certain=are_certain)
                for each in by_connection.values()
            ),
        )
        return [node, *await _joined(below)]

    def _calls_of(self, subject: Subject) -> tuple[list[Outgoing], bool]:
        """Return the calls that a subject waits for, and whether it certainly does."""
        found = [
            self._by_future[id(each)] for each in subject.futures if id(each) in self._by_future
        ]
        if found or subject.awaits is None:
            return found, True
        return self._made_by.get(subject.call_key, []), subject.awaits


async def _asked(
    calls: Sequence[Outgoing], path: Sequence[Key], limits: Limits, depth: int, *, is_certain: bool
) -> list[CallNode]:
    found = await ask(calls, path, limits)
    return [each.below(depth, CALL, is_certain=is_certain) for each in found]


async def _joined(answers: "Iterable[Coroutine[Any, Any, list[CallNode]]]") -> list[CallNode]:
    return [node for each in await asyncio.gather(*answers) for node in each]


async def ask(calls: Sequence[Outgoing], path: Sequence[Key], limits: Limits) -> list[CallNode]:
    """Ask the peer of a connection where calls of it stand, those of `path` excepted.

    A peer that does not answer in time costs no more than that time.
    """
    loop, connection, *_ = calls[0]
    own, answer = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def complete(nodes: Sequence[CallNode]) -> None:
        if not answer.done():
            answer.set_result(nodes)

    numbers = [each.number for each in calls]
    then = functools.partial(call_soon, own, complete)
    run_on_loop(loop, connection.questions.ask, numbers, path, limits, then)
    await asyncio.wait((answer,), timeout=limits.seconds * 1.2)  # that loop may be blocked
    return [*answer.result()] if answer.done() else []
