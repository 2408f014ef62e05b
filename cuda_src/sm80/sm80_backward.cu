// FlashAttention-2 backward (Dao 2023, section 3.2, algorithm 2) on mma.sync and cp.async, for compute capability 8.0
// and up.
//
// One block owns tile_n keys of one key/value head and keeps their dK and dV in registers, while it walks the query
// heads that share that head and, of each, the query tiles that see the keys. So only dQ is summed by several blocks,
// in any order or, with Config::ordered, in that of the key tiles from the last to the first. Under a causal mask the
// last key tile reaches a query tile first by itself: waiting for one's turn then takes next to no time.
//
// A step has two halves: P and dS of a query tile, then their products for dK, dV and dQ. With up to two stages all
// warps make one after the other. With three, half of the warps make the first half of the next step before the second
// half of this one and the others after it: while those of one scheduler take exponentials, its other warp multiplies,
// and one barrier a step is enough.
#include "core/dq_sum.cuh"
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/turns.cuh"
#include "sm80/backward.cuh"
#include "sm80/output.cuh"

namespace cuflash {

// Shared memory: sK (tile_n, tile_d), later dK; sV (tile_n, tile_dv), later dV; per stage sQ (tile_m, tile_d) and sdO
// (tile_m, tile_dv); per buffer sP and sdS (tile_m, tile_n); the row statistics, per stage when steps overlap.
struct Storage {
  static constexpr bool overlapping = Config::stages == 3;
  static_assert(!overlapping || !Shape::own_rows, "dQ of one's own rows is made in the first half of a step");
  static constexpr int buffers = overlapping ? 2 : 1, row_stages = overlapping ? 3 : 1;
  static constexpr int v_at = Shape::k_bytes, ring_at = v_at + Shape::v_bytes;
  static constexpr int stage_bytes = Shape::q_bytes + Shape::dout_bytes;
  static constexpr int p_at = ring_at + Config::stages * stage_bytes, ds_at = p_at + Shape::score_bytes;
  static constexpr int rows_at = p_at + 2 * buffers * Shape::score_bytes;

  unsigned base;

  __device__ __forceinline__ unsigned k() const { return base; }
  __device__ __forceinline__ unsigned v() const { return base + v_at; }
  __device__ __forceinline__ unsigned q(int stage) const { return base + ring_at + stage * stage_bytes; }
  __device__ __forceinline__ unsigned dout(int stage) const { return q(stage) + Shape::q_bytes; }
  __device__ __forceinline__ unsigned p(int buffer) const { return base + p_at + 2 * buffer * Shape::score_bytes; }
  __device__ __forceinline__ unsigned ds(int buffer) const { return p(buffer) + Shape::score_bytes; }
  __device__ __forceinline__ RowStatistics rows(int stage) const {
    return {base + rows_at + (overlapping ? stage * RowStatistics::bytes : 0)};
  }
};

// A block's way through the query tiles that see its keys: all tiles of one head, then those of the next.
struct QueryStep {
  int head, tile, stage, buffer;

  __device__ __forceinline__ QueryStep next(const QueryTiles& tiles) const {
    const bool same_head = tile + 1 < tiles.last;
    return {head + !same_head, same_head ? tile + 1 : tiles.first, stage + 1 < Config::stages ? stage + 1 : 0,
            Storage::overlapping ? buffer ^ 1 : 0};
  }

  __device__ __forceinline__ int row_begin() const { return tile * Shape::tile_m; }
};

static_assert(Shape::key_tiles * 16 * Shape::warps_m == Shape::tile_n, "keys are rows of dK and dV, in blocks of 16");

// First of a warp's 8 keys that are half of a 16-row fragment of dK and dV.
__device__ __forceinline__ int fragment_key(const KeyWarp& w, int m, int half) {
  return 8 * TileLayout<Shape::tile_n>::part_chunk<Shape::warps_m>(w.m, 2 * m + half);
}

// A warp's part of dK or dV, whose rows are Dim wide.
template <int Dim>
struct KeyGradient {
  static constexpr int column_tiles = Dim / Shape::warps_n / 8;
  float r[Shape::key_tiles][column_tiles][4] = {};

