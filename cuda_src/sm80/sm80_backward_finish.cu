// After sm80_backward: the float32 sums of dQ, times the scale, rounded and in the order of the caller's rows. A row
// whose lse is -inf gets 0: its sums hold 0 times what its keys hold.
//
// Grid: (padded_rows / tile_m, heads_q, batch); each warp takes 16 rows at a time.
#include "core/dq_sum.cuh"
#include "core/mask.cuh"
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "ptx/shared.cuh"
#include "sm80/output.cuh"
#include "sm80/tile.cuh"

extern "C" __global__ void __launch_bounds__(32 * Config::warps)
    sm80_backward_finish(const __grid_constant__ cuflash::BackwardParams p) {
  using namespace cuflash;
  using Element = Config::element;
  constexpr int tile_m = Config::tile_m, tile_d = Config::tile_d;
  using Layout = TileLayout<tile_d>;
  using Sum = QueryGradientSum<tile_d, Config::reduce_width>;
  extern __shared__ __align__(128) char shared[];
  const unsigned sdQ = shared_address(shared);
  const TileCoordinate c = TileCoordinate::of_block<false>(p);
  const int row_begin = c.query_tile * tile_m, lane = threadIdx.x % 32;
  const Sum sum = Sum::of_rows(p, c.batch, c.head, row_begin);
  const float* lse = p.lse + (static_cast<int64>(c.batch) * p.heads_q + c.head) * p.seqlen_q;
  const auto is_zero = [&](int row) { return row < p.seqlen_q && weightless(lse[row]); };
#pragma unroll 1
  for (int block = threadIdx.x / 32; block < tile_m / 16; block += Config::warps) {
    const int row = 16 * block + lane / 4;
    const bool zero[2] = {is_zero(row_begin + row), is_zero(row_begin + row + 8)};
    const auto scaled = [&](int half, float a, float b) {
      return zero[half] ? 0u : pack<Element>(a * p.gradient_scale, b * p.gradient_scale);
    };
#pragma unroll 4
    for (int column = 0; column < tile_d / 8; ++column) {
      const float4 x = Sum::load(sum.at(block, column, lane));
      store_shared(sdQ + Layout::offset(row, column) + 4 * (lane % 4), scaled(0, x.x, x.y));
      store_shared(sdQ + Layout::offset(row + 8, column) + 4 * (lane % 4), scaled(1, x.z, x.w));
    }
  }
  __syncthreads();
  char* dq = static_cast<char*>(p.dq) + c.batch * p.dq_batch + c.head * p.dq_head + row_begin * p.dq_row;
  store_output<tile_d, tile_m, 32 * Config::warps, Config::out_vector_bytes, Config::exact_dims>(
      sdQ, dq, p.dq_row, 0, p.seqlen_q - row_begin, p.head_dim, threadIdx.x);
}
