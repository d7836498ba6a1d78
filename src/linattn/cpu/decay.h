// One decay a token and head inside a chunk: what it multiplies, and its gradient.
//
// With L_t = g_1 + ... + g_t in the chunk (summed in double; g clamped at -800, where exp is 0):
//   read_i = exp(L_i)   write_j = exp(L_C - L_j)   total = exp(L_C)   pairs_ij = exp(L_i - L_j)
// pairs_ij is a running product down the column, so it needs no exponent above 0 and no exp.
#pragma once
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr int kChunk = 32;  // 64 costs twice the C x C products; 16 halves the tiles: docs/cpu.md
constexpr double kReset = -800.0;

template <class T>
struct TokenDecay {
  alignas(64) T alpha[kChunk], read[kChunk], write[kChunk];
  T total = 1;
  Matrix<T> pairs;  // [C, C], 0 above the diagonal

  void fill_without_decay() {
    for (int i = 0; i < kChunk; ++i) alpha[i] = read[i] = write[i] = 1;
    total = 1;
  }

  // From log-decays [C]; 0 where there is no token.
  void fill(const T* g) {
    double sum = 0, L[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      const double x = g[i] < T(kReset) ? kReset : double(g[i]);
      alpha[i] = T(x);
      sum += x;
      L[i] = sum;
    }
    for (int i = 0; i < kChunk; ++i) {
      read[i] = T(L[i]);
      write[i] = T(sum - L[i]);
    }
    exp_negative(alpha, kChunk);
    exp_negative(read, kChunk);
    exp_negative(write, kChunk);
    total = read[kChunk - 1];
  }

  // Row i of pairs is row i - 1 times alpha_i, and 1 on the diagonal.
  void fill_pairs() const {
    const Vec<T> column = places<T>();
    for (int j = 0; j < kChunk; j += kLanes<T>) {
      Vec<T> row = {};
      for (int i = 0; i < kChunk; ++i) {
        const Vec<T> faded = column < T(i - j) ? row * alpha[i] : Vec<T>{};
        row = column == T(i - j) ? broadcast(T(1)) : faded;
        store(pairs.at(i, j), row);
      }
    }
  }
};

// Multiply the lower triangle of scores by the decay, set the rest of its vectors to 0.
template <class T>
inline void decay_scores(const Matrix<T>& scores, const Matrix<T>& pairs) {
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; j += kLanes<T>)
      if (j <= i)
        store(scores.at(i, j), load(scores.at(i, j)) * load(pairs.at(i, j)));
      else
        store(scores.at(i, j), Vec<T>{});
  }
}

// The lower triangle, with nothing but zeros above; `strict`: and on the diagonal.
template <class T>
inline void lower(const Matrix<T>& x, bool strict = false) {
  const Vec<T> column = places<T>();
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; j += kLanes<T>) {
      const T last = T(strict ? i - 1 - j : i - j);  // in this vector
      store(x.at(i, j), column <= last ? load(x.at(i, j)) : Vec<T>{});
    }
  }
}

template <class T>
inline void scale_rows(const Matrix<T>& out, const Matrix<T>& x, const T* factors) {
  for (int i = 0; i < out.rows; ++i) {
    for (int j = 0; j < out.cols; j += kLanes<T>)
      store(out.at(i, j), load(x.at(i, j)) * factors[i]);
  }
}

template <class T>
inline T dot_rows(const Matrix<T>& x, const Matrix<T>& y, int i) {
  Vec<T> s = {};
  for (int j = 0; j < x.cols; j += kLanes<T>) s += load(x.at(i, j)) * load(y.at(i, j));
  return sum<T>(s);
}
template <class T>
inline T dot_row(const Matrix<T>& x, int i, const T* y) {
  Vec<T> s = {};
  for (int j = 0; j < x.cols; j += kLanes<T>) s += load(x.at(i, j)) * load(y + j);
  return sum<T>(s);
}
template <class T>
inline T dot_all(const Matrix<T>& x, const Matrix<T>& y) {
  Vec<T> sums[4] = {};  // one would be a chain
  for (int j = 0; j < x.cols; j += kLanes<T>) {  // not the unused rest of the last panel
    for (int i = 0; i < x.rows; i += 4) {
      LINATTN_UNROLL
      for (int r = 0; r < 4; ++r) sums[r] += load(x.at(i + r, j)) * load(y.at(i + r, j));
    }
  }
  return sum<T>(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// The gradient of g_t is what crosses from before t to t or later, and nothing else:
// pairs j < t <= i, reads i >= t, writes j < t, and what passes the whole chunk.
template <class T>
inline void decay_gradient(
    T* dg, const Matrix<T>& pairs, const T* reads, const T* writes, T passed) {
  alignas(64) T column[kChunk];  // sum over i >= t of pairs_ij
  for (int j = 0; j < kChunk; ++j) column[j] = 0;
  T read = 0;
  for (int t = kChunk - 1; t >= 0; --t) {
    for (int j = 0; j < t; j += kLanes<T>)
      store(column + j, load(column + j) + load(pairs.at(t, j)));
    column[t] = 0;  // from now on t is no longer before t; the diagonal crosses nothing
    Vec<T> crossing = {};
    for (int j = 0; j < t; j += kLanes<T>) crossing += load(column + j);
    read += reads[t];
    dg[t] = passed + read + sum<T>(crossing);
  }
  T written = 0;
  for (int t = 0; t < kChunk; ++t) {
    dg[t] += written;
    written += writes[t];
  }
}

}  // namespace LINATTN_ISA
}  // namespace linattn
