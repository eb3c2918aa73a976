/* One step of a model of Llama's shape, float32, on a CPU. `kernels.py` calls it.
 *
 * T rows are tokens: of requests that decode, one each, and of prompts. E hidden size, K inputs
 * and N outputs of a linear layer, D head dimension.
 *
 * Weights lie in panels of NR outputs, [N / NR][K][NR], the last one filled up with zeros; what
 * they are multiplied with lies in blocks of at most MR rows, [block][K][rows of the block]. So a
 * tile, a block times a panel, reads both from front to back, and number k of a row whose block
 * has m rows is m numbers behind number k - 1. A row's result does not depend on the other rows.
 */

#include <omp.h>
#include <stdint.h>
#include <string.h>

/* Numbers of a vector, and rows of a tile: 2 MR sums and 3 more are in use
 * at a time. */
#if defined(__AVX512F__)
constexpr int VL = 16, MR = 12, WIDTH = 4;
#elif defined(__AVX__)
constexpr int VL = 8, MR = 6, WIDTH = 2;
#else
constexpr int VL = 4, MR = 8, WIDTH = 4;
#endif
constexpr int NR = 2 * VL;
constexpr int MAX_QUERIES = 4; /* heads that read keys and values together */
constexpr int READ_AHEAD = 16; /* steps of k */

typedef int64_t index_t;
typedef float vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* What becomes of a product: y; base + y; silu(gate) * up, in rows; the same, in blocks. */
enum { STORE, ADD, GATE, GATE_TO_BLOCKS };

struct linear_t {
  const float *weights; /* panels; of gate and up, VL numbers of each in turn */
  const float *bias;    /* in the same order, N filled up as well; or NULL */
  index_t inputs, outputs;
};

struct layer_t {
  linear_t qkv, out, gate_up, down;
  const float *norm_in, *norm_mlp, *norm_q, *norm_k; /* the last two may be NULL */
};

struct model_t {
  index_t hidden, inner, heads, kv_heads, head_dim, num_layers;
  float scale, eps;
  const float *embed, *norm, *turns; /* turns: (cos, sin) [position][D / 2] */
  linear_t head;
  const layer_t *layers;
};

/* Keys and values, (2, num_rows, kv_heads, columns, D) for each layer. */
struct store_t {
  float *const *layers;
  index_t num_rows, columns;
};

/* A token: its keys and values go to [row, :, column] of its store, and it sees the `length`
 * columns that end there. */
struct row_t {
  index_t token_id, length, store, row, column;
};

struct step_t {
  index_t count, num_sampled, has_prompts;
  const row_t *rows;
  const store_t *stores;
  const index_t *sampled; /* rows whose logits are wanted */
};

/* Room for T rows; `wide` is the larger of inner and heads * D, `columns` of all stores'. */
struct scratch_t {
  float *x, *blocks; /* T * E */
  float *qkv;        /* T * (heads + 2 kv_heads) * D */
  float *wide;       /* T * wide */
  float *scores;     /* threads * MAX_QUERIES * (columns + VL) */
  index_t width, columns;
};

/* Threads that work on the same rows. */
struct team_t {
  int me, size;
};

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return vec{} + x; }
INLINE index_t part(index_t count, int which, int parts) { return count * which / parts; }
INLINE index_t num_blocks(index_t T) { return (T + MR - 1) / MR; }
INLINE index_t num_panels(const linear_t &w) { return (w.outputs + NR - 1) / NR; }

INLINE void meet(team_t team) {
  if (team.size > 1) {
#pragma omp barrier
  }
}

