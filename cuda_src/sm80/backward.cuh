// For sm80_backward.cu: the shape of a block, and the way from the two score products of a pair of tiles to its weights
// P, their gradients dS and dQ (FlashAttention-2, Dao 2023, section 3.2).
//
// The warps of a block form a grid for every product, rows of the result by its first number and columns by its second:
// (score_warps_m, score_warps_n) for S, dP and dQ, (warps_m, warps_n) for dK and dV. P and dS go through shared memory,
// since what is a column of the scores is a row of dK and dV. Where rows belong to one warp (score_warps_n = 1), its dS
// goes from one product to the next in registers, too: that is what dQ is made of.
#pragma once

#include "core/mask.cuh"
#include "core/nonfinite.cuh"
#include "core/score.cuh"
#include "core/seqlen.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "sm80/product.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

struct Shape {
  using Element = Config::element;
  static constexpr int tile_m = Config::tile_m, tile_n = Config::tile_n;
  static constexpr int tile_d = Config::tile_d, tile_dv = Config::tile_dv;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int warps_n = Config::warps_n, warps_m = Config::warps / warps_n;
  static constexpr int score_warps_n = Config::score_warps_n, score_warps_m = Config::warps / score_warps_n;
  static constexpr bool own_rows = score_warps_n == 1;         // whether a row of the scores belongs to one warp
  static constexpr int m_tiles = tile_m / score_warps_m / 16;  // 16-row fragments of a warp's part of S, dP and dQ
  static constexpr int n_tiles = tile_n / score_warps_n / 8;   // 8-column fragments of its part of S and dP
  static constexpr int d_tiles = tile_d / score_warps_n / 8;   // the same of dQ
  static constexpr int key_tiles = tile_n / warps_m / 16;      // 16-row fragments of its part of dK and dV
  static constexpr int q_bytes = 2 * tile_m * tile_d, dout_bytes = 2 * tile_m * tile_dv;
  static constexpr int k_bytes = 2 * tile_n * tile_d, v_bytes = 2 * tile_n * tile_dv;
  static constexpr int score_bytes = 2 * tile_m * tile_n;  // of P or dS
  // Passes of a tile copy at a time: more need more registers than the loops have, except where rows are not checked.
  static constexpr int load_unroll = Config::vector_bytes == 16 ? 4 : 1;
  static constexpr bool unchecked_loads = Config::vector_bytes == 16;  // whether it pays to have both kinds
  using QLoader = TileLoader<tile_m, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using DoutLoader = TileLoader<tile_m, tile_dv, threads, Config::vector_bytes, Config::exact_dims>;
  using KLoader = TileLoader<tile_n, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using VLoader = TileLoader<tile_n, tile_dv, threads, Config::vector_bytes, Config::exact_dims>;
  static_assert(m_tiles * 16 * score_warps_m == tile_m, "rows are blocks of 16");
  static_assert(n_tiles % 2 == 0 && d_tiles % 2 == 0 && tile_dv / warps_n % 16 == 0, "columns are blocks of 16");
};

using ScoreFragments = float[Shape::m_tiles][Shape::n_tiles][4];

// Where a warp works in a grid of warps. Made anew where it is needed: a few instructions cost less than registers
// held across the loop.
template <int WarpsN>
struct WarpCoordinate {
  int m, n, lane;

  __device__ __forceinline__ WarpCoordinate() {
    const int thread = rematerialized_thread();
    m = thread / 32 / WarpsN;
    n = thread / 32 % WarpsN;
    lane = thread % 32;
  }
};

using KeyWarp = WarpCoordinate<Shape::warps_n>;  // of dK and dV

struct ScoreWarp : WarpCoordinate<Shape::score_warps_n> {  // of S, dP and dQ
  __device__ __forceinline__ int query_row() const { return m * (Shape::tile_m / Shape::score_warps_m); }
  __device__ __forceinline__ int key() const { return n * (Shape::tile_n / Shape::score_warps_n); }
};

