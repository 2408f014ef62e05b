// FlashAttention-3 forward (Shah et al. 2024, section 3) for compute capability 9.0: one warp feeds rings of K and V
// tiles by the copy engine, two or three warpgroups of 64 query rows each compute on wgmma. Inside a warpgroup the
// scores of the next tile and the output of this one run on the tensor cores while exponentials are taken; the
// warpgroups take turns at issuing their products, so that one's softmax meets the products of another. The grid is
// persistent.
#include "core/mask.cuh"
#include "core/nonfinite.cuh"
#include "core/params.cuh"
#include "core/score.cuh"
#include "core/seqlen.cuh"
#include "core/softmax.cuh"
#include "ptx/elect.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared.cuh"
#include "sm90/output.cuh"
#include "sm90/panel.cuh"
#include "sm90/ring.cuh"
#include "sm90/schedule.cuh"

namespace cuflash {

// Mirrored by cuflash/variants/sm90_forward.py.
struct Sm90ForwardParams {
  TensorMap q, k, v;  // boxes of one panel of a tile
  ForwardParams p;
  WorkList work;
};

struct Shape {
  using Element = Config::element;
  static constexpr int warpgroups = Config::warpgroups, stages = Config::stages;
  static constexpr int tile_m = 64 * warpgroups, tile_n = Config::tile_n;
  static constexpr int n_blocks = tile_n / 8, d_blocks = Config::tile_dv / 8;
  static constexpr int consumers = 128 * warpgroups, threads = consumers + 128;
  static constexpr int inspectors = Config::has_band ? 96 : 0;
  using Q = PanelLayout<tile_m, Config::tile_d>;
  using K = PanelLayout<tile_n, Config::tile_d>;
  using V = PanelLayout<tile_n, Config::tile_dv>;
  using Ring = RingBarriers<stages>;
  // Shared memory, from a multiple of 1024: sQ (tile_m, tile_d); sK (stages, tile_n, tile_d); sV (stages, tile_n,
  // tile_dv); the barriers.
  static constexpr int k_at = Q::bytes, v_at = k_at + stages * K::bytes, barriers_at = v_at + stages * V::bytes;
  static constexpr int producer_registers = warpgroups == 2 ? 40 : 32;
  static constexpr int consumer_registers = warpgroups == 2 ? 232 : 160;
  // A block has the registers that it was launched with: a warpgroup that takes more than the others leave waits for
  // ever.
  static constexpr int launch_registers = 65536 / threads / 8 * 8;
  static_assert(consumers * consumer_registers + 128 * producer_registers <= threads * launch_registers);
  static_assert(tile_n % 16 == 0 && (warpgroups == 2 || warpgroups == 3), "wgmma takes 16 keys at a time");
};

using Softmax = OnlineSoftmax<1>;
using Scores = float[1][Shape::n_blocks][4];
using Output = float[1][Shape::d_blocks][4];
using Weights = unsigned[Shape::n_blocks / 2][4];

// Named barriers: the inspecting warps, all consumers, and the turn of each warpgroup.
enum { inspectors_barrier = 1, consumers_barrier, turn_barrier };

struct Shared {
  unsigned base;
  Shape::Ring k_ring, v_ring;
  RingBarriers<1> q_ring;
  TileRing work_ring;           // from the producer
  MessageRing<1> verdict_ring;  // of the tiles that need a mask: whether V holds an inf or NaN, from the inspectors

  __device__ __forceinline__ explicit Shared(unsigned start)
      : base((start + 1023) & ~1023u),
        k_ring{base + Shape::barriers_at},
        v_ring{k_ring.at + Shape::Ring::bytes},
        q_ring{v_ring.at + Shape::Ring::bytes},
        work_ring{{{q_ring.at + RingBarriers<1>::bytes}}},
        verdict_ring{{work_ring.at() + TileRing::bytes}} {}

