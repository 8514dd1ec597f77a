// Vectors of the widest registers that the compiler was told of, through GCC's and Clang's vector extensions: one
// source for AVX-512, AVX2, NEON and plain SSE2. The library is compiled once for each and chosen when it is loaded.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ROWS_MOST 12  // rows of a micro-kernel: 24 of 32 registers are sums
#elif defined(__AVX2__)
#define LANES 8
#define ROWS_MOST 6  // 12 of 16
#elif defined(__aarch64__)
#define LANES 4
#define ROWS_MOST 12
#else
#define LANES 4
#define ROWS_MOST 6
#endif

namespace octavo {

#if defined(__F16C__)
typedef _Float16 HalfFloat;
#elif defined(__aarch64__)
typedef __fp16 HalfFloat;  // GCC 12 has no _Float16 here
#endif

// How numbers are kept; shared with Python. Activations, and all arithmetic, are float32.
enum Format : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, UINT4 = 4 };

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecI __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecU __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half __attribute__((vector_size(LANES * 2)));
typedef int16_t Short __attribute__((vector_size(LANES * 2)));
typedef int8_t Byte __attribute__((vector_size(LANES)));

template <class T, class V>
inline V load_as(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);  // an unaligned load
    return v;
}

inline Vec load(const float* p) { return load_as<float, Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec splat(float x) { return x - Vec{}; }

// bfloat16 is the upper half of a float32.
inline Vec widen_bf16(Half h) { return (Vec)(__builtin_convertvector(h, VecU) << 16); }
inline Vec load_bf16(const uint16_t* p) { return widen_bf16(load_as<uint16_t, Half>(p)); }

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

// Round to nearest even, NaN kept.
inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 64);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__) || defined(__aarch64__)
    HalfFloat h;
    std::memcpy(&h, &bits, 2);
    return float(h);
#else
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
    float x;
    if (rest >= 0x7c00) {  // infinity, NaN
        wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    // Shifted into place the exponent is 112 too small; the product mends that, for subnormal numbers too.
    wide = rest << 13;
    std::memcpy(&x, &wide, 4);
    x *= 0x1p112f;
    return sign ? -x : x;
#endif
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__) || defined(__aarch64__)
    HalfFloat h = (HalfFloat)x;
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: adding 0.5 leaves the wanted bits at the end, rounded by the processor
        float y;
        std::memcpy(&y, &rest, 4);
        y += 0.5f;
        std::memcpy(&rest, &y, 4);
        return uint16_t(sign | (rest - 0x3f000000));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return uint16_t(sign | (rest - 0x38000000) >> 13);
#endif
}

inline Vec load_half(const uint16_t* p) {
    // Asked to convert a vector of _Float16, GCC 12 converts number by number.
#if LANES == 16
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)load_as<uint16_t, Half>(p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)load_as<uint16_t, Half>(p));
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Vec v;
    for (int i = 0; i < LANES; ++i) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// Calls f.template operator()<R>(row) for the rows low to high - 1 in pieces of R, MOST at most.
template <int MOST = ROWS_MOST, class F>
inline void in_pieces(int low, int high, F&& f) {
    int row = low;
    for (; high - row >= MOST; row += MOST) f.template operator()<MOST>(row);
    if constexpr (MOST > 8)
        if (high - row >= 8) f.template operator()<8>(row), row += 8;
    if (high - row >= 4) f.template operator()<4>(row), row += 4;
    if (high - row == 3) f.template operator()<3>(row), row += 3;
    if (high - row == 2) f.template operator()<2>(row), row += 2;
    if (high - row == 1) f.template operator()<1>(row), row += 1;
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline float sum(Vec v) {
    float s = 0;
    for (int i = 0; i < LANES; ++i) s += v[i];
    return s;
}

inline float highest(Vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
    return m;
}

// e^x for x <= 88; below -87.3 the result is 0. Cody and Waite's reduction (Software Manual for the Elementary
// Functions, 1980), then a Taylor polynomial on |r| <= ln(2)/2, whose error is below 2e-8: about 1 unit in the last
// place.
inline Vec exp(Vec x) {
    const Vec low = splat(-87.3f);
    VecI keep = x >= low;
    x = max(min(x, splat(88.0f)), low);
    // Adding 1.5 × 2^23 rounds to an integer in the last bits.
    const float magic = 12582912.0f;
    Vec shifted = x * 1.44269504088896f + magic;
    Vec n = shifted - magic;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    VecI power = (__builtin_convertvector(n, VecI) + 127) << 23;
    return (Vec)((VecI)(p * (Vec)power) & keep);
}

}  // namespace octavo
