// The backward pass of sm90_backward.cu for head dims whose dK and dV of 64 keys are more than the registers of one
// warpgroup hold: one warpgroup makes S^T, P^T and dV, another dP^T, dS^T and dK, a third dQ. P^T goes from the first
// to the second through shared memory, in float32 and thread by thread, since both hold the same fragments of the
// scores. Rings are all that makes one wait for another.
#include "ptx/setmaxnreg.cuh"
#include "sm90/care.cuh"
#include "sm90/key_rows.cuh"
#include "sm90/query_gradient.cuh"

namespace cuflash {

static_assert(Config::query_group && Shape::tile_n == 64 && Shape::warpgroups == 2);

// Where a thread's four numbers of block m lie on their way from one warpgroup to the other.
__device__ __forceinline__ unsigned weights_at(const Shared& shared, unsigned thread, int m) {
  return shared.weights() + 16 * (128 * m + thread);
}

// Makes dV.
struct ValueGroup : KeyRows {
  Shape::Ring::Position at;
  RingPosition<1> weights_ring_at;
  float rdV[1][Shape::dv_blocks][4] = {};
  Scores rS;
  QueryRows shifts;
  Operand rP;
  int care = 0;  // see inspect()

  // From rS to P^T, which is sent on; where the score stage bends scores, its product with the slope is.
  __device__ __forceinline__ void weigh_and_send() {
    shared.weights_ring.wait_empty(weights_ring_at);
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float2 shift = shifts.take(m);
      float slope[4];
      Config::score::apply(rS[0][m], slope, p);
      exponentiate(rS[0][m], shift);
      if constexpr (Config::score::bends) {
#pragma unroll
        for (int i = 0; i < 4; ++i) slope[i] *= rS[0][m][i];
        store_shared(weights_at(shared, thread, m), slope);
      } else {
        store_shared(weights_at(shared, thread, m), rS[0][m]);
      }
    }
    __syncwarp();
    if (lane() == 0) shared.weights_ring.publish(weights_ring_at);
    weights_ring_at.advance();
  }

  // The scores of a step; of whatever is there when there is none, which nobody asks for: a branch would stand in the
  // way of products that go on.
  __device__ __forceinline__ void issue_scores(bool there) {
    if (there) {
      shared.q_ring.wait_full(at);
      shifts.fetch(shared.shift(at.stage), lane());
    }
    issue_product<Shape::K, Shape::Q>(rS, KeyOperand<Shape::K, 0>{}, shared.k(), shared.q(at.stage));
  }

  // From the scores of a step, which are there, to P^T as an operand. Plain steps hide nothing and are in blocks that
  // need no care.
  template <bool Plain>
  __device__ __forceinline__ void weigh(const QueryStep& step) {
    bool found = false;
    if constexpr (!Plain) {
      if (Config::has_band && care & kKeysMarked) {
        repair_scores(apart(), rS, shared.q(at.stage));
        shifts.fetch(shared.shift(at.stage), lane());  // again: not held meanwhile
      }
      found = !all_finite(rS);
    }
    weigh_and_send();
    if constexpr (!Plain) {
      clear_hidden(rS, step);
      if (in_uniform_register(found)) clear_weightless(apart(), rS, at.stage);
    }
    pack_operand(rP, rS);
    shared.dout_ring.wait_full(at);
    if constexpr (!Plain) silence_gradients(step);
    if (lane() == 0) shared.q_ring.release(at);
  }

  // What the scores of a step, which are there, add to dV, and the scores of the next.
  __device__ __forceinline__ void compute(const QueryStep& step, bool more) {
    if (care != 0 || hides_any(step)) {
      weigh<false>(step);
    } else {
      weigh<true>(step);
    }
    issue_gradient<Shape::Dout>(rdV, rP, shared.dout(at.stage));
    const auto before = at;
    at.advance();
    issue_scores(more);
    wgmma_wait<0>();
    pin_accumulators(rdV);
    pin_accumulators(rS);
    if (lane() == 0) shared.dout_ring.release(before);
  }

  // Adds what inf and NaN of dO do to the dV that see them, and clears them, when the others have done with dO.
  __device__ __forceinline__ void silence_gradients(const QueryStep& step) {
    const unsigned sdO = shared.dout(at.stage);
    const bool found = finds_nonfinite<Shape::Dout::bytes>(sdO, made_anew(thread), 128);
    if (!in_uniform_register(named_barrier_or<128>(consumer_barrier, found))) return;
    const KeyRows r = apart();
    add_nonfinite_queries<Shape::Dout>(r, rdV, sdO, at.stage, step.row_begin(), [&](int half, int query) {
      const unsigned of = (r.thread & ~3u) + query % 8 / 2;
      return load_shared_float(weights_at(shared, of, query / 8) + 4 * (2 * half + query % 2));
    });
    named_barrier_sync<Shape::consumers>(consumers_barrier);
    clear_for_products<Shape::Dout::bytes>(r, sdO, consumer_barrier);
  }

  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    bool more = work.has(step);
    if (more) {
      shared.k_full.wait_full({});
      issue_scores(true);
      care = shared.wait_care();
      wgmma_wait<0>();
      pin_accumulators(rS);
    }
#pragma unroll 1
    while (more) {
      const QueryStep next = work.after(step);
      more = work.has(next);
      compute(step, more);
      step = next;
    }
    write_values(rdV);
  }
};

// Makes dK.
struct KeyGroup : KeyRows {
  Shape::Ring::Position at;
  RingPosition<1> weights_ring_at;
  Shape::ScoreRing::Position ds_at;
  float rdK[1][Shape::d_blocks][4] = {};
  Scores rdP;
  int care = 0;
  QueryRows deltas;
  Operand rdS;

