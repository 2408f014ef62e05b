// For sm90_backward.cu: the shape of a block, its shared memory, and its way through the query tiles.
#pragma once

#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/seqlen.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/shared.cuh"
#include "sm90/panel.cuh"
#include "sm90/ring.cuh"
#include "sm90/schedule.cuh"

namespace cuflash {

// Mirrored by cuflash/variants/sm90_backward.py.
struct Sm90BackwardParams {
  TensorMap q, dout, k, v;  // boxes of one panel of a tile
  BackwardParams p;
  WorkList list;
};

struct Shape {
  using Element = Config::element;
  static constexpr int warpgroups = Config::warpgroups, stages = Config::stages, buffers = Config::buffers;
  static constexpr int tile_m = Config::tile_m, tile_n = 64 * warpgroups;
  static constexpr int tile_d = Config::tile_d, tile_dv = Config::tile_dv;
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
  // tile_m); dQ on its way out of a warpgroup (dq_writers, 64, dq_columns); the barriers.
  static constexpr int v_at = K::bytes, q_at = v_at + V::bytes, dout_at = q_at + stages * Q::bytes;
  static constexpr int ds_at = dout_at + stages * Dout::bytes, rows_at = ds_at + buffers * Scores::bytes;
  static constexpr int dq_at = rows_at + stages * rows_bytes, dq_bytes = 4 * 64 * dq_columns;
  static constexpr int dq_writers = !Config::bulk_add ? 0 : Config::query_group ? 1 : warpgroups;
  static constexpr int barriers_at = dq_at + dq_writers * dq_bytes;
  // A block has the registers that it was launched with.
  static constexpr int launch_registers = 65536 / threads / 8 * 8;
  // static_assert(consumers * Config::consumer_registers + 128 * Config::query_registers <= threads *
  // launch_registers);
  static_assert(tile_d % dq_columns == 0 && (dq_columns % K::panel_columns == 0 || K::panel_columns % dq_columns == 0));
  static_assert(tile_m % 64 == 0, "queries are rows of dQ, 64 to a product");
};

struct Shared {
  unsigned base;
  using KeyRing = RingBarriers<1>;
  KeyRing k_ring, v_ring;
  Shape::Ring q_ring, dout_ring;
  Shape::ScoreRing ds_ring;  // from the warps of the consumers
  TileRing tile_ring;        // the key tiles of the block

  __device__ __forceinline__ explicit Shared(unsigned start)
      : base((start + 1023) & ~1023u),
        k_ring{base + Shape::barriers_at},
        v_ring{k_ring.at + KeyRing::bytes},
        q_ring{v_ring.at + KeyRing::bytes},
        dout_ring{q_ring.at + Shape::Ring::bytes},
        ds_ring{dout_ring.at + Shape::Ring::bytes},
        tile_ring{{{ds_ring.at + Shape::ScoreRing::bytes}}} {}

  __device__ __forceinline__ void init() const {
    constexpr int consumer_warps = 4 * Shape::warpgroups, query_warps = Config::query_group ? 4 : 0;
    k_ring.init(consumer_warps + query_warps);
    v_ring.init(consumer_warps);
    q_ring.init(consumer_warps);
    dout_ring.init(consumer_warps);
    ds_ring.init(Config::query_group ? 4 : consumer_warps, consumer_warps);
    tile_ring.barriers.init(consumer_warps + query_warps);
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
  __device__ __forceinline__ unsigned delta(int stage) const { return shift(stage) + Shape::rows_bytes / 2; }
};

// A block's way through the query tiles that see its keys: all tiles of one head, then those of the next.
struct QueryStep {
  int head, tile;

  __device__ __forceinline__ int row_begin() const { return tile * Shape::tile_m; }
};

// A key tile: its place and the query tiles that see it. Without any, dK and dV are 0.
struct Work {
  int key_tile, head, batch;  // of keys and values
  QueryTiles tiles;

  __device__ __forceinline__ Work(const BackwardParams& p, const TileCoordinate& c)
      : key_tile(c.query_tile), head(c.head), batch(c.batch) {
    const QueryTiles t = of_keys(p, first_key());
    tiles = {in_uniform_register(t.first), in_uniform_register(t.last)};
  }

  __device__ __forceinline__ int first_key() const { return key_tile * Shape::tile_n; }
  __device__ __forceinline__ bool any() const { return tiles.first < tiles.last; }

  static __device__ __forceinline__ int tiles_of_head(const BackwardParams& p) {
    return (p.seqlen_k + Shape::tile_n - 1) / Shape::tile_n;
  }

  // Of an index into the list of all key tiles: section after section of (batch, head) pairs. Under a causal mask the
  // first tile of a head is seen by the most queries and goes first. Blocks that take turns go from the last to the
  // first.
  static __device__ __forceinline__ TileCoordinate coordinate(const BackwardParams& p, const WorkList& list,
                                                              int index) {
    if (index >= list.tiles) return {-1, 0, 0};
    const int tiles = tiles_of_head(p), heads = p.heads_q / p.group;
    const auto c = SectionCoordinate::make(index, tiles, list.tiles / tiles, list.section);
    return {Config::ordered ? tiles - 1 - c.tile : c.tile, c.pair % heads, c.pair / heads};
  }

  // Where blocks take turns: how many come before that of this tile.
  __device__ __forceinline__ int turn(const BackwardParams& p) const { return tiles_of_head(p) - 1 - key_tile; }

  // The query tiles that see the key tile that begins at a key; none past the last key.
  static __device__ __forceinline__ QueryTiles of_keys(const BackwardParams& p, int key) {
    if (key >= p.seqlen_k) return {0, 0};
    return QueryTiles::make<Config::has_band, Shape::tile_m>(p, key, min(key + Shape::tile_n, p.seqlen_k));
  }

  __device__ __forceinline__ QueryStep first(const BackwardParams& p) const { return {head * p.group, tiles.first}; }

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

  // Of a tile that has any step.
  __device__ __forceinline__ bool has(const BackwardParams& p, const QueryStep& step) const {
    return step.head < (head + 1) * p.group;
  }
};

}  // namespace cuflash
