// Mamba-1's selective scan as torch sees it; see registration.cpp. No numerics.
#include <atomic>

#include "instruction_sets.h"
#include "selective_scan.h"
#include "tensors.h"
#include "threads.h"

namespace linattn {

namespace {

SelectiveScan scan_of(
    const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& b, const Tensor& c,
    const Optional& skip, const Optional& z, const Optional& dt_bias, bool softplus,
    const Optional& mask, const Optional& initial_state, const Optional& bounds) {
  SelectiveScan p;
  p.B = x.size(0);
  p.N = x.size(1);
  p.D = x.size(2);
  p.n = int(A.size(1));
  p.softplus = softplus;
  p.x = rows_of(x);
  p.dt = rows_of(dt);
  p.A = rows_of(A);
  p.b = rows_of(b);
  p.c = rows_of(c);
  p.skip = rows_of(skip);
  p.z = rows_of(z);
  p.dt_bias = rows_of(dt_bias);
  p.mask = view_of(mask);
  p.initial_state = data_of(initial_state);
  p.bounds = static_cast<const int64_t*>(data_of(bounds));
  p.sequences = bounds.has_value() ? bounds->size(0) - 1 : p.B;
  p.longest = bounds.has_value() ? 0 : p.N;
  for (int64_t i = 0; bounds.has_value() && i < p.sequences; ++i) {
    const int64_t tokens = p.bounds[i + 1] - p.bounds[i];
    if (tokens > p.longest) p.longest = tokens;
  }
  return p;
}

int kind_of(const SelectiveScan& p) { return p.x.dtype == Dtype::kFloat64 ? 1 : 0; }
int64_t tasks_of(const SelectiveScan& p) {
  const int64_t tile = kernels().selective_scan_tile[kind_of(p)];
  return p.sequences * ((p.D + tile - 1) / tile);
}

void run(const SelectiveScan& p, ScanKernel f) {
  std::atomic<bool> failed{false};
  // A task of 16 Ki states takes about 5 us, and waking another thread 1 us.
  const int64_t states = (p.longest + 1) * p.n * kernels().selective_scan_tile[kind_of(p)];
  const int64_t grain = states < (1 << 14) ? (1 << 14) / states + 1 : 1;
  parallel_for(tasks_of(p), grain, [&](int64_t begin, int64_t end) {
    if (!f(p, begin, end)) failed = true;
  });
  check_memory(!failed);
}

void selective_scan_forward(
    Tensor x, Tensor dt, Tensor A, Tensor b, Tensor c, Optional skip, Optional z, Optional dt_bias,
    bool softplus, Optional mask, Optional initial_state, Optional bounds, Tensor o, Tensor state) {
  SelectiveScan p =
      scan_of(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, bounds);
  p.o = rows_of(o);
  p.state = state.data_ptr();
  prefer_huge_pages(o);
  run(p, kernels().selective_scan_forward[kind_of(p)]);
}

bool is_float(ScalarType x) {
  return x == ScalarType::Double || x == ScalarType::Float || x == ScalarType::BFloat16 ||
         x == ScalarType::Half;
}

// A few tokens without gradients: o, and the state after them in `state`, which may be the initial
// one. None where the call is not one for it or is wrong: Python has the words.
Optional selective_scan_step(
    Tensor x, Tensor dt, Tensor A, Tensor b, Tensor c, Optional skip, Optional z, Optional dt_bias,
    bool softplus, Optional mask, Optional initial_state, Tensor state) {
  if (x.dim() != 3 || A.dim() != 2 || !is_float(x.scalar_type())) return Optional();
  const int64_t B = x.size(0), N = x.size(1), D = x.size(2), n = A.size(1);
  const ScalarType dtype = x.scalar_type();
  const ScalarType wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  if (D < 1 || n < 1) return Optional();
  for (const Optional& y : {Optional(dt), Optional(A), Optional(b), Optional(c), skip, dt_bias}) {
    if (y.has_value() && y->scalar_type() != dtype && y->scalar_type() != wide) return Optional();
  }
  if (z.has_value() && z->scalar_type() != dtype) return Optional();
  if (!is_shape(dt, {B, N, D}) || !is_shape(z, {B, N, D}) || !is_shape(A, {D, n}) ||
      !is_shape(b, {B, N, n}) || !is_shape(c, {B, N, n}) || !is_shape(skip, {D}) ||
      !is_shape(dt_bias, {D}) || !is_shape(mask, {B, N}))
    return Optional();
  if (mask.has_value() && mask->scalar_type() != ScalarType::Bool) return Optional();
  for (const Optional& y : {Optional(state), initial_state}) {
    if (!is_shape(y, {B, D, n})) return Optional();
    if (y.has_value() && (y->scalar_type() != wide || !y->is_contiguous())) return Optional();
  }
  for (const Optional& y : {Optional(x), Optional(dt), Optional(A), Optional(b), Optional(c), skip,
                            z, dt_bias, mask})
    if (!is_apart(state, y)) return Optional();
  if (!is_apart(state, initial_state) && state.data_ptr() != initial_state->data_ptr())
    return Optional();
  Tensor o = torch::stable::new_empty(x, {B, N, D});
  SelectiveScan p =
      scan_of(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, Optional());
  p.o = rows_of(o);
  p.state = state.data_ptr();
  run(p, kernels().selective_scan_step[kind_of(p)]);
  return o;
}

// dparameters [parts, n + 2, D], db and dc [parts, B, N, n] are added to: a part of the tasks for
// each of their first rows.
void selective_scan_backward(
    Tensor grad_o, Tensor grad_state, Tensor x, Tensor dt, Tensor A, Tensor b, Tensor c,
    Optional skip, Optional z, Optional dt_bias, bool softplus, Optional mask,
    Optional initial_state, Optional bounds, Tensor dx, Tensor ddt, Optional dz,
    Optional dinitial_state, Tensor dparameters, Tensor db, Tensor dc) {
  SelectiveScan p =
      scan_of(x, dt, A, b, c, skip, z, dt_bias, softplus, mask, initial_state, bounds);
  p.grad_o = rows_of(grad_o);
  p.grad_state = grad_state.data_ptr();
  p.dx = rows_of(dx);
  p.ddt = rows_of(ddt);
  p.dz = rows_of(dz);
  p.dinitial_state = data_of(dinitial_state);
  prefer_huge_pages(dx);
  prefer_huge_pages(ddt);
  const ScanKernel f = kernels().selective_scan_backward[kind_of(p)];
  const int64_t parts = dparameters.size(0), tasks = tasks_of(p);
  const int64_t size = kind_of(p) == 1 ? sizeof(double) : sizeof(float);
  std::atomic<bool> failed{false};
  parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      SelectiveScan part = p;
      const auto of_part = [&](const Tensor& all, int64_t numbers) -> void* {
        return static_cast<char*>(all.data_ptr()) + i * numbers * size;
      };
      part.dparameters = of_part(dparameters, (p.n + 2) * p.D);
      part.db = of_part(db, p.B * p.N * p.n);
      part.dc = of_part(dc, p.B * p.N * p.n);
      if (!f(part, tasks * i / parts, tasks * (i + 1) / parts)) failed = true;
    }
  });
  check_memory(!failed);
}

}  // namespace
}  // namespace linattn

