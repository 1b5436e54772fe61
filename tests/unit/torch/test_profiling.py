"""Events of calls end with the profiler that they began under."""

import threading

from torch.profiler import ProfilerActivity, profile

from aiorpc_torch._torch.profiling import call_event


def test_a_profiler_that_stops_ends_the_events_of_its_thread() -> None:
    """Those of other threads stay open: torch drops an event that another thread ends."""
    others = []

    def begin() -> None:
        others.append(call_event("call", "f", "a", "b"))

    with profile(activities=[ProfilerActivity.CPU]):
        event = call_event("call", "f", "a", "b")
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        assert event.record is not None
    assert event.record is None
    assert others[0].record is not None
