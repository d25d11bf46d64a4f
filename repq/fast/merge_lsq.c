/* The weight side of a re-parametrized block in one pass.

   A block is a sum of parts, each a convolution or the identity with a batch norm after it. For one output
   channel at a time these functions compute the statistics of the norms, fold them, add up the parts and
   quantize the sum with LSQ (`forward`), and the gradients of all of that (`backward`). The page
   "Merging in one pass" of the documentation derives the equations and explains each function.

   repq/fast/native.py compiles this file once for each type of number:
     -DREAL=float  -DRINT=rintf -DSQRT=sqrtf
     -DREAL=double -DRINT=rint  -DSQRT=sqrt

   The letters of the equations name the indices:
     o   output channel
     i   input channel, counted within its group; there are I in a group and C in all groups
     b   part of the block (branch); there are P
     k   tap of the merged kernel; there are K
     t   tap of a part; there are T
   The gradient of x is called grad_x. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#define RESTRICT __restrict__

typedef int64_t Int;

/* As many numbers as fit into a line of the cache. It may start at any number of a tensor. */
#define LINE_BYTES 64
typedef REAL Line __attribute__((vector_size(LINE_BYTES), aligned(sizeof(REAL)), may_alias));
#define LANES (LINE_BYTES/(Int)sizeof(REAL))
#define LINE(pointer) (*(Line*)(pointer))


/* ---- What Python passes: the same fields in the same order as in native.py ---- */

/* A convolution or the identity, with its norm. Pointers to what is not there are null. */
typedef struct {
  Int taps;
  Int channels_last;         /* the weight is laid out (out, taps, in), else (out, in, taps) */
  Int mean_per_tap;          /* input_mean has a row for each tap of the merged kernel, else a single row */
  Int statistics_given;      /* mean and var are inputs, else `forward` writes them */
  REAL eps;
  const REAL *weight;        /* null: the identity */
  const REAL *gamma;         /* (out) */
  const REAL *beta;          /* (out) */
  const REAL *input_mean;    /* (in of all groups) or (taps of the merged kernel, in of all groups) */
  const REAL *var_ratio;     /* (out) true variance over estimated variance; null: 1 */
  REAL *mean;                /* (out) */
  REAL *var;                 /* (out) */
  REAL *grad_weight;         /* laid out as the weight */
  REAL *grad_gamma;          /* (out) */
  REAL *grad_input_mean;     /* as input_mean, one copy for each thread */
  REAL *grad_mean;           /* (out), if the statistics are given */
  REAL *grad_var;            /* (out), if the statistics are given */
} Part;

/* A block: shapes, the quantizer, and its parts. The grad_ fields, here and above, are for `backward`. */
typedef struct {
  Int out_channels;
  Int in_channels;           /* of one group */
  Int taps;                  /* of the merged kernel */
  Int groups;
  Int n_parts;
  Int threads;
  Int channels_last;         /* the merged kernel is laid out (out, taps, in), else (out, in, taps) */
  REAL low;                  /* smallest and largest integer of the quantizer */
  REAL high;
  const Int *part_taps;      /* (parts, taps): which tap of a part meets a tap of the merged kernel, or -1 */
  const REAL *input_var;     /* (in of all groups) */
  const REAL *step;          /* (out) */
  REAL *grad_input_var;      /* as input_var, one copy for each thread */
  REAL *grad_step;           /* (out) */
  Part *parts;
} Block;

/* The fields with their places, so that Python can check that both sides mean the same bytes. */
typedef struct { const char *name; Int offset, size; } Field;
#define FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(((type*)0)->field)}
const Field layout[] = {
  {"Part", 0, sizeof(Part)},
  FIELD(Part, taps), FIELD(Part, channels_last), FIELD(Part, mean_per_tap), FIELD(Part, statistics_given),
  FIELD(Part, eps), FIELD(Part, weight), FIELD(Part, gamma), FIELD(Part, beta), FIELD(Part, input_mean),
  FIELD(Part, var_ratio), FIELD(Part, mean), FIELD(Part, var), FIELD(Part, grad_weight),
  FIELD(Part, grad_gamma), FIELD(Part, grad_input_mean), FIELD(Part, grad_mean), FIELD(Part, grad_var),
  {"Block", 0, sizeof(Block)},
  FIELD(Block, out_channels), FIELD(Block, in_channels), FIELD(Block, taps), FIELD(Block, groups),
  FIELD(Block, n_parts), FIELD(Block, threads), FIELD(Block, channels_last), FIELD(Block, low),
  FIELD(Block, high), FIELD(Block, part_taps), FIELD(Block, input_var), FIELD(Block, step),
  FIELD(Block, grad_input_var), FIELD(Block, grad_step), FIELD(Block, parts),
  {0}
};


