// The table of one instruction set.
#include "kernels.h"

#define LINATTN_CONCAT_(a, b) a##b
#define LINATTN_CONCAT(a, b) LINATTN_CONCAT_(a, b)
#define LINATTN_STRING_(a) #a
#define LINATTN_STRING(a) LINATTN_STRING_(a)

namespace linattn {

extern const Kernels LINATTN_CONCAT(kernels_, LINATTN_ISA);
const Kernels LINATTN_CONCAT(kernels_, LINATTN_ISA) = {
    LINATTN_STRING(LINATTN_ISA),
    {LINATTN_ISA::additive_forward<float>, LINATTN_ISA::additive_forward<double>},
    {LINATTN_ISA::additive_backward<float>, LINATTN_ISA::additive_backward<double>},
    {LINATTN_ISA::noncausal_forward<float>, LINATTN_ISA::noncausal_forward<double>},
    {LINATTN_ISA::noncausal_backward<float>, LINATTN_ISA::noncausal_backward<double>},
    {LINATTN_ISA::delta_forward<float>, LINATTN_ISA::delta_forward<double>},
    {LINATTN_ISA::delta_backward<float>, LINATTN_ISA::delta_backward<double>},
    {LINATTN_ISA::convolution_forward<float>, LINATTN_ISA::convolution_forward<double>},
    {LINATTN_ISA::convolution_backward<float>, LINATTN_ISA::convolution_backward<double>},
    {LINATTN_ISA::selective_scan_forward<float>, LINATTN_ISA::selective_scan_forward<double>},
    {LINATTN_ISA::selective_scan_backward<float>, LINATTN_ISA::selective_scan_backward<double>},
    {LINATTN_ISA::selective_scan_step<float>, LINATTN_ISA::selective_scan_step<double>},
    {LINATTN_ISA::kScanTile<float>, LINATTN_ISA::kScanTile<double>},
    {LINATTN_ISA::decode<float>, LINATTN_ISA::decode<double>},
};

}  // namespace linattn
