"""The delegate, registered once per session, and small language models, exported once."""

import ctypes
import signal
from pathlib import Path

import long_tests
import pytest
import torch
from executorch_mlx import load_delegate
from executorch_mlx.workarounds.program_caches import forget_programs
from faster_export import forget_other_devices, remember_composites

# The delegate must be loaded before a test imports executorch.runtime, which has another MLXBackend on macOS, and
# before a test imports mlx, which would otherwise use its own BLAS.
DELEGATE = load_delegate()
remember_composites()
forget_other_devices()


_set_random_seed = ctypes.CDLL(DELEGATE).executorch_mlx_set_random_seed
_set_random_seed.argtypes, _set_random_seed.restype = [ctypes.c_uint64], None


def pytest_addoption(parser):
    parser.addoption("--short", action="store_true", help="leave out the tests that long_tests.py describes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--short"):
        return
    names = [item.nodeid.removeprefix("test/") for item in items]
    if config.args == ["test"] and (unknown := long_tests.without_test(names)):
        raise pytest.UsageError(f"long_tests.py: no test fits {', '.join(unknown)}")
    short_form = long_tests.short_form(names)
    config.hook.pytest_deselected(items=[item for item, name in zip(items, names) if name not in short_form])
    items[:] = [item for item, name in zip(items, names) if name in short_form]


@pytest.fixture(autouse=True)
def seeded():
    """Seed torch's generator and the delegate's before each test, so that draws do not depend on earlier tests."""
    torch.manual_seed(0)
    _set_random_seed(0)


def pytest_collectstart():
    """Seed torch's generator before each module is imported.

    What a module draws, such as the weights of its layers, then does not depend on the modules imported before it.
    """
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Seed torch's generator for a fixture that several tests share, which is set up before `seeded`."""
    if fixturedef.scope == "function":
        return (yield)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def forgetful():
    """After each module, clears the caches that hold the programs which its tests exported."""
    with forget_programs():
        yield


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Set Python's handler for SIGINT if the signal is ignored, as it is in a background job of a shell.

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
def adapter_program(tmp_path_factory) -> Path:
    """The path of a program with room for adapters, and with four rows."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig
    from small_adapters import RANK, SLOTS

    options = {"adapters": SLOTS, "lora_rank": RANK, "batch": 4, "speculation": True, "head": HeadConfig(logprobs=2)}
    return small_llm.shared(tmp_path_factory, "adapters", **options)


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory) -> dict[str, Path]:
    """The folders of adapters for `adapter_program`, by name."""
    from small_adapters import write_all

    return write_all(tmp_path_factory.mktemp("adapters"))


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
def portable_program(tmp_path_factory) -> Path:
    """The path of a portable program, which takes every sampling parameter and returns log probabilities."""
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    head = HeadConfig(penalties=32, logit_bias=4, allowed_tokens=True, logprobs=2)
    return small_llm.shared(tmp_path_factory, "portable", portable=True, head=head, verify=True)


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
