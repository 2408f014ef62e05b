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
  using Q = PanelLayout<tile_m, Config::tile_d>;
  using K = PanelLayout<tile_n, Config::tile_d>;
  using V = PanelLayout<tile_n, Config::tile_dv>;
  using Ring = RingBarriers<stages>;
  // Shared memory, from a multiple of 1024: sQ (tile_m, tile_d); sK (stages, tile_n, tile_d); sV (stages, tile_n,
  // tile_dv); the barriers.
  static constexpr int k_at = Q::bytes, v_at = k_at + stages * K::bytes, barriers_at = v_at + stages * V::bytes;
  static constexpr int producer_registers = warpgroups == 2 ? 40 : 32;
  static constexpr int consumer_registers = warpgroups == 2 ? 232 : 160;
  static_assert(tile_n % 16 == 0 && (warpgroups == 2 || warpgroups == 3), "wgmma takes 16 keys at a time");
};

using Softmax = OnlineSoftmax<1>;
using Scores = float[1][Shape::n_blocks][4];
using Output = float[1][Shape::d_blocks][4];
using Weights = unsigned[Shape::n_blocks / 2][4];

// Named barriers: the turn of each warpgroup, all consumers, and the warps of one warpgroup.
enum { turn_barrier = 1, consumers_barrier = 4, group_barrier = 5 };

struct Shared {
  unsigned base;
  Shape::Ring k_ring, v_ring;
  RingBarriers<1> q_ring;
  WorkRing work_ring;

  __device__ __forceinline__ explicit Shared(unsigned start)
      : base((start + 1023) & ~1023u),
        k_ring{base + Shape::barriers_at},
        v_ring{k_ring.at + Shape::Ring::bytes},
        q_ring{v_ring.at + Shape::Ring::bytes},
        work_ring{q_ring.at + RingBarriers<1>::bytes} {}

  __device__ __forceinline__ void init() const {
    constexpr int consumer_warps = 4 * Shape::warpgroups;
    k_ring.init(consumer_warps);
    v_ring.init(consumer_warps);
    q_ring.init(consumer_warps);
    work_ring.barriers.init(consumer_warps);
    mbarrier_init_fence();
  }

  __device__ __forceinline__ unsigned q() const { return base; }
  __device__ __forceinline__ unsigned k(int stage) const { return base + Shape::k_at + stage * Shape::K::bytes; }
  __device__ __forceinline__ unsigned v(int stage) const { return base + Shape::v_at + stage * Shape::V::bytes; }
};

// A tile of the work list: where it is, and which keys it sees.
struct Tile {
  TileCoordinate at;
  KeyTiles keys;

  __device__ __forceinline__ Tile(const Sm90ForwardParams& params, int index)
      : at(params.work.coordinate<Config::has_band>(params.p, index)) {
    const int begin = at.query_tile * Shape::tile_m, end = min(params.p.seqlen_q, begin + Shape::tile_m);
    keys = KeyTiles::make<Config::has_band, Shape::tile_n>(params.p, begin, end);
  }
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
    WorkRing::Barriers::Position work_at;
    int index = blockIdx.x;
#pragma unroll 1
    while (index < params.work.tiles) {
      const int next = load(Tile(params, index), index);
      if (elected) shared.work_ring.publish(work_at, next);
      work_at.advance();
      index = __reduce_max_sync(0xFFFFFFFFu, next);
    }
    if (elected) params.work.leave();
  }
};

// One of the warpgroups that compute: where it works, and its place in the rings.
struct Consumer {
  const ForwardParams& p;
  const Shared& shared;
  int group, lane, row;  // row = this thread's first row in the tile
  Shape::Ring::Position k_at, v_at;
  RingPosition<1> q_at;

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

