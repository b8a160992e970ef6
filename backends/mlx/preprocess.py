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

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Payload (24-byte header, then the FlatBuffer program) and the constants it names."""
        own_nodes = any(spec.key == OWN_NODES for spec in compile_specs)
        program = assemble(ProgramBuilder(edge_program, own_nodes=own_nodes).build())
        store = NamedDataStore()
        for key, tensor in program.constants.items():
            store.add_named_data(key, bytes(raw_bytes(tensor)), alignment=CONSTANT_ALIGNMENT)
        return PreprocessResult(
            processed_bytes=pack_payload(program.graph),
            data_store_output=store.get_named_data_store_output(),
        )
