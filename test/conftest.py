"""The delegate, registered once for the session."""

import pytest


@pytest.fixture(scope="session")
def delegate() -> str:
    """Path of the delegate that ExecuTorch's runtime now has."""
    from executorch_mlx import load_delegate

    return load_delegate()
