// Decoding: a few tokens, one after the other, each a pass over the state where it lies.
//
// The state is [Dk (+ 1), Dv (+ 1)] in memory, of T or, at half the traffic, of bfloat16. Nothing
// is packed: a state is read once and written once, so a step costs what its bytes cost.
//   additive   row_i <- a_i row_i + k_i v,   o = sum_i q_i row_i
//   delta      r = sum_i k_i a_i row_i first, then the same with beta (v - r) for v
// The affine kernel is the same with [q, bias], [k, 1] and [v, 1].
#include "kernels.h"
#include "memory.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

using LINATTN_ISA::read;
using LINATTN_ISA::write;

// Rows of a state of bfloat16, widened on the way.
typedef uint16_t Half __attribute__((vector_size(LINATTN_VECTOR_BYTES / 2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(LINATTN_VECTOR_BYTES), may_alias));
LINATTN_INLINE Vec<float> read(const uint16_t* p) {
  Half x;
  memcpy(&x, p, sizeof x);
  const Bits bits = __builtin_convertvector(x, Bits) << 16;
  return reinterpret_cast<const Vec<float>&>(bits);
}
LINATTN_INLINE void write(uint16_t* p, Vec<float> x) {
#if defined(__AVX512BF16__)
  if (round_to_bfloat16(p, x)) return;
#endif
  const Bits bits = reinterpret_cast<const Bits&>(x);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits nan = Bits{} + 0x7fc00000;
  const Half y = __builtin_convertvector((x == x ? rounded : nan) >> 16, Half);
  memcpy(p, &y, sizeof y);
}
template <class T>
LINATTN_INLINE T read_one(const T* p) { return *p; }
template <class T>
LINATTN_INLINE void write_one(T* p, T x) { *p = x; }
LINATTN_INLINE float read_one(const uint16_t* p) { return from_bfloat16(*p); }
LINATTN_INLINE void write_one(uint16_t* p, float x) { *p = to_bfloat16(x); }

// A row of 128 floats on AVX-512: 8 sums and 8 vectors of v of 32 registers. A row read whole is
// read in the order of memory.
constexpr int kVectors = 2 * LINATTN_TILE_VECTORS;

// Asks for vector v of a row that will be wanted: a processor's own prefetching ends with a page.
template <class T, class S>
LINATTN_INLINE void ask(const S* row, int v) {
  constexpr int bytes = kLanes<T> * sizeof(S);  // of a vector, where it is stored
  if (v * bytes % 64 == 0) __builtin_prefetch(row + v * kLanes<T>, 1, 2);
}

template <class T>
struct Token {
  T *q, *k, *v, *alpha, *o;  // [rows], [rows], [columns], [rows], [columns]
  T beta;
  bool delta;
  int rows, columns;
};

// Columns j .. j + NV vectors of one token; from and to may be the same.
template <class T, class S, int NV>
LINATTN_INLINE void columns(const Token<T>& x, const S* from, S* to, int j) {
  constexpr int L = kLanes<T>;
  Vec<T> u[NV], o[NV];
  LINATTN_UNROLL
  for (int v = 0; v < NV; ++v) u[v] = read(x.v + j + v * L), o[v] = Vec<T>{};
  if (x.delta) {
    for (int i = 0; i < x.rows; ++i) {
      const Vec<T> key = broadcast(x.k[i] * x.alpha[i]);
      const S* row = from + size_t(i) * x.columns + j;
      LINATTN_UNROLL
      for (int v = 0; v < NV; ++v) o[v] += read(row + v * L) * key;
    }
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) u[v] = (u[v] - o[v]) * x.beta, o[v] = Vec<T>{};
  }
  // What is read next: rows to come (8 of 128 floats are a page), or the columns of the next pass.
  size_t next = 8 * size_t(x.columns);
  if (x.delta) next = j + NV * L < x.columns ? NV * L : size_t(x.rows) * x.columns - j;
  for (int i = 0; i < x.rows; ++i) {
    const Vec<T> key = broadcast(x.k[i]), query = broadcast(x.q[i]), alpha = broadcast(x.alpha[i]);
    const size_t row = size_t(i) * x.columns + j;
    LINATTN_UNROLL
    for (int v = 0; v < NV; ++v) {
      ask<T>(from + row + next, v);
      const Vec<T> y = read(from + row + v * L) * alpha + u[v] * key;
      o[v] += y * query;
      write(to + row + v * L, y);
    }
  }
  LINATTN_UNROLL
  for (int v = 0; v < NV; ++v) write(x.o + j + v * L, o[v]);
}

template <class T, class S>
void one_column(const Token<T>& x, const S* from, S* to, int j) {
  T u = x.v[j], o = 0;
  if (x.delta) {
    for (int i = 0; i < x.rows; ++i)
      o += read_one(from + size_t(i) * x.columns + j) * x.alpha[i] * x.k[i];
    u = (u - o) * x.beta;
    o = 0;
  }
  for (int i = 0; i < x.rows; ++i) {
    const size_t at = size_t(i) * x.columns + j;
    const T y = read_one(from + at) * x.alpha[i] + x.k[i] * u;
    o += y * x.q[i];
    write_one(to + at, y);
  }
  x.o[j] = o;
}