  __device__ __forceinline__ void init() const {
    constexpr int consumer_warps = 4 * Shape::warpgroups;
    k_ring.init(consumer_warps);
    v_ring.init(consumer_warps);
    q_ring.init(consumer_warps);
    work_ring.barriers.init(consumer_warps + Shape::inspectors / 32);
    verdict_ring.barriers.init(consumer_warps);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ unsigned q() const { return base; }
  __device__ __forceinline__ unsigned k(int stage) const { return base + Shape::k_at + stage * Shape::K::bytes; }
  __device__ __forceinline__ unsigned v(int stage) const { return base + Shape::v_at + stage * Shape::V::bytes; }
};

__device__ __forceinline__ KeyTiles in_uniform_registers(const KeyTiles& tiles) {
  return {in_uniform_register(tiles.first), in_uniform_register(tiles.last)};
}

// A tile of the work list: where it is, which key tiles some of its rows see, and which all of them see in full.
struct Tile {
  TileCoordinate at;
  KeyTiles keys, clear;

  __device__ __forceinline__ Tile(const ForwardParams& p, const TileCoordinate& c) : at(c) {
    const int begin = at.query_tile * Shape::tile_m, end = min(p.seqlen_q, begin + Shape::tile_m);
    keys = in_uniform_registers(KeyTiles::make<Config::has_band, Shape::tile_n>(p, begin, end));
    clear = in_uniform_registers(KeyTiles::without_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, begin));
  }

  // Whether inf and NaN in V need care: one row of the tile may see them while another does not.
  __device__ __forceinline__ bool needs_verdict(int tile) const { return Config::has_band && !clear.contains(tile); }
};

// One warp: hands out the tiles and starts every copy, in the order in which they are needed.
struct Producer {
  const Sm90ForwardParams& params;
  const Shared& shared;
  bool elected;
  Shape::Ring::Position k_at, v_at;
  RingPosition<1> q_at;

  __device__ __forceinline__ void load_keys(int tile, int head, int batch) {
    shared.k_ring.wait_empty(k_at);
    if (elected)
      Shape::K::load(shared.k(k_at.stage), params.k, shared.k_ring.full(k_at.stage), tile * Shape::tile_n, head, batch,
                     kEvictLast);
    k_at.advance();
  }

  __device__ __forceinline__ void load_values(int tile, int head, int batch) {
    shared.v_ring.wait_empty(v_at);
    if (elected)
      Shape::V::load(shared.v(v_at.stage), params.v, shared.v_ring.full(v_at.stage), tile * Shape::tile_n, head, batch,
                     kEvictLast);
    v_at.advance();
  }

  __device__ __forceinline__ void load_queries(const TileCoordinate& at) {
    const ForwardParams& p = params.p;
    shared.q_ring.wait_empty(q_at);
    if (elected)
      Shape::Q::load(shared.q(), params.q, shared.q_ring.full(0), at.query_tile * Shape::tile_m, p.q_head ? at.head : 0,
                     p.q_batch ? at.batch : 0, kEvictFirst);
    q_at.advance();
  }

  // Returns the index of the next tile, in the elected thread: asked for as late as its answer still comes in time.
  __device__ __forceinline__ int load(const Tile& t, int index) {
    const ForwardParams& p = params.p;
    const int kv_head = t.at.head / p.group, first = t.keys.first;
    const int k_head = p.k_head ? kv_head : 0, k_batch = p.k_batch ? t.at.batch : 0;
    const int v_head = p.v_head ? kv_head : 0, v_batch = p.v_batch ? t.at.batch : 0;
    int tile = t.keys.last - 1, next = 0;
    if (first <= tile) {
      load_keys(tile, k_head, k_batch);
      load_queries(t.at);
#pragma unroll 1
      for (; tile > first; --tile) {
        load_keys(tile - 1, k_head, k_batch);
        load_values(tile, v_head, v_batch);
      }
    }
    if (elected) next = params.work.next(index);
    if (first <= tile) load_values(first, v_head, v_batch);
    return next;
  }

