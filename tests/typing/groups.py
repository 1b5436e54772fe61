"""Groups and named objects as a user writes them: checked by mypy and pyright, never run."""

from collections.abc import AsyncIterator, Iterable
from typing import Any, assert_type

from torch import Tensor

from aiorpc_torch import (
    Group,
    GroupError,
    RRef,
    batched,
    call,
    create,
    each,
    fetch,
    lookup,
    proxy,
    register,
    remote,
    supervised,
    unregister,
)
from aiorpc_torch.types import Supervised, SupervisedProxy


class Env:
    def __init__(self, agent: RRef[Any], seed: int, *, scale: float = 1.0) -> None: ...

    async def train(self, steps: int) -> float:
        return float(steps)

    def reset(self, seed: int = 0) -> Tensor:
        raise NotImplementedError

    async def pair(self, x: Tensor, name: str) -> list[str]:
        return [name]

    @batched(max_size=8)
    async def act(self, states: list[Tensor]) -> list[int]:
        return [0 for _ in states]


class Other:
    pass


async def make_env(seed: int) -> Env:
    raise NotImplementedError


def norm(env: Env) -> float:
    return 1.0


async def creation(agent: RRef[Any], seeds: Iterable[int], rows: Tensor) -> None:
    """`create` keeps the class and its parameters; `each` has the type of its values."""
    envs = await create(["env0", "env1"], Env, agent, each(seeds), scale=each([1.0, 2.0]))
    assert_type(envs, Group[Env])
    assert_type(await create(range(2), make_env, each(range(3))), Group[Env])
    assert_type(each([1, 2]), int)
    await create(["env0"], Env, agent, each(["a"]))  # type: ignore[call-overload]  # pyright: ignore


async def calls(envs: Group[Env], x: Tensor) -> None:
    """`call` sees parameters and results; `remote` sees the members."""
    assert_type(await call(envs, Env.train, 100), list[float])
    assert_type(await call(envs, Env.reset, each([1, 2])), list[Tensor])
    assert_type(await call(envs, norm), list[float])
    async for member, loss in call(envs, Env.train, steps=100):
        assert_type(member, RRef[Env])
        assert_type(loss, float)
    async for member, _ in remote(envs, timeout=1.0).train(100):
        assert_type(member, RRef[Env])
    assert_type(await remote(envs).train(100), list[Any])
    await call(envs, Env.train, "x")  # type: ignore[call-overload]  # pyright: ignore


async def functions_on_workers(x: Tensor) -> None:
    """A list or tuple of workers in place of one gives a list of the results."""
    assert_type(await call(["a", "b"], make_env, each([1, 2])), list[Env])
    assert_type(await call(("a", 1), len, "abc"), list[int])
    async for worker, length in call(["a", "b"], len, "abc"):
        assert_type(worker, str)
        assert_type(length, int)
    await call(["a"], make_env, "1")  # type: ignore[call-overload]  # pyright: ignore


async def results_that_stay(envs: Group[Env]) -> None:
    """`create` with a group has an RRef of the result of each member."""
    assert_type(await create(envs, Env.reset, each([1, 2])), Group[Tensor])
    assert_type(await create(remote(envs), Env.train, 3), Group[float])


async def one_of_them(envs: Group[Env], x: Tensor) -> None:
    """`any` is what an RRef is to `call` and `remote`."""
    assert_type(await call(envs.any(), Env.train, 3), float)
    assert_type(await call(envs.any(), Env.reset), Tensor)
    await remote(envs.any(), timeout=1.0).train(3)
    await fetch(envs.any())  # type: ignore[arg-type]  # pyright: ignore
    await fetch(envs)  # type: ignore[arg-type]  # pyright: ignore


async def numbers() -> AsyncIterator[int]:
    yield 1


async def queue(envs: Group[Env], xs: list[Tensor]) -> None:
    """`map` sees the items of the first two iterables, and the results."""
    async for loss in envs.map(Env.train, [1, 2]):
        assert_type(loss, float)
    async for loss in envs.map(Env.train, numbers(), in_flight=4, retries=0):
        assert_type(loss, float)
    async for first in envs.map(Env.reset, range(3)):
        assert_type(first, Tensor)
    async for seed, began in envs.map_unordered(Env.reset, range(3)):
        assert_type((seed, began), tuple[int, Tensor])
    async for _, loss in envs.map_unordered(Env.train, numbers()):
        assert_type(loss, float)
    async for outcome in envs.map(Env.train, [1, 2], return_exceptions=True):
        assert_type(outcome, float | BaseException)
    async for _, outcome in envs.map_unordered(Env.train, [1, 2], return_exceptions=True):
        assert_type(outcome, float | BaseException)
    async for names in envs.map(Env.pair, xs, "abc"):
        assert_type(names, list[str])


def groups(envs: Group[Env], env: RRef[Env], other: RRef[Other]) -> None:
    """A Group is a sequence of RRefs, of one class or of several."""
    assert_type(envs[0], RRef[Env])
    assert_type(envs[1:], Group[Env])
    assert_type(Group([env, env]), Group[Env])
    assert_type([*envs], list[RRef[Env]])
    mixed: Group[Env | Other] = Group([env, other])
    assert_type(mixed[0], RRef[Env | Other])


async def names() -> None:
    assert_type(register("norm", 3), RRef[int])
    assert_type(await lookup("norm", on="ps"), RRef[Any])
    env: RRef[Env] = await lookup("env", on=0)
    unregister("norm")
    await remote(env).train(1)


def errors(error: GroupError) -> None:
    assert_type(error.exceptions, tuple[Exception | ExceptionGroup[Exception], ...])
    assert_type(error.results, list[Any])


async def supervision(agent: RRef[Any]) -> None:
    env = await supervised("env0", Env, agent, 1)
    assert_type(env, Supervised[Env])
    assert_type(await supervised("env0", make_env, 1), Supervised[Env])
    assert_type(env.rref, RRef[Env])
    assert_type(await call(env, Env.train, 3), float)
    assert_type(proxy(env), Env)
    assert_type(await fetch(env), Env)
    assert_type(Group([env]), Group[Env])
    assert_type(await supervised([0, 1], Env, agent, each([1, 2])), Group[Env])
    assert_type(await create(env, Env.reset), RRef[Tensor])
    assert_type(remote(env, retries=2), SupervisedProxy[Env])
    await supervised("env0", Env, agent, "1")  # type: ignore[call-overload]  # pyright: ignore
    remote(env, timeout=3)
