"""A griffe extension: functions of `contextlib` are shown as the context managers they make."""

from typing import Any

import griffe

KEYWORDS = {
    "contextlib.contextmanager": "with",
    "contextlib.asynccontextmanager": "async with",
}


class ContextManagers(griffe.Extension):
    """Replace `-> AsyncIterator[Worker]` by `-> Worker`, and note the keyword for the template."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Note the keyword of a decorated function."""
        for decorator in func.decorators:
            if keyword := KEYWORDS.get(decorator.callable_path):
                assert isinstance(func.returns, griffe.ExprSubscript)
                func.returns = func.returns.slice
                func.labels.discard("async")
                func.extra["context_manager"]["keyword"] = keyword