  __device__ __forceinline__ void run() {
    elected = elect_one();
    if (elected) {
      prefetch_tensor_map(params.q);
      prefetch_tensor_map(params.k);
      prefetch_tensor_map(params.v);
    }
    TileRing::Position work_at;
    int index = blockIdx.x;
    TileCoordinate c;
#pragma unroll 1
    do {
      c = params.work.coordinate<Config::has_band>(params.p, index);
      if (elected) shared.work_ring.publish(work_at, c);
      work_at.advance();
      if (c.query_tile >= 0) index = __reduce_max_sync(0xFFFFFFFFu, load(Tile(params.p, c), index));
    } while (c.query_tile >= 0);
    if (elected) params.work.leave();
  }
};

// The other warps of the producer's warpgroup: they look for inf and NaN in the V tiles that need a mask, while the
// consumers are still busy with the scores.
struct Inspector {
  const Sm90ForwardParams& params;
  const Shared& shared;
  int thread, lane;
  Shape::Ring::Position v_at;
  TileRing::Position work_at;
  MessageRing<1>::Position verdict_at;

  __device__ __forceinline__ void inspect() {
    shared.v_ring.wait_full(v_at);
    const unsigned sV = shared.v(v_at.stage);
    unsigned sum = 0;
#pragma unroll 4
    for (int at = 16 * thread; at < Shape::V::bytes; at += 16 * Shape::inspectors)
      sum = add_zero_times_chunk<Shape::Element>(sV + at, sum);
    const bool found = named_barrier_or<Shape::inspectors>(inspectors_barrier, any_nonfinite<Shape::Element>(sum));
    if (thread == 0) shared.verdict_ring.publish(verdict_at, {found});
    verdict_at.advance();
  }

  __device__ __forceinline__ void run() {
    TileCoordinate c = shared.work_ring.take(work_at, lane);
#pragma unroll 1
    while (c.query_tile >= 0) {
      const Tile t(params.p, c);
#pragma unroll 1
      for (int tile = t.keys.last - 1; tile >= t.keys.first; --tile) {
        if (t.needs_verdict(tile)) inspect();
        v_at.advance();
      }
      c = shared.work_ring.take(work_at, lane);
    }
  }
};

// One of the warpgroups that compute: where it works, and its place in the rings.
struct Consumer {
  const ForwardParams& p;
  const Shared& shared;
  int group, lane, row;  // row = this thread's first row in the tile
  Shape::Ring::Position k_at, v_at;
  RingPosition<1> q_at;
  MessageRing<1>::Position verdict_at;

  __device__ __forceinline__ Consumer(const ForwardParams& params, const Shared& shared, int group)
      : p(params), shared(shared), group(group), lane(threadIdx.x % 32) {
    row = 64 * group + threadIdx.x % 128 / 32 * 16 + lane / 4;
    if (Config::take_turns && group == Shape::warpgroups - 1) named_barrier_arrive<256>(turn_barrier);
  }

  // Products of one warpgroup are issued together, so that they run as a block while the others take exponentials.
  __device__ __forceinline__ void wait_turn() const {
    if (Config::take_turns) named_barrier_sync<256>(turn_barrier + group);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Config::take_turns) named_barrier_arrive<256>(turn_barrier + (group + 1) % Shape::warpgroups);
  }

  // In a turn. Turns come in order, so that what the first warpgroup has waited for is there for the others.
  template <class Ring, class Position>
  __device__ __forceinline__ void wait_full_in_turn(const Ring& ring, const Position& at) const {
    if (!Config::take_turns || group == 0) ring.wait_full(at);
  }

  template <class Ring, class Position>
  __device__ __forceinline__ void release(const Ring& ring, Position& at) const {
    if (lane == 0) ring.release(at);
    at.advance();
  }

