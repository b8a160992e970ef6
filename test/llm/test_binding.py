"""The declarations in `llm/binding.py` are those of the header `executorch_mlx.h`."""

import ctypes
import re
from ctypes import POINTER
from pathlib import Path

import pytest
from executorch_mlx import memory
from executorch_mlx.llm import binding, generation, program
from executorch_mlx.llm.errors import SettingError

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "backends" / "mlx" / "engine" / "include" / "executorch_mlx" / "executorch_mlx.h"
SOURCE = re.sub(r"//[^\n]*", "", HEADER.read_text())
PREFIX = "executorch_mlx_"

SCALARS = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "executorch_mlx_status": ctypes.c_int32,
    "executorch_mlx_on_event": binding.OnEvent,
    "executorch_mlx_on_progress": binding.OnProgress,
    "executorch_mlx_allowed_tokens": binding.AllowedTokens,
}
HANDLES = {"executorch_mlx_model", "executorch_mlx_engine", "executorch_mlx_request"}


def python_type(declared: str):
    """Return the ctypes type of a C type. For example, return `POINTER(c_int64)` for `const int64_t*`."""
    words = declared.replace("*", " * ").split()
    base, *stars = [word for word in words if word != "const"]
    assert set(stars) <= {"*"}, declared
    if base == "char":
        found = {1: ctypes.c_char_p, 2: POINTER(ctypes.c_char_p)}[len(stars)]
    elif base in HANDLES or base == "void":
        found = {0: None, 1: ctypes.c_void_p, 2: POINTER(ctypes.c_void_p)}[len(stars)]
    else:
        found = SCALARS.get(base) or binding.STRUCTS[base.removeprefix(PREFIX)]
        for _ in stars:
            found = POINTER(found)
    return found


def split(declaration: str) -> tuple[str, str]:
    """Return the type and the name: `("const int64_t*", "prompt")` for `const int64_t* prompt`."""
    found = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", declaration, re.DOTALL)
    return found[1], found[2]


def arguments(declared: str) -> list:
    return [] if declared.strip() == "void" else [python_type(split(part)[0]) for part in declared.split(",")]


def test_structs_have_the_fields_of_the_header():
    found = re.findall(r"typedef struct \{(.*?)\} executorch_mlx_(\w+);", SOURCE, re.DOTALL)
    assert {name for _, name in found} == binding.STRUCTS.keys() - {
        "array"
    }  # test/encoders/test_encoder_program.py has the array
    for body, name in found:
        declared = [split(line) for line in body.split(";") if line.strip()]
        fields = {field: python_type(type_) for type_, field in declared}
        if name == "event":
            fields["text"] = ctypes.c_void_p  # see binding.py
        assert dict(binding.STRUCTS[name]._fields_) == fields, name
        assert [*fields] == [field for field, _ in binding.STRUCTS[name]._fields_]


def test_initializers_are_those_of_the_header():
    found = re.findall(r"#define EXECUTORCH_MLX_(\w+_OPTIONS)\s*\\?\s*\{(.*?)\}", SOURCE, re.DOTALL)
    assert len(found) == 4
    for name, values in found:
        struct = binding.STRUCTS[name.lower()]
        initial = [value.strip(" \\\n") for value in values.split(",")]
        assert initial[0] == f"sizeof(executorch_mlx_{name.lower()})" and len(initial) == len(struct._fields_)
        instance = struct()
        for (field, _), text in zip(struct._fields_, initial):
            expected = {"NULL": 0, "false": 0, "true": 1}.get(text)
            if field == "size":
                expected = ctypes.sizeof(struct)
            value = getattr(instance, field)
            if expected is None:
                expected = float(text)
            elif text == "NULL":
                value = bool(value)
            assert value == expected, (name, field)


def test_functions_are_those_of_the_header():
    plain = re.sub(
        r"typedef [^;{]*\([^;]*;|typedef (struct|enum) \{.*?\} \w+;|#define.*?\}", "", SOURCE, flags=re.DOTALL
    )
    found = re.findall(r"^([\w ]+[\s*]+)executorch_mlx_(\w+)\(([^)]*)\);", plain, re.MULTILINE)
    declared = {name: (python_type(result), arguments(rest)) for result, name, rest in found}
    assert declared == binding.FUNCTIONS
    for name in declared:
        assert callable(getattr(binding.library(), name))


def test_callbacks_are_those_of_the_header():
    found = re.findall(r"typedef bool \(\*executorch_mlx_(\w+)\)\(([^)]*)\);", SOURCE)
    declared = {name: [ctypes.c_bool, *arguments(rest)] for name, rest in found}
    types = {"on_event": binding.OnEvent, "allowed_tokens": binding.AllowedTokens, "on_progress": binding.OnProgress}
    assert declared == {name: [type_._restype_, *type_._argtypes_] for name, type_ in types.items()}


def test_constants_are_those_of_the_header():
    constants = dict(re.findall(r"EXECUTORCH_MLX_(\w+) = (\d+)", SOURCE))
    assert len(constants) == 14
    assert {name: getattr(binding, name) for name in constants} == {name: int(n) for name, n in constants.items()}
    names = [name.lower() if name else None for name in [None, "STOP", "LENGTH", "CONTEXT", "CANCELLED", "ERROR"]]
    assert [*generation.FINISH_REASONS] == names
    fields = [field for field, _ in binding.EngineStats._fields_]
    assert ["size", *program.EngineStats.__dataclass_fields__] == fields


@pytest.mark.parametrize(
    "status, message, kind",
    [
        (binding.INVALID_ARGUMENT, "top_k: the program was exported without it", SettingError),
        (binding.INVALID_ARGUMENT, "prompt: got 0 tokens", ValueError),
        (binding.INVALID_PROGRAM, "x.pte is no language model", ValueError),
        (binding.OUT_OF_MEMORY, "memory limit", memory.OutOfMemoryError),
        (binding.BUSY, "the queue is full", binding.BusyError),
        (binding.FAILED, "a step failed", RuntimeError),
    ],
)
def test_a_status_becomes_an_exception(status, message, kind):
    error = binding.error_of(status, message)
    assert type(error) is kind and str(error) == message
    assert kind is not SettingError or error.name == "top_k"
