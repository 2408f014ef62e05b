// FlashAttention backward (Dao 2023, section 3.2, algorithm 2; Shah et al. 2024, section 3) for compute capability 9.0.
//
// One block owns tile_n keys of one key/value head, 64 for each of its consumer warpgroups, which keep their dK and dV
// in registers while the block walks the query heads that share that head and, of each, the query tiles that see the
// keys. Scores are made transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T feed dV += P^T dO and dK +=
// dS^T Q from the registers that they were computed in. A warpgroup of its own makes dQ = dS K from dS in shared memory
// and adds it to the sums in the workspace: the consumers wait for each other nowhere, so that the exponentials of one
// meet the products of another. One of its threads starts the copies.
#include "core/dq_sum.cuh"
#include "core/mask.cuh"
#include "core/score.cuh"
#include "core/turns.cuh"
#include "ptx/elect.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/backward.cuh"
#include "sm90/output.cuh"

namespace cuflash {

// Named barriers: of each warpgroup that makes dQ, and the turn of each that makes dK and dV.
enum { query_barrier = 1, turn_barrier = query_barrier + Shape::warpgroups };

// A warp: hands out the key tiles and starts the copies, in the order in which they are needed.
struct Loader {
  const Sm90BackwardParams& params;
  const BackwardParams& p;
  const Shared& shared;
  bool elected;
  int index;
  TileRing::Position tile_at;
  Shared::KeyRing::Position keys_at;
  Shape::Ring::Position at;

  __device__ __forceinline__ Loader(const Sm90BackwardParams& params, const Shared& shared)
      : params(params), p(params.p), shared(shared), index(blockIdx.x) {}

  __device__ __forceinline__ void start() {
    elected = elect_one();
    if (!elected) return;
    prefetch_tensor_map(params.q);
    prefetch_tensor_map(params.dout);
    prefetch_tensor_map(params.k);
    prefetch_tensor_map(params.v);
  }

  // The next tile, to all warps that take part.
  __device__ __forceinline__ TileCoordinate publish() {
    const TileCoordinate c = Work::coordinate(p, params.list, index);
    if (elected) shared.tile_ring.publish(tile_at, c);
    tile_at.advance();
    if (c.query_tile < 0 && elected) params.list.leave();
    return c;
  }

  __device__ __forceinline__ void ask_for_next() {
    int next = 0;
    if (elected) next = params.list.next(index);
    index = __reduce_max_sync(0xFFFFFFFFu, next);
  }

  __device__ __forceinline__ void load_keys(const Work& work) const {
    shared.k_ring.wait_empty(keys_at);
    if (elected)
      Shape::K::load(shared.k(), params.k, shared.k_ring.full(0), work.first_key(), p.k_head ? work.head : 0,
                     p.k_batch ? work.batch : 0, kEvictFirst);
  }

  __device__ __forceinline__ void load_values(const Work& work) const {
    shared.v_ring.wait_empty(keys_at);
    if (elected)
      Shape::V::load(shared.v(), params.v, shared.v_ring.full(0), work.first_key(), p.v_head ? work.head : 0,
                     p.v_batch ? work.batch : 0, kEvictFirst);
  }

  __device__ __forceinline__ void load_queries(const Work& work, const QueryStep& step) const {
    const int row = step.row_begin(), head = step.head, batch = work.batch, stage = at.stage;
    const int64 row_at = (static_cast<int64>(batch) * p.heads_q + head) * p.padded_rows + row;
    const unsigned full = shared.q_ring.full(stage);
    shared.q_ring.wait_empty(at);
    if (!elected) return;
    Shape::Q::load(shared.q(stage), params.q, full, row, p.q_head ? head : 0, p.q_batch ? batch : 0, kEvictLast,
                   Shape::rows_bytes);
    bulk_load(shared.shift(stage), p.shift + row_at, Shape::rows_bytes / 2, full);
    bulk_load(shared.delta(stage), p.delta + row_at, Shape::rows_bytes / 2, full);
  }

  __device__ __forceinline__ void load_gradients(const Work& work, const QueryStep& step) const {
    shared.dout_ring.wait_empty(at);
    if (elected)
      Shape::Dout::load(shared.dout(at.stage), params.dout, shared.dout_ring.full(at.stage), step.row_begin(),
                        p.dout_head ? step.head : 0, p.dout_batch ? work.batch : 0, kEvictLast);
  }