/* ---- Where things are ---- */

/* The first input channel that output channel o sees, counted over all groups. */
static inline Int first_input(const Block *block, Int o)
{
  return o/(block->out_channels/block->groups)*block->in_channels;
}

/* For each tap of a part the tap of the merged kernel that it meets. */
static inline void find_merged_taps(const Block *block, const Int *part_taps, Int *merged_taps)
{
  for (Int k = 0; k < block->taps; k++)
    if (part_taps[k] >= 0) merged_taps[part_taps[k]] = k;
}

/* Numbers that `find_rows` needs room for. */
static Int transposed_size(const Block *block)
{
  Int n = 0;
  for (Int b = 0; b < block->n_parts; b++)
    if (!block->parts[b].channels_last) n += block->parts[b].taps*block->in_channels;
  return n;
}

/* The weights of output channel o as (taps, in), one row of numbers for each part, null for an identity.
   Weights in another layout are transposed into `room`. */
static void find_rows(const Block *block, Int o, REAL *room, const REAL **rows)
{
  Int I = block->in_channels;
  for (Int b = 0; b < block->n_parts; b++) {
    const Part *part = block->parts + b;
    const REAL *RESTRICT weight = part->weight ? part->weight + o*part->taps*I : 0;
    rows[b] = weight;
    if (!weight || part->channels_last) continue;
    for (Int t = 0; t < part->taps; t++)
      for (Int i = 0; i < I; i++) room[t*I + i] = weight[i*part->taps + t];
    rows[b] = room;
    room += part->taps*I;
  }
}

/* The memory of one thread: n numbers with the room for `find_rows` after them, and a row for each part.
   Without memory `numbers` is null, and `failed`, which all threads share, is set. */
typedef struct {
  REAL *numbers;
  const REAL **rows;
} Memory;

static Memory allocate(const Block *block, Int n, int *failed)
{
  Memory memory;
  memory.numbers = malloc((n + transposed_size(block))*sizeof(REAL));
  memory.rows = malloc(block->n_parts*sizeof(REAL*));
  if (memory.numbers && memory.rows) return memory;
  free(memory.numbers);
  free(memory.rows);
  #pragma omp atomic write
  *failed = 1;
  return (Memory){0};
}

static inline void prefetch(const REAL *start, Int n)
{
  for (Int i = 0; i < n; i += LANES) __builtin_prefetch(start + i, 0, 2);
}


/* ---- Statistics ---- */

static inline REAL sum_of(Line line)
{
  REAL sum = 0;
  #pragma omp simd reduction(+:sum)
  for (Int i = 0; i < LANES; i++) sum += line[i];
  return sum;
}

/* Mean and variance of one part in output channel o, estimated from those of the input. A line of input
   channels goes through all taps while its sums stay in registers; channels that do not fill a line follow.
   The same line of the next output channel is prefetched. */
