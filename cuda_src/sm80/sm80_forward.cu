// FlashAttention-2 forward on mma.sync with cp.async multistage K/V tiles, for compute capability 8.0 and up.
//
// One block computes tile_m query rows of one head, each warp 16 or 32 of them (warps_n = 1), or each pair of warps 32
// of them (warps_n = 2, see warp_pair.cuh). It walks the key tiles from the last to the first: the tile that may be cut
// off by seqlen_k comes first, in the prologue.
#include "core/mask.cuh"
#include "core/nonfinite.cuh"
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/score.cuh"
#include "core/seqlen.cuh"
#include "core/softmax.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "sm80/output.cuh"
#include "sm80/product.cuh"
#include "sm80/tile.cuh"
#include "sm80/warp_pair.cuh"

namespace cuflash {

struct Shape {
  using Element = Config::element;
  static constexpr int tile_m = Config::tile_m, tile_n = Config::tile_n;
  static constexpr int tile_d = Config::tile_d, tile_dv = Config::tile_dv;
  static constexpr int warps_n = Config::warps_n, warps_m = Config::warps / warps_n;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int warp_rows = tile_m / warps_m;
  static constexpr int m_tiles = warp_rows / 16;         // 16-row fragments of a warp
  static constexpr int n_tiles = tile_n / warps_n / 8;   // 8-column fragments of a warp's part of S
  static constexpr int d_tiles = tile_dv / warps_n / 8;  // 8-column fragments of a warp's part of O
  static constexpr int q_bytes = 2 * tile_m * (tile_d > tile_dv ? tile_d : tile_dv);
  static constexpr int k_bytes = 2 * tile_n * tile_d;
  static constexpr int v_bytes = 2 * tile_n * tile_dv;
  using QLoader = TileLoader<tile_m, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using KLoader = TileLoader<tile_n, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using VLoader = TileLoader<tile_n, tile_dv, threads, Config::vector_bytes, Config::exact_dims>;
  static constexpr int ring_bytes = Config::stages * (k_bytes + v_bytes);
  static constexpr int p_bytes = warps_n == 1 ? 0 : 2 * tile_m * tile_n;  // weights on their way to the partner
  static constexpr int row_bytes = warps_n == 1 ? 0 : 2 * 16 * tile_m;    // row maxima and sums, likewise
  // Shared memory: sQ (tile_m, tile_d), later sO (tile_m, tile_dv); the ring; sP (tile_m, tile_n); sRow (2, tile_m, 4);
  // the parked words.
  static constexpr int ring_at = q_bytes, p_at = ring_at + ring_bytes, row_at = p_at + p_bytes;
  static constexpr int parked_at = row_at + row_bytes;
  static_assert(warp_rows % 16 == 0 && n_tiles % 2 == 0 && d_tiles % 2 == 0, "tiles are made of 16 x 16 blocks");
  static_assert(warps_n == 1 || (warps_n == 2 && tile_n % 32 == 0), "a row belongs to one warp or to a pair");
  static_assert(warps_n == 1 || Config::stages == 1, "pairs swap weights at the barrier before V that one stage has");
};

using Softmax = OnlineSoftmax<Shape::m_tiles>;

// What a block needs again for every tile, in shared memory: kept in registers over the loop it would be spilled.
struct Parked {
  unsigned at;  // const char* keys, const char* values of the block's head; unsigned careful

  // By one thread; a barrier must follow before a fetch.
  __device__ __forceinline__ void init(const ForwardParams& p, const TileCoordinate& c) const {
    const int kv_head = c.head / p.group;
    store_shared(at, static_cast<const char*>(p.k) + c.batch * p.k_batch + kv_head * p.k_head);
    store_shared(at + 8, static_cast<const char*>(p.v) + c.batch * p.v_batch + kv_head * p.v_head);
    set_careful(false);
  }

  __device__ __forceinline__ const char* keys() const { return load_shared_pointer(at); }
  __device__ __forceinline__ const char* values() const { return load_shared_pointer(at + 8); }

  // Whether this pass over the block's tiles watches for inf and NaN in V.
  __device__ __forceinline__ bool careful() const { return load_shared(at + 16) != 0; }
  __device__ __forceinline__ void set_careful(bool careful) const { store_shared(at + 16, careful ? 1u : 0u); }
};

// The ring of K and V tiles: tile j lives in stage j % stages. With one stage, keys are fetched while values are in use
// and the other way round, which halves the shared memory and leaves room for two blocks.
struct KeyValueRing {
  const ForwardParams& p;
  Parked parked;
  unsigned sK, sV;  // (stages, tile_n, tile_d), (stages, tile_n, tile_dv)

