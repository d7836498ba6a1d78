// The matrix product, in register tiles of kRows rows and LINATTN_TILE_VECTORS vectors.
#pragma once
#include "bfloat16_pairs.h"
#include "tile.h"

namespace linattn {
namespace LINATTN_ISA {

// Which part of a product is computed: A or C may be lower triangular (j <= i), A^T upper.
enum class Part { kAll, kLowerA, kUpperA, kLowerC };

// C = A B, or C = row_i column_j C + A B, or either with -A B.
template <class T>
struct Into {
  bool minus = false;
  bool add = false;             // C stays, times:
  const T* rows = nullptr;      // one factor for each row,
  const T* columns = nullptr;   // or one for each column,
  T factor = 1;                 // and one for all
  bool exact = false;           // A and B are not rounded: a state is the caller's too
};

// Rows of memory that will be wanted soon, asked for a few with each tile of a product. All at once
// they wait for each other, and the loads behind them for all.
struct Ahead {
  static constexpr int kMost = 8;           // tensors
  static constexpr int kLines = 16;         // a tile: as many as a core has in flight
  struct Rows {
    const char* p;
    int64_t stride;
    int n, bytes;
  };
  Rows rows[kMost];
  int count = 0, which = 0, row = 0, byte = 0;

  void clear() { count = which = row = byte = 0; }
  void add(const char* p, int64_t stride, int n, int bytes) {
    if (n > 0 && count < kMost) rows[count++] = {p, stride, n, bytes};
  }
  LINATTN_INLINE void ask() {
    for (int lines = kLines; lines > 0 && which < count; --lines) {
      const Rows& x = rows[which];
      __builtin_prefetch(x.p + row * x.stride + byte, 0, 2);
      byte += 64;
      if (byte < x.bytes) continue;
      byte = 0;
      if (++row < x.n) continue;
      row = 0;
      ++which;
    }
  }
};

template <int N>
struct Count {
  static constexpr int value = N;
};

namespace detail {

template <class T, int NV>
LINATTN_INLINE void finish(
    const Vec<T> (&acc)[kRows][NV], T* c, int c_pitch, const Into<T>& into, int i, int j) {
  // C is added last: a state of many tokens would swallow the terms one by one.
  LINATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const T row = into.rows ? into.rows[i + r] * into.factor : into.factor;
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) {
      T* out = c + r * c_pitch + v * kLanes<T>;
      Vec<T> x = into.minus ? -acc[r][v] : acc[r][v];
      if (into.add) {
        Vec<T> old = load(out) * row;
        if (into.columns) old *= load(into.columns + j + v * kLanes<T>);
        x += old;
      }
      store(out, x);
    }
  }
}

template <class T, int NV>
LINATTN_INLINE void tile(
    T* c, int c_pitch, const T* a, ptrdiff_t a_row, ptrdiff_t a_k, int a_panel, ptrdiff_t a_next,
    const T* b, int b_pitch, int k0, int k1, const Into<T>& into, int i, int j) {
  Vec<T> acc[kRows][NV];
  LINATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) acc[r][v] = Vec<T>{};
  }
  const T* bp = b + size_t(k0) * b_pitch;
  for (int k = k0; k < k1;) {
    const int panel = k / a_panel, last = (panel + 1) * a_panel;
    const int stop = last < k1 ? last : k1;
    const T* ap = a + panel * a_next + (k - panel * a_panel) * a_k;
    for (; k < stop; ++k, ap += a_k, bp += b_pitch) {
      Vec<T> bv[NV];
      LINATTN_UNROLL
      for (int v = 0; v < NV; ++v) bv[v] = load(bp + v * kLanes<T>);
      LINATTN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> x = broadcast(ap[r * a_row]);
        LINATTN_UNROLL
        for (int v = 0; v < NV; ++v) acc[r][v] += x * bv[v];
      }
    }
  }
  finish<T, NV>(acc, c, c_pitch, into, i, j);
}

