// After sm80_backward: the float32 sums of dQ, times the scale, rounded and in the order of the caller's rows.
//
// Grid: (padded_rows / tile_m, heads_q, batch); each warp takes 16 rows at a time.
#include "core/dq_sum.cuh"
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
#pragma unroll 1
  for (int block = threadIdx.x / 32; block < tile_m / 16; block += Config::warps)
#pragma unroll 4
    for (int column = 0; column < tile_d / 8; ++column) {
      const float4 x = Sum::load(sum.at(block, column, lane));
      const int row = 16 * block + lane / 4;
      store_shared(sdQ + Layout::offset(row, column) + 4 * (lane % 4),
                   pack<Element>(x.x * p.gradient_scale, x.y * p.gradient_scale));
      store_shared(sdQ + Layout::offset(row + 8, column) + 4 * (lane % 4),
                   pack<Element>(x.z * p.gradient_scale, x.w * p.gradient_scale));
    }
  __syncthreads();
  char* dq = static_cast<char*>(p.dq) + c.batch * p.dq_batch + c.head * p.dq_head + row_begin * p.dq_row;
  store_output<tile_d, tile_m, 32 * Config::warps, Config::out_vector_bytes, Config::exact_dims>(
      sdQ, dq, p.dq_row, 0, p.seqlen_q - row_begin, p.head_dim, threadIdx.x);
}