// Starts the copies of a tile's keys and values.
__device__ __forceinline__ void fetch_key_tile(const BackwardParams& p, int batch, int kv_head, int tile, unsigned sK,
                                               unsigned sV) {
  const int64 key = static_cast<int64>(tile) * Shape::tile_n;
  const int keys_left = p.seqlen_k - static_cast<int>(key);
  const char* gK = static_cast<const char*>(p.k) + batch * p.k_batch + kv_head * p.k_head + key * p.k_row;
  const char* gV = static_cast<const char*>(p.v) + batch * p.v_batch + kv_head * p.v_head + key * p.v_row;
  Shape::KLoader(rematerialized_thread(), p.head_dim).load<true, Shape::load_unroll>(sK, gK, p.k_row, keys_left);
  Shape::VLoader(rematerialized_thread(), p.head_dim_v).load<true, Shape::load_unroll>(sV, gV, p.v_row, keys_left);
}

// The same of its queries and of dO; CheckRows where it may reach past seqlen_q.
template <bool CheckRows>
__device__ __forceinline__ void fetch_query_tile(const BackwardParams& p, int batch, int head, int row_begin,
                                                 unsigned sQ, unsigned sdO) {
  constexpr int unroll = CheckRows ? Shape::load_unroll : Shape::tile_m;
  const int64 row = row_begin;
  const int rows_left = CheckRows ? p.seqlen_q - row_begin : 0;
  const char* gQ = static_cast<const char*>(p.q) + batch * p.q_batch + head * p.q_head + row * p.q_row;
  const char* gdO = static_cast<const char*>(p.dout) + batch * p.dout_batch + head * p.dout_head + row * p.dout_row;
  Shape::QLoader(rematerialized_thread(), p.head_dim).load<CheckRows, unroll>(sQ, gQ, p.q_row, rows_left);
  Shape::DoutLoader(rematerialized_thread(), p.head_dim_v).load<CheckRows, unroll>(sdO, gdO, p.dout_row, rows_left);
}

// Log-sum-exp and delta of the rows of a query tile: two vectors of tile_m float32 in shared memory.
struct RowStatistics {
  static constexpr int bytes = 2 * 4 * Shape::tile_m;
  unsigned at;

  // Copies those of rows [row_begin, seqlen_q) of a head; the others become 0.
  __device__ __forceinline__ void fetch(const BackwardParams& p, int batch, int head, int row_begin) const {
    const int row = rematerialized_thread();
    static_assert(Shape::tile_m <= Shape::threads, "a thread for each row");
    if (row >= Shape::tile_m) return;
    const int64 head_index = static_cast<int64>(batch) * p.heads_q + head;
    const int valid = row_begin + row < p.seqlen_q ? 4 : 0;
    const float* lse = p.lse + head_index * p.seqlen_q + (valid ? row_begin + row : 0);
    cp_async<4>(at + 4 * row, lse, valid);
    cp_async<4>(at + 4 * (Shape::tile_m + row), p.delta + head_index * p.padded_rows + row_begin + row);
  }

  __device__ __forceinline__ float lse(int row) const { return load_shared_float(at + 4 * row); }

  __device__ __forceinline__ float delta(int row) const { return load_shared_float(at + 4 * (Shape::tile_m + row)); }
};

// rS = A B^T of a tile with the queries' rows and one with the keys' rows: Q K^T or dO V^T.
template <int Dim>
__device__ __forceinline__ void score_product(ScoreFragments& rS, unsigned sQueries, unsigned sKeys) {
  const ScoreWarp w;
  constexpr int row_bytes = TileLayout<Dim>::row_bytes;
  product_nt<Shape::Element, Config::rolled_spans>(
      rS, FragmentAddress<Dim>::rows_first(sQueries + w.query_row() * row_bytes, w.lane),
      FragmentAddress<Dim>::columns_first(sKeys + w.key() * row_bytes, w.lane));
}

// rS from q.k to P = exp2(staged score - lse), and rdP to dS = P * (dP - delta) * slope of the score stage. Says
// whether this thread has a weightless row, whose P is 0 and whose dS is 0 or NaN.
__device__ __forceinline__ bool differentiate_softmax(ScoreFragments& rS, ScoreFragments& rdP,
                                                      const RowStatistics& rows, const BackwardParams& p) {
  constexpr float log2_e = 1.44269504088896341f;
  const ScoreWarp w;
  bool any_weightless = false;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m) {
    float lse2[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = w.query_row() + 16 * m + 8 * half + w.lane / 4;
      const float lse = rows.lse(row);
      any_weightless |= weightless(lse);
      lse2[half] = weightless(lse) ? -lse : lse * log2_e;
      delta[half] = rows.delta(row);
    }
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; ++n) {
      float slope[4];
      Config::score::apply(rS[m][n], slope, p);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = exp2_approx(fmaf(rS[m][n][i], p.exp2_scale, -lse2[i / 2]));
        rS[m][n][i] = weight;
        rdP[m][n][i] = weight * (rdP[m][n][i] - delta[i / 2]) * slope[i];
      }
    }
  }
  return any_weightless;
}