template <class T, class S>
void step(const Token<T>& x, const S* from, S* to) {
  constexpr int L = kLanes<T>;
  int j = 0;
  if (!x.delta) {  // reads twice: half as wide, and 128 rows of it stay in 48 KiB
    for (; j + kVectors * L <= x.columns; j += kVectors * L)
      columns<T, S, kVectors>(x, from, to, j);
  }
  for (; j + kVectors / 2 * L <= x.columns; j += kVectors / 2 * L)
    columns<T, S, kVectors / 2>(x, from, to, j);
  for (; j + L <= x.columns; j += L) columns<T, S, 1>(x, from, to, j);
  for (; j < x.columns; ++j) one_column(x, from, to, j);
}

template <class T, class S>
struct Decoder {
  Token<T> x;
  T *gates, *wide = nullptr;  // a state in T, for several tokens on a state of bfloat16
  size_t size;

  Decoder(Workspace& w, const Problem& p) {
    x.rows = p.Dk + int(p.affine);
    x.columns = p.Dv + int(p.affine);
    x.delta = p.beta.data != nullptr;
    x.beta = 0;
    size = size_t(x.rows) * x.columns;
    const size_t rows = size_t(padded<T>(x.rows)), columns = size_t(padded<T>(x.columns));
    for (T** y : {&x.q, &x.k, &x.alpha, &gates}) *y = w.take<T>(rows);
    for (T** y : {&x.v, &x.o}) *y = w.take<T>(columns);
    if (sizeof(S) != sizeof(T) && p.N > 1) wide = w.take<T>(size);
  }

  void run(const Problem& p, int64_t b, int64_t h) {
    const size_t place = size_t(b * p.H + h) * size;
    const S* from = p.initial_state ? static_cast<const S*>(p.initial_state) + place : nullptr;
    S* to = static_cast<S*>(p.state) + place;
    if (!from) {
      memset(static_cast<void*>(to), 0, size * sizeof(S));
      from = to;
    }
    if (sizeof(S) != sizeof(T) && p.N > 1) {  // rounded once, after the last token
      for (size_t i = 0; i < size; ++i) wide[i] = read_one(from + i);
      tokens<T>(p, b, h, wide, wide);
      for (size_t i = 0; i < size; ++i) write_one(to + i, wide[i]);
      return;
    }
    tokens<S>(p, b, h, from, to);
  }

  template <class Stored>
  void tokens(const Problem& p, int64_t b, int64_t h, const Stored* from, Stored* to) {
    for (int64_t t = 0; t < p.N; ++t) {
      if (is_there(p, b, t)) {
        load(p, b, t, h);
        step(x, from, to);
        from = to;
        if (p.normalize) {
          const T norm = x.o[p.Dv];  // its inverse may be no number
          for (int j = 0; j < p.Dv; ++j) x.o[j] /= norm;
        }
      } else {
        for (int j = 0; j < p.Dv; ++j) x.o[j] = 0;
      }
      char* out = address(p.o, b, t, h);
      store_row(out, x.o, p.o.dtype, p.o.channel, p.Dv, T(1), false);
    }
    if (from != to) memcpy(to, from, size * sizeof(Stored));  // no token was there
  }

  void load(const Problem& p, int64_t b, int64_t t, int64_t h) {
    const auto row = [&](T* to, const View& y, int D, T scale) {
      load_row(to, address(y, b, t, group(y, h, p.H)), y.dtype, y.channel, D, scale);
    };
    row(x.q, p.q, p.Dk, T(p.scale));
    row(x.k, p.k, p.Dk, T(1));
    row(x.v, p.v, p.Dv, T(1));
    if (p.beta.data) row(&x.beta, p.beta, 1, T(1));
    if (p.affine) {
      x.q[p.Dk] = T(p.bias);
      x.k[p.Dk] = x.v[p.Dv] = 1;
    }
    const int gated = p.decay == Decay::kChannel ? p.Dk : p.decay == Decay::kNone ? 0 : 1;
    for (int i = 0; i < padded<T>(gated); ++i) gates[i] = 0;
    if (gated) row(gates, p.log_decay, gated, T(1));
    exp_negative(gates, padded<T>(gated));
    const bool each = p.decay == Decay::kChannel;
    for (int i = 0; i < x.rows; ++i) x.alpha[i] = each ? gates[i] : gated ? gates[0] : T(1);
  }
};

template <class T, class S>
bool decode_stored(const Problem& p, int64_t begin, int64_t end) {
  Workspace counter, space;
  Decoder<T, S> sizes(counter, p);
  if (!space.allocate(counter.used())) return false;
  Decoder<T, S> decoder(space, p);
  for (int64_t i = begin; i < end; ++i) decoder.run(p, i / p.H, i % p.H);
  return true;
}

}  // namespace

template <>
bool decode<float>(const Problem& p, int64_t begin, int64_t end) {
  return p.state_dtype == Dtype::kBFloat16 ? decode_stored<float, uint16_t>(p, begin, end)
                                           : decode_stored<float, float>(p, begin, end);
}
template <>
bool decode<double>(const Problem& p, int64_t begin, int64_t end) {
  return decode_stored<double, double>(p, begin, end);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