  // All that a step needs, the first of a tile its keys and values too.
  __device__ __forceinline__ void load(const Work& work, const QueryStep& step, bool first) {
    if (first) load_keys(work);
    load_queries(work, step);
    if (first) {
      load_values(work);
      keys_at.advance();
    }
    load_gradients(work, step);
    at.advance();
  }
};

// dQ = dS K of a step by one warpgroup, in parts of 64 rows and dq_columns columns.
struct QueryGradient {
  using Sum = QueryGradientSum<Shape::tile_d, 4>;
  using Fragment = float[1][Shape::dq_blocks][4];
  static constexpr int column_parts = Shape::tile_d / Shape::dq_columns, parts = Shape::tile_m / 64 * column_parts;
  const BackwardParams& p;
  const Shared& shared;
  const Work& work;
  int writer;       // which of the warpgroups that make dQ this is
  unsigned thread;  // of 128

  // rdQ (64, dq_columns), not waited for.
  __device__ __forceinline__ void issue(Fragment& rdQ, int buffer, int part) const {
    wgmma_fence();
    const unsigned sdS = shared.ds(buffer) + part / column_parts * Shape::Scores::panel_bytes;
    const uint64 a = Shape::Scores::rows_deep | sdS >> 4;
    const uint64 b = Shape::K::rows_deep | shared.k() >> 4;
    const int column = Shape::K::column_block(part % column_parts * (Shape::dq_columns / 16));
#pragma unroll
    for (int k = 0; k < Shape::tile_n / 16; ++k)
      Wgmma<Shape::dq_columns, Shape::Element>::template ss<1, 1>(
          rdQ, a + (k * 16 * Shape::Scores::row_bytes >> 4), b + ((column + k * 16 * Shape::K::row_bytes) >> 4), k > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ float* sums(const QueryStep& step, int part, int warp, int lane) const {
    const Sum sum = Sum::of_rows(p, work.batch, step.head, step.row_begin() + part / column_parts * 64);
    return sum.at(warp, part % column_parts * Shape::dq_blocks, lane);
  }

  // With bulk_add a warp's rows, one piece of the sums, go to shared memory only.
  __device__ __forceinline__ void add(const QueryStep& step, const Fragment& rdQ, int part) const {
    const unsigned t = made_anew(thread), lane = t % 32;
    if constexpr (Config::bulk_add) {
      const unsigned target = sdQ(t / 32) + 16 * lane;
      if (lane == 0) bulk_wait_read();
      __syncwarp();
#pragma unroll
      for (int n = 0; n < Shape::dq_blocks; ++n) store_shared(target + 512 * n, rdQ[0][n]);
    } else {
      wait_turn(step, part);
      float* first = sums(step, part, t / 32, lane);
#pragma unroll
      for (int n = 0; n < Shape::dq_blocks; ++n) Sum::add(first + Sum::distance(0, n), rdQ[0][n]);
    }
  }

  __device__ __forceinline__ unsigned sdQ(int warp) const { return shared.dq(writer) + warp * (Shape::dq_bytes / 4); }

  // What add() left in shared memory, to the sums; by one thread of each warp, behind a fence.
  __device__ __forceinline__ void flush(const QueryStep& step, int part) const {
    if constexpr (!Config::bulk_add) return;
    const unsigned warp = thread / 32;
    wait_turn(step, part);
    bulk_add(sums(step, part, warp, 0), sdQ(warp), Shape::dq_bytes / 4);
    bulk_commit();
  }

  // Two words of turns for every 64 rows: as many as warpgroups that add to them.
  __device__ __forceinline__ Turn turn(const QueryStep& step, int part) const {
    const int row = part / column_parts * 64 + part % column_parts % 2 * kTurnRows;
    return Turn::of_rows(p, work.batch, step.head, step.row_begin() + row);
  }

  // The block before this one in turn has the next keys.
  __device__ __forceinline__ void wait_turn(const QueryStep& step, int part) const {
    if (Config::ordered && work.of_keys(p, work.first_key() + Shape::tile_n).contains(step.tile))
      turn(step, part).wait(work.turn(p));
  }

  // When the additions are made; better later.
  __device__ __forceinline__ void pass_turn(const QueryStep& step, int part) const {
    if constexpr (!Config::ordered) return;
    if (Config::bulk_add && thread % 32 == 0) bulk_wait();
    named_barrier_sync<128>(query_barrier + writer);
    if (thread == 0) turn(step, part).pass(work.turn(p));
  }
};

// The first warpgroup: its first warp feeds all others.
struct Feeder {
  Loader loader;
  const BackwardParams& p;
  const Shared& shared;

  // When the others make dQ.
  __device__ __forceinline__ void run() {
    loader.start();
    TileCoordinate c = loader.publish();
#pragma unroll 1
    while (c.query_tile >= 0) {
      const Work work(p, c);
      bool first = true;
#pragma unroll 1
      for (QueryStep step = work.first(p); work.any() && work.has(p, step); step = work.after(step)) {
        loader.load(work, step, first);
        first = false;
      }
      loader.ask_for_next();
      c = loader.publish();
    }
  }
};

// The first warpgroup when it makes dQ itself: its first warp feeds all others in between.
struct QueryGroup {
  Loader loader;
  const BackwardParams& p;
  const Shared& shared;
  int warp;
  QueryStep ahead;  // the next to be loaded

  __device__ __forceinline__ void load(const Work& work, bool first) {
    if (warp != 0 || !work.any() || !work.has(p, ahead)) return;
    loader.load(work, ahead, first);
    ahead = work.after(ahead);
  }

  __device__ __forceinline__ void compute(const QueryGradient& gradient, Shape::ScoreRing::Position& at,
                                          const QueryStep& step) {
    shared.ds_ring.wait_full(at);
#pragma unroll
    for (int part = 0; part < QueryGradient::parts; ++part) {
      QueryGradient::Fragment rdQ;
      gradient.issue(rdQ, at.stage, part);
      if (part == 0) load(gradient.work, false);
      wgmma_wait<0>();
      pin_accumulators(rdQ);
      if (part == QueryGradient::parts - 1) {
        if (threadIdx.x % 32 == 0) shared.ds_ring.release(at);
        at.advance();
      }
      gradient.add(step, rdQ, part);
      if (Config::bulk_add) fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) gradient.flush(step, part);
      gradient.pass_turn(step, part);
    }
  }

  __device__ __forceinline__ TileCoordinate take(TileRing::Position& at) {
    if (warp == 0) loader.publish();
    return shared.tile_ring.take(at, threadIdx.x % 32);
  }

  __device__ __forceinline__ void run() {
    TileRing::Position tile_at;
    Shape::ScoreRing::Position ds_at;
    if (warp == 0) loader.start();
    TileCoordinate c = take(tile_at);
#pragma unroll 1
    while (c.query_tile >= 0) {
      const Work work(p, c);
      ahead = work.first(p);
      load(work, true);
#pragma unroll 1
      for (int stage = 1; stage < Shape::stages; ++stage) load(work, false);
      if (warp == 0) loader.ask_for_next();
      const QueryGradient gradient{p, shared, work, 0, threadIdx.x};
#pragma unroll 1
      for (QueryStep step = work.first(p); work.any() && work.has(p, step); step = work.after(step))
        compute(gradient, ds_at, step);
      if (threadIdx.x % 32 == 0 && work.any()) shared.k_ring.release({});
      c = take(tile_at);
    }
    if (Config::bulk_add && threadIdx.x % 32 == 0) bulk_wait_read();
  }
};

// Where a consumer is in the rings.
struct Positions {
  Shape::Ring::Position queries;
  Shape::ScoreRing::Position scores;
  Shared::KeyRing::Position keys;
};

// One of the warpgroups that make dK and dV of 64 keys of a tile.
struct Consumer {
  using Scores = float[1][Shape::m_blocks][4];  // (64 keys, tile_m queries)
  // This warpgroup's keys or values: in shared memory, or in registers as fragments of 16 columns.
  template <class Keys>
  struct KeyOperand {
    static constexpr int blocks = Keys::panels * Keys::panel_columns / 16;
    unsigned r[Config::keys_in_registers ? blocks : 1][4];

