// Soft histograms, their divergence from the source, and its gradient. kernels.py derives the formulas.
//
// A block has COLUMNS units. Its threads divide the samples among them; each thread stays with one unit. A thread keeps
// its bins in a column of shared memory that no other thread touches, so adding needs no atomics, and no pass over all
// bins.
//
// Macros set by the compiler's options: TOTAL bins; WINDOW, the bins on either side of a cut that get a share of a
// value near it; COLUMNS, a power of two up to 32; WARPS in a block; AHEAD, the values that a thread loads at once; and the
// type of the values, FLOAT32 or BFLOAT16.

#define INNER (TOTAL - 2)
#define LANES 32
#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * LANES)
#define STRIDE (WARPS * LANES / COLUMNS)  // threads that share a unit's samples
#if WINDOW <= 8
#define OVER_NEIGHBOURS _Pragma("unroll") for (int i = 1 - WINDOW; i <= WINDOW; ++i)
#else
#define OVER_NEIGHBOURS _Pragma("unroll 1") for (int i = 1 - WINDOW; i <= WINDOW; ++i)
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
#endif

// Constants of a unit. `sharp` is s, the width of a bin in temperatures, as an exponent of two.
struct Unit {
  float low, scale, sharp;
#if WINDOW <= 8
  float fade[WINDOW + 1];  // exp(-n (n - 1) s / 2)
#endif
};

__device__ __forceinline__ Unit unit_of(float low, float scale, float sharp) {
  Unit unit = {low, scale, sharp};
#if WINDOW <= 8
#pragma unroll
  for (int n = 0; n <= WINDOW; ++n) unit.fade[n] = n < 2 ? 1.f : exp2f(-0.5f * n * (n - 1) * sharp);
#endif
  return unit;
}

// A value described by the cut next to it, which lies between the bins `cut` and `cut` + 1.
struct Place {
  int cut;
  float away;  // from the cut, in temperatures, as an exponent of two
  float up, down;  // two to the power of `away`, and one over it
  float share;  // of bin `cut`: one over the sum of all weights
};

__device__ __forceinline__ bool exists(const Place& place, int i) {
  return (i >= 0 || place.cut + i >= 0) && (i <= 1 || place.cut + i < TOTAL);
}

// Returns the weight of bin `cut` + i, where bin `cut` has 1: exp(i t - i (i - 1) s / 2), t the distance from the cut.
__device__ __forceinline__ float weight(const Unit& unit, const Place& place, int i) {
#if WINDOW <= 8
  float weight = i > 0 ? unit.fade[i] : unit.fade[1 - i];
#pragma unroll
  for (int n = 0; n < (i > 0 ? i : -i); ++n) weight *= i > 0 ? place.up : place.down;
#else
  float weight = exp2f(i * place.away - 0.5f * i * (i - 1) * unit.sharp);
#endif
  return exists(place, i) ? weight : 0.f;
}

__device__ __forceinline__ Place placed(const Unit& unit, float value) {
  const float whole = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded, and stands in its lowest bits
  const float most = 100.f;  // beyond, nothing is on the other side of the cut; further still, powers overflow
  float position = (value - unit.low) * unit.scale * INNER;
  float shifted = fminf(fmaxf(position, 0.f), (float)INNER) + whole;
  float away = (position - (shifted - whole)) * unit.sharp;
  away = away > most ? most : away;
  away = away < -most ? -most : away;  // a NaN stays one, and comes out
  Place place = {__float_as_int(shifted) - __float_as_int(whole), away, exp2f(away), exp2f(-away), 1.f};
  float sum = 0.f;
  OVER_NEIGHBOURS sum += weight(unit, place, i);
  place.share = 1.f / sum;
  return place;
}

__device__ __forceinline__ void add(const Unit& unit, float value, float* bins) {
  Place place = placed(unit, value);
  float* own = bins + place.cut * LANES;
  OVER_NEIGHBOURS if (exists(place, i)) own[i * LANES] += weight(unit, place, i) * place.share;
}

// Adds the shares of a unit's samples `first`, first + STRIDE, ... to a thread's own bins.
__device__ __forceinline__ void add_all(const Unit& unit, const Value* values, int first, int last, int units,
                                        float* bins) {
  const Value* at = values + (long long)first * units;
  long long step = (long long)STRIDE * units;
  int row = first;
  for (; row + (AHEAD - 1) * STRIDE < last; row += AHEAD * STRIDE) {
    float value[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; ++n, at += step) value[n] = read(*at);  // all on their way before the first is needed
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) add(unit, value[n], bins);
  }
  for (; row < last; row += STRIDE, at += step) add(unit, read(*at), bins);
}

