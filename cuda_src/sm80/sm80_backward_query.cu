// The deterministic dQ: one block owns tile_m query rows of one head and walks the key tiles that they see, computing
// the scores and their gradients once more (FlashAttention-2, Dao 2023, section 3.2, algorithm 2 with the loops
// exchanged). Nothing is summed by two blocks, so the order of every sum is fixed.
//
// A warp owns rows, so that its dS goes from one product to the next in registers.
//
// Grid: (query tiles, heads_q, batch).
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "sm80/backward.cuh"
#include "sm80/output.cuh"

namespace cuflash {

static_assert(Config::warps_n == 1, "a row belongs to one warp");

// Shared memory: sQ (tile_m, tile_d), later dQ; sdO (tile_m, tile_dv); per stage sK (tile_n, tile_d) and sV (tile_n,
// tile_dv); sdS (tile_m, tile_n), for tiles that hold an inf or NaN; the row statistics.
struct Storage {
  static constexpr int dout_at = Shape::q_bytes, ring_at = dout_at + Shape::dout_bytes;
  static constexpr int stage_bytes = Shape::k_bytes + Shape::v_bytes;
  static constexpr int ds_at = ring_at + Config::stages * stage_bytes, rows_at = ds_at + Shape::score_bytes;

  unsigned base;

  __device__ __forceinline__ unsigned q() const { return base; }
  __device__ __forceinline__ unsigned dout() const { return base + dout_at; }
  __device__ __forceinline__ unsigned k(int tile) const { return base + ring_at + stage(tile) * stage_bytes; }
  __device__ __forceinline__ unsigned v(int tile) const { return k(tile) + Shape::k_bytes; }
  __device__ __forceinline__ unsigned ds() const { return base + ds_at; }
  __device__ __forceinline__ RowStatistics rows() const { return {base + rows_at}; }

 private:
  static __device__ __forceinline__ int stage(int tile) { return static_cast<unsigned>(tile) % Config::stages; }
};

// dS of one key tile. Says whether a mask may hide an inf or NaN there from one of the warp's rows. `fetch` starts the
// next copies, once the first product is on its way.
template <class Fetch>
__device__ __forceinline__ bool score_gradients(ScoreFragments& rdS, const BackwardParams& p, const Storage& s,
                                                int row_begin, int tile, Fetch&& fetch) {
  ScoreFragments rS;
  score_product<Shape::tile_d>(rS, s.q(), s.k(tile));
  fetch();
  score_product<Shape::tile_dv>(rdS, s.dout(), s.v(tile));
  const bool masked = needs_mask(p, row_begin, tile);
  const bool nonfinite = Config::has_band && masked && !(all_finite(rS) && all_finite(rdS));
  differentiate_softmax(rS, rdS, s.rows(), p);
  if (masked) clear_hidden(rS, rdS, p, row_begin, tile * Shape::tile_n);
  return Config::has_band && masked && __any_sync(0xFFFFFFFFu, nonfinite);
}

// rdQ += dS K, from the registers that hold dS.
__device__ __forceinline__ void accumulate_query_gradient(QueryGradient& rdQ, const ScoreFragments& rdS, unsigned sK) {
  const auto keys = FragmentAddress<Shape::tile_d>::rows_first(sK, rematerialized_thread() % 32);
#pragma unroll
  for (int k = 0; k < Shape::n_tiles / 2; ++k) {
    unsigned rA[Shape::m_tiles][4];
#pragma unroll
    for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = rdS[m][2 * k + i / 2];
        rA[m][i] = pack<Shape::Element>(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
      }
    multiply_by_rows<Shape::Element, 1>(rdQ, rA, keys, k);
  }
}

// dQ by way of shared memory to its place. Weightless rows hold 0 times what their keys hold, so they are set to 0.
__device__ __forceinline__ void write_query_gradient(const BackwardParams& p, const TileCoordinate& c, const Storage& s,
                                                     QueryGradient& rdQ) {
  const WarpCoordinate w;
  const int row_begin = c.query_tile * Shape::tile_m;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool zero = weightless(s.rows().lse(w.query_row() + 16 * m + 8 * half + w.lane / 4));
#pragma unroll
      for (int d = 0; d < Shape::d_tiles; ++d)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) rdQ[m][d][i] = zero ? 0.0f : rdQ[m][d][i] * p.gradient_scale;
    }
  store_fragments<Shape::tile_d>(
      s.q(), rdQ, [&](int m, int half) { return w.query_row() + 16 * m + 8 * half; },
      [&](int d) { return TileLayout<Shape::tile_d>::part_chunk<Shape::warps_n>(w.n, d); });
  __syncthreads();
  char* dq = static_cast<char*>(p.dq) + c.batch * p.dq_batch + c.head * p.dq_head + row_begin * p.dq_row;
  store_output<Shape::tile_d, Shape::tile_m, Shape::threads, Config::out_vector_bytes, Config::exact_dims>(
      s.q(), dq, p.dq_row, 0, p.seqlen_q - row_begin, p.head_dim, rematerialized_thread());
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps, Config::blocks_per_sm)
    sm80_backward_query(const __grid_constant__ cuflash::BackwardParams p) {
  using namespace cuflash;
  extern __shared__ __align__(128) char shared[];
  const Storage s{shared_address(shared)};
  const TileCoordinate c = TileCoordinate::of_block<Config::has_band>(p);
  const int row_begin = c.query_tile * Shape::tile_m;
  const KeyTiles tiles =
      KeyTiles::make<Config::has_band, Shape::tile_n>(p, row_begin, min(row_begin + Shape::tile_m, p.seqlen_q));

  const auto fetch = [&](int tile) {
    if (tile < tiles.last) fetch_key_tile(p, c.batch, c.head / p.group, tile, s.k(tile), s.v(tile));
    cp_async_commit();
  };
  fetch_query_tile<true>(p, c.batch, c.head, row_begin, s.q(), s.dout());
  s.rows().fetch(p, c.batch, c.head, row_begin);
  fetch(tiles.first);
  QueryGradient rdQ = {};
#pragma unroll 1
  for (int tile = tiles.first; tile < tiles.last; ++tile) {
    cp_async_wait<0>();
    __syncthreads();
    ScoreFragments rdS;
    const bool visible_only = score_gradients(rdS, p, s, row_begin, tile, [&] {
      if constexpr (Config::stages > 1) fetch(tile + 1);
    });
    if (visible_only) {
      store_scores(ScoreAddress(s.ds()), 0, rdS);
      __syncwarp();
      accumulate_visible_query_gradient(rdQ, s.ds(), s.k(tile), p, row_begin, tile * Shape::tile_n);
      __syncwarp();
    } else {
      accumulate_query_gradient(rdQ, rdS, s.k(tile));
    }
    if constexpr (Config::stages == 1) {
      __syncthreads();  // all have done with K
      fetch(tile + 1);
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // all have done with Q
  write_query_gradient(p, c, s, rdQ);
}
