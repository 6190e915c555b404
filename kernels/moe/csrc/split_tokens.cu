// The split of a small batch's activations where the routing was made elsewhere.

#include "split_tokens.cuh"

namespace antiphon::stream {
namespace {

__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ SplitArguments a) {
  grid_dependency_trigger();
  grid_dependency_wait();
  split_block<1>(a, blockIdx.x);
}

}  // namespace
}  // namespace antiphon::stream

extern "C" int antiphon_moe_split(const void* x, void* activations, float* scale, int tokens, int token_tile,
                                  int overlap, void* stream) {
  using namespace antiphon::stream;
  const SplitArguments a = {static_cast<const __nv_bfloat16*>(x), nullptr, 0.0f,  low_factor(token_tile),
                            static_cast<uint8_t*>(activations),   scale,   tokens};
  return antiphon::launch(split_kernel, dim3(tokens), dim3(kSplitThreads), 0, static_cast<cudaStream_t>(stream),
                          overlap != 0, a);
}
