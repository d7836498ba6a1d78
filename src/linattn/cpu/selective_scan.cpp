// Mamba-1's selective scan: h_t = exp(dt_t A) h_{t-1} + dt_t x_t b_t, o_t = (c_t h_t + skip x_t) f(z_t).
//
// Channels are the lanes, and the n states of a channel follow each other: nothing is summed across
// lanes but the gradients of b and c. A task is one sequence of one tile of channels, whose states
// [n, tile] stay in the first-level cache. Backward first walks forward and keeps the states at the
// start of every block of tokens, then from the last block to the first makes those inside again.
#include "selective_scan.h"

#include "activations.h"
#include "kernels.h"
#include "memory.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

constexpr int kBlock = 32;  // tokens that are converted, transposed and made again at once

template <class T>
struct Walk {
  static constexpr int L = kLanes<T>, W = kScanTile<T>, kVectors = W / L;

  int n, rows;                                  // states, and in whole vectors
  T *A, *h, *skip, *bias;                       // [n, W] times log2(e), [n, W], [W]
  T *x, *dt, *z, *y, *before, *turned;          // [kBlock, W]; `before` is dt before softplus
  T *b, *c;                                     // [kBlock, n]
  T *starts, *decays, *states, *g, *dA;         // backward: [blocks], [kBlock], [kBlock + 1]; [n, W]
  T *grad, *dx, *ddt, *dskip, *dbias;           // [kBlock, W]; [W]
  T *lanes_b, *lanes_c;                         // [n, L]
  bool there[kBlock];
  int64_t first, sequence, row, start, stop;    // channel; of the sequence: its row, tokens
  int width;                                    // channels of this tile

  Walk(Workspace& w, const SelectiveScan& p, bool backward) : n(p.n), rows(round_up(p.n, L)) {
    for (T** a : {&A, &h}) *a = w.take<T>(size_t(rows) * W);
    for (T** a : {&skip, &bias}) *a = w.take<T>(W);
    for (T** a : {&x, &dt, &z, &y, &before, &turned}) *a = w.take<T>(kBlock * W);
    for (T** a : {&b, &c}) *a = w.take<T>(size_t(kBlock) * n);
    if (!backward) return;
    starts = w.take<T>(size_t(p.longest / kBlock + 1) * n * W);
    decays = w.take<T>(size_t(kBlock) * n * W);
    states = w.take<T>(size_t(kBlock + 1) * n * W);
    for (T** a : {&g, &dA}) *a = w.take<T>(size_t(rows) * W);
    for (T** a : {&grad, &dx, &ddt}) *a = w.take<T>(kBlock * W);
    for (T** a : {&dskip, &dbias}) *a = w.take<T>(W);
    for (T** a : {&lanes_b, &lanes_c}) *a = w.take<T>(size_t(n) * L);
  }

  static LINATTN_INLINE Vec<T> at(const T* p) { return linattn::LINATTN_ISA::load(p); }

  void enter(const SelectiveScan& p, int64_t task) {
    const int64_t tiles = (p.D + W - 1) / W;
    sequence = task / tiles;
    first = task % tiles * W;
    width = int(p.D - first < W ? p.D - first : W);
    row = p.bounds ? 0 : sequence;
    start = p.bounds ? p.bounds[sequence] : 0;
    stop = p.bounds ? p.bounds[sequence + 1] : p.N;
    turn(A, address(p.A, 0, first, 0), p.A.dtype, p.A.token, p.A.channel, width, n);
    for (int i = 0; i < n * W; ++i) A[i] *= T(1.4426950408889634);
    read_parameter(skip, p.skip);
    read_parameter(bias, p.dt_bias);
    if (p.initial_state)
      turn(h, state_at(p.initial_state, p), kDtype<T>, n, 1, width, n);
    else
      memset(h, 0, sizeof(T) * n * W);
  }
  char* state_at(const void* all, const SelectiveScan& p) const {
    return static_cast<char*>(const_cast<void*>(all)) + (sequence * p.D + first) * n * sizeof(T);
  }
  void read_parameter(T* to, const View& from) {
    memset(to, 0, sizeof(T) * W);
    const char* at_first = from.data + offset(from);
    if (from.data) load_row(to, at_first, from.dtype, from.channel, width, T(1));
  }
  int64_t offset(const View& v) const { return first * v.channel * int64_t(bytes_of(v.dtype)); }