  // += S^T X, where S is P or dS (tile_m, tile_n) and X is dO or Q (tile_m, Dim).
  template <bool FiniteOnly = false>
  __device__ __forceinline__ void accumulate(unsigned sScores, unsigned sX) {
    const KeyWarp w;
    const auto scores = FragmentAddress<Shape::tile_n>::columns_first(sScores, w.lane);
    const auto rows = FragmentAddress<Dim>::rows_first(sX, w.lane);
    product_tn<Shape::Element, Shape::tile_m / 16, Config::row_blocks, Shape::warps_m, Shape::warps_n, FiniteOnly>(
        r, scores.template part<Shape::warps_m>(w.m), rows.template part<Shape::warps_n>(w.n));
  }

  // The same without what an inf or NaN in X does to hidden pairs.
  __device__ __forceinline__ void accumulate_visible(unsigned sScores, unsigned sX, const BackwardParams& p,
                                                     int row_begin, int first_key) {
    const KeyWarp w;
    const auto key = [&](int m, int half) { return fragment_key(w, m, half) + w.lane / 4; };
    accumulate<true>(sScores, sX);
    add_visible_nonfinite<Shape::Element, Shape::tile_m>(
        r,
        [&](int k, int m, int half) {
          return VisibleKeys::of_row<Config::has_band>(p, row_begin + k).contains(first_key + key(m, half));
        },
        [&](int k, int m, int half) { return load_score(sScores, k, key(m, half)); },
        [&](int k, int d) {
          return load_pair<Dim>(sX, k,
                                8 * TileLayout<Dim>::template part_chunk<Shape::warps_n>(w.n, d) + 2 * (w.lane % 4));
        });
  }

  // Rounded, in place of the keys or values in shared memory.
  __device__ __forceinline__ void stage(unsigned sTile) const {
    const KeyWarp w;
    store_fragments<Dim>(
        sTile, r, [&](int m, int half) { return fragment_key(w, m, half); },
        [&](int n) { return TileLayout<Dim>::template part_chunk<Shape::warps_n>(w.n, n); });
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int m = 0; m < Shape::key_tiles; ++m)
#pragma unroll
      for (int n = 0; n < column_tiles; ++n)
#pragma unroll
        for (float& x : r[m][n]) x *= factor;
  }
};

// A warp's dQ of one step to the sums in the workspace. With visible_only, dS of the warp's rows is in shared memory.
__device__ __forceinline__ void add_query_gradient(const BackwardParams& p, int batch, const QueryStep& step,
                                                   const Storage& s, const GradientOperand& rdS, int first_key,
                                                   bool visible_only) {
  using Sum = QueryGradientSum<Shape::tile_d, Config::reduce_width>;
  using Layout = TileLayout<Shape::tile_d>;
  const ScoreWarp w;
  const Sum sum = Sum::of_rows(p, batch, step.head, step.row_begin());
  float* first = sum.at(w.query_row() / 16, Layout::part_start<Shape::score_warps_n>(w.n), w.lane);
  const auto add = [&](int d, const GradientColumns& r) {
#pragma unroll
    for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
      for (int i = 0; i < kGradientColumns; ++i)
        Sum::add(first + Sum::distance(m, Layout::part_offset<Shape::score_warps_n>(d + i)), r[m][i]);
  };
  if (visible_only) {
    query_gradient_columns<true>(rdS, s.k(), [&](int d, GradientColumns& r) {
      add_nonfinite_keys(r, d, s.ds(step.buffer), s.k(), p, step.row_begin(), first_key);
      add(d, r);
    });
  } else {
    query_gradient_columns<false>(rdS, s.k(), add);
  }
}