#if defined(__AVX512BF16__)
// The same with terms by two: a and b are pairs, as many as there are 32-bit numbers.
template <int NV>
LINATTN_INLINE void tile_of_pairs(
    float* c, int c_pitch, const Pairs& x, int b_pitch, int k0, int k1, const Into<float>& into,
    int i, int j) {
  __m512 acc[kRows][NV];
  LINATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) acc[r][v] = _mm512_setzero_ps();
  }
  const uint32_t* ap = x.a + i * x.a_row + k0 / 2 * x.a_k;
  const uint32_t* bp = x.b + k0 / 2 * b_pitch;
  for (int k = k0; k < k1; k += 2, ap += x.a_k, bp += b_pitch) {
    __m512bh bv[NV];
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v)
      bv[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(bp + v * kLanes<float>));
    LINATTN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto av = reinterpret_cast<__m512bh>(_mm512_set1_epi32(int(ap[r * x.a_row])));
      LINATTN_UNROLL
      for (int v = 0; v < NV; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], av, bv[v]);
    }
  }
  Vec<float> sums[kRows][NV];
  LINATTN_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) sums[r][v] = reinterpret_cast<Vec<float>>(acc[r][v]);
  }
  finish<float, NV>(sums, c, c_pitch, into, i, j);
}
#endif

}  // namespace detail

// C [M, N] from A [M, K] (TA: A is stored as its transpose [K, M]) and B [K, N].
// M is rounded up to whole tiles, N to whole padded columns: a matrix has no unwritten ones.
// Both rounded: their numbers are rounded to bfloat16 where that is faster; the sums never are.
template <class T, bool TA = false>
inline void product(
    const Matrix<T>& C, const Matrix<T>& A, const Matrix<T>& B, int M, int N, int K,
    Part part = Part::kAll, const Into<T>& into = Into<T>(), Ahead* ahead = nullptr) {
  const int lanes = kLanes<T>;
  N = padded<T>(N);
  const int a_panel = TA ? 1 << 30 : A.pitch;
  const ptrdiff_t a_next = TA ? 0 : ptrdiff_t(A.rows) * A.pitch;
  const ptrdiff_t a_row = TA ? 1 : A.pitch, a_k = TA ? A.pitch : 1;
#if defined(__AVX512BF16__)
  constexpr bool kHasPairs = sizeof(T) == 4;
  Pairs pairs;
  M = round_up(M, kRows);
  const bool by_pairs = kHasPairs && A.rounded && B.rounded && !into.exact && Pairs::fits(M, K);
  if constexpr (kHasPairs) {
    if (by_pairs && TA) pairs.fill_a_transposed(A, M, K);
    if (by_pairs && !TA) pairs.fill_a(A, M, K);
  }
#endif
  for (int j = 0; j < N; j += B.pitch) {
    const int width = N - j < B.pitch ? N - j : B.pitch;
#if defined(__AVX512BF16__)
    if constexpr (kHasPairs) {
      if (by_pairs) pairs.fill_b(B, K, j, width);
    }
#endif
    for (int i = 0; i < M; i += kRows) {
      int k0 = 0, k1 = K, vectors = (width + lanes - 1) / lanes;
      if (part == Part::kLowerA && i + kRows < K) k1 = i + kRows;
      if (part == Part::kUpperA) k0 = i;
      if (part == Part::kLowerC) {
        if (j > i + kRows - 1) continue;
        const int most = (i + kRows - j + lanes - 1) / lanes;
        if (most < vectors) vectors = most;
      }
      if (ahead) ahead->ask();
      const T* a = TA ? A.at(0, i) : A.at(i, 0);
      const T* b = B.at(0, j);
      T* c = C.at(i, j);
      const auto tile = [&](auto count) {
        constexpr int NV = decltype(count)::value;
#if defined(__AVX512BF16__)
        if constexpr (kHasPairs) {
          if (by_pairs)
            return detail::tile_of_pairs<NV>(c, C.pitch, pairs, B.pitch, k0, k1, into, i, j);
        }
#endif
        detail::tile<T, NV>(
            c, C.pitch, a, a_row, a_k, a_panel, a_next, b, B.pitch, k0, k1, into, i, j);
      };
      switch (vectors) {
        case 1: tile(Count<1>()); break;
        case 2: tile(Count<2>()); break;
#if LINATTN_TILE_VECTORS > 2
        case 3: tile(Count<3>()); break;
        case 4: tile(Count<4>()); break;
#endif
      }
    }
  }
}

}  // namespace LINATTN_ISA
}  // namespace linattn
