// FlashAttention backward (Dao 2023, section 3.2, algorithm 2; Shah et al. 2024, section 3) for compute capability 9.0.
//
// One block owns tile_n keys of one key/value head, 64 for each of its consumer warpgroups, which keep their dK and dV
// in registers while the block walks the query heads that share that head and, of each, the query tiles that see the
// keys. Scores are made transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T feed dV += P^T dO and dK +=
// dS^T Q from the registers that they were computed in. A warpgroup of its own makes dQ = dS K from dS in shared memory
// and adds it to the sums in the workspace: the consumers wait for each other nowhere, so that the exponentials of one
// meet the products of another. One of its threads starts the copies.
#include "ptx/setmaxnreg.cuh"
#include "sm90/care.cuh"
#include "sm90/key_rows.cuh"
#include "sm90/query_gradient.cuh"

namespace cuflash {

// One of the warpgroups that make dK and dV of 64 keys.
struct Consumer : KeyRows {
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
  bool keys_marked = false;
  QueryGradient gradient;

  __device__ __forceinline__ Consumer(const BackwardParams& p, const Shared& shared, const Work& work, int group,
                                      unsigned thread)
      : KeyRows{p, shared, work, group, thread},
        next(work.first(p)),
        lag(1),
        gradient{p, shared, work, group, thread} {}

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
    const bool masked = needs_mask_here(step), careful = needs_care(step);
    bool found = false;
    if constexpr (Config::score::bends) {
      wgmma_wait<0>();
      pin_accumulators(rS);
      pin_accumulators(rdP);
      if (keys_marked) repair_scores(*this, rS, shared.q(at.stage));
      if (careful) found = !(all_finite(rS) && all_finite(rdP));
      flush();
      QueryRows deltas;
      deltas.fetch(shared.delta(at.stage), lane());
      weigh_and_differentiate(rS, rdP, shifts, deltas);
      if (masked) clear_hidden(rS, step);
    } else {
      wgmma_wait<1>();
      pin_accumulators(rS);
      if (keys_marked) repair_scores(*this, rS, shared.q(at.stage));
      if (careful) found = !all_finite(rS);
      weigh(rS, shifts);
      if (masked) clear_hidden(rS, step);
      flush();
      QueryRows deltas;
      deltas.fetch(shared.delta(at.stage), lane());
      wgmma_wait<0>();
      pin_accumulators(rdP);
      if (careful) found |= !all_finite(rdP);
      differentiate_softmax(rS, rdP, deltas);
    }
    if (masked) clear_hidden(rdP, step);
    if (found) {
      clear_weightless(*this, rS, at.stage);
      clear_weightless(*this, rdP, at.stage);
    }
    pack_operand(rP, rS);
    pack_operand(rdS, rdP);
    store_scores(ds_at, rdS);
    if (careful && named_barrier_or<128>(consumer_barrier + group, found)) silence_queries(step);
  }

  // Whether some of the block's keys do not see a query, or nobody should.
  __device__ __forceinline__ bool needs_care(const QueryStep& step) const {
    bool care = Config::has_band &&
                needs_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, step.row_begin(), work.c.key_tile);
#pragma unroll
    for (int i = 0; i < Shape::tile_m / 64; ++i) care |= load_shared(shared.weightless(at.stage) + 16 * i) != 0;
    return care;
  }

  // When the scores of a step are not all finite. If Q or dO is the reason all warpgroups come here, and add what its
  // inf and NaN do to the dK and dV that see them; then those become 0.
  __device__ __forceinline__ void silence_queries(const QueryStep& step) {
    const unsigned sQ = shared.q(at.stage), sdO = shared.dout(at.stage), sScores = shared.ds(ds_at.stage);
    const bool found =
        finds_nonfinite<Shape::Q::bytes>(sQ, thread, 128) || finds_nonfinite<Shape::Dout::bytes>(sdO, thread, 128);
    if (!named_barrier_or<128>(consumer_barrier + group, found)) return;
    __syncwarp();
    store_scores(ds_at, rP);  // for a moment, for the lanes of a warp
    __syncwarp();
    add_nonfinite_queries<Shape::Dout>(*this, rdV, sdO, sScores, at.stage, step.row_begin());
    __syncwarp();
    store_scores(ds_at, rdS);
    __syncwarp();
    add_nonfinite_queries<Shape::Q>(*this, rdK, sQ, sScores, at.stage, step.row_begin());
    named_barrier_sync<Shape::consumers>(consumers_barrier);
    clear_for_products<Shape::Q::bytes>(*this, sQ, consumer_barrier + group);
    clear_for_products<Shape::Dout::bytes>(*this, sdO, consumer_barrier + group);
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
      publish_scores(ds_at);
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

  __device__ __forceinline__ void stage(QueryGradient::Fragment& rdQ) {
    if (lag == 0) {
      if (has_staged) gradient.pass_turn(staged, group);
      if (keys_marked) gradient.add_marked(next, rdQ, group);
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
    publish_scores(ds_at);
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

  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    const bool any = work.has(step);
    if (any) {
      if (Config::take_turns && group == Shape::warpgroups - 1) named_barrier_arrive<256>(turn_barrier);
      shared.k_full.wait_full({});
      if (Config::keys_in_registers) shared.v_full.wait_full({});
      keys_marked = inspect_keys(p, shared, work, 128 * group + thread);
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
      if (half == group % 2) {
        write_values(rdV);
        write_keys(rdK);
      } else if (!Config::query_group && any)
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
  if (threadIdx.x == 0) start(params, shared);
  shared.clear_marks();
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
