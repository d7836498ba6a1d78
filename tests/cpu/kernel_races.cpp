// All kernels of every instruction set that this processor has, on four threads and on one, under
// the thread sanitizer: no data race, and the same bits. Run by `make sanitize`.
#include <stdio.h>
#include <string.h>

#include <thread>
#include <vector>

#include "convolution.h"
#include "isas.h"
#include "problem.h"
#include "selective_scan.h"
#include "sequence_split.h"

namespace linattn {
#define LINATTN_DECLARE(isa) extern const Kernels kernels_##isa;
LINATTN_FOR_EACH_ISA(LINATTN_DECLARE)
}  // namespace linattn

using namespace linattn;

namespace {

constexpr int64_t kB = 2, kN = 300, kH = 4, kLong = 5000;
constexpr int kDk = 20, kDv = 24;

float number(uint32_t& seed) {  // in [-1, 1)
  seed = seed * 1664525u + 1013904223u;
  return float(seed >> 8) / float(1 << 23) - 1.0f;
}

struct Tensor {  // [B, N, heads, D]
  std::vector<float> x;
  View view;
  Tensor(int64_t B, int64_t N, int64_t heads, int64_t D, uint32_t seed, float low, float high)
      : x(size_t(B * N * heads * D)) {
    for (float& y : x) y = low + (high - low) * (number(seed) + 1) / 2;
    view.data = reinterpret_cast<char*>(x.data());
    view.batch = N * heads * D;
    view.token = heads * D;
    view.head = D;
    view.channel = 1;
    view.heads = heads;
  }
};

struct Call {
  int64_t B, N, H;
  Tensor q, k, v, g, beta, o, grad_o, dq, dk, dv, dg, dbeta, state, initial, saved, grad, before;
  std::vector<double> of_head;
  Problem p;

  Call(int64_t B_, int64_t N_, int64_t H_, Decay decay, bool delta, bool affine)
      : B(B_), N(N_), H(H_), q(B, N, H, kDk, 1, -1, 1), k(B, N, H / 2 ? H / 2 : 1, kDk, 2, 0, .3f),
        v(B, N, H, kDv, 3, -1, 1), g(B, N, H, decay == Decay::kChannel ? kDk : 1, 4, -1, 0),
        beta(B, N, H, 1, 5, 0, 1), o(B, N, H, kDv, 0, 0, 0), grad_o(B, N, H, kDv, 6, -1, 1),
        dq(q), dk(k), dv(v), dg(g), dbeta(beta), state(B, H, kDk + 1, kDv + 1, 0, 0, 0),
        initial(B, H, kDk + 1, kDv + 1, 7, 0, 1), saved(N / 128 + 1, B * H, kDk + 1, kDv + 1, 0, 0, 0),
        grad(B, H, kDk + 1, kDv + 1, 8, -1, 1), before(grad), of_head(size_t(B * H)) {
    for (Tensor* x : {&dq, &dk, &dv, &dg, &dbeta, &o}) x->view.data = reinterpret_cast<char*>(x->x.data());
    p.B = B;
    p.N = N;
    p.H = H;
    p.Dk = kDk;
    p.Dv = kDv;
    p.decay = decay;
    p.affine = affine;
    p.bias = affine ? 1.5 : 0;
    p.scale = 0.2;
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    if (decay != Decay::kNone) p.log_decay = g.view;
    if (delta) p.beta = beta.view;
    p.o = o.view;
    p.sequences = B;
    p.initial_state = initial.x.data();
    p.state = state.x.data();
    p.saved = saved.x.data();
    p.segment = 128;
  }
  void backwards() {
    p.grad_o = grad_o.view;
    p.dq = dq.view;
    p.dk = dk.view;
    p.dv = dv.view;
    if (p.decay != Decay::kNone) p.dlog_decay = dg.view;
    if (p.beta.data) p.dbeta = dbeta.view;
    p.grad_state = grad.x.data();
    p.dinitial_state = before.x.data();
  }
};

void run(Kernel kernel, const Problem& p, int64_t units, int threads) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&, t] { kernel(p, units * t / threads, units * (t + 1) / threads); });
  for (std::thread& t : pool) t.join();
}

bool same(const Tensor& a, const Tensor& b, const char* what, const char* isa) {
  const bool equal = memcmp(a.x.data(), b.x.data(), a.x.size() * sizeof(float)) == 0;
  if (!equal) printf("%s: %s differs between threads\n", isa, what);
  return equal;
}