static void measure(const Block *block, const Part *part, const Int *part_taps, Int o, const REAL *row)
{
  Int I = block->in_channels, C = I*block->groups, c = first_input(block, o), T = part->taps, i = 0;
  Int mean_stride = part->mean_per_tap*C;      /* from one row of input_mean to the next */
  Int merged_taps[T];
  find_merged_taps(block, part_taps, merged_taps);
  if (!row) {                                  /* the output of an identity is its input */
    part->mean[o] = part->input_mean[mean_stride*merged_taps[0] + o];
    part->var[o] = part->var_ratio ? block->input_var[o]*part->var_ratio[o] : block->input_var[o];
    return;
  }
  const REAL *input_mean = part->input_mean + c, *input_var = block->input_var + c;
  Line means = {0}, vars = {0};
  for (; i + LANES <= I; i += LANES) {
    Line sum = {0}, squares = {0};
    for (Int t = 0; t < T; t++) {
      Line w = LINE(row + t*I + i);
      if (mean_stride) sum += w*LINE(input_mean + mean_stride*merged_taps[t] + i);
      else sum += w;
      squares += w*w;
      __builtin_prefetch(row + (T + t)*I + i, 0, 2);
    }
    if (mean_stride) means += sum;
    else means += sum*LINE(input_mean + i);
    vars += squares*LINE(input_var + i);
  }
  REAL mean = sum_of(means), var = sum_of(vars);
  for (; i < I; i++)
    for (Int t = 0; t < T; t++) {
      REAL w = row[t*I + i];
      mean += w*input_mean[mean_stride*merged_taps[t] + i];
      var += w*w*input_var[i];
    }
  part->mean[o] = mean;
  part->var[o] = part->var_ratio ? var*part->var_ratio[o] : var;
}


/* ---- Merging ---- */

/* merged = factors[0]*rows[0] + ... for up to three rows of n numbers. `merged` may be one of the rows. */
static void add_rows(REAL *merged, Int n, const REAL **rows, const REAL *factors, Int n_rows)
{
  const REAL *w0 = rows[0], *w1 = rows[1], *w2 = rows[2];
  REAL f0 = factors[0], f1 = factors[1], f2 = factors[2];
  if (n_rows == 0) memset(merged, 0, n*sizeof(REAL));
  else if (n_rows == 1) {
    #pragma omp simd
    for (Int i = 0; i < n; i++) merged[i] = f0*w0[i];
  } else if (n_rows == 2) {
    #pragma omp simd
    for (Int i = 0; i < n; i++) merged[i] = f0*w0[i] + f1*w1[i];
  } else {
    #pragma omp simd
    for (Int i = 0; i < n; i++) merged[i] = f0*w0[i] + f1*w1[i] + f2*w2[i];
  }
}

/* Tap k of the merged kernel for all input channels. Parts are added three at a time: the sum so far then
   counts as one of the next three. Rows that `measure` has not prefetched are prefetched here. */
static void merge_tap(const Block *block, Int o, Int k, const REAL *factors, const REAL **rows, REAL *merged)
{
  Int I = block->in_channels, n = 0;
  const REAL *chosen[3] = {0};
  REAL factor[3] = {0}, identity = 0;
  for (Int b = 0; b < block->n_parts; b++) {
    const Part *part = block->parts + b;
    Int t = block->part_taps[b*block->taps + k];
    if (t < 0) continue;
    if (!rows[b]) {
      identity += factors[b];
      continue;
    }
    if (n == 3) {
      add_rows(merged, I, chosen, factor, n);
      chosen[0] = merged;
      factor[0] = n = 1;
    }
    chosen[n] = rows[b] + t*I;
    factor[n++] = factors[b];
    if (part->statistics_given && part->channels_last && o + 1 < block->out_channels)
      prefetch(rows[b] + (t + part->taps)*I, I);
  }
  add_rows(merged, I, chosen, factor, n);
  merged[o % I] += identity;
}


/* ---- Forward ---- */

/* Writes the quantized merged kernel, its bias, and the statistics that were not given.
   Returns 0, or 1 if a thread could not get its memory: then the results are not complete. */
int forward(const Block *block, REAL *quantized, REAL *bias)
{
  Int I = block->in_channels, K = block->taps, P = block->n_parts;
  REAL low = block->low, high = block->high;
  int failed = 0;
  #pragma omp parallel num_threads(block->threads) if(block->threads > 1)
  {
    Memory memory = allocate(block, I + P, &failed);
    #pragma omp for schedule(static)
    for (Int o = 0; o < block->out_channels; o++) {
      if (!memory.numbers) continue;           /* OpenMP wants every thread to reach this loop */
      REAL *merged = memory.numbers, *factors = merged + I, *room = factors + P;
      const REAL **rows = memory.rows;
      REAL sum = 0, step = block->step[o];
      find_rows(block, o, room, rows);
      for (Int b = 0; b < P; b++) {
        const Part *part = block->parts + b;
        if (!part->statistics_given) measure(block, part, block->part_taps + b*K, o, rows[b]);
        factors[b] = part->gamma[o]/SQRT(part->var[o] + part->eps);
        sum += part->beta[o] - part->mean[o]*factors[b];
      }
      bias[o] = sum;
      for (Int k = 0; k < K; k++) {
        merge_tap(block, o, k, factors, rows, merged);
        REAL *to = block->channels_last ? quantized + (o*K + k)*I : merged;
        #pragma omp simd
        for (Int i = 0; i < I; i++) {
          REAL v = merged[i]/step;
          v = v < low ? low : v;
          v = v > high ? high : v;
          to[i] = RINT(v)*step;
        }
        if (!block->channels_last)
          for (Int i = 0; i < I; i++) quantized[(o*I + i)*K + k] = merged[i];
      }
    }
    free(memory.numbers);
    free(memory.rows);
  }
  return failed;
}


