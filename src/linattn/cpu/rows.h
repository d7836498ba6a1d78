// Rows of tokens between tensors of any dtype and layout and the matrices of the kernels.
#pragma once
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "problem.h"
#include "product.h"

namespace linattn {
namespace LINATTN_ISA {

// Some tokens of one run and head.
struct Span {
  int64_t b = 0, start = 0;  // row of the batch, first token
  int n = 0;                 // tokens
};

inline size_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

LINATTN_INLINE float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
LINATTN_INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return x != x ? 0x7fc0 : uint16_t(rounded >> 16);
}
#if defined(__AVX512BF16__)
// False: a number is subnormal, for which the instruction gives 0, and nothing is written.
LINATTN_INLINE bool round_to_bfloat16(uint16_t* to, Vec<float> x) {
  constexpr int kSubnormal = 0x20;
  const __m512 all = reinterpret_cast<const __m512&>(x);
  if (__builtin_expect(_mm512_fpclass_ps_mask(all, kSubnormal) != 0, 0)) return false;
  const __m256bh y = _mm512_cvtneps_pbh(all);
  memcpy(to, &y, sizeof y);
  return true;
}
#endif
LINATTN_INLINE float from_float16(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  _Float16 h;
  memcpy(&h, &x, 2);
  return float(h);
#endif
}
LINATTN_INLINE uint16_t to_float16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  const _Float16 h = _Float16(x);
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
#endif
}

// n numbers from memory, `stride` apart, to contiguous out, times scale.
template <class T>
inline void load_row(T* out, const char* in, Dtype dtype, int64_t stride, int n, T scale) {
  switch (dtype) {
    case Dtype::kFloat64: {
      const double* x = reinterpret_cast<const double*>(in);
      for (int i = 0; i < n; ++i) out[i] = T(x[i * stride]) * scale;
      break;
    }
    case Dtype::kFloat32: {
      const float* x = reinterpret_cast<const float*>(in);
      if (stride == 1) {
        for (int i = 0; i < n; ++i) out[i] = T(x[i]) * scale;
      } else {
        for (int i = 0; i < n; ++i) out[i] = T(x[i * stride]) * scale;
      }
      break;
    }
    case Dtype::kBFloat16: {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(in);
      if (stride == 1) {
        for (int i = 0; i < n; ++i) out[i] = T(from_bfloat16(x[i])) * scale;
      } else {
        for (int i = 0; i < n; ++i) out[i] = T(from_bfloat16(x[i * stride])) * scale;
      }
      break;
    }
    case Dtype::kFloat16: {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(in);
      int i = 0;
#if defined(__AVX512F__)
      if constexpr (sizeof(T) == 4) {
        for (; stride == 1 && i + 16 <= n; i += 16) {
          const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
          _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(scale)));
        }
      }
#endif
      for (; i < n; ++i) out[i] = T(from_float16(x[i * stride])) * scale;
      break;
    }
  }
}

// n contiguous numbers times scale to memory, or added to what is there.
template <class T>
inline void store_row(
    char* out, const T* in, Dtype dtype, int64_t stride, int n, T scale, bool add) {
  switch (dtype) {
    case Dtype::kFloat64: {
      double* y = reinterpret_cast<double*>(out);
      for (int i = 0; i < n; ++i) y[i * stride] = in[i] * scale + (add ? y[i * stride] : 0);
      break;
    }
    case Dtype::kFloat32: {
      float* y = reinterpret_cast<float*>(out);
      if (add) {
        for (int i = 0; i < n; ++i) y[i * stride] += float(in[i] * scale);
      } else if (stride == 1) {
        for (int i = 0; i < n; ++i) y[i] = float(in[i] * scale);
      } else {
        for (int i = 0; i < n; ++i) y[i * stride] = float(in[i] * scale);
      }
      break;
    }
    case Dtype::kBFloat16: {  // sums over heads are gathered in 32 bits: never added to
      uint16_t* y = reinterpret_cast<uint16_t*>(out);
      if (stride == 1) {
        int i = 0;
#if defined(__AVX512BF16__)
        if constexpr (sizeof(T) == 4) {
          for (; i + 16 <= n; i += 16) {
            if (round_to_bfloat16(y + i, read(in + i) * scale)) continue;
            for (int j = i; j < i + 16; ++j) y[j] = to_bfloat16(float(in[j] * scale));
          }
        }
#endif
        for (; i < n; ++i) y[i] = to_bfloat16(float(in[i] * scale));
      } else {
        for (int i = 0; i < n; ++i) y[i * stride] = to_bfloat16(float(in[i] * scale));
      }
      break;
    }
    case Dtype::kFloat16: {
      uint16_t* y = reinterpret_cast<uint16_t*>(out);
      int i = 0;
#if defined(__AVX512F__)
      if constexpr (sizeof(T) == 4) {
        for (; stride == 1 && i + 16 <= n; i += 16) {
          const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(in + i), _mm512_set1_ps(scale));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), _mm512_cvtps_ph(x, 0));
        }
      }
#endif
      for (; i < n; ++i) y[i * stride] = to_float16(float(in[i] * scale));
      break;
    }
  }
}

LINATTN_INLINE char* address(const View& x, int64_t b, int64_t t, int64_t h) {
  return x.data + (b * x.batch + t * x.token + h * x.head) * int64_t(bytes_of(x.dtype));
}
LINATTN_INLINE int64_t group(const View& x, int64_t h, int64_t H) { return h / (H / x.heads); }

LINATTN_INLINE bool is_there(const View& mask, int64_t b, int64_t t) {
  return !mask.data || mask.data[b * mask.batch + t * mask.token] != 0;
}
LINATTN_INLINE bool is_there(const Problem& p, int64_t b, int64_t t) {
  return is_there(p.mask, b, t);
}

