// Which instruction set runs.
#pragma once
#include "problem.h"

namespace linattn {

const Kernels& kernels();
int64_t instruction_set();  // 0 for the narrowest; for `linattn info` and tests

}  // namespace linattn
