// Constant weights of products, packed for CPU kernels when a program is loaded: matrices of floats, and quantized ones
// for products with activations in 8 bits, and for all products where cpu::has_fast_integers().
//
// In a .pte, weights have the layout of MLX. In each call, the kernels would have to bring them into the order of their
// vector instructions. With integers, this slows down decoding most. With floats, it slows down products of many rows,
// and products of several rows, which do not pack the weights, are slower than with packed ones.
//
// The packed copy takes as much memory as the weights themselves. If those are in a mapped file, their pages are
// released, because the products read the copy only. The active memory then counts the copy in place of the weights,
// unless another instruction reads the weights. A matrix of floats is packed only if its copy takes its place: it is in
// a mapped file, and no other instruction reads it, as one reads an embedding.
#pragma once

#include "call/state.h"
#include "memory/mapped_files.h"
#include "program/program.h"
#include "call/shared.h"

namespace executorch_mlx {

// Packs the constant weights of the products of `program`, and adds them to the instructions. Takes what another method
// of the program has packed from `shared`. Packs nothing if no kernel on `stream` can use it, or if the program has an
// init chain, which may change constants. Under a memory limit, copies leave a quarter of the free memory. Throws
// Failure if constants that an earlier method released do not fit again. The constants of `state` are loaded, from
// `files` among others.
void pack_weights(
    MlxProgram& program, const MappedFiles& files, SharedData& shared, const State& state, mx::Stream stream);

} // namespace executorch_mlx