    __device__ __forceinline__ void load(unsigned sKeys, int warp_key, unsigned lane) {
#pragma unroll
      for (int k = 0; k < (Config::keys_in_registers ? blocks : 0); ++k)
        ldmatrix_x4(r[k], sKeys + Keys::chunk(warp_key + lane % 16, 2 * k + lane / 16));
    }
  };

  const BackwardParams& p;
  const Shared& shared;
  int group;
  unsigned thread;  // of the warpgroup, held in a register: shared memory's queue is slow to tell it
  const Work& work;
  Shape::Ring::Position& at;
  Shape::ScoreRing::Position& ds_at;
  Shared::KeyRing::Position& keys_at;
  float rdK[1][Shape::d_blocks][4] = {};
  float rdV[1][Shape::dv_blocks][4] = {};
  KeyOperand<Shape::K> rK;
  KeyOperand<Shape::V> rV;
  Scores rS;
  unsigned rOperands[2][Config::early_scores ? Shape::m_blocks / 2 : 1][4];
  QueryGradient gradient;

  __device__ __forceinline__ Consumer(const BackwardParams& p, const Shared& shared, int group, unsigned thread,
                                      const Work& work, Positions& at)
      : p(p),
        shared(shared),
        group(group),
        thread(thread),
        work(work),
        at(at.queries),
        ds_at(at.scores),
        keys_at(at.keys),
        gradient{p, shared, work, group, thread} {}

