// Vectors, the matrix layout, transposes and exp; the matrix product is in product.h.
//
// GCC vector extensions; the file is compiled once for each instruction set (LINATTN_ISA), and
// the width of a vector follows from the compiler's flags. Nothing here allocates.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>

#if defined(__AVX512F__)
#define LINATTN_VECTOR_BYTES 64
// A register tile of 4 rows x 4 vectors: 16 sums, 4 vectors of B and 1 broadcast of 32 registers.
#define LINATTN_TILE_VECTORS 4
#elif defined(__AVX2__)
#define LINATTN_VECTOR_BYTES 32
#define LINATTN_TILE_VECTORS 2  // 8 sums, 2 and 1 of 16 registers
#else
#define LINATTN_VECTOR_BYTES 16
#define LINATTN_TILE_VECTORS 2
#endif

#define LINATTN_INLINE inline __attribute__((always_inline))
#define LINATTN_UNROLL _Pragma("GCC unroll 16")

namespace linattn {
namespace LINATTN_ISA {

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(LINATTN_VECTOR_BYTES), may_alias));
  typedef int32_t integer __attribute__((vector_size(LINATTN_VECTOR_BYTES), may_alias));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(LINATTN_VECTOR_BYTES), may_alias));
  typedef int64_t integer __attribute__((vector_size(LINATTN_VECTOR_BYTES), may_alias));
};

template <class T>
using Vec = typename Vector<T>::type;

template <class T>
constexpr int kLanes = LINATTN_VECTOR_BYTES / sizeof(T);
template <class T>
constexpr int kPanel = kLanes<T> * LINATTN_TILE_VECTORS;  // columns of a panel
constexpr int kRows = 4;                                  // rows of a register tile

// Columns are padded to whole vectors, and to whole rows of a tile where they serve as rows.
template <class T>
constexpr int padded(int n) {
  constexpr int unit = kLanes<T> > kRows ? kLanes<T> : kRows;
  return (n + unit - 1) / unit * unit;
}
constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

template <class T>
LINATTN_INLINE Vec<T> load(const T* p) {  // p aligned to a vector
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <class T>
LINATTN_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<Vec<T>*>(p) = x;
}
template <class T>
LINATTN_INLINE Vec<T> read(const T* p) {  // anywhere
  Vec<T> x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
LINATTN_INLINE void write(T* p, Vec<T> x) {
  memcpy(p, &x, sizeof x);
}
template <class T>
LINATTN_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}
// 0, 1, 2, ...
template <class T>
LINATTN_INLINE Vec<T> places() {
  Vec<T> x = {};
  LINATTN_UNROLL
  for (int l = 0; l < kLanes<T>; ++l) x[l] = T(l);
  return x;
}
#if !defined(__clang__)
// x plus itself, turned by half of the first 2 * half lanes, and so on: no chain of 16 sums.
template <class T, int half>
LINATTN_INLINE Vec<T> fold(Vec<T> x) {
  typename Vector<T>::integer other;
  LINATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) other[i] = i ^ half;
  x += __builtin_shuffle(x, other);
  if constexpr (half > 1) return fold<T, half / 2>(x);
  return x;
}
#endif
template <class T>
LINATTN_INLINE T sum(Vec<T> x) {
#if defined(__clang__)
  T s = 0;
  LINATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) s += x[i];
  return s;
#else
  return fold<T, kLanes<T> / 2>(x)[0];
#endif
}

// A matrix in panels: columns j / pitch of all rows, then the next panel. A panel's rows follow
// each other, so a product reads it with one stride and no two rows fall on one cache set. The
// pitch is a power of 2, so that `at` divides by a shift: it runs for every vector.
template <class T>
struct Matrix {
  T* p = nullptr;
  int rows = 0, cols = 0, pitch = 1, shift = 0;  // cols padded; pitch = 2^shift: columns of a panel
  bool rounded = false;  // whether a product may round its numbers to bfloat16

  Matrix() = default;
  Matrix(T* memory, int rows_, int cols_) : p(memory), rows(rows_), cols(padded<T>(cols_)) {
    while (pitch < cols && pitch < kPanel<T>) pitch *= 2, ++shift;
  }
  static size_t size(int rows, int cols) { return Matrix(nullptr, rows, cols).size(); }
  size_t size() const { return size_t(rows) * round_up(cols, pitch); }
  LINATTN_INLINE T* at(int i, int j) const {
    return p + ((size_t(j >> shift) * rows + i) << shift) + (j & (pitch - 1));
  }
  void zero() const { memset(p, 0, size() * sizeof(T)); }
  void copy(const Matrix& x) const { memcpy(p, x.p, size() * sizeof(T)); }
};

