// FlashAttention backward (Dao 2023, section 3.2, algorithm 2; Shah et al. 2024, section 3) for compute capability 9.0.
//
// One block owns tile_n keys of one key/value head, 64 for each of its consumer warpgroups, which keep their dK and dV
// in registers while the block walks the query heads that share that head and, of each, the query tiles that see the
// keys. Scores are made transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T feed dV += P^T dO and dK +=
// dS^T Q from the registers that they were computed in. dQ = dS K is made from dS in shared memory, by a warpgroup of
// its own or by the consumers, half each and two steps later, when the other's part of dS is there without waiting.
//
// The consumers take turns at issuing their products, those of dK and dV of one step and of the scores of the next:
// left to themselves they fall into step, and the tensor cores idle while both take exponentials.
//
// A step knows nothing of masks: what they hide becomes 0 in the rounded operands, behind a branch that few steps take.
#include "ptx/setmaxnreg.cuh"
#include "sm90/care.cuh"
#include "sm90/key_rows.cuh"
#include "sm90/query_gradient.cuh"

namespace cuflash {

static_assert(Config::query_group || !Config::early_scores && Shape::buffers == 3, "dQ two steps behind");

// One of the warpgroups that make dK and dV of 64 keys.
struct Consumer : KeyRows {
  float rdK[1][Shape::d_blocks][4] = {};
  float rdV[1][Shape::dv_blocks][4] = {};
  KeyOperand<Shape::K, Config::keys_in_registers> rK;
  KeyOperand<Shape::V, Config::values_in_registers> rV;
  Operand rP, rdS;                          // of the products that go on
  int care;                                 // of the block, once it is known: see care.cuh
  QueryTiles plain;                         // of which nothing is hidden and which need no care
  Shape::Ring::Position at;                 // of the step under way
  Shape::ScoreRing::Position ds_at, dq_at;  // of its dS^T, and of the next to make dQ of
  QueryGradient gradient;

  __device__ __forceinline__ Consumer(const BackwardParams& p, const Shared& shared, const Work& work, int group,
                                      unsigned thread)
      : KeyRows{p, shared, work, group, thread}, gradient{p, shared, work, group, thread} {}

  // What dQ of a step left in shared memory, to its sums.
  __device__ __forceinline__ void flush(const QueryStep& step) const {
    if constexpr (!Config::bulk_add) return;
    fence_async_proxy();
    __syncwarp();
    gradient.flush(step, group);
  }

  // Products of one warpgroup are issued together, so that they run as a block while the other takes exponentials.
  __device__ __forceinline__ void wait_turn() const {
    if (Config::take_turns) named_barrier_sync<256>(turn_barrier + group);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (Config::take_turns) named_barrier_arrive<256>(turn_barrier + (group + 1) % Shape::warpgroups);
  }

  __device__ __forceinline__ void issue_scores(Scores& rS, int stage) const {
    issue_product<Shape::K, Shape::Q>(rS, rK, shared.k(), shared.q(stage));
  }

  __device__ __forceinline__ void issue_score_gradients(Scores& rdP, const Shape::Ring::Position& at) const {
    shared.dout_ring.wait_full(at);
    issue_product<Shape::V, Shape::Dout>(rdP, rV, shared.v(), shared.dout(at.stage));
  }

  __device__ __forceinline__ void issue_key_gradients(int stage) {
    issue_gradient<Shape::Dout>(rdV, rP, shared.dout(stage));
    issue_gradient<Shape::Q>(rdK, rdS, shared.q(stage));
  }

  // When all products are there.
  __device__ __forceinline__ void release_queries(const Shape::Ring::Position& done) {
    wgmma_wait<0>();
    pin_accumulators(rdV);
    pin_accumulators(rdK);
    if (lane() == 0) {
      shared.dout_ring.release(done);
      shared.q_ring.release(done);
    }
  }

  // From the products of a step, which may still be under way with Behind others behind them, to P^T and dS^T.
  template <int Behind>
  __device__ __forceinline__ void differentiate(Scores& rS, Scores& rdP, QueryRows& shifts, const QueryStep& step,
                                                int count) {
    QueryRows deltas;
    wgmma_wait<Behind + (Config::score::bends ? 0 : 1)>();
    pin_accumulators(rS);
    if constexpr (Config::score::bends) {
      pin_accumulators(rdP);
      if (makes_query_gradient(count)) flush(work.before<2>(step));
      deltas.fetch(shared.delta(at.stage), lane());
      weigh_and_differentiate(rS, rdP, shifts, deltas);
    } else {
      weigh(rS, shifts);
      if (makes_query_gradient(count)) flush(work.before<2>(step));
      deltas.fetch(shared.delta(at.stage), lane());
      wgmma_wait<Behind>();
      pin_accumulators(rdP);
      differentiate_softmax(rS, rdP, deltas);
    }
  }

