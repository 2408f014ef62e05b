// A (Rows x Dim) tile of 16-bit elements in shared memory: swizzle, cp.async filling, ldmatrix addresses.
#pragma once

#include "core/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"

namespace cuflash {

// Rows of Dim elements (a multiple of 32) as 16-byte chunks. The chunk index is XORed with row bits so that the eight
// rows of an 8x8 matrix fall into different banks: with 128-byte multiples the row modulo 8; otherwise rows already
// alternate between two halves of the banks and two row bits are enough.
template <int Dim>
struct TileLayout {
  static_assert(Dim % 32 == 0, "tile rows are multiples of 64 bytes");
  static constexpr int row_bytes = Dim * 2;
  static constexpr int chunks = Dim / 8;

  static constexpr int span_blocks =
      Dim % 64 == 0 ? 4 : 2;  // 16-column blocks within the span that the swizzle permutes

  static __device__ __forceinline__ int swizzle(int row) { return Dim % 64 == 0 ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ int offset(int row, int chunk) {
    return row * row_bytes + ((chunk ^ swizzle(row)) << 4);
  }

  // First chunk of the part `side` of Parts equal parts of a span.
  template <int Parts>
  static constexpr __device__ __forceinline__ int part_start(int side) {
    return Parts == 1 ? 0 : 2 * side * (span_blocks / Parts);
  }

  // How far 8-column tile `tile` of a part is from its first chunk. No bit is in both, so they may be added or XORed.
  template <int Parts>
  static constexpr __device__ __forceinline__ int part_offset(int tile) {
    constexpr int blocks = span_blocks / Parts;
    const int block = tile / 2;
    return 2 * (block / blocks * span_blocks + block % blocks) + tile % 2;
  }

  // Chunk number of 8-column tile `tile` of a warp that owns that part of every span. Dividing spans rather than Dim
  // makes what depends on the tile a constant for any Dim.
  template <int Parts>
  static constexpr __device__ __forceinline__ int part_chunk(int side, int tile) {
    return part_start<Parts>(side) ^ part_offset<Parts>(tile);
  }
};

// The packed pair of a tile's elements at (row, column) and (row, column + 1); column is even.
template <int Dim>
__device__ __forceinline__ unsigned load_pair(unsigned sTile, int row, int column) {
  return load_shared(sTile + TileLayout<Dim>::offset(row, column / 8) + 2 * (column % 8));
}

// Copies (Rows x Dim) tiles with Threads threads. A thread always handles the same 16-byte column, so that its column
// predicate and pointer are computed once. VectorBytes is the alignment that every row of the source has.
template <int Rows, int Dim, int Threads, int VectorBytes, bool ExactDim>
struct TileLoader {
  using Layout = TileLayout<Dim>;
  static constexpr int rows_per_pass = Threads / Layout::chunks;
  static constexpr int passes = (Rows + rows_per_pass - 1) / rows_per_pass;
  static constexpr bool all_threads = rows_per_pass * Layout::chunks == Threads;
  static constexpr bool whole_passes = Rows % rows_per_pass == 0;
  // Whether the bits of a row within its pass and those of the pass are apart: then so are their parts of the swizzle.
  static constexpr bool bits_apart = all_threads && (rows_per_pass & (rows_per_pass - 1)) == 0;

  int row, chunk;
  int valid_bytes;  // of this thread's chunk that lie inside head_dim

  __device__ __forceinline__ TileLoader(int thread, int head_dim) {
    row = thread / Layout::chunks;
    chunk = thread % Layout::chunks;
    const int bytes = 2 * head_dim - 16 * chunk;
    valid_bytes = ExactDim ? 16 : bytes < 0 ? 0 : bytes > 16 ? 16 : bytes;
  }

  __device__ __forceinline__ bool active(int pass) const {
    return (all_threads || row < rows_per_pass) && (whole_passes || row + pass * rows_per_pass < Rows);
  }

  // Where this thread's chunk of a pass is in a tile; `first` is that of pass 0.
  __device__ __forceinline__ unsigned target(unsigned sTile, unsigned first, int pass) const {
    const int rows = pass * rows_per_pass;
    if constexpr (!bits_apart) return sTile + Layout::offset(row + rows, chunk);
    return (first ^ (Layout::swizzle(rows) << 4)) + rows * Layout::row_bytes;
  }

