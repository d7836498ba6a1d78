// The causal additive recurrence, plain and affine, by chunks; see docs/cpu.md and docs/maths.md.
#include "channel_decay.h"
#include "kernels.h"
#include "run.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Forward {
  Matrix<T> q, k, v, k_transposed, weights, out, scratch;
  State<T> state, *states;
  TokenDecay<T> decay;
  ChannelDecay<T> channel;
  Ahead ahead;
  Totals<T> totals;
  T *gates, *one, *norm;

  static constexpr int kPhases = 1;
  static constexpr bool kBackwards = false;

  Forward(Workspace& w, const Problem& p, int slots) {
    const int Dk = padded<T>(p.Dk);
    w.rounded = is_bfloat16(p);
    q = w.matrix<T>(kChunk, Dk);
    k = w.matrix<T>(kChunk, Dk);
    v = w.matrix<T>(kChunk, p.Dv);
    k_transposed = w.matrix<T>(Dk, kChunk);
    weights = w.matrix<T>(kChunk, kChunk);
    out = w.matrix<T>(kChunk, p.Dv);
    decay.pairs = w.matrix<T>(kChunk, kChunk);
    states = State<T>::take(w, p.Dk, p.Dv, slots);
    gates = w.take<T>(kChunk);
    one = w.take<T>(kChunk);
    norm = w.take<T>(kChunk);
    w.rounded = false;  // inverse decays are large, and a decay's gradient what cancelling leaves
    if (p.decay == Decay::kChannel) channel.take(w, Dk);
    totals.take(w, p, slots);
  }

  void begin(const Problem& p, const Run& r, int slot) {
    states[slot].read(p, state_of<T>(p, p.initial_state, r));
    totals.begin(p, slot);
  }
  void segment(const Problem& p, const Stretch& x, int slot, int) {
    const Run& r = x.run;
    state = states[slot];
    if (p.decay == Decay::kNone) {
      decay.fill_without_decay();
      decay.fill_pairs();
    }
    if (p.saved && is_saved(p, r, x.start)) state.write(p, saved_state<T>(p, r, x.start));
    for (int64_t t = x.start; t < x.stop; t += kChunk) {
      ahead.clear();
      ask_rows(ahead, p, p.o, span_of(r, t), r.h, p.Dv);
      const bool last = t + kChunk >= x.stop;
      const Run& next = last ? x.coming : r;
      const Span s = span_of(next, last ? x.coming_start : t + kChunk);
      if (p.o.data) ask_rows(ahead, p, p.q, s, next.h, p.Dk);
      ask_rows(ahead, p, p.k, s, next.h, p.Dk);
      ask_rows(ahead, p, p.v, s, next.h, p.Dv);
      const Span span = span_of(r, t);
      if (p.o.data)
        chunk(p, r, span);
      else
        keys_and_values(p, r, span);
      carry(p);
      totals.pass(p, slot, p.decay == Decay::kChannel ? channel.total : nullptr, decay.total);
    }
    states[slot].count = state.count;
  }
  void end(const Problem& p, const Run& r, int slot) {
    states[slot].write(p, state_of<T>(p, p.state, r));
    totals.end(p, r, slot);
  }

  // Where only the state is wanted: k and v, and k as it is written.
  void keys_and_values(const Problem& p, const Run& r, const Span& s) {
    load_rows(k, p, p.k, s, r.h, p.Dk, T(1));
    load_rows(v, p, p.v, s, r.h, p.Dv, T(1));
    if (p.decay == Decay::kChannel) {
      channel.load(p, s, r.h);
      channel.write(k, k);
    } else if (p.decay != Decay::kNone) {
      load_numbers(gates, p, p.log_decay, s, r.h, kChunk, T(0));
      decay.fill(gates);
      scale_rows(k, k, decay.write);
    }
    if (p.affine) load_presence(one, p, s, kChunk);
  }

  // The outputs of a chunk; k is left as it is written.
  void chunk(const Problem& p, const Run& r, const Span& s) {
    load_rows(q, p, p.q, s, r.h, p.Dk, T(p.scale));
    load_rows(k, p, p.k, s, r.h, p.Dk, T(1));
    load_rows(v, p, p.v, s, r.h, p.Dv, T(1));
    const bool decays = p.decay != Decay::kNone, channels = p.decay == Decay::kChannel;
    const int n = round_up(s.n, kRows);
    if (channels) {
      channel.load(p, s, r.h);
      channel.scores(weights, q, k, false);
    } else {
      transpose(k_transposed, k, kChunk, k.cols);
      product(weights, q, k_transposed, n, kChunk, p.Dk, Part::kLowerC, Into<T>(), &ahead);
      if (decays) {
        load_numbers(gates, p, p.log_decay, s, r.h, kChunk, T(0));
        decay.fill(gates);
        decay.fill_pairs();
        decay_scores(weights, decay.pairs);
      } else {
        lower(weights);
      }
    }
    if (p.affine) add_constant_weights(p, s);
    product(out, weights, v, n, p.Dv, kChunk, Part::kLowerA, Into<T>(), &ahead);
    if (channels) {
      channel.read(q, q);
      channel.write(k, k);
    } else if (decays) {
      scale_rows(q, q, decay.read);
      scale_rows(k, k, decay.write);
    }
    Into<T> more;
    more.add = true;
    product(out, q, state.S, n, p.Dv, p.Dk, Part::kAll, more, &ahead);
    if (p.affine) finish_affine(p);
    store_rows(p.o, p, out, s, r.h, p.Dv, T(1), false);
  }

  // The state after the chunk.
  void carry(const Problem& p) {
    const bool channels = p.decay == Decay::kChannel;
    Into<T> into;
    into.add = true;
    into.factor = channels ? T(1) : decay.total;
    into.rows = channels ? channel.total : nullptr;
    into.exact = p.decay != Decay::kNone;  // k is no longer as it was given
    product<T, true>(state.S, k, v, state.S.rows, p.Dv, kChunk, Part::kAll, into, &ahead);
    if (p.affine) add_constant_to_state();
  }

  // weights += bias * what the constant coordinate of each key is worth to each query.
  void add_constant_weights(const Problem& p, const Span& s) {
    load_presence(one, p, s, kChunk);
    if (p.bias == 0) return;
    const T bias = T(p.bias);
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j <= i; j += kLanes<T>)
        store(weights.at(i, j), load(weights.at(i, j)) +
                                    load(decay.pairs.at(i, j)) * load(one + j) * bias);
    }
  }

  // What the queries read of the sums of v and k, and the division.
  void finish_affine(const Problem& p) {
    const T bias = T(p.bias);
    for (int i = 0; i < kChunk; ++i) {
      const T constant = bias * decay.read[i];
      T divisor = 1;  // of which the inverse may be no number
      if (p.normalize) {
        Vec<T> row = {};
        for (int j = 0; j <= i; j += kLanes<T>) row += load(weights.at(i, j));
        norm[i] = sum<T>(row) + dot_row(q, i, state.k) + constant * state.count;
        divisor = norm[i];
      }
      for (int j = 0; j < out.cols; j += kLanes<T>)
        store(out.at(i, j), (load(out.at(i, j)) + load(state.v + j) * constant) / divisor);
    }
  }

  void add_constant_to_state() {
    for (int j = 0; j < k.cols; j += kLanes<T>) {
      Vec<T> s = load(state.k + j) * decay.total;
      for (int i = 0; i < kChunk; ++i) s += load(k.at(i, j));
      store(state.k + j, s);
    }
    for (int j = 0; j < v.cols; j += kLanes<T>) {
      Vec<T> s = load(state.v + j) * decay.total;
      for (int i = 0; i < kChunk; ++i) s += load(v.at(i, j)) * (decay.write[i] * one[i]);
      store(state.v + j, s);
    }
    T count = state.count * decay.total;
    for (int i = 0; i < kChunk; ++i) count += decay.write[i] * one[i];
    state.count = count;
  }
};

}  // namespace

template <class T>
bool additive_forward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Forward<T>>(p, begin, end);
}

template bool additive_forward<float>(const Problem&, int64_t, int64_t);
template bool additive_forward<double>(const Problem&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
