// For sm90_backward.cu: the shape of a block, its shared memory, and its way through the query tiles.
#pragma once

#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/seqlen.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/shared.cuh"
#include "sm90/panel.cuh"
#include "sm90/ring.cuh"

namespace cuflash {

// Mirrored by cuflash/variants/sm90_backward.py.
struct Sm90BackwardParams {
  TensorMap q, dout, k, v;  // boxes of one panel of a tile
  BackwardParams p;
};

struct Shape {
  using Element = Config::element;
  static constexpr int warpgroups = Config::warpgroups, stages = Config::stages, buffers = Config::buffers;
  static constexpr int tile_m = Config::tile_m, tile_n = Config::tile_n;
  static constexpr int tile_d = Config::tile_d, tile_dv = Config::tile_dv;
  static constexpr bool split_keys = tile_n > 64;  // whether each warpgroup has keys of its own
  static constexpr int consumers = 128 * warpgroups, threads = consumers + 128;
  static constexpr int m_blocks = tile_m / 8, d_blocks = tile_d / 8, dv_blocks = tile_dv / 8;
  static constexpr int dq_columns = Config::dq_columns, dq_blocks = dq_columns / 8;
  using Q = PanelLayout<tile_m, tile_d>;
  using Dout = PanelLayout<tile_m, tile_dv>;
  using K = PanelLayout<tile_n, tile_d>;
  using V = PanelLayout<tile_n, tile_dv>;
  using Scores = PanelLayout<tile_n, tile_m>;
  using Ring = RingBarriers<stages>;
  using ScoreRing = RingBarriers<buffers>;
  static constexpr int rows_bytes = 2 * 4 * tile_m;
  // Shared memory, from a multiple of 1024: sK (tile_n, tile_d); sV (tile_n, tile_dv); sQ (stages, tile_m, tile_d);
  // sdO (stages, tile_m, tile_dv); sdS (buffers, tile_n, tile_m), transposed; the rows' shifts and deltas (stages, 2,
  // tile_m); dQ on its way out of a warpgroup (dq_writers, 64, dq_columns); P^T in float32 between warpgroups that
  // share keys (tile_n, tile_m); the marks of keys, and what care the block needs; the barriers.
  static constexpr int v_at = K::bytes, q_at = v_at + V::bytes, dout_at = q_at + stages * Q::bytes;
  static constexpr int ds_at = dout_at + stages * Dout::bytes, rows_at = ds_at + buffers * Scores::bytes;
  static constexpr int dq_at = rows_at + stages * rows_bytes, dq_bytes = 4 * 64 * dq_columns;
  static constexpr int dq_writers = !Config::bulk_add ? 0 : Config::query_group ? 1 : warpgroups;
  static constexpr int weights_at = dq_at + dq_writers * dq_bytes, weights_bytes = split_keys ? 0 : 4 * tile_n * tile_m;
  static constexpr int marks_at = weights_at + weights_bytes, barriers_at = marks_at + 4 * (tile_n + 2);
  // A block has the registers that it was launched with.
  static constexpr int launch_registers = 65536 / threads / 8 * 8;
  static_assert(consumers * Config::consumer_registers + 128 * Config::query_registers <= threads * launch_registers);
  static_assert(tile_d % dq_columns == 0 && (dq_columns % K::panel_columns == 0 || K::panel_columns % dq_columns == 0));
  static_assert(tile_m % 64 == 0, "queries are rows of dQ, 64 to a product");
};

struct Shared {
  unsigned base;
  RingBarriers<1> k_full, v_full;  // of K and V, which stay
  Shape::Ring q_ring, dout_ring;
  Shape::ScoreRing ds_ring;      // from the warps of the consumers
  RingBarriers<1> weights_ring;  // from one warpgroup to another that shares its keys
  RingBarriers<1> care_known;    // what care the block needs, see care.cuh

  __device__ __forceinline__ explicit Shared(unsigned start)
      : base((start + 1023) & ~1023u),
        k_full{base + Shape::barriers_at},
        v_full{k_full.at + RingBarriers<1>::bytes},
        q_ring{v_full.at + RingBarriers<1>::bytes},
        dout_ring{q_ring.at + Shape::Ring::bytes},
        ds_ring{dout_ring.at + Shape::Ring::bytes},
        weights_ring{ds_ring.at + Shape::ScoreRing::bytes},
        care_known{weights_ring.at + RingBarriers<1>::bytes} {}