  __device__ __forceinline__ unsigned lane() const { return thread % 32; }
  __device__ __forceinline__ unsigned warp_key() const { return 64 * group + thread / 32 * 16; }
  __device__ __forceinline__ unsigned key() const { return warp_key() + lane() / 4; }  // its first in the tile

  // r = A B^T, not waited for: keys by queries.
  template <class Keys, class Queries>
  __device__ __forceinline__ void issue_product(Scores& r, const KeyOperand<Keys>& keys, unsigned sKeys,
                                                unsigned sQueries) const {
    using Product = Wgmma<Shape::tile_m, Shape::Element>;
    wgmma_fence();
    const uint64 a = Keys::columns_deep | (sKeys + 64 * group * Keys::row_bytes) >> 4;
    const uint64 b = Queries::columns_deep | sQueries >> 4;
#pragma unroll
    for (int k = 0; k < KeyOperand<Keys>::blocks; ++k) {
      const uint64 queries = b + (Queries::column_block(k) >> 4);
      if constexpr (Config::keys_in_registers) {
        Product::template rs<0>(r, keys.r[k], queries, k > 0);
      } else {
        Product::template ss<0>(r, a + (Keys::column_block(k) >> 4), queries, k > 0);
      }
    }
    wgmma_commit();
  }

  // P^T and dS^T as operands, by blocks of 16 queries. Unless scores are begun early they take the place of the scores.
  template <int Which>
  __device__ __forceinline__ unsigned (&operand(int k))[4] {
    if constexpr (Config::early_scores) return rOperands[Which][k];
    return reinterpret_cast<unsigned (&)[4]>(rS[0][2 * k + Which]);
  }

  __device__ __forceinline__ void set_operands(const Scores& rP, const Scores& rdS) {
#pragma unroll
    for (int k = 0; k < Shape::m_blocks / 2; ++k) {
      unsigned a[2][4];
      pack_operand(a[0], rP, k);
      pack_operand(a[1], rdS, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        operand<0>(k)[i] = a[0][i];
        operand<1>(k)[i] = a[1][i];
      }
    }
  }

  static __device__ __forceinline__ void pack_operand(unsigned (&a)[4], const Scores& r, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = pack<Shape::Element>(r[0][2 * k + i / 2][2 * (i % 2)], r[0][2 * k + i / 2][2 * (i % 2) + 1]);
  }

  // r += A X, not waited for, where A is P^T (0) or dS^T (1).
  template <int Which, class Queries, int Blocks>
  __device__ __forceinline__ void issue_gradient(float (&r)[1][Blocks][4], unsigned sQueries) {
    wgmma_fence();
    const uint64 b = Queries::rows_deep | sQueries >> 4;
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k) {
      Wgmma<8 * Blocks, Shape::Element>::template rs<1>(r, operand<Which>(k), b + (k * 16 * Queries::row_bytes >> 4),
                                                        1);
    }
    wgmma_commit();
  }

  // The shifts or deltas of this thread's queries. Shared memory is slow to answer while the tensor cores read it:
  // better fetched early.
  struct QueryRows {
    float2 r[Shape::m_blocks];

    __device__ __forceinline__ void fetch(unsigned rows, unsigned lane) {
#pragma unroll
      for (int m = 0; m < Shape::m_blocks; ++m) r[m] = load_shared_float2(rows + 32 * m + 8 * (lane % 4));
    }

