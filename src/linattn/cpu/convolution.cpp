// The short causal depthwise convolution: o_t = f(bias + sum_w weight_w x_{t-w}), f silu or nothing.
//
// Channels are the lanes. A task walks tokens with the last rows of x in a ring: each number is read
// once, widened once, and stays in the first-level cache. Backward walks them in the same order with
// a second ring of f'(.) grad_o, from which dx_{t-W+1} is complete at token t.
#include "convolution.h"

#include "activations.h"
#include "kernels.h"
#include "memory.h"
#include "rows.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Walk {
  T *weight, *bias, *x, *dp, *row, *dweight;  // [W][tile], [tile], rings [kMostTaps][tile], [tile]
  int width, lanes, taps;                     // channels of this task, whole vectors of them
  int64_t first, start, stop, begin, end;     // channel; of the sequence; of the segment
  int64_t b, sequence, segment;

  Walk(Workspace& w, const Convolution& p) {
    const size_t tile = size_t(padded<T>(p.tile));
    pitch_ = tile;
    taps = p.taps;
    weight = w.take<T>(tile * p.taps);
    dweight = w.take<T>(tile * (p.taps + 1));
    x = w.take<T>(tile * kMostTaps);
    dp = w.take<T>(tile * kMostTaps);
    for (T** y : {&bias, &row}) *y = w.take<T>(tile);
  }

  // False: the sequence has no such segment.
  bool enter(const Convolution& p, int64_t task) {
    const int64_t tiles = tiles_of(p), rest = task / tiles;
    first = task % tiles * p.tile;
    width = int(p.C - first < p.tile ? p.C - first : p.tile);
    lanes = padded<T>(width);
    segment = rest % p.segments;
    sequence = rest / p.segments;
    b = p.bounds ? 0 : sequence;
    start = p.bounds ? p.bounds[sequence] : 0;
    stop = p.bounds ? p.bounds[sequence + 1] : p.N;
    begin = start + segment * p.segment;
    end = begin + p.segment < stop ? begin + p.segment : stop;
    if (segment > 0 && begin >= stop) return false;
    for (int w = 0; w < taps; ++w) load(weight + w * pitch_, p.weight, 0, taps - 1 - w);
    load(bias, p.bias, 0, 0);
    for (int64_t t = begin - (taps - 1); t < begin; ++t) input(p, ring(x, t), t);
    return true;
  }

  static LINATTN_INLINE Vec<T> vector(const T* p) { return linattn::LINATTN_ISA::load(p); }
  T* ring(T* rows, int64_t t) const { return rows + (t & (kMostTaps - 1)) * pitch_; }

  // Row t of x as the window sees it: 0 where no token is, and before the sequence its state.
  void input(const Convolution& p, T* to, int64_t t) const {
    if (t < start)
      load(to, p.initial_state, sequence, t - start + taps - 1);
    else if (t < stop && is_there(p, t))
      load(to, p.x, b, t);
    else
      clear(to, 0);
  }
  // The channels of this task; 0 where there is no such tensor, and past the last channel.
  void load(T* to, const View& from, int64_t b, int64_t t) const {
    if (from.data) load_row(to, place(from, b, t), from.dtype, from.channel, width, T(1));
    clear(to, from.data ? width : 0);
  }
  void save(const View& to, const T* from, int64_t b, int64_t t) const {
    store_row(place(to, b, t), from, to.dtype, to.channel, width, T(1), false);
  }
  char* place(const View& x, int64_t b, int64_t t) const {
    return address(x, b, t, 0) + first * x.channel * int64_t(bytes_of(x.dtype));
  }
  bool is_there(const Convolution& p, int64_t t) const {
    return linattn::LINATTN_ISA::is_there(p.mask, b, t);
  }
  void clear(T* to, int from) const {
    for (int i = from; i < lanes; ++i) to[i] = 0;
  }

  // What comes out before f at token t, for a vector of channels at d.
  LINATTN_INLINE Vec<T> before(int64_t t, int d) const {
    Vec<T> sum = vector(bias + d);
    for (int w = 0; w < taps; ++w)
      sum += vector(weight + w * pitch_ + d) * vector(ring(x, t - w) + d);
    return sum;
  }

  void forward(const Convolution& p) {
    for (int64_t t = begin; t < end; ++t) {
      input(p, ring(x, t), t);
      const bool there = is_there(p, t);
      for (int d = 0; d < lanes; d += kLanes<T>) {
        const Vec<T> y = before(t, d);
        store(row + d, !there ? Vec<T>{} : p.silu ? y * sigmoid<T>(y) : y);
      }
      save(p.o, row, b, t);
    }
    // The oldest first: where `state` is `initial_state`, no row is overwritten before it is read.
    for (int64_t t = stop - (taps - 1); end == stop && p.state.data && t < stop; ++t) {
      input(p, row, t);
      save(p.state, row, sequence, t - (stop - (taps - 1)));
    }
  }

  void backward(const Convolution& p) {
    const int64_t last = end + taps - 1;  // dx of the segment hears of outputs up to here
    memset(dp, 0, pitch_ * kMostTaps * sizeof(T));
    memset(dweight, 0, pitch_ * (taps + 1) * sizeof(T));
    for (int64_t t = begin; t < last; ++t) {
      T* d_before = ring(dp, t);
      if (t < stop) {
        input(p, ring(x, t), t);
        if (is_there(p, t))
          load(row, p.grad_o, b, t);
        else
          clear(row, 0);
        for (int d = 0; d < lanes; d += kLanes<T>) {
          Vec<T> g = vector(row + d);
          if (p.silu) {
            const Vec<T> y = before(t, d), s = sigmoid<T>(y);
            g *= s * (T(1) + y * (T(1) - s));
          }
          store(d_before + d, g);
          if (t < end) add_to_weights(t, d, g);
        }
      } else {
        clear(d_before, 0);
      }
      input_gradient(p, t - (taps - 1));
    }
    T* to = static_cast<T*>(p.dweight) + first;
    for (int w = 0; w <= taps; ++w) {
      for (int d = 0; d < width; ++d) to[w * p.C + d] += dweight[w * pitch_ + d];
    }
  }

  LINATTN_INLINE void add_to_weights(int64_t t, int d, Vec<T> g) {
    for (int w = 0; w < taps; ++w) {
      T* to = dweight + w * pitch_ + d;
      store(to, vector(to) + g * vector(ring(x, t - w) + d));
    }
    T* to = dweight + taps * pitch_ + d;
    store(to, vector(to) + g);
  }

  // The gradient of x_t, or of a row of the initial state; outputs t .. t + W - 1 are in the ring.
  void input_gradient(const Convolution& p, int64_t t) {
    const bool is_state = t < start;
    if (is_state ? segment > 0 || !p.dinitial_state.data : t < begin) return;
    const int64_t late = t - (stop - (taps - 1));  // its row of the final state, if >= 0
    const bool there = is_state || is_there(p, t);
    if (late >= 0 && p.grad_state.data && there)
      load(row, p.grad_state, sequence, late);
    else
      clear(row, 0);
    for (int d = 0; there && d < lanes; d += kLanes<T>) {
      Vec<T> sum = vector(row + d);
      for (int w = 0; w < taps; ++w)
        sum += vector(weight + w * pitch_ + d) *
               vector(ring(dp, t + w) + d);
      store(row + d, sum);
    }
    if (is_state)
      save(p.dinitial_state, row, sequence, t - start + taps - 1);
    else
      save(p.dx, row, b, t);
  }

 private:
  size_t pitch_;
};

template <class T, class F>
bool each_task(const Convolution& p, int64_t begin, int64_t end, const F& f) {
  Workspace counter, space;
  Walk<T> sizes(counter, p);
  if (!space.allocate(counter.used())) return false;
  Walk<T> walk(space, p);
  for (int64_t task = begin; task < end; ++task) f(walk, task);
  return true;
}

}  // namespace

template <class T>
bool convolution_forward(const Convolution& p, int64_t begin, int64_t end) {
  return each_task<T>(p, begin, end, [&](Walk<T>& walk, int64_t task) {
    if (walk.enter(p, task)) walk.forward(p);
  });
}
template <class T>
bool convolution_backward(const Convolution& p, int64_t begin, int64_t end) {
  return each_task<T>(p, begin, end, [&](Walk<T>& walk, int64_t task) {
    if (walk.enter(p, task)) walk.backward(p);
  });
}

template bool convolution_forward<float>(const Convolution&, int64_t, int64_t);
template bool convolution_forward<double>(const Convolution&, int64_t, int64_t);
template bool convolution_backward<float>(const Convolution&, int64_t, int64_t);
template bool convolution_backward<double>(const Convolution&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