/* ---- Backward: the quantizer ---- */

/* The loop over the input channels of one tap: MERGED is the merged weight, MULTIPLY adds to the products of
   its gradient with the weights of the parts. */
#define LOOP_OVER_INPUTS(MERGED, MULTIPLY) { \
  _Pragma("omp simd reduction(+:grad_step,dot0,dot1,dot2)") \
  for (Int i = 0; i < I; i++) { \
    REAL v = (MERGED)/step, q = v < low ? low : v; \
    q = q > high ? high : q; \
    REAL inside = ((v >= low) & (v <= high)) ? grad_quantized[i] : (REAL)0; \
    grad_merged[i] = inside; \
    grad_step += grad_quantized[i]*(RINT(q) - q) + (grad_quantized[i] - inside)*q; \
    MULTIPLY; \
  } }

/* The gradient of one tap of the merged kernel, and its products with the rows of n parts. Up to three rows
   are merged on the way; with n = 0, rows[0] is merged already. Returns the gradient of the step. */
static REAL tap_gradient(const Block *block, Int o, Int n, const REAL **rows, const REAL *factors,
                         const REAL *RESTRICT grad_quantized, REAL *RESTRICT grad_merged, REAL *dots)
{
  Int I = block->in_channels;
  const REAL *RESTRICT w0 = rows[0], *RESTRICT w1 = rows[1], *RESTRICT w2 = rows[2];
  REAL f0 = factors[0], f1 = factors[1], f2 = factors[2];
  REAL low = block->low, high = block->high, step = block->step[o];
  REAL grad_step = 0, dot0 = 0, dot1 = 0, dot2 = 0;
  if (n == 0)
    LOOP_OVER_INPUTS(w0[i], )
  else if (n == 1)
    LOOP_OVER_INPUTS(f0*w0[i], dot0 += inside*w0[i])
  else if (n == 2)
    LOOP_OVER_INPUTS(f0*w0[i] + f1*w1[i], (dot0 += inside*w0[i], dot1 += inside*w1[i]))
  else
    LOOP_OVER_INPUTS(f0*w0[i] + f1*w1[i] + f2*w2[i],
                     (dot0 += inside*w0[i], dot1 += inside*w1[i], dot2 += inside*w2[i]))
  dots[0] = dot0;
  dots[1] = dot1;
  dots[2] = dot2;
  return grad_step;
}

/* Products of the gradient of tap k with the weights of all parts, any number of them. */
static void dot_products(const Block *block, Int o, Int k, const REAL **rows,
                         const REAL *RESTRICT grad_merged, REAL *dots)
{
  Int I = block->in_channels;
  for (Int b = 0; b < block->n_parts; b++) {
    Int t = block->part_taps[b*block->taps + k];
    if (t < 0) continue;
    if (!rows[b]) {
      dots[b] += grad_merged[o % I];
      continue;
    }
    const REAL *RESTRICT w = rows[b] + t*I;
    REAL sum = 0;
    #pragma omp simd reduction(+:sum)
    for (Int i = 0; i < I; i++) sum += grad_merged[i]*w[i];
    dots[b] += sum;
  }
}

/* For output channel o: the gradient of the merged kernel as (taps, in), and for each part the sum of its
   products with the weights. Returns the gradient of the step. Up to three convolutions that meet in a tap
   are merged and multiplied in one loop; if there are more, or an identity, the tap is merged before it and
   multiplied after it. */
