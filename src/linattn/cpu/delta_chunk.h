// What forward and backward of the delta rule share: the triangular system of one chunk.
//
//   A = strictly lower scores(k, k)   M = I + Diag(beta) A   U = M^-1 Diag(beta) (V - read(k) S)
//
// U is found by forward substitution, four rows at a time: what earlier rows give is a product of
// a register tile's height, what the four give each other is done row by row.
#pragma once
#include "channel_decay.h"

namespace linattn {
namespace LINATTN_ISA {

template <class T>
inline Matrix<T> rows_from(Matrix<T> x, int i) {
  x.p += size_t(i) * x.pitch;
  return x;
}

// y_i -= a x_j, whole rows.
template <class T>
inline void subtract_row(const Matrix<T>& y, int i, T a, const Matrix<T>& x, int j) {
  for (int d = 0; d < y.cols; d += kLanes<T>)
    store(y.at(i, d), load(y.at(i, d)) - load(x.at(j, d)) * a);
}

// x = (I + A)^-1 x, A strictly lower triangular.
template <class T>
inline void solve_lower(const Matrix<T>& A, const Matrix<T>& x, int n) {
  Into<T> minus;
  minus.add = true;
  minus.minus = true;
  for (int i = 0; i < n; i += kRows) {
    if (i > 0)
      product(rows_from(x, i), rows_from(A, i), x, kRows, x.cols, i, Part::kAll, minus);
    for (int r = 1; r < kRows; ++r) {
      for (int c = 0; c < r; ++c) subtract_row(x, i + r, *A.at(i + r, i + c), x, i + c);
    }
  }
}

// x = (I + A)^-T x.
template <class T>
inline void solve_lower_transposed(const Matrix<T>& A, const Matrix<T>& x) {
  Into<T> minus;
  minus.add = true;
  minus.minus = true;
  for (int i = kChunk - kRows; i >= 0; i -= kRows) {
    const int after = i + kRows;
    if (after < kChunk) {
      Matrix<T> columns = A;  // columns i.. of the rows after
      columns.p = A.at(after, i);
      product<T, true>(rows_from(x, i), columns, rows_from(x, after), kRows, x.cols,
                       kChunk - after, Part::kAll, minus);
    }
    for (int r = kRows - 2; r >= 0; --r) {
      for (int c = r + 1; c < kRows; ++c) subtract_row(x, i + r, *A.at(i + c, i + r), x, i + c);
    }
  }
}

template <class T>
struct DeltaChunk {
  Matrix<T> q, k, v, q_read, k_read, k_write;  // q times scale
  Matrix<T> keys, system, weights;             // A, Diag(beta) A, scores(q, k)
  Matrix<T> remaining, U;                      // V - read(k) S, and what is written
  Matrix<T> k_transposed;
  TokenDecay<T> decay;
  ChannelDecay<T> channel;
  T *gates, *beta;
  Ahead ahead;

  void take(Workspace& w, const Problem& p) {
    const int Dk = padded<T>(p.Dk), Dv = padded<T>(p.Dv);
    for (Matrix<T>* x : {&q, &k, &q_read, &k_read, &k_write}) *x = w.matrix<T>(kChunk, Dk);
    for (Matrix<T>* x : {&v, &remaining, &U}) *x = w.matrix<T>(kChunk, Dv);
    for (Matrix<T>* x : {&keys, &system, &weights, &decay.pairs})
      *x = w.matrix<T>(kChunk, kChunk);
    k_transposed = w.matrix<T>(Dk, kChunk);
    gates = w.take<T>(kChunk);
    beta = w.take<T>(kChunk);
    if (p.decay == Decay::kChannel) channel.take(w, Dk);
  }

  T total() const { return decay.total; }

  // Bring one chunk here; `queries`: q and its scores as well.
  void load(const Problem& p, const Span& s, int64_t h, bool queries) {
    load_rows(k, p, p.k, s, h, p.Dk, T(1));
    load_rows(v, p, p.v, s, h, p.Dv, T(1));
    load_numbers(beta, p, p.beta, s, h, kChunk, T(0));
    if (queries) load_rows(q, p, p.q, s, h, p.Dk, T(p.scale));
    if (p.decay == Decay::kChannel) {
      channel.load(p, s, h);
      channel.scores(keys, k, k, true);
      if (queries) channel.scores(weights, q, k, false);
      channel.read(k_read, k);
      channel.write(k_write, k);
      if (queries) channel.read(q_read, q);
    } else {
      if (p.decay == Decay::kNone) {
        decay.fill_without_decay();
      } else {
        load_numbers(gates, p, p.log_decay, s, h, kChunk, T(0));
        decay.fill(gates);
      }
      decay.fill_pairs();
      transpose(k_transposed, k, kChunk, k.cols);
      product(keys, k, k_transposed, kChunk, kChunk, p.Dk, Part::kLowerC);
      decay_scores(keys, decay.pairs);
      lower(keys, true);
      scale_rows(k_read, k, decay.read);
      scale_rows(k_write, k, decay.write);
      if (queries) {
        product(weights, q, k_transposed, kChunk, kChunk, p.Dk, Part::kLowerC);
        decay_scores(weights, decay.pairs);
        scale_rows(q_read, q, decay.read);
      }
    }
    scale_rows(system, keys, beta);
  }

  // U from the state S [Dk, Dv] before the chunk.
  void write(const Problem& p, const Matrix<T>& S) {
    Into<T> minus;
    minus.add = true;
    minus.minus = true;
    remaining.copy(v);
    product(remaining, k_read, S, kChunk, p.Dv, p.Dk, Part::kAll, minus, &ahead);
    scale_rows(U, remaining, beta);
    solve_lower(system, U, kChunk);
  }

  // S becomes the state after the chunk.
  void carry(const Problem& p, const Matrix<T>& S) {
    const bool channels = p.decay == Decay::kChannel;
    Into<T> into;
    into.add = true;
    into.factor = channels ? T(1) : decay.total;
    into.rows = channels ? channel.total : nullptr;
    product<T, true>(S, k_write, U, S.rows, p.Dv, kChunk, Part::kAll, into, &ahead);
  }
};

}  // namespace LINATTN_ISA
}  // namespace linattn
