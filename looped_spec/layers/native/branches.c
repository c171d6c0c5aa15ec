/* Branches of a layer, from the norm before to the sum behind, in one call: what each piece costs
 * beside its numbers is then paid once. The pieces are those of the other files, so are the bits.
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
