// The gradient of the causal additive recurrence; the equations are those of docs/maths.md 5.
//
// A run is walked backwards in segments. The states before a segment's chunks are made again from
// the one saved at its start, transposed, since only G S^T is wanted of them. Z is the gradient of
// the state after the chunk; it lives in `z`, and its transpose is made once a chunk.
#include "channel_gradient.h"
#include "kernels.h"
#include "run.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Backward {
  Matrix<T> q, k, v, G, q_read, k_write, transposed, v_transposed, weights, d_weights;
  Matrix<T> dq, dk, dv, d_read, d_write, z_transposed, *states = nullptr;
  State<T>* sums = nullptr;  // of the constant coordinate, before each chunk of the segment
  State<T> start, z, *zs;
  double* of_head;  // the gradient of a decay one a head
  TokenDecay<T> decay;
  ChannelDecay<T> channel;
  Ahead ahead;
  Totals<T> totals;
  ChannelGradient<T> channel_gradient;
  T *gates, *one, *reads, *writes, *dg, *r, *norm;
  int chunks;

  static constexpr int kPhases = 1;
  static constexpr bool kBackwards = true;

  Backward(Workspace& w, const Problem& p, int slots) {
    const int Dk = padded<T>(p.Dk), Dv = padded<T>(p.Dv);
    w.rounded = is_bfloat16(p);
    for (Matrix<T>* x : {&q, &k, &q_read, &k_write, &dq, &dk, &d_read, &d_write})
      *x = w.matrix<T>(kChunk, Dk);
    for (Matrix<T>* x : {&v, &G, &dv}) *x = w.matrix<T>(kChunk, Dv);
    for (Matrix<T>* x : {&weights, &d_weights, &decay.pairs}) *x = w.matrix<T>(kChunk, kChunk);
    transposed = w.matrix<T>(Dk, kChunk);
    v_transposed = w.matrix<T>(Dv, kChunk);
    z_transposed = w.matrix<T>(Dv, Dk);
    start = State<T>::take(w, p.Dk, p.Dv);
    zs = State<T>::take(w, p.Dk, p.Dv, slots);
    of_head = w.take<double>(slots);
    totals.take(w, p, slots);
    for (T** x : {&gates, &one, &reads, &writes, &dg, &r, &norm}) *x = w.take<T>(kChunk);
    chunks = int(p.segment / kChunk);
    states = w.take<Matrix<T>>(chunks);
    sums = w.take<State<T>>(chunks);
    for (int c = 0; c < chunks; ++c) {
      const Matrix<T> S = w.matrix<T>(Dv, Dk);
      T* sum_k = w.take<T>(Dk);
      T* sum_v = w.take<T>(Dv);
      if (!states) continue;  // counting
      states[c] = S;
      sums[c] = State<T>();
      sums[c].k = sum_k;
      sums[c].v = sum_v;
    }
    w.rounded = false;  // as in forward
    if (p.decay == Decay::kChannel) {
      channel.take(w, Dk);
      channel_gradient.take(w, Dk);
    }
  }

  void begin(const Problem& p, const Run& r, int slot) {
    zs[slot].read(p, state_of<T>(p, p.grad_state, r));
    of_head[slot] = 0;
    totals.begin(p, slot);
  }
  void segment(const Problem& p, const Stretch& x, int slot, int) {
    z = zs[slot];
    if (p.decay == Decay::kNone) {
      decay.fill_without_decay();
      decay.fill_pairs();
    }
    if (p.dq.data) states_again(p, x);
    for (int c = int((x.stop - x.start + kChunk - 1) / kChunk) - 1; c >= 0; --c) {
      const int64_t t = x.start + int64_t(c) * kChunk;
      ask_before(ahead, p, x, t);
      if (p.dq.data)
        of_head[slot] += chunk(p, x.run, t, c);
      else
        only_z(p, x.run, t);
      totals.pass(p, slot, p.decay == Decay::kChannel ? channel.total : nullptr, decay.total);
    }
    zs[slot].count = z.count;
  }
  void end(const Problem& p, const Run& r, int slot) {
    totals.end(p, r, slot);
    if (p.dinitial_state) zs[slot].write(p, state_of<T>(p, p.dinitial_state, r));
    if (p.dlog_decay_of_head) p.dlog_decay_of_head[r.sequence * p.H + r.h] = of_head[slot];
  }

  // Decays of the chunk at t; `decay` or `channel` afterwards hold them.
  void load_decay(const Problem& p, const Run& r, const Span& s) {
    if (p.decay == Decay::kChannel) {
      channel.load(p, s, r.h);
    } else if (p.decay != Decay::kNone) {
      load_numbers(gates, p, p.log_decay, s, r.h, kChunk, T(0));
      decay.fill(gates);
    }
  }

  // The transposed states before the chunks of a segment.
  void states_again(const Problem& p, const Stretch& x) {
    const Run& run = x.run;
    const int64_t begin = x.start, end = x.stop;
    start.read(p, is_saved(p, run, begin) ? saved_state<T>(p, run, begin)
                                          : before_all<T>(p, run));
    transpose(states[0], start.S, start.S.rows, start.S.cols);
    memcpy(sums[0].k, start.k, start.S.rows * sizeof(T));
    memcpy(sums[0].v, start.v, start.S.cols * sizeof(T));
    sums[0].count = start.count;
    for (int c = 0; begin + int64_t(c + 1) * kChunk < end; ++c) {
      const Span s = span_of(run, begin + int64_t(c) * kChunk);
      ask_again(ahead, p, x, begin + int64_t(c) * kChunk);
      load_rows(k, p, p.k, s, run.h, p.Dk, T(1));
      load_rows(v, p, p.v, s, run.h, p.Dv, T(1));
      load_decay(p, run, s);
      const bool channels = p.decay == Decay::kChannel;
      if (channels)
        channel.write(k, k);
      else if (p.decay != Decay::kNone)
        scale_rows(k, k, decay.write);
      states[c + 1].copy(states[c]);
      Into<T> into;
      into.add = true;
      into.factor = channels ? T(1) : decay.total;
      into.columns = channels ? channel.total : nullptr;
      into.exact = p.decay != Decay::kNone;  // as in forward
      product<T, true>(states[c + 1], v, k, v.cols, k.cols, kChunk, Part::kAll, into, &ahead);
      if (!p.affine) continue;
      load_presence(one, p, s, kChunk);
      add_rows(sums[c + 1].k, sums[c].k, k, nullptr);
      add_rows(sums[c + 1].v, sums[c].v, v, decay.write);
      T count = sums[c].count * decay.total;
      for (int i = 0; i < kChunk; ++i) count += decay.write[i] * one[i];
      sums[c + 1].count = count;
    }
  }

  // to = total from + the sum of the rows, each times its factor.
  void add_rows(T* to, const T* from, const Matrix<T>& x, const T* factors) const {
    for (int j = 0; j < x.cols; j += kLanes<T>) {
      Vec<T> s = load(from + j) * decay.total;
      for (int i = 0; i < kChunk; ++i) s += load(x.at(i, j)) * (factors ? factors[i] : T(1));
      store(to + j, s);
    }
  }

  // The gradients of one chunk; returns its share of the gradient of a decay one a head.
  double chunk(const Problem& p, const Run& run, int64_t t, int c) {
    const Span s = span_of(run, t);
    const bool decays = p.decay != Decay::kNone, channels = p.decay == Decay::kChannel;
    load_rows(q, p, p.q, s, run.h, p.Dk, T(p.scale));
    load_rows(k, p, p.k, s, run.h, p.Dk, T(1));
    load_rows(v, p, p.v, s, run.h, p.Dv, T(1));
    load_rows(G, p, p.grad_o, s, run.h, p.Dv, T(1));
    load_decay(p, run, s);
    if (channels) {
      channel.scores(weights, q, k, false);
      channel.read(q_read, q);
      channel.write(k_write, k);
    } else {
      transpose(transposed, k, kChunk, k.cols);
      product(weights, q, transposed, kChunk, kChunk, p.Dk, Part::kLowerC);
      if (decays) {
        decay.fill_pairs();
        decay_scores(weights, decay.pairs);
        scale_rows(q_read, q, decay.read);
        scale_rows(k_write, k, decay.write);
      } else {
        lower(weights);
      }
    }
    const Matrix<T>& read = decays ? q_read : q;
    const Matrix<T>& write = decays ? k_write : k;
    if (p.affine) {
      load_presence(one, p, s, kChunk);
      if (p.bias != 0) add_bias(p);
      if (p.normalize) divide(read, p, c);
    }
    transpose(v_transposed, v, kChunk, v.cols);
    product(d_weights, G, v_transposed, kChunk, kChunk, p.Dv, Part::kLowerC);
    product(d_read, G, states[c], kChunk, p.Dk, p.Dv, Part::kAll, Into<T>(), &ahead);
    lower(d_weights);
    if (p.normalize) subtract_division(p, read, c);

    transpose(z_transposed, z.S, z.S.rows, z.S.cols);
    product<T, true>(dv, weights, G, kChunk, p.Dv, kChunk, Part::kUpperA);
    Into<T> more;
    more.add = true;
    product(dv, write, z.S, kChunk, p.Dv, p.Dk, Part::kAll, more, &ahead);
    product(d_write, v, z_transposed, kChunk, p.Dk, p.Dv, Part::kAll, Into<T>(), &ahead);
    if (p.affine) add_constant_to_keys();

    double of_head = 0;
    if (channels) {
      channel_gradient.template pairs<false>(channel, dq, dk, d_weights, q, k);
      channel_gradient.finish(channel, dq, dk, q_read, d_read, k_write, d_write, states[c],
                              z_transposed, nullptr, nullptr);
      store_rows(p.dlog_decay, p, channel_gradient.dg, s, run.h, p.Dk, T(1), false);
    } else {
      if (decays) of_head = gradient_of_decay(p, run, s, c);
      product(dq, d_weights, k, kChunk, p.Dk, kChunk, Part::kLowerA);
      product<T, true>(dk, d_weights, q, kChunk, p.Dk, kChunk, Part::kUpperA);
      add_scaled(dq, d_read, decay.read);
      add_scaled(dk, d_write, decay.write);
    }
    store_rows(p.dq, p, dq, s, run.h, p.Dk, T(p.scale), !is_first(p.q, run.h, p.H));
    store_rows(p.dk, p, dk, s, run.h, p.Dk, T(1), !is_first(p.k, run.h, p.H));
    store_rows(p.dv, p, dv, s, run.h, p.Dv, T(1), !is_first(p.v, run.h, p.H));

    carry(p, read);
    return of_head;
  }

  // z from after the chunk to before it.
  void carry(const Problem& p, const Matrix<T>& read) {
    const bool channels = p.decay == Decay::kChannel;
    Into<T> into;
    into.add = true;
    into.factor = channels ? T(1) : decay.total;
    into.rows = channels ? channel.total : nullptr;
    product<T, true>(z.S, read, G, z.S.rows, p.Dv, kChunk, Part::kAll, into, &ahead);
    if (p.affine) constant_before(p, read);
  }

  // Where only the gradient of the state is wanted, and none of a division.
  void only_z(const Problem& p, const Run& run, int64_t t) {
    const Span s = span_of(run, t);
    load_rows(q, p, p.q, s, run.h, p.Dk, T(p.scale));
    load_rows(G, p, p.grad_o, s, run.h, p.Dv, T(1));
    load_decay(p, run, s);
    if (p.decay == Decay::kChannel)
      channel.read(q, q);
    else if (p.decay != Decay::kNone)
      scale_rows(q, q, decay.read);
    carry(p, q);
  }

  void add_bias(const Problem& p) {
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j <= i; j += kLanes<T>)
        store(weights.at(i, j), load(weights.at(i, j)) + load(decay.pairs.at(i, j)) *
                                                            load(one + j) * T(p.bias));
    }
  }

  // G becomes the gradient of the numerator.
  void divide(const Matrix<T>& read, const Problem& p, int c) {
    for (int i = 0; i < kChunk; ++i) {
      Vec<T> row = {};
      for (int j = 0; j <= i; j += kLanes<T>) row += load(weights.at(i, j));
      const T all = sum<T>(row) + dot_row(read, i, sums[c].k) +
                    T(p.bias) * decay.read[i] * sums[c].count;
      norm[i] = one[i] != 0 ? T(1) / all : T(0);
    }
    scale_rows(G, G, norm);
  }

  // What the division costs: r = G . o, with o made again from weights and state.
  void subtract_division(const Problem& p, const Matrix<T>& read, int c) {
    const Vec<T> column = places<T>();
    for (int i = 0; i < kChunk; ++i) {
      const T numerator = dot_rows(weights, d_weights, i) + dot_rows(read, d_read, i) +
                          T(p.bias) * decay.read[i] * dot_row(G, i, sums[c].v);
      r[i] = numerator * norm[i];
      for (int j = 0; j <= i; j += kLanes<T>) {
        const Vec<T> seen = column <= T(i - j) ? broadcast(r[i]) : Vec<T>{};
        store(d_weights.at(i, j), load(d_weights.at(i, j)) - seen);
      }
      for (int j = 0; j < d_read.cols; j += kLanes<T>)
        store(d_read.at(i, j), load(d_read.at(i, j)) - load(sums[c].k + j) * r[i]);
    }
  }

  // The keys' constant coordinate was written to the sums: what z says of those.
  void add_constant_to_keys() {
    for (int i = 0; i < kChunk; ++i) {
      const T factor = decay.write[i] * one[i];
      for (int j = 0; j < dv.cols; j += kLanes<T>)
        store(dv.at(i, j), load(dv.at(i, j)) + load(z.v + j) * factor);
      for (int j = 0; j < d_write.cols; j += kLanes<T>)
        store(d_write.at(i, j), load(d_write.at(i, j)) + load(z.k + j));
    }
  }

  double gradient_of_decay(const Problem& p, const Run& run, const Span& s, int c) {
    const T bias = T(p.bias);
    T passed = dot_all(states[c], z_transposed);
    for (int i = 0; i < kChunk; ++i) {
      reads[i] = dot_rows(q_read, d_read, i);
      writes[i] = dot_rows(k_write, d_write, i);
      if (!p.affine) continue;
      const T of_state = dot_row(G, i, sums[c].v) - (p.normalize ? r[i] * sums[c].count : T(0));
      reads[i] += bias * decay.read[i] * of_state;
      writes[i] += decay.write[i] * one[i] * (dot_row(v, i, z.v) + z.count);
    }
    if (p.affine) {
      for (int j = 0; j < k.cols; ++j) passed += sums[c].k[j] * z.k[j];
      for (int j = 0; j < v.cols; ++j) passed += sums[c].v[j] * z.v[j];
      passed += sums[c].count * z.count;
    }
    // pairs_ij: weight times its gradient; d_weights becomes the gradient of q . k.
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j < kChunk; j += kLanes<T>) {
        store(weights.at(i, j), load(weights.at(i, j)) * load(d_weights.at(i, j)));
        store(d_weights.at(i, j), load(d_weights.at(i, j)) * load(decay.pairs.at(i, j)));
      }
    }
    decay_gradient(dg, weights, reads, writes, passed * decay.total);
    double of_head = 0;
    for (int i = 0; i < s.n; ++i) of_head += is_there(p, s.b, s.start + i) ? double(dg[i]) : 0.0;
    if (p.dlog_decay.data) store_numbers(p.dlog_decay, p, dg, s, run.h);
    return of_head;
  }

  static void add_scaled(const Matrix<T>& out, const Matrix<T>& x, const T* factors) {
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j < out.cols; j += kLanes<T>)
        store(out.at(i, j), load(out.at(i, j)) + load(x.at(i, j)) * factors[i]);
    }
  }

  // z of the sums, from after the chunk to before it.
  void constant_before(const Problem& p, const Matrix<T>& read) {
    const T bias = T(p.bias), total = decay.total;
    for (int j = 0; j < q.cols; j += kLanes<T>) {
      Vec<T> x = load(z.k + j) * total;
      for (int i = 0; p.normalize && i < kChunk; ++i) x -= load(read.at(i, j)) * r[i];
      store(z.k + j, x);
    }
    for (int j = 0; j < v.cols; j += kLanes<T>) {
      Vec<T> x = load(z.v + j) * total;
      for (int i = 0; i < kChunk; ++i) x += load(G.at(i, j)) * (bias * decay.read[i]);
      store(z.v + j, x);
    }
    z.count *= total;
    for (int i = 0; p.normalize && i < kChunk; ++i) z.count -= bias * decay.read[i] * r[i];
  }
};

}  // namespace

template <class T>
bool additive_backward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Backward<T>>(p, begin, end);
}

template bool additive_backward<float>(const Problem&, int64_t, int64_t);
template bool additive_backward<double>(const Problem&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
