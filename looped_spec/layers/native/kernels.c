/* Small pieces of a layer in fp32, for a few rows at a time.
 *
 * For a row or two a call of PyTorch costs more than its numbers. Each function here does in one
 * call what takes PyTorch three to ten. Every row is computed by one thread and in an order that
 * does not depend on the other rows, so its bits do not depend on the batch.
 *
 * Strides are in numbers, and the last axis is always contiguous.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* exp by powers of two and a polynomial (Cephes, expf), written so that compilers vectorise it;
 * within 2 units in the last place between -87 and 88, clamped outside, NaN stays NaN. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale = { ((int32_t)n + 127) << 23 };
    return p * scale.value;
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t n)
{
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* out = x / sqrt(mean(x^2) + eps) * weight, for rows of n. */
void rms_norm(float *restrict out, const float *restrict x, const float *restrict weight,
              int64_t rows, int64_t n, double eps)
{
    for (int64_t row = 0; row < rows; row++, x += n, out += n) {
        const float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + (float)eps);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = x[i] * scale * weight[i];
    }
}

/* out = residual + rms_norm(x). */
void add_rms_norm(float *restrict out, const float *restrict residual, const float *restrict x,
                  const float *restrict weight, int64_t rows, int64_t n, double eps)
{
    for (int64_t row = 0; row < rows; row++, x += n, out += n, residual += n) {
        const float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + (float)eps);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = residual[i] + x[i] * scale * weight[i];
    }
}

/* out = silu(gate) * up, for rows of n gates and n ups behind them. */
void silu_mul(float *restrict out, const float *restrict gate_up, int64_t rows, int64_t n)
{
    for (int64_t row = 0; row < rows; row++, out += n, gate_up += 2 * n) {
        const float *gate = gate_up, *up = gate_up + n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
    }
}

/* Rotate the first `heads` heads of each row in place; channel i goes with i + head_dim / 2. */
void rotate(float *x, const float *cos, const float *sin, int64_t batch, int64_t length,
            int64_t heads, int64_t head_dim, int64_t row_stride, int64_t angle_request,
            int64_t angle_row)
{
    const int64_t half = head_dim / 2;
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < length; t++, x += row_stride) {
            const float *c = cos + b * angle_request + t * angle_row;
            const float *s = sin + b * angle_request + t * angle_row;
            for (int64_t head = 0; head < heads; head++) {
                float *restrict low = x + head * head_dim, *restrict high = low + half;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float a = low[i], d = high[i];
                    low[i] = a * c[i] - d * s[i];
                    high[i] = d * c[half + i] + a * s[half + i];
                }
            }
        }
}

/* Copy rows of `size` keys and values to the slots of their pages. */
void write_pages(float *k_pages, float *v_pages, const float *k, const float *v,
                 const int64_t *slots, int64_t batch, int64_t length, int64_t size,
                 int64_t k_request, int64_t k_row, int64_t v_request, int64_t v_row,
                 int64_t slot_request, int64_t slot_row)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < length; t++) {
            const int64_t slot = slots[b * slot_request + t * slot_row];
            memcpy(k_pages + slot * size, k + b * k_request + t * k_row, size * sizeof(float));
            memcpy(v_pages + slot * size, v + b * v_request + t * v_row, size * sizeof(float));
        }
}

/* Ask for what one head has in a block: blocks lie anywhere, and between the rows of a head lie
 * those of the others, so no processor does it by itself. */
static inline void fetch_block(const float *head, int64_t tokens, int64_t slot_size,
                               int64_t head_dim)
{
    for (int64_t i = 0; i < tokens; i++, head += slot_size)
        for (int64_t d = 0; d < head_dim; d += 16)
            __builtin_prefetch(head + d, 0, 2);
}

/* One query head over the keys 0..count-1 of its request. */
static void attend_head(float *restrict out, const float *restrict q, const float *k_pages,
                        const float *v_pages, const int64_t *table, int64_t count,
                        int64_t block_size, int64_t slot_size, int64_t head_dim, float scale,
                        float *restrict weights)
{
    const int64_t page = block_size * slot_size;
    float most = -INFINITY;
    for (int64_t start = 0, block = 0; start < count; start += block_size, block++) {
        const float *key = k_pages + table[block] * page;
        const int64_t next = start + block_size, end = next < count ? next : count;
        if (next < count)
            fetch_block(k_pages + table[block + 1] * page,
                        count - next < block_size ? count - next : block_size, slot_size, head_dim);
        else
            fetch_block(v_pages + table[0] * page, count < block_size ? count : block_size,
                        slot_size, head_dim);
        for (int64_t i = start; i < end; i++, key += slot_size) {
            weights[i] = dot(q, key, head_dim) * scale;
            most = weights[i] > most ? weights[i] : most;
        }
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        weights[i] = exponential(weights[i] - most);
        sum += weights[i];
    }
    for (int64_t d = 0; d < head_dim; d++)
        out[d] = 0.0f;
    for (int64_t start = 0, block = 0; start < count; start += block_size, block++) {
        const float *value = v_pages + table[block] * page;
        const int64_t next = start + block_size, end = next < count ? next : count;
        if (next < count)
            fetch_block(v_pages + table[block + 1] * page,
                        count - next < block_size ? count - next : block_size, slot_size, head_dim);
        for (int64_t i = start; i < end; i++, value += slot_size) {
            const float weight = weights[i];
#pragma omp simd
            for (int64_t d = 0; d < head_dim; d++)
                out[d] += weight * value[d];
        }
    }
    const float inverse = 1.0f / sum;
    for (int64_t d = 0; d < head_dim; d++)
        out[d] *= inverse;
}

/* So many products of attention are worth a second thread. */
#define PARALLEL (1 << 18)

/* Rows of requests over the pages of their own request; row t of a request stands t behind its
 * first position. out is [batch, length, heads, head_dim]. Positions behind the table's last block
 * see that whole. Up to so many threads take part. Returns 1 if there was no memory for the
 * weights. */
int attend(float *out, const float *q, const float *k_pages, const float *v_pages,
           const int64_t *tables, const int64_t *positions, int64_t batch, int64_t length,
           int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t width,
           int64_t q_request, int64_t q_row, int64_t table_stride, int64_t position_stride,
           double scale, int threads)
{
    const int64_t keys = width * block_size, tasks = batch * length * heads;
    int failed = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) if (threads > 1 && tasks * head_dim * keys > PARALLEL)
    {
        float *weights = malloc((size_t)(keys > 0 ? keys : 1) * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t head = task % heads, t = task / heads % length;
            const int64_t b = task / heads / length;
            const int64_t kv_head = head / (heads / kv_heads);
            int64_t count = positions[b * position_stride] + t + 1;
            count = count < keys ? count : keys;
            if (weights == NULL) {
                failed = 1;
                continue;
            }
            attend_head(out + task * head_dim, q + b * q_request + t * q_row + head * head_dim,
                        k_pages + kv_head * head_dim, v_pages + kv_head * head_dim,
                        tables + b * table_stride, count, block_size, kv_heads * head_dim,
                        head_dim, (float)scale, weights);
        }
        free(weights);
    }
    return failed;
}
