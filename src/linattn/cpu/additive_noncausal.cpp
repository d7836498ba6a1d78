// The additive form where every token sees all: one sum over the tokens, read by each of them.
//
//   S = sum_j k_j v_j^T   o_i = S^T q_i   and the affine kernel by its parts, as in the causal form
//
// Backward: Z = sum_i q_i G_i^T and its parts, dq = G S^T, dk = V Z^T, dv = K Z.
#include "kernels.h"
#include "run.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Noncausal {
  Matrix<T> q, k, v, out, dq, dk, transposed;
  State<T> state, z, *states, *zs;
  T *one, *r;

  Noncausal(Workspace& w, const Problem& p, int slots) {
    const int Dk = padded<T>(p.Dk), Dv = padded<T>(p.Dv);
    w.rounded = is_bfloat16(p);
    for (Matrix<T>* x : {&q, &k, &dq, &dk}) *x = w.matrix<T>(kChunk, Dk);
    for (Matrix<T>* x : {&v, &out}) *x = w.matrix<T>(kChunk, Dv);
    transposed = w.matrix<T>(Dv, Dk);
    states = State<T>::take(w, p.Dk, p.Dv, slots);
    zs = State<T>::take(w, p.Dk, p.Dv, slots);
    one = w.take<T>(kChunk);
    r = w.take<T>(kChunk);
  }

  // x += A^T B, and the sums of rows of A and B that the affine kernel has beside.
  void add(State<T>& x, const Problem& p, const Matrix<T>& A, const Matrix<T>& B) const {
    Into<T> more;
    more.add = true;
    product<T, true>(x.S, A, B, x.S.rows, p.Dv, kChunk, Part::kAll, more);
  }
  static void add_rows(T* to, const Matrix<T>& x, const T* factors, T factor) {
    for (int i = 0; i < kChunk; ++i) {
      const T f = factor * (factors ? factors[i] : T(1));
      for (int j = 0; j < x.cols; j += kLanes<T>)
        store(to + j, load(to + j) + load(x.at(i, j)) * f);
    }
  }

  // The keys and values of some tokens into the state.
  void write(const Problem& p, const Stretch& x) {
    const Run& run = x.run;
    for (int64_t t = x.start; t < x.stop; t += kChunk) {
      const Span s = span_of(run, t);
      load_rows(k, p, p.k, s, run.h, p.Dk, T(1));
      load_rows(v, p, p.v, s, run.h, p.Dv, T(1));
      add(state, p, k, v);
      if (!p.affine) continue;
      load_presence(one, p, s, kChunk);
      add_rows(state.k, k, nullptr, T(1));
      add_rows(state.v, v, one, T(1));
      for (int i = 0; i < kChunk; ++i) state.count += one[i];
    }
  }

  // q and the output of one chunk; r: 1 / the sum of the weights.
  void read(const Problem& p, const Run& run, const Span& s) {
    const T bias = T(p.bias);
    load_rows(q, p, p.q, s, run.h, p.Dk, T(p.scale));
    product(out, q, state.S, kChunk, p.Dv, p.Dk);
    if (!p.affine) return;
    load_presence(one, p, s, kChunk);
    for (int i = 0; i < kChunk; ++i) {
      const bool divided = p.normalize && one[i] != 0;
      const T weights = divided ? dot_row(q, i, state.k) + bias * state.count : T(1);
      r[i] = one[i] != 0 ? T(1) / weights : T(0);
      for (int j = 0; j < out.cols; j += kLanes<T>)
        store(out.at(i, j), (load(out.at(i, j)) + load(state.v + j) * bias) / weights);
    }
  }

  // dq of some tokens, and their gradients of the state into z.
  void gradient_of_queries(const Problem& p, const Stretch& x) {
    const Run& run = x.run;
    const T bias = T(p.bias);
    transpose(transposed, state.S, state.S.rows, state.S.cols);
    for (int64_t t = x.start; t < x.stop; t += kChunk) {
      const Span s = span_of(run, t);
      read(p, run, s);  // also where only r and o are wanted of it
      load_rows(v, p, p.grad_o, s, run.h, p.Dv, T(1));  // v: G here
      if (p.normalize) {
        scale_rows(v, v, r);
        for (int i = 0; i < kChunk; ++i) r[i] = dot_rows(v, out, i);
      }
      product(dq, v, transposed, kChunk, p.Dk, p.Dv);
      if (p.normalize) {
        for (int i = 0; i < kChunk; ++i) {
          for (int j = 0; j < dq.cols; j += kLanes<T>)
            store(dq.at(i, j), load(dq.at(i, j)) - load(state.k + j) * r[i]);
        }
      }
      store_rows(p.dq, p, dq, s, run.h, p.Dk, T(p.scale), !is_first(p.q, run.h, p.H));
      add(z, p, q, v);
      if (p.bias != 0) add_rows(z.v, v, nullptr, bias);
      if (!p.normalize) continue;
      add_rows(z.k, q, r, T(-1));
      for (int i = 0; i < kChunk; ++i) z.count -= bias * r[i];
    }
  }

  void gradient_of_keys(const Problem& p, const Stretch& x) {
    const Run& run = x.run;
    transpose(transposed, z.S, z.S.rows, z.S.cols);
    for (int64_t t = x.start; t < x.stop; t += kChunk) {
      const Span s = span_of(run, t);
      load_rows(k, p, p.k, s, run.h, p.Dk, T(1));
      load_rows(v, p, p.v, s, run.h, p.Dv, T(1));
      product(dk, v, transposed, kChunk, p.Dk, p.Dv);
      product(out, k, z.S, kChunk, p.Dv, p.Dk);
      if (p.affine) {
        for (int i = 0; i < kChunk; ++i) {
          for (int j = 0; j < dk.cols; j += kLanes<T>)
            store(dk.at(i, j), load(dk.at(i, j)) + load(z.k + j));
          for (int j = 0; j < out.cols; j += kLanes<T>)
            store(out.at(i, j), load(out.at(i, j)) + load(z.v + j));
        }
      }
      store_rows(p.dk, p, dk, s, run.h, p.Dk, T(1), !is_first(p.k, run.h, p.H));
      store_rows(p.dv, p, out, s, run.h, p.Dv, T(1), !is_first(p.v, run.h, p.H));
    }
  }
};

