// The gradient of the delta rule; the equations are those of docs/maths.md 5.
//
// A run is walked backwards in segments; the states before a segment's chunks are made again from
// the one saved at its start. Z is the gradient of the state after the chunk.
#include "channel_gradient.h"
#include "delta_chunk.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Backward {
  DeltaChunk<T> x;
  Matrix<T> G, dU, dv, d_scores, d_system, pairs, transposed, S_transposed, z_transposed;
  Matrix<T> dq, dk, d_read, d_read_k, d_write, *states = nullptr;
  State<T> start, z, *zs;
  double* of_head;  // the gradient of a decay one a head
  ChannelGradient<T> channel_gradient;
  T *d_beta, *reads, *writes, *dg;
  int chunks;

  static constexpr int kPhases = 1;
  static constexpr bool kBackwards = true;

  Backward(Workspace& w, const Problem& p, int slots) {
    const int Dk = padded<T>(p.Dk), Dv = padded<T>(p.Dv);
    x.take(w, p);
    for (Matrix<T>* m : {&dq, &dk, &d_read, &d_read_k, &d_write}) *m = w.matrix<T>(kChunk, Dk);
    for (Matrix<T>* m : {&G, &dU, &dv}) *m = w.matrix<T>(kChunk, Dv);
    for (Matrix<T>* m : {&d_scores, &d_system, &pairs}) *m = w.matrix<T>(kChunk, kChunk);
    transposed = w.matrix<T>(Dv, kChunk);
    S_transposed = w.matrix<T>(Dv, Dk);
    z_transposed = w.matrix<T>(Dv, Dk);
    start = State<T>::take(w, p.Dk, p.Dv);
    zs = State<T>::take(w, p.Dk, p.Dv, slots);
    of_head = w.take<double>(slots);
    for (T** m : {&d_beta, &reads, &writes, &dg}) *m = w.take<T>(kChunk);
    chunks = int(p.segment / kChunk);
    states = w.take<Matrix<T>>(chunks);
    for (int c = 0; c < chunks; ++c) {
      const Matrix<T> S = w.matrix<T>(Dk, Dv);
      if (states) states[c] = S;
    }
    if (p.decay == Decay::kChannel) channel_gradient.take(w, Dk);
  }

  void begin(const Problem& p, const Run& r, int slot) {
    zs[slot].read(p, state_of<T>(p, p.grad_state, r));
    of_head[slot] = 0;
  }
  void segment(const Problem& p, const Stretch& stretch, int slot, int) {
    z = zs[slot];
    states_again(p, stretch);
    for (int c = int((stretch.stop - stretch.start + kChunk - 1) / kChunk) - 1; c >= 0; --c) {
      const int64_t t = stretch.start + int64_t(c) * kChunk;
      ask_before(x.ahead, p, stretch, t);
      of_head[slot] += chunk(p, stretch.run, t, states[c]);
    }
  }
  void end(const Problem& p, const Run& r, int slot) {
    if (p.dinitial_state) zs[slot].write(p, state_of<T>(p, p.dinitial_state, r));
    if (p.dlog_decay_of_head) p.dlog_decay_of_head[r.sequence * p.H + r.h] = of_head[slot];
  }

  void states_again(const Problem& p, const Stretch& stretch) {
    const Run& run = stretch.run;
    const int64_t begin = stretch.start, end = stretch.stop;
    start.read(p, is_saved(p, run, begin) ? saved_state<T>(p, run, begin)
                                          : before_all<T>(p, run));
    states[0].copy(start.S);
    for (int c = 0; begin + int64_t(c + 1) * kChunk < end; ++c) {
      ask_again(x.ahead, p, stretch, begin + int64_t(c) * kChunk);
      x.load(p, span_of(run, begin + int64_t(c) * kChunk), run.h, false);
      x.write(p, states[c]);
      states[c + 1].copy(states[c]);
      x.carry(p, states[c + 1]);
    }
  }

  double chunk(const Problem& p, const Run& run, int64_t t, const Matrix<T>& S) {
    const Span s = span_of(run, t);
    const bool channels = p.decay == Decay::kChannel;
    x.load(p, s, run.h, true);
    load_rows(G, p, p.grad_o, s, run.h, p.Dv, T(1));
    x.write(p, S);

    // dU = W^T G + write(k) Z;  dR = M^-T dU;  dV = Diag(beta) dR
    Into<T> more;
    more.add = true;
    product<T, true>(dU, x.weights, G, kChunk, p.Dv, kChunk, Part::kUpperA);
    product(dU, x.k_write, z.S, kChunk, p.Dv, p.Dk, Part::kAll, more, &x.ahead);
    solve_lower_transposed(x.system, dU);
    scale_rows(dv, dU, x.beta);

    transpose(S_transposed, S, S.rows, S.cols);
    transpose(z_transposed, z.S, z.S.rows, z.S.cols);
    Into<T> minus;
    minus.minus = true;
    product(d_read, G, S_transposed, kChunk, p.Dk, p.Dv, Part::kAll, Into<T>(), &x.ahead);
    product(d_read_k, dv, S_transposed, kChunk, p.Dk, p.Dv, Part::kAll, minus);
    product(d_write, x.U, z_transposed, kChunk, p.Dk, p.Dv);

    transpose(transposed, x.U, kChunk, x.U.cols);
    product(d_system, dU, transposed, kChunk, kChunk, p.Dv, Part::kLowerC, minus);
    product(d_scores, G, transposed, kChunk, kChunk, p.Dv, Part::kLowerC);
    lower(d_system, true);
    lower(d_scores);
    for (int i = 0; i < kChunk; ++i)
      d_beta[i] = dot_rows(dU, x.remaining, i) + dot_rows(d_system, x.keys, i);
    scale_rows(d_system, d_system, x.beta);  // the gradient of A

    double of_head = 0;
    if (channels) {
      channel_gradient.template pairs<false>(x.channel, dq, dk, d_scores, x.q, x.k);
      x.channel.prepare(x.k, x.k);
      channel_gradient.template pairs<true>(x.channel, dk, dk, d_system, x.k, x.k);
      channel_gradient.finish(x.channel, dq, dk, x.q_read, d_read, x.k_write, d_write,
                              S_transposed, z_transposed, &x.k_read, &d_read_k);
      store_rows(p.dlog_decay, p, channel_gradient.dg, s, run.h, p.Dk, T(1), false);
    } else {
      if (p.decay != Decay::kNone) of_head = gradient_of_decay(p, run, s);
      for (const Matrix<T>* m : {&d_scores, &d_system}) decay_scores(*m, x.decay.pairs);
      product(dq, d_scores, x.k, kChunk, p.Dk, kChunk, Part::kLowerA);
      product<T, true>(dk, d_scores, x.q, kChunk, p.Dk, kChunk, Part::kUpperA);
      product<T, true>(dk, d_system, x.k, kChunk, p.Dk, kChunk, Part::kUpperA, more);
      product(dk, d_system, x.k, kChunk, p.Dk, kChunk, Part::kLowerA, more);
      for (int i = 0; i < kChunk; ++i) {
        const T read = x.decay.read[i], write = x.decay.write[i];
        for (int d = 0; d < dq.cols; d += kLanes<T>) {
          store(dq.at(i, d), load(dq.at(i, d)) + load(d_read.at(i, d)) * read);
          store(dk.at(i, d), load(dk.at(i, d)) + load(d_read_k.at(i, d)) * read +
                                 load(d_write.at(i, d)) * write);
        }
      }
    }
    store_rows(p.dq, p, dq, s, run.h, p.Dk, T(p.scale), !is_first(p.q, run.h, p.H));
    store_rows(p.dk, p, dk, s, run.h, p.Dk, T(1), !is_first(p.k, run.h, p.H));
    store_rows(p.dv, p, dv, s, run.h, p.Dv, T(1), !is_first(p.v, run.h, p.H));
    store_numbers(p.dbeta, p, d_beta, s, run.h);

    // Z <- total Z + read(q)^T G - read(k)^T dV
    Into<T> into;
    into.add = true;
    into.factor = channels ? T(1) : x.decay.total;
    into.rows = channels ? x.channel.total : nullptr;
    product<T, true>(z.S, x.q_read, G, z.S.rows, p.Dv, kChunk, Part::kAll, into);
    minus.add = true;
    product<T, true>(z.S, x.k_read, dv, z.S.rows, p.Dv, kChunk, Part::kAll, minus);
    return of_head;
  }

  double gradient_of_decay(const Problem& p, const Run& run, const Span& s) {
    for (int i = 0; i < kChunk; ++i) {
      reads[i] = dot_rows(x.q_read, d_read, i) + dot_rows(x.k_read, d_read_k, i);
      writes[i] = dot_rows(x.k_write, d_write, i);
      for (int j = 0; j < kChunk; j += kLanes<T>)
        store(pairs.at(i, j), load(x.weights.at(i, j)) * load(d_scores.at(i, j)) +
                                  load(x.keys.at(i, j)) * load(d_system.at(i, j)));
    }
    const T passed = dot_all(S_transposed, z_transposed) * x.decay.total;
    decay_gradient(dg, pairs, reads, writes, passed);
    double of_head = 0;
    for (int i = 0; i < s.n; ++i) of_head += is_there(p, s.b, s.start + i) ? double(dg[i]) : 0.0;
    if (p.dlog_decay.data) store_numbers(p.dlog_decay, p, dg, s, run.h);
    return of_head;
  }
};

}  // namespace

template <class T>
bool delta_backward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Backward<T>>(p, begin, end);
}

template bool delta_backward<float>(const Problem&, int64_t, int64_t);
template bool delta_backward<double>(const Problem&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