// Q and dO of weightless rows become 0: their P and dS are, but 0 times an inf or NaN there would be NaN in dK and dV.
__device__ __forceinline__ void clear_weightless_queries(const QueryStep& step, const Storage& s) {
  const KeyWarp w;
  const auto clear = [&](unsigned sRow, int dim) {
    if (8 * w.lane < dim) store_shared(sRow + 16 * w.lane, make_uint4(0, 0, 0, 0));
  };
  static_assert(Shape::tile_d <= 8 * 32 && Shape::tile_dv <= 8 * 32, "a chunk for each lane");
#pragma unroll 1
  for (int row = rematerialized_thread() / 32; row < Shape::tile_m; row += Config::warps) {
    if (!weightless(s.rows(step.stage).lse(row))) continue;
    clear(s.q(step.stage) + 2 * Shape::tile_d * row, Shape::tile_d);
    clear(s.dout(step.stage) + 2 * Shape::tile_dv * row, Shape::tile_dv);
  }
}

// P and dS of one step to shared memory. Says whether this thread found what publish() must know of. `fetch` starts the
// next copies, once the first product is on its way; `use(rdS, nonfinite)` comes last, nonfinite as publish() puts it.
template <class Fetch, class Use>
__device__ __forceinline__ bool score_gradients(const BackwardParams& p, const QueryStep& step, const Storage& s,
                                                int key_tile, Fetch&& fetch, Use&& use) {
  ScoreFragments rS, rdP;
  score_product<Shape::tile_d>(rS, s.q(step.stage), s.k());
  fetch();
  score_product<Shape::tile_dv>(rdP, s.dout(step.stage), s.v());
  const bool masked = needs_mask(p, step.row_begin(), key_tile);
  const bool nonfinite = Config::has_band && masked && !(all_finite(rS) && all_finite(rdP));
  const bool any_weightless = differentiate_softmax(rS, rdP, s.rows(step.stage), p);
  if (any_weightless) clear_weightless(rS, rdP, s.rows(step.stage));
  if (masked) clear_hidden(rS, rdP, p, step.row_begin(), key_tile * Shape::tile_n);
  const ScoreAddress address(s.p(step.buffer));
  store_scores(address, 0, rS);
  store_scores(address, Storage::ds_at - Storage::p_at, rdP);
  use(rdP, nonfinite);
  // Under a mask weightless rows are common and harmless, unless they hold what makes a product inf or NaN.
  return Config::has_band && masked ? nonfinite : any_weightless;
}

// Waits until all warps have come here, with P and dS of a step in shared memory. Says whether an inf or NaN there may
// be hidden by a mask.
__device__ __forceinline__ bool publish(const BackwardParams& p, const QueryStep& step, const Storage& s, int key_tile,
                                        bool found) {
  const bool careful = __syncthreads_or(found);
  if (careful) {
    clear_weightless_queries(step, s);
    __syncthreads();
  }
  return Config::has_band && careful && needs_mask(p, step.row_begin(), key_tile);
}

// dK and dV, staged in shared memory, to their places.
__device__ __forceinline__ void write_key_gradients(const BackwardParams& p, const KeyTileCoordinate& c,
                                                    const Storage& s) {
  const int64 key = static_cast<int64>(c.key_tile) * Shape::tile_n;
  const int keys_left = p.seqlen_k - static_cast<int>(key), thread = rematerialized_thread();
  char* dk = static_cast<char*>(p.dk) + c.batch * p.dk_batch + c.head * p.dk_head + key * p.dk_row;
  char* dv = static_cast<char*>(p.dv) + c.batch * p.dv_batch + c.head * p.dv_head + key * p.dv_row;
  store_output<Shape::tile_d, Shape::tile_n, Shape::threads, Config::out_vector_bytes, Config::exact_dims>(
      s.k(), dk, p.dk_row, 0, keys_left, p.head_dim, thread);
  store_output<Shape::tile_dv, Shape::tile_n, Shape::threads, Config::out_vector_bytes, Config::exact_dims>(
      s.v(), dv, p.dv_row, 0, keys_left, p.head_dim_v, thread);
}