  // From P^T and dS^T to the operands of the products to come.
  __device__ __forceinline__ void finish(const Scores& rS, const Scores& rdP, const QueryStep& step, int count) {
    pack_operand(rP, rS);
    pack_operand(rdS, rdP);
    if (count == 0) learn_care();
    if (!plain.contains(step.tile)) take_care(step);
    store_scores(ds_at, rdS);
  }

  __device__ __forceinline__ void learn_care() {
    care = shared.wait_care();
    const auto tiles = QueryTiles::without_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, work.c.key_tile);
    plain = {in_uniform_register(tiles.first), care ? 0 : in_uniform_register(tiles.last)};
  }

  // Where a step hides anything, or its block needs care: puts P^T and dS^T right, and what inf and NaN have made of
  // them. A second version of differentiate(), or a branch in it, would make the loop slower even where it is not
  // taken.
  __device__ __forceinline__ void take_care(const QueryStep& step) {
    clear_hidden(rP, rdS, step);
    if (care == 0) return;
    if (Config::has_band && care & kKeysMarked) {
      const unsigned sScores = shared.ds(ds_at.stage);
      exchange_scores(rP, [&] { weigh_marked_keys<false>(apart(), sScores, at.stage, step.row_begin()); });
      exchange_scores(rdS, [&] { weigh_marked_keys<true>(apart(), sScores, at.stage, step.row_begin()); });
    }
    if (care & kRowsMarked) {
      clear_weightless(apart(), rP, at.stage);
      clear_weightless(apart(), rdS, at.stage);
      silence_queries(step);
    }
  }

  // Lets f() see a tile, and change what the lanes of a warp have of it, where dS^T is to be.
  template <class F>
  __device__ __forceinline__ void exchange_scores(Operand& r, F&& f) const {
    __syncwarp();
    store_scores(ds_at, r);
    __syncwarp();
    f();
    __syncwarp();
    load_scores(ds_at, r);
    __syncwarp();
  }

  // If Q or dO of a step hold inf or NaN, adds what these do to the dK and dV that see them; then they become 0.
  __device__ __forceinline__ void silence_queries(const QueryStep& step) {
    const unsigned sQ = shared.q(at.stage), sdO = shared.dout(at.stage), sScores = shared.ds(ds_at.stage);
    const bool found = finds_nonfinite<Shape::Q::bytes>(sQ, made_anew(thread), 128) ||
                       finds_nonfinite<Shape::Dout::bytes>(sdO, made_anew(thread), 128);
    if (!in_uniform_register(named_barrier_or<128>(consumer_barrier + group, found))) return;
    const KeyRows r = apart();
    const auto score = [&](int half, int query) { return load_transposed_score(sScores, r.key() + 8 * half, query); };
    exchange_scores(rP,
                    [&] { add_nonfinite_queries<Shape::Dout>(apart(), rdV, sdO, at.stage, step.row_begin(), score); });
    exchange_scores(rdS, [&] { add_nonfinite_queries<Shape::Q>(apart(), rdK, sQ, at.stage, step.row_begin(), score); });
    named_barrier_sync<Shape::consumers>(consumers_barrier);
    clear_for_products<Shape::Q::bytes>(apart(), sQ, consumer_barrier + group);
    clear_for_products<Shape::Dout::bytes>(apart(), sdO, consumer_barrier + group);
  }

  // A turn: dK and dV of the step before, if there is one, and the scores of this, if it is one. Says whether it is. dQ
  // comes first: what it leaves goes to shared memory beside the products for dV and dK, which leave most room there.
  __device__ __forceinline__ bool go_on(const QueryStep& step, int count) {
    Scores rS, rdP;
    QueryRows shifts;
    const bool is_step = work.has(step);
    wait_turn();
    if (count == 0) {
      shared.q_ring.wait_full(at);
      issue_scores(rS, at.stage);
    } else {
      QueryGradient::Fragment rdQ;
      if constexpr (!Config::query_group) issue_query_gradient(rdQ, makes_query_gradient(count));
      issue_key_gradients(at.stage);
      const auto before = at;
      at.advance();
      publish_scores(ds_at);
      ds_at.advance();
      if constexpr (!Config::query_group) {
        wgmma_wait<2>();
        pin_accumulators(rdQ);
        if (makes_query_gradient(count)) add_query_gradient(rdQ, work.before<2>(step), count > 2);
      }
      if (!is_step) {
        release_queries(before);
        pass_turn();
        if (makes_query_gradient(count)) flush(work.before<2>(step));
        return false;
      }
      shared.q_ring.wait_full(at);
      release_queries(before);
      issue_scores(rS, at.stage);
    }
    if (count == 0 && !Config::values_in_registers) shared.v_full.wait_full({});
    shifts.fetch(shared.shift(at.stage), lane());
    issue_score_gradients(rdP, at);
    pass_turn();
    differentiate<0>(rS, rdP, shifts, step, count);
    finish(rS, rdP, step, count);
    return true;
  }

