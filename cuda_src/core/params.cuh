// The argument of every forward kernel. Mirrored field by field by cuflash/launch.py, which checks the size.
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

}  // namespace cuflash
