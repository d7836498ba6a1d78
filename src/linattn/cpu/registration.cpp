// The operators as torch sees them: schemas, tensors to plain views, threads. No numerics.
//
// Outputs are made by the caller (src/linattn/cpu/*.py) and written here. Only the stable ABI of
// torch is used, so that one library serves every torch from TORCH_TARGET_VERSION on.
#include <math.h>

#include <atomic>

#include "instruction_sets.h"
#include "noncausal_split.h"
#include "tensors.h"
#include "threads.h"

namespace linattn {

namespace {

Problem problem_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const Optional& log_decay,
    const Optional& mask, const Optional& initial_state, const Optional& bounds, double scale,
    int64_t segment) {
  Problem p;
  p.B = q.size(0);
  p.N = q.size(1);
  p.Dk = int(q.size(3));
  p.Dv = int(v.size(3));
  p.q = view_of(q);
  p.k = view_of(k);
  p.v = view_of(v);
  p.H = p.q.heads > p.k.heads ? p.q.heads : p.k.heads;
  if (p.v.heads > p.H) p.H = p.v.heads;
  p.log_decay = view_of(log_decay);
  if (log_decay.has_value()) {
    const int64_t dim = log_decay->dim();
    p.decay = dim == 1 ? Decay::kHead : dim == 3 ? Decay::kToken : Decay::kChannel;
  }
  p.mask = view_of(mask);
  p.initial_state = data_of(initial_state);
  p.bounds = static_cast<const int64_t*>(data_of(bounds));
  p.sequences = bounds.has_value() ? bounds->size(0) - 1 : p.B;
  p.scale = scale;
  p.segment = segment;
  return p;
}

void set_kernel(Problem& p, double bias, bool normalize) {
  p.bias = bias;
  p.normalize = normalize;
  p.affine = bias != 0 || normalize;
}

// A unit of work for each thread at least; `grain`: units that are worth a thread.
void run(const Kernel (&kernel)[2], const Problem& p, int64_t units, int64_t grain) {
  std::atomic<bool> failed{false};
  const Kernel f = kernel[p.q.dtype == Dtype::kFloat64 ? 1 : 0];
  parallel_for(units, grain, [&](int64_t begin, int64_t end) {
    if (!f(p, begin, end)) failed = true;
  });
  check_memory(!failed);
}

void run(const Kernel (&kernel)[2], const Problem& p) { run(kernel, p, number_of_tasks(p), 1); }

void set_gradients(
    Problem& p, const Tensor& grad_o, const Tensor& grad_state, const Tensor& saved,
    const Tensor& dq, const Tensor& dk, const Tensor& dv, const Optional& dlog_decay,
    const Optional& dinitial_state) {
  p.grad_o = view_of(grad_o);
  p.grad_state = grad_state.data_ptr();
  p.saved = saved.data_ptr();
  p.dq = view_of(dq);
  p.dk = view_of(dk);
  p.dv = view_of(dv);
  if (p.decay == Decay::kHead)
    p.dlog_decay_of_head = static_cast<double*>(data_of(dlog_decay));
  else
    p.dlog_decay = view_of(dlog_decay);
  p.dinitial_state = data_of(dinitial_state);
  for (const Tensor* x : {&dq, &dk, &dv}) prefer_huge_pages(*x);
}

void additive_forward(
    Tensor q, Tensor k, Tensor v, Optional log_decay, Optional mask, Optional initial_state,
    Optional bounds, double scale, double bias, bool normalize, bool causal, int64_t segment,
    Tensor o, Tensor state, Optional saved) {
  Problem p = problem_of(q, k, v, log_decay, mask, initial_state, bounds, scale, segment);
  set_kernel(p, bias, normalize);
  p.o = view_of(o);
  p.state = state.data_ptr();
  p.saved = data_of(saved);
  prefer_huge_pages(o);
  if (saved.has_value()) prefer_huge_pages(*saved);
  const auto& kernel = causal ? kernels().additive_forward : kernels().noncausal_forward;
  const auto each = [&](const Problem& x) { run(kernel, x); };
  const int64_t parts = parts_of(p, number_of_threads());
  const bool wide = p.q.dtype == Dtype::kFloat64;
  if (parts <= 1)
    each(p);
  else if (causal)
    check_memory(wide ? forward_in_parts<double>(p, parts, each)
                      : forward_in_parts<float>(p, parts, each));
  else
    check_memory(wide ? noncausal_forward_in_parts<double>(p, parts, each)
                      : noncausal_forward_in_parts<float>(p, parts, each));
}

void additive_backward(
    Tensor grad_o, Tensor grad_state, Tensor state, Tensor saved, Tensor q, Tensor k, Tensor v,
    Optional log_decay, Optional mask, Optional initial_state, Optional bounds, double scale,
    double bias, bool normalize, bool causal, int64_t segment, Tensor dq, Tensor dk, Tensor dv,
    Optional dlog_decay, Optional dinitial_state) {
  Problem p = problem_of(q, k, v, log_decay, mask, initial_state, bounds, scale, segment);
  set_kernel(p, bias, normalize);
  p.state = state.data_ptr();  // read, where every token sees all
  set_gradients(p, grad_o, grad_state, saved, dq, dk, dv, dlog_decay, dinitial_state);
  const auto& kernel = causal ? kernels().additive_backward : kernels().noncausal_backward;
  const auto each = [&](const Problem& x) { run(kernel, x); };
  // The gradient of a causal division needs every output again before the parts could start.
  const int64_t parts = causal && normalize ? 1 : parts_of(p, number_of_threads());
  const bool wide = p.q.dtype == Dtype::kFloat64;
  if (parts <= 1)
    each(p);
  else if (causal)
    check_memory(wide ? backward_in_parts<double>(p, parts, each)
                      : backward_in_parts<float>(p, parts, each));
  else
    check_memory(wide ? noncausal_backward_in_parts<double>(p, parts, each)
                      : noncausal_backward_in_parts<float>(p, parts, each));
}

void delta_forward(
    Tensor q, Tensor k, Tensor v, Optional log_decay, Tensor beta, Optional mask,
    Optional initial_state, Optional bounds, double scale, int64_t segment, Tensor o, Tensor state,
    Optional saved) {
  Problem p = problem_of(q, k, v, log_decay, mask, initial_state, bounds, scale, segment);
  p.beta = view_of(beta);
  p.o = view_of(o);
  p.state = state.data_ptr();
  p.saved = data_of(saved);
  prefer_huge_pages(o);
  if (saved.has_value()) prefer_huge_pages(*saved);
  run(kernels().delta_forward, p);
}

void delta_backward(
    Tensor grad_o, Tensor grad_state, Tensor saved, Tensor q, Tensor k, Tensor v,
    Optional log_decay, Tensor beta, Optional mask, Optional initial_state, Optional bounds,
    double scale, int64_t segment, Tensor dq, Tensor dk, Tensor dv, Optional dlog_decay,
    Tensor dbeta, Optional dinitial_state) {
  Problem p = problem_of(q, k, v, log_decay, mask, initial_state, bounds, scale, segment);
  p.beta = view_of(beta);
  p.dbeta = view_of(dbeta);
  set_gradients(p, grad_o, grad_state, saved, dq, dk, dv, dlog_decay, dinitial_state);
  run(kernels().delta_backward, p);
}

// A gate is of the dtype of q or of float32.
bool is_gate(const Optional& x, const Tensor& q) {
  if (!x.has_value()) return true;
  return x->scalar_type() == q.scalar_type() || x->scalar_type() == ScalarType::Float;
}

// Whether number i is at most 0, and not NaN.
bool is_negative(const View& x, int64_t i) {
  if (x.dtype == Dtype::kFloat64) return reinterpret_cast<const double*>(x.data)[i] <= 0;
  if (x.dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(x.data)[i] <= 0;
  const uint16_t bits = reinterpret_cast<const uint16_t*>(x.data)[i];
  const uint16_t infinity = x.dtype == Dtype::kBFloat16 ? 0x7f80 : 0x7c00;
  return bits == 0 || (bits >= 0x8000 && (bits & 0x7fff) <= infinity);
}

// Whether `step` can do this call. What it cannot do, and what is wrong, is left to Python, which
// knows the words: everything here is checked there as well (_validation.py).
bool fits(
    const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& log_decay,
    const Optional& beta, const Optional& mask, const Optional& initial_state,
    const Tensor& state) {
  const auto dtype = q.scalar_type();
  if (k.scalar_type() != dtype || v.scalar_type() != dtype) return false;
  const bool wide = dtype == ScalarType::Double;
  if (!wide && dtype != ScalarType::Float && dtype != ScalarType::BFloat16 &&
      dtype != ScalarType::Half)
    return false;
  if (p.q.heads < 1 || p.k.heads < 1 || p.v.heads < 1 || p.Dk < 1 || p.Dv < 1) return false;
  if (p.H % p.q.heads != 0 || p.H % p.k.heads != 0 || p.H % p.v.heads != 0) return false;
  if (!is_shape(k, {p.B, p.N, p.k.heads, p.Dk}) || !is_shape(v, {p.B, p.N, p.v.heads, p.Dv}))
    return false;
  if (!is_gate(log_decay, q) || !is_gate(beta, q)) return false;
  if (!is_shape(beta, {p.B, p.N, p.H}) || !is_shape(mask, {p.B, p.N})) return false;
  if (mask.has_value() && mask->scalar_type() != ScalarType::Bool) return false;
  switch (p.decay) {
    case Decay::kNone:
      break;
    case Decay::kHead:
      if (!is_shape(log_decay, {p.H})) return false;
      for (int64_t h = 0; h < p.H; ++h)
        if (!is_negative(p.log_decay, h * p.log_decay.head)) return false;
      break;
    case Decay::kToken:
      if (!is_shape(log_decay, {p.B, p.N, p.H})) return false;
      break;
    case Decay::kChannel:
      if (p.affine || !is_shape(log_decay, {p.B, p.N, p.H, p.Dk})) return false;
  }
  if (p.affine && beta.has_value()) return false;
  const int64_t one = p.affine;
  const bool narrow = !wide && state.scalar_type() == ScalarType::BFloat16;
  if (state.scalar_type() != (wide ? ScalarType::Double : ScalarType::Float) && !narrow)
    return false;
  const auto is_state = [&](const Optional& x) {
    return is_shape(x, {p.B, p.H, p.Dk + one, p.Dv + one}) &&
           (!x.has_value() || (x->scalar_type() == state.scalar_type() && x->is_contiguous()));
  };
  if (!is_state(state) || !is_state(initial_state)) return false;
  for (const Tensor* x : {&q, &k, &v})
    if (!is_apart(state, *x)) return false;
  for (const Optional* x : {&log_decay, &beta, &mask})
    if (!is_apart(state, *x)) return false;
  return is_apart(state, initial_state) || state.data_ptr() == initial_state->data_ptr();
}

// Decode a few tokens: o [B, N, H, Dv], and the state after them in `state`, which may be the
// initial one. None where the call is not one for this kernel or is wrong.
Optional step(
    Tensor q, Tensor k, Tensor v, Optional log_decay, Optional beta, Optional mask,
    Optional initial_state, Tensor state, std::optional<double> scale, double bias,
    bool normalize) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return Optional();
  if ((mask.has_value() && mask->dim() != 2) || (beta.has_value() && beta->dim() != 3))
    return Optional();
  if (log_decay.has_value() && (log_decay->dim() < 1 || log_decay->dim() == 2 || log_decay->dim() > 4))
    return Optional();
  Problem p = problem_of(q, k, v, log_decay, mask, initial_state, Optional(), 1, 0);
  set_kernel(p, bias, normalize);
  p.scale = scale.has_value() ? *scale : 1 / sqrt(double(p.Dk));
  if (!isfinite(p.scale) || !isfinite(p.bias)) return Optional();
  if (!fits(p, q, k, v, log_decay, beta, mask, initial_state, state)) return Optional();
  Tensor o = torch::stable::new_empty(v, {p.B, p.N, p.H, p.Dv});
  p.beta = view_of(beta);
  p.o = view_of(o);
  p.state = state.data_ptr();
  p.state_dtype = dtype_of(state);
  // 64 x 64 numbers take about 1 us, and so does waking another thread.
  const int64_t numbers = p.N * p.Dk * p.Dv, worth = int64_t(4) * 64 * 64;
  run(kernels().decode, p, p.B * p.H, numbers < worth ? worth / (numbers + 1) + 1 : 1);
  return o;
}

}  // namespace
}  // namespace linattn