    // Of block m: queries 2 * (lane % 4) and the next.
    __device__ __forceinline__ const float2& operator[](int m) const { return r[m]; }
  };

  // rS from q.k to P^T.
  __device__ __forceinline__ void weigh(Scores& rS, const QueryRows& shifts) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 shift = shifts[m];
      Config::score::apply(rS[0][m], p);
      exponentiate(rS[0][m], shift);
    }
  }

  __device__ __forceinline__ void exponentiate(float (&s)[4], const float2& shift) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2_approx(fmaf(s[i], p.exp2_scale, -(i % 2 ? shift.y : shift.x)));
  }

  // rdP from dP to dS^T.
  __device__ __forceinline__ void differentiate(const Scores& rP, Scores& rdP, const QueryRows& deltas) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 delta = deltas[m];
#pragma unroll
      for (int i = 0; i < 4; ++i) rdP[0][m][i] = rP[0][m][i] * (rdP[0][m][i] - (i % 2 ? delta.y : delta.x));
    }
  }

  // Both at once, where the score stage bends scores.
  __device__ __forceinline__ void weigh_and_differentiate(Scores& rS, Scores& rdP, QueryRows& shifts,
                                                          const QueryRows& deltas) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 shift = shifts[m], delta = deltas[m];
      float slope[4];
      Config::score::apply(rS[0][m], slope, p);
      exponentiate(rS[0][m], shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) rdP[0][m][i] = rS[0][m][i] * (rdP[0][m][i] - (i % 2 ? delta.y : delta.x)) * slope[i];
    }
  }

  __device__ __forceinline__ void clear_hidden(Scores& r, const QueryStep& step) const {
    for_each_hidden<Config::has_band, true, 1, Shape::m_blocks>(ScoreBand::of_keys(p), work.first_key() + key(),
                                                                step.row_begin() + 2 * (lane() % 4),
                                                                [&](int, int m, int i) { r[0][m][i] = 0.0f; });
  }

  // dS^T to shared memory, for dQ.
  __device__ __forceinline__ void store_scores() {
    shared.ds_ring.wait_empty(ds_at);
    const unsigned t = made_anew(thread), row = 64 * group + t / 32 * 16 + t % 16;
    const unsigned first = shared.ds(ds_at.stage) + Shape::Scores::chunk(row, t / 16 % 2);
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k)  // the swizzle makes of a column a constant to XOR
      stmatrix_x4((first ^ k % 4 << 5) + k / 4 * Shape::Scores::panel_bytes, operand<1>(k));
  }

  // dS^T of the step before to whoever makes dQ. Its stores have to be complete: better later.
  __device__ __forceinline__ void publish_scores() {
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) shared.ds_ring.publish(ds_at);
    ds_at.advance();
  }

  // The same for what dQ of a step left in shared memory.
  __device__ __forceinline__ void flush(const QueryStep& step) const {
    if constexpr (!Config::bulk_add) return;
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) gradient.flush(step, group);
  }

  // Products of one warpgroup are issued together, so that they run as a block while the other takes exponentials.
  __device__ __forceinline__ void wait_turn() const {
    if (Config::take_turns) named_barrier_sync<256>(turn_barrier + group);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Config::take_turns) named_barrier_arrive<256>(turn_barrier + (group + 1) % Shape::warpgroups);
  }

  __device__ __forceinline__ bool needs_mask_here(const QueryStep& step) const {
    return needs_mask<Config::has_band, Shape::tile_m, 64>(p, step.row_begin(),
                                                           work.key_tile * Shape::warpgroups + group);
  }

  __device__ __forceinline__ void issue_scores() {
    issue_product<Shape::K, Shape::Q>(rS, rK, shared.k(), shared.q(at.stage));
  }

  __device__ __forceinline__ void issue_score_gradients(Scores& rdP) const {
    shared.dout_ring.wait_full(at);
    issue_product<Shape::V, Shape::Dout>(rdP, rV, shared.v(), shared.dout(at.stage));
  }

  __device__ __forceinline__ void issue_key_gradients() {
    issue_gradient<0, Shape::Dout>(rdV, shared.dout(at.stage));
    issue_gradient<1, Shape::Q>(rdK, shared.q(at.stage));
  }

  // When the products for dV and dK are there but for Pending others behind them.
  template <int Pending>
  __device__ __forceinline__ void release_queries(const Shape::Ring::Position& done) {
    wgmma_wait<Pending>();
    pin_accumulators(rdV);
    pin_accumulators(rdK);
    if (lane() == 0) {
      shared.dout_ring.release(done);
      shared.q_ring.release(done);
    }
  }

  // From the products of a step, which may still be under way, to P^T and dS^T as operands and dS^T in shared memory.
  // `count` is the number of steps before.
  __device__ __forceinline__ void differentiate(Scores& rdP, QueryRows& shifts, const QueryStep& step, int count) {
    const bool masked = needs_mask_here(step);
    QueryRows deltas;
    if constexpr (Config::score::bends) {
      wgmma_wait<0>();
      pin_accumulators(rS);
      pin_accumulators(rdP);
      if (makes_query_gradient(count)) flush(work.before<2>(step));
      deltas.fetch(shared.delta(at.stage), lane());
      weigh_and_differentiate(rS, rdP, shifts, deltas);
      if (masked) clear_hidden(rS, step);
    } else {
      wgmma_wait<1>();
      pin_accumulators(rS);
      weigh(rS, shifts);
      if (masked) clear_hidden(rS, step);
      if (makes_query_gradient(count)) flush(work.before<2>(step));
      deltas.fetch(shared.delta(at.stage), lane());
      wgmma_wait<0>();
      pin_accumulators(rdP);
      differentiate(rS, rdP, deltas);
    }
    if (masked) clear_hidden(rdP, step);
    set_operands(rS, rdP);
    store_scores();
  }

  // dQ lags two steps behind the scores: then the other warpgroup has published its part of dS.
  static __device__ __forceinline__ bool makes_query_gradient(int count) { return !Config::query_group && count >= 2; }

  // This warpgroup's part of dQ of the step whose dS was published last; of whatever is there when there is none, which
  // nobody asks for: a branch would stand in the way of products that go on.
  __device__ __forceinline__ void issue_query_gradient(QueryGradient::Fragment& rdQ, bool there) const {
    static_assert(Config::query_group || QueryGradient::parts == Shape::warpgroups);
    if (there) shared.ds_ring.wait_full(ds_at.before());
    gradient.issue(rdQ, ds_at.before().stage, group);
  }

  // When it is made. `buffer` is where its dS was; `passed` says whether there was a step before.
  __device__ __forceinline__ void add_query_gradient(const QueryGradient::Fragment& rdQ, const QueryStep& step,
                                                     const Shape::ScoreRing::Position& buffer, bool passed) const {
    if (Config::ordered && passed) gradient.pass_turn(work.before<1>(step), group);
    if (lane() == 0) shared.ds_ring.release(buffer);
    gradient.add(step, rdQ, group);
  }

  // dK and dV of the step before, if there is one, and the scores of this, unless that was the last. dQ comes first:
  // what it leaves goes to shared memory beside the products for dV and dK, which leave most room there.
  __device__ __forceinline__ void go_on(const QueryStep& step, int count, bool there) {
    Scores rdP;
    QueryRows shifts;
    wait_turn();
    if (count == 0) {
      shared.q_ring.wait_full(at);
      issue_scores();
      if (Config::fetch_at == 0) shifts.fetch(shared.shift(at.stage), lane());
    } else {
      QueryGradient::Fragment rdQ;
      if constexpr (!Config::query_group) issue_query_gradient(rdQ, makes_query_gradient(count));
      issue_key_gradients();
      const auto before = at;
      at.advance();
      publish_scores();
      if constexpr (!Config::query_group) {
        wgmma_wait<2>();
        pin_accumulators(rdQ);
        if (makes_query_gradient(count))
          add_query_gradient(rdQ, work.before<2>(step), ds_at.before().before(), count > 2);
      }
      if (!there) {
        release_queries<0>(before);
        pass_turn();
        if (makes_query_gradient(count)) flush(work.before<2>(step));
        return;
      }
      shared.q_ring.wait_full(at);
      if (Config::fetch_at == 0) shifts.fetch(shared.shift(at.stage), lane());
      if constexpr (Config::early_scores) {
        if constexpr (!Config::query_group) {
          wgmma_wait<1>();
          pin_accumulators(rdV);
        }
        issue_scores();
        if (Config::pass_early == 2) pass_turn();
        release_queries<1>(before);
      } else {
        release_queries<0>(before);
        if (Config::pass_early == 2) pass_turn();
        issue_scores();
      }
    }
    if (Config::pass_early == 1) pass_turn();
    if (Config::fetch_at == 1) shifts.fetch(shared.shift(at.stage), lane());
    issue_score_gradients(rdP);
    if (Config::fetch_at == 2) shifts.fetch(shared.shift(at.stage), lane());
    if (Config::pass_early == 0 || (Config::pass_early == 2 && count == 0)) pass_turn();
    differentiate(rdP, shifts, step, count);
  }

  // dQ of the last step.
  __device__ __forceinline__ void add_last(const QueryStep& step, int count) {
    if constexpr (!Config::query_group) {
      QueryGradient::Fragment rdQ;
      issue_query_gradient(rdQ, true);
      wgmma_wait<0>();
      pin_accumulators(rdQ);
      if (lane() == 0) shared.k_ring.release({});
      add_query_gradient(rdQ, work.before<1>(step), ds_at.before(), count > 1);
      flush(work.before<1>(step));
      gradient.pass_turn(work.before<1>(step), group);
    }
  }

  __device__ __forceinline__ void write() const {
    const int64 first = work.first_key();
    const int keys_left = p.seqlen_k - work.first_key(), head = work.head, batch = work.batch;
    char* dk = static_cast<char*>(p.dk) + batch * p.dk_batch + head * p.dk_head + first * p.dk_row;
    char* dv = static_cast<char*>(p.dv) + batch * p.dv_batch + head * p.dv_head + first * p.dv_row;
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dims>(
        rdV, [](int) { return 1.0f; }, dv, p.dv_row, key(), keys_left, p.head_dim_v, lane());
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dims>(
        rdK, [&](int) { return p.gradient_scale; }, dk, p.dk_row, key(), keys_left, p.head_dim, lane());
  }

  __device__ __forceinline__ void load_keys() {
    shared.k_ring.wait_full(keys_at);
    shared.v_ring.wait_full(keys_at);
    if constexpr (Config::keys_in_registers) {
      rK.load(shared.k(), warp_key(), lane());
      rV.load(shared.v(), warp_key(), lane());
      __syncwarp();
      if (lane() == 0) {
        shared.k_ring.release({});
        shared.v_ring.release({});
      }
    }
  }

  // The tile's dK and dV.
  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    int count = 0;
    if (work.any()) {
      load_keys();
      bool there = true;
#pragma unroll 1
      while (there) {
        there = work.has(p, step);
        go_on(step, count, there);
        if (there) {
          step = work.after(step);
          ++count;
        }
      }
      if (lane() == 0 && !Config::keys_in_registers) {
        shared.v_ring.release({});
        if (Config::query_group) shared.k_ring.release({});
      }
      keys_at.advance();
    }
    // The first warpgroup is ahead of the others, whose part of dS the last dQ needs.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == group % 2)
        write();
      else if (count > 0)
        add_last(step, count);
    }
  }
};