// P and dS of this thread's weightless rows become 0, whatever they were.
__device__ __forceinline__ void clear_weightless(ScoreFragments& rP, ScoreFragments& rdS, const RowStatistics& rows) {
  const ScoreWarp w;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (weightless(rows.lse(w.query_row() + 16 * m + 8 * half + w.lane / 4)))
#pragma unroll
        for (int i = 0; i < 2 * Shape::n_tiles; ++i) {
          rP[m][i / 2][2 * half + i % 2] = 0.0f;
          rdS[m][i / 2][2 * half + i % 2] = 0.0f;
        }
}

// Whether a pair of tiles holds a pair of row and key that do not see each other, or that are not there.
__device__ __forceinline__ bool needs_mask(const BackwardParams& p, int row_begin, int key_tile) {
  return row_begin + Shape::tile_m > p.seqlen_q ||
         needs_mask<Config::has_band, Shape::tile_m, Shape::tile_n>(p, row_begin, key_tile);
}

// P and dS of hidden pairs become 0, whatever they were.
__device__ __forceinline__ void clear_hidden(ScoreFragments& rP, ScoreFragments& rdS, const BackwardParams& p,
                                             int row_begin, int first_key) {
  const ScoreWarp w;
  for_each_hidden<Config::has_band, true, Shape::m_tiles, Shape::n_tiles>(
      ScoreBand::of_queries(p), row_begin + w.query_row() + w.lane / 4, first_key + w.key() + 2 * (w.lane % 4),
      [&](int m, int n, int i) {
        rP[m][n][i] = 0.0f;
        rdS[m][n][i] = 0.0f;
      });
}

// Whether all of a fragment is finite. That of Q K^T is only if all of Q and K in its rows is: even 0 times inf is NaN.
__device__ __forceinline__ bool all_finite(const ScoreFragments& r) {
  float zero = 0.0f;
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) zero = fmaf(r[m][n][i], 0.0f, zero);
  return zero == 0.0f;
}

// A warp's fragments, rounded, to a tile in shared memory whose rows and 8-column chunks row(m, half) and chunk(n)
// name.
template <int Dim, int MTiles, int NTiles, class Row, class Chunk>
__device__ __forceinline__ void store_fragments(unsigned sTile, const float (&r)[MTiles][NTiles][4], Row&& row,
                                                Chunk&& chunk) {
  const int lane = rematerialized_thread() % 32;
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        const unsigned target = sTile + TileLayout<Dim>::offset(row(m, half) + lane / 4, chunk(n)) + 4 * (lane % 4);
        store_shared(target, pack<Shape::Element>(r[m][n][2 * half], r[m][n][2 * half + 1]));
      }
}

// Where a lane's pairs of P or dS go in a tile (tile_m, tile_n): columns by XOR, rows by an offset that is a constant.
struct ScoreAddress {
  using Layout = TileLayout<Shape::tile_n>;
  static_assert(Shape::n_tiles <= 8 && 8 % Shape::n_tiles == 0, "a warp's columns are a part of one span");
  unsigned origin;

  __device__ __forceinline__ explicit ScoreAddress(unsigned sScores) {
    const ScoreWarp w;
    origin = sScores + Layout::offset(w.query_row() + w.lane / 4, w.key() / 8) + 4 * (w.lane % 4);
  }

  __device__ __forceinline__ unsigned pair(int m, int half, int n) const {
    return (origin ^ (n << 4)) + (16 * m + 8 * half) * Layout::row_bytes;
  }
};

// P or dS, rounded, to the tile that lies `offset` bytes behind that of the address.
__device__ __forceinline__ void store_scores(const ScoreAddress& address, int offset, const ScoreFragments& r) {
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < Shape::n_tiles; ++n)
        store_shared(address.pair(m, half, n) + offset, pack<Shape::Element>(r[m][n][2 * half], r[m][n][2 * half + 1]));
}