  // From rdP to dS^T.
  __device__ __forceinline__ void receive_and_differentiate() {
    shared.weights_ring.wait_full(weights_ring_at);
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      const float4 weight = load_shared_float4(weights_at(shared, thread, m));
      const float2 delta = deltas.take(m);
      rdP[0][m][0] = weight.x * (rdP[0][m][0] - delta.x);
      rdP[0][m][1] = weight.y * (rdP[0][m][1] - delta.y);
      rdP[0][m][2] = weight.z * (rdP[0][m][2] - delta.x);
      rdP[0][m][3] = weight.w * (rdP[0][m][3] - delta.y);
    }
    __syncwarp();
    if (lane() == 0) shared.weights_ring.release(weights_ring_at);
    weights_ring_at.advance();
  }

  // As ValueGroup::issue_scores.
  __device__ __forceinline__ void issue_score_gradients(bool there) {
    if (there) {
      shared.dout_ring.wait_full(at);
      shared.q_ring.wait_full(at);
      deltas.fetch(shared.delta(at.stage), lane());
    }
    issue_product<Shape::V, Shape::Dout>(rdP, KeyOperand<Shape::V, 0>{}, shared.v(), shared.dout(at.stage));
  }

  // From the gradients of the weights of a step, which are there, to dS^T as an operand and in shared memory.
  template <bool Plain>
  __device__ __forceinline__ void differentiate(const QueryStep& step) {
    if constexpr (!Plain) let_gradients_be_silenced();
    if (lane() == 0) shared.dout_ring.release(at);
    receive_and_differentiate();
    if constexpr (!Plain) {
      if (hides_any(step)) clear_hidden(rdP, step);
      if (in_uniform_register(!all_finite(rdP))) clear_weightless(apart(), rdP, at.stage);
    }
    pack_operand(rdS, rdP);
    store_scores(ds_at, rdS);
    if constexpr (!Plain) silence_queries(step);
  }

  // What they add to dK, and those of the next step.
  __device__ __forceinline__ void compute(const QueryStep& step, bool more) {
    if (care != 0 || hides_any(step)) {
      differentiate<false>(step);
    } else {
      differentiate<true>(step);
    }
    issue_gradient<Shape::Q>(rdK, rdS, shared.q(at.stage));
    const auto before = at;
    at.advance();
    publish_scores(ds_at);
    ds_at.advance();
    issue_score_gradients(more);
    wgmma_wait<0>();
    pin_accumulators(rdK);
    pin_accumulators(rdP);
    if (lane() == 0) shared.q_ring.release(before);
  }

  // When dP is there: takes part in ValueGroup::silence_gradients if that has anything to do.
  __device__ __forceinline__ void let_gradients_be_silenced() const {
    // Inf or NaN of dO is in dP, too, whatever V is.
    if (!in_uniform_register(named_barrier_or<128>(consumer_barrier + 1, !all_finite(rdP)))) return;
    const bool found = finds_nonfinite<Shape::Dout::bytes>(shared.dout(at.stage), made_anew(thread), 128);
    if (in_uniform_register(named_barrier_or<128>(consumer_barrier + 1, found)))
      named_barrier_sync<Shape::consumers>(consumers_barrier);
  }

  // Adds what inf and NaN of Q do to the dK that see them, and clears them. The scores were made long before.
  __device__ __forceinline__ void silence_queries(const QueryStep& step) {
    const unsigned sQ = shared.q(at.stage), sdS = shared.ds(ds_at.stage);
    const bool found = finds_nonfinite<Shape::Q::bytes>(sQ, made_anew(thread), 128);
    if (!in_uniform_register(named_barrier_or<128>(consumer_barrier + 1, found))) return;
    const KeyRows r = apart();
    __syncwarp();
    add_nonfinite_queries<Shape::Q>(r, rdK, sQ, at.stage, step.row_begin(), [&](int half, int query) {
      return load_transposed_score(sdS, r.key() + 8 * half, query);
    });
    named_barrier_sync<128>(consumer_barrier + 1);  // all have read
    clear_for_products<Shape::Q::bytes>(r, sQ, consumer_barrier + 1);
  }

  __device__ __forceinline__ void run() {
    QueryStep step = work.first(p);
    bool more = work.has(step);
    if (more) {
      shared.v_full.wait_full({});
      issue_score_gradients(true);
      care = shared.wait_care();
      wgmma_wait<0>();
      pin_accumulators(rdP);
    }
#pragma unroll 1
    while (more) {
      const QueryStep next = work.after(step);
      more = work.has(next);
      compute(step, more);
      step = next;
    }
    write_keys(rdK);
  }
};

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Shape::threads, 1)
    sm90_backward_wide(const __grid_constant__ cuflash::Sm90BackwardParams params) {
  using namespace cuflash;
  extern __shared__ char dynamic[];
  const Shared shared(shared_address(dynamic));
  start(params, shared);
  const int role = warp_uniform(threadIdx.x / 128);
  if (role == 0) {
    give_registers<Config::query_registers>();
    const Work work(params.p);
    Feeder{Loader(params, shared, work), {params.p, shared, work, 0, threadIdx.x}}.run();
  } else {
    take_registers<Config::consumer_registers>();
    const Work work(params.p);
    const KeyRows rows{params.p, shared, work, 0, rematerialized_thread() % 128};
    if (role == 1) {
      ValueGroup{rows}.run();
    } else {
      KeyGroup{rows}.run();
    }
  }
}
