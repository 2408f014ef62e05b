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

// Starts the copies, by one thread of a warp, in the order in which they are needed.
struct Loader {
  const Sm90BackwardParams& params;
  const BackwardParams& p;
  const Shared& shared;
  const Work& work;
  bool elected = false;
  QueryStep ahead;  // the next to be copied
  Shape::Ring::Position at;

  __device__ __forceinline__ Loader(const Sm90BackwardParams& params, const Shared& shared, const Work& work)
      : params(params), p(params.p), shared(shared), work(work), ahead(work.first(p)) {}

  // The keys go before the first queries, and the values after them.
  __device__ __forceinline__ void load_keys() const {
    if (elected)
      Shape::K::load(shared.k(), params.k, shared.k_full.full(0), work.first_key, p.k_head ? work.c.head : 0,
                     p.k_batch ? work.c.batch : 0, kEvictFirst);
  }

  __device__ __forceinline__ void load_values() const {
    if (elected)
      Shape::V::load(shared.v(), params.v, shared.v_full.full(0), work.first_key, p.v_head ? work.c.head : 0,
                     p.v_batch ? work.c.batch : 0, kEvictFirst);
  }

  __device__ __forceinline__ bool done() const { return !work.has(ahead); }

  __device__ __forceinline__ void load(bool first = false) {
    if (first) load_keys();
    const int row = ahead.row_begin(), head = ahead.head, batch = work.c.batch, stage = at.stage;
    const int64 row_at = (static_cast<int64>(batch) * p.heads_q + head) * p.padded_rows + row;
    const unsigned full = shared.q_ring.full(stage);
    shared.q_ring.wait_empty(at);
    if (elected) {
      Shape::Q::load(shared.q(stage), params.q, full, row, p.q_head ? head : 0, p.q_batch ? batch : 0, kEvictLast,
                     Shape::rows_bytes);
      bulk_load(shared.shift(stage), p.shift + row_at, Shape::rows_bytes / 2, full);
      bulk_load(shared.delta(stage), p.delta + row_at, Shape::rows_bytes / 2, full);
    }
    if (first) load_values();
    shared.dout_ring.wait_empty(at);
    if (elected)
      Shape::Dout::load(shared.dout(stage), params.dout, shared.dout_ring.full(stage), row, p.dout_head ? head : 0,
                        p.dout_batch ? batch : 0, kEvictLast);
    ahead = work.after(ahead);
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
  unsigned thread;  // of the warpgroup
  Shape::ScoreRing::Position at;

  // rdQ (64, dq_columns), not waited for.
  __device__ __forceinline__ void issue(Fragment& rdQ, int part) const {
    wgmma_fence();
    const unsigned sdS = shared.ds(at.stage) + part / column_parts * Shape::Scores::panel_bytes;
    const uint64 a = Shape::Scores::rows_deep | sdS >> 4;
    const uint64 b = Shape::K::rows_deep | shared.k() >> 4;
    const int column = Shape::K::column_block(part % column_parts * (Shape::dq_columns / 16));
#pragma unroll
    for (int k = 0; k < Shape::tile_n / 16; ++k)
      Wgmma<Shape::dq_columns, Shape::Element>::template ss<1, 1>(
          rdQ, a + (k * 16 * Shape::Scores::row_bytes >> 4), b + ((column + k * 16 * Shape::K::row_bytes) >> 4), k > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void release() {
    if (thread % 32 == 0) shared.ds_ring.release(at);
    at.advance();
  }

  __device__ __forceinline__ float* sums(const QueryStep& step, int part, int warp, int lane) const {
    const Sum sum = Sum::of_rows(p, work.c.batch, step.head, step.row_begin() + part / column_parts * 64);
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

  // Shared memory may go when this has returned.
  __device__ __forceinline__ void finish() const {
    if (Config::bulk_add && thread % 32 == 0) bulk_wait_read();
  }

  // Two words of turns for every 64 rows: as many as warpgroups that add to them.
  __device__ __forceinline__ Turn turn(const QueryStep& step, int part) const {
    const int row = part / column_parts * 64 + part % column_parts % 2 * kTurnRows;
    return Turn::of_rows(p, work.c.batch, step.head, step.row_begin() + row);
  }

  // The block before this one in turn has the next keys.
  __device__ __forceinline__ void wait_turn(const QueryStep& step, int part) const {
    if (Config::ordered && work.of_keys(p, work.first_key + Shape::tile_n).contains(step.tile))
      turn(step, part).wait(work.c.before);
  }

  // When the additions are made; better later.
  __device__ __forceinline__ void pass_turn(const QueryStep& step, int part) const {
    if constexpr (!Config::ordered) return;
    if (Config::bulk_add && thread % 32 == 0) bulk_wait();
    named_barrier_sync<128>(query_barrier + writer);
    if (thread == 0) turn(step, part).pass(work.c.before);
  }
};

// The warpgroup that feeds the others and, if none of them does, makes dQ.
struct Feeder {
  Loader loader;
  QueryGradient gradient;
  int warp;

  __device__ __forceinline__ void compute(const QueryStep& step) {
    gradient.shared.ds_ring.wait_full(gradient.at);
#pragma unroll
    for (int part = 0; part < QueryGradient::parts; ++part) {
      QueryGradient::Fragment rdQ;
      gradient.issue(rdQ, part);
      if (part == 0 && warp == 0 && !loader.done()) loader.load();
      wgmma_wait<0>();
      pin_accumulators(rdQ);
      if (part == QueryGradient::parts - 1) gradient.release();
      gradient.add(step, rdQ, part);
      if (Config::bulk_add) fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) gradient.flush(step, part);
      gradient.pass_turn(step, part);
    }
  }

  __device__ __forceinline__ void run() {
    warp = warp_uniform(threadIdx.x / 32);
    const Work& work = loader.work;
    if (warp == 0) {
      loader.elected = elect_one();
#pragma unroll 1
      for (int stage = 0; !loader.done() && (!Config::query_group || stage < Shape::stages); ++stage)
        loader.load(stage == 0);
    }
    if constexpr (Config::query_group) {
#pragma unroll 1
      for (QueryStep step = work.first(loader.p); work.has(step); step = work.after(step)) compute(step);
      gradient.finish();
    }
  }
};

// One of the warpgroups that make dK and dV of 64 keys.
struct Consumer {
  using Scores = float[1][Shape::m_blocks][4];       // (64 keys, tile_m queries)
  using Operand = unsigned[Shape::m_blocks / 2][4];  // the same, rounded
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
  const Work& work;
  int group;
  unsigned thread;  // of the warpgroup, held in a register: shared memory's queue is slow to tell it
  Shape::Ring::Position at;
  Shape::ScoreRing::Position ds_at;
  float rdK[1][Shape::d_blocks][4] = {};
  float rdV[1][Shape::dv_blocks][4] = {};
  KeyOperand<Shape::K> rK;
  KeyOperand<Shape::V> rV;
  Operand rP, rdS;         // of the products that go on
  QueryStep next, staged;  // whose dQ is to be made next, and has been made last
  bool has_staged = false;
  int lag;  // steps until the first dQ
  QueryGradient gradient;

  __device__ __forceinline__ Consumer(const BackwardParams& p, const Shared& shared, const Work& work, int group,
                                      unsigned thread)
      : p(p),
        shared(shared),
        work(work),
        group(group),
        thread(thread),
        next(work.first(p)),
        lag(1),
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

  // r += A X, not waited for, where A is P^T or dS^T.
  template <class Queries, int Blocks>
  __device__ __forceinline__ void issue_gradient(float (&r)[1][Blocks][4], const Operand& a, unsigned sQueries) const {
    wgmma_fence();
    const uint64 b = Queries::rows_deep | sQueries >> 4;
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k)
      Wgmma<8 * Blocks, Shape::Element>::template rs<1>(r, a[k], b + (k * 16 * Queries::row_bytes >> 4), 1);
    wgmma_commit();
  }

  // The shifts or deltas of this thread's queries, some of them fetched ahead: shared memory is slow to answer while
  // the tensor cores read it.
  struct QueryRows {
    static constexpr int window = Shape::m_blocks < 8 ? Shape::m_blocks : 8;
    unsigned at;
    float2 next[window];

    __device__ __forceinline__ void fetch(unsigned rows, unsigned lane) {
      at = rows + 8 * (lane % 4);
#pragma unroll
      for (int m = 0; m < window; ++m) next[m] = load_shared_float2(at + 32 * m);
    }

    // Of block m, once each and in order.
    __device__ __forceinline__ float2 take(int m) {
      const float2 value = next[m % window];
      if (m + window < Shape::m_blocks) next[m % window] = load_shared_float2(at + 32 * (m + window));
      return value;
    }
  };

  // rS from q.k to P^T.
  __device__ __forceinline__ void weigh(Scores& rS, QueryRows& shifts) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 shift = shifts.take(m);
      Config::score::apply(rS[0][m], p);
      exponentiate(rS[0][m], shift);
    }
  }

