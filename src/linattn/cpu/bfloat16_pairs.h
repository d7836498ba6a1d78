// Operands of a product as processors multiply bfloat16: pairs of neighbouring terms, 32 bits each.
//
// A row of pairs of B is (b[k][j], b[k + 1][j]) for all j of a panel, k even; of A the same, or of
// its transpose (a[i][k], a[i][k + 1]) for all k. The odd one out has a zero beside it.
#pragma once
#include "tile.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace linattn {
namespace LINATTN_ISA {

struct Pairs {
  // Numbers of the larger operands, [32, 256] and [256, 64]: 16 and 32 KiB of the stack, of which
  // D = 64 uses a quarter. What is larger is multiplied in 32 bits.
  static constexpr int kMostA = 32 * 256 / 2, kMostTerms = 256;

  alignas(64) uint32_t a[kMostA];
  alignas(64) uint32_t b[kMostTerms / 2 * 64];
  int a_row = 1, a_k = 1;  // from pair to pair of A, down its rows and along its terms

  static bool fits(int M, int K) {
    return K <= kMostTerms && int64_t(M) * round_up(K, 32) <= 2 * kMostA;
  }

  // (low[l], high[l]) in lane l.
  static LINATTN_INLINE __m512i interleave(Vec<float> low, Vec<float> high) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
        reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
    static const struct Order {
      alignas(64) uint16_t of[32];
    } kOrder = {{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.of), both);
  }

  // Rows k and k + 1 of x, `width` columns from j on.
  static LINATTN_INLINE void fill_row(
      uint32_t* to, const Matrix<float>& x, int k, int K, int j, int width) {
    for (int l = 0; l < width; l += kLanes<float>) {
      const Vec<float> low = load(x.at(k, j + l));
      const Vec<float> high = k + 1 < K ? load(x.at(k + 1, j + l)) : Vec<float>{};
      _mm512_store_si512(to + l, interleave(low, high));
    }
  }

  // A [M, K].
  void fill_a(const Matrix<float>& A, int M, int K) {
    a_row = round_up(K, 32) / 2, a_k = 1;
    for (int i = 0; i < M; ++i) {
      for (int k = 0; k < K; k += 32) {
        const Vec<float> low = load(A.at(i, k));
        const Vec<float> high = k + 16 < A.cols ? load(A.at(i, k + 16)) : Vec<float>{};
        _mm512_store_si512(a + i * a_row + k / 2,
                           reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                               reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low))));
      }
      if (K % 2) a[i * a_row + K / 2] &= 0xffff;
    }
  }

  // A^T, stored [K, M].
  void fill_a_transposed(const Matrix<float>& A, int M, int K) {
    a_row = 1, a_k = round_up(M, kLanes<float>);
    for (int k = 0; k < K; k += 2) fill_row(a + k / 2 * a_k, A, k, K, 0, a_k);
  }

  // Columns of B [K, ...] from j on.
  void fill_b(const Matrix<float>& B, int K, int j, int width) {
    for (int k = 0; k < K; k += 2) fill_row(b + k / 2 * B.pitch, B, k, K, j, width);
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
