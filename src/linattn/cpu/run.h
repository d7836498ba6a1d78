// A run: one head of one sequence, where its states are read and written, and the walk over runs.
#pragma once
#include "decay.h"
#include "memory.h"

namespace linattn {
namespace LINATTN_ISA {

struct Run {
  int64_t sequence, h, b, start, stop;
};

inline Run run_of(const Problem& p, int64_t sequence, int64_t h) {
  if (p.bounds) {
    const int64_t each = p.sequences / p.B, i = sequence % each;
    return {sequence, h, sequence / each, p.bounds[i], p.bounds[i + 1]};
  }
  return {sequence, h, sequence, 0, p.N};
}

// Tokens [start, stop) of a run, and where the next stretch of this thread starts: outside its run
// where there is none.
struct Stretch {
  Run run;
  int64_t start, stop;
  Run coming;
  int64_t coming_start;
};

// Heads that a thread walks side by side, a segment of tokens of each in turn: in [B, N, H, D] the
// rows of one head lie a page apart, and heads side by side look each page up once for all of
// them. Their states wait in the second-level cache.
constexpr int kMostHeads = 8;
template <class T>
inline int heads_at_once(const Problem& p) {
  const int64_t state = int64_t(p.Dk) * p.Dv * int64_t(sizeof(T)), most = (256 << 10) / state;
  return int(most < 1 ? 1 : most > kMostHeads ? kMostHeads : most > p.H ? p.H : most);
}

// Make a Work and let it do every run of tasks [begin, end); false: no memory. A Work has
//   begin(p, run, slot)   segment(p, stretch, slot, phase)   end(p, run, slot)
// and walks kPhases times over the segments, if kBackwards from the last to the first.
template <class T, class Work>
inline bool run_all(const Problem& p, int64_t begin, int64_t end) {
  const int slots = heads_at_once<T>(p);
  Workspace counter, space;
  Work sizes(counter, p, slots);
  if (!space.allocate(counter.used())) return false;
  Work work(space, p, slots);
  const int64_t together = heads_together(p), stop = end * together;
  for (int64_t i = begin * together; i < stop;) {
    const int64_t sequence = i / p.H, next = (sequence + 1) * p.H;
    const int64_t left = (stop < next ? stop : next) - i, n = left < slots ? left : slots;
    const Run first = run_of(p, sequence, i % p.H);
    const int64_t segments = (first.stop - first.start + p.segment - 1) / p.segment;
    Run runs[kMostHeads];
    for (int64_t s = 0; s < n; ++s) {
      runs[s] = run_of(p, sequence, i % p.H + s);
      work.begin(p, runs[s], int(s));
    }
    for (int phase = 0; phase < Work::kPhases; ++phase) {
      if (p.phase >= 0 && phase != p.phase) continue;
      for (int64_t m = 0; m < segments; ++m) {
        const int64_t t = first.start + (Work::kBackwards ? segments - 1 - m : m) * p.segment;
        const int64_t past = t + p.segment < first.stop ? t + p.segment : first.stop;
        const int64_t later = Work::kBackwards ? t - p.segment : past;
        for (int64_t s = 0; s < n; ++s) {
          Stretch x = {runs[s], t, past, runs[0], later};
          if (s + 1 < n) x.coming = runs[s + 1], x.coming_start = t;
          work.segment(p, x, int(s), phase);
        }
      }
    }
    for (int64_t s = 0; s < n; ++s) work.end(p, runs[s], int(s));
    i += n;
  }
  return true;
}

// The chunk of a run that starts at t; empty outside of the run.
inline Span span_of(const Run& run, int64_t t) {
  if (t < run.start || t >= run.stop) return {run.b, run.start, 0};
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
  static State* take(Workspace& w, int Dk, int Dv, int n) {
    State* all = w.take<State>(n);
    for (int i = 0; i < n; ++i) {
      const State x = take(w, Dk, Dv);
      if (all) all[i] = x;
    }
    return all;
  }
  void zero() {
    S.zero();
    memset(k, 0, S.rows * sizeof(T));
    memset(v, 0, S.cols * sizeof(T));
    count = 0;
  }
  // From memory [Dk + affine, Dv + affine]; null: 0.
  void read(const Problem& p, const void* from) {
    zero();
    if (!from) return;
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

// What a backward walk will want while the states of a segment are made again, before its chunk at
// t: the keys and values of the next chunk, and all of the last one, which comes first.
inline void ask_again(Ahead& ahead, const Problem& p, const Stretch& x, int64_t t) {
  ahead.clear();
  const Span s = span_of(x.run, t + kChunk);
  ask_rows(ahead, p, p.k, s, x.run.h, p.Dk);
  ask_rows(ahead, p, p.v, s, x.run.h, p.Dv);
  if (t + 2 * kChunk < x.stop) return;
  ask_rows(ahead, p, p.q, s, x.run.h, p.Dk);
  ask_rows(ahead, p, p.grad_o, s, x.run.h, p.Dv);
}
// And while the chunk at t is worked on: where its gradients go, the chunk before it, or the first
// of the coming segment.
inline void ask_before(Ahead& ahead, const Problem& p, const Stretch& x, int64_t t) {
  ahead.clear();
  const Span s = span_of(x.run, t);
  ask_rows(ahead, p, p.dq, s, x.run.h, p.Dk);
  ask_rows(ahead, p, p.dk, s, x.run.h, p.Dk);
  ask_rows(ahead, p, p.dv, s, x.run.h, p.Dv);
  if (t > x.start) {
    const Span before = span_of(x.run, t - kChunk);
    ask_rows(ahead, p, p.q, before, x.run.h, p.Dk);
    ask_rows(ahead, p, p.grad_o, before, x.run.h, p.Dv);
  } else {
    const Span first = span_of(x.coming, x.coming_start);
    ask_rows(ahead, p, p.k, first, x.coming.h, p.Dk);
    ask_rows(ahead, p, p.v, first, x.coming.h, p.Dv);
  }
}

// What the state of each slot is decayed by over a run, where p.totals asks for it.
template <class T>
struct Totals {
  T* all = nullptr;
  int rows = 0;

  void take(Workspace& w, const Problem& p, int slots) {
    rows = padded<T>(p.Dk + 1);
    if (p.totals) all = w.take<T>(size_t(rows) * slots);
  }
  void begin(const Problem& p, int slot) {
    for (int i = 0; p.totals && i < rows; ++i) all[slot * rows + i] = 1;
  }
  // factors [Dk] of a chunk, or one for all.
  void pass(const Problem& p, int slot, const T* factors, T factor) {
    for (int i = 0; p.totals && i < p.Dk + int(p.affine); ++i)
      all[slot * rows + i] *= factors ? factors[i] : factor;
  }
  void end(const Problem& p, const Run& run, int slot) const {
    if (!p.totals) return;
    const int n = p.Dk + int(p.affine);
    memcpy(static_cast<T*>(p.totals) + (run.sequence * p.H + run.h) * n, all + slot * rows,
           n * sizeof(T));
  }
};

template <class T>
inline int64_t state_size(const Problem& p) {
  return int64_t(p.Dk + int(p.affine)) * (p.Dv + int(p.affine));
}
template <class T>
inline T* state_of(const Problem& p, const void* states, const Run& run) {
  if (!states) return nullptr;
  return static_cast<T*>(const_cast<void*>(states)) +
         (run.sequence * p.H + run.h) * state_size<T>(p);
}
// The state at the start of a segment, if not of the run's own start: of a part, it is saved too.
inline bool is_saved(const Problem& p, const Run& run, int64_t t) {
  return t > (p.cut ? 0 : run.start);
}
// Before the first token of a sequence; only backward asks for it by a part.
template <class T>
inline T* before_all(const Problem& p, const Run& run) {
  Run whole = run;
  if (p.cut) whole.sequence = run.b;
  return state_of<T>(p, p.initial_state, whole);
}
template <class T>
inline T* saved_state(const Problem& p, const Run& run, int64_t t) {
  const int64_t slot = t / p.segment - 1;
  return static_cast<T*>(p.saved) + ((slot * p.B + run.b) * p.H + run.h) * state_size<T>(p);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