static REAL quantizer_gradient(const Block *block, Int o, const REAL *factors, const REAL **rows,
                               const REAL *grad_quantized, REAL *grad_merged, REAL *merged, REAL *grad_tap,
                               REAL *dots)
{
  Int I = block->in_channels, K = block->taps, P = block->n_parts;
  REAL grad_step = 0;
  for (Int b = 0; b < P; b++) dots[b] = 0;
  for (Int k = 0; k < K; k++) {
    Int n = 0, in_one_loop = 1, part_of[3];
    const REAL *chosen[3] = {merged};
    const REAL *from = block->channels_last ? grad_quantized + (o*K + k)*I : grad_tap;
    REAL factor[3] = {0}, products[3];
    for (Int b = 0; b < P; b++) {
      Int t = block->part_taps[b*K + k];
      if (t < 0) continue;
      if (n == 3 || !rows[b]) {
        in_one_loop = 0;
        break;
      }
      part_of[n] = b;
      factor[n] = factors[b];
      chosen[n++] = rows[b] + t*I;
    }
    if (!in_one_loop || !n) {
      merge_tap(block, o, k, factors, rows, merged);
      chosen[0] = merged;
      n = 0;
    }
    if (!block->channels_last)
      for (Int i = 0; i < I; i++) grad_tap[i] = grad_quantized[(o*I + i)*K + k];
    if (block->channels_last && o + 1 < block->out_channels) prefetch(from + K*I, I);
    grad_step += tap_gradient(block, o, n, chosen, factor, from, grad_merged + k*I, products);
    if (!n) dot_products(block, o, k, rows, grad_merged + k*I, dots);
    for (Int j = 0; j < n; j++) dots[part_of[j]] += products[j];
  }
  return grad_step;
}


/* ---- Backward: one part ---- */

/* Gradients of a convolution whose statistics were estimated and whose input channels fill whole lines. As in
   `measure`, a line goes through all taps while its sums stay in registers. */
static void line_gradient(const Block *block, const Part *part, const Int *part_taps, Int o, REAL factor,
                          REAL grad_mean, REAL grad_var, const REAL *grad_merged, const REAL *row)
{
  Int I = block->in_channels, C = I*block->groups, c = first_input(block, o), T = part->taps;
  Int mean_stride = part->mean_per_tap*C, mean_size = (mean_stride ? block->taps : 1)*C;
  Int merged_taps[T];
  find_merged_taps(block, part_taps, merged_taps);
  REAL *grad_weight = part->grad_weight + o*T*I;
  REAL *grad_input_mean = part->grad_input_mean + THREAD*mean_size + c;
  REAL *grad_input_var = block->grad_input_var + THREAD*C + c;
  const REAL *input_mean = part->input_mean + c, *input_var = block->input_var + c;
  for (Int i = 0; i < I; i += LANES) {
    Line slope = 2*grad_var*LINE(input_var + i), sum = {0}, squares = {0};
    for (Int t = 0; t < T; t++) {
      Int k = merged_taps[t];
      Line w = LINE(row + t*I + i);
      LINE(grad_weight + t*I + i) =
        factor*LINE(grad_merged + k*I + i) + grad_mean*LINE(input_mean + mean_stride*k + i) + slope*w;
      if (mean_stride) LINE(grad_input_mean + mean_stride*k + i) += grad_mean*w;
      else sum += w;
      squares += w*w;
      __builtin_prefetch(row + (T + t)*I + i, 0, 2);
    }
    if (!mean_stride) LINE(grad_input_mean + i) += grad_mean*sum;
    LINE(grad_input_var + i) += grad_var*squares;
  }
}

/* All gradients of one part in output channel o. `dot` is the sum of products from `quantizer_gradient`,
   `room` takes the gradient of a weight that has to be transposed. */
