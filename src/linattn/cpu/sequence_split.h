// One long sequence on several threads, where there are fewer heads than threads.
//
// The sequence is cut into parts, and its states at the cuts are found first: every part but the
// last is cut once more, the threads sum each piece from 0 with what it decays in all, and a scan
//   S after = total S before + sum
// over the pieces gives the state at every cut. Then the parts are independent: for the kernels
// they are packed sequences, each with an initial state. Backward scans the gradient of the state
// from the end; the states at the cuts are among those that forward has saved.
//
// A pass over the sums is 2 D^2 FLOPs a token: at D = 64 a third of a forward pass, an eighth of a
// backward one (docs/cpu.md), for (P - 1) / P of the tokens with P threads.
#pragma once
#include <stdlib.h>
#include <string.h>

#include "problem.h"

namespace linattn {

constexpr int64_t kSegmentsAPart = 8;  // below, a part is not worth a thread

inline int64_t parts_of(const Problem& p, int64_t threads) {
  if (p.bounds || p.B * p.N == 0) return 1;
  const int64_t idle = threads / number_of_tasks(p), most = p.N / (kSegmentsAPart * p.segment);
  return idle < most ? idle : most;
}

// Memory that a call needs for its parts; `ok` is false if there was too little.
class Scratch {
 public:
  template <class T>
  T* take(int64_t n) {
    void* x = calloc(size_t(n > 0 ? n : 1), sizeof(T));
    if (!x || count_ == kMost) {
      free(x);
      ok = false;
      return nullptr;
    }
    blocks_[count_++] = x;
    return static_cast<T*>(x);
  }
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (int i = 0; i < count_; ++i) free(blocks_[i]);
  }
  bool ok = true;

 private:
  static constexpr int kMost = 8;
  void* blocks_[kMost];
  int count_ = 0;
};

struct Cuts {
  int64_t parts, pieces;                // pieces: parts of all parts but one
  int64_t *of_parts, *of_pieces;        // tokens, [parts + 1], [pieces + 1]
  int64_t rows, columns;                // of a state

  // Pieces cover parts [first, first + parts - 1).
  Cuts(Scratch& s, const Problem& p, int64_t parts_, int64_t first)
      : parts(parts_), pieces(parts_ * (parts_ - 1)), rows(p.Dk + int(p.affine)),
        columns(p.Dv + int(p.affine)) {
    of_parts = s.take<int64_t>(parts + 1);
    of_pieces = s.take<int64_t>(pieces + 1);
    if (!s.ok) return;
    const int64_t segments = (p.N + p.segment - 1) / p.segment, all = parts * parts;
    const auto cut = [&](int64_t i) {
      const int64_t t = segments * i / all * p.segment;
      return t < p.N ? t : p.N;
    };
    for (int64_t i = 0; i <= parts; ++i) of_parts[i] = cut(i * parts);
    for (int64_t i = 0; i <= pieces; ++i) of_pieces[i] = cut(first * parts + i);
  }
  int64_t state() const { return rows * columns; }
};

// S = total S + sum, row by row.
template <class T>
inline void pass_piece(const Cuts& c, T* S, const T* total, const T* sum) {
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) {
      const int64_t at = i * c.columns + j;
      S[at] = total[i] * S[at] + sum[at];
    }
  }
}

// States at the cuts of the parts: `at_cuts` [B, parts, H, ...] from `given` [B, H, ...] (null: 0) at
// the first part, or if `backwards` at the last, through the sums and totals of the pieces.
template <class T>
inline void scan_pieces(
    const Problem& p, const Cuts& c, const void* given, const T* totals, const T* sums, T* at_cuts,
    bool backwards) {
  const size_t bytes = size_t(c.state()) * sizeof(T);
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t n = 0; n < c.parts; ++n) {
        const int64_t part = backwards ? c.parts - 1 - n : n;
        const auto state = [&](int64_t i) { return at_cuts + ((b * c.parts + i) * p.H + h) * c.state(); };
        T* S = state(part);
        if (n == 0) {
          if (given) memcpy(S, static_cast<const T*>(given) + (b * p.H + h) * c.state(), bytes);
          continue;
        }
        memcpy(S, state(backwards ? part + 1 : part - 1), bytes);
        for (int64_t m = 0; m < c.parts; ++m) {  // pieces of the part between the two cuts
          const int64_t i = backwards ? (part + 1) * c.parts - 1 - m : (part - 1) * c.parts + m;
          const int64_t at = (b * c.pieces + i) * p.H + h;
          pass_piece(c, S, totals + at * c.rows, sums + at * c.state());
        }
      }
    }
  }
}

