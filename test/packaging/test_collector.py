"""`paused_collector`."""

import gc

import pytest
from executorch_mlx.collector import paused_collector


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_pauses_in_the_function_only(is_enabled):
    @paused_collector()
    def fail():
        assert not gc.isenabled()
        raise ValueError

    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        for _ in range(2):
            with pytest.raises(ValueError):
                fail()
            assert gc.isenabled() is is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_the_end_of_the_pause_starts_no_search():
    was_enabled, searches = gc.isenabled(), []
    gc.enable()
    gc.callbacks.append(lambda phase, info: searches.append(info["generation"]))
    try:
        with paused_collector():
            kept = [[] for _ in range(100_000)]
        created = [[] for _ in range(100)]
        assert searches == []
        cycle = kept[0]
        cycle.append(cycle)
        del kept, cycle, created
        assert gc.collect() > 0  # the objects of the pause are examined later
    finally:
        gc.callbacks.pop()
        gc.enable() if was_enabled else gc.disable()


def test_frozen_objects_stay_frozen():
    gc.freeze()
    try:
        with paused_collector():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
