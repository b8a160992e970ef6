"""The delegate, registered once for the session; small language models, exported once."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    """What a test draws from torch does not hang on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def delegate() -> str:
    """Path of the delegate that ExecuTorch's runtime now has."""
    from executorch_mlx import load_delegate

    return load_delegate()


@pytest.fixture(scope="session")
def chat_program(tmp_path_factory) -> Path:
    """Takes every parameter, and returns logits too."""
    import small_llm
    from executorch_mlx.llm.parameters import Sampling

    sampling = Sampling(penalties=32, logit_bias=4, allowed_tokens=True)
    return small_llm.shared(tmp_path_factory, "chat", outputs="both", sampling=sampling)


@pytest.fixture(scope="session")
def logits_program(tmp_path_factory) -> Path:
    """Has no head, no tokenizer and no token bytes."""
    import small_llm

    return small_llm.shared(tmp_path_factory, "logits", outputs="logits", tokenizer=None)


@pytest.fixture(scope="session")
def rows_program(tmp_path_factory) -> Path:
    """Three sequences side by side, and a head without options."""
    import small_llm
    from executorch_mlx.llm.parameters import Sampling

    return small_llm.shared(tmp_path_factory, "rows", batch=3, sampling=Sampling.none())