bool check(const Kernels& kernels, Decay decay, bool delta, bool affine, bool causal) {
  Call one(kB, kN, kH, decay, delta, affine), four(kB, kN, kH, decay, delta, affine);
  for (Call* c : {&one, &four}) {
    const int threads = c == &one ? 1 : 4;
    const int64_t units = number_of_tasks(c->p);
    run(delta ? kernels.delta_forward[0]
              : causal ? kernels.additive_forward[0] : kernels.noncausal_forward[0],
        c->p, units, threads);
    c->backwards();
    run(delta ? kernels.delta_backward[0]
              : causal ? kernels.additive_backward[0] : kernels.noncausal_backward[0],
        c->p, units, threads);
  }
  bool ok = same(one.o, four.o, "o", kernels.name) && same(one.state, four.state, "state", kernels.name);
  ok &= same(one.dq, four.dq, "dq", kernels.name) && same(one.dk, four.dk, "dk", kernels.name);
  return ok && same(one.dv, four.dv, "dv", kernels.name) && same(one.dg, four.dg, "dg", kernels.name);
}

bool check_parts(const Kernels& kernels, Decay decay) {
  Call a(1, kLong, 1, decay, false, false), b(1, kLong, 1, decay, false, false);
  for (Call* c : {&a, &b}) {
    const auto forward = [&](const Problem& x) {
      run(kernels.additive_forward[0], x, number_of_tasks(x), 4);
    };
    const auto backward = [&](const Problem& x) {
      run(kernels.additive_backward[0], x, number_of_tasks(x), 4);
    };
    if (!forward_in_parts<float>(c->p, 4, forward)) return false;
    c->backwards();
    if (!backward_in_parts<float>(c->p, 4, backward)) return false;
  }
  return same(a.o, b.o, "o in parts", kernels.name) && same(a.dk, b.dk, "dk in parts", kernels.name);
}

bool check_step(const Kernels& kernels) {
  Call one(kB, 3, kH, Decay::kToken, true, false), four(kB, 3, kH, Decay::kToken, true, false);
  run(kernels.decode[0], one.p, kB * kH, 1);
  run(kernels.decode[0], four.p, kB * kH, 4);
  return same(one.o, four.o, "decoded o", kernels.name) &&
         same(one.state, four.state, "decoded state", kernels.name);
}

// A part of the tasks to each thread; dweight has a row of its own for each of four parts.
bool check_convolution(const Kernels& kernels) {
  constexpr int64_t kC = 70, kTaps = 4;
  Tensor x(kB, kN, 1, kC, 1, -1, 1), grad(kB, kN, 1, kC, 2, -1, 1), weight(1, kC, 1, kTaps, 3, -1, 1);
  Tensor initial(kB, kTaps - 1, 1, kC, 4, -1, 1), grad_state(kB, kTaps - 1, 1, kC, 5, -1, 1);
  std::vector<Tensor> found[2];
  for (const int threads : {1, 4}) {
    Tensor o(grad), dx(grad), state(initial), before(initial);
    Tensor dweight(4, kTaps + 1, 1, kC, 0, 0, 0);
    for (Tensor* y : {&o, &dx, &state, &before}) y->view.data = reinterpret_cast<char*>(y->x.data());
    Convolution p;
    p.B = p.sequences = kB;
    p.N = kN;
    p.C = kC;
    p.taps = kTaps;
    p.silu = true;
    p.x = x.view;
    p.weight.data = weight.view.data;
    p.weight.token = 1;
    p.weight.channel = kTaps;
    p.initial_state = initial.view;
    p.o = o.view;
    p.state = state.view;
    p.segment = 64;
    p.segments = (kN + 63) / 64;
    p.tile = 32;
    const int64_t tasks = number_of_tasks(p);
    const auto on_threads = [&](const auto& work) {
      std::vector<std::thread> pool;
      for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] { for (int i = 4 * t / threads; i < 4 * (t + 1) / threads; ++i) work(i); });
      for (std::thread& t : pool) t.join();
    };
    on_threads([&](int i) {
      kernels.convolution_forward[0](p, tasks * i / 4, tasks * (i + 1) / 4);
    });
    p.grad_o = grad.view;
    p.grad_state = grad_state.view;
    p.dx = dx.view;
    p.dinitial_state = before.view;
    on_threads([&](int i) {
      Convolution part = p;
      part.dweight = dweight.x.data() + i * (kTaps + 1) * kC;
      kernels.convolution_backward[0](part, tasks * i / 4, tasks * (i + 1) / 4);
    });
    for (Tensor* y : {&o, &state, &dx, &before, &dweight}) found[threads == 4].push_back(*y);
  }
  const char* names[] = {"convolution o", "its state", "dx", "dinitial_state", "dweight"};
  bool ok = true;
  for (size_t i = 0; i < found[0].size(); ++i) ok &= same(found[0][i], found[1][i], names[i], kernels.name);
  return ok;
}

