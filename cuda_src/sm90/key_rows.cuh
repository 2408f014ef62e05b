// For the sm90 backward kernels: what a warpgroup does with the transposed scores of 64 keys, S^T = K Q^T and
// dP^T = V dO^T, whose rounded P^T and dS^T feed dV += P^T dO and dK += dS^T Q from registers.
#pragma once

#include "core/mask.cuh"
#include "core/score.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special.cuh"
#include "ptx/stmatrix.cuh"
#include "sm90/backward.cuh"
#include "sm90/output.cuh"

namespace cuflash {

struct KeyRows {
  using Scores = float[1][Shape::m_blocks][4];       // (64 keys, tile_m queries)
  using Operand = unsigned[Shape::m_blocks / 2][4];  // the same, rounded
  // This warpgroup's keys or values: in shared memory, the first Held of their fragments of 16 columns in registers,
  // too.
  template <class Keys, int Held>
  struct KeyOperand {
    static constexpr int blocks = Keys::panels * Keys::panel_columns / 16;
    unsigned r[Held > 0 ? Held : 1][4];

    __device__ __forceinline__ void load(unsigned sKeys, int warp_key, unsigned lane) {
#pragma unroll
      for (int k = 0; k < Held; ++k) ldmatrix_x4(r[k], sKeys + Keys::chunk(warp_key + lane % 16, 2 * k + lane / 16));
    }
  };

  const BackwardParams& p;
  const Shared& shared;
  const Work& work;
  int group;
  unsigned thread;  // of the warpgroup, held in a register: shared memory's queue is slow to tell it
  // The same in a form that is made anew where it is needed: for what is off the usual path.
  __device__ __forceinline__ KeyRows apart() const { return {p, shared, work, group, made_anew(thread)}; }

  __device__ __forceinline__ unsigned lane() const { return thread % 32; }
  __device__ __forceinline__ unsigned warp_key() const { return 64 * group + thread / 32 * 16; }
  __device__ __forceinline__ unsigned key() const { return warp_key() + lane() / 4; }  // its first in the tile

  // r = A B^T, not waited for: keys by queries.
  template <class Keys, class Queries, int Held>
  __device__ __forceinline__ void issue_product(Scores& r, const KeyOperand<Keys, Held>& keys, unsigned sKeys,
                                                unsigned sQueries) const {
    using Product = Wgmma<Shape::tile_m, Shape::Element>;
    wgmma_fence();
    const uint64 a = Keys::columns_deep | (sKeys + 64 * group * Keys::row_bytes) >> 4;
    const uint64 b = Queries::columns_deep | sQueries >> 4;
#pragma unroll
    for (int k = 0; k < KeyOperand<Keys, Held>::blocks; ++k) {
      const uint64 queries = b + (Queries::column_block(k) >> 4);
      if (k < Held) {
        Product::template rs<0>(r, keys.r[k < Held ? k : 0], queries, k > 0);
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
    // Stages that bend scores need the registers.
    static constexpr int window = Config::score::bends ? 2 : Shape::m_blocks < 8 ? Shape::m_blocks : 8;
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
  __device__ __forceinline__ void differentiate_softmax(const Scores& rP, Scores& rdP, QueryRows& deltas) const {
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

  // f(m, i) for this thread's hidden scores.
  template <class F>
  __device__ __forceinline__ void for_each_hidden(const QueryStep& step, F&& f) const {
    const unsigned t = made_anew(thread), first = work.first_key() + 64 * group + t / 32 * 16 + t % 32 / 4;
    cuflash::for_each_hidden<Config::has_band, true, 1, Shape::m_blocks>(
        ScoreBand::of_keys(p), first, step.row_begin() + 2 * (t % 4), [&](int, int m, int i) { f(m, i); });
  }

  __device__ __forceinline__ void clear_hidden(Scores& r, const QueryStep& step) const {
    for_each_hidden(step, [&](int m, int i) { r[0][m][i] = 0.0f; });
  }

  // What was number i of block m before it was rounded.
  static __device__ __forceinline__ void clear_number(Operand& r, int m, int i) {
    r[m / 2][2 * (m % 2) + i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u;
  }

  __device__ __forceinline__ void clear_hidden(Operand& rP, Operand& rdS, const QueryStep& step) const {
    for_each_hidden(step, [&](int m, int i) {
      clear_number(rP, m, i);
      clear_number(rdS, m, i);
    });
  }

  static __device__ __forceinline__ void pack_operand(Operand& a, const Scores& r) {
#pragma unroll
    for (int m = 0; m < Shape::m_blocks; ++m) {
      a[m / 2][2 * (m % 2)] = pack<Shape::Element>(r[0][m][0], r[0][m][1]);
      a[m / 2][2 * (m % 2) + 1] = pack<Shape::Element>(r[0][m][2], r[0][m][3]);
    }
  }

  // dS^T to shared memory, for dQ.
  __device__ __forceinline__ void store_scores(const Shape::ScoreRing::Position& ds_at, const Operand& rdS) const {
    shared.ds_ring.wait_empty(ds_at);
    const unsigned t = made_anew(thread), row = 64 * group + t / 32 * 16 + t % 16;
    const unsigned first = shared.ds(ds_at.stage) + Shape::Scores::chunk(row, t / 16 % 2);
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k)  // the swizzle makes of a column a constant to XOR
      stmatrix_x4((first ^ k % 4 << 5) + k / 4 * Shape::Scores::panel_bytes, rdS[k]);
  }

  // What this warp has stored.
  __device__ __forceinline__ void load_scores(const Shape::ScoreRing::Position& ds_at, Operand& r) const {
    const unsigned t = made_anew(thread), row = 64 * group + t / 32 * 16 + t % 16;
#pragma unroll
    for (int k = 0; k < Shape::tile_m / 16; ++k)
      ldmatrix_x4(r[k], shared.ds(ds_at.stage) + Shape::Scores::chunk(row, 2 * k + t / 16 % 2));
  }

  // dS^T of the step before to whoever makes dQ. Its stores have to be complete: better later.
  __device__ __forceinline__ void publish_scores(const Shape::ScoreRing::Position& ds_at) const {
    fence_async_proxy();
    __syncwarp();
    if (lane() == 0) shared.ds_ring.publish(ds_at);
  }

  // Whether some of the block's keys do not see a query of a step, or do not exist.
  __device__ __forceinline__ bool hides_any(const QueryStep& step) const {
    return needs_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, step.row_begin(), work.c.key_tile);
  }

  // Rows of dK or dV, times a factor.
  template <int Blocks>
  __device__ __forceinline__ void write(const float (&r)[1][Blocks][4], float factor, void* base, int64 batch,
                                        int64 row, int64 head, int dim) const {
    const int64 first = work.first_key();
    char* rows = static_cast<char*>(base) + work.c.batch * batch + work.c.head * head + first * row;
    store_rows<Shape::Element, Config::out_vector_bytes, Config::exact_dims>(
        r, [=](int) { return factor; }, rows, row, key(), p.seqlen_k - work.first_key(), dim, lane());
  }

  template <int Blocks>
  __device__ __forceinline__ void write_values(const float (&rdV)[1][Blocks][4]) const {
    write(rdV, 1.0f, p.dv, p.dv_batch, p.dv_row, p.dv_head, p.head_dim_v);
  }

  template <int Blocks>
  __device__ __forceinline__ void write_keys(const float (&rdK)[1][Blocks][4]) const {
    write(rdK, p.gradient_scale, p.dk, p.dk_batch, p.dk_row, p.dk_head, p.head_dim);
  }
};

}  // namespace cuflash