  // to [columns, W] = the transpose of `count` rows (at most W) of `columns` numbers; 0 past them.
  static void turn(
      T* to, const char* from, Dtype dtype, int64_t row_stride, int64_t stride, int count,
      int columns) {
    alignas(64) T some[L * L];
    const int64_t size = int64_t(bytes_of(dtype));
    for (int j = 0; j < columns; j += L) {
      const int wide = columns - j < L ? columns - j : L;
      for (int i = 0; i < W; i += L) {
        for (int r = 0; r < L; ++r) {
          const char* in = from + ((i + r) * row_stride + j * stride) * size;
          if (i + r < count) load_row(some + r * L, in, dtype, stride, wide, T(1));
          for (int k = i + r < count ? wide : 0; k < L; ++k) some[r * L + k] = 0;
        }
        transpose_lanes(some, L, to + j * W + i, W);
      }
    }
  }
  // The other way for the states, whose rows in memory are contiguous.
  void turn_back(void* to, const T* from, const SelectiveScan& p) const {
    alignas(64) T some[L * L];
    T* out = reinterpret_cast<T*>(state_at(to, p));
    for (int j = 0; j < n; j += L) {
      const int wide = n - j < L ? n - j : L;
      for (int i = 0; i < width; i += L) {
        transpose_lanes(from + j * W + i, W, some, L);
        for (int r = 0; r < L && i + r < width; ++r)
          memcpy(out + (i + r) * n + j, some + r * L, wide * sizeof(T));
      }
    }
  }

  // `count` tokens from t of a tensor [B, N, D]; absent ones are 0.
  void read(T* to, const View& v, int64_t t, int count) {
    const char* from = address(v, row, t, 0) + offset(v);
    const int64_t size = int64_t(bytes_of(v.dtype));
    const bool turns = v.token == 1 && v.channel != 1;  // channels before tokens, as a Conv1d's
    for (int j = 0; turns && j < W; ++j) {
      T* tokens = turned + j * kBlock;
      if (j < width) load_row(tokens, from + j * v.channel * size, v.dtype, 1, count, T(1));
      for (int r = j < width ? count : 0; r < kBlock; ++r) tokens[r] = 0;
    }
    for (int r = 0; turns && r < count; r += L)
      turn(to + r * W, reinterpret_cast<const char*>(turned + r), kDtype<T>, kBlock, 1, W, L);
    for (int r = 0; r < count; ++r) {
      if (there[r] && !turns)
        load_row(to + r * W, from + r * v.token * size, v.dtype, v.channel, width, T(1));
      for (int j = there[r] ? width : 0; j < W; ++j) to[r * W + j] = 0;
    }
  }
  void read_states(T* to, const View& v, int64_t t, int count) {
    for (int r = 0; r < count; ++r) {
      if (there[r])
        load_row(to + r * n, address(v, row, t + r, 0), v.dtype, v.channel, n, T(1));
      else
        memset(to + r * n, 0, sizeof(T) * n);
    }
  }
  void save(const View& v, const T* from, int64_t t, int count) const {
    for (int r = 0; r < count; ++r) {
      char* to = address(v, row, t + r, 0) + offset(v);
      store_row(to, from + r * W, v.dtype, v.channel, width, T(1), false);
    }
  }

  // Reads what the recurrence needs of the block at t; an absent token has dt = 0 and x = 0.
  int read_block(const SelectiveScan& p, int64_t t, bool outputs) {
    const int count = int(stop - t < kBlock ? stop - t : kBlock);
    for (int r = 0; r < count; ++r) there[r] = is_there(p.mask, row, t + r);
    read(x, p.x, t, count);
    read(before, p.dt, t, count);
    read_states(b, p.b, t, count);
    for (int r = 0; r < count; ++r) {
      for (int j = 0; j < W; j += L) {
        const Vec<T> d = at(before + r * W + j) + at(bias + j);
        store(before + r * W + j, d);
        store(dt + r * W + j, !there[r] ? Vec<T>{} : p.softplus ? softplus(d) : d);
      }
    }
    if (!outputs) return count;
    read_states(c, p.c, t, count);
    if (p.z.data) read(z, p.z, t, count);
    return count;
  }

