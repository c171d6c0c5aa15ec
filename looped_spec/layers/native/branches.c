/* Branches of a layer, from the norm before to the sum behind, and layers, each in one call: what a
 * piece costs beside its numbers is then paid once. The pieces are those of the other files, so are
 * the bits.
 */

#include <stdint.h>
#include <stdlib.h>

void rms_norm(float *out, const float *x, const float *weight, int64_t rows, int64_t n, double eps);
void add_rms_norm(float *out, const float *residual, const float *x, const float *weight,
                  int64_t rows, int64_t n, double eps);
void silu_mul(float *out, const float *gate_up, int64_t rows, int64_t n);
void rotate(float *x, const float *cos, const float *sin, int64_t batch, int64_t length,
            int64_t heads, int64_t head_dim, int64_t row_stride, int64_t angle_request,
            int64_t angle_row);
void write_pages(float *k_pages, float *v_pages, const float *k, const float *v,
                 const int64_t *slots, int64_t batch, int64_t length, int64_t size,
                 int64_t k_request, int64_t k_row, int64_t v_request, int64_t v_row,
                 int64_t slot_request, int64_t slot_row);
int attend(float *out, const float *q, const float *k_pages, const float *v_pages,
           const int64_t *tables, const int64_t *positions, int64_t batch, int64_t length,
           int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t width,
           int64_t q_request, int64_t q_row, int64_t table_stride, int64_t position_stride,
           double scale, int threads);
void linear(float *out, const float *x, const char *tiles, int64_t rows, int64_t inputs,
            int64_t outputs, int is_bf16, int threads);

/* out = residual + norm(linear(x)), or without the norm where `after` is NULL. Returns 1 if there
 * was no memory. */
int close_branch(float *out, const float *residual, const float *x, const char *tiles,
                 const float *after, int64_t rows, int64_t inputs, int64_t outputs, int is_bf16,
                 double eps, int threads)
{
    const int64_t count = rows * outputs;
    if (after == NULL) {
        linear(out, x, tiles, rows, inputs, outputs, is_bf16, threads);
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            out[i] = residual[i] + out[i];
        return 0;
    }
    float *sums = malloc((size_t)count * sizeof(float));
    if (sums == NULL)
        return 1;
    linear(sums, x, tiles, rows, inputs, outputs, is_bf16, threads);
    add_rms_norm(out, residual, sums, after, rows, outputs, eps);
    free(sums);
    return 0;
}

/* out = linear(norm(x)), of which the first `heads` heads are rotated. Returns 1 if there was no
 * memory. */
int open_attention(float *out, const float *x, const char *tiles, const float *before,
                   const float *cos, const float *sin, int64_t batch, int64_t length,
                   int64_t inputs, int64_t outputs, int64_t heads, int64_t head_dim,
                   int64_t angle_request, int64_t angle_row, int is_bf16, double eps, int threads)
{
    const int64_t rows = batch * length;
    float *normed = malloc((size_t)(rows * inputs) * sizeof(float));
    if (normed == NULL)
        return 1;
    rms_norm(normed, x, before, rows, inputs, eps);
    linear(out, normed, tiles, rows, inputs, outputs, is_bf16, threads);
    free(normed);
    rotate(out, cos, sin, batch, length, heads, head_dim, outputs, angle_request, angle_row);
    return 0;
}

/* out = x + after(down(silu(gate) * up)) with gate and up of before(x); `after` may be NULL.
 * Returns 1 if there was no memory. */
int gated_branch(float *out, const float *x, const char *gate_up, const char *down,
                 const float *before, const float *after, int64_t rows, int64_t size, int64_t inner,
                 int is_bf16_up, int is_bf16_down, double eps_before, double eps_after,
                 int threads)
{
    float *wide = malloc((size_t)(rows * 2 * inner) * sizeof(float));
    float *narrow = malloc((size_t)(rows * (size > inner ? size : inner)) * sizeof(float));
    int failed = wide == NULL || narrow == NULL;
    if (!failed) {
        rms_norm(narrow, x, before, rows, size, eps_before);
        linear(wide, narrow, gate_up, rows, size, 2 * inner, is_bf16_up, threads);
        silu_mul(narrow, wide, rows, inner);
        failed = close_branch(out, x, narrow, down, after, rows, inner, size, is_bf16_down,
                              eps_after, threads);
    }
    free(wide);
    free(narrow);
    return failed;
}

/* The weights of a layer; norms behind a branch may be NULL. */
struct layer {
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;
    const char *qkv, *o, *gate_up, *down;
    int64_t size, heads, kv_heads, head_dim, inner;
    int64_t qkv_is_bf16, o_is_bf16, gate_up_is_bf16, down_is_bf16;
    double eps_before_attention, eps_after_attention, eps_before_mlp, eps_after_mlp, scale;
};

/* Rows of requests, where they lie in the cache, and their angles. */
struct rows {
    const int64_t *slots, *tables, *positions;
    const float *cos, *sin;
    int64_t batch, length, block_size, width;
    int64_t slot_request, slot_row, table_stride, position_stride, angle_request, angle_row;
};

/* out = a whole layer of x, with keys and values in these pages. Returns 1 if there was no memory. */
int decoder_layer(float *out, const float *x, const struct layer *l, const struct rows *r,
                  float *k_pages, float *v_pages, int threads)
{
    const int64_t rows = r->batch * r->length, head_dim = l->head_dim;
    const int64_t q_size = l->heads * head_dim, kv_size = l->kv_heads * head_dim;
    const int64_t width = q_size + 2 * kv_size, request = r->length * width;
    float *qkv = malloc((size_t)(rows * width) * sizeof(float));
    float *attended = malloc((size_t)(rows * q_size) * sizeof(float));
    float *middle = malloc((size_t)(rows * l->size) * sizeof(float));
    int failed = qkv == NULL || attended == NULL || middle == NULL;
    if (!failed)
        failed = open_attention(qkv, x, l->qkv, l->before_attention, r->cos, r->sin, r->batch,
                                r->length, l->size, width, l->heads + l->kv_heads, head_dim,
                                r->angle_request, r->angle_row, (int)l->qkv_is_bf16,
                                l->eps_before_attention, threads);
    if (!failed) {
        const float *k = qkv + q_size, *v = k + kv_size;
        write_pages(k_pages, v_pages, k, v, r->slots, r->batch, r->length, kv_size, request, width,
                    request, width, r->slot_request, r->slot_row);
        failed = attend(attended, qkv, k_pages, v_pages, r->tables, r->positions, r->batch,
                        r->length, l->heads, l->kv_heads, head_dim, r->block_size, r->width,
                        request, width, r->table_stride, r->position_stride,
                        l->scale, threads);
    }
    if (!failed)
        failed = close_branch(middle, x, attended, l->o, l->after_attention, rows, q_size, l->size,
                              (int)l->o_is_bf16, l->eps_after_attention, threads);
    if (!failed)
        failed = gated_branch(out, middle, l->gate_up, l->down, l->before_mlp, l->after_mlp, rows,
                              l->size, l->inner, (int)l->gate_up_is_bf16, (int)l->down_is_bf16,
                              l->eps_before_mlp, l->eps_after_mlp, threads);
    free(qkv);
    free(attended);
    free(middle);
    return failed;
}