namespace detail {

#if defined(__AVX512F__)
// 16 x 16 floats: four rounds of interleaving rows at distance 8, 4, 2 and 1.
template <int Step>
LINATTN_INLINE void interleave(Vec<float>* x) {
  typedef typename Vector<float>::integer Index;
  Index low, high;
  LINATTN_UNROLL
  for (int i = 0; i < 16; ++i) {
    low[i] = (i & Step) ? 16 + (i ^ Step) : i;
    high[i] = (i & Step) ? 16 + i : (i ^ Step);
  }
  LINATTN_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (i & Step) continue;
    const Vec<float> a = x[i], b = x[i + Step];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + Step] = __builtin_shuffle(a, b, high);
  }
}
LINATTN_INLINE void transpose_block(const float* in, int in_pitch, float* out, int out_pitch) {
  Vec<float> x[16];
  LINATTN_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = load(in + i * in_pitch);
  interleave<8>(x);
  interleave<4>(x);
  interleave<2>(x);
  interleave<1>(x);
  LINATTN_UNROLL
  for (int i = 0; i < 16; ++i) store(out + i * out_pitch, x[i]);
}
#endif

}  // namespace detail

// out = in^T for as many rows as a vector has lanes, of as many numbers.
template <class T>
LINATTN_INLINE void transpose_lanes(const T* in, int in_pitch, T* out, int out_pitch) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return detail::transpose_block(in, in_pitch, out, out_pitch);
#endif
  for (int a = 0; a < kLanes<T>; ++a) {
    for (int b = 0; b < kLanes<T>; ++b) out[b * out_pitch + a] = in[a * in_pitch + b];
  }
}

// out [N, M] = x [M, N]^T; M and N are rounded up to whole vectors, which both must have.
template <class T>
inline void transpose(const Matrix<T>& out, const Matrix<T>& x, int M, int N) {
  for (int i = 0; i < M; i += kLanes<T>) {
    for (int j = 0; j < N; j += kLanes<T>)
      transpose_lanes(x.at(i, j), x.pitch, out.at(j, i), out.pitch);
  }
}

namespace detail {
template <class T, int Step>
LINATTN_INLINE void fold(Vec<T>* x) {
  typename Vector<T>::integer low, high;
  LINATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) {
    low[i] = (i & Step) ? kLanes<T> + i : i;
    high[i] = (i & Step) ? kLanes<T> + (i ^ Step) : (i ^ Step);
  }
  LINATTN_UNROLL
  for (int i = 0; i < Step; ++i)
    x[i] = __builtin_shuffle(x[i], x[i + Step], low) + __builtin_shuffle(x[i], x[i + Step], high);
  if constexpr (Step > 1) fold<T, Step / 2>(x);
}
}  // namespace detail

// As many vectors as one has lanes: lane i of the result is the sum across the lanes of x[i].
template <class T>
LINATTN_INLINE Vec<T> sum_lanes(Vec<T>* x) {
  detail::fold<T, kLanes<T> / 2>(x);
  return x[0];
}

// exp(x) for x <= 0, to 2 units in the last place; 0 below the smallest normal number.
LINATTN_INLINE Vec<float> exp_negative(Vec<float> x) {
  typedef Vector<float>::integer Integer;
  const Vec<float> whole_half = x * 1.44269504088896341f - 0.5f;
  const Integer n = __builtin_convertvector(whole_half, Integer);  // towards 0: rounds x log2(e)
  const Vec<float> nf = __builtin_convertvector(n, Vec<float>);
  const Vec<float> r = (x - nf * 0.693359375f) + nf * 2.12194440e-4f;
  Vec<float> y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integer bits = (n + 127) << 23;
  y *= reinterpret_cast<const Vec<float>&>(bits);
  return x < -87.0f ? Vec<float>{} : y;
}
LINATTN_INLINE Vec<double> exp_negative(Vec<double> x) {
  Vec<double> y;
  for (int i = 0; i < kLanes<double>; ++i) y[i] = exp(x[i]);
  return y;
}

// exp of n numbers <= 0 in place; n a multiple of the lanes.
template <class T>
inline void exp_negative(T* x, int n) {
  for (int i = 0; i < n; i += kLanes<T>) store(x + i, exp_negative(load(x + i)));
}

}  // namespace LINATTN_ISA
}  // namespace linattn
