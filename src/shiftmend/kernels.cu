// Soft histograms, their divergence and its slope. What they compute and why it is exact: kernels.py.
//
// A block has COLUMNS units; its threads share their samples out, each thread staying with one unit. A thread keeps its
// bins in a column of shared memory that no other thread touches, so adding needs neither atomics nor a look at all bins.
//
// Given when compiled: TOTAL bins, the WINDOW of bins on either side of a value's own that get a share, COLUMNS (a power
// of two up to 32), WARPS in a block, values AHEAD that a thread loads at once, and the type of the values: FLOAT32,
// BFLOAT16 or FLOAT16.

#define INNER (TOTAL - 2)
#define LANES 32
#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * LANES)
#define STRIDE (WARPS * LANES / COLUMNS)  // threads that share a unit's samples
#if WINDOW <= 8
#define OVER_NEIGHBOURS _Pragma("unroll") for (int o = -WINDOW; o <= WINDOW; ++o)
#else
#define OVER_NEIGHBOURS _Pragma("unroll 1") for (int o = -WINDOW; o <= WINDOW; ++o)
#endif

#if defined(FLOAT32)
typedef float Value;
__device__ float read(Value value) { return value; }
__device__ Value written(float value) { return value; }
#elif defined(BFLOAT16)
typedef unsigned short Value;
__device__ float read(Value value) { return __uint_as_float((unsigned)value << 16); }
__device__ Value written(float value) {
  unsigned bits = __float_as_uint(value);
  if (value != value) return (Value)((bits >> 16) | 0x40);  // rounding must not make an infinity of a NaN
  return (Value)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#elif defined(FLOAT16)
typedef unsigned short Value;
__device__ float read(Value value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
  return result;
}
__device__ Value written(float value) {
  Value result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
}
#endif

// A value on the scale of the bins: its own bin, its distance from the middle of that bin (in bins), and one over the
// sum of all weights. A NaN counts as in bin 0 and makes the sum one, which is how it comes out.
struct Place {
  int bin;
  float off;
  float share;
};

// Weight of the bin `o` further up, with that of the own bin 1: exp(o z - o^2 s / 2), where s is the width of a bin and
// z the distance from its middle, both in temperatures. `sharp` is s in powers of two. Never above 1.
__device__ __forceinline__ float weight(const Place& place, int o, float sharp) {
  int bin = place.bin + o;
  return bin < 0 || bin >= TOTAL ? 0.f : o == 0 ? 1.f : exp2f((place.off - 0.5f * o) * o * sharp);
}

__device__ __forceinline__ Place placed(float value, float low, float scale, float sharp) {
  const float whole = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded, and stands in its lowest bits
  float position = (value - low) * scale * INNER;
  // of a value on an edge either bin will do
  float shifted = fminf(fmaxf(position + 0.5f, 0.f), TOTAL - 1.f) + whole;
  Place place = {__float_as_int(shifted) - __float_as_int(whole), position + 0.5f - (shifted - whole), 1.f};
  float sum = 0.f;
  OVER_NEIGHBOURS sum += weight(place, o, sharp);
  place.share = 1.f / sum;
  return place;
}

__device__ __forceinline__ void add(float value, float low, float scale, float sharp, float* bins) {
  Place place = placed(value, low, scale, sharp);
  float* own = bins + place.bin * LANES;
  OVER_NEIGHBOURS if (place.bin + o >= 0 && place.bin + o < TOTAL)
    own[o * LANES] += weight(place, o, sharp) * place.share;
}

// Adds the shares of a unit's samples `first`, first + STRIDE, ... to a thread's own bins.
__device__ __forceinline__ void add_all(const Value* values, float low, float scale, float sharp, int first, int last,
                                        int units, float* bins) {
  const Value* at = values + (long long)first * units;
  long long step = (long long)STRIDE * units;
  int row = first;
  for (; row + (AHEAD - 1) * STRIDE < last; row += AHEAD * STRIDE) {
    float value[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, at += step) value[i] = read(*at);  // all on their way before the first is needed
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) add(value[i], low, scale, sharp, bins);
  }
  for (; row < last; row += STRIDE, at += step) add(read(*at), low, scale, sharp, bins);
}

// Raising a value by dx raises the share of a bin by share x (bin - mean bin) dx / temperature.
__device__ __forceinline__ float slope(float value, float low, float scale, float sharp, const float* gradient) {
  Place place = placed(value, low, scale, sharp);
  float mean = 0.f, weighted = 0.f, moment = 0.f;
  OVER_NEIGHBOURS if (place.bin + o >= 0 && place.bin + o < TOTAL) {
    float share = weight(place, o, sharp) * place.share, g = gradient[(place.bin + o) * LANES];
    mean += share * o;
    weighted += share * g;
    moment += share * g * o;
  }
  return moment - mean * weighted;
}

struct Kind {
  float forward, backward, epsilon;
};

// One bin's part of the divergence, and the divergence's derivative by the target's count.
__device__ __forceinline__ float term(float source, float target, const Kind& kind, float* gradient) {
  float distance = logf(source + kind.epsilon) - logf(target + kind.epsilon);
  float weight = kind.forward * source - kind.backward * target;
  *gradient = -weight / (target + kind.epsilon) - kind.backward * distance;
  return weight * distance;
}

struct Thread {
  int unit, sample, lane, warp;
  bool known;
};

__device__ __forceinline__ Thread own(int units) {
  int lane = threadIdx.x, warp = threadIdx.y, unit = blockIdx.x * COLUMNS + lane % COLUMNS;
  return {unit, warp * (LANES / COLUMNS) + lane / COLUMNS, lane, warp, unit < units};
}

