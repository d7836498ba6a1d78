// All SIMD of the kernels: vectors, the matrix layout, the matrix product, transposes and exp.
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
template <class T>
LINATTN_INLINE T sum(Vec<T> x) {
  T s = 0;
  LINATTN_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) s += x[i];
  return s;
}

// A matrix in panels: columns j / pitch of all rows, then the next panel. A panel's rows follow
// each other, so a product reads it with one stride and no two rows fall on one cache set. The
// pitch is a power of 2, so that `at` divides by a shift: it runs for every vector.
template <class T>
struct Matrix {
  T* p = nullptr;
  int rows = 0, cols = 0, pitch = 1, shift = 0;  // cols padded; pitch = 2^shift: columns of a panel

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

namespace detail {

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

}  // namespace detail

// C [M, N] from A [M, K] (TA: A is stored as its transpose [K, M]) and B [K, N].
// M is rounded up to whole tiles, N to whole padded columns: a matrix has no unwritten ones.
template <class T, bool TA = false>
inline void product(
    const Matrix<T>& C, const Matrix<T>& A, const Matrix<T>& B, int M, int N, int K,
    Part part = Part::kAll, const Into<T>& into = Into<T>(), Ahead* ahead = nullptr) {
  const int lanes = kLanes<T>;
  N = padded<T>(N);
  const int a_panel = TA ? 1 << 30 : A.pitch;
  const ptrdiff_t a_next = TA ? 0 : ptrdiff_t(A.rows) * A.pitch;
  const ptrdiff_t a_row = TA ? 1 : A.pitch, a_k = TA ? A.pitch : 1;
  for (int j = 0; j < N; j += B.pitch) {
    const int width = N - j < B.pitch ? N - j : B.pitch;
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
      switch (vectors) {
        case 1:
          detail::tile<T, 1>(c, C.pitch, a, a_row, a_k, a_panel, a_next, b, B.pitch, k0, k1, into, i, j);
          break;
        case 2:
          detail::tile<T, 2>(c, C.pitch, a, a_row, a_k, a_panel, a_next, b, B.pitch, k0, k1, into, i, j);
          break;
#if LINATTN_TILE_VECTORS > 2
        case 3:
          detail::tile<T, 3>(c, C.pitch, a, a_row, a_k, a_panel, a_next, b, B.pitch, k0, k1, into, i, j);
          break;
        case 4:
          detail::tile<T, 4>(c, C.pitch, a, a_row, a_k, a_panel, a_next, b, B.pitch, k0, k1, into, i, j);
          break;
#endif
      }
    }
  }
}

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
