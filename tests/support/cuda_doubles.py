"""Recorded doubles of CUDA streams, events and tensors, for machines without a device."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

ZERO, ONE = torch.device("cuda:0"), torch.device("cuda:1")

Entry = tuple[Any, ...]


class Streams:
    """A double of torch's streams. `log` has what was queued on which stream, in order."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.current: dict[torch.device, Stream] = {}
        self.made = 0
        self.busy = 0  # queries that find work on a stream
        self.is_capturing = False

    def current_stream(self, device: Any = None) -> "Stream":
        device = ZERO if device is None else torch.device(device)
        return self.current.setdefault(device, Stream(self, f"default of {device}", device))

    def new_stream(self, device: Any = None, priority: int = 0) -> "Stream":
        found = torch.device(device)
        self.made += 1
        name = f"stream {self.made}"
        self.log.append(("new", name, priority))
        return Stream(self, name, torch.device("cuda", found.index or 0))

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before = self.current_stream(stream.device)
        self.current[stream.device] = stream
        try:
            yield
        finally:
            self.current[stream.device] = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Streams":
        """Put the doubles in the place of torch's."""
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: Event(self, "unrecorded"))
        return self


class Stream:
    def __init__(self, streams: Streams, name: str, device: torch.device) -> None:
        self._streams = streams
        self.name = name
        self.device = device

    def __repr__(self) -> str:
        return self.name

    def record_event(self, event: "Event | None" = None) -> "Event":
        self._streams.log.append(("record", self.name))
        return Event(self._streams, self.name)

    def wait_event(self, event: "Event") -> None:
        self._streams.log.append(("wait", self.name, event.of))


class Event:
    def __init__(self, streams: Streams, of: str) -> None:
        self._streams = streams
        self.of = of

    def query(self) -> bool:
        self._streams.log.append(("query", self.of))
        self._streams.busy -= 1
        return self._streams.busy < 0

    def synchronize(self) -> None:
        self._streams.log.append(("synchronize", self.of))


class CudaTensor(torch.Tensor):
    """A tensor without elements that says it is on a device, and notes the streams that use it."""

    is_cuda = True  # type: ignore[assignment]
    _device = ZERO
    _layout = torch.strided
    used_on: list[str]

    @staticmethod
    def on(device: torch.device, layout: torch.layout = torch.strided) -> "CudaTensor":
        found = torch.ones(2).as_subclass(CudaTensor)
        found._device, found._layout, found.used_on = device, layout, []
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        return self._layout

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.used_on.append(stream.name)

    def cpu(self) -> Any:  # type: ignore[override]
        return "copied to the CPU"
