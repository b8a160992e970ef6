"""The compile step of the backend: turns a delegated graph into a payload and its constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, ExportedProgram, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec

from . import ops, patterns  # noqa: F401  (fill the registry)
from .buffers import KEPT, SharedBuffers
from .builder.assemble import assemble
from .builder.digests import Digests, raw_bytes
from .builder.program import ProgramBuilder
from .serialization import ir
from .serialization.pack import pack_payload
from .serialization.portability import Finding, program_findings, shared_buffers
from .weights_file import SUFFIX
from .workarounds.delegate_results import record_results

CONSTANT_ALIGNMENT = 16  # bytes
PROGRAM_MARK = "mlx:program"  # the key of an entry by which the runtime recognizes the methods of a program
STATE_MARK = "mlx:state"  # the key of an entry without which a program without constants would have no named data
# Compile specs with these keys permit extensions, and refuse programs that are not portable. Their values are ignored.
ALLOW_EXTENSIONS = "allow_extensions"
PORTABLE = "portable"
WEIGHTS_FILE = "weights_file"  # the key of a compile spec, whose value is the name of a data file in UTF-8


class NotPortable(RuntimeError):
    """A program that is to be portable would compute something else on ExecuTorch's own MLX delegate."""


class MLXBackend(BackendDetails):
    """Compiles delegated graphs to the MLX IR. The class name is the backend id in the `.pte`."""

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """Return `edge_program` itself. The builder does not change it, and a copy would duplicate the weights."""
        return edge_program

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Return the payload of a graph, and the constants to which the payload refers by key."""
        digests = Digests()
        buffers = SharedBuffers([edge_program], [], digests)
        return _compile(edge_program, compile_specs, set(), digests, buffers.keys_of(edge_program))[0]

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: dict[str, list[list[CompileSpec]]]
    ) -> dict[str, list[PreprocessResult]]:
        """Return the results of `preprocess` for the graphs of every method, by method.

        A constant that several graphs use is in the result of the first of them. ExecuTorch merges the constants of all
        graphs by key, and would hash each copy.
        """
        stored: set[str] = set()
        # The parameters and buffers of the programs are neither freed nor changed until all programs are compiled.
        every = [program for programs in edge_programs.values() for program in programs]
        digests = Digests(t for p in every for t in (*p.state_dict.values(), *p.constants.values()))
        buffers = SharedBuffers(every, KEPT.take(), digests)
        compiled = {
            method: [
                _compile(program, specs, stored, digests, buffers.keys_of(program))
                for program, specs in zip(programs, compile_specs[method], strict=True)
            ]
            for method, programs in edge_programs.items()
        }
        portable = {
            method: [result[1] for result, specs in zip(results, compile_specs[method]) if _has_spec(specs, PORTABLE)]
            for method, results in compiled.items()
        }
        _refuse(shared_buffers(portable))
        return {method: [result[0] for result in results] for method, results in compiled.items()}


def _weights_file(specs: list[CompileSpec]) -> str | None:
    """Return the name of the file for large constants without its suffix, or None for the `.pte`."""
    names = [spec.value.decode().removesuffix(SUFFIX) for spec in specs if spec.key == WEIGHTS_FILE]
    return names[0] if names else None


def _has_spec(specs: list[CompileSpec], key: str) -> bool:
    return any(spec.key == key for spec in specs)


def _refuse(findings: Collection[Finding]) -> None:
    """Raise NotPortable if there are findings about a program that is to be portable."""
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise NotPortable(f"portable=True: ExecuTorch's own MLX delegate would compute something else:\n{lines}")


def _compile(
    edge_program: ExportedProgram,
    compile_specs: list[CompileSpec],
    stored: set[str],
    digests: Digests,
    buffer_keys: Mapping[str, str],
) -> tuple[PreprocessResult, ir.MLXGraph]:
    """Return the result of `preprocess` for a graph, without the constants whose keys are in `stored`; and the program.

    Adds the keys of this graph's constants to `stored`. A key identifies the content of a constant. `buffer_keys` has
    the keys of the buffers that any method writes, by name.
    """
    allow_extensions = _has_spec(compile_specs, ALLOW_EXTENSIONS)
    builder = ProgramBuilder(edge_program, allow_extensions=allow_extensions, buffer_keys=buffer_keys)
    program = assemble(builder.build(), digests=digests, weights_file=_weights_file(compile_specs))
    if _has_spec(compile_specs, PORTABLE):
        _refuse(program_findings(program.graph, program.constants.keys()))
    store = NamedDataStore()
    for key in list(program.constants):
        # A tensor that the builder computed is freed as soon as its bytes are stored.
        tensor = program.constants.pop(key)
        if key not in stored:
            stored.add(key)
            file = program.files.get(key)
            store.add_named_data(key, bytes(raw_bytes(tensor)), alignment=CONSTANT_ALIGNMENT, external_tag=file)
    if program.files:
        store.add_named_data(PROGRAM_MARK, b"\0")
    elif buffer_keys:
        store.add_named_data(STATE_MARK, b"\0")
    record_results(edge_program)
    result = PreprocessResult(
        processed_bytes=pack_payload(program.graph), data_store_output=store.get_named_data_store_output()
    )
    return result, program.graph
