// The kernels that each instruction set has, declared in its own namespace.
#pragma once
#include "convolution.h"
#include "problem.h"
#include "selective_scan.h"
#include "tile.h"

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

template <class T>
bool selective_scan_forward(const SelectiveScan& p, int64_t begin, int64_t end);
template <class T>
bool selective_scan_backward(const SelectiveScan& p, int64_t begin, int64_t end);
template <class T>
bool selective_scan_step(const SelectiveScan& p, int64_t begin, int64_t end);
// Channels of a tile: two vectors, so that two chains of exp keep the multipliers busy, and the
// states of a block of tokens with n = 16 (64 KiB, as much again of decays) the second-level cache.
template <class T>
constexpr int kScanTile = 2 * kLanes<T>;

}  // namespace LINATTN_ISA
}  // namespace linattn