  // Loads rows [0, rows_left) of the tile at gTile and zero-fills the others; CheckRows = false when all rows exist.
  // Unroll passes at a time: those that go through registers hold all of them at once.
  template <bool CheckRows, int Unroll = passes>
  __device__ __forceinline__ void load(unsigned sTile, const char* gTile, int64 row_stride, int rows_left) const {
    const char* source = gTile + row * row_stride + 16 * chunk;
    const unsigned first = sTile + Layout::offset(row, chunk);
#pragma unroll(Unroll)
    for (int pass = 0; pass < passes; ++pass) {
      if (active(pass)) {
        // Of a source with 0 valid bytes nothing is read, wherever it points.
        const bool inside = !CheckRows || row + pass * rows_per_pass < rows_left;
        copy_chunk(target(sTile, first, pass), source, inside ? valid_bytes : 0, !CheckRows && ExactDim);
      }
      source += rows_per_pass * row_stride;
    }
  }

  // Calls f(address) with this thread's chunks of a tile it has loaded. Only rare paths need it, so it saves registers.
  template <class F>
  __device__ __forceinline__ void for_each_chunk(unsigned sTile, F&& f) const {
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass)
      if (active(pass)) f(sTile + Layout::offset(row + pass * rows_per_pass, chunk));
  }

 private:
  static __device__ __forceinline__ void copy_chunk(unsigned target, const char* source, int valid, bool whole) {
    if constexpr (VectorBytes == 16) {
      if (whole) {
        cp_async<16>(target, source);
      } else {
        cp_async<16>(target, source, valid);
      }
    } else if constexpr (VectorBytes >= 4) {
#pragma unroll 1
      for (int piece = 0; piece < 16; piece += VectorBytes) {
        const int left = valid - piece;
        cp_async<VectorBytes>(target + piece, left > 0 ? source + piece : source,
                              left < 0             ? 0
                              : left > VectorBytes ? VectorBytes
                                                   : left);
      }
    } else {
      unsigned words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const unsigned short* pair = reinterpret_cast<const unsigned short*>(source) + 2 * w;
        const unsigned low = 4 * w < valid ? pair[0] : 0;
        const unsigned high = 4 * w + 2 < valid ? pair[1] : 0;
        words[w] = low | high << 16;
      }
      store_shared(target, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
};

// ldmatrix addresses of 16x16 blocks of a tile for one lane. Rows are aligned to the span that the swizzle permutes, so
// the block's place in that span is XORed into the address and the rest is a constant offset.
template <int Dim>
struct FragmentAddress {
  using Layout = TileLayout<Dim>;
  static constexpr int span_bytes = Layout::span_blocks * 32;
  unsigned origin;  // the lane's address in block (0, 0)

  // A operand, and B operand read with .trans (the tile holds B as rows): matrices ordered down the rows first.
  static __device__ __forceinline__ FragmentAddress rows_first(unsigned sTile, int lane) {
    return {sTile + Layout::offset(lane & 15, lane >> 4)};
  }

  // B operand read without .trans (the tile holds B^T), and A operand read with it (the tile holds A^T): matrices
  // ordered along Dim first.
  static __device__ __forceinline__ FragmentAddress columns_first(unsigned sTile, int lane) {
    return {sTile + Layout::offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)};
  }

  // The same for the blocks of one of Parts parts (see TileLayout::part_chunk).
  template <int Parts>
  __device__ __forceinline__ FragmentAddress part(int side) const {
    return {origin ^ (Layout::template part_start<Parts>(side) << 4)};
  }

  // Further on by whole spans along Dim, for loops that are not unrolled.
  __device__ __forceinline__ FragmentAddress after_spans(int spans) const { return {origin + spans * span_bytes}; }

  // Further on by blocks of 16 rows.
  __device__ __forceinline__ FragmentAddress after_rows(int blocks) const {
    return {origin + blocks * 16 * Layout::row_bytes};
  }

  template <int Parts = 1>
  __device__ __forceinline__ unsigned block(int row_block, int dim_block) const {
    constexpr int blocks = Layout::span_blocks / Parts;
    return (origin ^ (dim_block % blocks * 32)) + dim_block / blocks * span_bytes + row_block * 16 * Layout::row_bytes;
  }
};

}  // namespace cuflash
