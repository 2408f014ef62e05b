// FlashAttention-2 forward on mma.sync with cp.async multistage K/V tiles, for compute capability 8.0 and up.
//
// One block computes tile_m query rows of one head; each warp owns tile_m / warps of them, so softmax never leaves a warp. It
// walks the key tiles from the last to the first: the tile that may be cut off by seqlen_k comes first, in the prologue.
#include "core/epilogue.cuh"
#include "core/mask.cuh"
#include "core/params.cuh"
#include "core/scheduler.cuh"
#include "core/score.cuh"
#include "core/seqlen.cuh"
#include "core/softmax.cuh"
#include "ptx/mma.cuh"
#include "sm80/nonfinite.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

struct Shape {
  using Element = Config::element;
  static constexpr int tile_m = Config::tile_m, tile_n = Config::tile_n;
  static constexpr int tile_d = Config::tile_d, tile_dv = Config::tile_dv;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int warp_rows = tile_m / Config::warps;
  static constexpr int m_tiles = warp_rows / 16;  // 16-row fragments of a warp
  static constexpr int n_tiles = tile_n / 8;      // 8-column fragments of S
  static constexpr int d_tiles = tile_dv / 8;     // 8-column fragments of O
  static constexpr int q_bytes = 2 * tile_m * tile_d;
  static constexpr int k_bytes = 2 * tile_n * tile_d;
  static constexpr int v_bytes = 2 * tile_n * tile_dv;
  using QLoader = TileLoader<tile_m, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using KLoader = TileLoader<tile_n, tile_d, threads, Config::vector_bytes, Config::exact_dims>;
  using VLoader = TileLoader<tile_n, tile_dv, threads, Config::vector_bytes, Config::exact_dims>;
  static_assert(warp_rows % 16 == 0 && tile_n % 16 == 0, "tiles are made of 16 x 16 blocks");
};

// The ring of K and V tiles: tile j lives in stage (last - 1 - j) % stages.
struct KeyValueRing {
  unsigned sK, sV;  // (stages, tile_n, tile_d), (stages, tile_n, tile_dv)
  const char *gK, *gV;
  int64 k_row, v_row;
  Shape::KLoader k_loader;
  Shape::VLoader v_loader;
  int write_stage = 0, read_stage = 0;

  __device__ __forceinline__ KeyValueRing(const ForwardParams& p, const TileCoordinate& c, unsigned shared, int thread)
      : k_loader(thread, p.head_dim), v_loader(thread, p.head_dim_v) {
    sK = shared;
    sV = shared + Config::stages * Shape::k_bytes;
    const int kv_head = c.head / p.group;
    gK = static_cast<const char*>(p.k) + c.batch * p.k_batch + kv_head * p.k_head;
    gV = static_cast<const char*>(p.v) + c.batch * p.v_batch + kv_head * p.v_head;
    k_row = p.k_row;
    v_row = p.v_row;
  }

  // Starts the copy of one tile; CheckRows when it may reach past seqlen_k.
  template <bool CheckRows>
  __device__ __forceinline__ void fetch(int tile, int seqlen_k) {
    const int64 key = static_cast<int64>(tile) * Shape::tile_n;
    const int rows_left = CheckRows ? seqlen_k - static_cast<int>(key) : 0;
    k_loader.load<CheckRows>(sK + write_stage * Shape::k_bytes, gK + key * k_row, k_row, rows_left);
    v_loader.load<CheckRows>(sV + write_stage * Shape::v_bytes, gV + key * v_row, v_row, rows_left);
    write_stage = write_stage + 1 == Config::stages ? 0 : write_stage + 1;
  }

  // Once the block has entered `tile`, the stage of the tile before it is free for the one stages - 1 further on.
  __device__ __forceinline__ void fetch_ahead(int tile, int first) {
    if (tile - (Config::stages - 1) >= first) fetch<false>(tile - (Config::stages - 1), 0);
    cp_async_commit();
  }

  __device__ __forceinline__ unsigned k_tile() const { return sK + read_stage * Shape::k_bytes; }
  __device__ __forceinline__ unsigned v_tile() const { return sV + read_stage * Shape::v_bytes; }
  __device__ __forceinline__ void release() { read_stage = read_stage + 1 == Config::stages ? 0 : read_stage + 1; }
};