// What all threads of a unit have in a bin, in a fixed order.
__device__ __forceinline__ float summed(const float (*bins)[TOTAL][LANES], int bin, int column) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp)
#pragma unroll
    for (int lane = 0; lane < LANES; lane += COLUMNS) sum += bins[warp][bin][lane + column];
  return sum;
}

KERNEL counts(const Value* values, const float* low, const float* scale, float* partial, int samples, int units,
              int each, float sharp) {
  __shared__ float bins[WARPS][TOTAL][LANES];
  Thread me = own(units);
  for (int bin = 0; bin < TOTAL; ++bin) bins[me.warp][bin][me.lane] = 0.f;
  int first = blockIdx.y * each, last = min(first + each, samples);
  if (me.known)
    add_all(values + me.unit, low[me.unit], scale[me.unit], sharp, first + me.sample, last, units,
            &bins[me.warp][0][me.lane]);
  __syncthreads();
  if (!me.known) return;
  for (int bin = me.sample; bin < TOTAL; bin += STRIDE)
    partial[((long long)blockIdx.y * TOTAL + bin) * units + me.unit] = summed(bins, bin, me.lane % COLUMNS);
}

// Sums of `counts`, in a fixed order, and what follows from them for each unit. Without a source, the counts alone.
KERNEL settle(const float* partial, const float* scale, const float* source, float* target, float* result,
              float* gradient, int samples, int units, int splits, float forward, float backward, float epsilon) {
  __shared__ float parts[STRIDE][COLUMNS];
  Kind kind = {forward, backward, epsilon};
  Thread me = own(units);
  float divergence = 0.f;
  for (int bin = me.sample; bin < TOTAL && me.known; bin += STRIDE) {
    float sum = 0.f, slope = 0.f;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) sum += partial[((long long)split * TOTAL + bin) * units + me.unit];
    sum /= samples;
    if (source == nullptr) {
      target[me.unit * TOTAL + bin] = sum;
    } else {
      if (scale[me.unit] > 0.f) divergence += term(source[me.unit * TOTAL + bin], sum, kind, &slope);
      gradient[me.unit * TOTAL + bin] = slope;
    }
  }
  if (source == nullptr) return;
  parts[me.sample][me.lane % COLUMNS] = divergence;
  __syncthreads();
  if (me.sample > 0 || !me.known) return;
  for (int other = 1; other < min(STRIDE, TOTAL); ++other) divergence += parts[other][me.lane % COLUMNS];
  result[me.unit] = divergence;
}

// The derivative by each value, from that by the normalised counts, times `upstream` of its unit where there is one.
KERNEL slopes(const Value* values, const float* low, const float* scale, const float* gradient, const float* upstream,
              Value* result, int samples, int units, int each, float sharp, float sharpness) {
  __shared__ float table[TOTAL][LANES];
  Thread me = own(units);
  for (int bin = me.warp; bin < TOTAL; bin += WARPS)
    table[bin][me.lane] = me.known ? gradient[me.unit * TOTAL + bin] : 0.f;
  __syncthreads();
  if (!me.known) return;
  float at = low[me.unit], by = scale[me.unit];
  float factor = by * sharpness / samples * (upstream == nullptr ? 1.f : upstream[me.unit]);
  int first = blockIdx.y * each, last = min(first + each, samples);
  long long place = (long long)(first + me.sample) * units + me.unit, step = (long long)STRIDE * units;
#pragma unroll 4
  for (int row = first + me.sample; row < last; row += STRIDE, place += step)
    result[place] = written(factor * slope(read(values[place]), at, by, sharp, &table[0][me.lane]));
}

// Histogram, divergence and slopes of some units with all of their samples in one go.
KERNEL alone(const Value* values, const float* low, const float* scale, const float* source, float* result, Value* out,
             int samples, int units, float sharp, float sharpness, float forward, float backward, float epsilon) {
  __shared__ float bins[WARPS][TOTAL][LANES];
  __shared__ float parts[STRIDE][COLUMNS];
  Kind kind = {forward, backward, epsilon};
  Thread me = own(units);
  float at = me.known ? low[me.unit] : 0.f, by = me.known ? scale[me.unit] : 0.f;
  for (int bin = 0; bin < TOTAL; ++bin) bins[me.warp][bin][me.lane] = 0.f;
  if (me.known) add_all(values + me.unit, at, by, sharp, me.sample, samples, units, &bins[me.warp][0][me.lane]);
  __syncthreads();
  int column = me.lane % COLUMNS;
  float divergence = 0.f;
  for (int bin = me.sample; bin < TOTAL; bin += STRIDE) {
    float sum = summed(bins, bin, column), slope = 0.f;
    if (by > 0.f) divergence += term(source[me.unit * TOTAL + bin], sum / samples, kind, &slope);
    bins[0][bin][column] = slope;  // which no thread but this one reads before the next barrier
  }
  parts[me.sample][column] = divergence;
  __syncthreads();
  if (!me.known) return;
  if (me.sample == 0) {
    for (int other = 1; other < min(STRIDE, TOTAL); ++other) divergence += parts[other][column];
    result[me.unit] = divergence;
  }
  float factor = by * sharpness / samples;
  long long place = (long long)me.sample * units + me.unit, step = (long long)STRIDE * units;
#pragma unroll 4
  for (int row = me.sample; row < samples; row += STRIDE, place += step)
    out[place] = written(factor * slope(read(values[place]), at, by, sharp, &bins[0][0][column]));
}
