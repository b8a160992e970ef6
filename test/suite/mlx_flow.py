"""A pytest plugin that adds an MLX flow to ExecuTorch's backend test suite.

    pytest -p mlx_flow --flows mlx,xnnpack --results FILE --pyargs executorch.backends.test.suite.operators

Writes one line of JSON for each subtest to FILE, which `run.py` reads.
"""

from __future__ import annotations

import json
from pathlib import Path

# This import comes first: it registers the delegate before the suite imports executorch.runtime.
from executorch_mlx import MLXPartitioner, Runtime  # noqa: F401

# isort: split
import executorch.backends.test.suite.flow as suite_flow
import pytest
import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import StageType, ToEdgeTransformAndLower
from executorch.backends.test.suite.flow import TestFlow

MLX = "mlx"
_KEY = "subtests"


def _tester(module: torch.nn.Module, example_inputs: tuple, **options) -> Tester:
    def lower():
        return ToEdgeTransformAndLower(default_partitioner_cls=MLXPartitioner)

    stages = Tester.default_stage_classes() | {StageType.TO_EDGE_TRANSFORM_AND_LOWER: lower}
    return Tester(module, example_inputs, stage_classes=stages, **options)


def _xnnpack() -> TestFlow:
    from executorch.backends.test.suite.flows.xnnpack import XNNPACK_TEST_FLOW

    return XNNPACK_TEST_FLOW


FLOWS = {MLX: lambda: TestFlow(MLX, backend=MLX, tester_factory=_tester), "xnnpack": _xnnpack}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flows", default=MLX, help=f"flows, comma-separated: {', '.join(FLOWS)}")
    parser.addoption("--results", type=Path, help="file for the results, one line of JSON per subtest")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # The suite's conftest calls all_flows when it is imported, and has no hook to add a flow.
    names = early_config.known_args_namespace.flows.split(",")
    suite_flow.all_flows = lambda: {name: FLOWS[name]() for name in names}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: belongs to pytest-timeout, which is optional")
    results = config.getoption("results")
    if results is not None and not hasattr(config, "workerinput"):
        results.write_text("")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Seed `random`, from which the suite takes a seed, and torch, from which the tests take their inputs."""
    import random

    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    try:
        return (yield)
    finally:
        runner = item.funcargs.get("test_runner")
        if runner is not None:
            item.user_properties.append((_KEY, [_record(r) for r in runner._results]))


def _record(result) -> dict:
    undelegated = result.undelegated_op_counts
    return {
        "flow": result.flow,
        "test": result.name,
        "subtest": result.subtest_index,
        "result": result.result.name,
        "delegated": sum((result.delegated_op_counts or {}).values()),
        "undelegated": None if undelegated is None else dict(undelegated),
        "error": None if result.error is None else str(result.error)[:2000],
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _Writer.write(report)


class _Writer:
    """Writes the results in the main process, where the reports of xdist's workers arrive."""

    path: Path | None = None

    @classmethod
    def write(cls, report: pytest.TestReport) -> None:
        if cls.path is None or report.when != "call":
            return
        records = dict(report.user_properties).get(_KEY)
        if records is None:  # the process crashed
            records = [
                {
                    "flow": report.nodeid.split("[")[-1].split("-")[0].rstrip("]"),
                    "test": report.nodeid,
                    "subtest": 0,
                    "result": "CRASH",
                    "delegated": 0,
                    "undelegated": None,
                    "error": str(report.longrepr)[:2000],
                }
            ]
        with cls.path.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in records)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        _Writer.path = session.config.getoption("results")
