// Tensors of torch's stable ABI as the plain views of the kernels.
#pragma once
#include <sys/mman.h>

#include <initializer_list>
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "problem.h"

namespace linattn {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using torch::headeronly::ScalarType;

inline Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      return Dtype::kFloat32;
  }
}

// [B, N, heads, D], or [B, N, heads] with channel 0, or [heads] for every token.
inline View view_of(const Tensor& x) {
  View v;
  v.data = static_cast<char*>(x.data_ptr());
  v.dtype = dtype_of(x);
  const auto sizes = x.sizes(), strides = x.strides();
  if (sizes.size() == 1) {
    v.head = strides[0];
    v.heads = sizes[0];
    return v;
  }
  v.batch = strides[0];
  v.token = strides[1];
  if (sizes.size() > 2) {
    v.head = strides[2];
    v.heads = sizes[2];
  }
  if (sizes.size() > 3) v.channel = strides[3];
  return v;
}
inline View view_of(const Optional& x) { return x.has_value() ? view_of(*x) : View(); }

// [B, N, C], [N, C] as by token and channel, or [C].
inline View rows_of(const Optional& x) {
  View v;
  if (!x.has_value()) return v;
  v.data = static_cast<char*>(x->data_ptr());
  v.dtype = dtype_of(*x);
  const int64_t dim = x->dim();
  v.channel = x->stride(dim - 1);
  if (dim > 1) v.token = x->stride(dim - 2);
  if (dim > 2) v.batch = x->stride(0);
  return v;
}

inline void* data_of(const Optional& x) { return x.has_value() ? x->data_ptr() : nullptr; }

// Fresh outputs cost a page fault for every 4 KiB; where the system asks for it, for 2 MiB.
inline void prefer_huge_pages(const Tensor& x) {
#if defined(MADV_HUGEPAGE)
  const size_t page = size_t(2) << 20, bytes = size_t(x.numel()) * x.element_size();
  if (bytes < 2 * page) return;
  const size_t begin = (reinterpret_cast<size_t>(x.data_ptr()) + page - 1) / page * page;
  const size_t end = (reinterpret_cast<size_t>(x.data_ptr()) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline void check_memory(bool ok) {
  STD_TORCH_CHECK(ok, "linattn: not enough memory for the work space of the CPU kernels");
}

inline bool is_shape(const Optional& x, std::initializer_list<int64_t> shape) {
  if (!x.has_value()) return true;
  const auto sizes = x->sizes();
  if (sizes.size() != shape.size()) return false;
  size_t i = 0;
  for (const int64_t n : shape)
    if (sizes[i++] != n) return false;
  return true;
}

// The bytes from the first number of a tensor to past its last; 0: it has none.
inline size_t extent(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return size_t(last + 1) * x.element_size();
}

// Whether the state surely shares no memory with x: no byte lies between the ends of both.
inline bool is_apart(const Tensor& state, const Optional& x) {
  if (!x.has_value()) return true;
  const char *a = static_cast<const char*>(state.data_ptr()),
             *b = static_cast<const char*>(x->data_ptr());
  const size_t size = extent(*x);
  return size == 0 || a + extent(state) <= b || b + size <= a;
}

}  // namespace linattn
