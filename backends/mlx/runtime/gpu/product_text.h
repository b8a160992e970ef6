// The text of kernels that multiply a few vectors by the rows of matrices.
#pragma once

#include <cstddef>
#include <string>

namespace executorch_mlx::gpu {

// How a kernel multiplies. A product has the same bits for any number of vectors, as long as the method is `in_tiles`
// for all of them, or for none. Products of quantized matrices always have the same bits: a single vector is multiplied
// in tiles, too.
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
//   rows_of(row, w) sets w[m], for each of the kCount matrices, to the Row that row_text() makes. Beyond the last row,
//   it is any row.
//   summand_of(row, v) returns a float that `finish` needs, from an input. It is called early, because it waits for
//   memory.
//   finish(row, v, products, summand) gets the products of vector v with the row of each matrix, rounded to T, and
//   writes the results, unless there is no such row.
//
// The kernel also has the constants kThreads, kRows, kMaxEarly, kRowsPerWarp and kIsBfloat16.
std::string product_text(ProductMethod method, const std::string& definitions);

// The same for matrices of integers of kBits bits, 4 or 8, with a scale and a bias for each kGroupSize of them, a
// multiple of 32. The kernel has no kMaxEarly and kRowsPerWarp, and its blocks take any number of tiles of kTileRows
// rows, counted over both matrices if kCount is 2.
std::string quantized_product_text(ProductMethod method, const std::string& definitions);

// The expression for a row of a matrix, which begins at element `begin`. The parameters of a quantized matrix w are w,
// w_scales and w_biases.
std::string row_text(const std::string& matrix, bool is_quantized);

// The attributes of this kernel: two blocks in tiles run on a multiprocessor at once, so that one loads while the other
// one starts or ends.
const char* product_attributes(ProductMethod method);

// The body of a kernel whose blocks compute y[i] = rms_norm(x[i], norm), for vectors of kDepth elements. norm is as
// above.
std::string norm_text();

// Parts of the texts above. Blocks read a single vector, or its norm, into the array `vectors`; they load weights with
// `load_early` before it is ready, and with `load_others` before it is normalized. `before_write` may change the
// `parts` of the vector that a thread writes.
std::string single_vector_text(
    const std::string& load_early, const std::string& load_others, const std::string& before_write);

// Defines multiply_add(sums, a0, a1, a2, a3, b0, b1), with which a warp multiplies on Tensor Cores.
std::string multiply_tiles_text();

} // namespace executorch_mlx::gpu
