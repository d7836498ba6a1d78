// Functions of one number, for vectors: sigmoid, softplus and powers of 2.
#pragma once
#include "tile.h"

namespace linattn {
namespace LINATTN_ISA {

// 1 / (1 + exp(-x)) without overflow.
template <class T>
LINATTN_INLINE Vec<T> sigmoid(Vec<T> x) {
  const Vec<T> one = broadcast(T(1)), e = exp_negative(x < T(0) ? x : -x);
  return (x < T(0) ? e : one) / (one + e);
}

// log(1 + exp(x)) = max(x, 0) + log(1 + e), e = exp(-|x|): with s = e / (2 + e) <= 1/3 the second is
// 2 atanh(s), whose series has no cancellation where the result is small; to s^15 it leaves 2e-9.
LINATTN_INLINE Vec<float> softplus(Vec<float> x) {
  const Vec<float> e = exp_negative(x < 0.0f ? x : -x), s = e / (2.0f + e), s2 = s * s;
  Vec<float> y = s2 * (1.0f / 15) + 1.0f / 13;
  y = y * s2 + 1.0f / 11;
  y = y * s2 + 1.0f / 9;
  y = y * s2 + 1.0f / 7;
  y = y * s2 + 1.0f / 5;
  y = y * s2 + 1.0f / 3;
  y = y * s2 + 1.0f;
  return (x < 0.0f ? Vec<float>{} : x) + 2.0f * s * y;
}
LINATTN_INLINE Vec<double> softplus(Vec<double> x) {
  Vec<double> y;
  for (int i = 0; i < kLanes<double>; ++i) y[i] = (x[i] < 0 ? 0 : x[i]) + log1p(exp(-fabs(x[i])));
  return y;
}

// 2^x to 2 units in the last place; 0 below the smallest normal number, inf from 2^127.5 on. Less
// work than exp, for an argument that has been multiplied by log2(e) once and for all.
LINATTN_INLINE Vec<float> exp2_of(Vec<float> x) {
  typedef Vector<float>::integer Integer;
  // Adding 1.5 * 2^23 rounds to a whole number n; 127 more, and n + 127 are the last bits.
  const Vec<float> magic = broadcast(12582912.0f + 127.0f), most = broadcast(128.0f);
  const Vec<float> capped = x > most ? most : x;  // NaN stays
  const Vec<float> rounded = capped + magic, r = capped - (rounded - magic);
  Vec<float> y = r * 1.3264727253e-3f + 9.6715127859e-3f;  // off by 1e-7 at most
  y = y * r + 5.5507337445e-2f;
  y = y * r + 2.4022242083e-1f;
  y = y * r + 6.9314697760e-1f;
  y = y * r + 1.0f;
  const Integer scale = reinterpret_cast<const Integer&>(rounded) << 23;
  return x < -126.0f ? Vec<float>{} : y * reinterpret_cast<const Vec<float>&>(scale);
}
LINATTN_INLINE Vec<double> exp2_of(Vec<double> x) {
  Vec<double> y;
  for (int i = 0; i < kLanes<double>; ++i) y[i] = exp2(x[i]);
  return y;
}

}  // namespace LINATTN_ISA
}  // namespace linattn