#define LINATTN_SCAN                                                                            \
  "Tensor x, Tensor dt, Tensor A, Tensor b, Tensor c, Tensor? skip, Tensor? z, Tensor? dt_bias, " \
  "bool softplus, Tensor? mask, Tensor? initial_state"

STABLE_TORCH_LIBRARY_FRAGMENT(linattn_cpu, m) {
  m.def("selective_scan_forward(" LINATTN_SCAN
        ", Tensor? bounds, Tensor(a!) o, Tensor(b!) state) -> ()");
  m.def("selective_scan_step(" LINATTN_SCAN ", Tensor(a!) state) -> Tensor?");
  m.def("selective_scan_backward(Tensor grad_o, Tensor grad_state, " LINATTN_SCAN
        ", Tensor? bounds, Tensor(a!) dx, Tensor(b!) ddt, Tensor(c!)? dz, "
        "Tensor(d!)? dinitial_state, Tensor(e!) dparameters, Tensor(f!) db, Tensor(g!) dc) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(linattn_cpu, CPU, m) {
  m.impl("selective_scan_forward", TORCH_BOX(&linattn::selective_scan_forward));
  m.impl("selective_scan_step", TORCH_BOX(&linattn::selective_scan_step));
  m.impl("selective_scan_backward", TORCH_BOX(&linattn::selective_scan_backward));
}