  __device__ __forceinline__ KeyValueRing(const ForwardParams& params, unsigned shared)
      : p(params),
        parked{shared + Shape::parked_at},
        sK(shared + Shape::ring_at),
        sV(sK + Config::stages * Shape::k_bytes) {}

  // Starts the copy of a tile's keys; CheckRows when the tile may reach past seqlen_k.
  template <bool CheckRows>
  __device__ __forceinline__ void fetch_keys(int tile) const {
    const int64 key = static_cast<int64>(tile) * Shape::tile_n;
    const int rows_left = CheckRows ? p.seqlen_k - static_cast<int>(key) : 0;
    const Shape::KLoader loader(rematerialized_thread(), p.head_dim);
    loader.load<CheckRows>(k_tile(tile), parked.keys() + key * p.k_row, p.k_row, rows_left);
  }

  // The same for its values.
  template <bool CheckRows>
  __device__ __forceinline__ void fetch_values(int tile) const {
    const int64 key = static_cast<int64>(tile) * Shape::tile_n;
    const int rows_left = CheckRows ? p.seqlen_k - static_cast<int>(key) : 0;
    v_loader().load<CheckRows>(v_tile(tile), parked.values() + key * p.v_row, p.v_row, rows_left);
  }

  // As many tiles as there are stages, less the one in use. With one stage, the first tile's keys and then its values.
  __device__ __forceinline__ void prefill(const KeyTiles& tiles) {
#pragma unroll
    for (int ahead = 0; ahead < (turns ? 1 : Config::stages - 1); ++ahead) {
      const int tile = tiles.last - 1 - ahead;
      if (tile >= tiles.first) fetch_keys<true>(tile);
      if (turns) cp_async_commit();
      if (tile >= tiles.first) fetch_values<true>(tile);
      cp_async_commit();
    }
  }

  // Publishes a tile to the block; with one stage only its keys, whose turn it was, and starts on its values.
  __device__ __forceinline__ void acquire(int tile, bool first) const {
    if (!turns) {
      cp_async_wait<turns ? 0 : Config::stages - 2>();
    } else if (first) {
      cp_async_wait<1>();  // the values are on their way already
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    if (turns && !first) {
      fetch_values<false>(tile);
      cp_async_commit();
    }
  }

  // Once the block has entered `tile`, the stage of the tile before it is free for the one stages - 1 further on.
  __device__ __forceinline__ void fetch_ahead(int tile, const KeyTiles& tiles) {
    if constexpr (!turns) {
      tile -= Config::stages - 1;
      if (tile >= tiles.first) {
        fetch_keys<false>(tile);
        fetch_values<false>(tile);
      }
      cp_async_commit();
    }
  }

  // With one stage: publishes the values, and whatever else the block wrote to shared memory, when all have done with
  // the keys.
  __device__ __forceinline__ void take_turns() const {
    if constexpr (turns) {
      cp_async_wait<0>();
      __syncthreads();
    }
  }

  // Whether the values of a tile, acquired, hold an inf or NaN that a mask may hide. Asked in careful passes only.
  __device__ __forceinline__ bool holds_nonfinite(int tile, bool masked) const {
    if (!Config::has_band || !masked || !parked.careful()) return false;
    unsigned sum = 0;  // over the chunks that this thread copied
    v_loader().for_each_chunk(v_tile(tile),
                              [&](unsigned address) { sum = add_zero_times_chunk<Shape::Element>(address, sum); });
    return __syncthreads_or(any_nonfinite<Shape::Element>(sum));
  }

  // With one stage: the keys of the next tile take the place of those of `tile`.
  __device__ __forceinline__ void replace_keys(int tile, const KeyTiles& tiles) const {
    if (turns && tile > tiles.first) {
      fetch_keys<false>(tile - 1);
      cp_async_commit();
    }
  }

  __device__ __forceinline__ Shape::VLoader v_loader() const {
    return Shape::VLoader(rematerialized_thread(), p.head_dim_v);
  }
  __device__ __forceinline__ unsigned k_tile(int tile) const { return sK + stage(tile) * Shape::k_bytes; }
  __device__ __forceinline__ unsigned v_tile(int tile) const { return sV + stage(tile) * Shape::v_bytes; }

 private:
  static constexpr bool turns = Config::stages == 1;

  static __device__ __forceinline__ int stage(int tile) { return static_cast<unsigned>(tile) % Config::stages; }
};

// Where a warp works: its rows, and with warps_n = 2 which half of a tile's keys and of head_dim_v it owns. Functions
// called in the loop make their own: a few instructions cost less than the registers that would be held across the
// loop.
struct WarpCoordinate {
  int pair, side, row, lane;  // row = first of the warp's rows in the tile