// A block: its keys, the steps that see them, and what it accumulates over them.
struct Block {
  const BackwardParams& p;
  const Storage s;
  const KeyTileCoordinate c;
  int first_key, end_head;
  QueryTiles tiles;
  KeyGradient<Shape::tile_d> dk;
  KeyGradient<Shape::tile_dv> dv;

  __device__ __forceinline__ Block(const BackwardParams& params, unsigned shared)
      : p(params), s{shared}, c(coordinate(params)), first_key(c.key_tile * Shape::tile_n), tiles(of_keys(first_key)) {
    end_head = tiles.first < tiles.last ? (c.head + 1) * p.group : 0;
  }

  static __device__ __forceinline__ KeyTileCoordinate coordinate(const BackwardParams& p) {
    if constexpr (!Config::ordered) return KeyTileCoordinate::of_block();
    return KeyTileCoordinate::in_turn(p, (p.seqlen_k + Shape::tile_n - 1) / Shape::tile_n);
  }

  // The query tiles that see the key tile that begins at a key; none past the last key.
  __device__ __forceinline__ QueryTiles of_keys(int key) const {
    if (key >= p.seqlen_k) return {0, 0};
    return QueryTiles::make<Config::has_band, Shape::tile_m>(p, key, min(key + Shape::tile_n, p.seqlen_k));
  }

  __device__ __forceinline__ QueryStep first() const { return {c.head * p.group, tiles.first, 0, 0}; }
  __device__ __forceinline__ QueryStep after(const QueryStep& step) const { return step.next(tiles); }
  __device__ __forceinline__ bool has(const QueryStep& step) const { return step.head < end_head; }

