// The arguments of the kernels. Mirrored field by field by cuflash/launch.py, which checks the sizes.
#pragma once

#include "core/types.cuh"

namespace cuflash {

struct ForwardParams {
  const void* q;  // (batch, seqlen_q, heads_q, head_dim); each last axis is contiguous
  const void* k;  // (batch, seqlen_k, heads_kv, head_dim)
  const void* v;  // (batch, seqlen_k, heads_kv, head_dim_v)
  void* out;      // (batch, seqlen_q, heads_q, head_dim_v)
  float* lse;     // (batch, heads_q, seqlen_q), contiguous, or null
  // Strides in bytes.
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;
  int64 v_batch, v_row, v_head;
  int64 out_batch, out_row, out_head;
  int seqlen_q, seqlen_k;
  int heads_q, group;  // group = query heads per key/value head
  int head_dim, head_dim_v;
  int diag_lower, diag_upper;  // query i sees key j when diag_lower <= j - i <= diag_upper
  int query_tiles;             // tiles along seqlen_q
  float score_scale;           // what the score stage multiplies q.k with
  float softcap;
  float exp2_scale;  // what turns a staged score into a base-2 exponent
};

constexpr int kMarkedRows = 64;  // for which BackwardParams::marked_rows has a word

// The argument of every backward kernel: the forward problem, whose out and lse are inputs now, and its gradients.
struct BackwardParams : ForwardParams {
  const void* dout;       // (batch, seqlen_q, heads_q, head_dim_v); each last axis is contiguous
  const float* dlse;      // (batch, heads_q, seqlen_q), contiguous, or null
  void* dq;               // (batch, seqlen_q, heads_q, head_dim)
  void* dk;               // (batch, seqlen_k, heads_kv, head_dim)
  void* dv;               // (batch, seqlen_k, heads_kv, head_dim_v)
  float* delta;           // workspace (batch, heads_q, padded_rows): what is subtracted from dP
  float* dq_sum;          // workspace (batch, heads_q, padded_rows, tile_d) in the order of core/dq_sum.cuh
  unsigned* turns;        // workspace (batch, heads_q, padded_rows / 32): see core/turns.cuh; or null
  float* shift;           // workspace (batch, heads_q, padded_rows): what is subtracted from exponents; or null
  unsigned* marked_rows;  // workspace (batch, heads_q, padded_rows / 64): whether a row there, its lse or its delta is
                          // not finite; with shift
  // Strides in bytes.
  int64 dout_batch, dout_row, dout_head;
  int64 dq_batch, dq_row, dq_head;
  int64 dk_batch, dk_row, dk_head;
  int64 dv_batch, dv_row, dv_head;
  int padded_rows;       // seqlen_q rounded up to the rows that the workspace is made for
  float gradient_scale;  // what turns dS^T Q into dK and dS K into dQ
  int section;           // see KeyTileCoordinate::in_turn
};

}  // namespace cuflash