  // rS (64, tile_n) = Q K^T, not waited for.
  __device__ __forceinline__ void issue_scores(Scores& rS) const {
    wgmma_fence();
    const uint64 query = Shape::Q::columns_deep | (shared.q() + 64 * group * Shape::Q::row_bytes) >> 4;
    const uint64 key = Shape::K::columns_deep | shared.k(k_at.stage) >> 4;
#pragma unroll
    for (int k = 0; k < Config::tile_d / 16; ++k)
      Wgmma<Shape::tile_n, Shape::Element>::ss<0>(rS, query + (Shape::Q::column_block(k) >> 4),
                                                  key + (Shape::K::column_block(k) >> 4), k > 0);
    wgmma_commit();
  }

  // rO (64, tile_dv) += P V, not waited for.
  __device__ __forceinline__ void issue_output(Output& rO, const Weights& rP) const {
    wgmma_fence();
    const uint64 value = Shape::V::rows_deep | shared.v(v_at.stage) >> 4;
#pragma unroll
    for (int k = 0; k < Shape::tile_n / 16; ++k)
      Wgmma<Config::tile_dv, Shape::Element>::rs<1>(rO, rP[k], value + (k * 16 * Shape::V::row_bytes >> 4), 1);
    wgmma_commit();
  }

  // What a warp knows of the new maxima of its rows.
  struct Maxima {
    float shift[2];      // what their exponents subtract
    float factor[1][2];  // what the rows have accumulated must be multiplied with it
    bool raised;         // whether some factor may not be 1
  };

  // Scores to weights, row by row: the exponentials of the first run beside the search for the maximum of the second.
  // Those of the second run beside `meanwhile`, which is given the maxima.
  template <bool Masked, class Meanwhile>
  __device__ __forceinline__ void weigh(Softmax& softmax, Scores& rS, int row_begin, int tile,
                                        Meanwhile&& meanwhile) const {
    stage_scores<Config::score>(rS, p);
    if constexpr (Masked) mask_scores<Config::has_band>(rS, p, row_begin + row, tile * Shape::tile_n + 2 * (lane % 4));
    Maxima maxima;
    maxima.raised = false;
    raise_maximum(softmax, rS, maxima, 0);
    softmax.exponentiate(rS, 0, 0, p.exp2_scale, maxima.shift[0], maxima.factor[0][0]);
    raise_maximum(softmax, rS, maxima, 1);
    meanwhile(maxima);
    softmax.exponentiate(rS, 0, 1, p.exp2_scale, maxima.shift[1], maxima.factor[0][1]);
  }

  __device__ __forceinline__ void raise_maximum(Softmax& softmax, Scores& rS, Maxima& maxima, int half) const {
    // The votes are on the lanes' maxima, one of which is the row's, so that they run beside the shuffles.
    const float old = softmax.row_max[0][half];
    const float lane_max = lane_row_max(rS, 0, half, old);
    const bool care = __any_sync(0xFFFFFFFFu, softmax.needs_care(lane_max, p.exp2_scale));
    maxima.raised |= !Config::lazy_rescale || __any_sync(0xFFFFFFFFu, lane_max > old);
    const float tile_max = combine_quad(lane_max, [](float a, float b) { return fmaxf(a, b); });
    float factor = Reference::factor<false>(old, tile_max, p.exp2_scale);
    float shift = Reference::shift_of(tile_max, p.exp2_scale);
    softmax.row_max[0][half] = tile_max;
    if (care) {
      factor = Reference::factor<true>(old, tile_max, p.exp2_scale);
      shift = Reference::of(tile_max, p.exp2_scale).shift;
      softmax.subtract_far_maximum(rS, 0, half, p.exp2_scale);
      softmax.remember_far_rows(p.exp2_scale);
    }
    maxima.shift[half] = shift;
    maxima.factor[0][half] = factor;
  }

  static __device__ __forceinline__ void pack_weights(Weights& rP, const Scores& rS) {
#pragma unroll
    for (int n = 0; n < Shape::n_blocks; ++n) {
      rP[n / 2][2 * (n % 2)] = pack<Shape::Element>(rS[0][n][0], rS[0][n][1]);
      rP[n / 2][2 * (n % 2) + 1] = pack<Shape::Element>(rS[0][n][2], rS[0][n][3]);
    }
  }

