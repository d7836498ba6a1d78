// What one call of the short causal convolution is given; the tensors are [B, N, 1, C] as Views.
#pragma once
#include "problem.h"

namespace linattn {

constexpr int kMostTaps = 8;

struct Convolution {
  int64_t B = 0, N = 0, C = 0;
  int taps = 0;       // W
  bool silu = false;
  View x, o;          // [B, N, C]
  View weight, bias;  // [C, W] by token (C) and channel (W); [C] by channel
  View mask;          // bool [B, N]
  View initial_state, state;        // [sequences, W - 1, C]: the last inputs, the oldest first
  const int64_t* bounds = nullptr;  // of packed sequences, in one row
  int64_t sequences = 0;
  int64_t segment = 0;   // tokens of a task
  int64_t segments = 0;  // of the longest sequence
  int tile = 0;          // channels of a task

  View grad_o, grad_state, dx, dinitial_state;
  void* dweight = nullptr;  // [W + 1, C] of this thread, added to: of weight (tap 0 first) and bias
};

// A task is one segment of one sequence, for one tile of channels.
inline int64_t tiles_of(const Convolution& p) { return (p.C + p.tile - 1) / p.tile; }
inline int64_t number_of_tasks(const Convolution& p) {
  return p.sequences * p.segments * tiles_of(p);
}

}  // namespace linattn
