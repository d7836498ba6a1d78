// The choice of an instruction set: once, by the processor and LINATTN_CPU_ISA.
#include "instruction_sets.h"

#include <stdlib.h>
#include <string.h>

#include "isas.h"

namespace linattn {

#define LINATTN_DECLARE(isa) extern const Kernels kernels_##isa;
LINATTN_FOR_EACH_ISA(LINATTN_DECLARE)

namespace {

#if defined(__x86_64__)
bool runs_generic() { return true; }
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool runs_avx512_bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool runs_generic() { return true; }
#endif

}  // namespace

// The widest set that this processor has and LINATTN_CPU_ISA, if set, allows. Listed narrowest
// first; read once.
const Kernels& kernels() {
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* cap = getenv("LINATTN_CPU_ISA");
    const Kernels* best = nullptr;
    bool capped = false;
#define LINATTN_CONSIDER(isa)                                     \
  if (!capped && runs_##isa()) best = &kernels_##isa;             \
  if (cap && strcmp(cap, #isa) == 0) capped = true;
    LINATTN_FOR_EACH_ISA(LINATTN_CONSIDER)
    return *best;
  }();
  return chosen;
}

int64_t instruction_set() {
  int64_t i = 0, found = 0;
#define LINATTN_COUNT(isa)                       \
  if (&kernels() == &kernels_##isa) found = i; \
  ++i;
  LINATTN_FOR_EACH_ISA(LINATTN_COUNT)
  return found;
}

}  // namespace linattn