static void part_gradient(const Block *block, const Part *part, const Int *part_taps, Int o, REAL factor,
                          REAL inverse_std, REAL dot, REAL grad_bias, const REAL *grad_merged,
                          const REAL *row, REAL *room)
{
  Int I = block->in_channels, C = I*block->groups, c = first_input(block, o), K = block->taps, T = part->taps;
  Int mean_size = (part->mean_per_tap ? K : 1)*C;
  REAL grad_factor = dot - grad_bias*part->mean[o];
  REAL grad_mean = -grad_bias*factor;
  REAL grad_var = -(REAL).5*grad_factor*factor*inverse_std*inverse_std;
  part->grad_gamma[o] = grad_factor*inverse_std;
  if (part->statistics_given) {
    part->grad_mean[o] = grad_mean;
    part->grad_var[o] = grad_var;
    grad_mean = grad_var = 0;                  /* they do not depend on the weight */
  }
  else if (part->var_ratio) grad_var *= part->var_ratio[o];
  if (row && part->channels_last && !part->statistics_given && I % LANES == 0) {
    line_gradient(block, part, part_taps, o, factor, grad_mean, grad_var, grad_merged, row);
    return;
  }
  for (Int k = 0; k < K; k++) {
    Int t = part_taps[k], mean_at = part->mean_per_tap*k*C + c;
    if (t < 0) continue;
    if (!row) {                                /* an identity: its only tap sees input channel o */
      if (!part->statistics_given) {
        part->grad_input_mean[THREAD*mean_size + mean_at + o - c] += grad_mean;
        block->grad_input_var[THREAD*C + o] += grad_var;
      }
      return;
    }
    const REAL *RESTRICT w = row + t*I, *RESTRICT grad_tap = grad_merged + k*I;
    REAL *RESTRICT to = part->channels_last ? part->grad_weight + (o*T + t)*I : room + t*I;
    if (part->statistics_given)
      for (Int i = 0; i < I; i++) to[i] = factor*grad_tap[i];
    else {
      const REAL *RESTRICT input_mean = part->input_mean + mean_at;
      const REAL *RESTRICT input_var = block->input_var + c;
      REAL *RESTRICT grad_input_mean = part->grad_input_mean + THREAD*mean_size + mean_at;
      REAL *RESTRICT grad_input_var = block->grad_input_var + THREAD*C + c;
      #pragma omp simd
      for (Int i = 0; i < I; i++) {
        REAL x = w[i];
        to[i] = factor*grad_tap[i] + grad_mean*input_mean[i] + 2*grad_var*x*input_var[i];
        grad_input_mean[i] += grad_mean*x;
        grad_input_var[i] += grad_var*x*x;
      }
    }
  }
  if (!part->channels_last)
    for (Int i = 0; i < I; i++)
      for (Int t = 0; t < T; t++) part->grad_weight[(o*I + i)*T + t] = room[t*I + i];
}


/* ---- Backward ---- */

/* Writes all gradients; adds to grad_input_mean and grad_input_var, in the copy of each thread.
   Returns 0, or 1 if a thread could not get its memory: then the gradients are not complete. */
int backward(const Block *block, const REAL *grad_quantized, const REAL *grad_bias)
{
  Int I = block->in_channels, K = block->taps, P = block->n_parts;
  int failed = 0;
  #pragma omp parallel num_threads(block->threads) if(block->threads > 1)
  {
    Memory memory = allocate(block, 2*K*I + 2*I + 3*P, &failed);
    #pragma omp for schedule(static)
    for (Int o = 0; o < block->out_channels; o++) {
      if (!memory.numbers) continue;           /* OpenMP wants every thread to reach this loop */
      const REAL **rows = memory.rows;
      REAL *grad_merged = memory.numbers, *transposed = grad_merged + K*I;
      REAL *merged = transposed + K*I, *grad_tap = merged + I;
      REAL *factors = grad_tap + I, *inverse_std = factors + P, *dots = inverse_std + P, *room = dots + P;
      find_rows(block, o, room, rows);
      for (Int b = 0; b < P; b++) {
        const Part *part = block->parts + b;
        REAL root = SQRT(part->var[o] + part->eps);
        inverse_std[b] = 1/root;
        factors[b] = part->gamma[o]/root;      /* as in the forward pass, to the last bit */
      }
      block->grad_step[o] = quantizer_gradient(block, o, factors, rows, grad_quantized, grad_merged, merged,
                                               grad_tap, dots);
      for (Int b = 0; b < P; b++)
        part_gradient(block, block->parts + b, block->part_taps + b*K, o, factors[b], inverse_std[b], dots[b],
                      grad_bias[o], grad_merged, rows[b], transposed);
    }
    free(memory.numbers);
    free(memory.rows);
  }
  return failed;
}