// The query fragments of a warp, kept in registers or read again for every key tile.
struct QueryFragments {
  static constexpr int k_blocks = Shape::tile_d / 16;
  FragmentAddress<Shape::tile_d> address;
  unsigned rQ[Config::q_in_registers ? k_blocks : 1][Shape::m_tiles][4];

  __device__ __forceinline__ void load_once() {
    if constexpr (Config::q_in_registers) {
#pragma unroll
      for (int k = 0; k < k_blocks; ++k)
#pragma unroll
        for (int m = 0; m < Shape::m_tiles; ++m) ldmatrix_x4(rQ[k][m], address.block(m, k));
    }
  }

  __device__ __forceinline__ const unsigned (&get(int k, int m))[4] {
    if constexpr (Config::q_in_registers) {
      return rQ[k][m];
    } else {
      ldmatrix_x4(rQ[0][m], address.block(m, k));
      return rQ[0][m];
    }
  }
};

// rS (warp_rows, tile_n) = Q K^T
__device__ __forceinline__ void query_key(float (&rS)[Shape::m_tiles][Shape::n_tiles][4], QueryFragments& query, unsigned sK, int lane) {
  const auto key = FragmentAddress<Shape::tile_d>::columns_first(sK, lane);
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) rS[m][n][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < QueryFragments::k_blocks; ++k) {
    unsigned rA[Shape::m_tiles][4];
#pragma unroll
    for (int m = 0; m < Shape::m_tiles; ++m) {
      const auto& fragment = query.get(k, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) rA[m][i] = fragment[i];
    }
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; n += 2) {
      unsigned rK[4];
      ldmatrix_x4(rK, key.block(n / 2, k));
#pragma unroll
      for (int m = 0; m < Shape::m_tiles; ++m) {
        mma_m16n8k16<Shape::Element>(rS[m][n], rA[m], rK[0], rK[1]);
        mma_m16n8k16<Shape::Element>(rS[m][n + 1], rA[m], rK[2], rK[3]);
      }
    }
  }
}

// rO (warp_rows, tile_dv) += P V, with P rounded to the element type in the layout that mma leaves scores in.
__device__ __forceinline__ void weight_value(float (&rO)[Shape::m_tiles][Shape::d_tiles][4],
                                             const unsigned (&rP)[Shape::m_tiles][Shape::n_tiles / 2][4], unsigned sV, int lane) {
  const auto value = FragmentAddress<Shape::tile_dv>::rows_first(sV, lane);
#pragma unroll
  for (int n = 0; n < Shape::n_tiles / 2; ++n) {
#pragma unroll
    for (int d = 0; d < Shape::d_tiles; d += 2) {
      unsigned rV[4];
      ldmatrix_x4_trans(rV, value.block(n, d / 2));
#pragma unroll
      for (int m = 0; m < Shape::m_tiles; ++m) {
        mma_m16n8k16<Shape::Element>(rO[m][d], rP[m][n], rV[0], rV[1]);
        mma_m16n8k16<Shape::Element>(rO[m][d + 1], rP[m][n], rV[2], rV[3]);
      }
    }
  }
}

__device__ __forceinline__ void pack_weights(unsigned (&rP)[Shape::m_tiles][Shape::n_tiles / 2][4],
                                             const float (&rS)[Shape::m_tiles][Shape::n_tiles][4]) {
#pragma unroll
  for (int m = 0; m < Shape::m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; ++n) {
      rP[m][n / 2][2 * (n % 2)] = pack<Shape::Element>(rS[m][n][0], rS[m][n][1]);
      rP[m][n / 2][2 * (n % 2) + 1] = pack<Shape::Element>(rS[m][n][2], rS[m][n][3]);
    }
}

