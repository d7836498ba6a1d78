// A few tokens of Mamba-1's selective scan, the states updated in memory: decoding.
//
// Here the states of a channel are the lanes, as they lie in memory: what selective_scan.cpp pays
// once a sequence, turning states and A to channels as lanes, would be half of the time.
#include "selective_scan.h"

#include "activations.h"
#include "kernels.h"
#include "memory.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Step {
  static constexpr int L = kLanes<T>, W = kScanTile<T>;

  T *x, *dt, *z, *skip, *y, *rates, *b, *c;  // [W]; [n]

  Step(Workspace& w, const SelectiveScan& p) {
    for (T** a : {&x, &dt, &z, &skip, &y, &rates}) *a = w.take<T>(W);
    for (T** a : {&b, &c}) *a = w.take<T>(p.n);
  }

  // `width` channels from `first`, 0 past them and where there is no such tensor.
  static void read_row(T* to, const View& v, int64_t row, int64_t t, int64_t first, int width) {
    memset(to, 0, sizeof(T) * W);
    if (!v.data) return;
    const char* from = address(v, row, t, 0) + first * v.channel * int64_t(bytes_of(v.dtype));
    load_row(to, from, v.dtype, v.channel, width, T(1));
  }

  void run(const SelectiveScan& p, int64_t task) {
    const int64_t tiles = (p.D + W - 1) / W, row = task / tiles, first = task % tiles * W;
    const int width = int(p.D - first < W ? p.D - first : W);
    const int64_t place = (row * p.D + first) * p.n;
    T* states = static_cast<T*>(p.state) + place;
    if (!p.initial_state)
      memset(states, 0, sizeof(T) * width * p.n);
    else if (p.initial_state != p.state)
      memcpy(states, static_cast<const T*>(p.initial_state) + place, sizeof(T) * width * p.n);
    for (int64_t t = 0; t < p.N; ++t) {
      memset(y, 0, sizeof(T) * W);
      if (is_there(p.mask, row, t)) token(p, row, t, first, width, states);
      char* to = address(p.o, row, t, 0) + first * p.o.channel * int64_t(bytes_of(p.o.dtype));
      store_row(to, y, p.o.dtype, p.o.channel, width, T(1), false);
    }
  }

  void token(
      const SelectiveScan& p, int64_t row, int64_t t, int64_t first, int width, T* states) {
    read_row(x, p.x, row, t, first, width);
    read_row(z, p.z, row, t, first, width);
    read_row(skip, p.skip, 0, 0, first, width);
    read_row(y, p.dt_bias, 0, 0, first, width);
    read_row(dt, p.dt, row, t, first, width);
    load_row(b, address(p.b, row, t, 0), p.b.dtype, p.b.channel, p.n, T(1));
    load_row(c, address(p.c, row, t, 0), p.c.dtype, p.c.channel, p.n, T(1));
    const T* A = reinterpret_cast<const T*>(p.A.data) + first * p.A.token;
    const bool alike = p.A.channel == 0;  // all states of a channel decay alike: one exp for them
    View by_channel = p.A;
    by_channel.channel = p.A.token;
    by_channel.token = 0;
    if (alike) read_row(rates, by_channel, 0, 0, first, width);
    for (int i = 0; i < width; i += L) {
      Vec<T> d = load(dt + i) + load(y + i), sums[L];
      if (p.softplus) d = softplus(d);
      const Vec<T> in = load(x + i), u = d * in, exponent = d * T(1.4426950408889634);
      const Vec<T> decay = alike ? exp2_of(exponent * load(rates + i)) : exponent;
      for (int j = 0; j < L; ++j) {
        sums[j] = Vec<T>{};
        if (i + j >= width) continue;
        const Vec<T> rate = broadcast(alike ? decay[j] : exponent[j]), enters = broadcast(u[j]);
        T* h = states + (i + j) * p.n;
        for (int k = 0; k < p.n; k += L) {
          const T* own = A + (i + j) * p.A.token + k;
          const Vec<T> a = alike ? rate : exp2_of(rate * linattn::LINATTN_ISA::read(own));
          const Vec<T> now = a * linattn::LINATTN_ISA::read(h + k) + enters * load(b + k);
          write(h + k, now);
          sums[j] += now * load(c + k);
        }
      }
      Vec<T> o = sum_lanes<T>(sums) + load(skip + i) * in;
      if (p.z.data) o *= load(z + i) * sigmoid<T>(load(z + i));
      store(y + i, o);
    }
  }
};

}  // namespace

// For n in whole vectors, and A in the dtype of the sums with its states in a row, or one for all.
template <class T>
bool selective_scan_step(const SelectiveScan& p, int64_t begin, int64_t end) {
  if (p.n % kLanes<T> != 0 || p.A.dtype != kDtype<T> ||
      (p.A.channel != 1 && p.A.channel != 0))
    return selective_scan_forward<T>(p, begin, end);
  Workspace counter, space;
  Step<T> sizes(counter, p);
  if (!space.allocate(counter.used())) return false;
  Step<T> step(space, p);
  for (int64_t task = begin; task < end; ++task) step.run(p, task);
  return true;
}

template bool selective_scan_step<float>(const SelectiveScan&, int64_t, int64_t);
template bool selective_scan_step<double>(const SelectiveScan&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
