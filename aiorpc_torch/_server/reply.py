"""What answers a message in a context of autograd, once all that its call has called is answered.

Knows the recording of that call, and torch's future; not what the answer says.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._protocol.recording import Recording
from .._torch.autograd import arrive, cut, leave

log = logging.getLogger("aiorpc_torch")


class Reply:
    """Stands for the future of a message in a context, and completes it when all is settled.

    What the call has called in turn is answered by then, even if nobody waited for it: or its
    gradients would be waited for by torch, for ever, and the context be made anew by its answer.
    """

    def __init__(self, future: Any, recording: Recording) -> None:
        self.recording = recording
        self._future = future

    def set_result(self, answer: Any) -> None:
        """Answer with bytes, or with bytes and tensors."""
        self.recording.when_settled(lambda: self._complete(answer), close=True)

    def _complete(self, answer: Any) -> None:
        recording = self.recording
        ends = recording.ends
        recording.close()
        data, tensors = (answer, []) if isinstance(answer, bytes) else answer
        lost = recording.lost[:]
        # On the loop's thread, in which a coroutine that waits may have left its no_grad().
        with torch.enable_grad():
            try:
                kept = tensors if recording.keeps_graph else cut(tensors)
                tensors, token = leave(kept, ends)
            except Exception as exc:  # nobody must wait for an answer without end
                tensors, token = cut(tensors), None
                lost.append(f"a result that autograd does not take: {exc!r}")
            answer = data, tensors, token, lost
            try:
                self._future.set_result(answer if tensors or token is not None or lost else data)
            except Exception as exc:  # torch has stopped: nobody is there to be answered
                log.debug("no answer in context %d: %s", recording.id, exc)


def recorded(context: int, future: Any, tensors: Sequence[Tensor]) -> Any:
    """A message of that context, -1 of none, has come in with these tensors: what answers it."""
    if context < 0:
        return future
    return Reply(future, Recording(context, arrive(tensors)))
