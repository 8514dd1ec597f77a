// What Python calls: plain C functions over addresses. `library.py` has the other side of each struct and signature.
#include "layer.h"
#include "pack.h"
#include "sampling.h"

#include "team.cpp"

using namespace octavo;

extern "C" {

// Of the structs above; raised whenever one of them or a signature changes, so that a stale library is not used.
int32_t octavo_abi() { return 4; }
int32_t octavo_lanes() { return LANES; }

Engine* octavo_create(int32_t threads, int32_t spins) { return new Engine(threads, spins); }
void octavo_destroy(Engine* e) { delete e; }

// Bytes of a packed matrix and of its scales.
int64_t octavo_data_bytes(const Weight* w) {
    const int64_t columns = int64_t(w->panels()) * PANEL;
    switch (w->format) {
        case F32: return columns * w->k * 4;
        case F16: return columns * w->k * 2;
        case BF16: return columns * w->blocks(2) * 4;
        case INT8: return columns * w->blocks(4) * 4;
        default: return columns * w->blocks(8) * 4;
    }
}
int64_t octavo_scale_bytes(const Weight* w) {
    const int64_t groups = int64_t(w->panels()) * PANEL * w->groups() * 2;
    return w->format == INT8 ? groups : w->format == UINT4 ? 2 * groups : 0;
}

// Bits to which activations are rounded in products with a matrix: 32, 16 (bfloat16) or 8 (groups with a scale each).
int32_t octavo_activation_bits(const Weight* w) { return !has_dots(*w) ? 32 : w->format == BF16 ? 16 : 8; }

void octavo_pack(Engine* e, const Weight* w, int64_t first, int32_t alternate, int64_t rows, const void* source,
                 int32_t kind) {
    for_rows(e->team, int(rows), PANEL, [&](int low, int high) {
        for (int i = low; i < high; ++i) pack_row(*w, placed(i, first, alternate), source, kind, int64_t(i) * w->k);
    });
}

// Numbers int8 [rows, k] and float16 [rows, groups] each of scales and (or null) least values.
void octavo_pack_numbers(Engine* e, const Weight* w, int64_t first, int32_t alternate, int64_t rows, const int8_t* numbers,
                         const uint16_t* scales, const uint16_t* least) {
    const int64_t groups = w->groups();
    for_rows(e->team, int(rows), PANEL, [&](int low, int high) {
        for (int64_t i = low; i < high; ++i)
            pack_numbers(*w, placed(i, first, alternate), numbers + i * w->k, scales + i * groups,
                         least ? least + i * groups : nullptr);
    });
}

// Rows of a packed matrix as float32 [count, k].
void octavo_rows(Engine* e, const Weight* w, const int32_t* ids, int32_t count, float* out) {
    for_rows(e->team, count, 4, [&](int low, int high) {
        for (int i = low; i < high; ++i) unpack_row(*w, ids[i], out + int64_t(i) * w->k);
    });
}

void octavo_norm(Engine* e, const float* x, const float* weight, int32_t rows, int32_t n, float eps, float* out) {
    norm_rows(e->team, x, weight, rows, n, eps, out);
}

void octavo_linear(Engine* e, const Weight* w, const float* a, int32_t rows, float* out) {
    linear(*e, *w, a, rows, out, w->n, nullptr);
}

// Once a step: how the attention of all layers with this window is cut.
void octavo_plan(Engine* e, const Model* m, const Step* step, int32_t block_size, int32_t window) {
    plan_attention(*e, *m, *step, block_size, window);
}

void octavo_write_cache(Engine* e, const Cache* cache, const int32_t* slots, int32_t tokens, const float* k, const float* v) {
    const int64_t width = int64_t(cache->kv_heads) * cache->head_dim;
    for_rows(e->team, tokens, 4, [&](int low, int high) {
        for (int t = low; t < high; ++t)
            with_kv(cache->format, [&](auto* kind) {
                write_token<std::remove_pointer_t<decltype(kind)>>(*cache, slots[t], k + t * width, v + t * width);
            });
    });
}

void octavo_attention(Engine* e, const Model* m, const Step* step, const Cache* cache, int32_t window, const float* q,
                      float* out) {
    attention(*e, *m, *step, *cache, q, int64_t(m->heads) * m->head_dim, window, out);
}

void octavo_attention_block(Engine* e, const Model* m, const Layer* layer, const Step* step, const Cache* cache,
                            int32_t window, const float* x, float* out) {
    attention_block(*e, *m, *layer, *step, *cache, window, x, out);
}

void octavo_mlp_block(Engine* e, const Model* m, const Layer* layer, int32_t rows, const float* x, float* out) {
    mlp_block(*e, *m, *layer, rows, x, out);
}

void octavo_decoder(Engine* e, const Model* m, const Layer* layers, const Cache* caches, const int32_t* windows,
                    int32_t count, const Step* step, float* x) {
    decoder(*e, *m, layers, caches, windows, count, *step, x);
}

// Logits [rows, stride], of which the first n are tokens → tokens [rows].
void octavo_draw(Engine* e, const Sampling* s, const float* logits, int64_t stride, int32_t rows, int32_t n, int32_t* tokens) {
    e->team.run(rows, [&](int r) { tokens[r] = draw(*s, r, logits + r * stride, n); });
}

// Standard Gumbel noise of rows [rows, n].
void octavo_gumbel(Engine* e, const int32_t* seed, const int32_t* position, int32_t rows, int32_t n, float* out) {
    e->team.run(rows, [&](int r) {
        const Noise noise(seed + 2 * r, position[r]);
        for (int i = 0; i < n; i += LANES) {
            const Vec g = noise.get(uint32_t(i));
            std::memcpy(out + int64_t(r) * n + i, &g, sizeof(float) * std::min(LANES, n - i));
        }
    });
}

}  // extern "C"
