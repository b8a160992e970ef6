"""Two models in one process do not wait for each other's evaluation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_cpp import compile_cpp

HERE = Path(__file__).parent

SETUP = """
import ctypes, os, threading
import torch
from executorch_mlx.loader import load_delegate
blas, delegate = ctypes.CDLL(os.environ["LD_PRELOAD"]), ctypes.CDLL(load_delegate())
from irprograms import FLOAT32, Graph, ir, lit

def product():  # of a lazy matrix, which MLX computes in the evaluation
    g = Graph()
    tokens, y, out = g.input((3, 3), torch.int64), g.new_temp(), g.output((3, 3))
    g.names[tokens.idx] = "tokens"  # so that a call can be deferred
    lazy = g.chain(ir.AsTypeNode(x=tokens, out=y, scalar_type=FLOAT32), ir.AddmmNode(mat1=y, mat2=y, out=out))
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=lazy, else_chain_idx=lazy))
    return g

def sine():
    g = Graph()
    g.emit(ir.SinNode(x=g.input((3, 3)), out=g.output((3, 3))))
    return g

def call_others():
    for other in others:
        results.append(other(x)[0].clone())

x = torch.arange(9.0).reshape(3, 3)
tokens = x.long()
model, others = product().load(), [sine().load() for _ in range(5)]
blas.block_products()
results = []
"""

# A deferred call returns while its evaluation waits. ExecuTorch's Python class holds the GIL during other calls.
CODE = """
delegate.executorch_mlx_deferred_take.restype = ctypes.c_void_p
delegate.executorch_mlx_defer(None, None, None, ctypes.c_size_t(0))
model(tokens)
call = ctypes.c_void_p(delegate.executorch_mlx_deferred_take())
blas.wait_for_product()
thread = threading.Thread(target=call_others)
thread.start()
thread.join()
assert len(results) == len(others) and all(torch.allclose(result, x.sin()) for result in results)
blas.permit_product()
assert delegate.executorch_mlx_deferred_finish(call) == 0
delegate.executorch_mlx_deferred_free(call)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="replaces a function of libmlx with the linker of Linux")
def test_models_run_while_the_evaluation_of_another_waits(delegate, tmp_path):
    library = compile_cpp(tmp_path / "blocking_blas.so", HERE / "blocking_blas.cpp", "-shared", "-fPIC")
    variables = {"LD_PRELOAD": str(library), "PYTHONPATH": str(HERE.parent)}
    subprocess.run([sys.executable, "-c", SETUP + CODE], env=os.environ | variables, check=True, timeout=300)
