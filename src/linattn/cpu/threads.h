// torch's threads, and none in a forked process.
//
// The threads of OpenMP do not survive a fork: a child that waits for them waits forever, as torch's
// own operators do where the parent has used them. Workers of a DataLoader are such children.
#pragma once
#include <pthread.h>

#include <torch/csrc/stable/ops.h>

namespace linattn {

inline bool is_forked = false;

namespace detail {
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

inline int64_t number_of_threads() {
  return is_forked || detail::at_fork != 0 ? 1 : int64_t(torch::stable::get_num_threads());
}

// f(begin, end) for stretches of [0, n), each of at least `grain`.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (number_of_threads() == 1)
    f(int64_t(0), n);
  else
    torch::stable::parallel_for(0, n, grain, f);
}

}  // namespace linattn