  __device__ __forceinline__ WarpCoordinate() {
    const int thread = rematerialized_thread();
    pair = thread / 32 / Shape::warps_n;
    side = thread / 32 % Shape::warps_n;
    row = pair * Shape::warp_rows;
    lane = thread % 32;
  }

  __device__ __forceinline__ int first_key() const { return side * (Shape::tile_n / Shape::warps_n); }
  __device__ __forceinline__ int lane_row() const { return row + lane / 4; }
};

// rS (warp_rows, tile_n / warps_n) = Q K^T.
__device__ __forceinline__ void query_key(float (&rS)[Shape::m_tiles][Shape::n_tiles][4], unsigned sQ, unsigned sK) {
  constexpr int row_bytes = TileLayout<Shape::tile_d>::row_bytes;
  const WarpCoordinate w;
  product_nt<Shape::Element, Config::rolled_spans>(
      rS, FragmentAddress<Shape::tile_d>::rows_first(sQ + w.row * row_bytes, w.lane),
      FragmentAddress<Shape::tile_d>::columns_first(sK + w.first_key() * row_bytes, w.lane));
}

__device__ __forceinline__ void mask_tile(float (&rS)[Shape::m_tiles][Shape::n_tiles][4], const ForwardParams& p,
                                          int row_begin, int first_key) {
  const WarpCoordinate w;
  mask_scores<Config::has_band>(rS, p, row_begin + w.lane_row(), first_key + w.first_key() + 2 * (w.lane % 4));
}

// f(m, half) for each of this thread's rows.
template <class F>
__device__ __forceinline__ void for_each_row(F&& f) {
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) f(m, half);
}

// Combines the values of all lanes that share a row with f.
template <class F>
__device__ __forceinline__ void combine_lanes(float (&value)[Shape::m_tiles][2], unsigned sRow, F&& f) {
  if constexpr (Shape::warps_n == 1) {
    for_each_row([&](int m, int half) { value[m][half] = combine_quad(value[m][half], f); });
  } else {
    const WarpCoordinate w;
    combine_rows<Shape::tile_m>(value, sRow, w.pair, w.side, w.lane_row(), w.lane, f);
  }
}

// Makes `maximum` the reference of a row: the factor of what the row has accumulated.
template <bool Care>
__device__ __forceinline__ float raise(float& row_max, float maximum, const ForwardParams& p) {
  const float old = row_max;
  row_max = maximum;
  return Reference::factor<Care>(old, maximum, p.exp2_scale);
}

// Raises the maxima of rows to `row`, each lane's own, and rescales what they have accumulated; with `first` that is
// nothing. `care` says, before and after, whether some row of the warp needs it.
__device__ __forceinline__ void raise_maxima(Softmax& softmax, float (&rO)[Shape::m_tiles][Shape::d_tiles][4],
                                             float (&row)[Shape::m_tiles][2], const ForwardParams& p, unsigned sRow,
                                             bool first, bool& care) {
  combine_lanes(row, sRow, [](float a, float b) { return fmaxf(a, b); });
  bool needed = false;
  for_each_row([&](int m, int half) { needed |= Reference::needs_care(row[m][half], p.exp2_scale); });
  needed = __any_sync(0xFFFFFFFFu, needed);
  if (first) {
    for_each_row([&](int m, int half) { softmax.row_max[m][half] = row[m][half]; });
  } else {
    if (needed || care) {  // from here on `row` is the factor
      for_each_row([&](int m, int half) { row[m][half] = raise<true>(softmax.row_max[m][half], row[m][half], p); });
    } else {
      for_each_row([&](int m, int half) { row[m][half] = raise<false>(softmax.row_max[m][half], row[m][half], p); });
    }
    for_each_row([&](int m, int half) { softmax.row_sum[m][half] *= row[m][half]; });
    rescale<true>(rO, row);
  }
  care = needed;
}

// The weights of one tile in rP, relative to the running maxima; `care` says whether one of them needs it. A warp that
// has its rows to itself has nothing to do to the maxima while none of its lanes finds a larger score. Pairs of warps
// swap theirs, and their weights at the barrier that also publishes the values.
__device__ __forceinline__ void weigh_tile(Softmax& softmax, bool& care, float (&rO)[Shape::m_tiles][Shape::d_tiles][4],
                                           unsigned (&rP)[Shape::n_tiles / 2][Shape::m_tiles][4],
                                           const KeyValueRing& ring, const ForwardParams& p, unsigned shared,
                                           int row_begin, int tile, bool masked, bool first) {
  const unsigned sQ = shared, sP = shared + Shape::p_at, sRow = shared + Shape::row_at;
  float rS[Shape::m_tiles][Shape::n_tiles][4];
  query_key(rS, sQ, ring.k_tile(tile));
  stage_scores<Config::score>(rS, p);
  if (masked) mask_tile(rS, p, row_begin, tile * Shape::tile_n);
  float row[Shape::m_tiles][2];
  bool raised = Shape::warps_n == 2 || first;
  for_each_row([&](int m, int half) {
    row[m][half] = lane_row_max(rS, m, half, softmax.row_max[m][half]);
    raised |= row[m][half] > softmax.row_max[m][half];
  });
  if (Shape::warps_n == 2 || __any_sync(0xFFFFFFFFu, raised)) raise_maxima(softmax, rO, row, p, sRow, first, care);
  for_each_row([&](int m, int half) { row[m][half] = Reference::shift_of(softmax.row_max[m][half], p.exp2_scale); });
  if (care) {
    for_each_row([&](int m, int half) {
      row[m][half] = Reference::of(softmax.row_max[m][half], p.exp2_scale).shift;
      softmax.subtract_far_maximum(rS, m, half, p.exp2_scale);
    });
  }
  for_each_row([&](int m, int half) { softmax.exponentiate(rS, m, half, p.exp2_scale, row[m][half], 1.0f); });
#pragma unroll
  for (int k = 0; k < Shape::n_tiles / 2; ++k) pack_operand<Shape::Element>(rP[k], rS, k);
  if constexpr (Shape::warps_n == 2) {
    const WarpCoordinate w;
    publish_weights<Shape::tile_n>(sP, rP, w.lane_row(), w.side * Shape::n_tiles, w.lane);
    ring.take_turns();
  }
}

// rO += P V over the whole tile: first with the warp's own weights, then with those of its partner.
__device__ __forceinline__ void accumulate_output(float (&rO)[Shape::m_tiles][Shape::d_tiles][4],
                                                  const unsigned (&rP)[Shape::n_tiles / 2][Shape::m_tiles][4],
                                                  unsigned sV, unsigned sP) {
  const WarpCoordinate w;
  constexpr int blocks = Shape::n_tiles / 2;
  auto value = FragmentAddress<Shape::tile_dv>::rows_first(sV, w.lane).template part<Shape::warps_n>(w.side);
  if constexpr (Shape::warps_n == 1) {
#pragma unroll
    for (int k = 0; k < blocks; ++k) multiply_by_rows<Shape::Element, Shape::warps_n>(rO, rP[k], value, k);
  } else {
    const unsigned origin = value.origin;
    value.origin = origin + w.first_key() * TileLayout<Shape::tile_dv>::row_bytes;
#pragma unroll
    for (int k = 0; k < blocks; ++k) multiply_by_rows<Shape::Element, Shape::warps_n>(rO, rP[k], value, k);
    auto weights =
        FragmentAddress<Shape::tile_n>::rows_first(sP + w.row * TileLayout<Shape::tile_n>::row_bytes, w.lane);
    weights = weights.template part<2>(1 - w.side);
    value.origin = origin + (Shape::tile_n / 2 - w.first_key()) * TileLayout<Shape::tile_dv>::row_bytes;
#pragma unroll
    for (int k = 0; k < blocks; ++k) {
      unsigned rA[Shape::m_tiles][4];
      load_operand<2>(rA, weights, k);
      multiply_by_rows<Shape::Element, Shape::warps_n>(rO, rA, value, k);
    }
  }
}

// Inf and NaN of a partly hidden V tile: see core/nonfinite.cuh. All threads of the block come here together, in the
// pass that is made over a block again when its output holds one.
__device__ __forceinline__ void silence_nonfinite(float (&rO)[Shape::m_tiles][Shape::d_tiles][4],
                                                  const KeyValueRing& ring, const ForwardParams& p, int row_begin,
                                                  int tile) {
  const WarpCoordinate w;
  using Layout = TileLayout<Shape::tile_dv>;
  const unsigned sV = ring.v_tile(tile);
  add_nonfinite_values<Config::has_band, Shape::Element, Shape::tile_n>(
      rO, p, row_begin + w.lane_row(), tile * Shape::tile_n, [&](int key, int d) {
        return sV + Layout::offset(key, Layout::part_chunk<Shape::warps_n>(w.side, d)) + 4 * (w.lane % 4);
      });
  __syncthreads();
  ring.v_loader().for_each_chunk(sV, [](unsigned address) { clear_nonfinite_chunk<Shape::Element>(address); });
  __syncthreads();
}

// Starts the copy of a query tile to sQ.
__device__ __forceinline__ void fetch_queries(const ForwardParams& p, const TileCoordinate& c, unsigned sQ) {
  const int row_begin = c.query_tile * Shape::tile_m;
  const char* gQ = static_cast<const char*>(p.q) + c.batch * p.q_batch + c.head * p.q_head + row_begin * p.q_row;
  Shape::QLoader(rematerialized_thread(), p.head_dim).load<true>(sQ, gQ, p.q_row, p.seqlen_q - row_begin);
}

// One query tile, fetched, to sO, rounded, and lse. Says whether a hidden inf or NaN of V may have spoilt it, in which
// case it must be fetched and computed again after setting the careful flag.
__device__ __forceinline__ bool compute_tile(const ForwardParams& p, const TileCoordinate& c, unsigned shared) {
  const unsigned sQ = shared, sP = shared + Shape::p_at, sRow = shared + Shape::row_at;
  const int row_begin = c.query_tile * Shape::tile_m;
  const int rows_left = p.seqlen_q - row_begin;
  const KeyTiles tiles =
      KeyTiles::make<Config::has_band, Shape::tile_n>(p, row_begin, row_begin + min(rows_left, Shape::tile_m));

  KeyValueRing ring(p, shared);
  ring.prefill(tiles);

  Softmax softmax;
  softmax.init();
  float rO[Shape::m_tiles][Shape::d_tiles][4] = {};

  bool first = true, care = false;
#pragma unroll 1
  for (int tile = tiles.last - 1; tile >= tiles.first; --tile, first = false) {
    const bool masked = needs_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, row_begin, tile);
    ring.acquire(tile, first);
    unsigned rP[Shape::n_tiles / 2][Shape::m_tiles][4];
    weigh_tile(softmax, care, rO, rP, ring, p, shared, row_begin, tile, masked, first);
    ring.fetch_ahead(tile, tiles);
    if constexpr (Shape::warps_n == 1) ring.take_turns();
    ring.replace_keys(tile, tiles);
    if (ring.holds_nonfinite(tile, masked)) silence_nonfinite(rO, ring, p, row_begin, tile);
    accumulate_output(rO, rP, ring.v_tile(tile), sP);
  }