  // One token: the states `to` from those in `from`; `decay` and y are written if they are wanted.
  template <bool kDecays, bool kOutput>
  LINATTN_INLINE void step(int r, const T* from, T* to, T* decay) {
    Vec<T> d[kVectors], u[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> in = at(x + r * W + v * L);
      d[v] = at(dt + r * W + v * L);
      u[v] = d[v] * in;
      sum[v] = at(skip + v * L) * in;
    }
    for (int i = 0; i < n; ++i) {
      const Vec<T> enters = broadcast(b[r * n + i]), read = broadcast(kOutput ? c[r * n + i] : T(0));
      for (int v = 0; v < kVectors; ++v) {
        const int k = i * W + v * L;
        const Vec<T> a = exp2_of(d[v] * at(A + k));
        const Vec<T> now = a * at(from + k) + u[v] * enters;
        if constexpr (kDecays) store(decay + k, a);
        store(to + k, now);
        if constexpr (kOutput) sum[v] += read * now;
      }
    }
    for (int v = 0; kOutput && v < kVectors; ++v) store(y + r * W + v * L, sum[v]);
  }

  void forward(const SelectiveScan& p) {
    for (int64_t t = start; t < stop; t += kBlock) {
      const int count = read_block(p, t, true);
      for (int r = 0; r < count; ++r) {
        step<false, true>(r, h, h, nullptr);
        for (int j = 0; j < W; j += L) {
          const Vec<T> gate = at(z + r * W + j), out = at(y + r * W + j);
          const Vec<T> o = p.z.data ? out * gate * sigmoid<T>(gate) : out;
          store(y + r * W + j, there[r] ? o : Vec<T>{});
        }
      }
      save(p.o, y, t, count);
    }
    if (p.state) turn_back(p.state, h, p);
  }

  void backward(const SelectiveScan& p) {
    const int64_t blocks = (stop - start + kBlock - 1) / kBlock, size = int64_t(n) * W;
    for (int64_t m = 0; m < blocks; ++m) {
      memcpy(starts + m * size, h, sizeof(T) * size);
      if (m == blocks - 1) break;
      const int count = read_block(p, start + m * kBlock, false);
      for (int r = 0; r < count; ++r) step<false, false>(r, h, h, nullptr);
    }
    if (p.grad_state)
      turn(g, state_at(p.grad_state, p), kDtype<T>, n, 1, width, n);
    else
      memset(g, 0, sizeof(T) * size);
    memset(dA, 0, sizeof(T) * size);
    for (T* sums : {dskip, dbias}) memset(sums, 0, sizeof(T) * W);
    for (int64_t m = blocks - 1; m >= 0; --m) block_backward(p, start + m * kBlock, starts + m * size);
    if (p.dinitial_state) turn_back(p.dinitial_state, g, p);
    T* to = static_cast<T*>(p.dparameters) + first;
    for (int j = 0; j < width; ++j) {
      for (int i = 0; i < n; ++i) to[i * p.D + j] += dA[i * W + j];
      to[n * p.D + j] += dskip[j];
      to[(n + 1) * p.D + j] += dbias[j];
    }
  }

  void block_backward(const SelectiveScan& p, int64_t t, const T* at_start) {
    const int64_t size = int64_t(n) * W;
    const int count = read_block(p, t, true);
    read(grad, p.grad_o, t, count);
    memcpy(states, at_start, sizeof(T) * size);
    for (int r = 0; r < count; ++r)
      step<true, true>(r, states + r * size, states + (r + 1) * size, decays + r * size);
    for (int r = 0; p.z.data && r < count; ++r) {  // grad becomes that of what the gate multiplies
      for (int j = r * W; j < (r + 1) * W; j += L) {
        const Vec<T> gate = at(z + j), s = sigmoid<T>(gate), go = at(grad + j);
        const Vec<T> dz = go * at(y + j) * s * (T(1) + gate * (T(1) - s));
        store(z + j, there[r] ? dz : Vec<T>{});
        store(grad + j, go * gate * s);
      }
    }
    if (p.z.data) save(p.dz, z, t, count);
    for (int r = count - 1; r >= 0; --r) token_backward(p, r, t + r);
    save(p.dx, dx, t, count);
    save(p.ddt, ddt, t, count);
  }

