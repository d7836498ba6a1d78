// The kernels that each instruction set has, declared in its own namespace.
#pragma once
#include "convolution.h"
#include "problem.h"

namespace linattn {
namespace LINATTN_ISA {

template <class T>
bool additive_forward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool additive_backward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool noncausal_forward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool noncausal_backward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool delta_forward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool delta_backward(const Problem& p, int64_t begin, int64_t end);
template <class T>
bool convolution_forward(const Convolution& p, int64_t begin, int64_t end);
template <class T>
bool convolution_backward(const Convolution& p, int64_t begin, int64_t end);
template <class T>
bool decode(const Problem& p, int64_t begin, int64_t end);

}  // namespace LINATTN_ISA
}  // namespace linattn