// A warp's rows of dS as the A operand of dQ = dS K, by blocks of 16 keys. Few keys are held in registers, from those
// that computed them or from shared memory; many are loaded as they are needed.
struct GradientOperand {
  static constexpr int blocks = Shape::tile_n / 16;
  static constexpr bool held = blocks <= 4;
  unsigned r[held ? blocks : 1][Shape::m_tiles][4];
  FragmentAddress<Shape::tile_n> at;

  static __device__ __forceinline__ GradientOperand of_registers(const ScoreFragments& rdS) {
    GradientOperand a;
#pragma unroll
    for (int k = 0; k < (held ? blocks : 0); ++k) pack_operand<Shape::Element>(a.r[k], rdS, k);
    return a;
  }

  static __device__ __forceinline__ GradientOperand of_tile(unsigned sdS) {
    const ScoreWarp w;
    GradientOperand a;
    a.at =
        FragmentAddress<Shape::tile_n>::rows_first(sdS + w.query_row() * TileLayout<Shape::tile_n>::row_bytes, w.lane);
#pragma unroll
    for (int k = 0; k < (held ? blocks : 0); ++k) load_operand<1>(a.r[k], a.at, k);
    return a;
  }

  __device__ __forceinline__ void get(unsigned (&rA)[Shape::m_tiles][4], int k) const {
    if constexpr (held) {
#pragma unroll
      for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) rA[m][i] = r[k][m][i];
    } else {
      load_operand<1>(rA, at, k);
    }
  }
};

// Fragments of dQ that are made at a time. What they are used for goes on beside the products of the next; where the
// operand is not held there are no next.
constexpr int kGradientColumns = GradientOperand::held ? 2 : Shape::d_tiles;
using GradientColumns = float[Shape::m_tiles][kGradientColumns][4];

// dQ = dS K by columns: use(d, fragments d and on). FiniteOnly: K's inf and NaN count as 0. The loop stays rolled:
// ptxas would gather what the columns are used for behind the last product.
template <bool FiniteOnly, class Use>
__device__ __forceinline__ void query_gradient_columns(const GradientOperand& rdS, unsigned sK, Use&& use) {
  const ScoreWarp w;
  const auto keys = FragmentAddress<Shape::tile_d>::rows_first(sK, w.lane).template part<Shape::score_warps_n>(w.n);
#pragma unroll 1
  for (int d = 0; d < Shape::d_tiles; d += kGradientColumns) {
    GradientColumns r = {};
#pragma unroll
    for (int k = 0; k < GradientOperand::blocks; ++k) {
      unsigned rA[Shape::m_tiles][4];
      rdS.get(rA, k);
      multiply_by_rows<Shape::Element, Shape::score_warps_n, FiniteOnly>(r, rA, keys, k, d);
    }
    use(d, r);
  }
}

// Inf and NaN under a mask: a pair of tiles that needs a mask and holds one multiplies with FiniteOnly, so that what
// sees none keeps its bits, and adds the rest by add_visible_nonfinite.

// The number of P or dS at (row, key).
__device__ __forceinline__ float load_score(unsigned sScores, int row, int key) {
  const unsigned pair = load_pair<Shape::tile_n>(sScores, row, key & ~1);
  return unpack<Shape::Element>(static_cast<unsigned short>(key & 1 ? pair >> 16 : pair));
}

// What the inf and NaN in K that a row sees add to columns d and on of dQ.
__device__ __forceinline__ void add_nonfinite_keys(GradientColumns& r, int d, unsigned sdS, unsigned sK,
                                                   const BackwardParams& p, int row_begin, int first_key) {
  const ScoreWarp w;
  const auto row = [&](int m, int half) { return w.query_row() + 16 * m + 8 * half + w.lane / 4; };
  add_visible_nonfinite<Shape::Element, Shape::tile_n>(
      r,
      [&](int k, int m, int half) {
        return VisibleKeys::of_row<Config::has_band>(p, row_begin + row(m, half)).contains(first_key + k);
      },
      [&](int k, int m, int half) { return load_score(sdS, row(m, half), k); },
      [&](int k, int n) {
        const int chunk = TileLayout<Shape::tile_d>::part_chunk<Shape::score_warps_n>(w.n, d + n);
        return load_pair<Shape::tile_d>(sK, k, 8 * chunk + 2 * (w.lane % 4));
      });
}

}  // namespace cuflash
