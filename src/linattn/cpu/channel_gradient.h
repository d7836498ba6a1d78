// The gradient of what one decay a channel does inside a chunk; see channel_decay.h.
#pragma once
#include "channel_decay.h"

namespace linattn {
namespace LINATTN_ISA {

template <class T>
struct ChannelGradient {
  Matrix<T> dg;                           // [C, Dk]
  Matrix<T> by_row, by_column, crossing;  // [C, Dk]
  Matrix<T> fast;                         // [C, C]
  Matrix<T> in_block;                     // [C, Dk] what is summed over i >= t inside the block
  T* running;

  void take(Workspace& w, int Dk) {
    for (Matrix<T>* x : {&dg, &by_row, &by_column, &crossing, &in_block})
      *x = w.matrix<T>(kChunk, Dk);
    fast = w.matrix<T>(kChunk, kChunk);
    running = w.take<T>(Dk);
  }

  static LINATTN_INLINE Vec<T> at(const Matrix<T>& x, int i, int d) { return load(x.at(i, d)); }

  // dx, dy: gradients of x and y through scores(x, y); the pairs' part of dg.
  // `grad` is lower triangular, and `more`: dg, dx and dy are added to.
  void pairs(
      const ChannelDecay<T>& c, const Matrix<T>& dx, const Matrix<T>& dy, const Matrix<T>& grad,
      const Matrix<T>& x, const Matrix<T>& y, bool more) {
    if (!more) {
      dg.zero();
      dx.zero();
      dy.zero();
    }
    c.prepare(x, y);
    const int D = c.row.cols;
    // Inside the blocks, without the diagonal and the rows that are computed pair by pair.
    fast.zero();
    for (int i = 0; i < kChunk; ++i) {
      if (c.slow[i]) continue;
      for (int j = i / kBlock * kBlock; j < i; ++j) *fast.at(i, j) = *grad.at(i, j);
    }
    const auto below = [](const Matrix<T>& m) { return ChannelDecay<T>::below(m); };
    Matrix<T> second = fast;  // rows and columns of the second block
    second.p = fast.at(kBlock, kBlock);
    product(by_row, fast, c.y0, kBlock, D, kBlock);
    product(below(by_row), second, below(c.y1), kBlock, D, kBlock);
    product<T, true>(by_column, fast, c.x_row, kBlock, D, kBlock);
    product<T, true>(below(by_column), second, below(c.x_row), kBlock, D, kBlock);
    c.for_vectors([&](int i, int d) {
      const Vec<T> a = at(by_row, i, d), b = at(by_column, i, d);
      const Vec<T> key = i < kBlock ? at(c.y0, i, d) : at(c.y1, i, d);
      store(in_block.at(i, d), a * at(c.x_row, i, d) - b * key);
      store(dx.at(i, d), at(dx, i, d) + a * at(c.row, i, d));
      store(dy.at(i, d), at(dy, i, d) + b * at(c.column, i, d));
    });
    // Keys of the first block, queries of the second. Every pair crosses each t of the second
    // block up to its row, and each t of the first that its key is before.
    product(below(by_row), below(grad), c.y1, kBlock, D, kBlock);
    product<T, true>(by_column, below(grad), below(c.x_row), kBlock, D, kBlock);
    for (int i = 0; i < kBlock; ++i) {
      for (int d = 0; d < D; d += kLanes<T>) {
        const int j = i + kBlock;
        const Vec<T> a = at(by_row, j, d), b = at(by_column, i, d);
        store(dx.at(j, d), at(dx, j, d) + a * at(c.row, j, d));
        store(in_block.at(j, d), at(in_block, j, d) + a * at(c.x_row, j, d));
        store(dy.at(i, d), at(dy, i, d) + b * at(c.tail, i, d));
        store(crossing.at(i, d), b * at(c.y1, i, d));
      }
    }
    for (int d = 0; d < D; d += kLanes<T>) {
      Vec<T> s = {};
      for (int t = kChunk - 1; t >= 0; --t) {
        if (t == kBlock - 1) s = Vec<T>{};
        s += at(in_block, t, d);
        store(dg.at(t, d), at(dg, t, d) + s);
      }
      Vec<T> before = {};
      for (int t = 0; t < kBlock; ++t) {
        store(dg.at(t, d), at(dg, t, d) + before);
        before += at(crossing, t, d);
      }
    }
    diagonal_and_slow_rows(c, dx, dy, grad, x, y);
  }

  void diagonal_and_slow_rows(
      const ChannelDecay<T>& c, const Matrix<T>& dx, const Matrix<T>& dy, const Matrix<T>& grad,
      const Matrix<T>& x, const Matrix<T>& y) {
    for (int i = 0; i < kChunk; ++i) {
      for (int j = c.slow[i] ? i / kBlock * kBlock : i; j <= i; ++j) {
        const T weight = *grad.at(i, j);
        for (int d = 0; d < c.row.cols; d += kLanes<T>) {
          const Vec<T> e = (j < i ? c.between(i, j, d) : broadcast(T(1))) * weight;
          const Vec<T> from_row = e * at(y, j, d);
          store(dx.at(i, d), at(dx, i, d) + from_row);
          store(dy.at(j, d), at(dy, j, d) + e * at(x, i, d));
          const Vec<T> pair = from_row * at(x, i, d);
          for (int t = j + 1; t <= i; ++t) store(dg.at(t, d), at(dg, t, d) + pair);
        }
      }
    }
  }

  // What reads the state before, writes to the state after, and passes the chunk. S^T and Z^T
  // [Dv, Dk]. more_read and more_gradient: keys that read the state too (the delta rule).
  void finish(
      const ChannelDecay<T>& c, const Matrix<T>& dq, const Matrix<T>& dk, const Matrix<T>& q_read,
      const Matrix<T>& d_read, const Matrix<T>& k_write, const Matrix<T>& d_write,
      const Matrix<T>& S_t, const Matrix<T>& Z_t, const Matrix<T>* k_read,
      const Matrix<T>* d_k_read) {
    const int D = c.row.cols;
    for (int d = 0; d < D; d += kLanes<T>) {
      Vec<T> passed = {};
      for (int e = 0; e < S_t.rows; ++e) passed += at(S_t, e, d) * at(Z_t, e, d);
      passed *= load(c.total + d);
      Vec<T> s = passed;
      for (int t = kChunk - 1; t >= 0; --t) {
        s += at(q_read, t, d) * at(d_read, t, d);
        if (k_read) s += at(*k_read, t, d) * at(*d_k_read, t, d);
        store(dg.at(t, d), at(dg, t, d) + s);
      }
      Vec<T> written = {};
      for (int t = 0; t < kChunk; ++t) {
        store(dg.at(t, d), at(dg, t, d) + written);
        written += at(k_write, t, d) * at(d_write, t, d);
      }
    }
    c.for_vectors([&](int i, int d) {
      Vec<T> read = at(c.row, i, d), write = at(c.tail, i, d);
      if (i < kBlock)
        write *= load(c.second + d);
      else
        read *= load(c.first + d);
      store(dq.at(i, d), at(dq, i, d) + at(d_read, i, d) * read);
      Vec<T> key = at(d_write, i, d) * write;
      if (k_read) key += at(*d_k_read, i, d) * read;
      store(dk.at(i, d), at(dk, i, d) + key);
    });
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
