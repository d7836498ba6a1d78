// What one call of Mamba-1's selective scan is given; the tensors are [B, N, D] as Views.
#pragma once
#include "problem.h"

namespace linattn {

struct SelectiveScan {
  int64_t B = 0, N = 0, D = 0;
  int n = 0;              // states of a channel
  bool softplus = false;
  View x, dt, z, o;       // [B, N, D]; z, the gate, may be missing
  View b, c;              // [B, N, n]: how x enters the states, how they are read
  View A, skip, dt_bias;  // [D, n] by token (D) and channel (n); [D] by channel
  View mask;              // bool [B, N]
  // Of the dtype of the sums and contiguous: [sequences, D, n].
  const void* initial_state = nullptr;
  void* state = nullptr;
  const int64_t* bounds = nullptr;  // of packed sequences, in one row
  int64_t sequences = 0;
  int64_t longest = 0;  // tokens of a sequence

  View grad_o, dx, ddt, dz;
  const void* grad_state = nullptr;
  void* dinitial_state = nullptr;
  // Of this thread, added to: [n + 2, D] of A, skip and dt_bias; [B, N, n] each.
  void *dparameters = nullptr, *db = nullptr, *dc = nullptr;
};

}  // namespace linattn
