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
constexpr double kLimit = 30.0;  // exp(30) leaves float32 26 decades

template <class T>
struct ChannelDecay {
  Matrix<T> row, column, tail;    // [C, Dk]
  Matrix<T> g;                    // [C, Dk]
  Matrix<double> L;               // [C, Dk] from the start of the block
  T *first, *second, *total;      // [Dk] exp of all that blocks 0 and 1 decay, and both
  Matrix<T> x_row, y0, y1, y0_t, y1_t;
  bool slow[kChunk];

  void take(Workspace& w, int Dk) {
    row = w.matrix<T>(kChunk, Dk);
    column = w.matrix<T>(kChunk, Dk);
    tail = w.matrix<T>(kChunk, Dk);
    g = w.matrix<T>(kChunk, Dk);
    L = w.matrix<double>(kChunk, Dk);
    first = w.take<T>(Dk);
    second = w.take<T>(Dk);
    total = w.take<T>(Dk);
    x_row = w.matrix<T>(kChunk, Dk);
    y0 = w.matrix<T>(kChunk, Dk);
    y1 = w.matrix<T>(kChunk, Dk);
    y0_t = w.matrix<T>(Dk, kChunk);
    y1_t = w.matrix<T>(Dk, kChunk);
  }

  void load(const Problem& p, const Span& s, int64_t h) {
    load_rows(g, p, p.log_decay, s, h, p.Dk, T(1));
    const int D = g.cols;
    for (int b = 0; b < kChunk; b += kBlock) {
      for (int d = 0; d < D; ++d) {
        double sum = 0;
        for (int i = b; i < b + kBlock; ++i) {
          const double x = double(*g.at(i, d));
          sum += x < kReset ? kReset : x;
          *L.at(i, d) = sum;
        }
      }
      for (int i = b; i < b + kBlock; ++i) {
        bool far = false;
        for (int d = 0; d < D; ++d) {
          const double x = *L.at(i, d), end = *L.at(b + kBlock - 1, d);
          *row.at(i, d) = T(x);
          *tail.at(i, d) = T(end - x);
          far |= x < -kLimit;
        }
        slow[i] = far;
      }
    }
    exp_negative(row.p, int(row.size()));
    exp_negative(tail.p, int(tail.size()));
    const T least = T(9.357622968840175e-14);  // exp(-30)
    for (size_t i = 0; i < row.size(); i += kLanes<T>) {
      const Vec<T> x = linattn::LINATTN_ISA::load(row.p + i);
      store(column.p + i, T(1) / (x < least ? broadcast(least) : x));
    }
    for (int d = 0; d < D; ++d) {
      first[d] = *row.at(kBlock - 1, d);
      second[d] = *row.at(kChunk - 1, d);
      total[d] = first[d] * second[d];
    }
  }

  // x as it reads the state before the chunk, and as it stands in the state after it; in place.
  void read(const Matrix<T>& x) const {
    for_vectors([&](int i, int d) {
      Vec<T> y = at(x, i, d) * at(row, i, d);
      if (i >= kBlock) y *= linattn::LINATTN_ISA::load(first + d);
      store(x.at(i, d), y);
    });
  }
  void write(const Matrix<T>& x) const {
    for_vectors([&](int i, int d) {
      Vec<T> y = at(x, i, d) * at(tail, i, d);
      if (i < kBlock) y *= linattn::LINATTN_ISA::load(second + d);
      store(x.at(i, d), y);
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
      for (int j = i / kBlock * kBlock; j < i + (strict ? 0 : 1); ++j) {
        Vec<T> s = {};
        for (int d = 0; d < row.cols; d += kLanes<T>)
          s += at(x, i, d) * at(y, j, d) * between(i, j, d);
        *out.at(i, j) = sum<T>(s);
      }
    }
  }

  // exp(L_i - L_j) of one block, for a vector of channels.
  LINATTN_INLINE Vec<T> between(int i, int j, int d) const {
    alignas(64) T x[kLanes<T>];
    for (int a = 0; a < kLanes<T>; ++a) x[a] = T(*L.at(i, d + a) - *L.at(j, d + a));
    return exp_negative(linattn::LINATTN_ISA::load(x));
  }

  // x_row = x row; y0 = y column in block 0; y1 = y tail in block 0 and y column in block 1.
  void prepare(const Matrix<T>& x, const Matrix<T>& y) const {
    for_vectors([&](int i, int d) {
      store(x_row.at(i, d), at(x, i, d) * at(row, i, d));
      const Vec<T> c = at(y, i, d) * at(column, i, d);
      if (i < kBlock) {
        store(y0.at(i, d), c);
        store(y1.at(i, d), at(y, i, d) * at(tail, i, d));
      } else {
        store(y1.at(i, d), c);
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
  template <class F>
  LINATTN_INLINE void for_vectors(const F& f) const {
    for (int i = 0; i < kChunk; ++i) {
      for (int d = 0; d < row.cols; d += kLanes<T>) f(i, d);
    }
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
