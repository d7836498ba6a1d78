// Work space of one task: one block, handed out in pieces aligned to cache lines.
#pragma once
#include <stdlib.h>

#include "tile.h"

namespace linattn {
namespace LINATTN_ISA {

class Workspace {
 public:
  bool rounded = false;  // of the matrices handed out from now on

  // Before `allocate` this only counts, and hands out nothing that may be touched.
  template <class T>
  T* take(size_t n) {
    const size_t here = used_;
    used_ += (n * sizeof(T) + 63) / 64 * 64;
    return block_ ? reinterpret_cast<T*>(block_ + here) : nullptr;
  }
  template <class T>
  Matrix<T> matrix(int rows, int cols) {
    Matrix<T> x(take<T>(Matrix<T>::size(rows, cols)), rows, cols);
    x.rounded = rounded;
    return x;
  }
  size_t used() const { return used_; }
  bool allocate(size_t bytes) {
#if !defined(LINATTN_POISON)
    if (bytes <= sizeof(few_)) {  // a decoding step: malloc would be a tenth of it
      block_ = few_;
      return true;
    }
#endif
    void* block = nullptr;
    if (posix_memalign(&block, 64, bytes + 64) != 0) return false;
    block_ = static_cast<char*>(block);
#if defined(LINATTN_POISON)
    memset(block_, 0xff, bytes + 64);  // NaN: what is read before it is written shows
#endif
    return true;
  }
  ~Workspace() {
    if (block_ != few_) free(block_);
  }

 private:
  alignas(64) char few_[8 << 10];
  char* block_ = nullptr;
  size_t used_ = 0;
};

}  // namespace LINATTN_ISA
}  // namespace linattn
