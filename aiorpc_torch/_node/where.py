"""Answers to the question where calls stand: from this worker, and from those that it waits for."""

import asyncio
import contextvars
import functools
import logging
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._aio.loops import call_soon, run_on_loop
from .._client.call import RemoteCall
from .._client.pool import Outgoing
from .._client.stream_reader import StreamReader
from .._endpoint.answers import block_of
from .._server.session import Session
from .._server.where import MOST_HOLDERS, Subject, View
from .._wire.frames import WHERE
from .._wire.plain import dump
from .._wire.targets import FunctionTarget
from .._wire.where import (
    BLOCK,
    CALL,
    MAX_DEPTH,
    CallNode,
    Key,
    Limits,
    Question,
    dump_answer,
    read_answer,
    read_question,
)

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger("aiorpc_torch")

MAX_ANSWERING = 16  # questions that are answered at a time


class Answers:
    """The answers of one worker. On the loop that serves."""

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
            nodes = await tracing(self._worker).of_session(session, question)
        except Exception as exc:  # frames are read while other threads run them
            log.debug("it is not known where calls stand: %r", exc)
            return
        if session.is_open:
            session.send(WHERE, dump_answer(question.id, nodes))


class Tracing:
    """The calls of one answer, which run here, and those that they wait for, over workers."""

    def __init__(self, view: View, outgoing: Sequence[Outgoing], worker: str) -> None:
        self._view, self._worker, self._outgoing = view, worker, outgoing
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

    async def of_block(self, connection: int, question: Question) -> list[CallNode]:
        """Return where the call stands that has entered a context manager by a call of its own."""
        for each in self._outgoing:
            if (each.connection.key[-1], [each.number]) != (connection, question.numbers):
                continue
            reader = each.receiver
            if not isinstance(reader, StreamReader):
                continue
            found = self._view.of_block(reader.entered_by, reader.entered_in())
            if found is not None:
                subject, is_certain = found
                path, limits = (*question.path,), question.limits
                return await self._of_subject(subject, 0, "", is_certain, path, limits)
        return []

    async def _of_subject(
        self,
        subject: Subject,
        depth: int,
        reason: str,
        is_certain: bool,
        path: Sequence[Key],
        limits: Limits,
    ) -> list[CallNode]:
        of, stands = subject, (subject.state, subject.lines, subject.inside)
        node = CallNode(
            depth, of.key, of.name, self._worker, of.caller, of.age, *stands, reason, is_certain
        )
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
        part = limits.part(len(by_connection) + len(holders) + subject.is_entered)
        below = (
            *(
                self._of_subject(each, depth + 1, what, is_sure, path, part)
                for what, is_sure, each in holders
            ),
            *(
                _asked(each, path, part, depth + 1, is_certain=are_certain)
                for each in by_connection.values()
            ),
            *([_asked_block(subject.key, path, part, depth + 1)] if subject.is_entered else ()),
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


def tracing(worker: "Node") -> Tracing:
    """Return the calls of a worker, as they stand now."""
    server = worker.server
    view = View(server.name, server.open_calls(), server.executor)
    return Tracing(view, worker.pool.outgoing(), server.name)


async def _asked(
    calls: Sequence[Outgoing], path: Sequence[Key], limits: Limits, depth: int, *, is_certain: bool
) -> list[CallNode]:
    found = await ask(calls, path, limits)
    return [each.below(depth, CALL, is_certain=is_certain) for each in found]


async def _asked_block(key: Key, path: Sequence[Key], limits: Limits, depth: int) -> list[CallNode]:
    """Ask the caller of a context manager where the block stands that has entered it."""
    caller, _, connection, number = key
    data = dump(Question(0, [number], [*path], limits))
    try:
        async with asyncio.timeout(limits.seconds):
            call = RemoteCall(caller, FunctionTarget(block_of), None, connection, data)
            _, found = read_answer(await call)
    except Exception as exc:  # it is gone, or blocked
        log.debug("it is not known where a block of %r stands: %r", caller, exc)
        return []
    return [each.below(depth, BLOCK, is_certain=each.is_certain) for each in found]


async def _joined(answers: "Iterable[Coroutine[Any, Any, list[CallNode]]]") -> list[CallNode]:
    return [node for each in await asyncio.gather(*answers) for node in each]


async def ask(calls: Sequence[Outgoing], path: Sequence[Key], limits: Limits) -> list[CallNode]:
    """Ask a peer where calls of its connection stand, but those of `path`, in bounded time."""
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
