// The form without causality on several threads, where there are fewer heads than threads.
//
// Both of its passes have two phases with a sum over all tokens in between. The sequence is cut into
// parts; a phase runs over all of them at once, and the sums of the parts are added in order. No
// token is worked on twice, so P threads take a P-th of the time.
#pragma once
#include "sequence_split.h"

namespace linattn {

// to [B, H, ...] = given (null: 0) + the sum over parts of x [B, parts, H, ...].
template <class T>
inline void add_parts(const Problem& p, const Cuts& c, const void* given, const T* x, T* to) {
  const int64_t all = p.H * c.state();  // of one batch row
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t i = 0; i < all; ++i) {
      T sum = given ? static_cast<const T*>(given)[b * all + i] : T(0);
      for (int64_t part = 0; part < c.parts; ++part) sum += x[(b * c.parts + part) * all + i];
      to[b * all + i] = sum;
    }
  }
}

// x [B, parts, H, ...]: for every part what `from` [B, H, ...] holds.
template <class T>
inline void give_parts(const Problem& p, const Cuts& c, const void* from, T* x) {
  const int64_t all = p.H * c.state();
  for (int64_t i = 0; i < p.B * c.parts; ++i)
    memcpy(x + i * all, static_cast<const T*>(from) + i / c.parts * all, size_t(all) * sizeof(T));
}

// `run(problem)` does all tasks of a problem on torch's threads.
template <class T, class Run>
bool noncausal_forward_in_parts(const Problem& p, int64_t parts, const Run& run) {
  Scratch scratch;
  const Cuts c(scratch, p, parts, 0);
  T* of_parts = scratch.take<T>(p.B * parts * p.H * c.state());
  T* unused = scratch.take<T>(p.B * parts * p.H * c.state());
  if (!scratch.ok) return false;

  Problem part = p;
  part.bounds = c.of_parts;
  part.sequences = p.B * parts;
  part.phase = 0;
  part.initial_state = nullptr;
  part.state = of_parts;
  run(part);
  add_parts(p, c, p.initial_state, of_parts, static_cast<T*>(p.state));

  give_parts(p, c, p.state, of_parts);
  part.phase = 1;
  part.initial_state = of_parts;
  part.state = unused;
  run(part);
  return true;
}

template <class T, class Run>
bool noncausal_backward_in_parts(const Problem& p, int64_t parts, const Run& run) {
  Scratch scratch;
  const Cuts c(scratch, p, parts, 0);
  T* states = scratch.take<T>(p.B * parts * p.H * c.state());
  T* of_parts = scratch.take<T>(p.B * parts * p.H * c.state());
  T* all = scratch.take<T>(p.B * p.H * c.state());
  if (!scratch.ok) return false;

  give_parts(p, c, p.state, states);
  Problem part = p;
  part.bounds = c.of_parts;
  part.sequences = p.B * parts;
  part.phase = 0;
  part.state = states;
  part.grad_state = nullptr;
  part.dinitial_state = of_parts;
  run(part);
  add_parts(p, c, p.grad_state, of_parts, all);
  if (p.dinitial_state)
    memcpy(p.dinitial_state, all, size_t(p.B * p.H * c.state()) * sizeof(T));

  give_parts(p, c, all, of_parts);
  part.phase = 1;
  part.grad_state = of_parts;
  part.dinitial_state = nullptr;
  run(part);
  return true;
}

}  // namespace linattn