template <class T>
struct Forward : Noncausal<T> {
  static constexpr int kPhases = 2;  // the state, then its readers
  static constexpr bool kBackwards = false;
  using Noncausal<T>::Noncausal;

  void begin(const Problem& p, const Run& run, int slot) {
    this->states[slot].read(p, state_of<T>(p, p.initial_state, run));
  }
  void segment(
      const Problem& p, const Stretch& x, int slot, int phase) {
    const Run& run = x.run;
    this->state = this->states[slot];
    if (phase == 0) this->write(p, x);
    this->states[slot].count = this->state.count;
    for (int64_t t = x.start; phase == 1 && t < x.stop; t += kChunk) {
      const Span s = span_of(run, t);
      this->read(p, run, s);
      store_rows(p.o, p, this->out, s, run.h, p.Dv, T(1), false);
    }
  }
  void end(const Problem& p, const Run& run, int slot) {
    this->states[slot].write(p, state_of<T>(p, p.state, run));
  }
};
template <class T>
struct Backward : Noncausal<T> {
  static constexpr int kPhases = 2;  // the queries, then what they say of the keys
  static constexpr bool kBackwards = false;
  using Noncausal<T>::Noncausal;

  void begin(const Problem& p, const Run& run, int slot) {
    this->states[slot].read(p, state_of<T>(p, p.state, run));
    this->zs[slot].read(p, state_of<T>(p, p.grad_state, run));
  }
  void segment(
      const Problem& p, const Stretch& x, int slot, int phase) {
    this->state = this->states[slot];
    this->z = this->zs[slot];
    if (phase == 0) this->gradient_of_queries(p, x);
    if (phase == 1) this->gradient_of_keys(p, x);
    this->zs[slot].count = this->z.count;
  }
  void end(const Problem& p, const Run& run, int slot) {
    if (p.dinitial_state) this->zs[slot].write(p, state_of<T>(p, p.dinitial_state, run));
  }
};

}  // namespace

template <class T>
bool noncausal_forward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Forward<T>>(p, begin, end);
}
template <class T>
bool noncausal_backward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Backward<T>>(p, begin, end);
}

template bool noncausal_forward<float>(const Problem&, int64_t, int64_t);
template bool noncausal_forward<double>(const Problem&, int64_t, int64_t);
template bool noncausal_backward<float>(const Problem&, int64_t, int64_t);
template bool noncausal_backward<double>(const Problem&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