__device__ __forceinline__ void run_consumer(const BackwardParams& p, const Shared& shared, int group) {
  if (Config::take_turns && group == Shape::warpgroups - 1) named_barrier_arrive<256>(turn_barrier);
  const unsigned thread = rematerialized_thread() % 128, lane = thread % 32;
  TileRing::Position tile_at;
  Positions positions;
  TileCoordinate c = shared.tile_ring.take(tile_at, lane);
#pragma unroll 1
  while (c.query_tile >= 0) {
    const Work work(p, c);
    Consumer(p, shared, group, thread, work, positions).run();
    c = shared.tile_ring.take(tile_at, lane);
  }
  if (Config::bulk_add && lane == 0) bulk_wait_read();
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Shape::threads, 1)
    sm90_backward(const __grid_constant__ cuflash::Sm90BackwardParams params) {
  using namespace cuflash;
  extern __shared__ char dynamic[];
  const Shared shared(shared_address(dynamic));
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  const int role = warp_uniform(threadIdx.x / 128);
  if (role == 0) {
    give_registers<Config::query_registers>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if constexpr (Config::query_group) {
      QueryGroup{{params, shared}, params.p, shared, warp}.run();
    } else if (warp == 0) {
      Feeder{{params, shared}, params.p, shared}.run();
    }
  } else {
    take_registers<Config::consumer_registers>();
    run_consumer(params.p, shared, role - 1);
  }
}
