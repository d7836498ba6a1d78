// The gradient of what one decay a channel does inside a chunk; see channel_decay.h.
#pragma once
#include "channel_decay.h"

namespace linattn {
namespace LINATTN_ISA {

template <class T>
struct ChannelGradient {
  Matrix<T> dg;                                     // [C, Dk]
  Matrix<T> by_row, by_column, crossing;            // [C, Dk]
  Matrix<T> fast;                                   // [C, C]

  void take(Workspace& w, int Dk) {
    for (Matrix<T>* x : {&dg, &by_row, &by_column, &crossing}) *x = w.matrix<T>(kChunk, Dk);
    fast = w.matrix<T>(kChunk, kChunk);
  }

  static LINATTN_INLINE Vec<T> at(const Matrix<T>& x, int i, int d) { return load(x.at(i, d)); }

  // dx, dy: gradients of x and y through scores(x, y), for which c was prepared last; and the
  // pairs' part of dg. `grad` is lower triangular; kMore: dg, dx and dy are added to.
  template <bool kMore>
  void pairs(
      const ChannelDecay<T>& c, const Matrix<T>& dx, const Matrix<T>& dy, const Matrix<T>& grad,
      const Matrix<T>& x, const Matrix<T>& y) {
    const int D = c.row.cols;
    // Without the diagonal, and inside the blocks without rows that are computed pair by pair.
    fast.copy(grad);
    for (int i = 0; i < kChunk; ++i) {
      *fast.at(i, i) = 0;
      for (int j = i / kBlock * kBlock; c.slow[i] && j < i; ++j) *fast.at(i, j) = 0;
    }
    const auto below = [](const Matrix<T>& m) { return ChannelDecay<T>::below(m); };
    Matrix<T> second = fast;  // rows and columns of the second block
    second.p = fast.at(kBlock, kBlock);
    product(by_row, fast, c.y0, kBlock, D, kBlock);
    product(below(by_row), below(fast), c.y1, kBlock, D, kChunk);
    product<T, true>(by_column, fast, c.x_row, kBlock, D, kBlock);
    product<T, true>(below(by_column), second, below(c.x_row), kBlock, D, kBlock);
    product<T, true>(crossing, below(fast), below(c.x_row), kBlock, D, kBlock);

    // A pair inside a block crosses t if it is counted by its row and not by its key; every pair
    // of both blocks crosses each t of the second up to its row, and of the first after its key.
    for (int d = 0; d < D; d += kLanes<T>) {
      const auto at_d = [&](const Matrix<T>& m, int i) { return at(m, i, d); };
      Vec<T> after = {};
      const auto row = [&](int t, const Matrix<T>& keys, Vec<T> dy_crossing) {
        const Vec<T> a = at_d(by_row, t), b = at_d(by_column, t);
        const T own = *grad.at(t, t);
        after += a * at_d(c.x_row, t) - b * at_d(keys, t);
        add<kMore>(dx.at(t, d), a * at_d(c.row, t) + at_d(y, t) * own);
        add<kMore>(dy.at(t, d), b * at_d(c.column, t) + at_d(x, t) * own + dy_crossing);
        add<kMore>(dg.at(t, d), after);
      };
      for (int t = kChunk - 1; t >= kBlock; --t) row(t, c.y1, Vec<T>{});
      after = Vec<T>{};
      for (int t = kBlock - 1; t >= 0; --t) row(t, c.y0, at_d(crossing, t) * at_d(c.tail, t));
      Vec<T> before = {};
      for (int t = 0; t < kBlock; ++t) {
        add<true>(dg.at(t, d), before);
        before += at_d(crossing, t) * at_d(c.y1, t);
      }
    }
    for (int i = 0; i < kChunk; ++i) {
      if (c.slow[i]) slow_row(c, i, dx, dy, grad, x, y);
    }
  }

  template <bool kMore>
  static LINATTN_INLINE void add(T* to, Vec<T> x) {
    store(to, kMore ? load(to) + x : x);
  }

  void slow_row(
      const ChannelDecay<T>& c, int i, const Matrix<T>& dx, const Matrix<T>& dy,
      const Matrix<T>& grad, const Matrix<T>& x, const Matrix<T>& y) {
    c.for_pairs_of(i, [&](int j, int d, Vec<T> decay) {
      if (j == i) return;
      const Vec<T> e = decay * *grad.at(i, j), from_row = e * at(y, j, d);
      add<true>(dx.at(i, d), from_row);
      add<true>(dy.at(j, d), e * at(x, i, d));
      for (int t = j + 1; t <= i; ++t) add<true>(dg.at(t, d), from_row * at(x, i, d));
    });
  }

  // What reads the state before, writes to the state after, and passes the chunk. S^T and Z^T
  // [Dv, Dk]. more_read and more_gradient: keys that read the state too (the delta rule).
  void finish(
      const ChannelDecay<T>& c, const Matrix<T>& dq, const Matrix<T>& dk, const Matrix<T>& q_read,
      const Matrix<T>& d_read, const Matrix<T>& k_write, const Matrix<T>& d_write,
      const Matrix<T>& S_t, const Matrix<T>& Z_t, const Matrix<T>* k_read,
      const Matrix<T>* d_k_read) {
    for (int d = 0; d < c.row.cols; d += kLanes<T>) {
      const Vec<T> first = load(c.first + d), second = load(c.second + d);
      Vec<T> even = {}, odd = {};
      for (int e = 0; e + 1 < S_t.rows; e += 2) {
        even += at(S_t, e, d) * at(Z_t, e, d);
        odd += at(S_t, e + 1, d) * at(Z_t, e + 1, d);
      }
      Vec<T> after = (even + odd) * load(c.total + d);
      for (int t = kChunk - 1; t >= 0; --t) {
        const Vec<T> by_query = at(d_read, t, d);
        const Vec<T> read = t < kBlock ? at(c.row, t, d) : at(c.row, t, d) * first;
        after += at(q_read, t, d) * by_query;
        add<true>(dq.at(t, d), by_query * read);
        if (k_read) {
          const Vec<T> by_key = at(*d_k_read, t, d);
          after += at(*k_read, t, d) * by_key;
          add<true>(dk.at(t, d), by_key * read);
        }
        add<true>(dg.at(t, d), after);
      }
      Vec<T> before = {};
      for (int t = 0; t < kChunk; ++t) {
        const Vec<T> by_write = at(d_write, t, d);
        const Vec<T> write = t < kBlock ? at(c.tail, t, d) * second : at(c.tail, t, d);
        add<true>(dg.at(t, d), before);
        before += at(k_write, t, d) * by_write;
        add<true>(dk.at(t, d), by_write * write);
      }
    }
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
