// For the sm90 backward kernels: the copies that feed a block, and dQ = dS K.
#pragma once

#include "core/dq_sum.cuh"
#include "core/turns.cuh"
#include "ptx/elect.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/special.cuh"
#include "sm90/backward.cuh"
#include "sm90/care.cuh"

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
      Shape::K::load(shared.k(), params.k, shared.k_full.full(0), work.first_key(), p.k_head ? work.c.head : 0,
                     p.k_batch ? work.c.batch : 0, kEvictFirst);
  }

  __device__ __forceinline__ void load_values() const {
    if (elected)
      Shape::V::load(shared.v(), params.v, shared.v_full.full(0), work.first_key(), p.v_head ? work.c.head : 0,
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
      bulk_load(shared.shift(stage), p.shift + row_at, 4 * Shape::tile_m, full);
      bulk_load(shared.delta(stage), p.delta + row_at, 4 * Shape::tile_m, full);
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

  // What keys with inf or NaN add to the sums.
  __device__ __forceinline__ void add_marked(const QueryStep& step, int buffer, int first, int last) const {
    const Sum sum = Sum::of_rows(p, work.c.batch, step.head, step.row_begin());
    add_marked_keys(sum, p, shared, work, shared.ds(buffer), step.row_begin(), first, last, made_anew(thread));
  }

  __device__ __forceinline__ unsigned sdQ(int warp) const { return shared.dq(writer) + warp * (Shape::dq_bytes / 4); }

  // What add() left in shared memory, to the sums, behind a fence; by all threads of each warp, since an address that
  // one of them computes would not be in uniform registers, where the copy engine wants it.
  __device__ __forceinline__ void flush(const QueryStep& step, int part) const {
    if constexpr (!Config::bulk_add) return;
    const int warp = in_uniform_register(thread / 32);
    float* target = sums(step, part, warp, 0);
    const unsigned source = sdQ(warp);
    if (thread % 32 != 0) return;
    wait_turn(step, part);
    bulk_add(target, source, Shape::dq_bytes / 4);
    bulk_commit();
  }

  // Shared memory may go when this has returned.
  __device__ __forceinline__ void finish() const {
    if (Config::bulk_add && thread % 32 == 0) bulk_wait_read();
  }

  // Two words of turns for every 64 rows: as many as warpgroups that may add to them.
  __device__ __forceinline__ Turn turn(const QueryStep& step, int part) const {
    const int row = Config::query_group ? 0 : part / column_parts * 64 + part % column_parts * kTurnRows;
    return Turn::of_rows(p, work.c.batch, step.head, step.row_begin() + row);
  }

  // The block before this one in turn has the next keys.
  __device__ __forceinline__ void wait_turn(const QueryStep& step, int part) const {
    if (Config::ordered && (part == 0 || !Config::query_group) &&
        work.of_keys(p, made_anew(work.first_key()) + Shape::tile_n).contains(step.tile))
      turn(step, part).wait(work.c.before);
  }

  // When the additions are made; better later.
  __device__ __forceinline__ void pass_turn(const QueryStep& step, int part) const {
    if constexpr (!Config::ordered) return;
    if (Config::bulk_add && thread % 32 == 0) bulk_wait();
    named_barrier_sync<128>(query_barrier + writer);
    if (thread == 0) turn(step, part).pass(made_anew(work.c.before));
  }
};

// The warpgroup that feeds the others, inspects what it feeds them and, if none of them does, makes dQ.
struct Feeder {
  Loader loader;
  QueryGradient gradient;
  int warp;
  bool keys_marked = false;
  Shape::ScoreRing::Position at;

  __device__ __forceinline__ void compute(const QueryStep& step, bool first) {
    gradient.shared.ds_ring.wait_full(at);
    if (Config::has_band && first) keys_marked = gradient.shared.wait_care() & kKeysMarked;
#pragma unroll
    for (int part = 0; part < QueryGradient::parts; ++part) {
      QueryGradient::Fragment rdQ;
      gradient.issue(rdQ, at.stage, part);
      if (part == 0 && warp == 0 && !loader.done()) loader.load();
      wgmma_wait<0>();
      pin_accumulators(rdQ);
      if (keys_marked && part == 0) gradient.add_marked(step, at.stage, 0, Shape::tile_d);
      if (part == QueryGradient::parts - 1) {
        if (threadIdx.x % 32 == 0) gradient.shared.ds_ring.release(at);
        at.advance();
      }
      gradient.add(step, rdQ, part);
      if (Config::bulk_add) fence_async_proxy();
      __syncwarp();
      gradient.flush(step, part);
    }
    gradient.pass_turn(step, 0);
  }

  __device__ __forceinline__ void run() {
    warp = warp_uniform(threadIdx.x / 32);
    const Work& work = loader.work;
    if (warp == 0) {
      loader.elected = elect_one();
#pragma unroll 1
      for (int stage = 0; !loader.done() && (!Config::query_group || stage < Shape::stages); ++stage)
        loader.load(stage == 0);
    } else if (!loader.done()) {
      inspect(loader.p, loader.shared, work, threadIdx.x - 32);
    }
    if constexpr (Config::query_group) {
      bool first = true;
#pragma unroll 1
      for (QueryStep step = work.first(loader.p); work.has(step); step = work.after(step)) {
        compute(step, first);
        first = false;
      }
      gradient.finish();
    }
  }
};

}  // namespace cuflash
