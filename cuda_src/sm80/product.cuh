// Matrix products of one warp on tiles in shared memory, named as in BLAS by which operand is transposed. Each adds to
// an accumulator of (16 * MTiles) x (8 * NTiles).
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "sm80/tile.cuh"

namespace cuflash {

// The A operand: rows of a tile by rows_first, from column 16 * k on, in one of Parts parts of the columns.
template <int Parts, int Dim, int MTiles>
__device__ __forceinline__ void load_operand(unsigned (&r)[MTiles][4], const FragmentAddress<Dim>& a, int k) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) ldmatrix_x4(r[m], a.template block<Parts>(m, k));
}

// The B operand, two fragments: rows of a tile from 16 * k on. FiniteOnly: 0 in the place of inf and NaN.
template <class Element, int Parts, bool FiniteOnly, int Dim>
__device__ __forceinline__ void load_rows(unsigned (&r)[4], const FragmentAddress<Dim>& b, int k, int column_block) {
  ldmatrix_x4_trans(r, b.template block<Parts>(k, column_block));
  if constexpr (FiniteOnly) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = finite_or_zero<Element>(r[i]);
  }
}

template <class Element, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_block(float (&acc)[MTiles][NTiles][4], int n, const unsigned (&a)[MTiles][4],
                                               const unsigned (&b)[4]) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
    mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
    mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
  }
}

// Columns 16 * k and on of an accumulator, rounded, as the A operand of the next product.
template <class Element, int MTiles, int NTiles>
__device__ __forceinline__ void pack_operand(unsigned (&a)[MTiles][4], const float (&acc)[MTiles][NTiles][4], int k) {
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&x)[4] = acc[m][2 * k + i / 2];
      a[m][i] = pack<Element>(x[2 * (i % 2)], x[2 * (i % 2) + 1]);
    }
}

// acc += a B over 16 rows of B, from 16 * k on, and columns from 8 * first on: B by rows_first, in one of Parts parts
// of its columns.
template <class Element, int Parts, bool FiniteOnly = false, int Dim, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_by_rows(float (&acc)[MTiles][NTiles][4], const unsigned (&a)[MTiles][4],
                                                 const FragmentAddress<Dim>& b, int k, int first = 0) {
#pragma unroll
  for (int n = 0; n < NTiles; n += 2) {
    unsigned rB[4];
    load_rows<Element, Parts, FiniteOnly>(rB, b, k, (first + n) / 2);
    multiply_block<Element>(acc, n, a, rB);
  }
}

// acc += A B over Steps steps of Step blocks of 16 along the depth, in a loop that stays rolled: unrolled, ptxas hoists
// so many fragment loads over the products that it spills. What a step multiplies first is loaded before the jump to
// it. Operands has load_a(rA, k) and load_b(rB, k, n / 2) for block k of its step, and next() for those of the next.
template <class Element, int Steps, int Step, int MTiles, int NTiles, class Operands>
__device__ __forceinline__ void product_in_steps(float (&acc)[MTiles][NTiles][4], Operands at) {
  unsigned rA[MTiles][4], rB[4];
  at.load_a(rA, 0);
  at.load_b(rB, 0, 0);
#pragma unroll 1
  for (int step = 1;; ++step) {
#pragma unroll
    for (int k = 0; k < Step; ++k) {
      if (k > 0) at.load_a(rA, k);
#pragma unroll
      for (int n = 0; n < NTiles; n += 2) {
        if (k > 0 || n > 0) at.load_b(rB, k, n / 2);
        multiply_block<Element>(acc, n, rA, rB);
      }
    }
    if (step == Steps) break;
    at = at.next();
    at.load_a(rA, 0);
    at.load_b(rB, 0, 0);
  }
}

// acc = A B^T over Dim columns of both: A by rows_first, B by columns_first. A step is `Spans` spans of the swizzle, or
// with 0 all of Dim.
template <class Element, int Spans, int Dim, int MTiles, int NTiles>
__device__ __forceinline__ void product_nt(float (&acc)[MTiles][NTiles][4], FragmentAddress<Dim> a,
                                           FragmentAddress<Dim> b) {
  constexpr int all = Dim / 16 / TileLayout<Dim>::span_blocks, spans = Spans == 0 ? all : Spans;
  static_assert(all % spans == 0, "whole steps");
  struct Operands {
    FragmentAddress<Dim> a, b;

    __device__ __forceinline__ void load_a(unsigned (&r)[MTiles][4], int k) const { load_operand<1>(r, a, k); }
    __device__ __forceinline__ void load_b(unsigned (&r)[4], int k, int n) const { ldmatrix_x4(r, b.block(n, k)); }
    __device__ __forceinline__ Operands next() const { return {a.after_spans(spans), b.after_spans(spans)}; }
  };
#pragma unroll
  for (int m = 0; m < MTiles; ++m)
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
  product_in_steps<Element, all / spans, spans * TileLayout<Dim>::span_blocks>(acc, Operands{a, b});
}

// acc += A^T B over 16 * Blocks rows of both: A by columns_first, B by rows_first, in one of AParts and BParts parts of
// their columns.
template <class Element, int Blocks, int Step, int AParts, int BParts, bool FiniteOnly, int ADim, int BDim, int MTiles,
          int NTiles>
__device__ __forceinline__ void product_tn(float (&acc)[MTiles][NTiles][4], FragmentAddress<ADim> a,
                                           FragmentAddress<BDim> b) {
  static_assert(Blocks % Step == 0, "whole steps");
  struct Operands {
    FragmentAddress<ADim> a;
    FragmentAddress<BDim> b;

    __device__ __forceinline__ void load_a(unsigned (&r)[MTiles][4], int k) const {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) ldmatrix_x4_trans(r[m], a.template block<AParts>(k, m));
    }
    __device__ __forceinline__ void load_b(unsigned (&r)[4], int k, int n) const {
      load_rows<Element, BParts, FiniteOnly>(r, b, k, n);
    }
    __device__ __forceinline__ Operands next() const { return {a.after_rows(Step), b.after_rows(Step)}; }
  };
  product_in_steps<Element, Blocks / Step, Step>(acc, Operands{a, b});
}

}  // namespace cuflash
