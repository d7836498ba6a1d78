// One decay a channel inside a chunk, where scores are no product of two matrices.
//
// exp(L_id - L_jd) splits into a factor of i and one of j only about a point between them. Rows
// are taken in two blocks of 16. With s the start and e the end of a block:
//   row_i = exp(L_i - L_s)   tail_j = exp(L_e - L_j)   column_j = exp(L_s - L_j) >= 1
// Keys of the first block meet queries of the second as tail_j row_i. Inside a block it is
// column_j row_i up to exp(30); a row that has decayed further is computed pair by pair. That
// choice looks only at tokens up to the row, so later gates change no earlier output.
#pragma once
#include "run.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr int kBlock = 16;
template <class T>
constexpr T kLeast = T(9.357622968840175e-14);  // exp(-30): its inverse leaves float32 26 decades
template <class T>
constexpr T kSmallest = T(sizeof(T) == 4 ? 1.17549435e-38 : 2.2250738585072014e-308);

template <class T>
struct ChannelDecay {
  Matrix<T> alpha;                // [C, Dk] exp(g)
  Matrix<T> row, column, tail;    // [C, Dk]
  T *first, *second, *total;      // [Dk] exp of all that blocks 0 and 1 decay, and both
  Matrix<T> x_row, y0, y1, y0_t, y1_t;
  bool slow[kChunk];

  void take(Workspace& w, int Dk) {
    for (Matrix<T>* x : {&alpha, &row, &column, &tail, &x_row, &y0, &y1})
      *x = w.matrix<T>(kChunk, Dk);
    for (T** x : {&first, &second, &total}) *x = w.take<T>(Dk);
    y0_t = w.matrix<T>(Dk, kChunk);
    y1_t = w.matrix<T>(Dk, kChunk);
  }

  // One exp a gate: all factors are running products, whose error does not grow with the decay.
  void load(const Problem& p, const Span& s, int64_t h) {
    load_rows(alpha, p, p.log_decay, s, h, p.Dk, T(1));
    const Vec<T> reset = broadcast(T(kReset)), nothing = {}, one = broadcast(T(1));
    const Vec<T> normal = broadcast(kSmallest<T>), least = broadcast(kLeast<T>);
    Vec<T> lowest = one;
    for (int d = 0; d < alpha.cols; d += kLanes<T>) {
      Vec<T> x = one;
      for (int b = 0; b < kChunk; b += kBlock) {
        x = one;
        for (int i = b; i < b + kBlock; ++i) {
          const Vec<T> g = at(alpha, i, d), a = exp_negative(g < reset ? reset : g);
          x *= a;
          x = x < normal ? nothing : x;  // what is no normal number is slow, and counts for nothing
          store(alpha.at(i, d), a);
          store(row.at(i, d), x);
          store(column.at(i, d), one / (x < least ? least : x));
        }
        lowest = x < lowest ? x : lowest;
        store((b == 0 ? first : second) + d, x);
        Vec<T> y = one;
        for (int i = b + kBlock - 1; i >= b; --i) {
          store(tail.at(i, d), y);
          y *= at(alpha, i, d);
          y = y < normal ? nothing : y;
        }
      }
      x *= linattn::LINATTN_ISA::load(first + d);
      store(total + d, x < normal ? nothing : x);
    }
    bool any = false;
    for (int l = 0; l < kLanes<T>; ++l) any |= !(lowest[l] >= kLeast<T>);
    for (int i = 0; i < kChunk; ++i) slow[i] = any && has_decayed_far(i);
  }
  bool has_decayed_far(int i) const {
    bool far = false;
    for (int d = 0; d < row.cols; ++d) far |= !(*row.at(i, d) >= kLeast<T>);
    return far;
  }

  // x as it reads the state before the chunk, and as it stands in the state after it.
  void read(const Matrix<T>& out, const Matrix<T>& x) const {
    for_vectors([&](int i, int d, size_t o) {
      Vec<T> y = at(x, o) * at(row, o);
      if (i >= kBlock) y *= linattn::LINATTN_ISA::load(first + d);
      store(out.p + o, y);
    });
  }
  void write(const Matrix<T>& out, const Matrix<T>& x) const {
    for_vectors([&](int i, int d, size_t o) {
      Vec<T> y = at(x, o) * at(tail, o);
      if (i < kBlock) y *= linattn::LINATTN_ISA::load(second + d);
      store(out.p + o, y);
    });
  }

  // scores_ij = sum_d x_id y_jd exp(L_id - L_jd) for j <= i (strict: j < i), 0 elsewhere.
  void scores(const Matrix<T>& out, const Matrix<T>& x, const Matrix<T>& y, bool strict) {
    prepare(x, y);
    transpose(y0_t, y0, kBlock, y0.cols);
    transpose(y1_t, y1, kChunk, y1.cols);
    out.zero();
    product(out, x_row, y0_t, kBlock, kBlock, row.cols);
    product(below(out), below(x_row), y1_t, kBlock, kChunk, row.cols);
    lower(out, strict);
    for (int i = 0; i < kChunk; ++i) {
      if (!slow[i]) continue;
      const int block = i / kBlock * kBlock;
      Vec<T> sums[kBlock] = {};
      for_pairs_of(i, [&](int j, int d, Vec<T> decay) {
        sums[j - block] += at(x, i, d) * at(y, j, d) * decay;
      });
      for (int j = block; j < i + (strict ? 0 : 1); ++j) *out.at(i, j) = sum<T>(sums[j - block]);
    }
  }

  // f(j, d, exp(L_i - L_j) of a vector of channels) for each j <= i of the block of i.
  template <class F>
  LINATTN_INLINE void for_pairs_of(int i, const F& f) const {
    for (int d = 0; d < row.cols; d += kLanes<T>) {
      Vec<T> decay = broadcast(T(1));
      for (int j = i; j >= i / kBlock * kBlock; --j) {
        f(j, d, decay);
        decay *= at(alpha, j, d);
      }
    }
  }

  // x_row = x row; y0 = y column in block 0; y1 = y tail in block 0 and y column in block 1.
  void prepare(const Matrix<T>& x, const Matrix<T>& y) const {
    for_vectors([&](int i, int, size_t o) {
      store(x_row.p + o, at(x, o) * at(row, o));
      const Vec<T> c = at(y, o) * at(column, o);
      if (i < kBlock) {
        store(y0.p + o, c);
        store(y1.p + o, at(y, o) * at(tail, o));
      } else {
        store(y1.p + o, c);
      }
    });
  }

  // The rows of the second block, as a matrix.
  static Matrix<T> below(Matrix<T> x) {
    x.p += size_t(kBlock) * x.pitch;
    return x;
  }
  static LINATTN_INLINE Vec<T> at(const Matrix<T>& x, int i, int d) {
    return linattn::LINATTN_ISA::load(x.at(i, d));
  }
  static LINATTN_INLINE Vec<T> at(const Matrix<T>& x, size_t o) {
    return linattn::LINATTN_ISA::load(x.p + o);
  }
  // f(row, column, where both lie in any matrix [C, Dk]).
  template <class F>
  LINATTN_INLINE void for_vectors(const F& f) const {
    for (int first = 0; first < row.cols; first += row.pitch) {
      const int width = row.cols - first < row.pitch ? row.cols - first : row.pitch;
      for (int i = 0; i < kChunk; ++i) {
        const size_t o = row.at(i, first) - row.p;
        for (int d = 0; d < width; d += kLanes<T>) f(i, first + d, o + d);
      }
    }
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
