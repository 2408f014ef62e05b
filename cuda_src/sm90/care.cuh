// For the sm90 backward kernels: inf and NaN where some see them and others do not, and rows without weight, which add
// nothing to any gradient whatever their queries and dO hold. All of it is off the usual path.
//
// Keys: behind a mask a block looks for them once, beside its first products. It then replaces the inf and NaN of K in
// shared memory by 0, marks the keys, and makes what they do to scores and to dQ element by element. Queries and dO:
// the kernel before has marked where rows hold any, or have no weight. The steps of a block that meets marked rows look
// for them, add what they do to the dK and dV that see them, and clear them.
#pragma once

#include "core/dq_sum.cuh"
#include "core/nonfinite.cuh"
#include "ptx/named_barrier.cuh"
#include "sm90/key_rows.cuh"

namespace cuflash {

// Named barriers from here on: of all consumers, of each of them, and of the inspectors, which are warps that only
// feed.
enum { consumers_barrier = 8, consumer_barrier, inspectors_barrier = consumer_barrier + Shape::warpgroups };
constexpr int kInspectors = 96;  // threads

// Whether this thread, of `threads`, finds an inf or NaN in its part of a tile.
template <int Bytes>
__device__ __forceinline__ bool finds_nonfinite(unsigned sTile, unsigned thread, int threads) {
  unsigned sum = 0;
#pragma unroll 2
  for (int at = 16 * thread; at < Bytes; at += 16 * threads)
    sum = add_zero_times_chunk<Shape::Element>(sTile + at, sum);
  return any_nonfinite<Shape::Element>(sum);
}

template <int Bytes>
__device__ __forceinline__ void clear_nonfinite(unsigned sTile, unsigned thread, int threads) {
#pragma unroll 1
  for (int at = 16 * thread; at < Bytes; at += 16 * threads) clear_nonfinite_chunk<Shape::Element>(sTile + at);
}

// A number of the keys as the caller has them.
__device__ __forceinline__ float load_key(const BackwardParams& p, const Work& work, int key, int column) {
  const int64 row = work.first_key() + key;
  const char* rows = static_cast<const char*>(p.k) + work.c.batch * p.k_batch + work.c.head * p.k_head + row * p.k_row;
  return unpack<Shape::Element>(*reinterpret_cast<const unsigned short*>(rows + 2 * column));
}

// The same if it is inf or NaN, else 0.
__device__ __forceinline__ float load_nonfinite(const BackwardParams& p, const Work& work, int key, int column) {
  const float value = load_key(p, work, key, column);
  return is_finite(value) ? 0.0f : value;
}

// One of the eight numbers of a chunk in shared memory.
__device__ __forceinline__ float load_number(unsigned chunk, int i) {
  const unsigned pair = load_shared(chunk + 2 * (i & ~1));
  return i % 2 ? unpack<Shape::Element>(static_cast<unsigned short>(pair >> 16))
               : unpack<Shape::Element>(static_cast<unsigned short>(pair));
}

// By all inspectors, as long as K is on its way: whether the block meets marked rows.
__device__ __forceinline__ bool meets_marked_rows(const BackwardParams& p, const Work& work, unsigned thread) {
  const int rows = Shape::tile_m / kMarkedRows;  // words of a query tile
  const int first = work.tiles.first * rows, last = min(work.tiles.last * rows, p.padded_rows / kMarkedRows);
  unsigned any = 0;
#pragma unroll 1
  for (int head = work.first(p).head; head < work.end_head; ++head) {
    const int64 at = (static_cast<int64>(work.c.batch) * p.heads_q + head) * (p.padded_rows / kMarkedRows);
#pragma unroll 1
    for (int i = first + thread; i < last; i += kInspectors) any |= p.marked_rows[at + i];
  }
  return named_barrier_or<kInspectors>(inspectors_barrier, any != 0);
}

// By all inspectors: marks and clears keys with inf or NaN. Says whether there are any. Scores of marked keys are put
// right whatever they were made of, so that products with K need not wait; those for dQ do.
__device__ __forceinline__ bool inspect_keys(const BackwardParams& p, const Shared& shared, const Work& work,
                                             unsigned thread) {
  if constexpr (!Config::has_band) return false;
  const bool found = named_barrier_or<kInspectors>(inspectors_barrier,
                                                   finds_nonfinite<Shape::K::bytes>(shared.k(), thread, kInspectors));
  if (!found) return false;
#pragma unroll 1
  for (int key = thread; key < Shape::tile_n; key += kInspectors) {
    bool bad = false;
    for (int column = 0; column < Shape::tile_d; column += 8)
      bad |= any_nonfinite<Shape::Element>(
          add_zero_times_chunk<Shape::Element>(shared.k() + Shape::K::chunk(key, column / 8), 0));
    store_shared(shared.mark(key), static_cast<unsigned>(bad));
  }
  named_barrier_sync<kInspectors>(inspectors_barrier);
  clear_nonfinite<Shape::K::bytes>(shared.k(), thread, kInspectors);
  fence_async_proxy();
  named_barrier_sync<kInspectors>(inspectors_barrier);
  return true;
}

// Why a block needs care: some of its keys, or of the rows that it meets, hold inf or NaN.
enum { kKeysMarked = 1, kRowsMarked = 2 };

// By all inspectors, beside the first products: lets the others know what care the block needs.
__device__ __forceinline__ void inspect(const BackwardParams& p, const Shared& shared, const Work& work,
                                        unsigned thread) {
  const int rows = meets_marked_rows(p, work, thread) ? kRowsMarked : 0;
  shared.k_full.wait_full({});
  const int keys = inspect_keys(p, shared, work, thread) ? kKeysMarked : 0;
  if (thread == 0) shared.publish_care(rows | keys);
}

// What marked keys add to this thread's scores, which the product with the cleared ones made.
__device__ __forceinline__ void repair_scores(const KeyRows& r, KeyRows::Scores& rS, unsigned sQ) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = r.key() + 8 * half;
    if (load_shared(r.shared.mark(key)) == 0) continue;
#pragma unroll 1
    for (int column = 0; column < r.p.head_dim; ++column) {
      const float value = load_nonfinite(r.p, r.work, key, column);
      if (value == 0.0f) continue;
#pragma unroll
      for (int m = 0; m < Shape::m_blocks; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = 8 * m + 2 * (r.lane() % 4) + i;
          const float number = load_number(sQ + Shape::Q::chunk(made_anew(query), column / 8), column % 8);
          rS[0][m][2 * half + i] = fmaf(number, value, rS[0][m][2 * half + i]);
        }
    }
  }
}