  // Before the product with a V tile that some row of the block sees a part of; Seen = false when no row of this
  // warpgroup does. All consumers come here together.
  template <bool Seen>
  __device__ __forceinline__ void silence_nonfinite(Output& rO, int row_begin, int tile) {
    int found[1];
    shared.verdict_ring.take(verdict_at, lane, found);
    if (!found[0]) return;
    shared.v_ring.wait_full(v_at);
    const unsigned sV = shared.v(v_at.stage);
    if constexpr (Seen)
      add_nonfinite_values<true, Shape::Element, Shape::tile_n>(
          rO, p, row_begin + row, tile * Shape::tile_n,
          [&](int key, int d) { return sV + Shape::V::chunk(key, d) + 4 * (lane % 4); });
    named_barrier_sync<Shape::consumers>(consumers_barrier);
#pragma unroll 1
    for (int at = 16 * (group * 128 + threadIdx.x % 128); at < Shape::V::bytes; at += 16 * Shape::consumers)
      clear_nonfinite_chunk<Shape::Element>(sV + at);
    fence_async_proxy();
    named_barrier_sync<Shape::consumers>(consumers_barrier);
  }

  // When the scores of a tile are there: its keys are done with, and after the last one the queries.
  __device__ __forceinline__ void release_scored(bool last) {
    release(shared.k_ring, k_at);
    if (lane == 0 && last) shared.q_ring.release(q_at);  // one condition: a branch would stand in the way of maxima
    q_at.round ^= last;
  }

  // The scores of `tile` beside the output of the tile before it.
  template <bool Masked>
  __device__ __forceinline__ void step(Softmax& softmax, Output& rO, Weights& rP, int row_begin, int tile, bool last) {
    Scores rS;
    wait_full_in_turn(shared.k_ring, k_at);
    wait_turn();
    issue_scores(rS);
    wait_full_in_turn(shared.v_ring, v_at);
    issue_output(rO, rP);
    pass_turn();
    wgmma_wait<Config::early_wait ? 0 : 1>();
    pin_accumulators(rS);
    release_scored(last);
    if (Config::early_wait) pin_accumulators(rO);
    weigh<Masked>(softmax, rS, row_begin, tile, [&](const Maxima& maxima) {
      wgmma_wait<0>();
      pin_accumulators(rO);
      if (maxima.raised) rescale<false>(rO, maxima.factor);
    });
    release(shared.v_ring, v_at);
    pack_weights(rP, rS);
  }

  // Key tiles that some of the warpgroup's rows see; none when it has no rows.
  __device__ __forceinline__ KeyTiles own_keys(const Tile& t) const {
    const int begin = t.at.query_tile * Shape::tile_m + 64 * group, end = min(p.seqlen_q, begin + 64);
    const KeyTiles own = KeyTiles::make<Config::has_band, Shape::tile_n>(p, begin, end);
    return in_uniform_registers(begin < end && own.first < own.last ? own : KeyTiles{t.keys.first, t.keys.first});
  }

  // One query tile from its inputs to its results.
  __device__ __forceinline__ void compute(const Tile& t) {
    const KeyTiles own = own_keys(t);
    const int row_begin = t.at.query_tile * Shape::tile_m;
    Softmax softmax;
    softmax.init();
    Output rO = {};
    const bool sees = own.first < own.last;
    if (!sees && t.keys.first < t.keys.last) {
      shared.q_ring.wait_full(q_at);
      release(shared.q_ring, q_at);
    }
    skip(rO, t, t.keys.last, own.last);
    if (sees) {
      Weights rP;
      accumulate(softmax, rO, rP, t, own, row_begin);
      shared.v_ring.wait_full(v_at);
      issue_output(rO, rP);
      wgmma_wait<0>();
      pin_accumulators(rO);
      release(shared.v_ring, v_at);
    }
    skip(rO, t, own.first, t.keys.first);
    store(t.at, softmax, rO);
  }