  // Scores to weights. What the rows have accumulated must be multiplied with `factor`.
  template <bool Masked>
  __device__ __forceinline__ void weigh(Softmax& softmax, Scores& rS, float (&factor)[1][2], int row_begin,
                                        int tile) const {
    stage_scores<Config::score>(rS, p);
    if constexpr (Masked) mask_scores<Config::has_band>(rS, p, row_begin + row, tile * Shape::tile_n + 2 * (lane % 4));
    // Row by row: the exponentials of the first run beside the search for the maximum of the second.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lane_max = lane_row_max(rS, 0, half, softmax.row_max[0][half]);
      const float tile_max = combine_quad(lane_max, [](float a, float b) { return fmaxf(a, b); });
      factor[0][half] = softmax.raise_max(0, half, tile_max, p.exp2_scale);
      if (__any_sync(0xFFFFFFFFu, softmax.is_far(0, half, p.exp2_scale)))
        softmax.subtract_far_reference(rS, 0, half, p.exp2_scale);
      softmax.exponentiate(rS, 0, half, p.exp2_scale);
    }
  }

  static __device__ __forceinline__ void pack_weights(Weights& rP, const Scores& rS) {
#pragma unroll
    for (int n = 0; n < Shape::n_blocks; ++n) {
      rP[n / 2][2 * (n % 2)] = pack<Shape::Element>(rS[0][n][0], rS[0][n][1]);
      rP[n / 2][2 * (n % 2) + 1] = pack<Shape::Element>(rS[0][n][2], rS[0][n][3]);
    }
  }

  // Before the product with a V tile that some row of the block sees a part of. All consumers come here together.
  __device__ __forceinline__ void silence_nonfinite(Output& rO, int row_begin, int tile) const {
    const int thread = threadIdx.x % 128;
    shared.v_ring.wait_full(v_at);
    const unsigned sV = shared.v(v_at.stage);
    unsigned sum = 0;
#pragma unroll 4
    for (int at = 16 * thread; at < Shape::V::bytes; at += 16 * 128)
      sum = add_zero_times_chunk<Shape::Element>(sV + at, sum);
    if (!named_barrier_or<128>(group_barrier + group, any_nonfinite<Shape::Element>(sum))) return;
    add_nonfinite_values<true, Shape::Element, Shape::tile_n>(
        rO, p, row_begin + row, tile * Shape::tile_n,
        [&](int key, int d) { return sV + Shape::V::chunk(key, d) + 4 * (lane % 4); });
    named_barrier_sync<Shape::consumers>(consumers_barrier);
#pragma unroll 1
    for (int at = 16 * (group * 128 + thread); at < Shape::V::bytes; at += 16 * Shape::consumers)
      clear_nonfinite_chunk<Shape::Element>(sV + at);
    fence_async_proxy();
    named_barrier_sync<Shape::consumers>(consumers_barrier);
  }

  // The scores of `tile` beside the output of the tile before it.
  template <bool Masked>
  __device__ __forceinline__ void step(Softmax& softmax, Output& rO, Weights& rP, int row_begin, int tile) {
    Scores rS;
    float factor[1][2];
    shared.k_ring.wait_full(k_at);
    wait_turn();
    issue_scores(rS);
    shared.v_ring.wait_full(v_at);
    issue_output(rO, rP);
    pass_turn();
    wgmma_wait<Config::early_wait ? 0 : 1>();
    pin_accumulators(rS);
    release(shared.k_ring, k_at);
    if (Config::early_wait) pin_accumulators(rO);
    weigh<Masked>(softmax, rS, factor, row_begin, tile);
    wgmma_wait<0>();
    pin_accumulators(rO);
    release(shared.v_ring, v_at);
    rescale<Config::lazy_rescale>(rO, factor);
    pack_weights(rP, rS);
  }

  // One query tile from its inputs to its results.
  __device__ __forceinline__ void compute(const Tile& t) {
    const KeyTiles tiles = t.keys;
    const int row_begin = t.at.query_tile * Shape::tile_m;
    Softmax softmax;
    softmax.init();
    Output rO = {};
    if (tiles.first < tiles.last) {
      Weights rP;
      accumulate(softmax, rO, rP, tiles, row_begin);
      if (lane == 0) shared.q_ring.release(q_at);
      q_at.advance();
      shared.v_ring.wait_full(v_at);
      issue_output(rO, rP);
      wgmma_wait<0>();
      pin_accumulators(rO);
      release(shared.v_ring, v_at);
    }
    store(t.at, softmax, rO);
  }

  // All tiles but for the last one's output, whose weights stay in rP.
  __device__ __forceinline__ void accumulate(Softmax& softmax, Output& rO, Weights& rP, const KeyTiles& tiles,
                                             int row_begin) {
    const KeyTiles clear = KeyTiles::without_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, row_begin);
    int tile = tiles.last - 1;
    first_step(softmax, rP, row_begin, tile);
#pragma unroll 1
    while (true) {
      if (Config::has_band && !clear.contains(tile)) silence_nonfinite(rO, row_begin, tile);
      if (tile == tiles.first) return;
      if (Config::has_band && !clear.contains(tile - 1)) {
        step<true>(softmax, rO, rP, row_begin, --tile);
        continue;
      }
      const int end = Config::has_band ? max(clear.first, tiles.first) : 0;
#pragma unroll 1
      do {
        step<false>(softmax, rO, rP, row_begin, --tile);
      } while (tile > end);
    }
  }

  __device__ __forceinline__ void first_step(Softmax& softmax, Weights& rP, int row_begin, int tile) {
    Scores rS;
    float factor[1][2];
    shared.q_ring.wait_full(q_at);
    shared.k_ring.wait_full(k_at);
    issue_scores(rS);
    wgmma_wait<0>();
    pin_accumulators(rS);
    release(shared.k_ring, k_at);
    weigh<true>(softmax, rS, factor, row_begin, tile);
    pack_weights(rP, rS);
  }

  __device__ __forceinline__ void store(const TileCoordinate& c, Softmax& softmax, const Output& rO) const {
    for (float& sum : softmax.row_sum[0]) sum = combine_quad(sum, [](float a, float b) { return a + b; });
    const int row_begin = c.query_tile * Shape::tile_m, rows_left = p.seqlen_q - row_begin;
    char* gO = output_rows(p, c, row_begin);
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dim>(rO, softmax, gO, p.out_row, row, rows_left,
                                                                            p.head_dim_v, lane);
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
    if (warp_uniform(threadIdx.x / 32) == 0) Producer{params, shared}.run();
  } else {
    take_registers<Shape::consumer_registers>();
    Consumer consumer(params.p, shared, role - 1);
    WorkRing::Barriers::Position work_at;
    int index = blockIdx.x;
#pragma unroll 1
    while (index < params.work.tiles) {
      consumer.compute(Tile(params, index));
      index = shared.work_ring.take(work_at, consumer.lane);
    }
  }
}
