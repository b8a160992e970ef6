"""The delegate, registered once per session, and small language models, exported once."""

import signal
from pathlib import Path

import pytest
import torch
from executorch_mlx import load_delegate
from faster_export import remember_composites

# The delegate must be loaded before a test imports executorch.runtime, which has another MLXBackend on macOS, and
# before a test imports mlx, which would otherwise use its own BLAS.
DELEGATE = load_delegate()
remember_composites()


@pytest.fixture(autouse=True)
def seeded_torch():
    """Seeds torch's generator before each test, so that random inputs do not depend on earlier tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Sets Python's handler for SIGINT if the signal is ignored, as it is in a background job of a shell.

    Otherwise, the programs that tests start and interrupt would ignore the signal too.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def delegate() -> str:
    """The path of the delegate's library, which is registered with ExecuTorch's runtime."""
    return DELEGATE


@pytest.fixture(scope="session")
def chat_program(tmp_path_factory) -> Path:
    """The path of a program that takes every sampling parameter and returns tokens and logits."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    head = HeadConfig(penalties=32, logit_bias=4, allowed_tokens=True)
    return small_llm.shared(tmp_path_factory, "chat", outputs="both", head=head)


@pytest.fixture(scope="session")
def mask_program(tmp_path_factory) -> Path:
    """The path of a program that returns only tokens and takes a logit bias and allowed tokens."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    head = HeadConfig(logit_bias=4, allowed_tokens=True)
    return small_llm.shared(tmp_path_factory, "mask", head=head)


@pytest.fixture(scope="session")
def logprob_program(tmp_path_factory) -> Path:
    """The path of a program that draws tokens and returns log probabilities."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    return small_llm.shared(tmp_path_factory, "logprobs", speculation=True, head=HeadConfig(logprobs=4))


@pytest.fixture(scope="session")
def logits_program(tmp_path_factory) -> Path:
    """The path of a program without sampling head, tokenizer and token bytes."""
    import small_llm

    return small_llm.shared(tmp_path_factory, "logits", outputs="logits", tokenizer=None)


@pytest.fixture(scope="session")
def batch_program(tmp_path_factory) -> Path:
    """The path of a program with three rows, whose head takes no optional parameters."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    return small_llm.shared(tmp_path_factory, "batch", batch=3, head=HeadConfig.minimal())
