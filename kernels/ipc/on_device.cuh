// Calls of the CUDA runtime on a device of the caller's choice, which leave the calling thread's as it was.
#pragma once

#include <cuda_runtime.h>

namespace antiphon {

class OnDevice {
 public:
  explicit OnDevice(int device) : status_(cudaGetDevice(&before_)) {
    if (status_ == cudaSuccess) status_ = cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int before_ = 0;
  cudaError_t status_;
};

// A failure is returned, and not left behind for the next launch to find.
template <typename Call>
int on(int device, Call call) {
  const OnDevice here(device);
  const cudaError_t status = here.status() == cudaSuccess ? call() : here.status();
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

}  // namespace antiphon