// `run(kernel, problem)` does all tasks of a problem on torch's threads.
template <class T, class Run>
bool forward_in_parts(const Problem& p, int64_t parts, const Run& run) {
  Scratch scratch;
  const Cuts c(scratch, p, parts, 0);
  T* sums = scratch.take<T>(p.B * c.pieces * p.H * c.state());
  T* totals = scratch.take<T>(p.B * c.pieces * p.H * c.rows);
  T* starts = scratch.take<T>(p.B * parts * p.H * c.state());
  T* ends = scratch.take<T>(p.B * parts * p.H * c.state());
  if (!scratch.ok) return false;

  Problem one = p;
  one.bounds = c.of_pieces;
  one.sequences = p.B * c.pieces;
  one.initial_state = nullptr;
  one.state = sums;
  one.totals = totals;
  one.saved = nullptr;
  one.o = View();
  run(one);

  scan_pieces(p, c, p.initial_state, totals, sums, starts, false);

  Problem two = p;
  two.bounds = c.of_parts;
  two.sequences = p.B * parts;
  two.cut = true;
  two.initial_state = starts;
  two.state = ends;
  run(two);
  const size_t bytes = size_t(c.state()) * sizeof(T);
  for (int64_t b = 0; b < p.B; ++b)
    memcpy(static_cast<T*>(p.state) + b * p.H * c.state(),
           ends + ((b + 1) * parts - 1) * p.H * c.state(), size_t(p.H) * bytes);
  return true;
}

template <class T, class Run>
bool backward_in_parts(const Problem& p, int64_t parts, const Run& run) {
  Scratch scratch;
  const Cuts c(scratch, p, parts, 1);
  T* sums = scratch.take<T>(p.B * c.pieces * p.H * c.state());
  T* totals = scratch.take<T>(p.B * c.pieces * p.H * c.rows);
  T* afters = scratch.take<T>(p.B * parts * p.H * c.state());
  T* befores = scratch.take<T>(p.B * parts * p.H * c.state());
  double* of_heads = scratch.take<double>(p.B * parts * p.H);
  if (!scratch.ok) return false;

  Problem one = p;
  one.bounds = c.of_pieces;
  one.sequences = p.B * c.pieces;
  one.grad_state = nullptr;
  one.dinitial_state = sums;
  one.totals = totals;
  one.dq = one.dk = one.dv = one.dlog_decay = View();
  one.dlog_decay_of_head = nullptr;
  run(one);

  scan_pieces(p, c, p.grad_state, totals, sums, afters, true);

  Problem two = p;
  two.bounds = c.of_parts;
  two.sequences = p.B * parts;
  two.cut = true;
  two.grad_state = afters;
  two.dinitial_state = p.dinitial_state ? befores : nullptr;
  two.dlog_decay_of_head = p.dlog_decay_of_head ? of_heads : nullptr;
  run(two);
  const size_t bytes = size_t(c.state()) * sizeof(T);
  for (int64_t b = 0; b < p.B; ++b) {
    if (p.dinitial_state)
      memcpy(static_cast<T*>(p.dinitial_state) + b * p.H * c.state(),
             befores + b * parts * p.H * c.state(), size_t(p.H) * bytes);
    if (!p.dlog_decay_of_head) continue;
    for (int64_t h = 0; h < p.H; ++h) {
      double sum = 0;
      for (int64_t part = 0; part < parts; ++part) sum += of_heads[(b * parts + part) * p.H + h];
      p.dlog_decay_of_head[b * p.H + h] = sum;
    }
  }
  return true;
}

}  // namespace linattn
