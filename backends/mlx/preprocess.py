"""The backend's compile step: one delegated graph → payload and constants."""

from __future__ import annotations

from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import (
    BackendDetails,
    ExportedProgram,
    PreprocessResult,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec

from . import ops as _  # noqa: F401  (fills the registry)
from .builder.assemble import assemble, raw_bytes
from .builder.program import ProgramBuilder
from .serialization.pack import pack_payload

CONSTANT_ALIGNMENT = 16
OWN_NODES = "own_nodes"  # the key of a compile spec; its value says nothing


class MLXBackend(BackendDetails):
    """Compiles a delegated graph to the MLX IR. The class name is the backend id on the wire."""

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """The program itself: the builder changes nothing, and a copy would copy the weights."""
        return edge_program

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Payload (24-byte header, then the FlatBuffer program) and the constants it names."""
        return _compiled(edge_program, compile_specs, {})

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """`preprocess` of each; the bytes of what they have in common are there once."""
        stored: dict[str, bytes] = {}
        return {
            method: [
                _compiled(program, specs, stored)
                for program, specs in zip(programs, compile_specs[method], strict=True)
            ]
            for method, programs in edge_programs.items()
        }


def _compiled(
    edge_program: ExportedProgram, compile_specs: list[CompileSpec], stored: dict[str, bytes]
) -> PreprocessResult:
    """`stored`: bytes by the keys of constants, which name their content; grows."""
    own_nodes = any(spec.key == OWN_NODES for spec in compile_specs)
    program = assemble(ProgramBuilder(edge_program, own_nodes=own_nodes).build())
    store = NamedDataStore()
    for key in list(program.constants):
        tensor = program.constants.pop(key)  # let go of one that was derived once it is written
        if key not in stored:
            stored[key] = bytes(raw_bytes(tensor))
        store.add_named_data(key, stored[key], alignment=CONSTANT_ALIGNMENT)
    return PreprocessResult(
        processed_bytes=pack_payload(program.graph),
        data_store_output=store.get_named_data_store_output(),
    )
