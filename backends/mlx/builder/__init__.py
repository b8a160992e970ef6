"""FX graph → MLX program. See `program.ProgramBuilder`."""
