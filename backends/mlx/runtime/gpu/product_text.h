// The text of kernels that multiply a few vectors by the rows of matrices.
#pragma once

#include <cstddef>
#include <string>

namespace executorch_mlx::gpu {

// How a kernel multiplies. A product has the same bits for any number of vectors, as long as the method is `in_tiles`
// for all of them, or for none.
enum class ProductMethod {
  single, // one vector, which a block keeps in shared memory; a warp computes the products with one row at a time
  few, // up to kMostOfFew vectors, read from the cache; a warp computes the products with kRowsPerWarp rows
  in_tiles // up to kMostInTiles vectors in half precision; the Tensor Cores compute tiles of kTileRows rows
};

constexpr size_t kMostOfFew = 8; // whose sums fit in the registers
constexpr size_t kMostInTiles = 32; // whose sums fit in shared memory
constexpr int kTileRows = 16;

// The body of a kernel that multiplies the vectors x [kVectors, kDepth] by rows of kCount matrices. With kNorm, x is
// rms_norm(x, norm) with kEps, for a single vector. kHasAlignedNorm says whether the address of `norm` is a multiple of
// 16 bytes. `definitions` is the text of kCount and of three functions:
//
//   rows_of(row, w) sets w[m], for each of the kCount matrices, to the address of a row. Beyond the last row, it is any
//   row.
//   summand_of(row, v) returns a float that `finish` needs, from an input. It is called early, because it waits for
//   memory.
//   finish(row, v, products, summand) gets the products of vector v with the row of each matrix, rounded to T, and
//   writes the results, unless there is no such row.
//
// The kernel also has the constants kThreads, kRows, kMaxEarly, kRowsPerWarp and kIsBfloat16.
std::string product_text(ProductMethod method, const std::string& definitions);

// The attributes of this kernel: two blocks in tiles run on a multiprocessor at once, so that one loads while the other
// one starts or ends.
const char* product_attributes(ProductMethod method);

// The body of a kernel whose blocks compute y[i] = rms_norm(x[i], norm), for vectors of kDepth elements. norm is as
// above.
std::string norm_text();

} // namespace executorch_mlx::gpu