// The sum of x(column) * y(column), or a NaN as soon as it is one.
template <class X, class Y>
__device__ __forceinline__ float dot(int columns, X&& x, Y&& y) {
  float sum = 0.0f;
#pragma unroll 1
  for (int column = 0; column < columns && sum == sum; ++column) sum = fmaf(x(column), y(column), sum);
  return sum;
}

// What a marked key has in P^T, or in dS^T, for a query that sees it.
template <bool Gradient>
__device__ __forceinline__ float weigh_marked_key(const KeyRows& r, int key, int query, int stage) {
  const unsigned sQ = r.shared.q(stage), sdO = r.shared.dout(stage), sV = r.shared.v();
  float s[4] = {}, slope[4];
  s[0] = dot(
      r.p.head_dim, [&](int column) { return load_key(r.p, r.work, key, column); },
      [&](int column) { return load_number(sQ + Shape::Q::chunk(query, column / 8), column % 8); });
  Config::score::apply(s, slope, r.p);
  const float weight = exp2_approx(fmaf(s[0], r.p.exp2_scale, -load_shared_float(r.shared.shift(stage) + 4 * query)));
  if constexpr (!Gradient) return weight;
  const float gradient = dot(
      r.p.head_dim_v, [&](int column) { return load_number(sV + Shape::V::chunk(key, column / 8), column % 8); },
      [&](int column) { return load_number(sdO + Shape::Dout::chunk(query, column / 8), column % 8); });
  return weight * (gradient - load_shared_float(r.shared.delta(stage) + 4 * query)) * slope[0];
}

// P^T or dS^T of this thread's marked keys in shared memory, where the products with cleared keys have made something
// else of them.
template <bool Gradient>
__device__ __forceinline__ void weigh_marked_keys(const KeyRows& r, unsigned sScores, int stage, int row_begin) {
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int key = r.key() + 8 * half;
    if (load_shared(r.shared.mark(key)) == 0) continue;
#pragma unroll 1
    for (int m = 0; m < Shape::m_blocks; ++m) {
      float value[2];
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int query = 8 * m + 2 * (r.lane() % 4) + i, row = row_begin + query;
        const bool sees =
            row < r.p.seqlen_q && VisibleKeys::of_row<Config::has_band>(r.p, row).contains(r.work.first_key() + key);
        const float number = sees ? weigh_marked_key<Gradient>(r, key, query, stage) : 0.0f;
        (i ? value[1] : value[0]) = number;
      }
      store_shared(sScores + Shape::Scores::chunk(key, m) + 4 * (r.lane() % 4),
                   pack<Shape::Element>(value[0], value[1]));
    }
  }
}