  // Lets tiles [end, begin), which none of the warpgroup's rows sees, pass.
  __device__ __forceinline__ void skip(Output& rO, const Tile& t, int begin, int end) {
#pragma unroll 1
    for (int tile = begin - 1; tile >= end; --tile) {
      shared.k_ring.wait_full(k_at);
      wait_turn();
      pass_turn();
      release(shared.k_ring, k_at);
      if (t.needs_verdict(tile)) silence_nonfinite<false>(rO, t.at.query_tile * Shape::tile_m, tile);
      shared.v_ring.wait_full(v_at);
      release(shared.v_ring, v_at);
    }
  }

  // All tiles of `own` but for the last one's output, whose weights stay in rP.
  __device__ __forceinline__ void accumulate(Softmax& softmax, Output& rO, Weights& rP, const Tile& t,
                                             const KeyTiles& own, int row_begin) {
    const KeyTiles own_clear =
        in_uniform_registers(KeyTiles::without_mask<Config::has_band, 64, Shape::tile_n>(p, row_begin + 64 * group));
    int tile = own.last - 1;
    first_step(softmax, rP, row_begin, tile, tile == own.first);
#pragma unroll 1
    while (true) {
      if (t.needs_verdict(tile)) silence_nonfinite<true>(rO, row_begin, tile);
      if (tile == own.first) return;
      if (Config::has_band && !own_clear.contains(tile - 1)) {
        --tile;
        step<true>(softmax, rO, rP, row_begin, tile, tile == own.first);
        continue;
      }
      const int end = t.needs_verdict(tile - 1) ? tile - 1 : max(Config::has_band ? t.clear.first : 0, own.first);
#pragma unroll 1
      do {
        --tile;
        step<false>(softmax, rO, rP, row_begin, tile, tile == own.first);
      } while (tile > end);
    }
  }

  __device__ __forceinline__ void first_step(Softmax& softmax, Weights& rP, int row_begin, int tile, bool last) {
    Scores rS;
    shared.q_ring.wait_full(q_at);
    wait_full_in_turn(shared.k_ring, k_at);
    wait_turn();
    issue_scores(rS);
    pass_turn();
    wgmma_wait<0>();
    pin_accumulators(rS);
    release_scored(last);
    weigh<true>(softmax, rS, row_begin, tile, [](const Maxima&) {});
    pack_weights(rP, rS);
  }

  __device__ __forceinline__ void store(const TileCoordinate& c, Softmax& softmax, const Output& rO) const {
    for (float& sum : softmax.row_sum[0]) sum = combine_quad(sum, [](float a, float b) { return a + b; });
    const int row_begin = c.query_tile * Shape::tile_m, rows_left = p.seqlen_q - row_begin;
    char* gO = output_rows(p, c, row_begin);
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dim>(
        rO, [&](int half) { return softmax.inverse_sum(0, half); }, gO, p.out_row, row, rows_left, p.head_dim_v, lane);
    store_lse(lse_rows(p, c, row_begin), softmax, p.exp2_scale, row - lane / 4, rows_left, lane);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Shape::threads, 1)
    sm90_forward(const __grid_constant__ cuflash::Sm90ForwardParams params) {
  using namespace cuflash;
  extern __shared__ char dynamic[];
  const Shared shared(shared_address(dynamic));
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int role = warp_uniform(threadIdx.x / 128);
  if (role == 0) {
    give_registers<Shape::producer_registers>();
    if (warp_uniform(threadIdx.x / 32) == 0) {
      Producer{params, shared}.run();
    } else if (Config::has_band) {
      Inspector{params, shared, static_cast<int>(threadIdx.x) - 32, static_cast<int>(threadIdx.x) % 32}.run();
    }
  } else {
    take_registers<Shape::consumer_registers>();
    Consumer consumer(params.p, shared, role - 1);
    TileRing::Position work_at;
    TileCoordinate c = shared.work_ring.take(work_at, consumer.lane);
#pragma unroll 1
    while (c.query_tile >= 0) {
      consumer.compute(Tile(params.p, c));
      c = shared.work_ring.take(work_at, consumer.lane);
    }
  }
}