  __device__ __forceinline__ void exponentiate(float (&s)[4], const float2& shift) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2_approx(fmaf(s[i], p.exp2_scale, -(i % 2 ? shift.y : shift.x)));
  }

  // rdP from dP to dS^T.
  __device__ __forceinline__ void differentiate(const Scores& rP, Scores& rdP, QueryRows& deltas) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 delta = deltas.take(m);
#pragma unroll
      for (int i = 0; i < 4; ++i) rdP[0][m][i] = rP[0][m][i] * (rdP[0][m][i] - (i % 2 ? delta.y : delta.x));
    }
  }

  // Both at once, where the score stage bends scores.
  __device__ __forceinline__ void weigh_and_differentiate(Scores& rS, Scores& rdP, QueryRows& shifts,
                                                          QueryRows& deltas) const {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 shift = shifts.take(m), delta = deltas.take(m);
      float slope[4];
      Config::score::apply(rS[0][m], slope, p);
      exponentiate(rS[0][m], shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) rdP[0][m][i] = rS[0][m][i] * (rdP[0][m][i] - (i % 2 ? delta.y : delta.x)) * slope[i];
    }
  }

  __device__ __forceinline__ void clear_hidden(Scores& r, const QueryStep& step) const {
    for_each_hidden<Config::has_band, true, 1, Shape::m_blocks>(ScoreBand::of_keys(p), work.first_key + key(),
                                                                step.row_begin() + 2 * (lane() % 4),
                                                                [&](int, int m, int i) { r[0][m][i] = 0.0f; });
  }

  static __device__ __forceinline__ void pack_operand(Operand& a, const Scores& r) {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      a[m / 2][2 * (m % 2)] = pack<Shape::Element>(r[0][m][0], r[0][m][1]);
      a[m / 2][2 * (m % 2) + 1] = pack<Shape::Element>(r[0][m][2], r[0][m][3]);
    }
  }

  // dS^T to shared memory, for dQ.
  __device__ __forceinline__ void store_scores() const {
    shared.ds_ring.wait_empty(ds_at);
    const unsigned t = made_anew(thread), row = 64 * group + t / 32 * 16 + t % 16;
    const unsigned first = shared.ds(ds_at.stage) + Shape::Scores::chunk(row, t / 16 % 2);
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k)  // the swizzle makes of a column a constant to XOR
      stmatrix_x4((first ^ k % 4 << 5) + k / 4 * Shape::Scores::panel_bytes, rdS[k]);
  }

  // dS^T of the step before to whoever makes dQ. Its stores have to be complete: better later.
  __device__ __forceinline__ void publish_scores() {
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) shared.ds_ring.publish(ds_at);
    ds_at.advance();
  }

  // The same for what the last dQ left in shared memory.
  __device__ __forceinline__ void flush() const {
    if (!Config::bulk_add || !has_staged) return;
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) gradient.flush(staged, group);
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
                                                           work.c.key_tile * Shape::warpgroups + group);
  }

  __device__ __forceinline__ void issue_scores(Scores& rS) const {
    issue_product<Shape::K, Shape::Q>(rS, rK, shared.k(), shared.q(at.stage));
  }

  __device__ __forceinline__ void issue_score_gradients(Scores& rdP) const {
    shared.dout_ring.wait_full(at);
    issue_product<Shape::V, Shape::Dout>(rdP, rV, shared.v(), shared.dout(at.stage));
  }

  __device__ __forceinline__ void issue_key_gradients() {
    issue_gradient<Shape::Dout>(rdV, rP, shared.dout(at.stage));
    issue_gradient<Shape::Q>(rdK, rdS, shared.q(at.stage));
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
  __device__ __forceinline__ void differentiate(Scores& rS, Scores& rdP, QueryRows& shifts, const QueryStep& step) {
    const bool masked = needs_mask_here(step);
    if constexpr (Config::score::bends) {
      wgmma_wait<0>();
      pin_accumulators(rS);
      pin_accumulators(rdP);
      flush();
      QueryRows deltas;
      deltas.fetch(shared.delta(at.stage), lane());
      weigh_and_differentiate(rS, rdP, shifts, deltas);
      if (masked) clear_hidden(rS, step);
    } else {
      wgmma_wait<1>();
      pin_accumulators(rS);
      weigh(rS, shifts);
      if (masked) clear_hidden(rS, step);
      flush();
      QueryRows deltas;
      deltas.fetch(shared.delta(at.stage), lane());
      wgmma_wait<0>();
      pin_accumulators(rdP);
      differentiate(rS, rdP, deltas);
    }
    if (masked) clear_hidden(rdP, step);
    pack_operand(rP, rS);
    pack_operand(rdS, rdP);
    store_scores();
  }

  // dK and dV of the step before, if there is one, and the scores of this. dQ comes first: what it leaves goes to
  // shared memory beside the products for dV and dK, which leave most room there.
  __device__ __forceinline__ void go_on(const QueryStep& step, bool first) {
    Scores rS, rdP;
    QueryRows shifts;
    wait_turn();
    if (first) {
      shared.q_ring.wait_full(at);
      issue_scores(rS);
    } else {
      QueryGradient::Fragment rdQ;
      if constexpr (!Config::query_group) issue_query_gradient(rdQ);
      issue_key_gradients();
      const auto before = at;
      at.advance();
      publish_scores();
      if constexpr (!Config::query_group) {
        wgmma_wait<2>();
        pin_accumulators(rdQ);
        stage(rdQ);
      }
      shared.q_ring.wait_full(at);
      if constexpr (Config::early_scores) {
        wgmma_wait<1>();
        pin_accumulators(rdV);
        issue_scores(rS);
        release_queries<1>(before);
      } else {
        release_queries<0>(before);
        issue_scores(rS);
      }
    }
    if (Config::pass_early) pass_turn();
    if (first && !Config::keys_in_registers) shared.v_full.wait_full({});
    shifts.fetch(shared.shift(at.stage), lane());
    issue_score_gradients(rdP);
    if (!Config::pass_early) pass_turn();
    differentiate(rS, rdP, shifts, step);
  }

  // This warpgroup's part of dQ of the step that is next in line for it; of whatever is there when there is none, which
  // nobody asks for: a branch would stand in the way of products that go on.
  __device__ __forceinline__ void issue_query_gradient(QueryGradient::Fragment& rdQ) const {
    static_assert(Config::query_group || QueryGradient::parts == Shape::warpgroups);
    if (lag == 0) shared.ds_ring.wait_full(gradient.at);
    gradient.issue(rdQ, group);
  }

  __device__ __forceinline__ void stage(const QueryGradient::Fragment& rdQ) {
    if (lag == 0) {
      if (has_staged) gradient.pass_turn(staged, group);
      gradient.release();
      gradient.add(next, rdQ, group);
      staged = next;
      has_staged = true;
      next = work.after(next);
    } else {
      --lag;
    }
  }

  // The last step's dK and dV.
  __device__ __forceinline__ void end() {
    publish_scores();
    wait_turn();
    issue_key_gradients();
    release_queries<0>(at);
    pass_turn();
  }

  // All dQ that are left.
  __device__ __forceinline__ void add_rest() {
    lag = 0;
#pragma unroll 1
    while (work.has(next)) {
      QueryGradient::Fragment rdQ;
      issue_query_gradient(rdQ);
      wgmma_wait<0>();
      pin_accumulators(rdQ);
      stage(rdQ);
      flush();
    }
    gradient.pass_turn(staged, group);
    gradient.finish();
  }

  __device__ __forceinline__ void write() const {
    const int64 first = work.first_key;
    const int keys_left = p.seqlen_k - work.first_key, head = work.c.head, batch = work.c.batch;
    char* dk = static_cast<char*>(p.dk) + batch * p.dk_batch + head * p.dk_head + first * p.dk_row;
    char* dv = static_cast<char*>(p.dv) + batch * p.dv_batch + head * p.dv_head + first * p.dv_row;
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dims>(
        rdV, [](int) { return 1.0f; }, dv, p.dv_row, key(), keys_left, p.head_dim_v, lane());
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dims>(
        rdK, [&](int) { return p.gradient_scale; }, dk, p.dk_row, key(), keys_left, p.head_dim, lane());
  }

  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    const bool any = work.has(step);
    if (any) {
      if (Config::take_turns && group == Shape::warpgroups - 1) named_barrier_arrive<256>(turn_barrier);
      shared.k_full.wait_full({});
      if (Config::keys_in_registers) shared.v_full.wait_full({});
      rK.load(shared.k(), warp_key(), lane());
      rV.load(shared.v(), warp_key(), lane());
      bool first = true;
#pragma unroll 1
      for (; work.has(step); step = work.after(step)) {
        go_on(step, first);
        first = false;
      }
      end();
    }
    // The first warpgroup is ahead of the others, whose part of dS the last dQ needs.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == group % 2)
        write();
      else if (!Config::query_group && any)
        add_rest();
    }
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Shape::threads, 1)
    sm90_backward(const __grid_constant__ cuflash::Sm90BackwardParams params) {
  using namespace cuflash;
  extern __shared__ char dynamic[];
  const Shared shared(shared_address(dynamic));
  if (threadIdx.x == 0) {
    prefetch_tensor_map(params.k);
    prefetch_tensor_map(params.q);
    prefetch_tensor_map(params.v);
    prefetch_tensor_map(params.dout);
    shared.init();
  }
  __syncthreads();
  const Work work(params.p);
  const int role = warp_uniform(threadIdx.x / 128);
  if (role == 0) {
    give_registers<Config::query_registers>();
    Feeder{Loader(params, shared, work), {params.p, shared, work, 0, threadIdx.x}}.run();
  } else {
    take_registers<Config::consumer_registers>();
    Consumer(params.p, shared, work, role - 1, rematerialized_thread() % 128).run();
  }
}