// The number at (key, query) of a tile of P^T or dS^T.
__device__ __forceinline__ float load_transposed_score(unsigned sScores, int key, int query) {
  return load_number(sScores + Shape::Scores::chunk(key, query / 8), query % 8);
}

// What marked keys add to the sums of dQ at the rows that see them; by 128 threads, columns [first, last). Each
// addition is an inf or NaN, so that their order is open even where that of others is not.
template <class Sum>
__device__ __forceinline__ void add_marked_keys(const Sum& sum, const BackwardParams& p, const Shared& shared,
                                                const Work& work, unsigned sdS, int row_begin, int first, int last,
                                                unsigned thread) {
#pragma unroll 1
  for (int key = 0; key < Shape::tile_n; ++key) {
    if (load_shared(shared.mark(key)) == 0) continue;
#pragma unroll 1
    for (int column = first + thread; column < min(last, p.head_dim); column += 128) {
      const float value = load_nonfinite(p, work, key, column);
      if (value == 0.0f) continue;
#pragma unroll 1
      for (int row = 0; row < min(Shape::tile_m, p.seqlen_q - row_begin); ++row) {
        if (!VisibleKeys::of_row<Config::has_band>(p, row_begin + row).contains(work.first_key() + key)) continue;
        const float product[1] = {load_transposed_score(sdS, key, row) * value};
        reduce_add<1>(sum.number(row, column), product);
      }
    }
  }
}

// Whether all of a fragment is finite.
__device__ __forceinline__ bool all_finite(const KeyRows::Scores& r) {
  float zero = 0.0f;
#pragma unroll
  for (int m = 0; m < Shape::m_blocks; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) zero = fmaf(r[0][m][i], 0.0f, zero);
  return zero == 0.0f;
}

__device__ __forceinline__ bool is_weightless(const Shared& shared, int stage, int query) {
  return load_shared_float(shared.shift(stage) + 4 * query) == -negative_infinity();
}

// P^T or dS^T of weightless rows becomes 0, whatever it was.
__device__ __forceinline__ void clear_weightless(const KeyRows& r, KeyRows::Scores& scores, int stage) {
#pragma unroll
  for (int m = 0; m < Shape::m_blocks; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (is_weightless(r.shared, stage, 8 * m + 2 * (r.lane() % 4) + i)) scores[0][m][i] = scores[0][m][2 + i] = 0.0f;
}

// The same, rounded.
__device__ __forceinline__ void clear_weightless(const KeyRows& r, KeyRows::Operand& scores, int stage) {
#pragma unroll
  for (int m = 0; m < Shape::m_blocks; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (is_weightless(r.shared, stage, 8 * m + 2 * (r.lane() % 4) + i)) {
        KeyRows::clear_number(scores, m, i);
        KeyRows::clear_number(scores, m, 2 + i);
      }
}

// acc += S^T X over the inf and NaN of X (queries or dO) that this thread's keys see; score(half, query) is a number of
// S^T.
template <class Queries, int Blocks, class Score>
__device__ __forceinline__ void add_nonfinite_queries(const KeyRows& r, float (&acc)[1][Blocks][4], unsigned sX,
                                                      int stage, int row_begin, Score&& score) {
  add_visible_nonfinite<Shape::Element, Shape::tile_m>(
      acc,
      [&](int k, int, int half) {
        const int key = r.work.first_key() + r.key() + 8 * half;
        return row_begin + k < r.p.seqlen_q && !is_weightless(r.shared, stage, k) &&
               VisibleKeys::of_row<Config::has_band>(r.p, row_begin + k).contains(key);
      },
      [&](int k, int, int half) { return score(half, k); },
      [&](int k, int n) { return load_shared(sX + Queries::chunk(made_anew(k), n) + 4 * (r.lane() % 4)); });
}

// Clears a tile that all have read, for the products of the warpgroup, which meets at a barrier.
template <int Bytes>
__device__ __forceinline__ void clear_for_products(const KeyRows& r, unsigned sTile, int barrier) {
  clear_nonfinite<Bytes>(sTile, r.thread, 128);
  fence_async_proxy();
  named_barrier_sync<128>(barrier);
}

}  // namespace cuflash
