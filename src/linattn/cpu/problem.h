// What one call of a kernel is given: plain data, no torch, no C++ library.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace linattn {

enum class Dtype : int { kFloat64, kFloat32, kBFloat16, kFloat16 };
enum class Decay : int { kNone, kHead, kToken, kChannel };

// [B, N, heads, D] in any layout; strides in elements. A null pointer: there is none.
struct View {
  char* data = nullptr;
  int64_t batch = 0, token = 0, head = 0, channel = 0;
  int64_t heads = 1;
  Dtype dtype = Dtype::kFloat32;
};

struct Problem {
  int64_t B = 0, N = 0, H = 0;
  int Dk = 0, Dv = 0;
  Decay decay = Decay::kNone;
  bool affine = false, normalize = false;
  double scale = 1, bias = 0;

  View q, k, v, log_decay, beta;
  View mask;  // bool [B, N]
  const int64_t* bounds = nullptr;  // of packed sequences, in one row; of parts, in every row
  int64_t sequences = 0;            // runs of tokens: packed sequences, parts, or batch rows
  bool cut = false;                 // the runs are parts of one sequence a row: sequence_split.h
  int phase = -1;                   // of a kernel that has several: this one alone; -1: all

  // Of the dtype of the sums and contiguous: [sequences, H, Dk (+ 1), Dv (+ 1)].
  const void* initial_state = nullptr;
  void* state = nullptr;
  Dtype state_dtype = Dtype::kFloat32;  // of a decoding step: may be bfloat16
  // [N / segment, B, H, ...]: the state before token m * segment of a run, m >= 1. No two such
  // tokens of a row have the same t / segment, so t / segment - 1 is the slot.
  void* saved = nullptr;
  int64_t segment = 0;  // tokens, a multiple of the chunk and at least Dk
  void* totals = nullptr;  // [sequences, H, Dk (+ 1)]: what a run decays its state by, row by row
  View o;                  // null: only the state is wanted; so dq in backward

  View grad_o, dq, dk, dv, dlog_decay, dbeta;
  double* dlog_decay_of_head = nullptr;  // [sequences, H], where the decay is one a head
  const void* grad_state = nullptr;
  void* dinitial_state = nullptr;
};

// Whether what is multiplied was bfloat16 before it was scaled or summed, so that rounding it to
// that again costs about what rounding the result does.
inline bool is_bfloat16(const Problem& p) {
  const auto is = [](const View& x) { return x.dtype == Dtype::kBFloat16; };
  return is(p.q) && is(p.k) && is(p.v);
}

// One unit of work: all heads of a run that share some head of q, k or v.
inline int64_t heads_together(const Problem& p) {
  const auto lcm = [](int64_t a, int64_t b) {
    int64_t x = a, y = b;
    while (y != 0) {
      const int64_t rest = x % y;
      x = y;
      y = rest;
    }
    return a / x * b;
  };
  return lcm(lcm(p.H / p.q.heads, p.H / p.k.heads), p.H / p.v.heads);
}
inline int64_t number_of_tasks(const Problem& p) { return p.sequences * (p.H / heads_together(p)); }

struct Convolution;    // convolution.h
struct SelectiveScan;  // selective_scan.h

// The kernels of one instruction set, each over tasks [begin, end); [0] float32, [1] float64 sums.
// False: no memory for the work space.
using Kernel = bool (*)(const Problem&, int64_t begin, int64_t end);
using ConvolutionKernel = bool (*)(const Convolution&, int64_t begin, int64_t end);
using ScanKernel = bool (*)(const SelectiveScan&, int64_t begin, int64_t end);
struct Kernels {
  const char* name;
  Kernel additive_forward[2], additive_backward[2];
  Kernel noncausal_forward[2], noncausal_backward[2];
  Kernel delta_forward[2], delta_backward[2];
  ConvolutionKernel convolution_forward[2], convolution_backward[2];
  ScanKernel selective_scan_forward[2], selective_scan_backward[2], selective_scan_step[2];
  int64_t selective_scan_tile[2];  // channels of a task
  Kernel decode[2];  // over batch rows x heads
};

}  // namespace linattn
