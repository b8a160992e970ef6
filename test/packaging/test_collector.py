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
