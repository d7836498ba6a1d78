// The delta rule by chunks, with any decay; see delta_chunk.h and docs/maths.md 4.
#include "delta_chunk.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA {

namespace {

template <class T>
struct Forward {
  DeltaChunk<T> chunk;
  Matrix<T> out;
  State<T>* states;

  static constexpr int kPhases = 1;
  static constexpr bool kBackwards = false;

  Forward(Workspace& w, const Problem& p, int slots) {
    chunk.take(w, p);
    out = w.matrix<T>(kChunk, p.Dv);
    states = State<T>::take(w, p.Dk, p.Dv, slots);
  }

  void begin(const Problem& p, const Run& r, int slot) {
    states[slot].read(p, state_of<T>(p, p.initial_state, r));
  }
  void segment(const Problem& p, const Stretch& x, int slot, int) {
    const Run& r = x.run;
    State<T>& state = states[slot];
    if (p.saved && is_saved(p, r, x.start)) state.write(p, saved_state<T>(p, r, x.start));
    for (int64_t t = x.start; t < x.stop; t += kChunk) {
      const Span s = span_of(r, t);
      Ahead& ahead = chunk.ahead;
      ahead.clear();
      ask_rows(ahead, p, p.o, s, r.h, p.Dv);
      const bool last = t + kChunk >= x.stop;
      const Run& next = last ? x.coming : r;
      const Span then = span_of(next, last ? x.coming_start : t + kChunk);
      ask_rows(ahead, p, p.q, then, next.h, p.Dk);
      ask_rows(ahead, p, p.k, then, next.h, p.Dk);
      ask_rows(ahead, p, p.v, then, next.h, p.Dv);
      chunk.load(p, s, r.h, true);
      chunk.write(p, state.S);
      product(out, chunk.weights, chunk.U, kChunk, p.Dv, kChunk, Part::kLowerA, Into<T>(), &ahead);
      Into<T> more;
      more.add = true;
      product(out, chunk.q_read, state.S, kChunk, p.Dv, p.Dk, Part::kAll, more, &ahead);
      store_rows(p.o, p, out, s, r.h, p.Dv, T(1), false);
      chunk.carry(p, state.S);
    }
  }
  void end(const Problem& p, const Run& r, int slot) {
    states[slot].write(p, state_of<T>(p, p.state, r));
  }
};

}  // namespace

template <class T>
bool delta_forward(const Problem& p, int64_t begin, int64_t end) {
  return run_all<T, Forward<T>>(p, begin, end);
}

template bool delta_forward<float>(const Problem&, int64_t, int64_t);
template bool delta_forward<double>(const Problem&, int64_t, int64_t);

}  // namespace LINATTN_ISA
}  // namespace linattn
