// The pass over a verified program that finds what the runtime computes together. Each pattern has a file in this
// folder. A pattern writes what it finds to the decoded instructions, so that a call looks up nothing:
//
// - `fused`: computes the instruction and others together;
// - `operands`: what the instruction leaves for a later one that computes both;
// - `early`, `kept`: places for its result, if this is computed before the instruction runs;
// - `released`: the temporaries that nothing reads after it.
//
// packed_weights.h is a second pass, after the constants have been loaded.
#pragma once

namespace executorch_mlx {

struct MlxProgram;

void fuse(MlxProgram& program);

} // namespace executorch_mlx