  cp_async_wait<0>();
  __syncthreads();  // shared memory is free for O, and sRow for the sums
  combine_lanes(softmax.row_sum, sRow, [](float a, float b) { return a + b; });
  const WarpCoordinate w;
  float* gLse = lse_rows(p, c, row_begin);
  if (w.side == 0) store_lse(gLse, softmax, p.exp2_scale, w.row, rows_left, w.lane);
  const bool spoilt =
      stage_output<Shape::Element, Shape::tile_dv, Shape::warps_n>(sQ, rO, softmax, w.row, w.side, w.lane);
  return Config::has_band && !ring.parked.careful() && __syncthreads_or(spoilt);
}

// Rows of sO to global memory, each by the warp or pair of warps that staged it.
__device__ __forceinline__ void write_output(const ForwardParams& p, const TileCoordinate& c, unsigned sO) {
  const WarpCoordinate w;
  const int row_begin = c.query_tile * Shape::tile_m;
  char* gO = output_rows(p, c, row_begin);
  if constexpr (Shape::warps_n == 1) {
    __syncwarp();
  } else {
    pair_sync(w.pair);
  }
  store_output<Shape::tile_dv, Shape::warp_rows, 32 * Shape::warps_n, Config::out_vector_bytes, Config::exact_dims>(
      sO, gO, p.out_row, w.row, p.seqlen_q - row_begin, p.head_dim_v, w.side * 32 + w.lane);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps, Config::blocks_per_sm)
    sm80_forward(const __grid_constant__ cuflash::ForwardParams p) {
  using namespace cuflash;
  extern __shared__ __align__(128) char shared[];
  const TileCoordinate c = TileCoordinate::of_block<Config::has_band>(p);
  const unsigned base = shared_address(shared);
  const Parked parked{base + Shape::parked_at};
  fetch_queries(p, c, base);
  if (threadIdx.x == 0) parked.init(p, c);
  __syncthreads();
#pragma unroll 1
  while (compute_tile(p, c, base)) {
    fetch_queries(p, c, base);
    if (rematerialized_thread() == 0) parked.set_careful(true);
    __syncthreads();
  }
  write_output(p, c, base);
}