  void token_backward(const SelectiveScan& p, int r, int64_t t) {
    const int64_t size = int64_t(n) * W;
    const T *last = states + r * size, *now = last + size, *decay = decays + r * size;
    Vec<T> d[kVectors], u[kVectors], gy[kVectors], du[kVectors] = {}, dd[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      d[v] = at(dt + r * W + v * L);
      u[v] = d[v] * at(x + r * W + v * L);
      gy[v] = at(grad + r * W + v * L);
    }
    for (int i = 0; i < n; ++i) {
      const Vec<T> enters = broadcast(b[r * n + i]), read = broadcast(c[r * n + i]);
      Vec<T> of_b = {}, of_c = {};
      for (int v = 0; v < kVectors; ++v) {
        const int k = i * W + v * L;
        const Vec<T> dh = at(g + k) + gy[v] * read;
        of_c += gy[v] * at(now + k);
        of_b += dh * u[v];
        du[v] += dh * enters;
        const Vec<T> through = dh * at(decay + k), of_exponent = through * at(last + k);
        store(g + k, through);
        dd[v] += of_exponent * at(A + k);
        store(dA + k, at(dA + k) + of_exponent * d[v]);
      }
      store(lanes_b + i * L, of_b);
      store(lanes_c + i * L, of_c);
    }
    const int64_t place = (row * p.N + t) * n;
    if (there[r]) {
      add_sums(static_cast<T*>(p.db) + place, lanes_b);
      add_sums(static_cast<T*>(p.dc) + place, lanes_c);
    }
    for (int v = 0; v < kVectors; ++v) {
      const int k = r * W + v * L;
      const Vec<T> in = at(x + k);
      Vec<T> of_dt = du[v] * in + dd[v] * T(0.6931471805599453), of_x = du[v] * d[v] + gy[v] * at(skip + v * L);
      if (p.softplus) of_dt *= sigmoid<T>(at(before + k));
      store(ddt + k, there[r] ? of_dt : Vec<T>{});
      store(dx + k, there[r] ? of_x : Vec<T>{});
      store(dbias + v * L, at(dbias + v * L) + at(ddt + k));
      store(dskip + v * L, at(dskip + v * L) + gy[v] * in);
    }
  }

  // to [n] += the sums of rows [n, L] across their lanes.
  void add_sums(T* to, const T* from) const {
    for (int j = 0; j < n; j += L) {
      Vec<T> some[L];
      for (int i = 0; i < L; ++i) some[i] = j + i < n ? at(from + (j + i) * L) : Vec<T>{};
      const Vec<T> sums = sum_lanes<T>(some);
      for (int i = 0; i < L && j + i < n; ++i) to[j + i] += sums[i];
    }
  }
};

template <class T, class F>
bool each_task(const SelectiveScan& p, int64_t begin, int64_t end, bool backward, const F& f) {
  Workspace counter, space;
  Walk<T> sizes(counter, p, backward);
  if (!space.allocate(counter.used())) return false;
  Walk<T> walk(space, p, backward);
  for (int64_t task = begin; task < end; ++task) {
    walk.enter(p, task);
    f(walk);
  }
  return true;
}

}  // namespace

template <class T>
bool selective_scan_forward(const SelectiveScan& p, int64_t begin, int64_t end) {
  return each_task<T>(p, begin, end, false, [&](Walk<T>& walk) { walk.forward(p); });
}
template <class T>
bool selective_scan_backward(const SelectiveScan& p, int64_t begin, int64_t end) {
  return each_task<T>(p, begin, end, true, [&](Walk<T>& walk) { walk.backward(p); });
}

template bool selective_scan_forward<float>(const SelectiveScan&, int64_t, int64_t);
template bool selective_scan_forward<double>(const SelectiveScan&, int64_t, int64_t);
template bool selective_scan_backward<float>(const SelectiveScan&, int64_t, int64_t);
template bool selective_scan_backward<double>(const SelectiveScan&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