// Returns the derivative by a value, times the temperature: d share / dx = share x (bin - mean bin) / temperature.
__device__ __forceinline__ float derivative(const Unit& unit, float value, const float* gradient) {
  Place place = placed(unit, value);
  float mean = 0.f, sum = 0.f;
  OVER_NEIGHBOURS mean += weight(unit, place, i) * place.share * i;
  OVER_NEIGHBOURS if (exists(place, i))
    sum += weight(unit, place, i) * place.share * (i - mean) * gradient[(place.cut + i) * LANES];
  return sum;
}

struct Kind {
  float forward, backward, epsilon;
};

// Returns the part of one bin in the divergence; sets the derivative of the divergence by the target's count.
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

// Sums a bin over all threads of a unit, in a fixed order.
__device__ __forceinline__ float summed(const float (*bins)[TOTAL][LANES], int bin, int column) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp)
#pragma unroll
    for (int lane = 0; lane < LANES; lane += COLUMNS) sum += bins[warp][bin][lane + column];
  return sum;
}

KERNEL partial_counts(const Value* values, const float* low, const float* scale, float* partial, int samples,
                      int units, int each, float sharp) {
  __shared__ float bins[WARPS][TOTAL][LANES];
  Thread me = own(units);
  for (int bin = 0; bin < TOTAL; ++bin) bins[me.warp][bin][me.lane] = 0.f;
  int first = blockIdx.y * each, last = min(first + each, samples);
  if (me.known)
    add_all(unit_of(low[me.unit], scale[me.unit], sharp), values + me.unit, first + me.sample, last, units,
            &bins[me.warp][0][me.lane]);
  __syncthreads();
  if (!me.known) return;
  for (int bin = me.sample; bin < TOTAL; bin += STRIDE)
    partial[((long long)blockIdx.y * TOTAL + bin) * units + me.unit] = summed(bins, bin, me.lane % COLUMNS);
}

// Sums the results of `partial_counts` in a fixed order. Writes normalised counts to `target` if `source` is null, else
// the divergence of each unit and its derivative by the counts.
KERNEL finish(const float* partial, const float* scale, const float* source, float* target, float* result,
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

// Computes the derivative by each value from the one by the normalised counts, times `upstream` of its unit if given.
KERNEL gradients(const Value* values, const float* low, const float* scale, const float* gradient,
                 const float* upstream, Value* result, int samples, int units, int each, float sharp,
                 float sharpness) {
  __shared__ float table[TOTAL][LANES];
  Thread me = own(units);
  for (int bin = me.warp; bin < TOTAL; bin += WARPS)
    table[bin][me.lane] = me.known ? gradient[me.unit * TOTAL + bin] : 0.f;
  __syncthreads();
  if (!me.known) return;
  Unit unit = unit_of(low[me.unit], scale[me.unit], sharp);
  float factor = unit.scale * sharpness / samples * (upstream == nullptr ? 1.f : upstream[me.unit]);
  int first = blockIdx.y * each, last = min(first + each, samples);
  long long place = (long long)(first + me.sample) * units + me.unit, step = (long long)STRIDE * units;
#pragma unroll 4
  for (int row = first + me.sample; row < last; row += STRIDE, place += step)
    result[place] = written(factor * derivative(unit, read(values[place]), &table[0][me.lane]));
}

// Computes histogram, divergence and gradient of some units, with all of their samples in one block.
KERNEL fused(const Value* values, const float* low, const float* scale, const float* source, float* result, Value* out,
             int samples, int units, float sharp, float sharpness, float forward, float backward, float epsilon) {
  __shared__ float bins[WARPS][TOTAL][LANES];
  __shared__ float parts[STRIDE][COLUMNS];
  Kind kind = {forward, backward, epsilon};
  Thread me = own(units);
  Unit unit = me.known ? unit_of(low[me.unit], scale[me.unit], sharp) : unit_of(0.f, 0.f, sharp);
  for (int bin = 0; bin < TOTAL; ++bin) bins[me.warp][bin][me.lane] = 0.f;
  if (me.known) add_all(unit, values + me.unit, me.sample, samples, units, &bins[me.warp][0][me.lane]);
  __syncthreads();
  int column = me.lane % COLUMNS;
  float divergence = 0.f;
  for (int bin = me.sample; bin < TOTAL; bin += STRIDE) {
    float sum = summed(bins, bin, column), slope = 0.f;
    if (unit.scale > 0.f) divergence += term(source[me.unit * TOTAL + bin], sum / samples, kind, &slope);
    bins[0][bin][column] = slope;  // no other thread reads it before the next barrier
  }
  parts[me.sample][column] = divergence;
  __syncthreads();
  if (!me.known) return;
  if (me.sample == 0) {
    for (int other = 1; other < min(STRIDE, TOTAL); ++other) divergence += parts[other][column];
    result[me.unit] = divergence;
  }
  float factor = unit.scale * sharpness / samples;
  long long place = (long long)me.sample * units + me.unit, step = (long long)STRIDE * units;
#pragma unroll 4
  for (int row = me.sample; row < samples; row += STRIDE, place += step)
    out[place] = written(factor * derivative(unit, read(values[place]), &bins[0][0][column]));
}
