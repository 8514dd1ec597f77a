// How a weight matrix [N, K] is packed: panels of PANEL columns of the product, that is rows of the matrix. In a panel
// the weights that meet the same activation lie side by side, so a product reads its weights once and in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

#define PANEL (2 * LANES)

namespace octavo {

// A packed matrix. The struct is shared with Python.
struct Weight {
    int32_t format;
    int32_t n, k;
    int32_t group;        // weights in a row that share a scale (and a least value, in UINT4); k: one for the row
    const void* data;     // panel by panel
    const uint16_t* scales;  // float16, panel by panel, group by group: PANEL scales, then in UINT4 PANEL least values
    const float* bias;    // [n] or null

    int panels() const { return (n + PANEL - 1) / PANEL; }
    int groups() const { return (k + group - 1) / group; }
    int blocks(int block) const { return (k + block - 1) / block; }
};

// Where number i of a word of eight begins.
constexpr int uint4_shift(int i) { return 8 * (i % 4) + 4 * (i / 4); }

constexpr int AHEAD = 4096;     // bytes
constexpr int AHEAD_ROWS = 4;  // from so many rows on

inline void prefetch(const void* p) {
    for (int line = 0; line < PANEL * 4; line += 64) __builtin_prefetch(static_cast<const char*>(p) + AHEAD + line);
}

// Each reader walks over one panel. `group` is called before the first k of a group, `load` before each BLOCK of k,
// `get` gives the weights of k + i. Buffers hold whole BLOCKs; what of the last one is beyond K is not asked for.
//
// `ahead` asks for weights that are wanted soon. One row waits for memory alone, and the processor's own prefetching keeps
// up; several rows compute in between, and it does not.
//
// In the formats of less than 32 bits, but for float16, the weights of a BLOCK of one column are one 32-bit word, the
// first in its lowest bits (see ReadUint4 for 4 bits): the form in which instructions for dot products want them
// (`dots.h`).

struct ReadF32 {
    static constexpr int BLOCK = 1;
    const float* at;
    const float* here = nullptr;

    ReadF32(const Weight& w, int panel) : at(static_cast<const float*>(w.data) + int64_t(panel) * w.k * PANEL) {}
    explicit ReadF32(const float* buffer) : at(buffer) {}
    void group(int) {}
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void ahead() const { prefetch(here); }
    void get(int, Vec& a, Vec& b) const {
        a = octavo::load(here);
        b = octavo::load(here + LANES);
    }
};

struct ReadF16 {
    static constexpr int BLOCK = 1;
    const uint16_t* at;
    const uint16_t* here = nullptr;

    ReadF16(const Weight& w, int panel) : at(static_cast<const uint16_t*>(w.data) + int64_t(panel) * w.k * PANEL) {}
    void group(int) {}
    void load(int k) { here = at + int64_t(k) * PANEL; }
    void ahead() const { prefetch(here); }
    void get(int, Vec& a, Vec& b) const {
        a = load_half(here);
        b = load_half(here + LANES);
    }
};

// The words of a panel: PANEL of them for each BLOCK of k.
template <int B>
struct ReadWords {
    static constexpr int BLOCK = B;
    const uint32_t* at;
    const uint32_t* here = nullptr;
    VecU word_a{}, word_b{};

    ReadWords(const Weight& w, int panel)
        : at(static_cast<const uint32_t*>(w.data) + int64_t(panel) * w.blocks(BLOCK) * PANEL) {}
    void load(int k) {
        here = at + int64_t(k / BLOCK) * PANEL;
        word_a = load_as<uint32_t, VecU>(here);
        word_b = load_as<uint32_t, VecU>(here + LANES);
    }
    void ahead() const { prefetch(here); }
};

struct ReadBF16 : ReadWords<2> {
    using ReadWords::ReadWords;
    void group(int) {}
    void get(int i, Vec& a, Vec& b) const {
        a = i == 0 ? (Vec)(word_a << 16) : (Vec)(word_a & 0xffff0000u);
        b = i == 0 ? (Vec)(word_b << 16) : (Vec)(word_b & 0xffff0000u);
    }
};

// Scales of the columns of a panel, for one group after the other.
struct Scales {
    const uint16_t* at;
    Vec a{}, b{};

    Scales(const Weight& w, int panel) : at(w.scales + int64_t(panel) * w.groups() * PANEL) {}
    void group(int g) {
        a = load_half(at + int64_t(g) * PANEL);
        b = load_half(at + int64_t(g) * PANEL + LANES);
    }
};

struct ScalesAndLeast {
    const uint16_t* at;
    Vec a{}, b{}, least_a{}, least_b{};

    ScalesAndLeast(const Weight& w, int panel) : at(w.scales + int64_t(panel) * w.groups() * 2 * PANEL) {}
    void group(int g) {
        const uint16_t* s = at + int64_t(g) * 2 * PANEL;
        a = load_half(s);
        b = load_half(s + LANES);
        least_a = load_half(s + PANEL);
        least_b = load_half(s + PANEL + LANES);
    }
};

struct ReadInt8 : ReadWords<4> {
    Scales scale;

    ReadInt8(const Weight& w, int panel) : ReadWords(w, panel), scale(w, panel) {}
    void group(int g) { scale.group(g); }
    void get(int i, Vec& a, Vec& b) const {
        a = number(word_a, i) * scale.a;
        b = number(word_b, i) * scale.b;
    }

private:
    static Vec number(VecU word, int i) { return __builtin_convertvector((VecI)(word << (24 - 8 * i)) >> 24, Vec); }
};

// Of a word's eight numbers the first four are the low halves of its bytes, the others the high halves.
struct ReadUint4 : ReadWords<8> {
    ScalesAndLeast scale;

    ReadUint4(const Weight& w, int panel) : ReadWords(w, panel), scale(w, panel) {}
    void group(int g) { scale.group(g); }
    void get(int i, Vec& a, Vec& b) const {
        a = number(word_a >> uint4_shift(i)) * scale.a + scale.least_a;
        b = number(word_b >> uint4_shift(i)) * scale.b + scale.least_b;
    }

private:
    static Vec number(VecU bits) {
#if LANES == 16
        // A permutation looks at the lowest four bits of each lane only, so nothing has to be masked or converted.
        const Vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return __builtin_shuffle(numbers, (VecI)bits);
#else
        return __builtin_convertvector((VecI)(bits & 15), Vec);
#endif
    }
};

// Calls f with the type of the weight's reader, as f.template operator()<Reader>().
template <class F>
inline void with_reader(const Weight& w, F&& f) {
    switch (w.format) {
        case F32: return f.template operator()<ReadF32>();
        case BF16: return f.template operator()<ReadBF16>();
        case F16: return f.template operator()<ReadF16>();
        case INT8: return f.template operator()<ReadInt8>();
        case UINT4: return f.template operator()<ReadUint4>();
    }
}

}  // namespace octavo