INLINE float sum(vec v) {
  typedef float quarter __attribute__((vector_size(16)));
  quarter parts[VL / 4], total;
  memcpy(parts, &v, sizeof v);
  total = parts[0];
  UNROLL for (int i = 1; i < VL / 4; i++) total += parts[i];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

INLINE float largest(vec v) {
  float result = v[0];
  UNROLL for (int i = 1; i < VL; i++) result = v[i] > result ? v[i] : result;
  return result;
}

/* e^x to 2 units in the last place; NaN stays. Source of the polynomial: Cephes, expf. */
INLINE vec exponential(vec x) {
  const vec high = all(88.0f), low = all(-87.3f), rounder = all(12582912.0f);
  x = x > high ? high : x;
  x = x < low ? low : x;
  vec n = (x * all(1.44269504f) + rounder) - rounder;
  x = x - n * all(0.693359375f) + n * all(2.12194440e-4f);
  vec y = all(1.9875691500e-4f);
  y = y * x + all(1.3981999507e-3f);
  y = y * x + all(8.3334519073e-3f);
  y = y * x + all(4.1665795894e-2f);
  y = y * x + all(1.6666665459e-1f);
  y = y * x + all(5.0000001201e-1f);
  y = y * x * x + x + all(1.0f);
  ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec scale;
  memcpy(&scale, &exponent, sizeof scale);
  return y * scale;
}

/* ---- Linear layers ---- */

/* m rows of a block times one panel; `ahead` is brought into the cache meanwhile. */
template <int m>
INLINE void multiply(index_t K, const float *a, const float *b, const float *ahead, vec c[MR][2]) {
  vec c0[m], c1[m];
  UNROLL for (int i = 0; i < m; i++) c0[i] = c1[i] = vec{};
  for (index_t k = 0; k < K; k++) {
    vec b0 = load(b), b1 = load(b + VL);
    __builtin_prefetch(ahead, 0, 2);
    UNROLL for (int i = 0; i < m; i++) {
      vec x = all(a[i]);
      c0[i] += x * b0;
      c1[i] += x * b1;
    }
    a += m, b += NR, ahead += NR;
  }
  UNROLL for (int i = 0; i < m; i++) c[i][0] = c0[i], c[i][1] = c1[i];
}

static void multiply_block(index_t m, index_t K, const float *a, const float *b,
                           const float *ahead, vec c[MR][2]) {
  switch (m) {
#define CASE(m) \
  case m: return multiply<(m <= MR ? m : MR)>(K, a, b, ahead, c);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

/* Write a gated tile: silu(gate) * up of outputs [first, first + width). */
static void finish_gated(vec c[MR][2], index_t row, index_t m, index_t first, index_t width,
                         float *y, index_t stride, int mode) {
  for (index_t i = 0; i < m; i++) {
    vec gate = c[i][0], value = gate / (all(1.0f) + exponential(-gate)) * c[i][1];
    if (mode == GATE_TO_BLOCKS)
      for (index_t j = 0; j < width; j++) y[row * stride + (first + j) * m + i] = value[j];
    else
      memcpy(y + (row + i) * stride + first, &value, width * sizeof(float));
  }
}

/* Write the tile of rows [row, row + m) and one panel. y and base have rows of `stride`. */
static void finish(const linear_t &w, index_t panel, vec c[MR][2], index_t row, index_t m,
                   const float *base, float *y, index_t stride, int mode) {
  index_t first = panel * NR, width = w.outputs - first < NR ? w.outputs - first : NR;
  if (w.bias)
    for (index_t i = 0; i < m; i++)
      c[i][0] += load(w.bias + first), c[i][1] += load(w.bias + first + VL);
  if (mode == GATE || mode == GATE_TO_BLOCKS)
    return finish_gated(c, row, m, first / 2, width / 2, y, stride, mode);
  for (index_t i = 0; i < m; i++) {
    index_t at = (row + i) * stride + first;
    if (width == NR) {
      if (mode == ADD) c[i][0] += load(base + at), c[i][1] += load(base + at + VL);
      store(y + at, c[i][0]), store(y + at + VL, c[i][1]);
      continue;
    }
    for (index_t j = 0; j < width; j++)
      y[at + j] = c[i][j / VL][j % VL] + (mode == ADD ? base[at + j] : 0.0f);
  }
}

/* A team's share of y = x W^T, x in blocks of T rows. Ends when all have theirs. */
static void apply(const linear_t &w, const float *x, index_t T, const float *base, float *y,
                  index_t stride, int mode, team_t team) {
  index_t blocks = num_blocks(T), K = w.inputs, count = num_panels(w);
  index_t last = part(count, team.me + 1, team.size);
  for (index_t panel = part(count, team.me, team.size); panel < last; panel++) {
    const float *b = w.weights + panel * K * NR;
    for (index_t block = 0; block < blocks; block++) {
      index_t row = T * block / blocks, m = T * (block + 1) / blocks - row;
      /* Two blocks fetch the next panel, a line of two each; a single one reads ahead. */
      const float *ahead = blocks == 1 ? b + READ_AHEAD * NR : b + (block < 2) * K * NR;
      vec c[MR][2];
      multiply_block(m, K, x + row * K, b, ahead + (block & 1) * VL, c);
      finish(w, panel, c, row, m, base, y, stride, mode);
    }
  }
  meet(team);
}

/* ---- Norms ---- */

/* Of a row, one over the root of its mean square. */
static float inverse_norm(const float *x, index_t size, float eps) {
  vec squares = vec{};
  index_t i = 0;
  for (; i + VL <= size; i += VL) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < size; i++) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / size + eps);
}

/* Where a row's first number lies in blocks of T rows, and its block's size in `m`. */
INLINE index_t place(index_t row, index_t T, index_t K, index_t *m) {
  index_t blocks = num_blocks(T), block = ((row + 1) * blocks - 1) / T;
  index_t start = T * block / blocks;
  *m = T * (block + 1) / blocks - start;
  return start * K + (row - start);
}

/* A team's share of T rows, those named by `which` if given, normed, to blocks. */
static void to_normed_blocks(const float *x, const index_t *which, const float *weight, float eps,
                             index_t T, index_t E, float *y, team_t team) {
  for (index_t row = part(T, team.me, team.size); row < part(T, team.me + 1, team.size); row++) {
    const float *from = x + (which ? which[row] : row) * E;
    float scale = inverse_norm(from, E, eps);
    index_t m, first = place(row, T, E, &m);
    for (index_t k = 0; k < E; k++) y[first + k * m] = from[k] * scale * weight[k];
  }
  meet(team);
}

/* ---- Attention ---- */

/* The rotary embedding; the two numbers that turn together stand side by side. */
INLINE void turn(float *x, const float *turns, index_t D) {
  for (index_t i = 0; i < D; i += 2) {
    float a = x[i], b = x[i + 1], c = turns[i], s = turns[i + 1];
    x[i] = a * c - b * s, x[i + 1] = a * s + b * c;
  }
}

INLINE void norm_head(float *x, const float *weight, float eps, index_t D) {
  if (!weight) return;
  float scale = inverse_norm(x, D, eps);
  for (index_t i = 0; i < D; i++) x[i] *= scale * weight[i];
}

/* Scores of G queries over `count` keys. */
template <int G>
INLINE void score(const float *q, const float *keys, index_t count, index_t D, float scale,
                  float *scores, index_t stride) {
  for (index_t c = 0; c < count; c++, keys += D) {
    vec sums[G] = {};
    index_t d = 0;
    for (; d + VL <= D; d += VL) {
      vec key = load(keys + d);
      UNROLL for (int g = 0; g < G; g++) sums[g] += load(q + g * D + d) * key;
    }
    UNROLL for (int g = 0; g < G; g++) {
      float total = sum(sums[g]);
      for (index_t e = d; e < D; e++) total += q[g * D + e] * keys[e];
      scores[g * stride + c] = total * scale;
    }
  }
}

/* e^(score - largest), in place; returns their sum. */
static float exponentials(float *scores, index_t count) {
  index_t padded = (count + VL - 1) / VL * VL;
  for (index_t c = count; c < padded; c++) scores[c] = -__builtin_inff();
  vec highest = load(scores), total = vec{};
  for (index_t c = VL; c < padded; c += VL) {
    vec s = load(scores + c);
    highest = s > highest ? s : highest;
  }
  vec top = all(largest(highest));
  for (index_t c = 0; c < padded; c += VL) {
    vec e = exponential(load(scores + c) - top);
    store(scores + c, e);
    total += e;
  }
  return sum(total);
}

/* W vectors of the values' mean, for each of G queries, to a row of a block of m. */
template <int G, int W>
INLINE void mix(const float *scores, index_t stride, const float *values, index_t count, index_t D,
                const float *totals, float *to, index_t m) {
  vec sums[G][W] = {};
  for (index_t c = 0; c < count; c++) {
    vec value[W];
    UNROLL for (int w = 0; w < W; w++) value[w] = load(values + c * D + w * VL);
    UNROLL for (int g = 0; g < G; g++) {
      vec p = all(scores[g * stride + c]);
      UNROLL for (int w = 0; w < W; w++) sums[g][w] += p * value[w];
    }
  }
  UNROLL for (int g = 0; g < G; g++) UNROLL for (int w = 0; w < W; w++) {
    vec mean = sums[g][w] / all(totals[g]);
    for (int i = 0; i < VL; i++) to[(g * D + w * VL + i) * m] = mean[i];
  }
}

/* As `mix`, one number of the values at a time. */
static void mix_one(const float *scores, const float *values, index_t count, index_t D, float total,
                    float *to) {
  float result = 0;
  for (index_t c = 0; c < count; c++) result += scores[c] * values[c * D];
  *to = result / total;
}

template <int G>
static void attend(const float *q, const float *keys, const float *values, index_t count,
                   index_t D, float scale, float *scores, index_t stride, float *to, index_t m) {
  float totals[G];
  index_t d = 0;
  score<G>(q, keys, count, D, scale, scores, stride);
  for (int g = 0; g < G; g++) totals[g] = exponentials(scores + g * stride, count);
  for (; d + WIDTH * VL <= D; d += WIDTH * VL)
    mix<G, WIDTH>(scores, stride, values + d, count, D, totals, to + d * m, m);
  for (; d + VL <= D; d += VL)
    mix<G, 1>(scores, stride, values + d, count, D, totals, to + d * m, m);
  for (; d < D; d++)
    for (int g = 0; g < G; g++)
      mix_one(scores + g * stride, values + d, count, D, totals[g], to + (g * D + d) * m);
}

/* Where a row's keys of one head begin in its store; the values are `*values` further on. */
INLINE float *keys_of(const model_t &model, const step_t &step, const row_t &row, index_t layer,
                      index_t head, index_t *values) {
  const store_t &store = step.stores[row.store];
  index_t size = store.columns * model.head_dim;
  *values = store.num_rows * model.kv_heads * size;
  return store.layers[layer] + (row.row * model.kv_heads + head) * size;
}

/* Turn one key-value head of a row, with its queries, and keep its key and value. */
static void keep_head(const model_t &model, const step_t &step, index_t layer, const row_t &row,
                      index_t head, float *qkv) {
  index_t D = model.head_dim, group = model.heads / model.kv_heads, values;
  const layer_t &weights = model.layers[layer];
  const float *turns = model.turns + (row.length - 1) * D;
  float *q = qkv + head * group * D, *k = qkv + (model.heads + head) * D;
  float *keys = keys_of(model, step, row, layer, head, &values) + row.column * D;
  for (index_t g = 0; g < group; g++) {
    norm_head(q + g * D, weights.norm_q, model.eps, D);
    turn(q + g * D, turns, D);
  }
  norm_head(k, weights.norm_k, model.eps, D);
  turn(k, turns, D);
  memcpy(keys, k, D * sizeof(float));
  memcpy(keys + values, k + model.kv_heads * D, D * sizeof(float));
}

static void attend_head(const model_t &model, const step_t &step, index_t layer, const row_t &row,
                        index_t head, const float *qkv, float *scores, index_t stride, float *to,
                        index_t m) {
  index_t D = model.head_dim, group = model.heads / model.kv_heads, behind;
  const float *keys = keys_of(model, step, row, layer, head, &behind);
  keys += (row.column + 1 - row.length) * D;
  for (index_t g = head * group; g < (head + 1) * group; g += MAX_QUERIES) {
    index_t left = (head + 1) * group - g;
    switch (left < MAX_QUERIES ? left : MAX_QUERIES) {
#define CASE(G) \
  case G: \
    attend<G>(qkv + g * D, keys, keys + behind, row.length, D, model.scale, scores, stride, \
              to + g * D * m, m); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
    }
  }
}

/* A team's share of the heads of rows [first, first + T), to blocks. */
static void attention(const model_t &model, const step_t &step, index_t layer, index_t first,
                      index_t T, float *qkv, float *scores, index_t stride, float *to,
                      team_t team) {
  index_t heads = model.kv_heads, width = (model.heads + 2 * heads) * model.head_dim;
  index_t start = part(T * heads, team.me, team.size), m;
  index_t stop = part(T * heads, team.me + 1, team.size);
  const row_t *rows = step.rows + first;
  for (index_t i = start; i < stop; i++)
    keep_head(model, step, layer, rows[i / heads], i % heads, qkv + i / heads * width);
  if (step.has_prompts) meet(team); /* their tokens see each other's keys */
  for (index_t i = start; i < stop; i++) {
    index_t row = i / heads, at = place(row, T, model.heads * model.head_dim, &m);
    attend_head(model, step, layer, rows[row], i % heads, qkv + row * width, scores, stride,
                to + at, m);
  }
  meet(team);
}

/* ---- A step ---- */

/* Rows [first, last) through all layers, by a team. */
static void run_layers(const model_t &model, const step_t &step, const scratch_t &scratch,
                       index_t first, index_t last, float *scores, team_t team) {
  index_t T = last - first, E = model.hidden, stride = scratch.columns + VL;
  index_t width = (model.heads + 2 * model.kv_heads) * model.head_dim;
  float *x = scratch.x + first * E, *blocks = scratch.blocks + first * E;
  float *qkv = scratch.qkv + first * width, *wide = scratch.wide + first * scratch.width;
  for (index_t t = part(T, team.me, team.size); t < part(T, team.me + 1, team.size); t++)
    memcpy(x + t * E, model.embed + step.rows[first + t].token_id * E, E * sizeof(float));
  for (index_t i = 0; i < model.num_layers; i++) {
    const layer_t &layer = model.layers[i];
    to_normed_blocks(x, NULL, layer.norm_in, model.eps, T, E, blocks, team);
    apply(layer.qkv, blocks, T, NULL, qkv, width, STORE, team);
    attention(model, step, i, first, T, qkv, scores, stride, wide, team);
    apply(layer.out, wide, T, x, x, E, ADD, team);
    to_normed_blocks(x, NULL, layer.norm_mlp, model.eps, T, E, blocks, team);
    apply(layer.gate_up, blocks, T, NULL, wide, model.inner, GATE_TO_BLOCKS, team);
    apply(layer.down, wide, T, x, x, E, ADD, team);
  }
}

/* Logits of rows `which` of x, or of all T if it is NULL. */
static void run_head(const model_t &model, const float *x, const index_t *which, index_t T,
                     float *blocks, float *logits, team_t team) {
  to_normed_blocks(x, which, model.norm, model.eps, T, model.hidden, blocks, team);
  apply(model.head, blocks, T, NULL, logits, model.head.outputs, STORE, team);
}

extern "C" {

int fw_panel_width() { return NR; }

/* What the caller must agree on: room for scores, and the sizes of what it fills. */
int fw_agreed(int which) {
  const int agreed[] = {MAX_QUERIES,     VL,              sizeof(linear_t),
                        sizeof(layer_t), sizeof(model_t), sizeof(store_t),
                        sizeof(row_t),   sizeof(step_t),  sizeof(scratch_t)};
  return agreed[which];
}

/* Bring a matrix (N, K) into panels. With `other`, each panel has VL rows of either. */
void fw_pack(const float *matrix, const float *other, index_t N, index_t K, float *to,
             int threads) {
  index_t count = other ? (N + VL - 1) / VL : (N + NR - 1) / NR;
#pragma omp parallel for num_threads(threads)
  for (index_t panel = 0; panel < count; panel++) {
    float *out = to + panel * K * NR;
    for (index_t first = 0; first < K; first += 16) {
      index_t last = first + 16 < K ? first + 16 : K;
      for (int j = 0; j < NR; j++) {
        const float *source = other && j >= VL ? other : matrix;
        index_t row = other ? panel * VL + j % VL : panel * NR + j;
        for (index_t k = first; k < last; k++) out[k * NR + j] = row < N ? source[row * K + k] : 0;
      }
    }
  }
}

/* y = x W^T for x (T, K) and y (T, stride); `blocks` has room for T * K numbers. */
void fw_linear(const linear_t *w, const float *x, index_t T, float *blocks, const float *base,
               float *y, index_t stride, int mode, int threads) {
#pragma omp parallel num_threads(threads)
  {
    team_t team = {omp_get_thread_num(), omp_get_num_threads()};
    for (index_t t = part(T, team.me, team.size); t < part(T, team.me + 1, team.size); t++) {
      index_t m, first = place(t, T, w->inputs, &m);
      for (index_t k = 0; k < w->inputs; k++) blocks[first + k * m] = x[t * w->inputs + k];
    }
    meet(team);
    apply(*w, blocks, T, base, y, stride, mode, team);
  }
}

/* Logits (num_sampled, N). With `apart`, which no step with prompts may be, each thread takes
 * rows of its own through the whole model, and all rows are sampled; else all work together. */
void fw_step(const model_t *model, const step_t *step, const scratch_t *scratch, float *logits,
             int threads, int apart) {
  index_t E = model->hidden;
#pragma omp parallel num_threads(threads)
  {
    int me = omp_get_thread_num(), size = omp_get_num_threads();
    float *scores = scratch->scores + me * MAX_QUERIES * (scratch->columns + VL);
    if (apart) {
      index_t first = part(step->count, me, size), last = part(step->count, me + 1, size);
      run_layers(*model, *step, *scratch, first, last, scores, {0, 1});
      run_head(*model, scratch->x + first * E, NULL, last - first, scratch->blocks + first * E,
               logits + first * model->head.outputs, {0, 1});
    } else {
      team_t team = {me, size};
      run_layers(*model, *step, *scratch, 0, step->count, scores, team);
      run_head(*model, scratch->x, step->sampled, step->num_sampled, scratch->blocks, logits,
               team);
    }
  }
}

}  // extern "C"