  __device__ __forceinline__ void init() const {
    constexpr int consumer_warps = 4 * Shape::warpgroups;
    k_full.init(1);
    v_full.init(1);
    q_ring.init(consumer_warps);
    dout_ring.init(consumer_warps);
    ds_ring.init(Config::query_group ? 4 : consumer_warps, Shape::split_keys ? consumer_warps : 4);
    weights_ring.init(4, 4);
    care_known.init(1);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ unsigned k() const { return base; }
  __device__ __forceinline__ unsigned v() const { return base + Shape::v_at; }
  __device__ __forceinline__ unsigned q(int stage) const { return base + Shape::q_at + stage * Shape::Q::bytes; }
  __device__ __forceinline__ unsigned dout(int stage) const {
    return base + Shape::dout_at + stage * Shape::Dout::bytes;
  }
  __device__ __forceinline__ unsigned ds(int buffer) const {
    return base + Shape::ds_at + buffer * Shape::Scores::bytes;
  }
  __device__ __forceinline__ unsigned shift(int stage) const {
    return base + Shape::rows_at + stage * Shape::rows_bytes;
  }
  __device__ __forceinline__ unsigned dq(int writer) const { return base + Shape::dq_at + writer * Shape::dq_bytes; }
  __device__ __forceinline__ unsigned weights() const { return base + Shape::weights_at; }
  __device__ __forceinline__ unsigned delta(int stage) const { return shift(stage) + 4 * Shape::tile_m; }
  __device__ __forceinline__ unsigned mark(int key) const { return base + Shape::marks_at + 4 * key; }

  __device__ __forceinline__ void publish_care(int care) const {
    store_shared(mark(Shape::tile_n), static_cast<unsigned>(care));
    care_known.publish({});
  }
  __device__ __forceinline__ int wait_care() const {
    care_known.wait_full({});
    return in_uniform_register(static_cast<int>(load_shared(mark(Shape::tile_n))));
  }
};

// By all threads, first of all.
__device__ __forceinline__ void start(const Sm90BackwardParams& params, const Shared& shared) {
  if (threadIdx.x == 0) {
    prefetch_tensor_map(params.k);
    prefetch_tensor_map(params.q);
    prefetch_tensor_map(params.v);
    prefetch_tensor_map(params.dout);
    shared.init();
  }
  __syncthreads();
}

// A block's way through the query tiles that see its keys: all tiles of one head, then those of the next.
struct QueryStep {
  int head, tile;

  __device__ __forceinline__ int row_begin() const { return tile * Shape::tile_m; }
};

struct Work {
  KeyTileCoordinate c;
  int end_head;
  QueryTiles tiles;

  __device__ __forceinline__ explicit Work(const BackwardParams& p) : c(coordinate(p)) {
    const QueryTiles t = of_keys(p, first_key());
    tiles = {in_uniform_register(t.first), in_uniform_register(t.last)};
    end_head = tiles.first < tiles.last ? (c.head + 1) * p.group : 0;
  }

  __device__ __forceinline__ int first_key() const { return c.key_tile * Shape::tile_n; }

  static __device__ __forceinline__ KeyTileCoordinate coordinate(const BackwardParams& p) {
    const int tiles = (p.seqlen_k + Shape::tile_n - 1) / Shape::tile_n;
    if constexpr (Config::ordered) return KeyTileCoordinate::in_turn(p, tiles);
    if constexpr (Config::has_band) return KeyTileCoordinate::longest_first(p, tiles);
    return KeyTileCoordinate::of_block();
  }

  // The query tiles that see the key tile that begins at a key; none past the last key.
  static __device__ __forceinline__ QueryTiles of_keys(const BackwardParams& p, int key) {
    if (key >= p.seqlen_k) return {0, 0};
    return QueryTiles::make<Config::has_band, Shape::tile_m>(p, key, min(key + Shape::tile_n, p.seqlen_k));
  }

  __device__ __forceinline__ QueryStep first(const BackwardParams& p) const { return {c.head * p.group, tiles.first}; }

  __device__ __forceinline__ QueryStep after(const QueryStep& step) const {
    const bool same_head = step.tile + 1 < tiles.last;
    return {step.head + !same_head, same_head ? step.tile + 1 : tiles.first};
  }

  template <int Steps>
  __device__ __forceinline__ QueryStep before(QueryStep step) const {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
      const bool same_head = step.tile > tiles.first;
      step = {step.head - !same_head, same_head ? step.tile - 1 : tiles.last - 1};
    }
    return step;
  }

  __device__ __forceinline__ bool has(const QueryStep& step) const { return step.head < end_head; }
};

}  // namespace cuflash
