// Before sm80_backward: delta = rowsum(dO * O) - dlse of every row, and zeros in the sums of dQ and in their turns
// (FlashAttention-2, Dao 2023, section 3.2, algorithm 2, line 4). P's gradient needs delta since the weights of a row
// sum to 1; lse moves with the scores by P, so its gradient enters as one more term.
//
// rowsum(dO * O) is the diagonal of dO O^T, made by the matrix product that makes dP = dO V^T: both round alike, so a
// row with one key, whose O is that V, has a dP - delta of exactly 0. The kernel waits for memory, not for products.
//
// Grid: (padded_rows / tile_m, heads_q, batch); each warp takes 16 rows.
#include "core/mask.cuh"
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/turns.cuh"
#include "core/types.cuh"
#include "ptx/shared.cuh"
#include "sm80/product.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

constexpr int kThreads = 32 * Config::warps;
static_assert(Config::tile_m == 16 * Config::warps && Config::tile_m == kMarkedRows, "16 rows a warp");

// Rows of dO and O to the two tiles in shared memory, asynchronously; those past the end and columns past head_dim_v
// are 0.
__device__ __forceinline__ void fetch_rows(const BackwardParams& p, const TileCoordinate& c, unsigned sdO,
                                           unsigned sO) {
  constexpr int unroll = Config::vector_bytes == 16 ? 4 : 1;
  const int64 row = c.query_tile * Config::tile_m;
  const int rows_left = p.seqlen_q - static_cast<int>(row);
  const char* gdO = static_cast<const char*>(p.dout) + c.batch * p.dout_batch + c.head * p.dout_head + row * p.dout_row;
  const char* gO = static_cast<const char*>(p.out) + c.batch * p.out_batch + c.head * p.out_head + row * p.out_row;
  const TileLoader<Config::tile_m, Config::tile_dv, kThreads, Config::vector_bytes, Config::exact_dims> loader(
      threadIdx.x, p.head_dim_v);
  loader.load<true, unroll>(sdO, gdO, p.dout_row, rows_left);
  loader.load<true, unroll>(sO, gO, p.out_row, rows_left);
  cp_async_commit();
}

// What is subtracted from a row's exponents: its lse in base 2. Weights of rows that have none, or do not exist, become
// 0. Says whether the row's numbers are all finite, as far as lse and delta tell: inf or NaN in dO is in delta, and in
// q in lse unless the score stage bends scores.
__device__ __forceinline__ bool store_shift(const BackwardParams& p, int64 head, int row, int64 at) {
  constexpr float log2_e = 1.44269504088896341f;
  const float lse = row < p.seqlen_q ? p.lse[head * p.seqlen_q + row] : negative_infinity();
  p.shift[at] = weightless(lse) ? -lse : lse * log2_e;
  if (weightless(lse)) p.delta[at] = 0.0f;
  return row >= p.seqlen_q || (is_finite(lse) && is_finite(p.delta[at]));
}

// Whether this thread finds inf or NaN in its part of the rows of q.
__device__ __forceinline__ bool finds_nonfinite_query(const BackwardParams& p, const TileCoordinate& c) {
  const int row_begin = c.query_tile * Config::tile_m, rows = min(Config::tile_m, p.seqlen_q - row_begin);
  const char* gQ = static_cast<const char*>(p.q) + c.batch * p.q_batch + c.head * p.q_head + row_begin * p.q_row;
  bool found = false;
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += Config::warps)
    for (int column = threadIdx.x % 32; column < p.head_dim; column += 32)
      found |=
          any_nonfinite<Config::element>(*reinterpret_cast<const unsigned short*>(gQ + row * p.q_row + 2 * column));
  return found;
}

// The row sums of a warp's 16 rows: f(row, sum) in the lane that has it.
template <class F>
__device__ __forceinline__ void for_each_row_sum(unsigned sdO, unsigned sO, F&& f) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  using Fragment = FragmentAddress<Config::tile_dv>;
  const int offset = first * TileLayout<Config::tile_dv>::row_bytes;
  float r[1][2][4];
  product_nt<Config::element, 0>(r, Fragment::rows_first(sdO + offset, lane),
                                 Fragment::columns_first(sO + offset, lane));
  if (lane / 8 != lane % 4) return;  // no element of the diagonal
#pragma unroll
  for (int half = 0; half < 2; ++half)
    f(first + 8 * half + lane / 4, lane & 4 ? r[0][half][2 * half + 1] : r[0][half][2 * half]);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps)
    sm80_backward_prepare(const __grid_constant__ cuflash::BackwardParams p) {
  using namespace cuflash;
  extern __shared__ __align__(128) char shared[];
  const unsigned sdO = shared_address(shared), sO = sdO + 2 * Config::tile_m * Config::tile_dv;
  const TileCoordinate c = TileCoordinate::of_block<false>(p);
  const int64 head = static_cast<int64>(c.batch) * p.heads_q + c.head;
  const int row_begin = c.query_tile * Config::tile_m;
  fetch_rows(p, c, sdO, sO);
  uint4* sums = reinterpret_cast<uint4*>(p.dq_sum + (head * p.padded_rows + row_begin) * Config::tile_d);
#pragma unroll 4
  for (int i = threadIdx.x; i < Config::tile_m * Config::tile_d / 4; i += kThreads) sums[i] = make_uint4(0, 0, 0, 0);
  if (p.turns != nullptr && threadIdx.x < Config::tile_m / kTurnRows)
    *Turn::of_rows(p, c.batch, c.head, row_begin + kTurnRows * threadIdx.x).word = 0;
  cp_async_wait<0>();
  __syncthreads();
  bool marked = false;
  for_each_row_sum(sdO, sO, [&](int row, float sum) {
    const bool has_dlse = p.dlse != nullptr && row_begin + row < p.seqlen_q;
    const float dlse = has_dlse ? p.dlse[head * p.seqlen_q + row_begin + row] : 0.0f;
    const int64 at = head * p.padded_rows + row_begin + row;
    p.delta[at] = sum - dlse;
    if (p.shift != nullptr) marked |= !store_shift(p, head, row_begin + row, at);
  });
  if (p.shift == nullptr) return;
  if constexpr (Config::check_query) marked |= finds_nonfinite_query(p, c);
  marked = __syncthreads_or(marked);
  if (threadIdx.x == 0) p.marked_rows[(head * p.padded_rows + row_begin) / kMarkedRows] = marked;
}
