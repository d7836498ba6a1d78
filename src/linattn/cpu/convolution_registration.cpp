// The short causal convolution as torch sees it; see registration.cpp. No numerics.
#include <atomic>

#include "convolution.h"
#include "instruction_sets.h"
#include "tensors.h"
#include "threads.h"

namespace linattn {

namespace {

constexpr int kTile = 256;       // channels: rings, weights and their sums stay in 32 KiB
constexpr int64_t kTokens = 512;  // of a task; 7 of them are walked twice at most

Convolution convolution_of(
    const Tensor& x, const Tensor& weight, const Optional& bias, bool silu, const Optional& mask,
    const Optional& initial_state, const Optional& bounds) {
  Convolution p;
  p.B = x.size(0);
  p.N = x.size(1);
  p.C = x.size(2);
  p.taps = int(weight.size(1));
  p.silu = silu;
  p.x = rows_of(x);
  p.weight = rows_of(weight);
  const int64_t of_channel = p.weight.token;
  p.weight.token = p.weight.channel;
  p.weight.channel = of_channel;
  p.bias = rows_of(bias);
  p.mask = view_of(mask);
  p.initial_state = rows_of(initial_state);
  p.bounds = static_cast<const int64_t*>(data_of(bounds));
  p.sequences = bounds.has_value() ? bounds->size(0) - 1 : p.B;
  p.tile = p.C < kTile ? int(p.C) : kTile;
  int64_t longest = bounds.has_value() ? 0 : p.N;
  for (int64_t i = 0; bounds.has_value() && i < p.sequences; ++i) {
    const int64_t n = p.bounds[i + 1] - p.bounds[i];
    if (n > longest) longest = n;
  }
  // One long sequence among many short ones must not make an empty task for each of those.
  const int64_t tokens = p.bounds ? p.N : p.N * p.B, most = 4 * (tokens / kTokens + p.sequences);
  for (p.segment = kTokens;; p.segment *= 2) {
    p.segments = longest > 0 ? (longest + p.segment - 1) / p.segment : 1;
    if (p.sequences * p.segments <= most || p.segments == 1) return p;
  }
}

void forward(const Convolution& p) {
  const ConvolutionKernel f = kernels().convolution_forward[p.x.dtype == Dtype::kFloat64 ? 1 : 0];
  std::atomic<bool> failed{false};
  // 64 Ki numbers take about 10 us, and waking another thread 1 us.
  const int64_t numbers = (p.segment < p.N ? p.segment : p.N) * p.tile + 1;
  const int64_t grain = numbers < (1 << 14) ? (1 << 14) / numbers + 1 : 1;
  parallel_for(number_of_tasks(p), grain, [&](int64_t begin, int64_t end) {
    if (!f(p, begin, end)) failed = true;
  });
  check_memory(!failed);
}

void convolution_forward(
    Tensor x, Tensor weight, Optional bias, bool silu, Optional mask, Optional initial_state,
    Optional bounds, Tensor o, Optional state) {
  Convolution p = convolution_of(x, weight, bias, silu, mask, initial_state, bounds);
  p.o = rows_of(o);
  p.state = rows_of(state);
  if (p.C == 0) return;
  prefer_huge_pages(o);
  forward(p);
}

// [B, W - 1, C] with no number in two places: contiguous, or a part of a contiguous [B, C, taps].
bool is_state(const Tensor& x) {
  return x.is_contiguous() || (x.stride(1) == 1 && x.stride(2) >= x.size(1) &&
                               x.stride(0) >= x.size(2) * x.stride(2));
}
bool is_same(const Tensor& x, const Tensor& y) {
  return x.data_ptr() == y.data_ptr() && x.stride(1) == y.stride(1) && x.stride(2) == y.stride(2) &&
         (x.size(0) == 1 || x.stride(0) == y.stride(0));
}

// A few tokens without gradients: o, and the state after them in `state`, which may be the initial
// one. None where the call is not one for it or is wrong: Python has the words (convolution.py).
Optional convolution_step(
    Tensor x, Tensor weight, Optional bias, bool silu, Optional mask, Optional initial_state,
    Tensor state) {
  if (x.dim() != 3 || weight.dim() != 2) return Optional();
  const int64_t B = x.size(0), N = x.size(1), C = x.size(2), taps = weight.size(1);
  const ScalarType dtype = x.scalar_type();
  const bool wide = dtype == ScalarType::Double;
  if (!wide && dtype != ScalarType::Float && dtype != ScalarType::BFloat16 &&
      dtype != ScalarType::Half)
    return Optional();
  if (C < 1 || taps < 1 || taps > kMostTaps || !is_shape(weight, {C, taps})) return Optional();
  for (const Optional& y : {Optional(weight), bias}) {
    if (!y.has_value()) continue;
    const ScalarType of = y->scalar_type();
    if (of != dtype && of != (wide ? ScalarType::Double : ScalarType::Float)) return Optional();
  }
  if (!is_shape(bias, {C}) || !is_shape(mask, {B, N})) return Optional();
  if (mask.has_value() && mask->scalar_type() != ScalarType::Bool) return Optional();
  for (const Optional& y : {Optional(state), initial_state}) {
    if (!is_shape(y, {B, taps - 1, C})) return Optional();
    if (y.has_value() && (y->scalar_type() != dtype || !is_state(*y))) return Optional();
  }
  for (const Optional& y : {Optional(x), Optional(weight), bias, mask})
    if (!is_apart(state, y)) return Optional();
  if (!is_apart(state, initial_state) && !is_same(state, *initial_state)) return Optional();
  Tensor o = torch::stable::new_empty(x, {B, N, C});
  Convolution p = convolution_of(x, weight, bias, silu, mask, initial_state, Optional());
  p.o = rows_of(o);
  p.state = rows_of(state);
  forward(p);
  return o;
}

// dweight [threads, W + 1, C] is added to: a part of the tasks for each of its rows.
void convolution_backward(
    Tensor grad_o, Optional grad_state, Tensor x, Tensor weight, Optional bias, bool silu,
    Optional mask, Optional initial_state, Optional bounds, Tensor dx, Tensor dweight,
    Optional dinitial_state) {
  Convolution p = convolution_of(x, weight, bias, silu, mask, initial_state, bounds);
  p.grad_o = rows_of(grad_o);
  p.grad_state = rows_of(grad_state);
  p.dx = rows_of(dx);
  p.dinitial_state = rows_of(dinitial_state);
  if (p.C == 0) return;
  prefer_huge_pages(dx);
  const bool wide = p.x.dtype == Dtype::kFloat64;
  const ConvolutionKernel f = kernels().convolution_backward[wide ? 1 : 0];
  const int64_t parts = dweight.size(0), tasks = number_of_tasks(p);
  std::atomic<bool> failed{false};
  parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Convolution part = p;
      part.dweight = static_cast<char*>(dweight.data_ptr()) +
                     i * (p.taps + 1) * p.C * int64_t(wide ? sizeof(double) : sizeof(float));
      if (!f(part, tasks * i / parts, tasks * (i + 1) / parts)) failed = true;
    }
  });
  check_memory(!failed);
}

}  // namespace
}  // namespace linattn

#define LINATTN_CONVOLUTION                                                                   \
  "Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? mask, Tensor? initial_state, " \
  "Tensor? bounds, "

STABLE_TORCH_LIBRARY_FRAGMENT(linattn_cpu, m) {
  m.def("convolution_forward(" LINATTN_CONVOLUTION "Tensor(a!) o, Tensor(b!)? state) -> ()");
  m.def("convolution_step(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? mask, "
        "Tensor? initial_state, Tensor(a!) state) -> Tensor?");
  m.def("convolution_backward(Tensor grad_o, Tensor? grad_state, " LINATTN_CONVOLUTION
        "Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dinitial_state) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(linattn_cpu, CPU, m) {
  m.impl("convolution_forward", TORCH_BOX(&linattn::convolution_forward));
  m.impl("convolution_step", TORCH_BOX(&linattn::convolution_step));
  m.impl("convolution_backward", TORCH_BOX(&linattn::convolution_backward));
}