template <class T>
constexpr Dtype kDtype = sizeof(T) == 8 ? Dtype::kFloat64 : Dtype::kFloat32;

// The common case of the two below: the dtype of the sums, channels in a row, every token there.
template <class T>
LINATTN_INLINE bool is_plain(const Problem& p, const View& x) {
  return x.dtype == kDtype<T> && x.channel == 1 && !p.mask.data;
}
template <class T>
inline void load_plain(const Matrix<T>& out, const T* in, int64_t stride, int n, int D, T scale) {
  constexpr int L = kLanes<T>;
  const int whole = D / L * L;
  for (int r = 0; r < n; ++r, in += stride) {
    for (int j = 0; j < whole; j += L) store(out.at(r, j), read(in + j) * scale);
    if (whole == out.cols) continue;
    Vec<T> rest = {};
    for (int j = whole; j < D; ++j) rest[j - whole] = in[j] * scale;
    for (int j = whole; j < out.cols; j += L, rest = Vec<T>{}) store(out.at(r, j), rest);
  }
  for (int r = n; r < out.rows; ++r) {
    for (int j = 0; j < out.cols; j += L) store(out.at(r, j), Vec<T>{});
  }
}
template <class T>
inline void store_plain(T* out, int64_t stride, const Matrix<T>& in, int n, int D, T scale, bool add) {
  constexpr int L = kLanes<T>;
  for (int r = 0; r < n; ++r, out += stride) {
    int j = 0;
    for (; j + L <= D; j += L) {
      const Vec<T> x = load(in.at(r, j)) * scale;
      write(out + j, add ? read(out + j) + x : x);
    }
    for (; j < D; ++j) out[j] = *in.at(r, j) * scale + (add ? out[j] : T(0));
  }
}

// Tokens of x, head h of H, as rows of out; rows of absent tokens and columns past D are 0.
template <class T>
inline void load_rows(
    const Matrix<T>& out, const Problem& p, const View& x, const Span& s, int64_t h, int D,
    T scale) {
  const int64_t g = group(x, h, p.H);
  const size_t size = bytes_of(x.dtype);
  if (is_plain<T>(p, x)) {
    const T* in = reinterpret_cast<const T*>(address(x, s.b, s.start, g));
    return load_plain(out, in, x.token, s.n, D, scale);
  }
  for (int r = 0; r < out.rows; ++r) {
    const bool there = r < s.n && is_there(p, s.b, s.start + r);
    const char* in = there ? address(x, s.b, s.start + r, g) : nullptr;
    for (int j = 0; j < out.cols; j += out.pitch) {
      const int width = out.cols - j < out.pitch ? out.cols - j : out.pitch;
      const int n = !there ? 0 : D - j < width ? D - j : width;
      T* to = out.at(r, j);
      if (n > 0) load_row(to, in + j * x.channel * int64_t(size), x.dtype, x.channel, n, scale);
      for (int i = n > 0 ? n : 0; i < width; ++i) to[i] = 0;
    }
  }
}

// The other way; absent tokens become 0. `add`: to what another head of the group has left.
template <class T>
inline void store_rows(
    const View& x, const Problem& p, const Matrix<T>& in, const Span& s, int64_t h, int D, T scale,
    bool add) {
  const int64_t g = group(x, h, p.H);
  const size_t size = bytes_of(x.dtype);
  if (is_plain<T>(p, x)) {
    T* out = reinterpret_cast<T*>(address(x, s.b, s.start, g));
    return store_plain(out, x.token, in, s.n, D, scale, add);
  }
  for (int r = 0; r < s.n; ++r) {
    const bool there = is_there(p, s.b, s.start + r);
    if (!there && add) continue;
    char* out = address(x, s.b, s.start + r, g);
    for (int j = 0; j < D; j += in.pitch) {
      const int n = D - j < in.pitch ? D - j : in.pitch;
      T zeros[kPanel<T>];
      const T* from = in.at(r, j);
      if (!there) {
        memset(zeros, 0, sizeof zeros);
        from = zeros;
      }
      store_row(out + j * x.channel * int64_t(size), from, x.dtype, x.channel, n, scale, add);
    }
  }
}

// Tokens of x, head h of H, as rows that will be wanted.
inline void ask_rows(
    Ahead& ahead, const Problem& p, const View& x, const Span& s, int64_t h, int D) {
  if (!x.data || x.channel != 1) return;
  const int64_t size = bytes_of(x.dtype);
  ahead.add(address(x, s.b, s.start, group(x, h, p.H)), x.token * size, s.n, int(D * size));
}

// One number a token: gates and beta. Absent tokens give `otherwise`.
template <class T>
inline void load_numbers(
    T* out, const Problem& p, const View& x, const Span& s, int64_t h, int rows, T otherwise) {
  for (int r = 0; r < rows; ++r) {
    out[r] = otherwise;
    if (r < s.n && is_there(p, s.b, s.start + r))
      load_row(out + r, address(x, s.b, s.start + r, h), x.dtype, 1, 1, T(1));
  }
}
// 1 for each token that is there, else 0.
template <class T>
inline void load_presence(T* out, const Problem& p, const Span& s, int rows) {
  for (int r = 0; r < rows; ++r) out[r] = r < s.n && is_there(p, s.b, s.start + r) ? T(1) : T(0);
}
template <class T>
inline void store_numbers(const View& x, const Problem& p, const T* in, const Span& s, int64_t h) {
  for (int r = 0; r < s.n; ++r) {
    const T value = is_there(p, s.b, s.start + r) ? in[r] : T(0);
    store_row(address(x, s.b, s.start + r, h), &value, x.dtype, 1, 1, T(1), false);
  }
}

}  // namespace LINATTN_ISA
}  // namespace linattn