  __device__ __forceinline__ void fetch_rows(const QueryStep& step) const {
    if (has(step)) s.rows(step.stage).fetch(p, c.batch, step.head, step.row_begin());
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch(const QueryStep& step) const {
    if (has(step)) {
      const unsigned sQ = s.q(step.stage), sdO = s.dout(step.stage);
      if (Shape::unchecked_loads && step.row_begin() + Shape::tile_m <= p.seqlen_q) {
        fetch_query_tile<false>(p, c.batch, step.head, step.row_begin(), sQ, sdO);
      } else {
        fetch_query_tile<true>(p, c.batch, step.head, step.row_begin(), sQ, sdO);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void add_key_gradients(const QueryStep& step, bool visible_only) {
    if (visible_only) {
      dv.accumulate_visible(s.p(step.buffer), s.dout(step.stage), p, step.row_begin(), first_key);
      dk.accumulate_visible(s.ds(step.buffer), s.q(step.stage), p, step.row_begin(), first_key);
    } else {
      dv.accumulate(s.p(step.buffer), s.dout(step.stage));
      dk.accumulate(s.ds(step.buffer), s.q(step.stage));
    }
  }

  __device__ __forceinline__ Turn turn(const QueryStep& step) const {
    return Turn::of_rows(p, c.batch, step.head, step.row_begin());
  }

  __device__ __forceinline__ void add(const QueryStep& step, const GradientOperand& rdS, bool visible_only) const {
    // The block before this one in turn has the next keys.
    if (Config::ordered && of_keys(first_key + Shape::tile_n).contains(step.tile)) turn(step).wait(c.before);
    add_query_gradient(p, c.batch, step, s, rdS, first_key, visible_only);
  }

  // dQ of a step whose dS is published.
  __device__ __forceinline__ void add_query_gradients(const QueryStep& step, bool visible_only) const {
    add(step, GradientOperand::of_tile(s.ds(step.buffer)), visible_only);
  }

  // The same for the rows of a warp alone, whose dS is in its registers and in shared memory, not published.
  __device__ __forceinline__ void add_own_query_gradients(const QueryStep& step, const ScoreFragments& scores,
                                                          bool nonfinite) const {
    const bool visible_only = Config::has_band && __any_sync(0xFFFFFFFFu, nonfinite);
    if (visible_only) __syncwarp();
    add(step, GradientOperand::of_registers(scores), visible_only);
  }

  // At the rows of the step before `step`, behind a barrier after its additions. Better later: one thread waits until
  // they have all arrived.
  __device__ __forceinline__ void pass_turn_before(QueryStep step) const {
    if constexpr (!Config::ordered) return;
    if (rematerialized_thread() != 0) return;
    if (step.tile == tiles.first) {
      --step.head;
      step.tile = tiles.last;
    }
    --step.tile;
    if (step.head >= c.head * p.group) turn(step).pass(c.before);
  }

  __device__ __forceinline__ void pass_last_turn(const QueryStep& end) const {
    if constexpr (!Config::ordered) return;
    __syncthreads();
    if (end_head) pass_turn_before(end);
  }

  // All warps do the same at a time.
  __device__ __forceinline__ void walk_in_step() {
    QueryStep step = first();
    fetch(step);
    fetch_rows(step);
#pragma unroll 1
    while (has(step)) {
      const QueryStep next = after(step);
      cp_async_wait<0>();
      __syncthreads();
      if constexpr (Shape::own_rows) pass_turn_before(step);
      const bool found = score_gradients(
          p, step, s, c.key_tile,
          [&] {
            if constexpr (Config::stages > 1) fetch(next);
          },
          [&](const ScoreFragments& rdS, bool nonfinite) {
            if constexpr (Shape::own_rows) add_own_query_gradients(step, rdS, nonfinite);
          });
      const bool visible_only = publish(p, step, s, c.key_tile, found);
      if constexpr (!Shape::own_rows) pass_turn_before(step);
      fetch_rows(next);
      add_key_gradients(step, visible_only);
      if constexpr (Config::stages == 1) {
        __syncthreads();  // all have done with Q and dO
        fetch(next);
      }
      if constexpr (!Shape::own_rows) add_query_gradients(step, visible_only);
      step = next;
    }
    pass_last_turn(step);
  }

  // Half of the warps, one on each scheduler, are half a step ahead.
  __device__ __forceinline__ void walk_overlapping() {
    const auto score = [&](const QueryStep& step) {
      return score_gradients(p, step, s, c.key_tile, [] {}, [](const ScoreFragments&, bool) {});
    };
    QueryStep step = first(), next = after(step);
    fetch(step);
    fetch_rows(step);
    fetch(next);
    fetch_rows(next);
    cp_async_wait<2>();
    __syncthreads();
    bool found = has(step) && score(step);
#pragma unroll 1
    while (has(step)) {
      cp_async_wait<0>();
      const bool visible_only = publish(p, step, s, c.key_tile, found);
      const QueryStep second = after(next);
      fetch(second);  // into the place of the step before this one
      fetch_rows(second);
      found = false;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        if (half == rematerialized_thread() / 32 / (Config::warps / 2)) {
          if (has(next)) found = score(next);
        } else {
          pass_turn_before(step);  // by the half that comes here second
          add_key_gradients(step, visible_only);
          add_query_gradients(step, visible_only);
        }
      }
      step = next;
      next = second;
    }
    pass_last_turn(step);
  }

  __device__ __forceinline__ void write() {
    cp_async_wait<0>();
    __syncthreads();  // all have done with K and V
    dk.scale(p.gradient_scale);
    dk.stage(s.k());
    dv.stage(s.v());
    __syncthreads();
    write_key_gradients(p, c, s);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps, Config::blocks_per_sm)
    sm80_backward(const __grid_constant__ cuflash::BackwardParams p) {
  using namespace cuflash;
  extern __shared__ __align__(128) char shared[];
  Block block(p, shared_address(shared));
  fetch_key_tile(p, block.c.batch, block.c.head, block.c.key_tile, block.s.k(), block.s.v());
  if constexpr (Storage::overlapping) {
    block.walk_overlapping();
  } else {
    block.walk_in_step();
  }
  block.write();
}