#define LINATTN_QKV "Tensor q, Tensor k, Tensor v, Tensor? log_decay, "
#define LINATTN_REST "Tensor? mask, Tensor? initial_state, Tensor? bounds, float scale, "
#define LINATTN_SEGMENT "int segment, "
#define LINATTN_ADDITIVE LINATTN_QKV LINATTN_REST "float bias, bool normalize, bool causal, " LINATTN_SEGMENT
#define LINATTN_DELTA LINATTN_QKV "Tensor beta, " LINATTN_REST LINATTN_SEGMENT
#define LINATTN_RESULTS "Tensor(a!) o, Tensor(b!) state, Tensor(c!)? saved) -> ()"
#define LINATTN_GRADIENTS "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dlog_decay, "
#define LINATTN_LAST "Tensor(e!)? dinitial_state) -> ()"

STABLE_TORCH_LIBRARY(linattn_cpu, m) {
  m.def("additive_forward(" LINATTN_ADDITIVE LINATTN_RESULTS);
  m.def("additive_backward(Tensor grad_o, Tensor grad_state, Tensor state, Tensor saved, "
        LINATTN_ADDITIVE LINATTN_GRADIENTS LINATTN_LAST);
  m.def("delta_forward(" LINATTN_DELTA LINATTN_RESULTS);
  m.def("delta_backward(Tensor grad_o, Tensor grad_state, Tensor saved, "
        LINATTN_DELTA LINATTN_GRADIENTS
        "Tensor(f!) dbeta, " LINATTN_LAST);
  m.def("step(" LINATTN_QKV "Tensor? beta, Tensor? mask, Tensor? initial_state, "
        "Tensor(a!) state, float? scale, float bias, bool normalize) -> Tensor?");
  m.def("instruction_set() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(linattn_cpu, CPU, m) {
  m.impl("additive_forward", TORCH_BOX(&linattn::additive_forward));
  m.impl("additive_backward", TORCH_BOX(&linattn::additive_backward));
  m.impl("delta_forward", TORCH_BOX(&linattn::delta_forward));
  m.impl("delta_backward", TORCH_BOX(&linattn::delta_backward));
  m.impl("step", TORCH_BOX(&linattn::step));
}

STABLE_TORCH_LIBRARY_IMPL(linattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&linattn::instruction_set));
}