// A part of the tasks to each thread; what tasks add to has a row of its own for each of four parts.
bool check_scan(const Kernels& kernels) {
  constexpr int64_t kE = 150, kStates = 16;
  Tensor x(kB, kN, 1, kE, 1, -1, 1), dt(kB, kN, 1, kE, 2, 0, 1), z(kB, kN, 1, kE, 3, -1, 1);
  Tensor b(kB, kN, 1, kStates, 4, -1, 1), c(kB, kN, 1, kStates, 5, -1, 1), grad(x);
  Tensor A(1, kE, 1, kStates, 6, -2, 0), initial(kB, kE, 1, kStates, 7, -1, 1);
  grad.view.data = reinterpret_cast<char*>(grad.x.data());
  std::vector<Tensor> found[2];
  for (const int threads : {1, 4}) {
    Tensor o(x), dx(x), ddt(x), dz(x), state(initial), before(initial), stepped(initial);
    Tensor parameters(4, kStates + 2, 1, kE, 0, 0, 0), db(4, kB * kN, 1, kStates, 0, 0, 0), dc(db);
    for (Tensor* y : {&o, &dx, &ddt, &dz, &state, &before, &stepped, &dc})
      y->view.data = reinterpret_cast<char*>(y->x.data());
    SelectiveScan p;
    p.B = p.sequences = kB;
    p.N = p.longest = kN;
    p.D = kE;
    p.n = kStates;
    p.x = x.view;
    p.dt = dt.view;
    p.z = z.view;
    p.b = b.view;
    p.c = c.view;
    p.A = A.view;
    p.initial_state = initial.x.data();
    p.o = o.view;
    p.state = state.x.data();
    const int64_t tile = kernels.selective_scan_tile[0], tasks = kB * ((kE + tile - 1) / tile);
    const auto on_threads = [&](const auto& work) {
      std::vector<std::thread> pool;
      for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] { for (int i = 4 * t / threads; i < 4 * (t + 1) / threads; ++i) work(i); });
      for (std::thread& t : pool) t.join();
    };
    on_threads([&](int i) {
      kernels.selective_scan_forward[0](p, tasks * i / 4, tasks * (i + 1) / 4);
      SelectiveScan few = p;
      few.N = few.longest = 3;
      few.o = dx.view;  // written again by backward
      few.initial_state = few.state = stepped.x.data();
      kernels.selective_scan_step[0](few, tasks * i / 4, tasks * (i + 1) / 4);
    });
    p.grad_o = grad.view;
    p.dx = dx.view;
    p.ddt = ddt.view;
    p.dz = dz.view;
    p.grad_state = initial.x.data();
    p.dinitial_state = before.x.data();
    on_threads([&](int i) {
      SelectiveScan part = p;
      part.dparameters = parameters.x.data() + i * (kStates + 2) * kE;
      part.db = db.x.data() + i * kB * kN * kStates;
      part.dc = dc.x.data() + i * kB * kN * kStates;
      kernels.selective_scan_backward[0](part, tasks * i / 4, tasks * (i + 1) / 4);
    });
    for (Tensor* y : {&o, &state, &stepped, &dx, &ddt, &dz, &before, &parameters, &db, &dc})
      found[threads == 4].push_back(*y);
  }
  const char* names[] = {"scan o", "its state", "its step", "dx", "ddt", "dz", "dinitial_state",
                         "dparameters", "db", "dc"};
  bool ok = true;
  for (size_t i = 0; i < found[0].size(); ++i)
    ok &= same(found[0][i], found[1][i], names[i], kernels.name);
  return ok;
}

bool check_all(const Kernels& kernels) {
  bool ok = check_step(kernels) && check_convolution(kernels) && check_scan(kernels);
  for (Decay decay : {Decay::kNone, Decay::kToken, Decay::kChannel}) {
    ok &= check(kernels, decay, false, false, true) && check(kernels, decay, true, false, true);
    ok &= check_parts(kernels, decay);
  }
  ok &= check(kernels, Decay::kToken, false, true, true);
  ok &= check(kernels, Decay::kNone, false, true, false);
  printf("%s: %s\n", kernels.name, ok ? "ok" : "FAILED");
  return ok;
}

}  // namespace

int main() {
  bool ok = check_all(kernels_generic);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) ok &= check_all(kernels_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
    ok &= check_all(kernels_avx512);
  if (__builtin_cpu_supports("avx512bf16")) ok &= check_all(kernels_avx512_bf16);
#endif
  return ok ? 0 : 1;
}