// Publishes the oldest tile of the ring to the block. With a band it also says whether a tile that needs a mask holds
// values that a weight of 0 would not silence.
__device__ __forceinline__ bool acquire(const KeyValueRing& ring, bool masked) {
  cp_async_wait<Config::stages - 2>();
  if constexpr (Config::has_band) {
    if (masked) return __syncthreads_or(has_nonfinite<Shape::Element>(ring.v_loader, ring.v_tile()));
  }
  __syncthreads();
  return false;
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(32 * Config::warps, Config::blocks_per_sm)
    sm80_forward(const __grid_constant__ cuflash::ForwardParams p) {
  using namespace cuflash;
  extern __shared__ __align__(128) char shared[];
  const unsigned sQ = shared_address(shared);  // (tile_m, tile_d), followed by the ring
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * Shape::warp_rows;

  const TileCoordinate c = TileCoordinate::of_block<Config::has_band>(p);
  const int row_begin = c.query_tile * Shape::tile_m;
  const int rows_left = p.seqlen_q - row_begin;
  const KeyTiles tiles = KeyTiles::make<Config::has_band, Shape::tile_n>(p, row_begin, row_begin + min(rows_left, Shape::tile_m));

  KeyValueRing ring(p, c, sQ + Shape::q_bytes, thread);
  const char* gQ = static_cast<const char*>(p.q) + c.batch * p.q_batch + c.head * p.q_head + row_begin * p.q_row;
  Shape::QLoader(thread, p.head_dim).load<true>(sQ, gQ, p.q_row, rows_left);
#pragma unroll
  for (int stage = 0; stage < Config::stages - 1; ++stage) {
    if (tiles.last - 1 - stage >= tiles.first) ring.fetch<true>(tiles.last - 1 - stage, p.seqlen_k);
    cp_async_commit();
  }

  QueryFragments query{FragmentAddress<Shape::tile_d>::rows_first(sQ, lane)};
  query.address.origin += warp_row * TileLayout<Shape::tile_d>::row_bytes;
  if constexpr (Config::q_in_registers) {
    cp_async_wait<Config::stages - 2>();
    __syncthreads();
    query.load_once();
  }

  OnlineSoftmax<Shape::m_tiles> softmax;
  softmax.init();
  float rO[Shape::m_tiles][Shape::d_tiles][4] = {};

  for (int tile = tiles.last - 1; tile >= tiles.first; --tile) {
    const bool masked = tiles.needs_mask(tile);
    const bool nonfinite = acquire(ring, masked);
    if constexpr (!Config::late_fetch) ring.fetch_ahead(tile, tiles.first);
    float rS[Shape::m_tiles][Shape::n_tiles][4];
    query_key(rS, query, ring.k_tile(), lane);
    if constexpr (Config::late_fetch) ring.fetch_ahead(tile, tiles.first);
    stage_scores<Config::score>(rS, p);
    const int row = row_begin + warp_row + lane / 4;
    if (masked) mask_scores<Config::has_band>(rS, p, row, tile * Shape::tile_n + 2 * (lane % 4));

    float tile_max[Shape::m_tiles][2], factor[Shape::m_tiles][2];
    tile_row_max(rS, tile_max);
    if (softmax.update_max(tile_max, factor, p.exp2_scale)) rescale(rO, factor);
    softmax.exponentiate(rS, p.exp2_scale);
    unsigned rP[Shape::m_tiles][Shape::n_tiles / 2][4];
    pack_weights(rP, rS);
    if (Config::has_band && nonfinite) {
      add_nonfinite_values<Config::has_band, Shape::Element, Shape::tile_dv, Shape::tile_n>(
          rO, ring.v_tile(), p, row, tile * Shape::tile_n, 0, lane);
      __syncthreads();
      clear_nonfinite<Shape::Element>(ring.v_loader, ring.v_tile());
      __syncthreads();
    }
    weight_value(rO, rP, ring.v_tile(), lane);
    ring.release();
  }

  softmax.finish();
  cp_async_wait<0>();
  __syncthreads();  // every warp is done with shared memory, which now takes O
  stage_output<Shape::Element, Shape::tile_dv>(sQ, rO, softmax, warp_row, 0, lane);
  __syncwarp();
  char* gO = static_cast<char*>(p.out) + c.batch * p.out_batch + c.head * p.out_head + row_begin * p.out_row;
  store_output<Shape::tile_dv, Shape::warp_rows, Config::out_vector_bytes, Config::exact_dims>(sQ, gO, p.out_row, warp_row, rows_left,
                                                                                               p.head_dim_v, lane);
  float* gLse = p.lse ? p.lse + (static_cast<int64>(c.batch) * p.heads_q + c.head) * p.seqlen_q + row_begin : nullptr;
  store_lse(gLse, softmax, p.exp2_scale, warp_row, rows_left, lane);
}
