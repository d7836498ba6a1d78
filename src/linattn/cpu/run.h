// A run: one head of one sequence, and where its states are read and written.
#pragma once
#include "decay.h"
#include "memory.h"

namespace linattn {
namespace LINATTN_ISA {

struct Run {
  int64_t sequence, h, b, start, stop;
};

inline Run run_of(const Problem& p, int64_t sequence, int64_t h) {
  if (p.bounds) return {sequence, h, 0, p.bounds[sequence], p.bounds[sequence + 1]};
  return {sequence, h, sequence, 0, p.N};
}

// Make a Work and let it do every run of tasks [begin, end); false: no memory.
template <class Work>
inline bool run_all(const Problem& p, int64_t begin, int64_t end) {
  Workspace counter, space;
  Work sizes(counter, p);
  if (!space.allocate(counter.used())) return false;
  Work work(space, p);
  const int64_t together = heads_together(p), units = p.H / together;
  for (int64_t task = begin; task < end; ++task) {
    for (int64_t i = 0; i < together; ++i)
      work.run(p, run_of(p, task / units, task % units * together + i));
  }
  return true;
}

inline Span span_of(const Run& run, int64_t t) {
  const int64_t left = run.stop - t;
  return {run.b, t, int(left < kChunk ? left : kChunk)};
}

// Whether head h is the first of those that share a head of x: it writes, the others add.
inline bool is_first(const View& x, int64_t h, int64_t H) { return h % (H / x.heads) == 0; }

// The state [Dk (+ 1), Dv (+ 1)] by its parts.
template <class T>
struct State {
  Matrix<T> S;
  T* k = nullptr;  // [Dk] sum of k: the last column
  T* v = nullptr;  // [Dv] sum of v: the last row
  T count = 0;

  static State take(Workspace& w, int Dk, int Dv) {
    State x;
    x.S = w.matrix<T>(padded<T>(Dk), Dv);
    x.k = w.take<T>(x.S.rows);
    x.v = w.take<T>(x.S.cols);
    return x;
  }
  void zero() {
    S.zero();
    memset(k, 0, S.rows * sizeof(T));
    memset(v, 0, S.cols * sizeof(T));
    count = 0;
  }
  // From memory [Dk + affine, Dv + affine].
  void read(const Problem& p, const void* from) {
    zero();
    const T* x = static_cast<const T*>(from);
    const int columns = p.Dv + int(p.affine);
    for (int i = 0; i < p.Dk; ++i, x += columns) {
      for (int j = 0; j < p.Dv; j += S.pitch) {
        const int n = p.Dv - j < S.pitch ? p.Dv - j : S.pitch;
        memcpy(S.at(i, j), x + j, n * sizeof(T));
      }
      if (p.affine) k[i] = x[p.Dv];
    }
    if (!p.affine) return;
    memcpy(v, x, p.Dv * sizeof(T));
    count = x[p.Dv];
  }
  void write(const Problem& p, void* to) const {
    T* x = static_cast<T*>(to);
    const int columns = p.Dv + int(p.affine);
    for (int i = 0; i < p.Dk; ++i, x += columns) {
      for (int j = 0; j < p.Dv; j += S.pitch) {
        const int n = p.Dv - j < S.pitch ? p.Dv - j : S.pitch;
        memcpy(x + j, S.at(i, j), n * sizeof(T));
      }
      if (p.affine) x[p.Dv] = k[i];
    }
    if (!p.affine) return;
    memcpy(x, v, p.Dv * sizeof(T));
    x[p.Dv] = count;
  }
};

template <class T>
inline int64_t state_size(const Problem& p) {
  return int64_t(p.Dk + int(p.affine)) * (p.Dv + int(p.affine));
}
template <class T>
inline T* state_of(const Problem& p, const void* states, const Run& run) {
  return static_cast<T*>(const_cast<void*>(states)) +
         (run.sequence * p.H + run.h) * state_size<T>(p);
}
template <class T>
inline T* saved_state(const Problem& p, const Run& run, int64_t t) {
  const int64_t slot = t / p.segment - 1;
  return static_cast<T*>(p.saved) + ((slot * p.B + run.b) * p.H + run.h) * state_size<T>(p);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
