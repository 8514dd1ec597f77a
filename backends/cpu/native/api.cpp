// What Python calls: plain C functions over addresses. `library.py` has the other side of each struct and signature.
#include "layer.h"
#include "pack.h"

#include "team.cpp"

using namespace octavo;

extern "C" {

// Of the structs above; raised whenever one of them or a signature changes, so that a stale library is not used.
int32_t octavo_abi() { return 1; }
int32_t octavo_lanes() { return LANES; }

Engine* octavo_create(int32_t threads, int32_t spins) { return new Engine(threads, spins); }
void octavo_destroy(Engine* e) { delete e; }

// Bytes of a packed matrix and of its scales.
int64_t octavo_data_bytes(const Weight* w) {
    const int64_t numbers = int64_t(w->panels()) * PANEL * w->k;
    switch (w->format) {
        case F32: return numbers * 4;
        case BF16:
        case F16: return numbers * 2;
        case INT8: return numbers;
        default: return numbers / 2;
    }
}
int64_t octavo_scale_bytes(const Weight* w) {
    const int64_t groups = int64_t(w->panels()) * PANEL * w->groups() * 2;
    return w->format == INT8 ? groups : w->format == UINT4 ? 2 * groups : 0;
}

void octavo_pack(Engine* e, const Weight* w, int64_t first, int32_t alternate, int64_t rows, const void* source,
                 int32_t kind) {
    for_rows(e->team, int(rows), PANEL, [&](int low, int high) {
        for (int i = low; i < high; ++i) pack_row(*w, placed(i, first, alternate), source, kind, int64_t(i) * w->k);
    });
}

// Rows of a packed matrix as float32 [count, k].
void octavo_rows(Engine* e, const Weight* w, const int32_t* ids, int32_t count, float* out) {
    for_rows(e->team, count, 4, [&](int low, int high) {
        for (int i = low; i < high; ++i) unpack_row(*w, ids[i], out + int64_t(i) * w->k);
    });
}

void octavo_linear(Engine* e, const Weight* w, const float* a, int32_t rows, float* out) {
    linear(e->team, *w, a, rows, out, nullptr);
}

// Once a step: how the attention of all layers with this window is cut.
void octavo_plan(Engine* e, const Model* m, const Step* step, int32_t block_size, int32_t window) {
    e->units = plan_units(*step, m->heads / m->kv_heads, block_size, m->kv_heads, e->team.threads(), window);
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

}  // extern "C"
