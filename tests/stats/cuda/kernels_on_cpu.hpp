// Runs the source of the GPU's kernels on a CPU: a block at a time, each of its threads a thread of the system.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() everyone->arrive_and_wait()

struct Index {
  int x, y;
};
static thread_local Index threadIdx;
static Index blockIdx;
static std::barrier<>* everyone;

template <class To, class From>
To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
#define __float_as_int bits_of<int, float>
#define __float_as_uint bits_of<unsigned, float>
#define __uint_as_float bits_of<float, unsigned>
using std::min;

template <class Kernel>
void on_all_threads(int across, int parts, Kernel kernel) {
  for (blockIdx.y = 0; blockIdx.y < parts; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < across; ++blockIdx.x) {
      std::barrier<> barrier(32 * WARPS);
      everyone = &barrier;
      std::vector<std::thread> threads;
      for (int warp = 0; warp < WARPS; ++warp)
        for (int lane = 0; lane < 32; ++lane)
          threads.emplace_back([=] {
            threadIdx = {lane, warp};
            kernel();
          });
      for (auto& thread : threads) thread.join();
    }
}
