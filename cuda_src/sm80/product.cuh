// Matrix products of one warp on tiles in shared memory, named as in BLAS by which operand is transposed. Each adds to
// an accumulator of (16 * MTiles) x (8 * NTiles).
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// What a product does to its B fragments: nothing, or 0 in the place of inf and NaN.
struct Unchanged {
  __device__ __forceinline__ void operator()(unsigned (&)[4]) const {}
};

template <class Element>
struct FiniteOrZero {
  __device__ __forceinline__ void operator()(unsigned (&r)[4]) const {
#pragma unroll
    for (unsigned& pair : r) pair = finite_or_zero<Element>(pair);
  }
};

template <class Element, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_block(float (&acc)[MTiles][NTiles][4], int n, const unsigned (&a)[MTiles][4],
                                               const unsigned (&b)[4]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
    mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
    mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
  }
}

// acc += a B over 16 rows of B, from 16 * k on: B by rows_first, in one of Parts parts of its columns.
template <class Element, int Parts, int Dim, int MTiles, int NTiles, class OnB = Unchanged>
__device__ __forceinline__ void multiply_by_rows(float (&acc)[MTiles][NTiles][4], const unsigned (&a)[MTiles][4],
                                                 const FragmentAddress<Dim>& b, int k, const OnB& on_b = {}) {
#pragma unroll
  for (int n = 0; n < NTiles; n += 2) {
    unsigned rB[4];
    ldmatrix_x4_trans(rB, b.template block<Parts>(k, n / 2));
    on_b(rB);
    multiply_block<Element>(acc, n, a, rB);
  }
}

// acc = A B^T over Dim columns of both: A by rows_first, B by columns_first. The loop goes by `Spans` spans of the
// swizzle and stays rolled: unrolled, ptxas hoists so many fragment loads over the products that it spills.
template <class Element, int Spans, int Dim, int MTiles, int NTiles>
__device__ __forceinline__ void product_nt(float (&acc)[MTiles][NTiles][4], FragmentAddress<Dim> a,
                                           FragmentAddress<Dim> b) {
  constexpr int all = Dim / 16 / TileLayout<Dim>::span_blocks, spans = Spans == 0 ? all : Spans;
  static_assert(all % spans == 0, "whole steps");
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
#pragma unroll 1
  for (int span = 0; span < all; span += spans) {
#pragma unroll
    for (int k = 0; k < spans * TileLayout<Dim>::span_blocks; ++k) {
      unsigned rA[MTiles][4];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) ldmatrix_x4(rA[m], a.block(m, k));
#pragma unroll
      for (int n = 0; n < NTiles; n += 2) {
        unsigned rB[4];
        ldmatrix_x4(rB, b.block(n / 2, k));
        multiply_block<Element>(acc, n, rA, rB);
      }
    }
    a.next_span(spans);
    b.next_span(spans);
  }
}

// acc += A^T B over 16 * Blocks rows of both: A by columns_first, B by rows_first, in one of AParts and BParts parts of
// their columns. `Step` blocks at a time; the loop over them stays rolled.
template <class Element, int Blocks, int Step, int AParts, int BParts, int ADim, int BDim, int MTiles, int NTiles,
          class OnB = Unchanged>
__device__ __forceinline__ void product_tn(float (&acc)[MTiles][NTiles][4], FragmentAddress<ADim> a,
                                           FragmentAddress<BDim> b, OnB on_b = {}) {
  static_assert(Blocks % Step == 0, "whole steps");
#pragma unroll 1
  for (int block = 0; block < Blocks; block += Step) {
#pragma unroll
    for (int k = 0; k < Step; ++k) {
      unsigned rA[MTiles][4];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) ldmatrix_x4_trans(rA[m], a.template block<AParts>(k, m));
      multiply_by_rows<Element, BParts>(acc, rA, b, k, on_b);
    }
    a.next_rows(Step);
    b.next_rows(Step);
  }
}

// acc += A B over the ADim columns of A and rows of B: A by rows_first, B by rows_first in one of BParts parts of its
// columns. `Step` blocks at a time, at most a span; the loop over them stays rolled.
template <class Element, int Step, int BParts, int ADim, int BDim, int MTiles, int NTiles, class OnB = Unchanged>
__device__ __forceinline__ void product_nn(float (&acc)[MTiles][NTiles][4], const FragmentAddress<ADim>& a,
                                           FragmentAddress<BDim> b, OnB on_b = {}) {
  static_assert(TileLayout<ADim>::span_blocks % Step == 0, "whole steps");
#pragma unroll 1
  for (int block = 0; block < ADim / 16; block += Step) {
    const FragmentAddress<ADim> columns = a.from_block(block);
#pragma unroll
    for (int k = 0; k < Step; ++k) {
      unsigned rA[MTiles][4];
#pragma unroll
      for (int m = 0; m < MTiles; ++m) ldmatrix_x4(rA[m], columns.block(m, k));
      multiply_by_rows<Element, BParts>(acc, rA, b, k, on_b);
    }
    b.next_rows(Step);
  }
}

}  // namespace cuflash