  // The same where registers hold the scores of this step beside P^T and dS^T of the one before: exponentials then
  // begin while the products for dV and dK run.
  template <bool First>
  __device__ __forceinline__ void go_ahead(const QueryStep& step, int count) {
    Scores rS, rdP;
    QueryRows shifts;
    const auto before = at;
    wait_turn();
    if (!First) at.advance();
    shared.q_ring.wait_full(at);
    issue_scores(rS, at.stage);
    if (First && !Config::values_in_registers) shared.v_full.wait_full({});
    issue_score_gradients(rdP, at);
    if (!First) {
      issue_key_gradients(before.stage);
      publish_scores(ds_at);
      ds_at.advance();
    }
    pass_turn();
    shifts.fetch(shared.shift(at.stage), lane());
    differentiate<First ? 0 : 2>(rS, rdP, shifts, step, count);
    if (!First) release_queries(before);
    finish(rS, rdP, step, count);
  }

  // All steps of a block that has any; returns how many, and leaves `step` past the last.
  __device__ __forceinline__ int walk(QueryStep& step) {
    int count = 0;
    if constexpr (!Config::early_scores) {
#pragma unroll 1
      for (; go_on(step, count); step = work.after(step)) ++count;
      return count;
    }
    go_ahead<true>(step, 0);
#pragma unroll 1
    for (step = work.after(step), count = 1; work.has(step); step = work.after(step)) go_ahead<false>(step, count++);
    wait_turn();
    issue_key_gradients(at.stage);
    publish_scores(ds_at);
    pass_turn();
    release_queries(at);
    return count;
  }

  // dQ lags two steps behind the scores: then the other warpgroup has published its part of dS.
  static __device__ __forceinline__ bool makes_query_gradient(int count) { return !Config::query_group && count >= 2; }

  // This warpgroup's part of the next dQ; of whatever is there when there is none, which nobody asks for: a branch
  // would stand in the way of products that go on.
  __device__ __forceinline__ void issue_query_gradient(QueryGradient::Fragment& rdQ, bool there) const {
    static_assert(Config::query_group || QueryGradient::parts == Shape::warpgroups);
    if (there) shared.ds_ring.wait_full(dq_at);
    gradient.issue(rdQ, dq_at.stage, group);
  }

  // When it is made.
  __device__ __forceinline__ void add_query_gradient(QueryGradient::Fragment& rdQ, const QueryStep& step,
                                                     bool others_before) {
    if (Config::ordered && others_before) gradient.pass_turn(work.before<1>(step), group);
    if (Config::has_band && care & kKeysMarked)
      gradient.add_marked(step, dq_at.stage, group * (Shape::tile_d / 2), (group + 1) * (Shape::tile_d / 2));
    if (lane() == 0) shared.ds_ring.release(dq_at);
    dq_at.advance();
    gradient.add(step, rdQ, group);
  }

  // dQ of the last step, beside what is left to do.
  __device__ __forceinline__ void end_query_gradient(const QueryStep& last, int count) {
    QueryGradient::Fragment rdQ;
    issue_query_gradient(rdQ, true);
    write_keys(rdK);
    wgmma_wait<0>();
    pin_accumulators(rdQ);
    add_query_gradient(rdQ, last, count > 1);
    flush(last);
    gradient.pass_turn(last, group);
    gradient.finish();
  }

  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    int count = 0;
    if (work.has(step)) {
      if (Config::take_turns && group == Shape::warpgroups - 1) named_barrier_arrive<256>(turn_barrier);
      if (Config::values_in_registers) shared.v_full.wait_full({});
      shared.k_full.wait_full({});
      rK.load(shared.k(), warp_key(), lane());
      rV.load(shared.v(), warp_key(), lane());
      count = walk(step);
    }
    write_values(rdV);
    if (!Config::query_group && count > 0) {
      end_query_gradient(work.before<1>(step), count);
    } else {
      write_keys(rdK);
    }
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Shape::threads, 1)
    sm90_backward(const __grid_constant__ cuflash::Sm90BackwardParams params) {
  using namespace cuflash;
  extern __shared__ char dynamic[];
  const Shared shared(shared_address(dynamic));
  start(params, shared);
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
